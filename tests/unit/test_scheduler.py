"""The scheduler, one rule at a time: events go in by hand, actions are read off. No clock, no Ray, no store."""

import itertools
from collections.abc import Callable, Iterable, Sequence
from typing import TypeVar

import pytest

from hsray.config import BudgetConfig
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
from hsray.records import IndexEntry, Lease, LeaseOutcome, PromptFailure, Resolution, ShardRecord
from hsray.scheduler import Scheduler

A = TypeVar("A")


def make_leases(num: int, rows_each: int = 4) -> list[Lease]:
    return [Lease(f"{i:06d}", tuple(range(i * rows_each, (i + 1) * rows_each)), (10,) * rows_each) for i in range(num)]


def make_shard(key: str, rows: Iterable[int]) -> ShardRecord:
    entries = tuple(IndexEntry(r, f"p{r}", 0, 1, 0, 10, 10, i, {}) for i, r in enumerate(rows))
    return ShardRecord(key, 100, f"xxh3 of {key}", entries)


def permanent(row: int) -> PromptFailure:
    return PromptFailure(row, f"p{row}", "prompt_permanent", "contains NaN")


def transient(row: int) -> PromptFailure:
    return PromptFailure(row, f"p{row}", "prompt_transient", "capture mismatch")


def only(kind: type[A], actions: Sequence[Action]) -> A:
    found = of(kind, actions)
    assert len(found) == 1, f"expected one {kind.__name__} in {actions}"
    return found[0]


def of(kind: type[A], actions: Sequence[Action]) -> list[A]:
    return [a for a in actions if isinstance(a, kind)]


class Bench:
    """A scheduler with a hand-moved clock. Resolves stay unanswered until `answer` is called."""

    def __init__(self, leases: Sequence[Lease], budgets: BudgetConfig, **options) -> None:
        self.now = 100.0
        self.latest = ""  # the replica spawned last
        self._ids = itertools.count()
        self.scheduler = Scheduler(
            leases,
            budgets,
            **{
                "starts": {},
                "attempts": {},
                "total_rows": sum(len(lease.rows) for lease in leases),
                "already_dead": 0,
                "already_committed": 0,
                "new_attempt_id": lambda: f"attempt{next(self._ids)}",
                "speculate": False,
                **options,
            },
        )

    def send(self, event: Event, *, after: float = 0.0) -> list[Action]:
        self.now += after
        actions = self.scheduler.handle(event, self.now)
        self.latest = next((a.replica for a in actions if isinstance(a, SpawnReplica)), self.latest)
        return actions

    def found(self, place: str) -> str:
        return only(SpawnReplica, self.send(PlaceFound(place))).replica

    def ready(self, place: str) -> tuple[str, list[StartLease]]:
        """A replica at a new place, ready; and the leases it was given."""
        replica = self.found(place)
        return replica, of(StartLease, self.send(ReplicaReady(replica)))

    def again(self, place: str, *, after: float = 120.0) -> tuple[str, list[StartLease]]:
        """The next replica at a place after its pause, ready; and the leases it was given."""
        spawned = [s for s in of(SpawnReplica, self.send(Tick(), after=after)) if s.place == place]
        assert len(spawned) == 1
        return spawned[0].replica, of(StartLease, self.send(ReplicaReady(spawned[0].replica)))

    def done(
        self,
        start: StartLease,
        committed: Iterable[int] | None = None,
        failures: Sequence[PromptFailure] = (),
        replica: str | None = None,
    ) -> list[Action]:
        """The attempt ends; all rows are delivered unless told otherwise."""
        rows = tuple(start.lease.rows if committed is None else committed)
        shards = (make_shard(key_of(start), rows),) if rows else ()
        outcome = LeaseOutcome(start.lease.lease_id, start.attempt, shards, tuple(failures))
        return self.send(LeaseDone(replica or start.replica, outcome))

    def answer(self, actions: Sequence[Action]) -> list[Action]:
        """Every Resolve in `actions` wins."""
        return [a for resolve in of(Resolve, actions) for a in self.send(Resolved(resolve.resolution, ours=True))]

    def finish(self, start: StartLease) -> list[Action]:
        return self.answer(self.done(start))

    def die(self, replica: str, *, blame: bool = True) -> list[Action]:
        return self.send(ReplicaDied(replica, "exit code -9", blame))


def key_of(start: StartLease) -> str:
    return f"data/{start.lease.lease_id}-{start.attempt}.parquet"


def ids(starts: Sequence[StartLease]) -> list[str]:
    return [s.lease.lease_id for s in starts]


@pytest.fixture
def bench() -> Callable[..., Bench]:
    def make(leases: Sequence[Lease] | int = 4, budgets: dict | None = None, **options) -> Bench:
        leases = make_leases(leases) if isinstance(leases, int) else leases
        quick = {"max_dead_fraction": 1.0, "no_capacity_seconds": 60}
        return Bench(leases, BudgetConfig(**{**quick, **(budgets or {})}), **options)

    return make


