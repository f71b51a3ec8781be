"""The nouns that cross modules and processes: frozen, picklable, JSON-able where they are stored.

A prompt is known by its `row`: the dense, 0-based position of its input row over all input files in
order, rejects included. Rows are what leases, resolutions and the ledger count; `prompt_id` is the
name a user sees.
"""

from collections.abc import Collection, Iterable, Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from hsray.errors import HsrayError

IntArray = npt.NDArray[np.int32]
MaskArray = npt.NDArray[np.uint8]
JsonDict = dict[str, Any]


@dataclass(frozen=True, slots=True, eq=False)
class Prompt:
    """One tokenized input row.

    Attributes:
        row: dense input position.
        prompt_id: unique in the run.
        input_ids: int32 `[T]`, T >= 1, special tokens included, exactly what the engine prefills.
        loss_mask: uint8 `[T]`, aligned with `input_ids` and unshifted: 1 where the token itself is
            one the drafter should learn to predict (an assistant token).
        file: the file it came from (URL as the user would write it).
        line: 1-based line in a text file, 1-based row in a table.
        full_tokens: how many tokens the input row had, if `prompts.over_length: truncate` cut it; else None.
    """

    row: int
    prompt_id: str
    input_ids: IntArray
    loss_mask: MaskArray
    file: str
    line: int
    full_tokens: int | None = None

    @property
    def num_tokens(self) -> int:
        return len(self.input_ids)


@dataclass(frozen=True, slots=True)
class Reject:
    """An input row that no engine will see: bad input, found while planning.

    `reason` is a short stable code (`empty`, `too_long`, `malformed_json`, ...) that reports count by;
    `detail` says what is wrong with this row; `snippet` is the start of the row, at most 200 characters.
    """

    row: int
    prompt_id: str | None
    file: str
    line: int
    reason: str
    detail: str
    snippet: str


@dataclass(frozen=True, slots=True)
class Lease:
    """The unit of work: some prompts of one root lease of the plan.

    Attributes:
        lease_id: `000123` for a root; `.r` (remainder), `.a` and `.b` (bisected halves) and `.g1` (prompts
            that generation 1 of `retry_dead` or `repair` re-opened) are appended.
        rows: ascending input rows.
        num_tokens: tokens of each of `rows`, same order.
    """

    lease_id: str
    rows: tuple[int, ...]
    num_tokens: tuple[int, ...]

    @property
    def root_id(self) -> str:
        return self.lease_id.split(".", 1)[0]

    @property
    def total_tokens(self) -> int:
        return sum(self.num_tokens)

    def child(self, suffix: str, rows: "set[int] | frozenset[int]") -> "Lease":
        """The part of this lease whose rows are in `rows`, under the id `<lease_id>.<suffix>`."""
        kept = [(r, n) for r, n in zip(self.rows, self.num_tokens, strict=True) if r in rows]
        return Lease(f"{self.lease_id}.{suffix}", tuple(r for r, _ in kept), tuple(n for _, n in kept))

    def halves(self) -> "tuple[Lease, Lease]":
        """The two bisected children `.a` and `.b`. The lease must have at least two rows."""
        if len(self.rows) < 2:
            raise ValueError(f"lease {self.lease_id} has {len(self.rows)} prompt(s); it cannot be bisected")
        middle = len(self.rows) // 2
        return self.child("a", set(self.rows[:middle])), self.child("b", set(self.rows[middle:]))


@dataclass(frozen=True, slots=True)
class Extent:
    """Where the raw bytes of one column value lie inside a shard object.

    Attributes:
        offset: first byte of the payload.
        nbytes: payload length in bytes.
        xxh3: xxh3-64 of the payload, 16 hex digits. Empty for `input_ids` and `loss_mask`, which the
            Parquet page CRC covers.
    """

    offset: int
    nbytes: int
    xxh3: str = ""


