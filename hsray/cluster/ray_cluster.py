"""Replicas on Ray: connecting, places, their calls, their deaths.

It turns what Ray reports into the scheduler's events and the scheduler's actions into Ray calls. Only ids,
paths and counts cross Ray, never tensors. Ray restarts nothing by itself (`max_restarts=0`): a replacement is
a new incarnation with a new name, decided by the scheduler.
"""

import logging
import os
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal

from hsray.cluster.errors import cause_of, describe, is_node_loss, is_task_error
from hsray.cluster.last_words import LogReader, node_of_actor
from hsray.cluster.nodes import alive_nodes, draining_nodes, place_name, slots_of
from hsray.cluster.ray_metrics import RayMetrics
from hsray.config import ClusterConfig
from hsray.crash_points import crash_environment
from hsray.errors import ConfigError, EngineError, HsrayError, SelfTestError, StoreError
from hsray.events import (
    Draining,
    Event,
    LeaseDone,
    LeaseFailed,
    PlaceFound,
    PlaceGone,
    ReplicaDied,
    ReplicaFailedToStart,
    ReplicaReady,
)
from hsray.log import about, first_line
from hsray.metrics import Metrics
from hsray.metrics.replica import ReplicaReport
from hsray.plan import PlanRef
from hsray.records import Lease, LeaseOutcome
from hsray.replica import Replica
from hsray.replica_spec import ReplicaFacts, ReplicaProgress, ReplicaSpec
from hsray.spool import sweep
from hsray.status.document import ReplicaRow, ReplicaState

log = logging.getLogger(__name__)

_POLL_SECONDS = 0.2
_NODE_SECONDS = 5.0
_PING_SECONDS = 5.0
# A replica that does not even answer a ping for this long is taken for dead.
_PING_DEADLINE_SECONDS = 300.0
_SHUTDOWN_SECONDS = 20.0
# Calls that one replica may run at once: four leases, pings, cancels, facts.
_ACTOR_THREADS = 12
# hsray puts nothing large into Ray's object store; left alone it would take a third of the memory.
_LOCAL_OBJECT_STORE_BYTES = 100_000_000


@dataclass(frozen=True, slots=True)
class RunFailed:
    """Something that no retry mends and no replica is to blame for: a store that refuses, a plan that cannot be
    read. Not the scheduler's business: the run ends with the error's exit code."""

    error: HsrayError


ClusterEvent = Event | RunFailed
_Kind = Literal["ready", "lease", "ping"]


@dataclass(slots=True)
class _Call:
    kind: _Kind
    replica: str
    lease_id: str = ""
    attempt: str = ""


@dataclass(slots=True, eq=False)
class _Handle:
    """One incarnation of a replica."""

    name: str
    place: str
    actor: Any
    spawned_at: float
    node_id: str | None = None
    facts: ReplicaFacts | None = None
    progress: ReplicaProgress | None = None
    last_answer: float = 0.0
    is_draining: bool = False
    has_reported: bool = False

    def row(self, now: float) -> ReplicaRow:
        state: ReplicaState = "starting" if self.facts is None else "draining" if self.is_draining else "ready"
        heard = now - (self.last_answer or self.spawned_at)
        node = "" if self.facts is None else self.facts.node
        if self.progress is None:
            return ReplicaRow(replica=self.name, node=node, state=state, heard_seconds_ago=round(heard, 1))
        return ReplicaRow(
            replica=self.name,
            node=node,
            state=state,
            prompts=self.progress.prompts,
            tokens=self.progress.tokens,
            nbytes=self.progress.stored_bytes,
            in_flight=self.progress.in_flight,
            spool_bytes=self.progress.spool_bytes,
            spool_capacity=self.progress.spool_capacity,
            heard_seconds_ago=round(heard, 1),
        )


class ReplicaActor(Replica):
    """The Ray actor: a replica that knows which node it is on and reports to Ray's metrics whenever it is pinged."""

    def __init__(self, spec: ReplicaSpec, replica: str) -> None:
        metrics = RayMetrics(run=run_tag(spec), replica=replica)
        super().__init__(spec, replica, metrics)
        self._report_metrics = ReplicaReport(metrics).record

    def progress(self) -> ReplicaProgress:
        progress = super().progress()
        self._report_metrics(progress)
        return progress

    def __repr__(self) -> str:
        # Ray asks one whose constructor failed as well; there, an error hides the constructor's.
        return f"{getattr(self, 'replica', 'a replica')} on {socket.gethostname()}"

    def introduce(self) -> tuple[ReplicaFacts, str]:
        import ray

        self.progress()  # zeros, from which Prometheus sees counters grow
        return self.facts(), str(ray.get_runtime_context().get_node_id())