# Giving out.


def test_a_ready_replica_gets_two_leases_in_plan_order_and_the_next_when_one_is_done(bench):
    b = bench(4)

    replica, starts = b.ready("n1:0")
    assert ids(starts) == ["000000", "000001"]
    assert [s.number for s in starts] == [1, 1]
    assert {s.replica for s in starts} == {replica}
    actions = b.done(starts[0])

    assert ids(of(StartLease, actions)) == ["000002"]


def test_every_replica_gets_one_lease_before_any_gets_a_second(bench):
    leases = make_leases(5)
    b = bench(leases)
    first, second = b.found("n1:0"), b.found("n2:0")
    b.send(ReplicaReady(first))
    done = [b.done(s) for s in [StartLease(first, leases[i], f"attempt{i}", 1) for i in (0, 1)]]
    running = of(StartLease, [a for actions in done for a in actions])
    assert ids(running) == ["000002", "000003"]

    assert ids(of(StartLease, b.send(ReplicaReady(second)))) == ["000004"]


def test_leases_in_flight_is_the_limit_per_replica(bench):
    b = bench(6, leases_in_flight=3)

    _, starts = b.ready("n1:0")

    assert ids(starts) == ["000000", "000001", "000002"]


def test_no_replica_is_started_that_no_lease_waits_for(bench):
    b = bench(1)
    b.ready("n1:0")

    assert b.send(PlaceFound("n2:0")) == []

    assert only(SpawnReplica, b.die("n1:0#1")).replica == "n2:0#1"


def test_a_known_place_is_not_used_twice(bench):
    b = bench(4)
    b.found("n1:0")

    assert b.send(PlaceFound("n1:0")) == []


# Outcomes.


def test_a_delivered_lease_is_done_only_when_its_record_stands(bench):
    b = bench(1)
    _, (start,) = b.ready("n1:0")

    actions = b.done(start)

    resolution = only(Resolve, actions).resolution
    assert resolution.kind == "commit"
    assert resolution.attempt == start.attempt
    assert resolution.replica == "n1:0#1"
    assert resolution.committed_rows == {0, 1, 2, 3}
    assert of(Finished, actions) == []
    assert b.scheduler.progress.prompts_committed == 0
    actions = b.send(Resolved(resolution, ours=True))
    assert only(Finished, actions).reason == "complete"
    assert actions[-1] == of(Finished, actions)[0]
    assert b.scheduler.progress.prompts_committed == 4


def test_nothing_follows_finished(bench):
    b = bench(1)
    _, (start,) = b.ready("n1:0")
    b.finish(start)

    assert b.scheduler.is_finished
    for event in (Tick(), PlaceFound("n2:0"), StopRequested(), ReplicaDied("n1:0#1", "", True)):
        assert b.send(event, after=1000) == []


def test_a_run_without_open_leases_is_complete_at_the_first_event(bench):
    b = bench([])

    assert only(Finished, b.send(Tick())).reason == "complete"


def test_rows_that_were_not_tried_go_into_a_remainder_that_runs_before_fresh_leases(bench):
    b = bench(5)
    _, starts = b.ready("n1:0")

    actions = b.done(starts[0], committed=[0, 2])
    resolution = only(Resolve, actions).resolution
    assert resolution.kind == "commit"
    assert resolution.attempts == {}
    b.answer(actions)
    actions = b.done(starts[1])

    (start,) = of(StartLease, actions)
    assert start.lease == Lease("000000.r", (1, 3), (10, 10))


def test_a_permanent_failure_is_dead_at_once(bench):
    b = bench(1)
    _, (start,) = b.ready("n1:0")

    resolution = only(Resolve, b.done(start, committed=[0, 1, 3], failures=[permanent(2)])).resolution

    assert resolution.kind == "commit"
    (dead,) = resolution.dead
    assert (dead.row, dead.prompt_id, dead.failure_class, dead.message, dead.attempts) == (
        2, "p2", "prompt_permanent", "contains NaN", 1,
    )  # fmt: skip
    assert resolution.children(start.lease) == ()


def test_a_lease_of_which_everything_is_dead_is_resolved_dead(bench):
    b = bench([Lease("000000", (0, 1), (5, 5))])
    _, (start,) = b.ready("n1:0")

    resolution = only(Resolve, b.done(start, committed=[], failures=[permanent(0), permanent(1)])).resolution

    assert resolution.kind == "dead"
    assert resolution.shards == ()
    assert resolution.dead_rows == {0, 1}


def test_dead_and_untried_rows_without_a_committed_one_are_recorded_with_a_remainder(bench):
    b = bench(1)
    _, (start,) = b.ready("n1:0")

    resolution = only(Resolve, b.done(start, committed=[], failures=[permanent(0)])).resolution

    assert resolution.kind == "commit"
    assert [c.rows for c in resolution.children(start.lease)] == [(1, 2, 3)]


