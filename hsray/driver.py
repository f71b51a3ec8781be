"""The driver: feeds events to the scheduler and performs what it asks for. It owns no decision.

Runs in the job's own process, on any node. It may die at any time: what is done is in the ledger, and another
driver goes on from there.
"""

import logging
import math
import os
import queue
import signal
import tempfile
import threading
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from hsray import events as s
from hsray.capture.tested import untested
from hsray.checkpoint import ModelFacts
from hsray.cluster import ClusterEvent, RayCluster, RunFailed
from hsray.config import BudgetConfig, Config
from hsray.crash_points import crash_point
from hsray.engine import NUMBERS_DEPEND_ON, SGLANG_ENGINE, EngineSpec
from hsray.errors import ConfigError, ExitCode, HsrayError, StoreError
from hsray.events import Action, Finished, ReplicaFailedToStart, ReplicaReady, Resolved, StopRequested, Tick
from hsray.ledger import Ledger
from hsray.log import about, add_driver_file, first_line
from hsray.metrics import NO_METRICS, Metrics
from hsray.metrics.run import RunReport
from hsray.plan import Plan, read_lease_prompts
from hsray.progress import ProgressDisplay, Snapshot
from hsray.records import JsonDict, Lease, Resolution, ResolutionSummary
from hsray.replica_spec import ReplicaFacts, ReplicaSpec
from hsray.resolve import replicas_per_node
from hsray.scheduler import Scheduler
from hsray.schema import ENGINE_KEY, shard_metadata
from hsray.site_storage import recorded_storage
from hsray.sites import Site
from hsray.status.recorder import StatusRecorder
from hsray.store import Store

log = logging.getLogger(__name__)

_TICK_SECONDS = 0.5
# Commits and shard deletions at once; each is one small request.
_COMMIT_THREADS = 16

# What ending replicas and leaving Ray may take, of the time that `ray job stop` gives.
_LEAVING_SECONDS = 25.0

# A lease's shard is written by one thread (0.4 to 0.7 s/GB), and a fast engine makes 4 GB/s of states: one lease
# prefills while up to three are written.
LEASES_IN_FLIGHT = 4


@dataclass(frozen=True, slots=True)
class _Admitted:
    """The answer to a `ReplicaReady` from the cluster: what the scheduler is told instead."""

    event: ReplicaReady | ReplicaFailedToStart


@dataclass(frozen=True, slots=True)
class Job:
    """A run that is ready to be worked on: stored plan, resolved model and sites."""

    config: Config
    store: Store
    ledger: Ledger
    record: JsonDict
    plan: Plan
    facts: ModelFacts
    sites: tuple[Site, ...]
    model_path: str


def work(job: Job, engine_class: str, recorder: StatusRecorder) -> Finished | None:
    """Run replicas until the scheduler is finished. None if nothing was left to do.

    Args:
        recorder: hears of everything; started and closed by the caller.

    Raises:
        ConfigError: no replica could start, because of a key of the configuration.
        HsrayError: the store became unusable, or the plan unreadable.
    """
    scheduler = open_scheduler(job.ledger, job.plan, job.config.budgets)
    if scheduler is None:
        return None
    events: queue.SimpleQueue[ClusterEvent | _Admitted] = queue.SimpleQueue()
    spec = replica_spec(job, engine_class)
    own_log = add_driver_file(Path(spec.log_dir), job.record["run_id"]).name
    if engine_class == SGLANG_ENGINE and not job.config.engine.allow_untested:
        # Each replica checks again, its SGLang's version as well; here it costs no model load.
        problem = untested(None, job.facts.architecture)
        if problem is not None:
            raise ConfigError(f"model.path: {problem}")
    gpus = 0 if job.config.engine.is_cpu else job.config.engine.tp_size
    cluster = RayCluster(job.config.cluster, spec, gpus, events.put)
    with stop_on_signals(events) as on_signals:
        try:
            cluster.start()
            on_signals.install()  # Ray's start puts a handler of its own on SIGTERM, which aborts
            log.info(
                "logs: %s on each node, this driver's in %s; of Ray: %s", spec.log_dir, own_log, cluster.session_dir()
            )
            recorder.watch(cluster.rows)
            finished = Driver(job, scheduler, cluster, events, recorder, cluster.metrics()).drive()
        finally:
            cluster.shutdown()
    if finished.reason == "no_capacity" and isinstance(cluster.refusal, ConfigError):
        raise cluster.refusal
    return finished


