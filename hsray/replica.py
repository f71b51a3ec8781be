"""One engine, one arena, one writer: what runs on a node. It has no policy: it does the leases it is given.

A lease is run by one thread: it admits prompts to the engine while the arena has room, joins each answer of
the engine with the capture's message, writes complete prompts into shards, and frees their slots once the
shard is stored. Several leases run side by side, so the engine never waits for a shard to be written; the oldest
is served first. The class knows nothing of Ray and can be used without it.
"""

import asyncio
import logging
import multiprocessing
import os
import socket
import threading
import time
import uuid
import zlib
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import ml_dtypes
import numpy as np

from hsray.capture.settings import CaptureSettings
from hsray.channel import (
    LAYER_LAYOUT,
    RUN_LAYOUT,
    TEST_LAYOUT,
    Captured,
    CaptureFailed,
    CaptureStats,
    ChannelServer,
    Hello,
    Message,
    RequestId,
)
from hsray.checkpoint import ModelFacts
from hsray.config import SpoolConfig
from hsray.crash_points import crash_point
from hsray.engine import EngineSpec, PrefillEngine, PrefillResponse, load_named
from hsray.errors import ConfigError, EngineError, EngineStartError, SelfTestError, SpoolFull
from hsray.log import configure_file_logging
from hsray.oracle import plan_oracle
from hsray.plan import PlanRef, read_lease_prompts
from hsray.records import FailureClass, Lease, LeaseOutcome, Prompt, PromptFailure, ShardRecord
from hsray.schema import DATA_PREFIX, bytes_per_token
from hsray.selftest import SelfTest, SelfTestReport, TestPrompt, make_test_prompts
from hsray.shard import ShardRow, write_shard
from hsray.spool import Admission, Arena, Slot, auto_arena_bytes, shared_memory_files, sweep
from hsray.store import open_store

log = logging.getLogger(__name__)

# Requests in the engine at once. More would only lengthen SGLang's own queue.
MAX_IN_FLIGHT = 512
_WAIT_SECONDS = 1.0


@dataclass(frozen=True, slots=True)
class ReplicaSpec:
    """All a replica needs to know; picklable, the same for every replica of a run."""

    run_url: str
    storage_options: Mapping[str, Any]
    commit: Literal["conditional", "single-writer"]
    retry_seconds: float
    engine: EngineSpec
    facts: ModelFacts
    sites: tuple[str, ...]
    dtype: str
    spool: SpoolConfig
    shard_bytes: int
    shard_metadata: Mapping[str, str]
    largest_prompt_tokens: int
    start_timeout_seconds: float
    request_timeout_seconds: float
    log_dir: str
    allow_untested: bool = False
    replicas_per_node: int = 1
    engine_class: str = "hsray.engine:SGLangEngine"

    @property
    def prompt_bytes_per_token(self) -> int:
        return bytes_per_token(len(self.sites), self.facts.hidden_size, self.dtype)


@dataclass(frozen=True, slots=True)
class ReplicaFacts:
    """What a ready replica says of itself."""

    replica: str
    node: str
    pid: int
    log_path: str
    arena_bytes: int
    model_class: str
    sglang_version: str
    engine_dtype: str
    engine: Mapping[str, str]
    self_test_passed: tuple[str, ...]
    self_test_skipped: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class ReplicaProgress:
    """Counters since the replica started, and what it holds now.

    `write_seconds` and `write_cpu_seconds` are of the lease threads while they write shards; `capture` holds the
    latest word of each data-parallel rank's capture.
    """

    prompts: int
    tokens: int
    stored_bytes: int
    in_flight: int
    spool_bytes: int
    spool_capacity: int
    rewritten_rows: int
    write_seconds: float
    write_cpu_seconds: float
    capture: tuple[CaptureStats, ...]