def test_a_transient_failure_is_retried_and_dead_after_its_tries(bench):
    b = bench(1, budgets={"prompt_attempts": 3})
    _, (start,) = b.ready("n1:0")

    actions = b.done(start, committed=[0, 1, 2], failures=[transient(3)])
    assert only(Resolve, actions).resolution.attempts == {3: 1}
    (start,) = of(StartLease, b.answer(actions))
    assert (start.lease.lease_id, start.lease.rows) == ("000000.r", (3,))
    # One prompt, nothing delivered, not dead yet: there is nothing to record.
    actions = b.done(start, committed=[], failures=[transient(3)])
    assert of(Resolve, actions) == []
    (start,) = of(StartLease, actions)
    actions = b.done(start, committed=[], failures=[transient(3)])

    resolution = only(Resolve, actions).resolution
    assert (resolution.kind, resolution.dead[0].attempts) == ("dead", 3)
    assert only(Finished, b.answer(actions)).reason == "complete"


def test_tries_of_earlier_drivers_count(bench):
    b = bench(1, attempts={3: 2})
    _, (start,) = b.ready("n1:0")

    resolution = only(Resolve, b.done(start, committed=[0, 1, 2], failures=[transient(3)])).resolution

    assert [(d.row, d.attempts) for d in resolution.dead] == [(3, 3)]


def test_a_failed_prompt_is_retried_at_another_place_if_there_is_one(bench):
    b = bench(2)
    _, starts = b.ready("n1:0")
    b.ready("n2:0")

    actions = b.answer(b.done(starts[0], committed=[0, 1, 2], failures=[transient(3)]))

    (start,) = of(StartLease, actions)
    assert (start.lease.lease_id, start.replica) == ("000000.r", "n2:0#1")


def test_an_attempt_that_says_nothing_at_all_cannot_repeat_for_ever(bench):
    b = bench(1, budgets={"lease_starts": 3})
    _, (start,) = b.ready("n1:0")

    numbers = []
    while True:
        numbers.append(start.number)
        actions = b.done(start, committed=[])
        if of(Resolve, actions):
            break
        (start,) = of(StartLease, actions)

    assert numbers == [1, 2, 3]
    assert only(Resolve, actions).resolution.kind == "split"


# Deaths and blame.


def test_all_leases_of_a_dead_replica_run_again_one_at_a_time(bench):
    b = bench(2)
    b.ready("n1:0")

    b.die("n1:0#1")
    replica, starts = b.again("n1:0")

    assert replica == "n1:0#2"
    assert [(s.lease.lease_id, s.number) for s in starts] == [("000000", 2)]
    assert ids(of(StartLease, b.done(starts[0]))) == ["000001"]


@pytest.mark.parametrize("lease_crashes", [1, 2])
def test_an_innocent_lease_is_delivered_alone_and_is_not_bisected(bench, lease_crashes):
    b = bench(2, budgets={"lease_crashes": lease_crashes})
    b.ready("n1:0")
    assert of(Resolve, b.die("n1:0#1")) == []

    _, (guilty,) = b.again("n1:0")
    actions = b.die("n1:0#2")
    assert only(Resolve, actions).resolution.lease_id == guilty.lease.lease_id == "000000"
    b.answer(actions)
    _, starts = b.again("n1:0")

    for expected in ("000000.a", "000000.b", "000001"):
        assert ids(starts) == [expected]
        actions = b.done(starts[0])
        assert only(Resolve, actions).resolution.kind == "commit"
        starts = of(StartLease, actions)


def test_a_lease_is_bisected_after_its_crashes_and_its_halves_run_alone(bench):
    b = bench(1, budgets={"lease_crashes": 3}, attempts={1: 1})
    b.ready("n1:0")

    for _ in range(2):
        assert of(Resolve, b.die(b.latest)) == []
        b.again("n1:0")
    resolution = only(Resolve, b.die(b.latest)).resolution

    assert (resolution.kind, resolution.lease_id, resolution.replica) == ("split", "000000", "n1:0#3")
    assert resolution.attempts == {1: 1}
    assert resolution.shards == ()
    b.send(Resolved(resolution, ours=True))
    _, starts = b.again("n1:0")
    assert [(s.lease.lease_id, s.lease.rows, s.number) for s in starts] == [("000000.a", (0, 1), 1)]
    assert [s.lease.rows for s in of(StartLease, b.done(starts[0]))] == [(2, 3)]


def test_a_single_prompt_is_dead_after_its_crashes(bench):
    b = bench([Lease("000000", (17,), (5,))], budgets={"lease_crashes": 3})
    b.ready("n1:0")

    for _ in range(2):
        b.die(b.latest)
        b.again("n1:0")
    actions = b.die(b.latest)

    resolution = only(Resolve, actions).resolution
    (dead,) = resolution.dead
    assert (resolution.kind, dead.row, dead.prompt_id, dead.failure_class, dead.attempts) == (
        "dead", 17, "", "crash", 3,
    )  # fmt: skip
    assert "exit code -9" in dead.message
    assert only(Finished, b.answer(actions)).reason == "complete"