def open_scheduler(ledger: Ledger, plan: Plan, budgets: BudgetConfig) -> Scheduler | None:
    """The scheduler of what is still open in a run, or None if nothing is."""
    found, accounting = ledger.account(plan.leases)
    if not accounting.open:
        return None
    return Scheduler(
        accounting.open,
        budgets,
        starts=ledger.starts(),
        attempts=tries_so_far(accounting.open, found),
        total_rows=plan.num_prompts,
        already_dead=len(accounting.dead),
        already_committed=len(accounting.committed),
        new_attempt_id=lambda: uuid.uuid4().hex[:12],
        leases_in_flight=LEASES_IN_FLIGHT,
    )


def tries_so_far(open_: Sequence[Lease], found: Mapping[str, Resolution | ResolutionSummary]) -> dict[int, int]:
    """Failed tries of the rows that are still open, from the records of the leases they come from.

    A lease that `retry_dead` opened (`.g1`) begins anew: what happened before is why its prompts were dead.
    """
    tries: dict[int, int] = {}
    for lease in open_:
        rows = set(lease.rows)
        ancestor, _, suffix = lease.lease_id.rpartition(".")
        while ancestor and not suffix.startswith("g"):
            for row, count in found[ancestor].attempts.items():
                if row in rows:
                    tries[row] = max(count, tries.get(row, 0))
            ancestor, _, suffix = ancestor.rpartition(".")
    return tries


