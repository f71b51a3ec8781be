"""Exactly once, under everything at once: a seeded discrete-event simulation of whole runs.

    python -m tests.protocol --seeds 200000     many schedules; ends with one line that counts them and violations
    python -m tests.protocol --seed 17          one of them again

The scheduler, the ledger and its commit protocol are the real ones; replicas, data objects and time are
simulated. Replicas crash, are falsely taken for dead and go on as zombies, report twice, drain; nodes come and go;
prompts kill their replica or fail; drivers die, are stopped, run two at a time; the store loses acknowledgements
and answers that a record exists which the same request has just created. An operator re-opens dead prompts, some of
which work by then, and committed ones whose bytes went bad, also while drivers are at work. Faults end at a fixed
virtual time, so that every run must come to its end, and then the books must balance.
"""

import argparse
import heapq
import itertools
import os
import random
import sys
import time
import uuid
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from typing import Any, Literal, TypeVar

from hsray.config import BudgetConfig
from hsray.driver import tries_so_far
from hsray.errors import HsrayError, StoreUnavailable
from hsray.events import (
    AbandonPlace,
    Action,
    CancelLease,
    DiscardShards,
    Draining,
    Event,
    Finished,
    LeaseDone,
    LeaseFailed,
    PlaceFound,
    PlaceGone,
    ReplicaDied,
    ReplicaFailedToStart,
    ReplicaReady,
    Resolve,
    Resolved,
    RetireReplica,
    SpawnReplica,
    StartLease,
    StopRequested,
    Tick,
)
from hsray.ledger import Accounting, Ledger, account
from hsray.records import IndexEntry, Lease, LeaseOutcome, PromptFailure, Resolution, ShardRecord
from hsray.retry_dead import dead_by_lease
from hsray.scheduler import Scheduler
from hsray.store import open_store
from hsray.store_clients import _memory_stores
from hsray.testing import FlakyStore

CALM_AFTER_SECONDS = 400.0
MAX_EVENTS = 20_000
MAX_DRIVERS = 60
BATCH = 50

T = TypeVar("T")

EXPECTED = (
    "record: commit",
    "record: split",
    "record: dead",
    "record lost to another driver",
    "own record taken for another's",
    "412 on own success",
    "node joined",
    "dead prompt opened again",
    "committed prompt opened again",
    "dead prompt that worked in the end",
    "lease divided for its size",
    "report of a zombie",
    "unreferenced object",
    "DiscardShards",
    "CancelLease",
    "AbandonPlace",
    "RetireReplica",
    "driver: complete",
    "driver: died",
    "driver: stopped",
    "dead: crash",
    "dead: prompt_permanent",
    "dead: prompt_transient",
)

RowKind = Literal["fine", "poison", "refused", "flaky", "hopeless"]


class Violation(AssertionError):
    """A promise of the protocol was broken."""


def check(holds: bool, what: str) -> None:
    if not holds:
        raise Violation(what)


@dataclass(frozen=True)
class Faults:
    """Probabilities: per prompt, per report, per upload, or per 10 s of a driver's life."""

    crash: float = 0.0
    zombie: float = 0.0
    repeated_report: float = 0.0
    failed_upload: float = 0.0
    broken_engine: float = 0.0
    failed_start: float = 0.0
    drain: float = 0.0
    lost_place: float = 0.0
    driver_death: float = 0.0
    second_driver: float = 0.0
    stop: float = 0.0
    join: float = 0.0
    retry: float = 0.0
    repair: float = 0.0
    lost_acknowledgement: float = 0.0
    repeated_create: float = 0.0

    @classmethod
    def draw(cls, rng: random.Random) -> "Faults":
        def some(most: float) -> float:
            return rng.choice([0.0, rng.uniform(0, most)])

        return cls(
            crash=some(0.02),
            zombie=some(0.5),
            repeated_report=some(0.3),
            failed_upload=some(0.1),
            broken_engine=some(0.02),
            failed_start=some(0.2),
            drain=some(0.1),
            lost_place=some(0.1),
            driver_death=some(0.1),
            second_driver=some(0.5),
            stop=some(0.05),
            join=some(0.1),
            retry=some(0.3),
            repair=some(0.2),
            lost_acknowledgement=some(0.3),
            repeated_create=some(0.3),
        )


