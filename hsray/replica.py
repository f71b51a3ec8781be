"""One engine, one arena, one writer: what runs on a node. It has no policy: it does the leases it is given.

A lease is run by one thread: it admits prompts to the engine while the arena has room, joins each answer of
the engine with the capture's message, writes complete prompts into shards, and frees their slots once the
shard is stored. Several leases run side by side, so the engine never waits for a shard to be written; the oldest
is served first. The class knows nothing of Ray and can be used without it.
"""

import logging
import os
import socket
import time
from collections import deque
from dataclasses import dataclass, field
from pathlib import Path

from hsray.crash_points import crash_point
from hsray.errors import ConfigError, SpoolFull
from hsray.inflight import WAIT_SECONDS, InFlight, Request
from hsray.log import configure_file_logging
from hsray.metrics import NO_METRICS, Metrics
from hsray.metrics.replica_time import ReplicaClock
from hsray.metrics.table import UPLOAD_SECONDS
from hsray.oracle import plan_oracle
from hsray.plan import PlanRef, read_lease_prompts
from hsray.probe import self_test
from hsray.records import FailureClass, Lease, LeaseFigures, LeaseOutcome, Prompt, PromptFailure, ShardRecord
from hsray.replica_spec import ReplicaFacts, ReplicaProgress, ReplicaSpec
from hsray.schema import DATA_PREFIX
from hsray.shard import ShardRow, write_shard
from hsray.spool import Arena, Slot, auto_arena_bytes, named_gpus, sweep
from hsray.store import open_store

log = logging.getLogger(__name__)

# Requests in the engine at once. More would only lengthen SGLang's own queue.
MAX_IN_FLIGHT = 512


@dataclass(slots=True, eq=False)
class _LeaseRun:
    """A lease being run."""

    lease: Lease
    attempt: str
    pending: deque[Prompt]
    in_flight: int = 0
    ready: list[tuple[Prompt, Slot]] = field(default_factory=list)
    shards: list[ShardRecord] = field(default_factory=list)
    failures: list[PromptFailure] = field(default_factory=list)
    norm_sums: dict[str, float] = field(default_factory=dict)  # by site, over the tokens of finished prompts
    tokens: int = 0
    spool_peak: int = 0  # bytes in the arena while it ran, those of other leases too
    cancelled: bool = False
    keep: bool = True

    @property
    def ready_bytes(self) -> int:
        return sum(slot.nbytes for _, slot in self.ready)

    def fail(self, prompt: Prompt, failure_class: FailureClass, message: str) -> None:
        self.failures.append(PromptFailure(prompt.row, prompt.prompt_id, failure_class, message))