@dataclass(slots=True)
class Totals:
    """Sums over all incarnations of this driver, and what the living ones hold now."""

    prompts: int = 0
    tokens: int = 0
    stored_bytes: int = 0
    in_flight: int = 0
    spool_bytes: int = 0
    spool_capacity: int = 0


@dataclass(slots=True)
class _Retired:
    prompts: int = 0
    tokens: int = 0
    stored_bytes: int = 0


@dataclass(slots=True, eq=False)
class RayCluster:
    """Replicas of one run on Ray.

    Args:
        config: replicas, resources.
        spec: what every replica is.
        gpus_per_replica: 0 on CPU.
        emit: called with every event, from the polling thread.
    """

    config: ClusterConfig
    spec: ReplicaSpec
    gpus_per_replica: int
    emit: Callable[[ClusterEvent], None]
    _handles: dict[str, _Handle] = field(default_factory=dict)
    _calls: dict[Any, _Call] = field(default_factory=dict)
    _lock: threading.RLock = field(default_factory=threading.RLock)
    _places: dict[str, str | None] = field(default_factory=dict)  # to the node they are on, if that is fixed
    _retired: _Retired = field(default_factory=_Retired)
    _stop: threading.Event = field(default_factory=threading.Event)
    _waiting_logged: float = 0.0
    _poller: threading.Thread | None = None
    _logs: LogReader = field(init=False)
    is_local: bool = False
    refusal: BaseException | None = None

    def __post_init__(self) -> None:
        self._logs = LogReader(self.spec.log_dir)

    def start(self) -> None:
        """Connect to Ray, or start a local one, and begin to look for places.

        Raises:
            ConfigError: the address cannot be reached.
        """
        # Ray 2.59+ switches token authentication on by itself, depending on version and on a file in HOME.
        os.environ.setdefault("RAY_AUTH_MODE", "disabled")
        # hsray decides what a worker prints and where; Ray's usage report needs the network.
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
        # Calls that fall with a replica are known to have failed; Ray would print a traceback for each.
        os.environ.setdefault("RAY_IGNORE_UNHANDLED_ERRORS", "1")
        os.environ.setdefault("RAY_COLOR_PREFIX", "0")  # what Ray itself says of dead workers goes into logs
        import ray

        address = self.config.address or os.environ.get("RAY_ADDRESS")
        self.is_local = address in (None, "", "local")
        try:
            if self.is_local:
                self._start_local()
            else:
                ray.init(address=address, log_to_driver=False, logging_level=logging.WARNING)
        except Exception as err:  # Ray raises plain Exceptions here as well
            if self.is_local:
                raise HsrayError(f"Ray does not start on this machine: {err}") from err
            raise ConfigError(f"cluster.address: cannot connect to Ray at {address}: {err}") from err
        self._poller = threading.Thread(target=self._poll_forever, name="hsray-cluster", daemon=True)
        self._poller.start()

    def _start_local(self) -> None:
        import ray

        # As many idle workers as there are cores, of which nobody has a use: replicas get their own.
        os.environ.setdefault("RAY_prestart_worker_first_driver", "0")
        wanted = self.config.replicas if isinstance(self.config.replicas, int) else 1
        for is_last in (False, True):
            try:
                ray.init(
                    address="local",
                    num_cpus=max(os.cpu_count() or 1, int(wanted * self.config.cpus_per_replica) + 1),
                    resources=self._local_resources(wanted),
                    object_store_memory=_LOCAL_OBJECT_STORE_BYTES,
                    include_dashboard=False,
                    log_to_driver=False,
                    logging_level=logging.WARNING,
                )
                return
            except Exception as err:
                if is_last:
                    raise
                # Ray gives its own processes 30 s, which a busy machine may exceed.
                log.warning("Ray does not start (%s); trying once more", first_line(str(err)))
                ray.shutdown()

    def session_dir(self) -> str:
        """Where Ray keeps its own logs on this node."""
        import ray

        node = getattr(ray._private.worker, "_global_node", None)
        return str(node.get_logs_dir_path()) if node is not None else "/tmp/ray/session_latest/logs"

    # ---------------------------------------------------------------- actions

    def spawn(self, place: str, replica: str) -> None:
        import ray
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        options: dict[str, Any] = {
            "name": replica,
            "num_cpus": self.config.cpus_per_replica,
            "num_gpus": self.gpus_per_replica,
            "max_restarts": 0,
            "max_task_retries": 0,
            "max_concurrency": _ACTOR_THREADS,
        }
        if crash := crash_environment():
            options["runtime_env"] = {"env_vars": crash}
        if self.config.resources:
            options["resources"] = dict(self.config.resources)
        if self.config.label_selector:
            options["label_selector"] = dict(self.config.label_selector)
        node_id = self._places.get(place)
        if node_id is not None:
            options["scheduling_strategy"] = NodeAffinitySchedulingStrategy(node_id, soft=False)
        actor = ray.remote(ReplicaActor).options(**options).remote(self.spec, replica)
        with self._lock:
            self._handles[replica] = _Handle(replica, place, actor, time.monotonic(), node_id)
            self._calls[actor.introduce.remote()] = _Call("ready", replica)

    def start_lease(self, replica: str, lease: Lease, attempt: str, plan: PlanRef) -> None:
        with self._lock:
            handle = self._handles.get(replica)
            if handle is not None:
                call = _Call("lease", replica, lease.lease_id, attempt)
                self._calls[handle.actor.run_lease.remote(lease, attempt, plan)] = call

    def cancel_lease(self, replica: str, lease_id: str, attempt: str, keep: bool) -> None:
        with self._lock:
            handle = self._handles.get(replica)
            if handle is not None:
                handle.actor.cancel.remote(lease_id, attempt, keep)

    def retire(self, replica: str) -> None:
        """Kill the replica with everything it started. Nothing is heard of it again."""

        with self._lock:
            handle = self._forget(replica)
        if handle is not None:
            _kill(handle)

    def totals(self) -> Totals:
        with self._lock:
            totals = Totals(self._retired.prompts, self._retired.tokens, self._retired.stored_bytes)
            for handle in self._handles.values():
                if handle.progress is not None:
                    totals.prompts += handle.progress.prompts
                    totals.tokens += handle.progress.tokens
                    totals.stored_bytes += handle.progress.stored_bytes
                    totals.in_flight += handle.progress.in_flight
                    totals.spool_bytes += handle.progress.spool_bytes
                    totals.spool_capacity += handle.progress.spool_capacity
            return totals

    def metrics(self) -> Metrics:
        """For what the driver has to report. Once Ray is connected."""
        return RayMetrics(run=run_tag(self.spec), replica="driver")

    def rows(self) -> list[ReplicaRow]:
        """Every replica as it last answered, for `hsray.status`."""
        now = time.monotonic()
        with self._lock:
            return [handle.row(now) for handle in self._handles.values()]

    def facts(self) -> list[ReplicaFacts]:
        with self._lock:
            return [h.facts for h in self._handles.values() if h.facts is not None]

    def shutdown(self) -> None:
        """End every replica and its processes, remove arenas left on any node used, leave Ray."""
        import ray

        self._stop.set()
        self._logs.close()
        with self._lock:
            handles = list(self._handles.values())
            self._handles.clear()
            self._calls.clear()
        if not ray.is_initialized():
            return
        farewells = [h.actor.shutdown.remote() for h in handles if h.facts is not None]
        if farewells:
            ray.wait(farewells, num_returns=len(farewells), timeout=_SHUTDOWN_SECONDS)
        for handle in handles:
            _kill(handle)
        if self._poller is not None:
            self._poller.join(5)  # it must not be inside Ray when Ray goes away
        try:
            self._sweep_nodes()
        except Exception as err:  # noqa: BLE001 - the next replica on the node sweeps as well
            log.warning("could not sweep %s everywhere: %s", self.spec.spool.path, err)
        ray.shutdown()

    # ---------------------------------------------------------------- polling

    def _poll_forever(self) -> None:
        next_nodes = next_ping = 0.0
        while not self._stop.is_set():
            now = time.monotonic()
            try:
                if now >= next_nodes:
                    next_nodes = now + _NODE_SECONDS
                    self._look_for_places()
                if now >= next_ping:
                    next_ping = now + _PING_SECONDS
                    self._ping(now)
                self._collect()
            except Exception:
                if self._stop.is_set():
                    return  # Ray went away under us because we are leaving
                log.exception("cluster polling failed; trying again")
                time.sleep(1.0)

    def _collect(self) -> None:
        import ray

        with self._lock:
            pending = list(self._calls)
        if not pending:
            self._stop.wait(_POLL_SECONDS)
            return
        # num_returns counts to the number that is ready now, so one slow call does not hide others.
        ready, _ = ray.wait(pending, num_returns=1, timeout=_POLL_SECONDS)
        if ready:
            ready, _ = ray.wait(pending, num_returns=len(pending), timeout=0)
        for ref in ready:
            with self._lock:
                call = self._calls.pop(ref, None)
            if call is not None:
                self._answer(call, ref)

    def _answer(self, call: _Call, ref: Any) -> None:
        import ray

        with self._lock:
            handle = self._handles.get(call.replica)
        if handle is None:
            return
        try:
            value = ray.get(ref, timeout=30)
        except Exception as err:  # noqa: BLE001 - the boundary to Ray: every error becomes an event
            self._on_error(call, handle, err)
            return
        handle.last_answer = time.monotonic()
        if call.kind == "ready":
            handle.facts, handle.node_id = value
            self.emit(ReplicaReady(call.replica))
        elif call.kind == "ping":
            handle.progress = value
        else:
            outcome: LeaseOutcome = value
            self.emit(LeaseDone(call.replica, outcome))

    def _on_error(self, call: _Call, handle: _Handle, error: Exception) -> None:
        cause = cause_of(error)
        if is_task_error(error):
            # The replica lives; our own code raised in it.
            if call.kind != "lease":
                log.warning("replica %s: %s", call.replica, describe(cause))
            elif isinstance(cause, EngineError):
                self._report(
                    handle,
                    describe(cause),
                    lambda reason: LeaseFailed(call.replica, call.lease_id, call.attempt, "replica", reason),
                )
            elif isinstance(cause, StoreError) and cause.transient:
                self.emit(LeaseFailed(call.replica, call.lease_id, call.attempt, "storage", str(cause)))
            elif isinstance(cause, HsrayError):
                self.emit(RunFailed(cause))
            else:  # the plan's object is gone or damaged, or a bug; the engine is not to blame
                log.error("lease %s on replica %s failed", call.lease_id, call.replica, exc_info=error)
                self.emit(RunFailed(HsrayError(f"lease {call.lease_id} on {call.replica}: {describe(cause)}")))
            return
        with self._lock:
            if self._forget(call.replica) is None:
                return
        _kill(handle)
        if handle.facts is None:
            # An engine that did not start may start next time: a port taken, a predecessor's memory not freed yet.
            permanent = isinstance(cause, ConfigError | SelfTestError)
            if permanent:
                self.refusal = cause
            self._report(handle, describe(cause), lambda reason: ReplicaFailedToStart(call.replica, reason, permanent))
        else:
            blame = not self._was_announced(error, handle)
            self._report(handle, describe(cause), lambda reason: ReplicaDied(call.replica, reason, blame))

    def _was_announced(self, error: Exception, handle: _Handle) -> bool:
        """Whether the loss is the node's doing rather than the lease's."""
        if handle.is_draining or is_node_loss(error):
            return True
        try:
            return handle.node_id is not None and handle.node_id not in {n["NodeID"] for n in alive_nodes()}
        except Exception as err:  # noqa: BLE001 - whatever Ray says: the death itself must be reported
            log.warning("cannot ask Ray for its nodes: %s", err)
            return False

    def _report(self, handle: _Handle, reason: str, make_event: Callable[[str], Event]) -> None:
        """Log and emit that a replica is of no more use, with the end of its log, which takes a moment to come from
        another node. The first report has it; further leases of the same replica fail without."""
        if handle.has_reported:
            self.emit(make_event(reason))
            return
        handle.has_reported = True

        def read_and_emit() -> None:
            told = reason
            try:
                told = self._logs.with_log(reason, handle.name, handle.node_id or node_of_actor(handle.actor))
            except Exception as err:  # noqa: BLE001 - whatever Ray says: the death itself must be reported
                log.warning("cannot read the log of replica %s: %s", handle.name, err)
            finally:
                node = handle.facts.node if handle.facts else ""
                log.error("replica %s failed: %s", handle.name, told, extra=about(replica=handle.name, node=node))
                self.emit(make_event(told))

        self._logs.submit(read_and_emit)

    def _ping(self, now: float) -> None:
        with self._lock:
            handles = list(self._handles.values())
            pinged = {c.replica for c in self._calls.values() if c.kind == "ping"}
        for handle in handles:
            if handle.facts is None:
                self._watch_start(handle, now)
            elif handle.name not in pinged:
                with self._lock:
                    self._calls[handle.actor.progress.remote()] = _Call("ping", handle.name)
            elif now - handle.last_answer > _PING_DEADLINE_SECONDS:
                self.retire(handle.name)
                self._report_silent(handle)

    def _report_silent(self, handle: _Handle) -> None:
        reason = f"no answer for {_PING_DEADLINE_SECONDS:.0f} s"
        self._report(handle, reason, lambda reason: ReplicaDied(handle.name, reason, blame=True))

    def _watch_start(self, handle: _Handle, now: float) -> None:
        waited = now - handle.spawned_at
        if waited > self.spec.start_timeout_seconds + _SHUTDOWN_SECONDS:
            self.retire(handle.name)
            reason = f"not ready after {waited:.0f} s (engine.start_timeout_seconds)"
            self._report(handle, reason, lambda reason: ReplicaFailedToStart(handle.name, reason, permanent=False))
        elif waited > 60 and now - self._waiting_logged > 60:
            self._waiting_logged = now
            log.info("waiting for replica %s to start for %.0f s (logs: %s)", handle.name, waited, self.spec.log_dir)

    # ----------------------------------------------------------------- places

    def _look_for_places(self) -> None:
        """Announce places that came and went."""
        if isinstance(self.config.replicas, int):
            found: dict[str, str | None] = {f"r{i}": None for i in range(self.config.replicas)}
        elif self.gpus_per_replica == 0:
            found = {"r0": None}
        else:
            found = {}
            for node in alive_nodes():
                slots = slots_of(node, self.config, self.gpus_per_replica)
                found |= {place_name(node, slot): node["NodeID"] for slot in range(slots)}
        before, self._places = self._places, found
        for place in sorted(found.keys() - before.keys()):
            self.emit(PlaceFound(place))
        for place in sorted(before.keys() - found.keys()):
            self.emit(PlaceGone(place))
        for node_id in draining_nodes():
            with self._lock:
                handles = [h for h in self._handles.values() if h.node_id == node_id and not h.is_draining]
            for handle in handles:
                handle.is_draining = True
                self.emit(Draining(handle.name))

    def _forget(self, replica: str) -> _Handle | None:
        """Holds the lock."""
        handle = self._handles.pop(replica, None)
        if handle is not None:
            for ref in [ref for ref, call in self._calls.items() if call.replica == replica]:
                del self._calls[ref]
            if handle.progress is not None:
                self._retired.prompts += handle.progress.prompts
                self._retired.tokens += handle.progress.tokens
                self._retired.stored_bytes += handle.progress.stored_bytes
        return handle

    def _local_resources(self, replicas: int) -> dict[str, float] | None:
        return {name: amount * replicas for name, amount in self.config.resources.items()} or None

    def _sweep_nodes(self) -> None:
        """Replicas that were killed left their arenas; their owners' locks are free now."""
        import ray
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        alive = {n["NodeID"] for n in alive_nodes()}
        if self.is_local:
            _sweep_when_dead(self.spec.spool.path)
            return
        remote_sweep = ray.remote(_sweep_when_dead)
        refs = [
            remote_sweep.options(
                num_cpus=0, scheduling_strategy=NodeAffinitySchedulingStrategy(node_id, soft=False)
            ).remote(self.spec.spool.path)
            for node_id in alive
        ]
        if refs:
            ray.wait(refs, num_returns=len(refs), timeout=_SHUTDOWN_SECONDS)


def run_tag(spec: ReplicaSpec) -> str:
    """The run's id, as metrics name it."""
    return spec.shard_metadata["hsray.run_id"]


def _kill(handle: _Handle) -> None:
    import ray

    try:
        ray.kill(handle.actor, no_restart=True)
    except Exception as err:  # noqa: BLE001 - whatever Ray says, the caller has more to do
        log.warning("could not kill replica %s: %s", handle.name, err)


def _sweep_when_dead(path: str) -> int:
    """Sweep twice: a process that was killed a moment ago may still hold its lock."""
    removed = len(sweep(path))
    time.sleep(0.5)
    return removed + len(sweep(path))