class RepeatingStore(FlakyStore):
    """Now and then the HTTP client loses the answer to a create and, unseen, sends the same request again."""

    repeat: float = 0.0
    repeated: int = 0

    def attempt(self, operation: str, key: str, request: Callable[[], T]) -> T:
        answer = super().attempt(operation, key, request)
        if operation == "create" and random.Random(f"{self._seed} {key} {self.repeated}").random() < self.repeat:
            self.repeated += 1
            return super().attempt(operation, key, request)
        return answer


@dataclass
class Attempt:
    lease: Lease
    attempt: str
    done: list[int] = field(default_factory=list)
    failures: list[PromptFailure] = field(default_factory=list)
    position: int = 0
    cancelled: bool = False
    keep: bool = True


class World:
    """Virtual time, the data objects, the ledger and everything that acts on them."""

    def __init__(
        self,
        seed: int,
        *,
        only_poison: bool = False,
        make_ledger: type[Ledger] = Ledger,
        make_scheduler: type[Scheduler] = Scheduler,
    ) -> None:
        self.rng = random.Random(seed)
        self.only_poison = only_poison
        self.make_scheduler = make_scheduler
        self.now = 0.0
        self._heap: list[tuple[float, int, Callable[[], None]]] = []
        self._serial = itertools.count()
        self.faults = Faults() if only_poison else Faults.draw(self.rng)
        self.budgets = BudgetConfig(
            lease_crashes=self.rng.choice([1, 2, 3]),
            replica_deaths=1000 if only_poison else self.rng.choice([4, 8]),
            max_dead_fraction=1.0,
            first_prompts_all_fail=10_000,
        )

        kinds: list[RowKind] = ["fine", "poison", "refused", "flaky", "hopeless"]
        weights = [10, *(self.rng.choice([0, 0.5]) for _ in kinds[1:])]
        self.kinds: dict[int, RowKind] = {}
        self.tried: Counter[int] = Counter()
        self.mended: set[int] = set()
        self.roots: list[Lease] = []
        row = 0
        for i in range(self.rng.randint(1, 8)):
            rows = tuple(range(row, row + self.rng.randint(1, 10)))
            row += len(rows) + self.rng.randint(0, 1)  # a gap is a reject
            self.roots.append(Lease(f"{i:06d}", rows, (10,) * len(rows)))
            self.kinds |= {r: self.rng.choices(kinds, weights)[0] for r in rows}

        self.name = f"protocol-{uuid.uuid4()}"
        store = open_store(f"memory://{self.name}")
        self.objects: dict[str, str] = {}
        # Reading is undisturbed: it changes nothing, and 32 threads drawing from one dice could not be replayed.
        run_id = f"run-{seed}"
        make_ledger(store).create_run({"run_id": run_id})
        self.books = make_ledger(store, run_id)
        # retry_seconds=0: what the store would wait out, a driver of this world has to deal with.
        self.flaky = RepeatingStore(
            store,
            random.Random(seed + 1),
            before=self.faults.lost_acknowledgement / 2,
            after=self.faults.lost_acknowledgement,
        )
        self.flaky.repeat = self.faults.repeated_create
        self.ledger = make_ledger(self.flaky, run_id)
        self.seen: dict[str, Resolution] = {}
        self.provoked: Counter[str] = Counter()
        self.drivers: list[Driver] = []

    @property
    def is_calm(self) -> bool:
        return self.now >= CALM_AFTER_SECONDS

    def happens(self, probability: float) -> bool:
        return not self.is_calm and self.rng.random() < probability

    def after(self, delay: float, what: Callable[[], None]) -> None:
        heapq.heappush(self._heap, (self.now + delay, next(self._serial), what))

    def soon(self, what: Callable[[], None], most: float = 2.0) -> None:
        self.after(self.rng.uniform(0, most), what)

    def run(self) -> None:
        """Until nothing is left to happen: the run is complete, and so are the zombies."""
        self.after(CALM_AFTER_SECONDS, self.calm_down)
        self.after(60, self.operate)
        self.start_driver()
        for _ in range(MAX_EVENTS):
            if not self._heap:
                break
            self.now, _, what = heapq.heappop(self._heap)
            what()
        check(not self._heap, f"still going after {MAX_EVENTS} events")
        check(self.is_complete, "no driver ended complete")

    def calm_down(self) -> None:
        self.flaky.calm()
        self.flaky.repeat = 0.0

    @property
    def is_complete(self) -> bool:
        """Whether a driver has done all that is open by now."""
        generation = self.books.reopened().generation
        return any(d.finished == "complete" and d.generation == generation for d in self.drivers)

    def operate(self) -> None:
        """Every 20 s somebody may look at the run and have prompts done again."""
        if self.is_calm:
            return
        self.after(20, self.operate)
        retry, repair = self.happens(self.faults.retry), self.happens(self.faults.repair)
        if not retry and not repair:
            return
        resolutions = self.books.resolutions()
        accounting = self.account(resolutions)
        again: dict[str, set[int]] = {}
        if retry:
            again = dead_by_lease(resolutions, accounting, accounting.dead)
            for row in (row for some in again.values() for row in some):
                self.provoked["dead prompt opened again"] += 1
                if self.kinds[row] != "flaky" and self.rng.random() < 0.5:
                    self.kinds[row] = "fine"
                    self.mended.add(row)
        if repair:
            for row, lease_id in accounting.committed.items():
                if self.rng.random() < 0.2:
                    again.setdefault(lease_id, set()).add(row)
                    self.provoked["committed prompt opened again"] += 1
        if again:
            self.books.reopen(again)
            self.soon(self.start_driver, 30)

    def account(self, resolutions: dict[str, Resolution] | None = None) -> Accounting:
        reopened = self.books.reopened()
        return account(self.roots, self.books.resolutions() if resolutions is None else resolutions, reopened)

    def start_driver(self) -> None:
        """The user runs the command (again)."""
        if self.is_complete:
            return
        check(len(self.drivers) < MAX_DRIVERS, f"not complete after {MAX_DRIVERS} drivers")
        self.drivers.append(Driver(self, f"d{len(self.drivers)}"))

    def saw(self, standing: Resolution) -> None:
        first = self.seen.setdefault(standing.lease_id, standing)
        check(first == standing, f"the record of {standing.lease_id} changed after it was read")

    def audit(self) -> None:
        """The books must balance."""
        resolutions = self.books.resolutions()
        books = self.account(resolutions)
        check(not books.open, f"open leases after the end: {books.open}")
        check(not books.superseded, f"records outside the lease tree: {books.superseded}")
        check(not books.committed.keys() & books.dead.keys(), "rows both committed and dead")
        check(books.committed.keys() | books.dead.keys() == self.kinds.keys(), "rows lost or invented")
        for lease_id, standing in self.seen.items():
            check(resolutions.get(lease_id) == standing, f"the record of {lease_id} is not what a driver read")
        for row, lease_id in books.committed.items():
            check(row not in books.reopened.of(lease_id), f"row {row} counts where it was opened again")
            shards = [s for s in resolutions[lease_id].shards if row in s.rows]
            check(len(shards) == 1, f"row {row} is in {len(shards)} shards")
            check(self.objects.get(shards[0].key) == shards[0].tree_xxh3, f"the bytes of {shards[0].key} are not there")
        for lease_id, number in self.books.starts().items():
            check(number <= self.budgets.lease_starts, f"{lease_id} was started {number} times")
        limits = {"prompt_transient": self.budgets.prompt_attempts, "crash": self.budgets.lease_starts}
        for row, kind in self.kinds.items():
            dead = books.dead.get(row)
            if kind in ("poison", "refused", "hopeless"):
                check(dead is not None, f"row {row} ({kind}) is committed")
            if dead is not None:
                # A driver whose verdict lost to another's record tries what that record left over once more.
                limit = limits.get(dead.failure_class, self.budgets.prompt_attempts) + len(self.drivers) - 1
                check(1 <= dead.attempts <= limit, f"row {row} died after {dead.attempts} tries")
                known = f"p{row}" if dead.failure_class != "crash" else ""
                check(dead.prompt_id == known, f"row {row} died as {dead.prompt_id}")
                self.provoked[f"dead: {dead.failure_class}"] += 1
            if row in self.mended and not dead:
                self.provoked["dead prompt that worked in the end"] += 1
            elif kind in ("fine", "flaky"):
                self.provoked["innocent dead" if dead else "innocent committed"] += 1
        for driver in self.drivers:
            self.provoked[f"driver: {driver.finished or 'died'}"] += 1
        for resolution in resolutions.values():
            self.provoked[f"record: {resolution.kind}"] += 1
        garbage = self.objects.keys() - {s.key for r in resolutions.values() for s in r.shards}
        self.provoked["unreferenced object"] += len(garbage)
        self.provoked["412 on own success"] += self.flaky.repeated


