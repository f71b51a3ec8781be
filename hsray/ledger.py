"""The ledger: what has become of every lease. The only writer of "done".

A lease ends by one create-once record `leases/<lease_id>.json`; whichever came first stands for good, and every
other attempt at that lease is garbage. What is open, committed or dead is a pure function of the root leases and
those records. No clock, lock or time-out decides anything here.

This module never reads a shard and never decides what a resolution should say.
"""

import itertools
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from typing import TypeVar, get_args

from hsray.errors import FingerprintMismatch, HsrayError
from hsray.records import DeadPrompt, JsonDict, Lease, Reopened, Resolution, ResolutionKind, ResolutionSummary
from hsray.schema import (
    ATTEMPTS_PREFIX,
    FORMAT_VERSION,
    LAST_EXIT_KEY,
    LEASES_PREFIX,
    RETRIES_PREFIX,
    RUN_KEY,
    SUCCESS_KEY,
)
from hsray.store import Store, encode_json

R = TypeVar("R", Resolution, ResolutionSummary)

_READ_THREADS = 32
# Records that are read ahead of whoever takes them: parsing is slower than reading, so without a limit all of them
# would be in memory.
_READ_AHEAD = 512
# So few records are read one after the other: starting threads would take longer.
_READ_ALONE = 16
_LEASE_KEY = re.compile(re.escape(LEASES_PREFIX) + r"([^/]+)\.json")
_ATTEMPT_KEY = re.compile(re.escape(ATTEMPTS_PREFIX) + r"([^/]+)/(\d+)\.json")


@dataclass(frozen=True, slots=True)
class Accounting:
    """Where every row of the plan stands. The rows of the three outcomes are disjoint and add up to the plan.

    Attributes:
        committed: row -> id of the lease whose resolution names its shard.
        dead: row -> why it was given up.
        open: leases without a resolution, in tree order.
        superseded: ids of resolutions that no root lease leads to.
        reopened: the prompts that are taken into account as re-opened: their older outcome does not count.
        tokens: of the committed prompts.
        emptied: key -> bytes of shards that a resolution names and of which no row counts any more.
    """

    committed: dict[int, str] = field(default_factory=dict)
    dead: dict[int, DeadPrompt] = field(default_factory=dict)
    open: list[Lease] = field(default_factory=list)
    superseded: frozenset[str] = frozenset()
    reopened: Reopened = field(default_factory=Reopened)
    tokens: int = 0
    emptied: Mapping[str, int] = field(default_factory=dict)

    @property
    def generation(self) -> int:
        return self.reopened.generation


