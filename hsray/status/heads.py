"""What became of leases, from the first bytes of their records: some 20,000 small reads for a million prompts.

A resolution is stored as JSON with sorted keys, so everything but the index entries of its shards lies before the key
`shards`. Records that are longer in front (hundreds of dead prompts), records of older versions, and those whose
outcomes were re-opened since are read whole.
"""

import json
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from hsray.errors import HsrayError
from hsray.records import DeadPrompt, JsonDict, LeaseFigures, Reopened, ResolutionKind, ResolutionSummary
from hsray.schema import LEASES_PREFIX
from hsray.store import ObjectInfo, Store

HEAD_BYTES = 4096
_THREADS = 32
_READ_AHEAD = 1024
# Inside a JSON string the quotes would be escaped.
_SHARDS = b',"shards":'


@dataclass(frozen=True, slots=True)
class ResolutionHead:
    """A resolution without its shards.

    Attributes:
        prompts, tokens, nbytes, num_shards: what it commits.
        dead: prompts that it gives up, without those that were re-opened since.
        figures: how the attempt went; `ended` is never 0.
    """

    lease_id: str
    kind: ResolutionKind
    attempt: str
    replica: str
    prompts: int
    tokens: int
    nbytes: int
    num_shards: int
    dead: tuple[DeadPrompt, ...]
    figures: LeaseFigures


def read_heads(store: Store, objects: Iterable[ObjectInfo], reopened: Reopened) -> Iterator[ResolutionHead]:
    """The heads of these records, in their order, in bounded memory.

    Raises:
        HsrayError: a record that is none, naming its key.
        StoreError: the store refuses or does not answer.
    """
    with ThreadPoolExecutor(_THREADS, thread_name_prefix="hsray-heads") as pool:
        for some in _batched(objects, _READ_AHEAD):
            yield from pool.map(lambda info: _read(store, info, reopened), some)


def _read(store: Store, info: ObjectInfo, reopened: Reopened) -> ResolutionHead:
    lease_id = info.key.removeprefix(LEASES_PREFIX).removesuffix(".json")
    try:
        head = None if reopened.of(lease_id) else _first_part(store, info)
        if head is not None and head["lease_id"] == lease_id:
            return _from_first_part(head, info)
        return _from_whole(store.get_json(info.key), info, reopened)
    except (KeyError, TypeError, ValueError, AttributeError) as err:
        raise HsrayError(
            f"{store.locate(info.key)} is not a resolution ({type(err).__name__}: {err}). `python -m hsray.verify "
            f"{store.url}` says what else is wrong"
        ) from err


def _first_part(store: Store, info: ObjectInfo) -> JsonDict | None:
    """What precedes the shards, if that is within reach and holds figures."""
    data = bytes(store.get_range(info.key, 0, min(HEAD_BYTES, info.nbytes)))
    end = data.find(_SHARDS)
    if end < 0:
        return None
    try:
        head: Any = json.loads(data[:end] + b"}")
    except ValueError:
        return None
    return head if isinstance(head, dict) and "num_shards" in head.get("figures", ()) else None


def _from_first_part(head: JsonDict, info: ObjectInfo) -> ResolutionHead:
    counts = head["figures"]
    return ResolutionHead(
        lease_id=head["lease_id"],
        kind=head["kind"],
        attempt=head["attempt"],
        replica=head["replica"],
        prompts=counts["prompts"],
        tokens=counts["tokens"],
        nbytes=counts["nbytes"],
        num_shards=counts["num_shards"],
        dead=tuple(DeadPrompt(**d) for d in head["dead"]),
        figures=_figures(counts, info),
    )


def _from_whole(record: JsonDict, info: ObjectInfo, reopened: Reopened) -> ResolutionHead:
    summary = ResolutionSummary.from_json(record)
    again = reopened.of(summary.lease_id)
    return ResolutionHead(
        lease_id=summary.lease_id,
        kind=summary.kind,
        attempt=record["attempt"],
        replica=record["replica"],
        prompts=len(summary.committed_rows - again),
        tokens=sum(e["num_tokens"] for s in record["shards"] for e in s["entries"] if e["row"] not in again),
        nbytes=summary.stored_bytes,
        num_shards=len(summary.shards),
        dead=tuple(d for d in summary.dead if d.row not in again),
        figures=_figures(record.get("figures", {}), info),
    )


def _figures(counts: JsonDict, info: ObjectInfo) -> LeaseFigures:
    # The store's time of writing is as good, until somebody copies the run.
    return LeaseFigures.from_json({**counts, "ended": counts.get("ended") or info.modified.timestamp()})


def _batched(objects: Iterable[ObjectInfo], size: int) -> Iterator[list[ObjectInfo]]:
    batch: list[ObjectInfo] = []
    for info in objects:
        batch.append(info)
        if len(batch) == size:
            yield batch
            batch = []
    if batch:
        yield batch
