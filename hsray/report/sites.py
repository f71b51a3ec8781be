"""Statistics of stored states, from a sample of prompts that is read by range: norms, outliers, massive activations.

A massive activation is a value above 100 in magnitude and above 1,000 times the median magnitude at its site, as in
Sun et al. 2024 (arXiv 2402.17762): a handful of channels, often at the first token. Lossy codecs and normalisation
have to be chosen with them in mind.
"""

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from hsray.index import Segments, index_table
from hsray.ledger import Accounting, Ledger
from hsray.reader import PromptStates, Run
from hsray.records import JsonDict, Reopened
from hsray.schema import bytes_per_token
from hsray.site_storage import recorded_storage, stored_selections
from hsray.store import Store

MAX_PROMPTS = 64
MAX_RECORDS = 32
MAX_BYTES = 192 << 20
MAX_TOKENS_PER_PROMPT = 512
TOP_CHANNELS = 5
_THREADS = 8
_MASSIVE_VALUE, _MASSIVE_RATIO = 100.0, 1000.0
# Magnitudes of a site that the median is taken of; all of them would be sorted for seconds.
_MEDIAN_VALUES = 1 << 20


@dataclass(frozen=True, slots=True)
class Channel:
    """One of the channels with the largest magnitudes.

    Attributes:
        channel: 0-based.
        largest: the largest magnitude in it.
        ratio: that over the site's median magnitude.
        tokens: fraction of the sampled tokens whose value there is massive.
        first: how much of those are first tokens of their prompts.
    """

    channel: int
    largest: float
    ratio: float
    tokens: float
    first: float


@dataclass(frozen=True, slots=True)
class SiteSample:
    """One site over the sampled tokens. Norms are L2 norms of a token's state, `[hidden]`.

    Attributes:
        median, largest: of magnitudes of single values.
        norm_first: mean norm at first tokens, None where none is stored; the percentiles are of all other tokens.
        massive: number of channels with a massive activation.
        channels: those with the largest values, largest first.
    """

    name: str
    median: float
    largest: float
    norm_first: float | None
    norm_p1: float
    norm_p50: float
    norm_p99: float
    massive: int
    channels: tuple[Channel, ...]


@dataclass(frozen=True, slots=True)
class Sample:
    """What was looked at: the first `tokens_per_prompt` tokens of `prompts` prompts of `leases` leases; of sites that
    are stored for some tokens only, the first stretch of these. Sites without any are not in `sites`."""

    prompts: int = 0
    tokens: int = 0
    tokens_per_prompt: int = 0
    leases: int = 0
    sites: tuple[SiteSample, ...] = ()


@dataclass(slots=True)
class _Growing:
    """One site while prompts come by: everything that is kept is per channel or per token."""

    norms: list[npt.NDArray[np.float32]] = field(default_factory=list)
    first_norms: list[float] = field(default_factory=list)
    states: list[tuple[int, npt.NDArray[Any]]] = field(default_factory=list)  # with the position of the first one