class Driver:
    """Feeds events to the scheduler and performs what it asks for. Owns no decision."""

    def __init__(
        self,
        job: Job,
        scheduler: Scheduler,
        cluster: RayCluster,
        events: queue.SimpleQueue[ClusterEvent | _Admitted],
        recorder: StatusRecorder,
        metrics: Metrics = NO_METRICS,
    ) -> None:
        self.job, self.scheduler, self.cluster, self.events = job, scheduler, cluster, events
        self.recorder = recorder
        self.report = RunReport(metrics, rejected=job.plan.num_rejects, store_retries=job.store.retries)
        self.pool = ThreadPoolExecutor(_COMMIT_THREADS, thread_name_prefix="hsray-commit")
        self.finished: Finished | None = None
        self.leases_total = len(job.plan.leases)
        self._skipped_said: set[str] = set()
        self._stop_by = math.inf
        self._gpu_lock = threading.Lock()
        self._gpu_holders: dict[str, str] = {}  # GPU to the replica that was let in with it

    def drive(self) -> Finished:
        """Until the scheduler says that it is finished, or an error that no retry mends."""
        start = self.scheduler.progress
        done = start.prompts_committed + start.prompts_dead
        try:
            self._drive(start.prompts_total, done)
        finally:
            # Nothing is outstanding unless the store failed; then a commit may hang for as long as it is retried.
            self.pool.shutdown(wait=False, cancel_futures=True)
        assert self.finished is not None
        return self.finished

    def _drive(self, total: int, done: int) -> None:
        with ProgressDisplay(total, done, self.job.config.log.interval_seconds) as display:
            while self.finished is None:
                try:
                    event = self.events.get(timeout=_TICK_SECONDS)
                except queue.Empty:
                    event = Tick()
                if isinstance(event, RunFailed):
                    raise event.error
                if isinstance(event, ReplicaReady):
                    # The store may be away for minutes; signals and everything else must not wait for it here.
                    self._submit(self._admit, event)
                    continue
                if isinstance(event, _Admitted):
                    event = event.event
                if isinstance(event, StopRequested):
                    self._stop_by = time.monotonic() + stop_patience(os.environ)
                    self._submit(self._note_stop, None)
                self.recorder.hear(event)
                actions = self.scheduler.handle(event, time.monotonic())
                self.report.note(event, actions)
                for action in actions:
                    self.recorder.hear(action)
                    self.perform(action)
                if self.finished is None and time.monotonic() > self._stop_by:
                    self.finished = Finished("stopped", "stop requested; what the engines still held is left")
                snapshot = Snapshot(self.scheduler.progress, self.cluster.totals(), self.leases_total)
                display.update(snapshot)
                self.recorder.turn(snapshot.scheduler, snapshot.totals)
                self.report.record(snapshot, at_once=self.finished is not None)

    def _note_stop(self, _: None) -> None:
        """Already now: if leases take too long to end, the job server kills this process before it can say more."""
        try:
            self.job.ledger.write_last_exit(exit_record(ExitCode.INTERRUPTED, "stop requested"))
        except StoreError as err:
            log.warning("could not record that a stop was requested: %s", err)

    def _admit(self, event: ReplicaReady) -> None:
        self.events.put(_Admitted(self._judge_engine(event)))

    def _judge_engine(self, event: ReplicaReady) -> ReplicaReady | ReplicaFailedToStart:
        """Let a replica in if its engine is the one that the run began with; the first one sets it."""
        facts = next((f for f in self.cluster.facts() if f.replica == event.replica), None)
        if facts is None:
            return event  # it died since; its death is on the way
        if shared := self._shared_gpus(facts):
            self.cluster.retire(event.replica)
            return ReplicaFailedToStart(event.replica, shared, permanent=True)
        mine = {
            "sglang_version": facts.sglang_version,
            "model_class": facts.model_class,
            "engine_dtype": facts.engine_dtype,
            **facts.engine,
        }
        self_test = {"passed": list(facts.self_test_passed), "skipped": list(facts.self_test_skipped)}
        stored = self.job.store.create_once(ENGINE_KEY, {"engine": mine, "self_test": self_test}).record["engine"]
        allowed = self.job.config.engine.allow_change
        changed = [k for k in NUMBERS_DEPEND_ON if mine.get(k) != stored.get(k) and k not in allowed]
        if not changed:
            log.info(
                "replica %s is ready on %s (log: %s)",
                event.replica,
                facts.node,
                facts.log_path,
                extra=about(replica=event.replica, node=facts.node),
            )
            # Replicas differ in nothing that the self-test looks at; of a hundred, one says it.
            for skipped in set(facts.self_test_skipped) - self._skipped_said:
                self._skipped_said.add(skipped)
                log.warning("replica %s: the self-test could not check %s", event.replica, skipped)
            return event
        self.cluster.retire(event.replica)
        differs = ", ".join(f"{k}: {stored.get(k)} then, {mine.get(k)} now" for k in changed)
        return ReplicaFailedToStart(
            event.replica,
            f"the engine is not the one this run began with ({differs}). Use that one, or name the keys in "
            "engine.allow_change",
            permanent=True,
        )

    def _shared_gpus(self, facts: ReplicaFacts) -> str | None:
        """What is wrong if another replica computes on a GPU of this one: Ray gave each its own, and something else
        chose. Both would run at half the speed, or out of memory hours from now."""
        living = {f.replica for f in self.cluster.facts()}
        with self._gpu_lock:
            for gpu in facts.gpus:
                holder = self._gpu_holders.get(gpu, facts.replica)
                if holder != facts.replica and holder in living:
                    return (
                        f"it computes on GPU {gpu} of {facts.node}, as {holder} does. Ray gives each replica GPUs of "
                        "its own: remove CUDA_VISIBLE_DEVICES and RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES from "
                        "engine.env and from the nodes' environment, and base_gpu_id from engine.args"
                    )
            self._gpu_holders.update(dict.fromkeys(facts.gpus, facts.replica))
        return None

    def perform(self, action: Action) -> None:
        """Do what the scheduler asks for, or have it done: nothing here waits for the store."""
        match action:
            case s.SpawnReplica(place, replica):
                log.info("starting replica %s", replica, extra=about(replica=replica))
                self.cluster.spawn(place, replica)
            case s.RetireReplica(replica, reason):
                log.warning("retiring replica %s: %s", replica, first_line(reason), extra=about(replica=replica))
                self.cluster.retire(replica)
            case s.StartLease():
                self._submit(self._start_lease, action)
            case s.CancelLease(replica, lease_id, attempt, keep):
                self.cluster.cancel_lease(replica, lease_id, attempt, keep)
            case s.Resolve():
                if action.resolution.kind == "split":
                    self.leases_total += 1
                self._submit(self._resolve, action)
            case s.DiscardShards(keys):
                self._submit(self._discard, keys)
            case s.AbandonPlace(place, reason):
                log.error("giving up on place %s: %s", place, first_line(reason), extra=about(place=place))
            case s.Finished():
                self.finished = action

    def _submit(self, function: Callable[[Any], None], argument: Any) -> None:
        def guarded() -> None:
            try:
                function(argument)
            except HsrayError as err:
                self.events.put(RunFailed(err))
            except Exception as err:
                log.exception("unexpected error while committing")
                self.events.put(RunFailed(HsrayError(f"unexpected: {type(err).__name__}: {err}")))

        self.pool.submit(guarded)

    def _discard(self, keys: tuple[str, ...]) -> None:
        try:
            self.job.store.delete(list(keys))
        except StoreError as err:  # garbage; no reader sees it
            log.warning("could not delete shards of a lost attempt: %s", err)

    def _start_lease(self, action: Any) -> None:
        # The start is on record before the work begins: a lease that kills drivers is counted too.
        lease = action.lease
        info = {"attempt": action.attempt, "replica": action.replica, "time": datetime.now(UTC).isoformat()}
        self.job.ledger.record_start(lease.lease_id, action.number, info)
        crash_point("after_start_record")
        self.cluster.start_lease(action.replica, lease, action.attempt, self.job.plan.refs[lease.root_id])
        crash_point("after_lease_call")

    def _resolve(self, action: Any) -> None:
        resolution = action.resolution
        if any(not dead.prompt_id for dead in resolution.dead):
            named = [d if d.prompt_id else replace(d, prompt_id=_prompt_id(self.job, d.row)) for d in resolution.dead]
            resolution = replace(resolution, dead=tuple(named))
        crash_point("before_resolution")
        resolution = replace(resolution, figures=replace(resolution.figures, ended=round(time.time(), 1)))
        standing, ours = self.job.ledger.resolve(resolution)
        crash_point("after_resolution")
        for dead in standing.dead if ours else ():
            log.warning(
                "prompt %s (row %d) is dead: %s",
                dead.prompt_id,
                dead.row,
                first_line(dead.message),
                extra=about(prompt_id=dead.prompt_id, row=dead.row, lease=standing.lease_id, why=dead.message),
            )
        self.events.put(Resolved(standing, ours))