class Driver:
    """Performs the scheduler's actions on the world, slowly and not always. Dies without a word."""

    def __init__(self, world: World, name: str) -> None:
        self.world, self.name = world, name
        self.is_alive = True
        self.finished: str | None = None
        self.replicas: dict[str, Replica] = {}
        self.believed_dead: set[str] = set()
        self._places = itertools.count()
        self._ids = itertools.count()
        resolutions = world.books.resolutions()
        for resolution in resolutions.values():
            world.saw(resolution)
        books = world.account(resolutions)
        self.generation = books.generation
        self.scheduler = world.make_scheduler(
            books.open,
            world.budgets,
            starts=world.books.starts(),
            attempts=tries_so_far(books.open, resolutions),
            total_rows=len(world.kinds),
            already_dead=len(books.dead),
            already_committed=len(books.committed),
            new_attempt_id=lambda: f"{name}-{next(self._ids)}",
            leases_in_flight=world.rng.choice([1, 2, 2, 3]),
            speculate=world.rng.random() < 0.7,
        )
        for _ in range(world.rng.randint(1, 3)):
            self.find_place()
        self.tick()
        world.soon(self.live, 20)

    @property
    def acts(self) -> bool:
        return self.is_alive and self.finished is None

    def hear(self, event: Event) -> None:
        if self.acts:
            if isinstance(event, ReplicaDied):
                self.believed_dead.add(event.replica)
            if isinstance(event, LeaseDone):
                self.world.provoked["report of a zombie"] += event.replica in self.believed_dead
            for action in self.scheduler.handle(event, self.world.now):
                self.perform(action)

    def tell(self, event: Event, most: float = 2.0) -> None:
        self.world.soon(lambda: self.hear(event), most)

    def tick(self) -> None:
        if self.acts:
            self.hear(Tick())
            self.world.after(5, self.tick)

    def find_place(self) -> None:
        self.tell(PlaceFound(f"{self.name}n{next(self._places)}"), 30)

    def live(self) -> None:
        """Every 10 s something may happen to the cluster or to the driver itself."""
        world, faults = self.world, self.world.faults
        if not self.acts:
            return
        world.after(10, self.live)
        if world.is_calm and world.now < CALM_AFTER_SECONDS + 10:
            self.find_place()
        victims = [r for r in self.replicas.values() if r.is_alive]
        if victims and world.happens(faults.drain):
            victim = world.rng.choice(victims)
            self.hear(Draining(victim.name))
            world.soon(victim.lose_node, 30)
        if victims and world.happens(faults.lost_place):
            world.rng.choice(victims).lose_node()
            self.find_place()
        if world.happens(faults.join):
            world.provoked["node joined"] += 1
            self.find_place()
        if world.happens(faults.second_driver) and sum(d.acts for d in world.drivers) < 3:
            world.start_driver()
        if world.happens(faults.stop):
            self.hear(StopRequested())
        if world.happens(faults.driver_death):
            self.die()

    def die(self) -> None:
        """kill -9. The replicas die with it, or hear of it late and finish what they do."""
        self.is_alive = False
        for replica in self.replicas.values():
            if not self.world.happens(self.world.faults.zombie):
                replica.is_alive = False
        self.world.soon(self.world.start_driver, 30)

    def perform(self, action: Action) -> None:
        world = self.world
        world.provoked[type(action).__name__] += 1
        match action:
            case SpawnReplica(place, name):
                self.replicas[name] = Replica(self, place, name)
            case RetireReplica(name):
                if not world.happens(world.faults.zombie):
                    self.replicas[name].is_alive = False
            case StartLease():
                world.soon(lambda: self.start_lease(action))
            case CancelLease(name, _, attempt, keep):
                world.soon(lambda: self.replicas[name].cancel(attempt, keep))
            case Resolve(resolution):
                world.provoked["lease divided for its size"] += resolution.lease_id in self.scheduler._dividing
                world.soon(lambda: self.resolve(resolution))
            case DiscardShards(keys):
                world.soon(lambda: [world.objects.pop(key, None) for key in keys])
            case AbandonPlace():
                pass
            case Finished(reason):
                self.end(reason)

    def start_lease(self, action: StartLease) -> None:
        if not self.acts:
            return
        try:
            self.world.ledger.record_start(action.lease.lease_id, action.number, {"attempt": action.attempt})
        except StoreUnavailable:
            self.world.soon(lambda: self.start_lease(action))
            return
        self.replicas[action.replica].start(action.lease, action.attempt)

    def resolve(self, resolution: Resolution) -> None:
        if not self.acts:
            return
        try:
            standing, ours = self.world.ledger.resolve(resolution)
        except StoreUnavailable:
            # Whether the record was created is not known. Asking again and dying must both be right.
            if self.world.rng.random() < 0.5:
                self.world.soon(lambda: self.resolve(resolution))
            else:
                self.die()
            return
        self.world.saw(standing)
        self.world.provoked["record lost to another driver"] += standing.attempt != resolution.attempt
        self.world.provoked["own record taken for another's"] += standing.attempt == resolution.attempt and not ours
        self.tell(Resolved(standing, ours))

    def end(self, reason: str) -> None:
        self.finished = reason
        for replica in self.replicas.values():
            if not self.world.happens(self.world.faults.zombie):
                replica.is_alive = False
        if reason == "complete":
            # What was opened again after it began is not its business.
            reopened = [f".g{n}" for n in range(self.generation + 1, self.world.books.reopened().generation + 1)]
            open_ = [x for x in self.world.account().open if not any(f"{x.lease_id}.".count(f"{g}.") for g in reopened)]
            check(not open_, f"{self.name} says complete while {open_} are open")
        else:
            self.world.soon(self.world.start_driver, 30)