@dataclass(slots=True, eq=False)
class _Flight:
    """A prompt in the engine: done when both the answer and the capture's message are here."""

    prompt: Prompt
    slot: Slot
    lease: "_LeaseRun | None"  # None for a self-test prompt
    response: PrefillResponse | None = None
    captured: Captured | None = None


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
    cancelled: bool = False
    keep: bool = True

    @property
    def ready_bytes(self) -> int:
        return sum(slot.nbytes for _, slot in self.ready)

    def fail(self, prompt: Prompt, failure_class: FailureClass, message: str) -> None:
        self.failures.append(PromptFailure(prompt.row, prompt.prompt_id, failure_class, message))


class Replica:
    """Owns one engine. Make it on a thread that lives as long as the process."""

    def __init__(self, spec: ReplicaSpec, replica: str) -> None:
        """Start the engine, wait for the handshake of every leader rank, run the self-test.

        Raises:
            ConfigError: spool or engine arguments.
            EngineStartError: SGLang did not start, or a leader rank did not report.
            SelfTestError: the capture is not right on this engine.
        """
        self.spec = spec
        self.replica = replica
        self.log_path = configure_file_logging(Path(spec.log_dir), replica)
        self._lock = threading.Condition()
        self._hellos: list[Hello] = []
        self._capture_stats: dict[int, CaptureStats] = {}
        self._flights: dict[str, _Flight] = {}
        self._runs: list[_LeaseRun] = []
        self._serial = 0
        self._fatal: str | None = None
        self._closing = False
        self._prompts = self._tokens = self._stored_bytes = self._rewritten = 0
        self._write_seconds = self._write_cpu_seconds = 0.0
        self._last_progress = time.monotonic()  # of any lease: a prompt sent, finished or stored
        self._writing = 0
        self._cancelled: dict[str, bool] = {}  # attempt -> keep; a handful in the life of a replica
        self.store = open_store(
            spec.run_url, spec.storage_options, commit=spec.commit, retry_seconds=spec.retry_seconds
        )
        swept = sweep(spec.spool.path)
        if swept:
            log.info("removed %d arenas of dead replicas from %s", len(swept), spec.spool.path)
        arena_bytes = self._arena_bytes()
        largest = spec.largest_prompt_tokens * spec.prompt_bytes_per_token
        if largest > arena_bytes:
            raise ConfigError(
                f"spool.bytes: the largest prompt needs {largest:,} bytes of hidden states, the arena on "
                f"{socket.gethostname()} has {arena_bytes:,}. Raise spool.bytes and the size of the file system at "
                f"{spec.spool.path}, or lower prompts.max_tokens"
            )
        self._oracle = plan_oracle(spec.engine.model_path, spec.facts, spec.sites)
        self.arena = Arena(spec.spool.path, arena_bytes)
        self.admission = Admission(self.arena.nbytes, spec.spool.high_watermark, spec.spool.low_watermark)
        crash_point("after_arena")
        try:
            address = f"hsray-{os.getpid()}-{uuid.uuid4().hex[:8]}"
            self.channel = ChannelServer(address, self._on_message, self._on_channel_closed)
            capture = CaptureSettings(
                channel=address,
                arena_path=str(self.arena.path),
                arena_bytes=self.arena.nbytes,
                sites=spec.sites,
                layer_sites=self._oracle.sites(spec.facts.num_layers),
                stored_dtype=spec.dtype,
                allow_untested=spec.allow_untested,
            )
            engine_class = load_named(spec.engine_class)
            before = shared_memory_files(os.getpid())
            semaphores = _name_semaphores(self.arena.directory.name)
            self.arena.adopt([semaphores])
            self.engine: PrefillEngine = engine_class(spec.engine, capture)
            # Only what the engine brought: Ray's object store is mapped in this process as well.
            files = shared_memory_files(os.getpid()) - before - {str(self.arena.path)}
            self.arena.adopt([semaphores, *files])
            self._loop = asyncio.new_event_loop()
            threading.Thread(target=self._loop.run_forever, name="hsray-engine-loop", daemon=True).start()
            self._await_handshake()
            self._report = self._self_test()
        except BaseException:
            # The constructor's caller gets no object to shut down.
            self.arena.remove()
            raise
        crash_point("after_self_test")
        log.info("replica %s is ready; self-test passed: %s", replica, "; ".join(self._report.passed))
        for skipped in self._report.skipped:
            log.warning("replica %s: self-test skipped %s", replica, skipped)

    # ------------------------------------------------------------------ calls

    def facts(self) -> ReplicaFacts:
        hello = self._hellos[0]
        return ReplicaFacts(
            replica=self.replica,
            node=socket.gethostname(),
            pid=os.getpid(),
            log_path=str(self.log_path),
            arena_bytes=self.arena.nbytes,
            model_class=hello.model_class,
            sglang_version=hello.sglang_version,
            engine_dtype=hello.engine_dtype,
            engine=self.engine.facts,
            self_test_passed=tuple(self._report.passed),
            self_test_skipped=tuple(self._report.skipped),
        )

    def progress(self) -> ReplicaProgress:
        with self._lock:
            return ReplicaProgress(
                prompts=self._prompts,
                tokens=self._tokens,
                stored_bytes=self._stored_bytes,
                in_flight=len(self._flights),
                spool_bytes=self.admission.used_bytes,
                spool_capacity=self.admission.capacity,
                rewritten_rows=self._rewritten,
                write_seconds=self._write_seconds,
                write_cpu_seconds=self._write_cpu_seconds,
                capture=tuple(self._capture_stats.values()),
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
        with self._lock:
            self._last_progress = time.monotonic()
            if attempt in self._cancelled:
                run.cancelled, run.keep = True, self._cancelled[attempt]
            self._runs.append(run)
        try:
            self._work(run)
        finally:
            with self._lock:
                self._runs.remove(run)
                # An error above (the store's, say) leaves finished prompts behind; their slots go back. What is
                # still in the engine gives its slot back when it lands.
                self._drop(run)
                self._lock.notify_all()
        norms = ", ".join(f"{site} {total / run.tokens:.4g}" for site, total in run.norm_sums.items())
        log.info("lease %s: %d tokens, mean norm %s", lease.lease_id, run.tokens, norms or "of nothing")
        crash_point("before_lease_report")
        return LeaseOutcome(
            lease_id=lease.lease_id,
            attempt=attempt,
            shards=tuple(run.shards),
            failures=tuple(run.failures),
            seconds=time.monotonic() - started,
        )

    def cancel(self, lease_id: str, attempt: str, keep: bool) -> None:
        """Stop admitting prompts of an attempt. `run_lease` then returns soon: with what is complete if `keep`,
        with nothing new otherwise. It may come before the attempt it means."""
        with self._lock:
            self._cancelled[attempt] = keep
            for run in self._runs:
                if run.lease.lease_id == lease_id and run.attempt == attempt:
                    run.cancelled = True
                    run.keep = run.keep and keep
            self._lock.notify_all()

    def shutdown(self) -> None:
        """End the engine's processes and remove the arena."""
        with self._lock:
            self._closing = True
        self.channel.close()
        self.engine.shutdown()
        self.arena.remove()

    # -------------------------------------------------------------- the lease

    def _work(self, run: _LeaseRun) -> None:
        while True:
            with self._lock:
                self._check_alive()
                if run.cancelled:
                    run.pending.clear()
                if not run.keep:
                    self._drop(run)
                while run.pending and self._try_submit(run):
                    pass
                if not run.pending and not run.in_flight and not run.ready:
                    return
                rows = self._take_shard(run)
                if not rows:
                    self._lock.wait(_WAIT_SECONDS)
                    continue
            self._write(run, rows)

    def _drop(self, run: _LeaseRun) -> None:
        """Holds the lock."""
        for _, slot in run.ready:
            self.admission.release(slot)
        run.ready.clear()

    def _try_submit(self, run: _LeaseRun) -> bool:
        """Send the next prompt of `run` into the engine if it may go. Holds the lock."""
        if any(other.pending for other in self._runs[: self._runs.index(run)]):
            return False  # older leases first, or none would ever finish
        if len(self._flights) >= MAX_IN_FLIGHT:
            return False
        prompt = run.pending[0]
        if prompt.num_tokens > self.engine.max_prompt_tokens:
            run.pending.popleft()
            run.fail(
                prompt,
                "prompt_transient",
                f"{prompt.num_tokens} tokens; this engine takes at most {self.engine.max_prompt_tokens} "
                "(raise engine.args.max_total_tokens or context_length, or lower prompts.max_tokens)",
            )
            return True
        try:
            slot = self.admission.admit(prompt.num_tokens * self.spec.prompt_bytes_per_token)
        except SpoolFull as err:
            run.pending.popleft()
            run.fail(prompt, "prompt_transient", str(err))
            return True
        if slot is None:
            return False
        run.pending.popleft()
        run.in_flight += 1
        self._send(_Flight(prompt, slot, run))
        return True

    def _send(self, flight: _Flight, layout: str = RUN_LAYOUT, max_new_tokens: int = 0) -> str:
        """Holds the lock."""
        self._serial += 1
        self._last_progress = time.monotonic()
        rid = str(RequestId(self._serial, flight.slot.offset, flight.prompt.num_tokens, layout))
        self._flights[rid] = flight
        future = asyncio.run_coroutine_threadsafe(
            self.engine.prefill(rid, flight.prompt.input_ids.tolist(), max_new_tokens), self._loop
        )
        future.add_done_callback(lambda done: self._on_response(rid, done))
        return rid

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
        with self._lock:
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
            )
            crash_point("after_shard_upload")
            run.shards.append(record)
        finally:
            with self._lock:
                for _, slot in rows:
                    self.admission.release(slot)
                self._writing -= 1
                self._write_seconds += time.monotonic() - started
                self._write_cpu_seconds += time.thread_time() - cpu_started
                self._last_progress = time.monotonic()
                self._lock.notify_all()
        with self._lock:
            self._stored_bytes += record.nbytes

    def _states(self, prompt: Prompt, slot: Slot) -> dict[str, memoryview]:
        per_site = slot.nbytes // len(self.spec.sites)
        return {
            site: self.arena.view(slot.offset + index * per_site, per_site)
            for index, site in enumerate(self.spec.sites)
        }

    # ----------------------------------------------------------- what happens

    def _check_alive(self) -> None:
        waited = time.monotonic() - self._last_progress
        if self._fatal is None and not self._writing and waited > self.spec.request_timeout_seconds:
            self._fatal = (
                f"nothing has moved for {waited:.0f} s: {len(self._flights)} prompts in the engine, "
                f"{self.admission.used_bytes:,} bytes in the arena (engine.request_timeout_seconds)"
            )
        if self._fatal is not None:
            raise EngineError(f"{self._fatal}; log: {self.log_path}")

    def _on_message(self, message: Message) -> None:
        with self._lock:
            if isinstance(message, Hello):
                self._hellos.append(message)
            elif isinstance(message, CaptureFailed):
                self._fatal = self._fatal or f"the capture failed: {message.message}"
            elif isinstance(message, CaptureStats):
                self._capture_stats[message.dp_rank] = message
            else:
                self._rewritten += message.rewritten
                flight = self._flights.get(message.rid)
                if flight is not None:
                    flight.captured = message
                    self._join(message.rid, flight)
            self._lock.notify_all()

    def _on_channel_closed(self) -> None:
        with self._lock:
            if not self._closing:
                self._fatal = self._fatal or "a scheduler process of SGLang ended"
            self._lock.notify_all()

    def _on_response(self, rid: str, done: "Any") -> None:
        with self._lock:
            flight = self._flights.get(rid)
            if flight is None:
                return
            error = done.exception()
            if error is not None:
                self._fatal = self._fatal or f"the engine failed: {type(error).__name__}: {error}"
            else:
                flight.response = done.result()
                self._join(rid, flight)
            self._lock.notify_all()

    def _join(self, rid: str, flight: _Flight) -> None:
        """Holds the lock."""
        response, captured, run = flight.response, flight.captured, flight.lease
        if response is None or (captured is None and response.error is None):
            return
        if run is None:
            return  # the self-test looks at its flights itself
        del self._flights[rid]
        self._last_progress = time.monotonic()
        run.in_flight -= 1
        if response.error is not None:
            run.fail(flight.prompt, "prompt_transient", f"SGLang refused the prompt: {response.error}")
            self._leak(flight.slot)
            return
        assert captured is not None
        problem = self._mismatch(flight.prompt, response, captured)
        if problem is not None:
            run.fail(flight.prompt, "prompt_transient", problem)
        elif captured.bad is not None:
            site, position, what = captured.bad
            # Worth another try: it may be this GPU's memory rather than the prompt.
            run.fail(flight.prompt, "prompt_transient", f"{what} in {site} at position {position} (0-based)")
        elif run in self._runs:  # its lease has not failed meanwhile
            self._prompts += 1
            self._tokens += flight.prompt.num_tokens
            run.tokens += flight.prompt.num_tokens
            for site, norm in zip(self.spec.sites, captured.mean_norm, strict=True):
                run.norm_sums[site] = run.norm_sums.get(site, 0.0) + norm * flight.prompt.num_tokens
            run.ready.append((flight.prompt, flight.slot))
            return
        self.admission.release(flight.slot)

    def _mismatch(self, prompt: Prompt, response: PrefillResponse, captured: Captured) -> str | None:
        expected = prompt.num_tokens
        if captured.num_tokens != expected or response.prompt_tokens != expected:
            return (
                f"{expected} tokens were sent, the engine counted {response.prompt_tokens}, "
                f"{captured.num_tokens} were captured"
            )
        if captured.prompt_crc32 != zlib.crc32(prompt.input_ids.astype("<i4", copy=False).tobytes()):
            return "the engine's prompt ids are not the ones that were sent"
        return None

    def _leak(self, slot: Slot) -> None:
        """Give up the slot of a request that the engine refused. Holds the lock.

        SGLang prefills a stub under the refused request's id, and nothing tells when its write has landed, so
        the slot is not used again. Refusals are rare; when they are not, a fresh replica is the better answer.
        """
        self.admission.leak(slot)
        if self.admission.leaked_bytes > self.admission.capacity // 8:
            self._fatal = self._fatal or "an eighth of the arena is lost to requests that the engine refused"

    # --------------------------------------------------------------- starting

    def _arena_bytes(self) -> int:
        wanted = self.spec.spool.bytes
        if wanted != "auto":
            return int(wanted)
        return auto_arena_bytes(
            self.spec.spool.path,
            self.spec.shard_bytes,
            self.spec.largest_prompt_tokens * self.spec.prompt_bytes_per_token,
            self.spec.replicas_per_node,
        )

    def _await_handshake(self) -> None:
        deadline = time.monotonic() + self.spec.start_timeout_seconds
        with self._lock:
            while len(self._hellos) < self.engine.num_leaders:
                if self._fatal is not None:
                    raise EngineStartError(f"{self._fatal}; log: {self.log_path}")
                if time.monotonic() > deadline:
                    raise EngineStartError(
                        f"{len(self._hellos)} of {self.engine.num_leaders} leader ranks reported their capture within "
                        f"{self.spec.start_timeout_seconds:.0f} s; log: {self.log_path}"
                    )
                self._lock.wait(_WAIT_SECONDS)
            hellos = list(self._hellos)
        problems = []
        for hello in hellos:
            if hello.hidden_size != self.spec.facts.hidden_size:
                problems.append(f"hidden size {hello.hidden_size}, config.json says {self.spec.facts.hidden_size}")
            if hello.num_layers != self.spec.facts.num_layers:
                problems.append(f"{hello.num_layers} layers, config.json says {self.spec.facts.num_layers}")
            if hello.engine_dtype not in (self.spec.dtype, "float32"):
                problems.append(
                    f"hidden states are {hello.engine_dtype}, capture.dtype is {self.spec.dtype}: "
                    f"set capture.dtype: {hello.engine_dtype}, or engine.args.dtype"
                )
        if problems:
            raise ConfigError("the engine does not fit the configuration: " + "; ".join(problems))

    def _self_test(self) -> SelfTestReport:
        facts = self.spec.facts
        test_sites, layer_sites = self._hellos[0].test_sites, self._oracle.sites(facts.num_layers)
        widest = max(len(test_sites), len(layer_sites))
        arena_tokens = self.arena.nbytes // bytes_per_token(widest, facts.hidden_size, self.spec.dtype)
        prompts = make_test_prompts(facts.vocab_size, max(1, min(self.engine.max_prompt_tokens - 2, arena_tokens // 8)))
        # SGLang deals requests to data-parallel ranks in turn: as many sets as ranks.
        prompts = prompts * self.engine.num_leaders
        test = SelfTest(self.spec.engine.model_path, facts, self.spec.sites, self.spec.dtype)
        tested = self._probe(prompts, TEST_LAYOUT, test_sites, max_new_tokens=1)
        report = test.check(tested)
        if layer_sites:
            test.check_layers(self._oracle, tested, self._probe(prompts, LAYER_LAYOUT, layer_sites), report)
        return report

    def _probe(
        self, prompts: Sequence[Sequence[int]], layout: str, sites: Sequence[str], max_new_tokens: int = 0
    ) -> list[TestPrompt]:
        """States of some prompts at the sites of a layout, all prompts in the engine at once."""
        per_token = bytes_per_token(len(sites), self.spec.facts.hidden_size, self.spec.dtype)
        flights: dict[str, _Flight] = {}
        with self._lock:
            for ids in prompts:
                slot = self.admission.allocator.allocate(len(ids) * per_token)
                if slot is None:
                    raise SelfTestError("spool.bytes is too small even for the self-test's prompts")
                array = np.asarray(ids, np.int32)
                prompt = Prompt(-1, "self-test", array, np.zeros(len(ids), np.uint8), "", 0)
                flight = _Flight(prompt, slot, None)
                flights[self._send(flight, layout, max_new_tokens)] = flight
            deadline = time.monotonic() + self.spec.start_timeout_seconds
            while any(f.response is None or (f.captured is None and not f.response.error) for f in flights.values()):
                if self._fatal is not None:
                    raise SelfTestError(f"{self._fatal}; log: {self.log_path}")
                if time.monotonic() > deadline:
                    raise SelfTestError(f"the self-test's prompts did not come back; log: {self.log_path}")
                self._lock.wait(_WAIT_SECONDS)
            for rid in flights:
                del self._flights[rid]
        tested = []
        dtype = {"bfloat16": ml_dtypes.bfloat16}.get(self.spec.dtype) or np.dtype(self.spec.dtype)
        for flight in flights.values():
            response, captured, prompt = flight.response, flight.captured, flight.prompt
            assert response is not None
            if response.error is not None or captured is None:
                raise SelfTestError(f"SGLang refused a self-test prompt: {response.error}")
            crc = zlib.crc32(prompt.input_ids.astype("<i4").tobytes())
            if captured.prompt_crc32 != crc or captured.num_tokens != prompt.num_tokens:
                raise SelfTestError("self-test: the engine's prompt ids or their number are not those that were sent")
            raw = np.frombuffer(self.arena.view(flight.slot.offset, flight.slot.nbytes), dtype)
            states = raw.reshape(len(sites), prompt.num_tokens, self.spec.facts.hidden_size)
            by_site = {site: states[i].copy() for i, site in enumerate(sites)}
            tested.append(TestPrompt(prompt.input_ids.tolist(), by_site, next(iter(response.output_ids), -1)))
        with self._lock:
            for flight in flights.values():
                self.admission.release(flight.slot)
        return tested


def _name_semaphores(owner: str) -> str:
    """Give multiprocessing's semaphores, here and in children, names by which they can be found afterwards.

    Python unlinks them when processes end by themselves; SGLang's are killed. Returns the glob of their files.
    """
    config: dict[str, Any] = getattr(multiprocessing.current_process(), "_config", {})
    config["semprefix"] = f"/mp-hsray-{owner}"
    return f"/dev/shm/sem.mp-hsray-{owner}-*"