def test_a_loss_without_blame_costs_nothing(bench):
    b = bench(2, budgets={"lease_starts": 2})
    b.ready("n1:0")

    for _ in range(20):
        actions = b.die(b.latest, blame=False)
        assert of(AbandonPlace, actions) == []
        _, starts = b.again("n1:0")

        assert [(s.lease.lease_id, s.number) for s in starts] == [("000000", 1), ("000001", 1)]


def test_a_crashed_lease_moves_to_another_place_which_runs_dry_for_it(bench):
    b = bench(6)
    b.ready("n1:0")
    _, others = b.ready("n2:0")
    assert ids(others) == ["000002", "000003"]

    b.die("n1:0#1")
    assert of(StartLease, b.done(others[0])) == []
    (start,) = of(StartLease, b.done(others[1]))

    assert (start.lease.lease_id, start.replica) == ("000000", "n2:0#1")


def test_a_place_in_doubt_proves_itself_on_one_unsuspected_lease(bench):
    b = bench(4)
    b.ready("n1:0")
    b.die("n1:0#1")

    _, starts = b.again("n1:0")
    assert ids(starts) == ["000002"]
    (start,) = of(StartLease, b.done(starts[0]))

    assert start.lease.lease_id == "000000"


def test_a_lease_that_ended_before_the_death_is_not_blamed(bench):
    b = bench(2, budgets={"lease_crashes": 1})
    _, starts = b.ready("n1:0")

    committed = b.done(starts[0])
    split = b.die("n1:0#1")

    assert only(Resolve, committed).resolution.lease_id == "000000"
    assert only(Resolve, split).resolution.lease_id == "000001"
    assert b.scheduler.progress.leases_resolving == 2


def test_starts_of_earlier_drivers_bisect_a_lease_before_it_starts_again(bench):
    leases = [Lease("000000", (0, 1), (5, 5)), Lease("000001.b", (2,), (5,)), Lease("000002", (3,), (5,))]
    b = bench(leases, starts={"000000": 10, "000001.b": 11, "000002": 9})

    actions = b.send(Tick())

    split, dead = (r.resolution for r in of(Resolve, actions))
    assert (split.kind, split.lease_id) == ("split", "000000")
    assert (dead.kind, dead.lease_id, dead.dead[0].prompt_id) == ("dead", "000001.b", "")
    assert "started 11 times" in dead.dead[0].message
    _, starts = b.ready("n1:0")
    assert [(s.lease.lease_id, s.number) for s in starts] == [("000002", 10)]


@pytest.mark.parametrize("poison", range(8))
def test_one_bad_prompt_in_the_only_lease_at_the_only_place_dies_alone(bench, poison):
    b = bench([Lease("000000", tuple(range(8)), (5,) * 8)])
    b.ready("n1:0")
    running = [StartLease("n1:0#1", Lease("000000", tuple(range(8)), (5,) * 8), "attempt0", 1)]

    for _ in range(60):
        start = running.pop()
        actions = b.die(start.replica) if poison in start.lease.rows else b.done(start)
        actions = [*actions, *b.answer(actions)]
        assert of(AbandonPlace, actions) == []
        if of(Finished, actions):
            break
        running += of(StartLease, actions)
        if not running:
            running += b.again("n1:0")[1]

    assert of(Finished, actions)[0].reason == "complete"
    progress = b.scheduler.progress
    assert (progress.prompts_committed, progress.prompts_dead) == (7, 1)
    assert progress.replica_deaths == 12  # the whole, a half, a quarter, the prompt: three each


# Places.


def test_a_place_that_kills_every_lease_is_abandoned(bench):
    b = bench(8, budgets={"replica_deaths": 4})
    b.ready("n1:0")

    for _ in range(3):
        assert of(AbandonPlace, b.die(b.latest)) == []
        b.again("n1:0")
    actions = b.die(b.latest)

    assert only(AbandonPlace, actions).place == "n1:0"
    assert of(Resolve, actions) == []
    assert b.send(PlaceFound("n1:0")) == []
    assert of(SpawnReplica, b.send(Tick(), after=59)) == []
    assert b.scheduler.progress.places_abandoned == 1


def test_a_commit_clears_a_place(bench):
    b = bench(20, budgets={"replica_deaths": 4, "lease_crashes": 3})
    b.ready("n1:0")

    for _ in range(6):
        assert of(AbandonPlace, b.die(b.latest)) == []
        _, starts = b.again("n1:0")
        b.finish(starts[0])

    assert b.scheduler.progress.replica_deaths == 6


