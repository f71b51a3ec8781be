"""What the driver reports of the whole run."""

import time
from collections.abc import Callable, Mapping, Sequence
from typing import get_args

from hsray.events import (
    Action,
    Draining,
    Event,
    LeaseFailed,
    PlaceGone,
    ReplicaDied,
    ReplicaFailedToStart,
    Resolved,
    RetireReplica,
)
from hsray.history import RateMeter
from hsray.metrics.recorder import Growth, Metrics
from hsray.metrics.table import (
    ETA,
    LAST_PROGRESS,
    LEASE_RETRIES,
    LEASES,
    PLACES_GIVEN_UP,
    PROMPTS,
    REPLICA_LOSSES,
    REPLICAS,
    STORAGE_RETRIES,
    ReplicaLoss,
    StoreOperation,
)
from hsray.progress import Snapshot

# Half of the interval in which Ray collects; a gauge that is not recorded for two of those is gone.
_REPORT_SECONDS = 5.0


class RunReport:
    """Watches the driver's loop and records the state of the run every five seconds.

    Args:
        metrics: where to.
        rejected: rejected input rows, known from the plan.
        store_retries: repeated requests by operation, so far in this process.
        clock, wall_clock: seconds, monotonic and since 1970.
    """

    def __init__(
        self,
        metrics: Metrics,
        *,
        rejected: int,
        store_retries: Callable[[], Mapping[str, int]],
        clock: Callable[[], float] = time.monotonic,
        wall_clock: Callable[[], float] = time.time,
    ) -> None:
        self._metrics = metrics
        self._growth = Growth(metrics)
        self._rejected = rejected
        self._store_retries = store_retries
        self._clock, self._wall_clock = clock, wall_clock
        self._meter = RateMeter()
        self._next = clock()
        self._last_progress = wall_clock()
        self._draining: set[str] = set()
        self._losses: dict[ReplicaLoss, int] = dict.fromkeys(get_args(ReplicaLoss), 0)

    def note(self, event: Event, actions: Sequence[Action]) -> None:
        """Take in an event and what the scheduler made of it."""
        if isinstance(event, Resolved):
            self._last_progress = self._wall_clock()
        elif isinstance(event, Draining):
            self._draining.add(event.replica)
        for reason in self._lost(event, actions):
            self._losses[reason] += 1

    def _lost(self, event: Event, actions: Sequence[Action]) -> list[ReplicaLoss]:
        lost: dict[str, ReplicaLoss] = {}
        for action in actions:
            if isinstance(action, RetireReplica):
                if action.replica in self._draining:
                    lost[action.replica] = "drained"
                else:
                    lost[action.replica] = "node_lost" if isinstance(event, PlaceGone) else "place_given_up"
        # What the event says of its own replica is more exact.
        match event:
            case ReplicaDied(replica, _, blame):
                is_drained = replica in self._draining and not blame
                lost[replica] = "died" if blame else "drained" if is_drained else "node_lost"
            case ReplicaFailedToStart(replica):
                lost[replica] = "failed_to_start"
            case LeaseFailed(replica, kind="replica") if replica in lost:
                lost[replica] = "engine_failed"
        self._draining -= lost.keys()
        return list(lost.values())

    def record(self, snapshot: Snapshot, *, at_once: bool = False) -> None:
        """Record everything, if it is time to or `at_once`."""
        now = self._clock()
        if now < self._next and not at_once:
            return
        self._next = now + _REPORT_SECONDS
        state, record = snapshot.scheduler, self._metrics.record
        open_ = state.prompts_total - state.prompts_committed - state.prompts_dead
        record(PROMPTS, state.prompts_committed, outcome="committed")
        record(PROMPTS, state.prompts_dead, outcome="dead")
        record(PROMPTS, self._rejected, outcome="rejected")
        record(PROMPTS, open_, outcome="open")
        # A lease may be recorded while another copy of it still runs.
        running = min(state.leases_running, state.leases_open - state.leases_resolving)
        record(LEASES, state.leases_open - running - state.leases_resolving, state="queued")
        record(LEASES, running, state="running")
        record(LEASES, state.leases_resolving, state="resolving")
        record(LEASES, max(0, snapshot.leases_total - state.leases_open), state="resolved")
        record(REPLICAS, state.replicas_starting, state="starting")
        record(REPLICAS, state.replicas_ready, state="ready")
        record(PLACES_GIVEN_UP, state.places_abandoned)
        record(LAST_PROGRESS, self._last_progress)
        self._growth.record_total(LEASE_RETRIES, state.retries)
        for reason, count in self._losses.items():
            self._growth.record_total(REPLICA_LOSSES, count, reason=reason)
        retries = self._store_retries()
        for operation in get_args(StoreOperation):
            self._growth.record_total(STORAGE_RETRIES, retries.get(operation, 0), operation=operation)
        eta = self._eta(snapshot, open_, now)
        if eta is not None:
            record(ETA, eta)

    def _eta(self, snapshot: Snapshot, open_: int, now: float) -> float | None:
        totals = snapshot.totals
        if snapshot.scheduler.replicas_ready or totals.tokens:  # loading the model is not part of the rate
            self._meter.add(now, totals.tokens, totals.stored_bytes, totals.prompts)
        _, _, prompts = self._meter.rates()
        return open_ / prompts if prompts > 0 else None