def stop_patience(environment: Mapping[str, str]) -> float:
    """How long a driver that was told to stop may wait for leases to end, in seconds.

    In a job, the job server kills it after RAY_JOB_STOP_WAIT_TIME_S (3 without one). Elsewhere somebody is there to
    interrupt it again.
    """
    given = environment.get("RAY_JOB_STOP_WAIT_TIME_S") or ("3" if "RAY_JOB_CONFIG_JSON_ENV_VAR" in environment else "")
    if not given.isdecimal():
        return math.inf
    return max(float(given) - _LEAVING_SECONDS, float(given) / 2)


def exit_record(code: ExitCode, detail: str) -> JsonDict:
    """The content of `last_exit.json`."""
    return {"exit_code": int(code), "name": code.name.lower(), "detail": detail, "time": datetime.now(UTC).isoformat()}


def replica_spec(job: Job, engine_class: str) -> Any:
    """What every replica of the run is told."""
    config = job.config
    storage = recorded_storage(job.record["sites"], job.store.url)
    per_node = replicas_per_node(config)
    env = dict(config.engine.env)
    if config.engine.is_cpu:
        # Ray would give each actor as many threads as it reserves CPUs: one.
        env.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // per_node)))
    log_dir = config.log.dir or str(Path(tempfile.gettempdir()) / "hsray-logs" / job.record["run_id"])
    return ReplicaSpec(
        run_url=job.store.url,
        storage_options=config.output.storage_options,
        commit=config.output.commit,
        retry_seconds=config.output.retry_seconds,
        engine=EngineSpec(
            model_path=job.model_path,
            trust_remote_code=config.model.trust_remote_code,
            args=config.engine.args,
            env=env,
            is_cpu=config.engine.is_cpu,
        ),
        facts=job.facts,
        sites=tuple(site.name for site in job.sites),
        dtype=config.capture.dtype,
        spool=config.spool,
        shard_bytes=config.output.shard_bytes,
        shard_metadata=shard_metadata(
            sites=job.sites,
            hidden_size=job.facts.hidden_size,
            dtype=config.capture.dtype,
            run_id=job.record["run_id"],
            model=job.facts.name,
            storage=storage,
        ),
        largest_prompt_tokens=job.plan.largest_prompt_tokens,
        start_timeout_seconds=config.engine.start_timeout_seconds,
        request_timeout_seconds=config.engine.request_timeout_seconds,
        log_dir=log_dir,
        log_level=config.log.level,
        allow_untested=config.engine.allow_untested,
        replicas_per_node=per_node,
        engine_class=engine_class,
        storage=storage,
    )


def _prompt_id(job: Job, row: int) -> str:
    """The id of a prompt no replica reported on (a crash): looked up in the stored plan."""
    root = next(lease for lease in job.plan.leases if lease.rows[0] <= row <= lease.rows[-1])
    return read_lease_prompts(job.store, job.plan.refs[root.lease_id], [row])[0].prompt_id


class stop_on_signals:
    """SIGTERM and SIGINT ask the scheduler to stop; a second one ends the process at once."""

    def __init__(self, events: queue.SimpleQueue[ClusterEvent | _Admitted]) -> None:
        self._events = events
        self._previous: dict[int, Any] = {}
        self._asked = False

    def __enter__(self) -> "stop_on_signals":
        self.install()
        return self

    def install(self) -> None:
        for number in (signal.SIGTERM, signal.SIGINT):
            try:
                previous = signal.signal(number, self._on_signal)
            except ValueError:  # not the main thread: whoever runs us handles signals
                return
            self._previous.setdefault(number, previous)

    def _on_signal(self, number: int, _frame: Any) -> None:
        if self._asked:
            os._exit(int(ExitCode.INTERRUPTED))
        self._asked = True
        log.warning("%s: committing what is complete; once more ends at once", signal.Signals(number).name)
        self._events.put(StopRequested())

    def __exit__(self, *_: object) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)