def test_a_dead_replica_is_replaced_after_a_pause_that_doubles(bench):
    b = bench(8)
    b.found("n1:0")

    for pause in (2, 4, 8):
        assert of(SpawnReplica, b.send(ReplicaFailedToStart(b.latest, "out of memory", False))) == []
        assert of(SpawnReplica, b.send(Tick(), after=pause - 0.1)) == []
        only(SpawnReplica, b.send(Tick(), after=0.2))

    actions = b.send(ReplicaFailedToStart(b.latest, "out of memory", False))
    assert "out of memory" in only(AbandonPlace, actions).reason


def test_a_permanent_start_failure_gives_up_the_place_only(bench):
    b = bench(4)
    first, second = b.found("n1:0"), b.found("n2:0")

    actions = b.send(ReplicaFailedToStart(first, "self-test failed", permanent=True))

    assert only(AbandonPlace, actions).place == "n1:0"
    assert of(Finished, actions) == []
    assert ids(of(StartLease, b.send(ReplicaReady(second)))) == ["000000", "000001"]


def test_the_run_ends_when_every_replica_refused_to_start(bench):
    b = bench(4)
    first, second = b.found("n1:0"), b.found("n2:0")
    b.send(ReplicaFailedToStart(first, "self-test failed", permanent=True))

    finished = only(Finished, b.send(ReplicaFailedToStart(second, "self-test failed", permanent=True)))

    assert finished.reason == "no_capacity"
    assert "self-test failed" in finished.detail


def test_the_run_ends_when_no_place_came_for_a_minute(bench):
    b = bench(2)
    b.send(Tick())

    assert b.send(Tick(), after=59) == []
    finished = only(Finished, b.send(Tick(), after=2))

    assert finished.reason == "no_capacity"


def test_a_place_found_in_time_saves_the_run(bench):
    b = bench(2)
    b.send(Tick())
    b.send(Tick(), after=59)
    b.ready("n1:0")
    b.send(PlaceGone("n1:0"), after=300)

    assert b.send(Tick(), after=59) == []
    assert only(SpawnReplica, b.send(PlaceFound("n1:0"))).replica == "n1:0#2"


def test_leases_of_a_vanished_place_go_back_without_blame_and_its_replica_is_killed(bench):
    b = bench(2)
    b.ready("n1:0")
    b.found("n2:0")

    actions = b.send(PlaceGone("n1:0"))
    assert only(RetireReplica, actions).replica == "n1:0#1"
    starts = of(StartLease, b.send(ReplicaReady("n2:0#1")))

    assert [(s.lease.lease_id, s.number) for s in starts] == [("000000", 1), ("000001", 1)]


def test_a_draining_replica_finishes_what_runs_and_leaves(bench):
    b = bench(4)
    _, starts = b.ready("n1:0")

    assert b.send(Draining("n1:0#1")) == []
    actions = b.done(starts[0])
    assert of(StartLease, actions) == []
    assert of(RetireReplica, actions) == []
    actions = b.done(starts[1], committed=[])

    assert only(RetireReplica, actions).reason == "drained"
    assert of(SpawnReplica, b.send(Tick(), after=59)) == []
    _, starts = b.again("n1:0", after=2)
    assert [(s.lease.lease_id, s.number) for s in starts] == [("000001", 1), ("000002", 1)]


def test_a_replica_that_drains_while_idle_or_starting_is_released_at_once(bench):
    b = bench(4)
    b.found("n1:0")

    assert only(RetireReplica, b.send(Draining("n1:0#1"))).replica == "n1:0#1"


def test_a_storage_failure_blames_no_prompt_but_four_in_a_row_cost_the_place(bench):
    b = bench(1, budgets={"lease_crashes": 1, "lease_starts": 2, "replica_deaths": 4})
    replica, (start,) = b.ready("n1:0")

    for _ in range(3):
        failed = LeaseFailed(replica, "000000", start.attempt, "storage", "503 Slow Down")
        (start,) = of(StartLease, b.send(failed))
        assert start.number == 1
    actions = b.send(LeaseFailed(replica, "000000", start.attempt, "storage", "503 Slow Down"))

    assert only(RetireReplica, actions).replica == replica
    assert "503 Slow Down" in only(AbandonPlace, actions).reason
    assert of(Resolve, actions) == []


def test_a_broken_engine_is_retired_and_counts_as_a_death(bench):
    b = bench(2)
    replica, starts = b.ready("n1:0")

    actions = b.send(LeaseFailed(replica, "000000", starts[0].attempt, "replica", "no prompt finished for 900 s"))

    assert actions == [RetireReplica(replica, "no prompt finished for 900 s")]
    assert b.send(LeaseFailed(replica, "000001", starts[1].attempt, "replica", "same")) == []
    assert b.die(replica) == []
    assert b.scheduler.progress.replica_deaths == 1
    assert [(s.lease.lease_id, s.number) for s in b.again("n1:0")[1]] == [("000000", 2)]