class Ledger:
    """The records of one run. Safe to use from several threads, and harmless to use from several drivers.

    Args:
        run_id: the run that this ledger belongs to, once it is known. Records are then stamped with it, those of
            another run are refused, and nothing is resolved after the prefix was given to another run. Without it
            everything at this prefix is taken for one run.
    """

    def __init__(self, store: Store, run_id: str = "") -> None:
        self._store = store
        self._run_id = run_id

    def read_run(self) -> JsonDict | None:
        """`hsray.json`, or None where no run has begun."""
        try:
            return self._store.get_json(RUN_KEY)
        except FileNotFoundError:
            return None

    def create_run(self, record: JsonDict) -> JsonDict:
        """Begin the run, or find that it has begun: returns the `hsray.json` that stands, ours or not."""
        return self._store.create_once(RUN_KEY, record).record

    def check_fingerprint(self, stored: JsonDict, mine: JsonDict) -> None:
        """Refuse to continue a run that was begun from other inputs.

        Both records hold `format_version` and `fingerprint: {"hash": str, "parts": {dotted key: str}}`.

        Raises:
            FingerprintMismatch: another format version, or other inputs; every differing key with both values.
        """
        where = self._store.locate(RUN_KEY)
        version = stored.get("format_version")
        if str(version).partition(".")[0] != str(FORMAT_VERSION):
            raise FingerprintMismatch(
                f"{where} has format version {version}, this hsray writes {FORMAT_VERSION}. "
                "Use another output.url, or the hsray that began the run"
            )
        try:
            theirs, ours = stored["fingerprint"], mine["fingerprint"]
            if theirs["hash"] == ours["hash"]:
                return
            old, new = dict(theirs["parts"]), dict(ours["parts"])
        except (KeyError, TypeError, ValueError) as err:
            raise FingerprintMismatch(f"{where} has no readable fingerprint. Use another output.url") from err
        differing = [
            f"  {key}: the run has {old.get(key, '(nothing)')}, now {new.get(key, '(nothing)')}"
            for key in sorted({*old, *new})
            if old.get(key) != new.get(key)
        ]
        listed = "\n".join(differing) or f"  hash: the run has {theirs['hash']}, now {ours['hash']}"
        raise FingerprintMismatch(
            f"{where} was begun from other inputs:\n{listed}\n"
            "Give a new output.url for a new run, or the old inputs to continue this one"
        )

    def check_run(self) -> None:
        """Make sure that the prefix still holds this ledger's run.

        Raises:
            FingerprintMismatch: it was removed, or removed and begun anew, while this driver worked.
        """
        if not self._run_id:
            return
        standing = self.read_run()
        found = None if standing is None else standing.get("run_id")
        if found != self._run_id:
            raise FingerprintMismatch(
                f"{self._store.locate(RUN_KEY)} is {'gone' if standing is None else f'that of run {found}'}: somebody "
                f"removed run {self._run_id} while this driver worked on it. Start again"
            )

    def record_start(self, lease_id: str, number: int, info: JsonDict) -> None:
        """Note that attempt `number` (1, 2, ...) at a lease is about to start, so that crash loops end."""
        self._store.put(f"{ATTEMPTS_PREFIX}{lease_id}/{number}.json", encode_json(info))

    def starts(self) -> dict[str, int]:
        """Highest attempt number by lease id, over all drivers."""
        highest: dict[str, int] = {}
        for info in self._store.list(ATTEMPTS_PREFIX):
            match = _ATTEMPT_KEY.fullmatch(info.key)
            if match is None:
                raise HsrayError(f"{self._store.locate(info.key)} does not belong in {ATTEMPTS_PREFIX}; remove it")
            highest[match[1]] = max(highest.get(match[1], 0), int(match[2]))
        return highest

    def resolve(self, resolution: Resolution) -> tuple[Resolution, bool]:
        """End a lease. Exactly one resolution per lease stands, over any number of drivers.

        Returns:
            The resolution that stands, and whether it is the one given here. If not, the shards of the given one
            are garbage.

        Raises:
            FingerprintMismatch: the prefix is another run's by now.
        """
        # Between this look and the put, the run may still be replaced; the stamp shows that to whoever reads it.
        self.check_run()
        key = _lease_key(resolution.lease_id)
        result = self._store.create_once(key, {**resolution.to_json(), "run_id": self._run_id})
        if result.won:
            return resolution, True
        return self._parse(key, result.record, Resolution.from_json), False

    def resolutions(self) -> dict[str, Resolution]:
        """All resolutions by lease id, with every index entry: some 1.7 kB a prompt. `summaries` are small.

        Raises:
            HsrayError: a record that is none, naming its key.
        """
        return {resolution.lease_id: resolution for resolution in self.stream()}

    def stream(self, lease_ids: Iterable[str] | None = None) -> Iterator[Resolution]:
        """Resolutions one after the other in bounded memory, all or those of `lease_ids`. Raises as `resolutions`."""
        return self._read(None if lease_ids is None else map(_lease_key, lease_ids), Resolution.from_json)

    def standing(self, lease_ids: Iterable[str], accounting: Accounting) -> Iterator[Resolution]:
        """Of these leases, in bounded memory: what each resolution still commits, without rows that were re-opened."""
        return (found.without(accounting.reopened.of(found.lease_id)) for found in self.stream(sorted(lease_ids)))

    def summaries(self) -> dict[str, ResolutionSummary]:
        """All resolutions by lease id, without their index entries. Raises as `resolutions`."""
        return {found.lease_id: found for found in self._read(None, ResolutionSummary.from_json)}

    def reopen(self, rows: Mapping[str, Iterable[int]]) -> Reopened:
        """Have prompts tried again: a new generation. `rows` are dead or committed by the resolution of their lease.

        Two callers at once make two generations; a row of both belongs to the first.
        """
        self.check_run()
        record = {"run_id": self._run_id, "rows": {lease_id: sorted(some) for lease_id, some in rows.items()}}
        while True:
            number = self.reopened().generation + 1
            if self._store.create_once(f"{RETRIES_PREFIX}{number}.json", record).won:
                return self.reopened()

    def reopened(self) -> Reopened:
        """The prompts that are to be tried again, over all generations."""
        keys = {info.key for info in self._store.list(RETRIES_PREFIX)}
        rows: dict[str, dict[int, int]] = {}
        number = 0
        while (key := f"{RETRIES_PREFIX}{number + 1}.json") in keys:
            number += 1
            record = self._store.get_json(key)
            try:
                for lease_id, some in record["rows"].items():
                    opened = rows.setdefault(lease_id, {})
                    for row in map(int, some):
                        opened.setdefault(row, number)
            except (KeyError, TypeError, ValueError, AttributeError) as err:
                raise HsrayError(f"{self._store.locate(key)} does not say which prompts to try again: {err!r}") from err
        return Reopened(number, rows)

    def account(self, roots: Iterable[Lease]) -> tuple[dict[str, ResolutionSummary], Accounting]:
        """Every resolution, and where every row of the plan stands. Raises as `summaries` and `account` do."""
        # The generations first: a resolution that is read later may be of one, but none is missed.
        reopened = self.reopened()
        found = self.summaries()
        accounting = account(roots, found, reopened)
        touched = [lease_id for lease_id in reopened.rows if lease_id in found and found[lease_id].rows]
        emptied = {
            shard.key: shard.nbytes
            for resolution in self.stream(touched)
            for shard in resolution.shards
            if reopened.of(resolution.lease_id).issuperset(shard.rows)
        }
        return found, replace(accounting, emptied=emptied)

    def _read(self, keys: Iterable[str] | None, parse: Callable[[JsonDict], R]) -> Iterator[R]:
        """One LIST, then GETs in parallel."""
        remaining = iter((info.key for info in self._store.list(LEASES_PREFIX)) if keys is None else keys)
        with ThreadPoolExecutor(_READ_THREADS, thread_name_prefix="hsray-ledger") as pool:
            while batch := list(itertools.islice(remaining, _READ_AHEAD)):
                in_order = map if len(batch) <= _READ_ALONE else pool.map
                yield from in_order(lambda key: self._parse(key, self._store.get_json(key), parse), batch)

    def write_success(self, record: JsonDict) -> None:
        """Mark the run complete. Written last.

        Raises:
            FingerprintMismatch: the prefix is another run's by now.
        """
        self.check_run()
        self._store.put(SUCCESS_KEY, encode_json({**record, "run_id": self._run_id}))

    def read_success(self) -> JsonDict | None:
        """What this run was marked complete with, or None. Prompts that were re-opened since are not in it."""
        try:
            record = self._store.get_json(SUCCESS_KEY)
        except FileNotFoundError:
            return None
        return record if self._is_ours(record) else None

    def is_complete(self) -> bool:
        """Whether this run has been marked complete, and no prompt re-opened since."""
        record = self.read_success()
        return record is not None and record.get("generation", 0) == self.reopened().generation

    def write_last_exit(self, record: JsonDict) -> None:
        """Keep how the last driver ended, for callers that only see 0 or 1 (`ray job submit`)."""
        self._store.put(LAST_EXIT_KEY, encode_json(record))

    def read_last_exit(self) -> JsonDict | None:
        """What the last driver that ended wrote about it, or None."""
        try:
            return self._store.get_json(LAST_EXIT_KEY)
        except FileNotFoundError:
            return None

    def _is_ours(self, record: JsonDict) -> bool:
        # Records of the first versions are not stamped.
        return not self._run_id or record.get("run_id") in (None, "", self._run_id)

    def _parse(self, key: str, record: JsonDict, parse: Callable[[JsonDict], R]) -> R:
        match = _LEASE_KEY.fullmatch(key)
        try:
            resolution = parse(record)
        except (KeyError, TypeError, ValueError, AttributeError) as err:
            raise HsrayError(
                f"{self._store.locate(key)} is not a resolution ({type(err).__name__}: {err}). Written by another "
                "version or by hand? Remove it to have the lease done again"
            ) from err
        if match is None or resolution.lease_id != match[1] or resolution.kind not in get_args(ResolutionKind):
            raise HsrayError(
                f"{self._store.locate(key)} is not a resolution (kind {resolution.kind!r}, lease "
                f"{resolution.lease_id!r}). Remove it to have the lease done again"
            )
        if not self._is_ours(record):
            raise FingerprintMismatch(
                f"{self._store.locate(key)} was written by a driver of another run, {record.get('run_id')}, which was "
                f"removed from this prefix while that driver worked. Make sure that it has ended, remove this object, "
                "and start again"
            )
        return resolution


