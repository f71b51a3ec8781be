"""The driver's side of `status/`: takes in what happens, and has a thread put the document twice a minute.

Nothing here may hold the driver up or end the run: the thread has its own patience with the store, a put that fails
is said once and tried again at the next turn.
"""

import copy
import logging
import os
import socket
import threading
import time
import uuid
from collections import Counter, deque
from collections.abc import Callable, Sequence
from typing import Protocol

from hsray import events as s
from hsray.errors import ExitCode, StoreError
from hsray.history import History, Point, RateMeter
from hsray.status.document import (
    MAX_REPLICAS,
    Counters,
    DriverStatus,
    Exit,
    Incident,
    Phase,
    ReplicaRow,
    document_key,
    put_document,
)
from hsray.store import Store

log = logging.getLogger(__name__)

INTERVAL_SECONDS = 30.0
# How long one put is retried, and how long the end of a run waits for the last one.
RETRY_SECONDS = 20.0
_LAST_PUT_SECONDS = 25.0
# What is kept of the incidents: how it began, and what came last.
_FIRST_INCIDENTS, _LAST_INCIDENTS = 100, 300
_MESSAGE_CHARS = 500

KINDS = {
    "replica_died": "replica lost",
    "replica_failed": "replica did not start",
    "replica_retired": "replica retired",
    "place_abandoned": "place given up",
    "draining": "node goes away",
    "lease_failed": "lease failed",
    "lease_split": "lease cut in two",
    "prompt_dead": "prompt dead",
    "stop": "stop",
}


class Totals(Protocol):
    """`cluster.Totals`, which is above this module."""

    prompts: int
    tokens: int
    stored_bytes: int
    in_flight: int
    spool_bytes: int
    spool_capacity: int