def test_a_place_where_nothing_ever_works_is_abandoned_before_it_eats_every_prompt(bench):
    b = bench(20, budgets={"replica_deaths": 4})
    _, bad = b.ready("n1:0")
    b.ready("n2:0")

    tried = 0
    while bad:
        start = bad.pop(0)
        tried += 1
        actions = b.done(start, committed=[], failures=[transient(r) for r in start.lease.rows])
        assert of(Resolve, actions) == []
        bad += [s for s in of(StartLease, actions) if s.replica == "n1:0#1"]

    assert tried == 4
    assert only(AbandonPlace, actions).place == "n1:0"


# Events that come too late.


def test_a_zombies_outcome_is_ignored_and_its_shards_are_left_alone(bench):
    b = bench(1)
    _, (start,) = b.ready("n1:0")
    b.die("n1:0#1", blame=False)

    assert b.done(start) == []

    _, (second,) = b.again("n1:0")
    assert only(Resolve, b.done(second)).resolution.attempt == second.attempt != start.attempt


def test_an_outcome_delivered_twice_is_resolved_once_and_nothing_is_discarded(bench):
    b = bench(2)
    _, starts = b.ready("n1:0")
    actions = b.done(starts[0])

    assert b.done(starts[0]) == []
    assert b.answer(actions) == []
    assert b.done(starts[0]) == []


def test_an_outcome_under_another_replicas_name_is_ignored(bench):
    b = bench(1)
    _, (start,) = b.ready("n1:0")

    assert b.done(start, replica="n2:0#1") == []


@pytest.mark.parametrize(
    "event",
    [
        ReplicaReady("n9:0#1"),
        ReplicaDied("n9:0#1", "gone", True),
        ReplicaFailedToStart("n9:0#1", "gone", True),
        Draining("n9:0#1"),
        PlaceGone("n9:0"),
        LeaseFailed("n1:0#1", "000000", "attempt99", "storage", "late"),
        Resolved(Resolution("commit", "000000", "x", "n1:0#1"), ours=False),
    ],
    ids=lambda event: type(event).__name__,
)
def test_events_about_what_is_not_known_change_nothing(bench, event):
    b = bench(4)
    b.ready("n1:0")
    before = b.scheduler.progress

    assert b.send(event) == []

    assert b.scheduler.progress == before


# Two drivers.


def test_a_lost_record_discards_our_shards_and_the_standing_one_is_followed(bench):
    b = bench(1)
    _, (start,) = b.ready("n1:0")
    b.done(start)
    standing = Resolution(
        "commit", "000000", "theirs", "m1:0#1", shards=(make_shard("data/000000-theirs", [0, 1]),), attempts={3: 2}
    )

    actions = b.send(Resolved(standing, ours=False))

    assert only(DiscardShards, actions).keys == (key_of(start),)
    (start,) = of(StartLease, actions)
    assert start.lease.rows == (2, 3)
    resolution = only(Resolve, b.done(start, committed=[2], failures=[transient(3)])).resolution
    assert [(d.row, d.attempts) for d in resolution.dead] == [(3, 3)]
    assert b.scheduler.progress.leases_lost == 1


def test_a_standing_record_that_names_our_attempt_keeps_its_shards(bench):
    b = bench(1)
    _, (start,) = b.ready("n1:0")
    resolution = only(Resolve, b.done(start)).resolution

    actions = b.send(Resolved(resolution, ours=False))

    assert of(DiscardShards, actions) == []
    assert only(Finished, actions).reason == "complete"


def test_a_bisection_that_lost_to_a_commit_leaves_no_halves(bench):
    b = bench(1, budgets={"lease_crashes": 1})
    b.ready("n1:0")
    only(Resolve, b.die("n1:0#1"))
    standing = Resolution("commit", "000000", "theirs", "m1:0#1", shards=(make_shard("k", range(4)),))

    actions = b.send(Resolved(standing, ours=False))

    assert only(Finished, actions).reason == "complete"


# Speculation.


def test_an_idle_replica_races_the_oldest_lease_and_the_loser_is_cancelled(bench):
    b = bench(2, speculate=True)
    _, starts = b.ready("n1:0")
    b.found("n2:0")

    (copy,) = of(StartLease, b.send(ReplicaReady("n2:0#1")))
    assert (copy.lease.lease_id, copy.number) == ("000000", 2)
    actions = b.done(copy)
    assert of(CancelLease, actions) == []
    actions = b.answer(actions)
    assert only(CancelLease, actions) == CancelLease("n1:0#1", "000000", starts[0].attempt, keep=False)

    assert only(DiscardShards, b.done(starts[0])).keys == (key_of(starts[0]),)
    assert b.scheduler.progress.speculations >= 1
    assert b.scheduler.progress.retries == 0


def test_a_copy_that_ends_while_the_other_is_being_resolved_waits_for_the_verdict(bench):
    b = bench(2, speculate=True)
    _, starts = b.ready("n1:0")
    b.found("n2:0")
    (copy,) = of(StartLease, b.send(ReplicaReady("n2:0#1")))

    actions = b.done(starts[0])
    assert [a for a in b.done(copy) if not isinstance(a, StartLease)] == []
    actions = b.answer(actions)

    assert only(DiscardShards, actions).keys == (key_of(copy),)