def _lease_key(lease_id: str) -> str:
    return f"{LEASES_PREFIX}{lease_id}.json"


def account(
    roots: Iterable[Lease],
    resolutions: Mapping[str, Resolution | ResolutionSummary],
    reopened: Reopened = Reopened(),  # noqa: B008 - a frozen value
) -> Accounting:
    """Walk the lease trees and say where every row stands. Pure.

    Raises:
        HsrayError: the records contradict each other: a row with two outcomes, or an outcome for a row that is
            not in its lease. Nothing must be read or continued then.
    """
    committed: dict[int, str] = {}
    dead: dict[int, DeadPrompt] = {}
    open_: list[Lease] = []
    tokens = 0
    visited: set[str] = set()
    planned: dict[int, str] = {}
    stack: list[Lease] = []
    for root in roots:
        for row in root.rows:
            if planned.setdefault(row, root.lease_id) != root.lease_id:
                raise HsrayError(f"row {row} is in two root leases, {planned[row]} and {root.lease_id}")
        stack.append(root)
    stack.reverse()
    while stack:
        lease = stack.pop()
        found = resolutions.get(lease.lease_id)
        if found is None:
            open_.append(lease)
            continue
        resolution = found.summary() if isinstance(found, Resolution) else found
        if lease.lease_id in visited:
            raise HsrayError(f"lease {lease.lease_id} is in the tree twice")
        visited.add(lease.lease_id)
        _check_outcomes(lease, resolution)
        again, here = reopened.of(lease.lease_id), resolution.committed_rows
        if foreign := sorted(again - here - resolution.dead_rows):
            raise HsrayError(
                f"rows of lease {lease.lease_id} are to be tried again and are neither dead nor committed: "
                f"{foreign[:10]}"
            )
        kept = here - again
        committed.update(dict.fromkeys(kept, lease.lease_id))
        tokens += sum(n for row, n in zip(lease.rows, lease.num_tokens, strict=True) if row in kept)
        dead.update((prompt.row, prompt) for prompt in resolution.dead if prompt.row not in again)
        stack.extend(reversed(reopened.children(lease)))
        stack.extend(reversed(resolution.children(lease)))
    return Accounting(committed, dead, open_, frozenset(set(resolutions) - visited), reopened, tokens)


def open_leases(roots: Iterable[Lease], resolutions: Mapping[str, Resolution | ResolutionSummary]) -> list[Lease]:
    """The leases still to be done, in tree order. Raises as `account` does."""
    return account(roots, resolutions).open


def _check_outcomes(lease: Lease, resolution: ResolutionSummary) -> None:
    """Every row of a lease has one outcome here or goes to one child; `children` makes the second half true."""
    rows, committed, dead = set(lease.rows), resolution.committed_rows, resolution.dead_rows
    where = f"the resolution of lease {lease.lease_id}"
    if both := sorted(committed & dead):
        raise HsrayError(f"{where} has rows both committed and dead: {both[:10]}")
    if foreign := sorted((committed | dead) - rows):
        raise HsrayError(f"{where} has rows that are not in that lease: {foreign[:10]}")
    if len(resolution.dead) != len(dead):
        raise HsrayError(f"{where} has a row dead twice")
    if resolution.kind == "dead" and dead != rows:
        raise HsrayError(f"{where} is dead, but some rows have no reason: {sorted(rows - dead)[:10]}")
    if resolution.kind == "split" and (committed or dead or len(rows) < 2):
        raise HsrayError(f"{where} is a split, which has no outcomes and at least two rows")
