"""What a plan amounts to: lengths, leases, bytes, hours, money. Counts as the prompts stream by; pure but for them."""

import array
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from hsray.codecs import find_codec
from hsray.records import JsonDict, Prompt, Reject
from hsray.schema import ITEMSIZE
from hsray.site_storage import CODECS, CodecName, Storage, TokenSelection
from hsray.token_selection import select_positions

if TYPE_CHECKING:
    from hsray.prompts import Tally

_EXAMPLES_PER_REASON = 3
_MASK_EXAMPLES = 3
SECONDS_PER_HOUR = 3600


@dataclass(frozen=True, slots=True)
class LeaseLimits:
    """When a lease is full: `shard_bytes` of hidden states, or `max_lease_prompts` prompts."""

    bytes_per_token: int
    shard_bytes: int
    max_lease_prompts: int


class LeasePacker:
    """Says where leases end. A prompt larger than a lease may be is a lease of its own."""

    def __init__(self, limits: LeaseLimits) -> None:
        self._limits = limits
        self._bytes = 0
        self._prompts = 0

    def starts_new(self, num_tokens: int) -> bool:
        """Add the next prompt; whether the lease before it is closed (the first prompt closes none)."""
        limits = self._limits
        nbytes = num_tokens * limits.bytes_per_token
        full = self._prompts > 0 and (
            self._bytes + nbytes > limits.shard_bytes or self._prompts >= limits.max_lease_prompts
        )
        if full:
            self._bytes = self._prompts = 0
        self._bytes += nbytes
        self._prompts += 1
        return full


@dataclass(slots=True)
class Estimate:
    """What `survey` saw.

    Attributes:
        selections: of tokens, whose positions are counted.
        selected: positions that each of them selects.
        lengths: tokens of each prompt, in order; 4 bytes a prompt.
        masked_tokens: tokens in loss masks.
        leases: root leases.
        reject_examples: per reason the first rejects.
        mask_examples: the first prompts with a mask that covers some of their tokens.
    """

    selections: tuple[TokenSelection, ...] = ()
    selected: Counter[TokenSelection] = field(default_factory=Counter)
    lengths: "array.array[int]" = field(default_factory=lambda: array.array("i"))
    masked_tokens: int = 0
    leases: int = 0
    rejects: Counter[str] = field(default_factory=Counter)
    reject_examples: dict[str, list[Reject]] = field(default_factory=dict)
    mask_examples: list[Prompt] = field(default_factory=list)

    @property
    def num_tokens(self) -> int:
        return int(np.frombuffer(self.lengths, np.int32).sum(dtype=np.int64)) if self.lengths else 0

    def percentile(self, percent: float) -> int:
        """The length that so many prompts do not exceed; 0 without prompts."""
        if not self.lengths:
            return 0
        return int(np.percentile(np.frombuffer(self.lengths, np.int32), percent, method="inverted_cdf"))

    def histogram(self) -> list[tuple[int, int, int]]:
        """(from, to, prompts) for lengths in [from, to), in powers of two, from the shortest to the longest."""
        if not self.lengths:
            return []
        powers = np.floor(np.log2(np.frombuffer(self.lengths, np.int32))).astype(int)
        counts = np.bincount(powers)
        return [(1 << p, 2 << p, int(counts[p])) for p in range(int(powers.min()), len(counts))]


def survey(items: Iterable[Prompt | Reject], limits: LeaseLimits, estimate: Estimate) -> Iterator[Prompt | Reject]:
    """Pass all items on, and add them up in `estimate`."""
    packer = LeasePacker(limits)
    for item in items:
        if isinstance(item, Reject):
            estimate.rejects[item.reason] += 1
            examples = estimate.reject_examples.setdefault(item.reason, [])
            if len(examples) < _EXAMPLES_PER_REASON:
                examples.append(item)
        else:
            estimate.leases += packer.starts_new(item.num_tokens) or not estimate.lengths
            estimate.lengths.append(item.num_tokens)
            masked = int(item.loss_mask.sum())
            estimate.masked_tokens += masked
            for selection in estimate.selections:
                estimate.selected[selection] += len(select_positions(selection, item.loss_mask))
            if len(estimate.mask_examples) < _MASK_EXAMPLES and 0 < masked < item.num_tokens:
                estimate.mask_examples.append(item)
        yield item


@dataclass(frozen=True, slots=True)
class Costs:
    """What is asked about the run: `tokens_per_second` of one replica, or None; `price` in USD per GB and month."""

    replicas: int
    tokens_per_second: float | None
    price: float

    def hours(self, num_tokens: int) -> float | None:
        """Hours of extraction; None if nobody said how fast a replica is."""
        if self.tokens_per_second is None:
            return None
        return num_tokens / (self.tokens_per_second * self.replicas) / SECONDS_PER_HOUR


def codec_bytes(rows: int, hidden_size: int, dtype: str) -> dict[CodecName, int]:
    """What `rows` states of a site take in the store, by codec. Only bfloat16 has others than `none`."""
    plain = rows * hidden_size * ITEMSIZE[dtype]
    found = {name: find_codec(name) for name in CODECS if name == "none" or dtype == "bfloat16"}
    return {name: codec.expected_bytes(rows, hidden_size) if codec else plain for name, codec in found.items()}


def to_json(
    estimate: Estimate,
    tally: "Tally",
    storage: Storage,
    *,
    hidden_size: int,
    dtype: str,
    limits: LeaseLimits,
    costs: Costs,
) -> JsonDict:
    """All figures of the report, for programs. `storage` names every site."""
    total = tally.total()
    tokens = estimate.num_tokens
    selected = {"all": tokens, **estimate.selected}
    rows = {site: selected.get(entry.tokens, 0) for site, entry in storage.items()}
    per_site = {site: codec_bytes(rows[site], hidden_size, dtype) for site in storage}
    stored = sum(per_site[site][entry.codec] for site, entry in storage.items())
    return {
        "rows": total.rows,
        "prompts": total.prompts,
        "rejects": dict(estimate.rejects.most_common()),
        "filtered": total.filtered,
        "formats": dict(total.formats.most_common()),
        "notes": dict(tally.notes.most_common()),
        "files": {
            url: {"rows": file.rows, "prompts": file.prompts, "rejects": dict(file.rejects), "filtered": file.filtered}
            for url, file in tally.files.items()
        },
        "tokens": tokens,
        "masked_tokens": estimate.masked_tokens,
        "lengths": {
            **{name: estimate.percentile(p) for name, p in (("min", 0), ("p50", 50), ("p90", 90), ("p99", 99))},
            "max": max(estimate.lengths, default=0),
            "histogram": estimate.histogram(),
        },
        "bytes_per_token": limits.bytes_per_token,
        "bytes_per_site": per_site,
        "storage": {site: {**asdict(entry), "stored_tokens": rows[site]} for site, entry in storage.items()},
        "bytes": stored,
        "leases": estimate.leases,
        "replicas": costs.replicas,
        "hours": costs.hours(tokens),
        "usd_per_month": stored / 1e9 * costs.price,
    }