def test_a_lease_has_at_most_two_copies_and_a_place_never_races_itself(bench):
    b = bench(3, speculate=True)
    b.ready("n1:0")
    b.ready("n2:0")
    b.found("n3:0")

    copies = of(StartLease, b.send(ReplicaReady("n3:0#1")))
    assert ids(copies) == ["000000"]
    actions = b.done(copies[0], committed=[])

    assert ids(of(StartLease, actions)) == ["000000"]
    assert b.scheduler.progress.leases_running == 3


def test_a_lease_whose_copy_died_is_not_started_again_while_the_other_runs(bench):
    b = bench(2, speculate=True)
    _, starts = b.ready("n1:0")
    b.found("n2:0")
    b.send(ReplicaReady("n2:0#1"))

    actions = b.die("n2:0#1")

    assert of(StartLease, actions) == []
    assert only(Resolve, b.done(starts[0])).resolution.lease_id == "000000"


def test_a_suspect_is_not_raced(bench):
    b = bench(2, speculate=True)
    b.ready("n1:0")
    b.found("n2:0")
    b.die("n1:0#1")

    (start,) = of(StartLease, b.send(ReplicaReady("n2:0#1")))
    assert start.lease.lease_id == "000000"
    _, starts = b.again("n1:0")

    assert [s.lease.lease_id for s in starts] == []


def test_a_run_does_not_wait_for_the_losers_of_races(bench):
    b = bench(2, speculate=True)
    _, starts = b.ready("n1:0")
    b.found("n2:0")
    (copy,) = of(StartLease, b.send(ReplicaReady("n2:0#1")))
    b.finish(starts[1])

    actions = b.answer(b.done(copy))

    assert of(CancelLease, actions) != []
    assert only(Finished, actions).reason == "complete"


# The last leases.


def test_the_last_leases_are_cut_the_smaller_the_later_they_come(bench):
    b = bench(make_leases(8, rows_each=8))
    _, starts = b.ready("n1:0")
    b.ready("n2:0")
    b.now += 400

    actions = b.done(starts[0])
    splits = [r.resolution for r in of(Resolve, actions) if r.resolution.kind == "split"]
    assert [r.lease_id for r in splits] == ["000007", "000006"]
    assert {r.replica for r in splits} == {"driver"}
    actions = b.answer(actions)

    again = [r.resolution.lease_id for r in of(Resolve, actions)]
    assert again == ["000007.a", "000007.b"]
    b.answer(actions)
    assert b.scheduler.progress.leases_open == 3 + 2 + 2 + 4  # running, whole, halves, quarters


def test_pieces_come_last_the_largest_first_and_are_no_suspects(bench):
    b = bench(make_leases(8, rows_each=8))
    _, starts = b.ready("n1:0")
    _, others = b.ready("n2:0")
    b.now += 400
    order: list[StartLease] = []

    def settle(actions: Sequence[Action]) -> None:
        order.extend(of(StartLease, actions))
        if of(Resolve, actions):
            settle(b.answer(actions))

    settle(b.done(starts[0]))
    for start in [*starts[1:], *others]:
        settle(b.done(start))
    for start in order:  # it grows meanwhile
        settle(b.done(start))

    assert [len(start.lease.rows) for start in order] == [8, 8, 4, 4, 2, 2, 2, 2]
    assert b.scheduler.is_finished
    assert b.scheduler.progress.retries == 0


def test_nobody_hoards_the_pieces_of_the_tail_however_many_there_are(bench):
    b = bench(make_leases(100, rows_each=64), leases_in_flight=4)
    running = [start for n in range(10) for start in b.ready(f"n{n}:0")[1]]
    assert len(running) == 40
    pieces = 0

    while running:
        b.now += 10_000
        actions = b.done(running.pop(0))
        while actions:
            for start in of(StartLease, actions):
                if "." in start.lease.lease_id:
                    pieces += 1
                    assert sum(other.replica == start.replica for other in running) < 2
                running.append(start)
            actions = b.answer(actions)

    assert b.scheduler.is_finished
    assert pieces > 40  # more than four for each replica


def test_a_run_of_short_leases_is_not_cut(bench):
    b = bench(make_leases(8, rows_each=8))
    _, starts = b.ready("n1:0")
    b.ready("n2:0")
    b.now += 20

    assert [r.resolution.kind for r in of(Resolve, b.done(starts[0]))] == ["commit"]


def test_a_cut_that_lost_to_another_drivers_record_follows_that_record(bench):
    b = bench(make_leases(8, rows_each=8))
    _, starts = b.ready("n1:0")
    b.ready("n2:0")
    b.now += 400
    cut = next(r.resolution for r in of(Resolve, b.done(starts[0])) if r.resolution.kind == "split")
    standing = Resolution("commit", cut.lease_id, "theirs", "m1:0#1", shards=(make_shard("k", range(56, 63)),))

    b.send(Resolved(standing, ours=False))

    rest = [lease for lease in b.scheduler._open if lease.startswith(cut.lease_id)]
    assert rest == [f"{cut.lease_id}.r"]