@dataclass(frozen=True, slots=True)
class IndexEntry:
    """One shard row: a segment of one prompt, and where each of its columns lies.

    `row_group` equals the row's position in the shard (one row per row group). `num_tokens` counts this
    segment, `token_start` is its first position, `seq_len` the whole prompt. `extents` is keyed by column:
    `input_ids`, `loss_mask` (little-endian int32 each) and every site.
    """

    row: int
    prompt_id: str
    segment: int
    num_segments: int
    token_start: int
    num_tokens: int
    seq_len: int
    row_group: int
    extents: Mapping[str, Extent]


@dataclass(frozen=True, slots=True)
class ShardRecord:
    """One immutable Parquet object.

    Attributes:
        key: relative to the run.
        nbytes: size of the object.
        tree_xxh3: xxh3-64 of the object with each site's payload replaced by its own xxh3-64, 8 bytes big-endian.
            It covers every byte; 16 hex digits.
    """

    key: str
    nbytes: int
    tree_xxh3: str
    entries: tuple[IndexEntry, ...]

    @property
    def rows(self) -> tuple[int, ...]:
        """The input rows held, ascending, each once."""
        return tuple(sorted({e.row for e in self.entries}))

    def without(self, rows: Collection[int]) -> "ShardRecord":
        """The same object, with only the entries of other rows."""
        return replace(self, entries=tuple(e for e in self.entries if e.row not in rows))


FailureClass = Literal["prompt_permanent", "prompt_transient", "crash"]


@dataclass(frozen=True, slots=True)
class PromptFailure:
    """One prompt that an attempt could not deliver, and whether trying again may help."""

    row: int
    prompt_id: str
    failure_class: FailureClass
    message: str


@dataclass(frozen=True, slots=True)
class DeadPrompt:
    """A prompt given up for good, with the reason and how often it was tried."""

    row: int
    prompt_id: str
    failure_class: str
    message: str
    attempts: int


@dataclass(frozen=True, slots=True)
class LeaseFigures:
    """How the attempt behind a resolution went. For people: nothing is decided by it, and older records have none.

    Attributes:
        ended: Unix seconds by the driver's clock when the record was made; 0 where not known.
        seconds: how long the replica had the lease.
        spool_peak: most bytes that its arena held meanwhile, of all its leases.
        mean_norms: by site, the L2 norm of a token's state, averaged over the tokens that were captured.
    """

    ended: float = 0.0
    seconds: float = 0.0
    spool_peak: int = 0
    mean_norms: Mapping[str, float] = field(default_factory=dict)

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> "LeaseFigures":
        """From the `figures` of a record, whatever it lacks."""
        return cls(
            ended=float(data.get("ended", 0.0)),
            seconds=float(data.get("seconds", 0.0)),
            spool_peak=int(data.get("spool_peak", 0)),
            mean_norms={site: float(norm) for site, norm in data.get("mean_norms", {}).items()},
        )


@dataclass(frozen=True, slots=True)
class LeaseOutcome:
    """What a replica reports at the end of an attempt.

    Rows of the lease that are neither in a shard nor in `failures` were not tried (drain, shutdown);
    they go back without blame.
    """

    lease_id: str
    attempt: str
    shards: tuple[ShardRecord, ...]
    failures: tuple[PromptFailure, ...]
    figures: LeaseFigures = LeaseFigures()

    @property
    def committed_rows(self) -> frozenset[int]:
        return frozenset(e.row for s in self.shards for e in s.entries)


ResolutionKind = Literal["commit", "split", "dead"]


