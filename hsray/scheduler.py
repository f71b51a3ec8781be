"""Which replica runs which lease, what is retried, what is given up: events in, actions out.

Pure: no threads, no clock (`now` comes with every event), no Ray, no store. The driver performs the actions
and reports back. Promises: every open lease is queued, running or awaiting the answer to its one `Resolve`;
nothing is believed done before its `Resolved`; a shard is discarded only after a standing record was seen
that names another attempt; `Finished` is emitted exactly once and last.
It must never know how a replica works, where records are kept, or what wall-clock time it is.

How blame works. All leases that run on a replica when it dies are blamed. From then on they are suspects: a
suspect runs alone on its replica, so the next death is exact, and an innocent one is delivered. A suspect
prefers another place than the one it failed at. After `budgets.lease_crashes` deaths, at least one of them
alone, it is bisected (its halves are suspects); a single prompt is dead. A place with a recent death is in
doubt: it runs one lease at a time, unsuspected ones first, and is given up after `budgets.replica_deaths`
deaths in a row.
"""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from hsray.budget import MAX_BACKOFF_SECONDS, LeaseCounts, PlaceStanding, PromptTries, RunBudget
from hsray.config import BudgetConfig
from hsray.events import (
    AbandonPlace,
    Action,
    CancelLease,
    DiscardShards,
    Draining,
    Event,
    Finished,
    FinishReason,
    LeaseDone,
    LeaseFailed,
    PlaceFound,
    PlaceGone,
    Progress,
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
from hsray.lease_queue import LeaseQueue, OpenLease, Tail, plan_order
from hsray.records import DeadPrompt, Lease, LeaseOutcome, Resolution

# One lease prefills while the other is written.
_LEASES_AT_THE_END = 2
# Waiting leases per replica above which a replica may hold more than that.
_PLENTY_PER_REPLICA = 4


@dataclass(slots=True)
class _Attempt:
    attempt: str
    lease_id: str
    replica: str
    started: float
    cancelled: bool = False


@dataclass(slots=True)
class _Replica:
    name: str
    place: str
    serial: int
    is_ready: bool = False
    is_draining: bool = False
    running: dict[str, _Attempt] = field(default_factory=dict)
    last_done: float = 0.0

    @property
    def is_usable(self) -> bool:
        return self.is_ready and not self.is_draining


@dataclass(slots=True)
class _Place:
    name: str
    standing: PlaceStanding
    spawn_at: float
    replica: _Replica | None = None


class Scheduler:
    """The state of one driver's run.

    Args:
        leases: open leases in plan order, those of earlier drivers' remainders and halves included.
        budgets: when to give up.
        starts: highest recorded start number by lease id.
        attempts: failed tries by input row, from the resolutions.
        total_rows: planned prompts of the run, finished ones included.
        already_dead, already_committed: prompts finished by earlier drivers.
        new_attempt_id: returns an id that no driver of this run ever used.
        leases_in_flight: most leases per ready replica. Above two, they are given only while much waits: what one
            replica holds at the end of a run, the others cannot help with.
        speculate: run a second copy of the oldest lease on a replica that has nothing else to do.
    """

    def __init__(
        self,
        leases: Sequence[Lease],
        budgets: BudgetConfig,
        *,
        starts: Mapping[str, int],
        attempts: Mapping[int, int],
        total_rows: int,
        already_dead: int,
        already_committed: int,
        new_attempt_id: Callable[[], str],
        leases_in_flight: int = _LEASES_AT_THE_END,
        speculate: bool = True,
    ) -> None:
        self._budgets = budgets
        self._leases_in_flight = leases_in_flight
        self._speculate_on_idle = speculate
        self._new_attempt_id = new_attempt_id
        self._total_rows = total_rows

        self._tries = PromptTries(budgets.prompt_attempts, attempts)
        self._counts = LeaseCounts(budgets, starts)
        self._run = RunBudget(budgets, already_committed=already_committed, already_dead=already_dead)

        self._places: dict[str, _Place] = {}
        self._abandoned: set[str] = set()
        self._incarnations: dict[str, int] = {}
        self._replicas: dict[str, _Replica] = {}
        # What `_advance` has to look at, so that an event costs the same with a thousand replicas as with one.
        self._vacant: dict[str, _Place] = {}  # places without a replica
        self._draining: set[str] = set()  # replicas
        self._hungry: dict[str, _Replica] = {}  # replicas that may have room for a lease
        self._attempts: dict[str, _Attempt] = {}  # oldest first
        self._open: dict[str, OpenLease] = {}
        self._proposed: set[str] = set()  # leases whose Resolve is not answered yet
        self._queue = LeaseQueue()
        self._tail = Tail()
        self._is_tail = False
        self._dividing: dict[str, int] = {}  # leases whose split is proposed for their size alone: further divisions

        self._actions: list[Action] = []
        self._now = 0.0
        self._no_place_since: float | None = None
        self._was_ever_ready = False
        self._start_refusal = ""
        self._last_trouble = ""
        self._ending: tuple[FinishReason, str] | None = None
        self._is_finished = False
        self._num_spawned = 0
        self._num_resolved = self._num_lost = self._num_retries = self._num_speculations = self._num_deaths = 0

        order = plan_order(leases)
        for lease in leases:
            self._open_lease(lease, order[lease.root_id], avoid=())

    # What the driver calls.

    def handle(self, event: Event, now: float) -> list[Action]:
        """Take in one event at time `now` (seconds, any origin, never decreasing); returns what to do, in order.

        Events about replicas or attempts that are not known (any more) are ignored. After `Finished` every
        event is.
        """
        if self._is_finished:
            return []
        self._now = now
        match event:
            case PlaceFound(place):
                self._on_place_found(place)
            case PlaceGone(place):
                self._on_place_gone(place)
            case ReplicaReady(name):
                self._on_replica_ready(name)
            case ReplicaDied(name, reason, blame):
                self._on_replica_died(name, reason, blame)
            case ReplicaFailedToStart(name, reason, permanent):
                self._on_failed_to_start(name, reason, permanent)
            case LeaseDone(name, outcome):
                self._on_lease_done(name, outcome)
            case LeaseFailed():
                self._on_lease_failed(event)
            case Resolved(resolution, ours):
                self._on_resolved(resolution, ours)
            case Draining(name):
                self._on_draining(name)
            case StopRequested():
                self._end("stopped", "stop requested")
            case Tick():
                pass
        self._advance()
        actions, self._actions = self._actions, []
        return actions

    @property
    def is_finished(self) -> bool:
        return self._is_finished

    @property
    def progress(self) -> Progress:
        return Progress(
            leases_open=len(self._open),
            leases_running=len({a.lease_id for a in self._attempts.values() if a.lease_id in self._open}),
            leases_resolving=len(self._proposed),
            leases_resolved=self._num_resolved,
            leases_lost=self._num_lost,
            prompts_total=self._total_rows,
            prompts_committed=self._run.committed,
            prompts_dead=self._run.dead,
            retries=self._num_retries,
            speculations=self._num_speculations,
            replica_deaths=self._num_deaths,
            replicas_starting=sum(1 for r in self._replicas.values() if not r.is_ready),
            replicas_ready=sum(1 for r in self._replicas.values() if r.is_ready),
            places_abandoned=len(self._abandoned),
        )

    def _advance(self) -> None:
        if self._ending is None and (overrun := self._run.overrun()) is not None and self._open:
            self._end(*overrun)
        self._release_drained()
        if self._ending is None:
            self._spawn()
            self._divide_tail()
            self._fill()
            self._speculate()
            self._watch_capacity()
        self._finish_if_done()

    # Places and replicas.

    def _on_place_found(self, place: str) -> None:
        if place not in self._places and place not in self._abandoned:
            standing = PlaceStanding(self._budgets.replica_deaths)
            self._places[place] = self._vacant[place] = _Place(place, standing, spawn_at=self._now)

    def _on_place_gone(self, name: str) -> None:
        self._abandoned.discard(name)
        if (place := self._places.get(name)) is not None:
            if place.replica is not None:
                self._retire(place.replica, "its place is gone")
            del self._places[name]
            self._vacant.pop(name, None)

    def _spawn(self) -> None:
        # Loading a model at the tail of a run for a lease that an idle replica could take helps nobody.
        num_wanted = len(self._open) - (len(self._replicas) - len(self._draining))
        due = [place for place in self._vacant.values() if place.spawn_at <= self._now] if num_wanted > 0 else []
        for place in due:
            if num_wanted > 0:
                num_wanted -= 1
                del self._vacant[place.name]
                incarnation = self._incarnations.get(place.name, 0) + 1
                self._incarnations[place.name] = incarnation
                self._num_spawned += 1
                place.replica = _Replica(f"{place.name}#{incarnation}", place.name, self._num_spawned)
                self._replicas[place.replica.name] = place.replica
                self._actions.append(SpawnReplica(place.name, place.replica.name))

    def _on_replica_ready(self, name: str) -> None:
        if (replica := self._replicas.get(name)) is not None:
            replica.is_ready = True
            replica.last_done = self._now
            if replica.is_usable:
                self._hungry[name] = replica
            self._was_ever_ready = True

    def _on_draining(self, name: str) -> None:
        if (replica := self._replicas.get(name)) is not None:
            replica.is_draining = True
            self._draining.add(name)
            self._hungry.pop(name, None)

    def _release_drained(self) -> None:
        for replica in [self._replicas[name] for name in sorted(self._draining)]:
            if not replica.running:
                self._retire(replica, "drained")

    def _on_failed_to_start(self, name: str, reason: str, permanent: bool) -> None:
        if (replica := self._replicas.get(name)) is None:
            return
        if permanent:
            self._start_refusal = reason
            self._abandon(self._places[replica.place], reason)
        else:
            self._lose(replica, reason, blame=True)

    def _on_replica_died(self, name: str, reason: str, blame: bool) -> None:
        if (replica := self._replicas.get(name)) is not None:
            self._lose(replica, reason, blame=blame)

    def _lose(self, replica: _Replica, reason: str, *, blame: bool) -> None:
        """The replica is gone; blame its leases and its place, or nobody."""
        place = self._places[replica.place]
        if blame:
            self._num_deaths += 1
            guilty = [a.lease_id for a in replica.running.values() if self._is_undecided(a)]
            for lease in (self._open[lease_id] for lease_id in guilty):
                self._counts.crash(lease.lease.lease_id, alone=len(replica.running) == 1)
                lease.note_failure(replica.place, replica.name, reason)
            place.standing.strike(guilty)
        self._forget_replica(replica, reason, blameless=not blame)
        self._abandon_if_spent(place, reason)

    def _retire(self, replica: _Replica, reason: str) -> None:
        self._actions.append(RetireReplica(replica.name, reason))
        self._forget_replica(replica, reason, blameless=True)

    def _forget_replica(self, replica: _Replica, reason: str, *, blameless: bool) -> None:
        """Take the replica out, and its attempts with it."""
        self._last_trouble = reason
        del self._replicas[replica.name]
        self._draining.discard(replica.name)
        self._hungry.pop(replica.name, None)
        place = self._places[replica.place]
        place.replica = None
        self._vacant[place.name] = place
        # A drained place is usually gone within the pause; one that is not bound to a node is used again.
        pause = MAX_BACKOFF_SECONDS if replica.is_draining else place.standing.backoff_seconds
        place.spawn_at = self._now + pause
        for attempt in list(replica.running.values()):
            self._end_attempt(attempt, replica, blameless=blameless)
            self._requeue(attempt.lease_id)

    def _strike(self, replica: _Replica, reason: str) -> None:
        """Count a failure against the place of a replica that lives on, unless it was one too many."""
        place = self._places[replica.place]
        place.standing.strike()
        self._abandon_if_spent(place, reason)

    def _abandon_if_spent(self, place: _Place, reason: str) -> None:
        if place.standing.is_spent:
            failures = f"{place.standing.strikes} failures in a row without a commit"
            self._abandon(place, f"{failures}; the last: {reason}")

    def _abandon(self, place: _Place, reason: str) -> None:
        if place.replica is not None:
            self._retire(place.replica, reason)
        del self._places[place.name]
        self._vacant.pop(place.name, None)
        self._abandoned.add(place.name)
        self._last_trouble = reason
        self._actions.append(AbandonPlace(place.name, reason))

    # Attempts.

    def _on_lease_done(self, name: str, outcome: LeaseOutcome) -> None:
        attempt = self._attempts.get(outcome.attempt)
        if attempt is None or attempt.replica != name:
            # A zombie's shards stay where they are: nothing here proves that no record names them.
            return
        replica = self._replicas[name]
        self._end_attempt(attempt, replica, blameless=attempt.cancelled or replica.is_draining)
        self._note_speed(replica, attempt, outcome)
        keys = tuple(shard.key for shard in outcome.shards)
        if keys:
            self._places[replica.place].standing.delivered()
        lease = self._open.get(attempt.lease_id)
        if lease is None:
            self._discard(keys)
            return
        lease.uploaded[attempt.attempt] = keys
        if attempt.lease_id not in self._proposed and not self._propose_outcome(lease, outcome, replica):
            self._requeue(attempt.lease_id)

    def _note_speed(self, replica: _Replica, attempt: _Attempt, outcome: LeaseOutcome) -> None:
        # Leases of a replica run one after the other: the second begins when the first is done.
        begun = max(attempt.started, replica.last_done)
        replica.last_done = self._now
        if outcome.shards:
            delivered = sum(entry.num_tokens for shard in outcome.shards for entry in shard.entries)
            self._tail.observe(delivered, self._now - begun)

    def _propose_outcome(self, lease: OpenLease, outcome: LeaseOutcome, replica: _Replica) -> bool:
        """Turn what was delivered into the lease's record; False if there is nothing to record."""
        rows = lease.lease.rows
        committed = outcome.committed_rows
        is_first_try = not self._tries.of(rows)
        dead: list[DeadPrompt] = []
        may_retry = False
        for failure in outcome.failures:
            if failure.row in committed:
                continue
            tries = self._tries.fail(failure.row)
            if failure.failure_class == "prompt_permanent" or self._tries.is_spent(failure.row):
                dead.append(DeadPrompt(failure.row, failure.prompt_id, failure.failure_class, failure.message, tries))
            else:
                may_retry = True
                lease.note_failure(replica.place, replica.name, failure.message)
        left = set(rows) - committed - {d.row for d in dead}
        if committed or dead:
            self._num_retries += may_retry
            self._propose(
                Resolution(
                    kind="commit" if committed or left else "dead",
                    lease_id=outcome.lease_id,
                    attempt=outcome.attempt,
                    replica=replica.name,
                    shards=outcome.shards,
                    dead=tuple(dead),
                    attempts=self._tries.of(left),
                    figures=outcome.figures,
                )
            )
            return True
        if may_retry and is_first_try:
            # A lease of which nothing at all works says more about the place than about its prompts. Later
            # tries do not count: a remainder may hold nothing but bad prompts.
            self._strike(replica, f"nothing of lease {lease.lease.lease_id} worked: {lease.last_failure}")
        return False

    def _on_lease_failed(self, event: LeaseFailed) -> None:
        attempt = self._attempts.get(event.attempt)
        if attempt is None or attempt.replica != event.replica:
            return
        replica = self._replicas[event.replica]
        if event.kind == "replica":
            self._actions.append(RetireReplica(replica.name, event.message))
            self._lose(replica, event.message, blame=True)
            return
        is_blameless = event.kind == "storage" or attempt.cancelled or replica.is_draining
        self._end_attempt(attempt, replica, blameless=is_blameless)
        self._requeue(attempt.lease_id)
        if event.kind == "storage":
            self._strike(replica, f"storage: {event.message}")

    def _end_attempt(self, attempt: _Attempt, replica: _Replica, *, blameless: bool) -> None:
        del self._attempts[attempt.attempt], replica.running[attempt.attempt]
        if replica.is_usable and replica.name in self._replicas:
            self._hungry[replica.name] = replica
        if (lease := self._open.get(attempt.lease_id)) is not None:
            lease.running.remove(attempt.attempt)
            if blameless:
                self._counts.give_back_start(attempt.lease_id)

    def _is_undecided(self, attempt: _Attempt) -> bool:
        return attempt.lease_id in self._open and attempt.lease_id not in self._proposed

    # Leases: open -> queued -> running -> proposed -> resolved.

    def _open_lease(self, lease: Lease, order: int, avoid: Collection[str]) -> None:
        """Open a lease whose past is in its id: a half (of a lease that killed replicas, as far as is known) is a
        suspect."""
        path = lease.lease_id.split(".")[1:]
        is_half = "a" in path or "b" in path
        opened = OpenLease(lease, (order, lease.lease_id), is_half, lease.total_tokens, avoid=set(avoid))
        self._open[lease.lease_id] = opened
        if not path and self._counts.exhaustion(lease.lease_id) is None:
            self._queue.add_fresh(opened)
        else:
            self._enqueue(opened)

    def _open_piece(self, lease: Lease, whole: OpenLease, divisions: int) -> None:
        """Open a half of a lease that was cut for its size: no suspect, unless the whole was one."""
        piece = OpenLease(
            lease, (whole.priority[0], lease.lease_id), whole.is_half, lease.total_tokens, avoid=set(whole.avoid)
        )
        self._open[lease.lease_id] = piece
        if self._counts.exhaustion(lease.lease_id) is not None:
            self._enqueue(piece)
        elif divisions and len(lease.rows) > 1:
            self._divide(piece, divisions)
        else:
            self._queue.add_piece(piece)

    def _requeue(self, lease_id: str) -> None:
        """An attempt ended without a record: try again, unless another copy runs or the budget is spent."""
        lease = self._open.get(lease_id)
        if lease is not None and not lease.running and lease_id not in self._proposed:
            self._num_retries += 1
            self._enqueue(lease)

    def _enqueue(self, lease: OpenLease) -> None:
        exhausted = self._counts.exhaustion(lease.lease.lease_id)
        if exhausted is not None:
            self._condemn(lease, *exhausted)
        elif divisions := self._late_divisions(lease):
            self._divide(lease, divisions)
        else:
            self._queue.add_returned(lease)

    def _condemn(self, lease: OpenLease, times: int, why: str) -> None:
        """The lease kills replicas: bisect it, or give its only prompt up."""
        rows = lease.lease.rows
        if len(rows) > 1:
            self._propose_split(lease)
            return
        message = f"{why}; the last: {lease.last_failure}" if lease.last_failure else why
        self._propose(
            Resolution(
                kind="dead",
                lease_id=lease.lease.lease_id,
                attempt=self._new_attempt_id(),
                replica=lease.last_replica,
                dead=(DeadPrompt(rows[0], "", "crash", message, times),),
            )
        )

    def _divide_tail(self) -> None:
        """Once there are no more leases than all replicas can hold, cut the last ones."""
        num_replicas = len(self._replicas)
        if self._is_tail or num_replicas < 2 or len(self._queue) > 2 * num_replicas or not self._tail.is_informed:
            return
        self._is_tail = True
        for lease, divisions in self._queue.cut_tail(self._tail, num_replicas):
            self._divide(lease, divisions)

    def _late_divisions(self, lease: OpenLease) -> int:
        """How often to halve a lease that comes back near the end."""
        if not self._is_tail or self._ending is not None or self._suspicion(lease) or len(self._replicas) < 2:
            return 0
        return self._tail.divisions(lease, self._queue.tokens + lease.tokens, len(self._replicas))

    def _divide(self, lease: OpenLease, divisions: int) -> None:
        self._dividing[lease.lease.lease_id] = divisions
        self._propose_split(lease)

    def _propose_split(self, lease: OpenLease) -> None:
        self._propose(
            Resolution(
                kind="split",
                lease_id=lease.lease.lease_id,
                attempt=self._new_attempt_id(),
                replica=lease.last_replica,
                attempts=self._tries.of(lease.lease.rows),
            )
        )

    def _propose(self, resolution: Resolution) -> None:
        self._proposed.add(resolution.lease_id)
        self._actions.append(Resolve(resolution))

    def _on_resolved(self, standing: Resolution, ours: bool) -> None:
        if standing.lease_id not in self._proposed:
            return
        self._proposed.remove(standing.lease_id)
        lease = self._open.pop(standing.lease_id)
        # The record is create-once, so from here on no other attempt's shards can ever be named by one.
        kept = {shard.key for shard in standing.shards}
        for attempt_id, keys in lease.uploaded.items():
            if attempt_id != standing.attempt:
                self._discard([key for key in keys if key not in kept])
        for attempt_id in sorted(lease.running):
            attempt = self._attempts[attempt_id]
            attempt.cancelled = True
            self._actions.append(CancelLease(attempt.replica, attempt.lease_id, attempt_id, keep=False))

        self._num_resolved += 1
        self._num_lost += not ours
        self._run.count(committed=len(standing.committed_rows), dead=len(standing.dead_rows))
        self._tries.forget(standing.committed_rows | standing.dead_rows)
        self._tries.adopt(standing.attempts)
        self._counts.forget(standing.lease_id)
        divisions = self._dividing.pop(standing.lease_id, 0) if standing.kind == "split" else 0
        for child in standing.children(lease.lease):
            if divisions:
                self._open_piece(child, lease, divisions - 1)
            else:
                self._open_lease(child, lease.priority[0], lease.avoid)
        self._dividing.pop(standing.lease_id, None)

    def _discard(self, keys: Collection[str]) -> None:
        if keys:
            self._actions.append(DiscardShards(tuple(keys)))

    # Giving out leases.

    def _fill(self) -> None:
        """Give every usable replica its leases, first one each, then the next."""
        if not self._queue or not self._hungry:
            return
        num_held = 0
        hungry = sorted(self._hungry.values(), key=lambda r: r.serial)
        # The pieces of the tail are many, and small because no replica is to have more of them than it can do in time.
        plenty = not self._is_tail and len(self._queue) > _PLENTY_PER_REPLICA * len(self._replicas)
        for depth in range(self._leases_in_flight if plenty else min(self._leases_in_flight, _LEASES_AT_THE_END)):
            for replica in [r for r in hungry if len(r.running) == depth]:
                if replica.running and num_held < self._num_waiting_suspects(replica.place):
                    num_held += 1  # a suspect needs a replica of its own: let this one run dry
                elif (lease := self._choose(replica)) is not None:
                    self._start(lease, replica)

    def _choose(self, replica: _Replica) -> OpenLease | None:
        """Take the next lease for `replica` out of the queue: returned ones before fresh ones, in plan order."""
        waiting = self._waiting(replica.place)
        is_in_doubt = self._places[replica.place].standing.is_in_doubt
        if replica.running:
            beside = [self._open[a.lease_id] for a in replica.running.values() if a.lease_id in self._open]
            if is_in_doubt or any(self._suspicion(lease) for lease in beside):
                return None
            returned = next((lease for lease in waiting if not self._suspicion(lease)), None)
        elif is_in_doubt:
            # A place in doubt proves itself on the least suspected lease, so that a death there tells the two
            # apart. Among the halves of a lease that finds the innocent one before the place has to go.
            returned = min(waiting, key=self._suspicion, default=None)
            if returned is not None and self._suspicion(returned) and self._queue.has_unsuspected:
                returned = None
        else:
            returned = next(waiting, None)
        return self._queue.next_unsuspected() if returned is None else self._queue.take(returned)

    def _waiting(self, place: str) -> Iterator[OpenLease]:
        """Returned leases that may run at `place`: those that failed there only if there is nowhere else."""
        for lease in self._queue.returned:
            if place not in lease.avoid or not any(
                r.is_usable and r.place not in lease.avoid for r in self._replicas.values()
            ):
                yield lease

    def _num_waiting_suspects(self, place: str) -> int:
        return sum(1 for lease in self._waiting(place) if self._suspicion(lease))

    def _suspicion(self, lease: OpenLease) -> int:
        """0 for a lease that nothing speaks against; suspects run alone."""
        return self._counts.crashes(lease.lease.lease_id) + lease.is_half

    def _start(self, lease: OpenLease, replica: _Replica) -> None:
        attempt = _Attempt(self._new_attempt_id(), lease.lease.lease_id, replica.name, self._now)
        self._attempts[attempt.attempt] = attempt
        lease.running.add(attempt.attempt)
        replica.running[attempt.attempt] = attempt
        if len(replica.running) >= self._leases_in_flight:
            self._hungry.pop(replica.name, None)
        number = self._counts.start(attempt.lease_id)
        self._actions.append(StartLease(replica.name, lease.lease, attempt.attempt, number))

    def _speculate(self) -> None:
        """Nothing waits: let idle replicas race the oldest leases, one copy of each."""
        if not self._speculate_on_idle or self._queue or self._dividing:
            return
        idle = [r for r in self._hungry.values() if not r.running and not self._places[r.place].standing.is_in_doubt]
        idle.sort(key=lambda r: r.serial)
        for attempt in list(self._attempts.values()) if idle else []:
            if not self._is_undecided(attempt):
                continue
            lease = self._open[attempt.lease_id]
            if len(lease.running) > 1 or self._suspicion(lease) or not self._counts.may_start(attempt.lease_id):
                continue
            # An idle replica never is the one that runs the attempt.
            replica = next((r for r in idle if r.place not in lease.avoid), None)
            if replica is not None:
                idle.remove(replica)
                self._num_speculations += 1
                self._start(lease, replica)

    # The end.

    def _end(self, reason: FinishReason, detail: str) -> None:
        """Start nothing more; have what runs commit what is complete. The first reason stands."""
        if self._ending is not None:
            return
        self._ending = reason, detail
        for attempt in self._attempts.values():
            if not attempt.cancelled:
                attempt.cancelled = True
                self._actions.append(CancelLease(attempt.replica, attempt.lease_id, attempt.attempt, keep=True))

    def _watch_capacity(self) -> None:
        if self._places:
            self._no_place_since = None
            return
        if self._no_place_since is None:
            self._no_place_since = self._now
        # Where no replica ever started and each place was given up, waiting for another only delays the message.
        is_hopeless = not self._was_ever_ready and bool(self._start_refusal or self._abandoned)
        if is_hopeless or self._now - self._no_place_since >= self._budgets.no_capacity_seconds:
            trouble = (self._start_refusal if is_hopeless else "") or self._last_trouble
            self._end("no_capacity", "no place left to run a replica" + (f"; the last: {trouble}" if trouble else ""))

    def _finish_if_done(self) -> None:
        if not self._open:
            self._finish("complete", f"{self._num_resolved} leases resolved by this driver")
        elif self._ending is not None and not self._is_waiting_for_answers():
            self._finish(*self._ending)

    def _is_waiting_for_answers(self) -> bool:
        # Cancelled copies of resolved leases are not waited for: their shards are garbage either way.
        return bool(self._proposed) or any(a.lease_id in self._open for a in self._attempts.values())

    def _finish(self, reason: FinishReason, detail: str) -> None:
        self._is_finished = True
        self._actions.append(Finished(reason, detail))