class StatusRecorder:
    """Safe to call from the driver's thread at every turn of its loop.

    Args:
        command, directory: what to say to whoever wants to resume; without secrets.
    """

    def __init__(
        self,
        store: Store,
        run_id: str,
        *,
        command: str = "",
        directory: str = "",
        interval_seconds: float = INTERVAL_SECONDS,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._store = copy.copy(store)
        self._store.retry_seconds = min(store.retry_seconds, RETRY_SECONDS)
        self._run_id, self._command, self._directory = run_id, command, directory
        self._interval = interval_seconds
        self._clock = clock
        self._started = self._turned = clock()
        self._key = document_key(self._started, uuid.uuid4().hex[:8])
        self._lock = threading.Lock()
        self._phase: Phase = "starting"
        self._exit: Exit | None = None
        self._stand: tuple[s.Progress, Totals] | None = None
        self._meter = RateMeter()
        self._history = History()
        self._rows: Callable[[], Sequence[ReplicaRow]] = tuple
        self._tokens_before: dict[str, tuple[float, int]] = {}
        self._first: list[Incident] = []
        self._last: deque[Incident] = deque(maxlen=_LAST_INCIDENTS)
        self._num_incidents: Counter[str] = Counter()
        self._wake = threading.Event()
        self._put_lock = threading.Lock()  # one put at a time: an older document never replaces a newer one
        self._ends = self._is_abandoned = False
        self._failed = False
        self._thread = threading.Thread(target=self._put_forever, name="hsray-status", daemon=True)

    @property
    def key(self) -> str:
        """Where the document is put."""
        return self._key

    def start(self) -> None:
        """Put the first document, and one at every interval from then on."""
        self._thread.start()

    def watch(self, rows: Callable[[], Sequence[ReplicaRow]]) -> None:
        """Take the living replicas from `rows`, which the thread calls once per document."""
        with self._lock:
            self._rows = rows

    def turn(self, progress: s.Progress, totals: Totals) -> None:
        """The driver's loop turned, and this is where it stands."""
        now = self._clock()
        fill = totals.spool_bytes / totals.spool_capacity if totals.spool_capacity else 0.0
        with self._lock:
            self._turned = now
            if progress.replicas_ready and self._phase == "starting":
                self._phase = "running"
            if progress.replicas_ready or totals.tokens:
                # Loading the model is not part of the rate.
                self._meter.add(now, totals.tokens, totals.stored_bytes, totals.prompts)
            self._history.add(
                Point(
                    now,
                    totals.tokens,
                    totals.stored_bytes,
                    totals.prompts,
                    spool_mean=fill,
                    spool_max=fill,
                    in_flight=totals.in_flight,
                    replicas=progress.replicas_ready,
                )
            )
            self._stand = progress, totals

    def hear(self, what: s.Event | s.Action) -> None:
        """Note what went wrong or ended; everything else is passed over."""
        match what:
            case s.ReplicaDied(replica, reason):
                self._note("replica_died", replica, reason)
            case s.ReplicaFailedToStart(replica, reason):
                self._note("replica_failed", replica, reason)
            case s.RetireReplica(replica, reason):
                self._note("replica_retired", replica, reason)
            case s.AbandonPlace(place, reason):
                self._note("place_abandoned", place, reason)
            case s.Draining(replica):
                self._note("draining", replica, "its node was announced to go away")
            case s.LeaseFailed(_, lease_id, _, kind, message) if kind != "cancelled":
                self._note("lease_failed", lease_id, f"{kind}: {message}")
            case s.Resolved(resolution, ours) if ours:
                if resolution.kind == "split":
                    self._note("lease_split", resolution.lease_id, "into two halves")
                for dead in resolution.dead:
                    self._note("prompt_dead", dead.prompt_id, f"{dead.failure_class}: {dead.message}")
            case s.StopRequested():
                self._note("stop", "", "stop requested")
            case s.Finished(reason, detail) if reason != "complete":
                self._note("stop", "", f"{reason}: {detail}")

    def finishing(self) -> None:
        """The loop has ended; what is derived is being written. Put at once, so that the report sees the whole run."""
        with self._lock:
            self._phase = "finishing"
            self._rows = tuple
        self._put()

    def close(self, code: ExitCode, detail: str) -> None:
        """The driver ends: put the last document, and wait for it, but not for long."""
        with self._lock:
            self._phase = "ended"
            self._exit = Exit(exit_code=int(code), name=code.name.lower(), detail=detail)
            self._rows = tuple
        self._end()
        self._thread.join(_LAST_PUT_SECONDS)
        if self._thread.is_alive():
            log.warning("the store does not take the last status of this run; hsray.status will call the driver silent")

    def abandon(self) -> None:
        """End without a word: the prefix is another run's."""
        self._is_abandoned = True
        self._end()

    def _end(self) -> None:
        self._ends = True
        self._wake.set()

    def _note(self, kind: str, subject: str, message: str) -> None:
        incident = Incident(time=self._clock(), kind=kind, subject=subject[:200], message=message[:_MESSAGE_CHARS])
        with self._lock:
            self._num_incidents[kind] += 1
            if len(self._first) < _FIRST_INCIDENTS:
                self._first.append(incident)
            else:
                self._last.append(incident)

    # ------------------------------------------------------------- the thread

    def _put_forever(self) -> None:
        while True:
            ends = self._ends
            if not self._is_abandoned:
                self._put()
            if ends:
                return
            self._wake.wait(self._interval)

    def _put(self) -> None:
        try:
            with self._put_lock:
                put_document(self._store, self._key, self._document())
            self._failed = False
        except StoreError as err:
            if not self._failed:
                log.warning("the status of this run is not stored, hsray.status will be behind: %s", err)
            self._failed = True
        except Exception:  # a bug here costs the status, not the run
            log.exception("the status of this run could not be made")

    def _document(self) -> DriverStatus:
        rows = self._rows()
        now = self._clock()
        rows_kept = tuple(self._with_speed(row, now) for row in rows[:MAX_REPLICAS])
        self._tokens_before = {row.replica: (now, row.tokens) for row in rows_kept}
        with self._lock:
            tokens, nbytes, prompts = self._meter.rates() if self._phase == "running" else (0.0, 0.0, 0.0)
            return DriverStatus(
                run_id=self._run_id,
                host=socket.gethostname(),
                pid=os.getpid(),
                command=self._command,
                directory=self._directory,
                started=self._started,
                updated=now,
                turned=self._turned,
                interval_seconds=self._interval,
                phase=self._phase,
                exit=self._exit,
                counters=Counters() if self._stand is None else _counters(*self._stand),
                tokens_per_second=tokens,
                bytes_per_second=nbytes,
                prompts_per_second=prompts,
                replicas=rows_kept,
                num_replicas=len(rows),
                history=self._history.to_json(),
                incidents=(*self._first, *self._last),
                num_incidents=dict(self._num_incidents),
            )

    def _with_speed(self, row: ReplicaRow, now: float) -> ReplicaRow:
        before = self._tokens_before.get(row.replica)
        if before is None or now <= before[0]:
            return row
        return row.model_copy(update={"tokens_per_second": max(0.0, (row.tokens - before[1]) / (now - before[0]))})


def _counters(progress: s.Progress, totals: Totals) -> Counters:
    scheduler = {name: getattr(progress, name) for name in s.Progress.__slots__ if name in Counters.model_fields}
    return Counters(
        **scheduler,
        prompts=totals.prompts,
        tokens=totals.tokens,
        nbytes=totals.stored_bytes,
        in_flight=totals.in_flight,
        spool_bytes=totals.spool_bytes,
        spool_capacity=totals.spool_capacity,
    )