class Replica:
    """Owns one engine. Make it on a thread that lives as long as the process."""

    def __init__(self, spec: ReplicaSpec, replica: str, metrics: Metrics = NO_METRICS) -> None:
        """Start the engine, wait for the handshake of every leader rank, run the self-test.

        Raises:
            ConfigError: spool or engine arguments.
            EngineStartError: SGLang did not start, or a leader rank did not report.
            SelfTestError: the capture is not right on this engine.
        """
        self.spec = spec
        self.replica = replica
        self.metrics = metrics
        self.log_path = configure_file_logging(Path(spec.log_dir), replica, spec.log_level)
        log.info("replica %s of %s on %s, process %d", replica, spec.run_url, socket.gethostname(), os.getpid())
        self._runs: list[_LeaseRun] = []
        self._prompts = self._tokens = self._stored_bytes = 0
        self._write_seconds = self._write_cpu_seconds = 0.0
        self._writing = 0
        self._cancelled: dict[str, bool] = {}  # attempt -> keep; a handful in the life of a replica
        self.store = open_store(
            spec.run_url, spec.storage_options, commit=spec.commit, retry_seconds=spec.retry_seconds
        )
        self.oracle = plan_oracle(spec.engine.model_path, spec.facts, spec.sites)
        arena = _make_arena(spec)
        crash_point("after_arena")
        try:
            self.in_flight = InFlight(spec, arena, self.oracle.sites(spec.facts.num_layers), str(self.log_path))
            self._report = self_test(self.in_flight, self.oracle)
        except BaseException:
            # The constructor's caller gets no object to shut down.
            arena.remove()
            raise
        self._time = ReplicaClock()
        crash_point("after_self_test")
        log.info("replica %s is ready; self-test passed: %s", replica, "; ".join(self._report.passed))
        for skipped in self._report.skipped:
            log.warning("replica %s: self-test skipped %s", replica, skipped)

    # ------------------------------------------------------------------ calls

    def facts(self) -> ReplicaFacts:
        hello = self.in_flight.hello
        return ReplicaFacts(
            replica=self.replica,
            node=socket.gethostname(),
            pid=os.getpid(),
            log_path=str(self.log_path),
            arena_bytes=self.in_flight.arena.nbytes,
            model_class=hello.model_class,
            sglang_version=hello.sglang_version,
            engine_dtype=hello.engine_dtype,
            engine=self.in_flight.engine.facts,
            self_test_passed=tuple(self._report.passed),
            self_test_skipped=tuple(self._report.skipped),
            gpus=named_gpus(self.in_flight.arena.path),
        )

    def progress(self) -> ReplicaProgress:
        storage_retries = self.store.retries()
        with self.in_flight.lock:
            self._note_time()
            return ReplicaProgress(
                prompts=self._prompts,
                tokens=self._tokens,
                stored_bytes=self._stored_bytes,
                in_flight=len(self.in_flight),
                spool_bytes=self.in_flight.admission.used_bytes,
                spool_capacity=self.in_flight.admission.capacity,
                spool_budget=self.in_flight.admission.high_bytes,
                rewritten_rows=self.in_flight.rewritten,
                write_seconds=self._write_seconds,
                write_cpu_seconds=self._write_cpu_seconds,
                capture=tuple(self.in_flight.capture_stats.values()),
                seconds=self._time.seconds(),
                storage_retries=storage_retries,
            )

    def run_lease(self, lease: Lease, attempt: str, plan: PlanRef) -> LeaseOutcome:
        """Do a lease; blocks until all its prompts are stored, failed, or (after `cancel`) left.

        Raises:
            StoreError: the plan could not be read or a shard not be stored.
            EngineError: the engine or its capture broke; this replica is of no more use.
        """
        started = time.monotonic()
        prompts = read_lease_prompts(self.store, plan, lease.rows)
        crash_point("after_lease_read")
        run = _LeaseRun(lease, attempt, deque(prompts))
        with self.in_flight.lock:
            self.in_flight.last_progress = time.monotonic()
            if attempt in self._cancelled:
                run.cancelled, run.keep = True, self._cancelled[attempt]
            self._runs.append(run)
        try:
            self._work(run)
        finally:
            with self.in_flight.lock:
                self._runs.remove(run)
                self._note_time()
                # An error above (the store's, say) leaves finished prompts behind; their slots go back. What is
                # still in the engine gives its slot back when it lands.
                self._drop(run)
                self.in_flight.lock.notify_all()
        norms = {site: total / run.tokens for site, total in run.norm_sums.items()}
        said = ", ".join(f"{site} {norm:.4g}" for site, norm in norms.items())
        log.info("lease %s: %d tokens, mean norm %s", lease.lease_id, run.tokens, said or "of nothing")
        crash_point("before_lease_report")
        return LeaseOutcome(
            lease_id=lease.lease_id,
            attempt=attempt,
            shards=tuple(run.shards),
            failures=tuple(run.failures),
            figures=LeaseFigures(seconds=time.monotonic() - started, spool_peak=run.spool_peak, mean_norms=norms),
        )

    def cancel(self, lease_id: str, attempt: str, keep: bool) -> None:
        """Stop admitting prompts of an attempt. `run_lease` then returns soon: with what is complete if `keep`,
        with nothing new otherwise. It may come before the attempt it means."""
        with self.in_flight.lock:
            self._cancelled[attempt] = keep
            for run in self._runs:
                if run.lease.lease_id == lease_id and run.attempt == attempt:
                    run.cancelled = True
                    run.keep = run.keep and keep
            self.in_flight.lock.notify_all()

    def shutdown(self) -> None:
        """End the engine's processes and remove the arena."""
        self.in_flight.shutdown()

    # -------------------------------------------------------------- the lease

    def _work(self, run: _LeaseRun) -> None:
        while True:
            with self.in_flight.lock:
                self._check_alive()
                if run.cancelled:
                    run.pending.clear()
                if not run.keep:
                    self._drop(run)
                while run.pending and self._try_submit(run):
                    pass
                self._note_time()
                if not run.pending and not run.in_flight and not run.ready:
                    return
                rows = self._take_shard(run)
                if not rows:
                    self.in_flight.lock.wait(WAIT_SECONDS)
                    continue
            self._write(run, rows)

    def _drop(self, run: _LeaseRun) -> None:
        """Holds the lock."""
        for _, slot in run.ready:
            self.in_flight.admission.release(slot)
        run.ready.clear()

    def _try_submit(self, run: _LeaseRun) -> bool:
        """Send the next prompt of `run` into the engine if it may go. Holds the lock."""
        if any(other.pending for other in self._runs[: self._runs.index(run)]):
            return False  # older leases first, or none would ever finish
        if len(self.in_flight) >= MAX_IN_FLIGHT:
            return False
        prompt = run.pending[0]
        if prompt.num_tokens > self.in_flight.engine.max_prompt_tokens:
            run.pending.popleft()
            run.fail(
                prompt,
                "prompt_transient",
                f"{prompt.num_tokens} tokens; this engine takes at most {self.in_flight.engine.max_prompt_tokens} "
                "(raise engine.args.max_total_tokens or context_length, or lower prompts.max_tokens)",
            )
            return True
        try:
            slot = self.in_flight.admission.admit(prompt.num_tokens * self.spec.prompt_bytes_per_token)
        except SpoolFull as err:
            run.pending.popleft()
            run.fail(prompt, "prompt_transient", str(err))
            return True
        if slot is None:
            return False
        for other in self._runs:
            other.spool_peak = max(other.spool_peak, self.in_flight.admission.used_bytes)
        run.pending.popleft()
        run.in_flight += 1
        self.in_flight.send(prompt, slot, lambda request: self._on_done(run, request))
        return True

    def _take_shard(self, run: _LeaseRun) -> list[tuple[Prompt, Slot]]:
        """Complete prompts of `run` that should be written now, in row order. Holds the lock."""
        if not run.ready:
            return []
        is_last = not run.pending and not run.in_flight
        # The arena is too full to go on, nothing of this lease is on its way to make its shard larger, and no other
        # lease is about to give room back.
        is_blocked = bool(run.pending) and not run.in_flight and not self._writing
        if not (is_last or is_blocked or run.ready_bytes >= self.spec.shard_bytes):
            return []
        rows, run.ready = sorted(run.ready, key=lambda item: item[0].row), []
        return rows

    def _write(self, run: _LeaseRun, rows: list[tuple[Prompt, Slot]]) -> None:
        started, cpu_started = time.monotonic(), time.thread_time()
        with self.in_flight.lock:
            self._writing += 1
        key = f"{DATA_PREFIX}{run.lease.lease_id}-{run.attempt}-{len(run.shards)}.parquet"
        try:
            record = write_shard(
                self.store,
                key,
                [ShardRow(prompt, self._states(prompt, slot)) for prompt, slot in rows],
                sites=self.spec.sites,
                hidden_size=self.spec.facts.hidden_size,
                dtype=self.spec.dtype,
                metadata=self.spec.shard_metadata,
                storage=self.spec.storage,
            )
            crash_point("after_shard_upload")
            run.shards.append(record)
        finally:
            with self.in_flight.lock:
                for _, slot in rows:
                    self.in_flight.admission.release(slot)
                self._writing -= 1
                self._write_seconds += time.monotonic() - started
                self._write_cpu_seconds += time.thread_time() - cpu_started
                self.in_flight.last_progress = time.monotonic()
                self.in_flight.lock.notify_all()
        self.metrics.record(UPLOAD_SECONDS, time.monotonic() - started)
        with self.in_flight.lock:
            self._stored_bytes += record.nbytes

    def _states(self, prompt: Prompt, slot: Slot) -> dict[str, memoryview]:
        per_site = slot.nbytes // len(self.spec.sites)
        return {
            site: self.in_flight.arena.view(slot.offset + index * per_site, per_site)
            for index, site in enumerate(self.spec.sites)
        }

    # ----------------------------------------------------------- what happens

    def _note_time(self) -> None:
        """Tell the clock what the replica is doing, whenever that may have changed. Holds the lock."""
        if len(self.in_flight):
            self._time.enter("prefill")
        elif not self.in_flight.admission.is_open and any(run.pending for run in self._runs):
            self._time.enter("spool")
        else:
            self._time.enter("write" if self._runs else "idle")

    def _check_alive(self) -> None:
        waited = time.monotonic() - self.in_flight.last_progress
        if not self._writing and waited > self.spec.request_timeout_seconds:
            self.in_flight.break_down(
                f"nothing has moved for {waited:.0f} s: {len(self.in_flight)} prompts in the engine, "
                f"{self.in_flight.admission.used_bytes:,} bytes in the arena (engine.request_timeout_seconds)"
            )
        self.in_flight.check()

    def _on_done(self, run: _LeaseRun, request: Request) -> None:
        """Holds the lock."""
        self._note_time()
        run.in_flight -= 1
        prompt, problem = request.prompt, request.problem()
        if problem is not None:
            # Worth another try, whatever it is: it may be this GPU's memory rather than the prompt.
            run.fail(prompt, "prompt_transient", problem)
        elif run in self._runs:  # its lease has not failed meanwhile
            assert request.captured is not None
            self._prompts += 1
            self._tokens += prompt.num_tokens
            run.tokens += prompt.num_tokens
            for site, norm in zip(self.spec.sites, request.captured.mean_norm, strict=True):
                run.norm_sums[site] = run.norm_sums.get(site, 0.0) + norm * prompt.num_tokens
            run.ready.append((prompt, request.slot))
            return
        self.in_flight.release(request)


def _make_arena(spec: ReplicaSpec) -> Arena:
    swept = sweep(spec.spool.path)
    if swept:
        log.info("removed %d arenas of dead replicas from %s", len(swept), spec.spool.path)
    largest = spec.largest_prompt_tokens * spec.prompt_bytes_per_token
    if spec.spool.bytes == "auto":
        nbytes = auto_arena_bytes(spec.spool.path, spec.shard_bytes, largest, spec.replicas_per_node)
    else:
        nbytes = int(spec.spool.bytes)
    if largest > nbytes:
        raise ConfigError(
            f"spool.bytes: the largest prompt needs {largest:,} bytes of hidden states, the arena on "
            f"{socket.gethostname()} has {nbytes:,}. Raise spool.bytes and the size of the file system at "
            f"{spec.spool.path}, or lower prompts.max_tokens"
        )
    return Arena(spec.spool.path, nbytes)