@dataclass(frozen=True, slots=True)
class Resolution:
    """The single create-once record that ends a lease.

    * `commit`: `shards` hold the committed rows, `dead` the ones given up; what is left of the lease
      is the child `<lease_id>.r`, and `attempts` carries how often each left row was tried.
    * `split`: nothing is committed; the children `<lease_id>.a` and `.b` hold all rows. `attempts` as above.
    * `dead`: every row of the lease is in `dead`.
    """

    kind: ResolutionKind
    lease_id: str
    attempt: str
    replica: str
    shards: tuple[ShardRecord, ...] = ()
    dead: tuple[DeadPrompt, ...] = ()
    attempts: Mapping[int, int] = field(default_factory=dict)
    figures: LeaseFigures = LeaseFigures()

    @property
    def committed_rows(self) -> frozenset[int]:
        return frozenset(e.row for s in self.shards for e in s.entries)

    @property
    def dead_rows(self) -> frozenset[int]:
        return frozenset(d.row for d in self.dead)

    def children(self, lease: Lease) -> tuple[Lease, ...]:
        """The open leases that this resolution of `lease` leaves behind."""
        return _children(self.kind, lease, self.committed_rows | self.dead_rows)

    def without(self, rows: Collection[int]) -> "Resolution":
        """What it still commits when `rows` have been re-opened. A shard of which nothing is left is left out."""
        if not rows:
            return self
        shards = [shard.without(rows) for shard in self.shards]
        return replace(self, shards=tuple(shard for shard in shards if shard.entries))

    def summary(self) -> "ResolutionSummary":
        """What accounting needs of it."""
        entries = [(e.row, e.segment, e.num_segments, e.num_tokens) for s in self.shards for e in s.entries]
        return ResolutionSummary(
            kind=self.kind,
            lease_id=self.lease_id,
            rows=_whole_rows(self.lease_id, entries),
            dead=self.dead,
            attempts=self.attempts,
            shards=tuple(s.key for s in self.shards),
            stored_bytes=sum(s.nbytes for s in self.shards),
            tokens=sum(n for _, _, _, n in entries),
        )

    def to_json(self) -> JsonDict:
        return {
            "kind": self.kind,
            "lease_id": self.lease_id,
            "attempt": self.attempt,
            "replica": self.replica,
            "shards": [
                {
                    "key": s.key,
                    "nbytes": s.nbytes,
                    "tree_xxh3": s.tree_xxh3,
                    "entries": [_entry_to_json(e) for e in s.entries],
                }
                for s in self.shards
            ],
            "dead": [asdict(d) for d in self.dead],
            "attempts": {str(row): n for row, n in self.attempts.items()},
            # Stored with sorted keys, all of this comes before the shards: who only counts reads the first bytes.
            "figures": {
                **asdict(self.figures),
                "prompts": len(self.committed_rows),
                "tokens": sum(e.num_tokens for s in self.shards for e in s.entries),
                "nbytes": sum(s.nbytes for s in self.shards),
                "num_shards": len(self.shards),
            },
        }

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> "Resolution":
        """Inverse of `to_json`. Raises KeyError or TypeError on a record of another shape."""
        shards = tuple(
            ShardRecord(
                key=s["key"],
                nbytes=s["nbytes"],
                tree_xxh3=s["tree_xxh3"],
                entries=tuple(
                    IndexEntry(**{**e, "extents": {c: Extent(**x) for c, x in e["extents"].items()}})
                    for e in s["entries"]
                ),
            )
            for s in data["shards"]
        )
        return cls(
            kind=data["kind"],
            lease_id=data["lease_id"],
            attempt=data["attempt"],
            replica=data["replica"],
            shards=shards,
            dead=tuple(DeadPrompt(**d) for d in data["dead"]),
            attempts={int(row): n for row, n in data["attempts"].items()},
            figures=LeaseFigures.from_json(data.get("figures", {})),
        )