class Replica:
    """Prefills prompt by prompt, uploads one shard per attempt, reports. `is_alive` is the process: what the
    driver believes is another matter."""

    def __init__(self, driver: Driver, place: str, name: str) -> None:
        self.world, self.driver, self.place, self.name = driver.world, driver, place, name
        self.is_alive = True
        self.seconds_per_prompt = self.world.rng.choice([0.5, 1.0, 4.0, 12.0])
        self.attempts: dict[str, Attempt] = {}
        if self.world.happens(self.world.faults.failed_start):
            self.is_alive = False
            driver.tell(ReplicaFailedToStart(name, "no start", permanent=self.world.rng.random() < 0.1), 10)
        else:
            driver.tell(ReplicaReady(name), 10)

    def die(self, *, blame: bool) -> None:
        self.is_alive = False
        self.driver.tell(ReplicaDied(self.name, "simulated", blame), 10)

    def lose_node(self) -> None:
        """Its node is gone, or so the driver hears."""
        if not self.is_alive:
            return
        self.is_alive = self.world.happens(self.world.faults.zombie)
        events = [ReplicaDied(self.name, "node lost", blame=False), PlaceGone(self.place)]
        self.world.rng.shuffle(events)
        for event in events:
            self.driver.tell(event, 10)

    def start(self, lease: Lease, attempt_id: str) -> None:
        self.attempts[attempt_id] = Attempt(lease, attempt_id)
        self.go_on(self.attempts[attempt_id])

    def cancel(self, attempt_id: str, keep: bool) -> None:
        # An attempt that has not arrived yet, or is over, cannot be cancelled.
        if (attempt := self.attempts.get(attempt_id)) is not None:
            attempt.cancelled, attempt.keep = True, attempt.keep and keep

    def go_on(self, attempt: Attempt) -> None:
        if not self.is_alive:
            return
        if attempt.cancelled or attempt.position == len(attempt.lease.rows):
            self.world.soon(lambda: self.upload(attempt))
        else:
            self.world.soon(lambda: self.prefill(attempt), 2 * self.seconds_per_prompt)

    def prefill(self, attempt: Attempt) -> None:
        world = self.world
        if not self.is_alive:
            return
        row = attempt.lease.rows[attempt.position]
        attempt.position += 1
        kind = world.kinds[row]
        if kind == "poison" or world.happens(world.faults.crash):
            self.die(blame=True)
        elif world.happens(world.faults.broken_engine):
            self.report(LeaseFailed(self.name, attempt.lease.lease_id, attempt.attempt, "replica", "watchdog"))
        elif kind == "refused":
            attempt.failures.append(PromptFailure(row, f"p{row}", "prompt_permanent", "NaN"))
        elif kind == "hopeless" or (kind == "flaky" and world.tried[row] == 0):
            world.tried[row] += 1
            attempt.failures.append(PromptFailure(row, f"p{row}", "prompt_transient", "mismatch"))
        else:
            attempt.done.append(row)
        if world.happens(world.faults.zombie * 0.05):
            self.driver.tell(ReplicaDied(self.name, "no answer", blame=True), 0.1)
        self.go_on(attempt)

    def upload(self, attempt: Attempt) -> None:
        world, lease_id = self.world, attempt.lease.lease_id
        if not self.is_alive:
            return
        if world.happens(world.faults.failed_upload):
            self.report(LeaseFailed(self.name, lease_id, attempt.attempt, "storage", "503"))
            return
        if not attempt.keep and world.rng.random() < 0.5:
            self.report(LeaseFailed(self.name, lease_id, attempt.attempt, "cancelled", ""))
            return
        shards: tuple[ShardRecord, ...] = ()
        if attempt.done:
            key = f"data/{lease_id}-{attempt.attempt}.parquet"
            digest = f"{world.rng.getrandbits(64):016x}"  # no two attempts give the same bytes
            world.objects[key] = digest
            entries = [IndexEntry(row, f"p{row}", 0, 1, 0, 10, 10, i, {}) for i, row in enumerate(attempt.done)]
            shards = (ShardRecord(key, 100, digest, tuple(entries)),)
        self.report(LeaseDone(self.name, LeaseOutcome(lease_id, attempt.attempt, shards, tuple(attempt.failures))))
        if world.happens(world.faults.crash * 5):
            self.die(blame=True)

    def report(self, event: Event) -> None:
        self.driver.tell(event)
        if self.world.happens(self.world.faults.repeated_report):
            self.driver.tell(event, 20)