def sample_states(
    store: Store, storage_options: JsonDict, record: JsonDict, lease_ids: Sequence[str], reopened: Reopened
) -> Sample:
    """Read a sample of what these leases committed.

    Args:
        lease_ids: leases whose resolutions commit something, in plan order; a few are taken, evenly spread.

    Raises:
        HsrayError: a shard is missing or its bytes are not those that were written.
        StoreError: the store refuses or does not answer.
    """
    sites = [site["name"] for site in record["sites"]]
    chosen = [lease_ids[i] for i in _spread(len(lease_ids), MAX_RECORDS)]
    standing = Ledger(store, record["run_id"]).standing(chosen, Accounting(reopened=reopened))
    selections = stored_selections(recorded_storage(record["sites"], store.url))
    table = index_table((shard for resolution in standing for shard in resolution.shards), sites, selections)
    if not table.num_rows:
        return Sample()
    run = Run(store, storage_options, record, False, Segments(table, sites, selections), verify=True)
    per_token = bytes_per_token(len(sites), run.hidden_size, run.dtype)
    positions = _spread(len(run), MAX_PROMPTS)
    most = max(1, min(MAX_TOKENS_PER_PROMPT, MAX_BYTES // (per_token * len(positions))))
    growing = {site: _Growing() for site in sites}
    tokens = 0

    def read(position: int) -> tuple[int, list[tuple[int, npt.NDArray[Any]]]]:
        prompt = run.at(position)
        return min(most, prompt.seq_len), [_first_states(prompt, site, most) for site in sites]

    with ThreadPoolExecutor(_THREADS, "hsray-sample") as pool:
        for length, found in pool.map(read, positions):
            tokens += length
            for site, (start, states) in zip(sites, found, strict=True):
                _take(growing[site], start, states)
    described = [_describe(site, growing.pop(site)) for site in sites if growing[site].states]
    return Sample(len(positions), tokens, most, len(chosen), tuple(described))


def _spread(count: int, most: int) -> list[int]:
    """At most so many of `count` positions, evenly spread, the first one among them."""
    return sorted({int(i) for i in np.linspace(0, count - 1, min(count, most))}) if count else []


def _first_states(prompt: PromptStates, site: str, most: int) -> tuple[int, npt.NDArray[Any]]:
    """The first unbroken stretch of tokens that have a state, at most so many: where it begins, and the states."""
    positions = prompt.positions(site)[:most]
    if not len(positions):
        return 0, np.zeros((0, prompt.run.hidden_size))
    start = int(positions[0])
    length = int(np.argmin(np.append(positions - start == np.arange(len(positions)), False)))
    return start, prompt.read(site, start, start + length)


def _take(site: _Growing, start: int, states: npt.NDArray[Any]) -> None:
    if not len(states):
        return
    norms = np.sqrt(np.square(states.astype(np.float32)).sum(axis=1))
    if start == 0:
        site.first_norms.append(float(norms[0]))
        norms = norms[1:]
    site.norms.append(norms)
    site.states.append((start, states))


def _describe(name: str, site: _Growing) -> SiteSample:
    states = site.states
    hidden = states[0][1].shape[1]
    stride = max(1, sum(s.size for _, s in states) // _MEDIAN_VALUES)
    magnitudes = np.concatenate([np.abs(s.reshape(-1)[::stride].astype(np.float32)) for _, s in states])
    median = float(np.median(magnitudes))
    bound = max(_MASSIVE_VALUE, _MASSIVE_RATIO * median)
    largest = np.zeros(hidden, np.float32)
    hits, first_hits = np.zeros(hidden, np.int64), np.zeros(hidden, np.int64)
    for start, values in states:
        absolute = np.abs(values.astype(np.float32))
        np.maximum(largest, absolute.max(axis=0), out=largest)
        hits += (absolute > bound).sum(axis=0)
        if start == 0:
            first_hits += absolute[0] > bound
    tokens = sum(len(s) for _, s in states)
    top = np.argsort(-largest, kind="stable")[:TOP_CHANNELS]
    norms = np.concatenate(site.norms) if any(len(n) for n in site.norms) else np.asarray(site.first_norms)
    p1, p50, p99 = (float(v) for v in np.percentile(norms, [1, 50, 99]))
    return SiteSample(
        name=name,
        median=median,
        largest=float(largest.max()),
        norm_first=float(np.mean(site.first_norms)) if site.first_norms else None,
        norm_p1=p1,
        norm_p50=p50,
        norm_p99=p99,
        massive=int((hits > 0).sum()),
        channels=tuple(
            Channel(
                channel=int(c),
                largest=float(largest[c]),
                ratio=float(largest[c]) / median if median else float("inf"),
                tokens=float(hits[c]) / tokens,
                first=float(first_hits[c]) / max(1, int(hits[c])),
            )
            for c in top
        ),
    )