def test_a_lease_that_comes_back_near_the_end_is_cut_too(bench):
    b = bench(make_leases(7, rows_each=8))
    _, starts = b.ready("n1:0")
    b.ready("n2:0")
    b.ready("n3:0")
    b.now += 400
    actions = b.answer(b.done(starts[0]))
    while of(Resolve, actions):
        actions = b.answer(actions)

    lost = b.die("n3:0#1", blame=False)

    assert {r.resolution.kind for r in of(Resolve, lost)} == {"split"}


# Stopping.


def test_a_stop_commits_what_is_complete_and_starts_nothing(bench):
    b = bench(4)
    replica, starts = b.ready("n1:0")
    b.found("n2:0")

    actions = b.send(StopRequested())
    assert actions == [CancelLease(replica, s.lease.lease_id, s.attempt, keep=True) for s in starts]
    assert b.send(ReplicaReady("n2:0#1")) == []
    partial = b.done(starts[0], committed=[0])
    assert of(Finished, partial) == []
    actions = b.send(LeaseFailed(replica, "000001", starts[1].attempt, "cancelled", "nothing complete"))
    assert actions == []
    actions = b.answer(partial)

    assert actions == [Finished("stopped", "stop requested")]
    assert b.scheduler.progress.prompts_committed == 1
    assert b.scheduler.progress.leases_open == 4


def test_a_replica_that_dies_during_the_stop_does_not_hold_it_up(bench):
    b = bench(4)
    replica, _ = b.ready("n1:0")
    b.send(StopRequested())

    assert only(Finished, b.die(replica)).reason == "stopped"


def test_a_stop_with_nothing_running_ends_at_once(bench):
    b = bench(4)
    b.found("n1:0")

    assert only(Finished, b.send(StopRequested())).reason == "stopped"


def test_a_stop_that_finds_everything_done_is_complete(bench):
    b = bench(1)
    _, (start,) = b.ready("n1:0")
    actions = b.done(start)
    assert b.send(StopRequested()) == []

    assert only(Finished, b.answer(actions)).reason == "complete"


def test_too_many_dead_prompts_stop_the_run_after_what_runs_is_committed(bench):
    b = bench(3, budgets={"max_dead_fraction": 0.01}, already_committed=500, total_rows=512, already_dead=10)
    replica, starts = b.ready("n1:0")

    actions = b.answer(b.done(starts[0], committed=[], failures=[permanent(r) for r in starts[0].lease.rows]))

    assert [a.attempt for a in of(CancelLease, actions) if a.keep] != []
    running = [starts[1], *of(StartLease, actions)]
    assert of(Finished, actions) == []
    for attempt in {a.attempt for a in of(CancelLease, actions)} - {starts[1].attempt}:
        b.send(LeaseFailed(replica, "000002", attempt, "cancelled", ""))
    finished = only(Finished, b.finish(running[0]))
    assert finished.reason == "too_many_dead"
    assert b.scheduler.progress.prompts_committed == 504


def test_the_run_stops_when_its_first_prompts_all_die(bench):
    b = bench(3, budgets={"first_prompts_all_fail": 4})
    _, starts = b.ready("n1:0")

    actions = b.answer(b.done(starts[0], committed=[], failures=[permanent(r) for r in range(4)]))
    for cancel in of(CancelLease, actions):
        actions = b.send(LeaseFailed(cancel.replica, cancel.lease_id, cancel.attempt, "cancelled", ""))

    assert only(Finished, actions).reason == "first_prompts_all_fail"


def test_no_capacity_waits_for_the_answers_that_are_out(bench):
    b = bench(2)
    _, starts = b.ready("n1:0")
    actions = b.done(starts[0])
    b.send(PlaceGone("n1:0"))

    assert of(Finished, b.send(Tick(), after=61)) == []
    assert only(Finished, b.answer(actions)).reason == "no_capacity"


def test_progress_counts_the_whole_run(bench):
    b = bench(3, already_committed=10, already_dead=2, total_rows=24)
    _, starts = b.ready("n1:0")
    actions = b.done(starts[0], committed=[0, 1], failures=[permanent(2), transient(3)])

    p = b.scheduler.progress
    assert (p.leases_open, p.leases_running, p.leases_resolving, p.leases_resolved) == (3, 2, 1, 0)
    b.answer(actions)
    b.found("n2:0")

    p = b.scheduler.progress
    assert (p.leases_open, p.leases_resolved, p.leases_lost) == (3, 1, 0)
    assert (p.prompts_total, p.prompts_committed, p.prompts_dead) == (24, 12, 3)
    assert (p.replicas_starting, p.replicas_ready, p.retries, p.replica_deaths) == (1, 1, 1, 0)