def simulate(seed: int, **options: Any) -> Counter[str]:
    """One whole run and its audit. Returns what happened in it, counted."""
    world = World(seed, **options)
    # Stores in memory are kept by name for as long as the process lives.
    del _memory_stores[world.name]
    try:
        world.run()
        world.audit()
        return world.provoked
    except (AssertionError, HsrayError, LookupError) as err:
        raise Violation(
            f"seed {seed} {options or ''}: {err!r} (replay: python -m tests.protocol --seed {seed})"
        ) from err


def run_seeds(seeds: Iterable[int], **options: Any) -> Counter[str]:
    provoked: Counter[str] = Counter()
    for seed in seeds:
        provoked += simulate(seed, **options)
    return provoked


def _run_batch(seeds: range, options: dict[str, Any]) -> tuple[int, Counter[str], list[str]]:
    provoked: Counter[str] = Counter()
    violations = []
    for seed in seeds:
        try:
            provoked += simulate(seed, **options)
        except Violation as err:
            violations.append(str(err))
    return len(seeds), provoked, violations


def run_many(num_seeds: int, **options: Any) -> Iterator[tuple[int, Counter[str], list[str]]]:
    """Seeds 0 to `num_seeds` on all cores: batch by batch, how many, what was provoked, what was violated."""
    batches = [range(start, min(start + BATCH, num_seeds)) for start in range(0, num_seeds, BATCH)]
    with ProcessPoolExecutor(os.cpu_count()) as pool:
        yield from pool.map(_run_batch, batches, itertools.repeat(options))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=5000)
    parser.add_argument("--seed", type=int)
    args = parser.parse_args()
    if args.seed is not None:
        print(dict(simulate(args.seed)))
        return 0
    provoked: Counter[str] = Counter()
    violations: list[str] = []
    done, began, said = 0, time.monotonic(), time.monotonic()
    for count, counted, violated in run_many(args.seeds):
        done += count
        provoked += counted
        violations += violated
        for violation in violated:
            print(violation)
        if time.monotonic() - said > 30:
            said = time.monotonic()
            print(f"{done} of {args.seeds} schedules, {len(violations)} violations", flush=True)
    for what, times in sorted(provoked.items()):
        print(f"{times:10}  {what}")
    print(f"{done} schedules, {len(violations)} violations in {time.monotonic() - began:.0f} s")
    return 1 if violations else 0


if __name__ == "__main__":
    sys.exit(main())
