"""The ledger: what has become of every lease. The only writer of "done".

A lease ends by one create-once record `leases/<lease_id>.json`; whichever came first stands for good, and every
other attempt at that lease is garbage. What is open, committed or dead is a pure function of the root leases and
those records. No clock, lock or time-out decides anything here.

This module never reads a shard and never decides what a resolution should say.
"""

import re
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import get_args

from hsray.errors import FingerprintMismatch, HsrayError
from hsray.records import DeadPrompt, JsonDict, Lease, Resolution, ResolutionKind
from hsray.schema import ATTEMPTS_PREFIX, FORMAT_VERSION, LAST_EXIT_KEY, LEASES_PREFIX, RUN_KEY, SUCCESS_KEY
from hsray.store import Store, encode_json

_READ_THREADS = 32
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
    """

    committed: dict[int, str] = field(default_factory=dict)
    dead: dict[int, DeadPrompt] = field(default_factory=dict)
    open: list[Lease] = field(default_factory=list)
    superseded: frozenset[str] = frozenset()


class Ledger:
    """The records of one run. Safe to use from several threads, and harmless to use from several drivers."""

    def __init__(self, store: Store) -> None:
        self._store = store

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
        """
        key = f"{LEASES_PREFIX}{resolution.lease_id}.json"
        result = self._store.create_once(key, resolution.to_json())
        if result.won:
            return resolution, True
        return self._parse(key, result.record), False

    def resolutions(self) -> dict[str, Resolution]:
        """All resolutions by lease id: one LIST, then GETs in parallel.

        Raises:
            HsrayError: a record that is none, naming its key.
        """
        keys = [info.key for info in self._store.list(LEASES_PREFIX)]
        with ThreadPoolExecutor(_READ_THREADS, thread_name_prefix="hsray-ledger") as pool:
            found = pool.map(lambda key: self._parse(key, self._store.get_json(key)), keys)
            return {resolution.lease_id: resolution for resolution in found}

    def write_success(self, record: JsonDict) -> None:
        """Mark the run complete. Written last."""
        self._store.put(SUCCESS_KEY, encode_json(record))

    def is_complete(self) -> bool:
        """Whether the run has been marked complete."""
        try:
            self._store.head(SUCCESS_KEY)
        except FileNotFoundError:
            return False
        return True

    def write_last_exit(self, record: JsonDict) -> None:
        """Keep how the last driver ended, for callers that only see 0 or 1 (`ray job submit`)."""
        self._store.put(LAST_EXIT_KEY, encode_json(record))

    def read_last_exit(self) -> JsonDict | None:
        """What the last driver that ended wrote about it, or None."""
        try:
            return self._store.get_json(LAST_EXIT_KEY)
        except FileNotFoundError:
            return None

    def _parse(self, key: str, record: JsonDict) -> Resolution:
        match = _LEASE_KEY.fullmatch(key)
        try:
            resolution = Resolution.from_json(record)
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
        return resolution


def account(roots: Iterable[Lease], resolutions: Mapping[str, Resolution]) -> Accounting:
    """Walk the lease trees and say where every row stands. Pure.

    Raises:
        HsrayError: the records contradict each other: a row with two outcomes, or an outcome for a row that is
            not in its lease. Nothing must be read or continued then.
    """
    committed: dict[int, str] = {}
    dead: dict[int, DeadPrompt] = {}
    open_: list[Lease] = []
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
        resolution = resolutions.get(lease.lease_id)
        if resolution is None:
            open_.append(lease)
            continue
        if lease.lease_id in visited:
            raise HsrayError(f"lease {lease.lease_id} is in the tree twice")
        visited.add(lease.lease_id)
        _check_outcomes(lease, resolution)
        committed.update(dict.fromkeys(resolution.committed_rows, lease.lease_id))
        dead.update((prompt.row, prompt) for prompt in resolution.dead)
        stack.extend(reversed(resolution.children(lease)))
    return Accounting(committed, dead, open_, frozenset(set(resolutions) - visited))


def open_leases(roots: Iterable[Lease], resolutions: Mapping[str, Resolution]) -> list[Lease]:
    """The leases still to be done, in tree order. Raises as `account` does."""
    return account(roots, resolutions).open


def _check_outcomes(lease: Lease, resolution: Resolution) -> None:
    """Every row of a lease has one outcome here or goes to one child; `children` makes the second half true."""
    rows, committed, dead = set(lease.rows), resolution.committed_rows, resolution.dead_rows
    where = f"the resolution of lease {lease.lease_id}"
    if both := sorted(committed & dead):
        raise HsrayError(f"{where} has rows both committed and dead: {both[:10]}")
    if foreign := sorted((committed | dead) - rows):
        raise HsrayError(f"{where} has rows that are not in that lease: {foreign[:10]}")
    if len(resolution.dead) != len(dead):
        raise HsrayError(f"{where} has a row dead twice")
    segments: dict[int, list[int]] = {}
    expected: dict[int, int] = {}
    for shard in resolution.shards:
        for entry in shard.entries:
            segments.setdefault(entry.row, []).append(entry.segment)
            expected[entry.row] = entry.num_segments
    for row, found in segments.items():
        if sorted(found) != list(range(expected[row])):
            raise HsrayError(f"{where} commits row {row} with segments {sorted(found)} of {expected[row]}")
    if resolution.kind == "dead" and dead != rows:
        raise HsrayError(f"{where} is dead, but some rows have no reason: {sorted(rows - dead)[:10]}")
    if resolution.kind == "split" and (committed or dead or len(rows) < 2):
        raise HsrayError(f"{where} is a split, which has no outcomes and at least two rows")