@dataclass(frozen=True, slots=True)
class Reopened:
    """Prompts that are to be tried again although their lease has ended: dead ones, and committed ones whose stored
    states are damaged.

    Attributes:
        generation: how often that was asked for; 0 for never.
        rows: by the lease whose resolution they had their outcome from: row -> in which generation it was re-opened.
    """

    generation: int = 0
    rows: Mapping[str, Mapping[int, int]] = field(default_factory=dict)

    def children(self, lease: Lease) -> tuple[Lease, ...]:
        """The leases that hold what was re-opened of `lease`: one for each generation that opened some of it."""
        again = self.rows.get(lease.lease_id, {})
        return tuple(
            lease.child(f"g{number}", {row for row, opened in again.items() if opened == number})
            for number in sorted(set(again.values()))
        )

    def of(self, lease_id: str) -> frozenset[int]:
        """Rows whose outcome by the lease's own resolution no longer counts."""
        return frozenset(self.rows.get(lease_id, ()))


@dataclass(frozen=True, slots=True)
class ResolutionSummary:
    """A resolution without its index entries: what accounting needs, small enough to keep for a million prompts.

    Attributes:
        rows: committed rows, ascending, each with all its segments.
        shards: keys of its shards; `stored_bytes` and `tokens` are theirs together.
    """

    kind: ResolutionKind
    lease_id: str
    rows: tuple[int, ...]
    dead: tuple[DeadPrompt, ...]
    attempts: Mapping[int, int]
    shards: tuple[str, ...]
    stored_bytes: int
    tokens: int

    @property
    def committed_rows(self) -> frozenset[int]:
        return frozenset(self.rows)

    @property
    def dead_rows(self) -> frozenset[int]:
        return frozenset(d.row for d in self.dead)

    def children(self, lease: Lease) -> tuple[Lease, ...]:
        """As `Resolution.children`."""
        return _children(self.kind, lease, {*self.rows, *(d.row for d in self.dead)})

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> "ResolutionSummary":
        """From what `Resolution.to_json` made, without building its entries.

        Raises:
            KeyError, TypeError: a record of another shape.
            HsrayError: a row of which segments are missing or repeated.
        """
        lease_id = data["lease_id"]
        shards = data["shards"]
        entries = [(e["row"], e["segment"], e["num_segments"], e["num_tokens"]) for s in shards for e in s["entries"]]
        return cls(
            kind=data["kind"],
            lease_id=lease_id,
            rows=_whole_rows(lease_id, entries),
            dead=tuple(DeadPrompt(**d) for d in data["dead"]),
            attempts={int(row): n for row, n in data["attempts"].items()},
            shards=tuple(s["key"] for s in shards),
            stored_bytes=sum(s["nbytes"] for s in shards),
            tokens=sum(n for _, _, _, n in entries),
        )


def _children(kind: ResolutionKind, lease: Lease, done: Collection[int]) -> tuple[Lease, ...]:
    if kind == "split":
        return lease.halves()
    left = set(lease.rows).difference(done)
    return (lease.child("r", left),) if left else ()


def _whole_rows(lease_id: str, entries: Iterable[tuple[int, int, int, int]]) -> tuple[int, ...]:
    """The rows of (row, segment, num_segments, num_tokens) entries, after checking that each is whole."""
    segments: dict[int, list[int]] = {}
    expected: dict[int, int] = {}
    for row, segment, num_segments, _ in entries:
        segments.setdefault(row, []).append(segment)
        expected[row] = num_segments
    for row, found in segments.items():
        if sorted(found) != list(range(expected[row])):
            raise HsrayError(
                f"the resolution of lease {lease_id} commits row {row} with segments {sorted(found)} of {expected[row]}"
            )
    return tuple(sorted(segments))


def _entry_to_json(entry: IndexEntry) -> JsonDict:
    # By hand: `asdict` takes ten times as long, and the driver does this for every prompt of the run.
    return {
        "row": entry.row,
        "prompt_id": entry.prompt_id,
        "segment": entry.segment,
        "num_segments": entry.num_segments,
        "token_start": entry.token_start,
        "num_tokens": entry.num_tokens,
        "seq_len": entry.seq_len,
        "row_group": entry.row_group,
        "extents": {
            column: {"offset": x.offset, "nbytes": x.nbytes, "xxh3": x.xxh3} for column, x in entry.extents.items()
        },
    }
