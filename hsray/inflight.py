"""Prompts in the engine: from a slot in the arena to states in it.

Joins each answer of the engine with the capture's message about the same request and checks one against the other.
Owns everything that lives as long as the engine: the arena, the channel of the capture, the engine's event loop.
"""

import asyncio
import logging
import multiprocessing
import os
import threading
import time
import uuid
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from hsray.capture.settings import CaptureSettings
from hsray.channel import (
    RUN_LAYOUT,
    Captured,
    CaptureFailed,
    CaptureStats,
    ChannelServer,
    Hello,
    Message,
    RequestId,
)
from hsray.engine import PrefillEngine, PrefillResponse, check_kv_cache, load_named
from hsray.errors import ConfigError, EngineError, EngineStartError
from hsray.records import Prompt
from hsray.replica_spec import ReplicaSpec
from hsray.spool import Admission, Arena, Slot, shared_memory_files

log = logging.getLogger(__name__)

WAIT_SECONDS = 1.0


@dataclass(slots=True, eq=False)
class Request:
    """A prompt in the engine. Done when the answer and the capture's message are both here, or SGLang refused it."""

    rid: str
    prompt: Prompt
    slot: Slot
    on_done: Callable[["Request"], None]
    response: PrefillResponse | None = None
    captured: Captured | None = None

    @property
    def is_done(self) -> bool:
        return self.response is not None and (self.captured is not None or self.response.error is not None)

    def problem(self, *, of_rows: bool = True) -> str | None:
        """Why the states of a request that is done are not those of its prompt; None if they are.

        `of_rows`: whether to speak of rows that are zero or not finite as well.
        """
        response, captured, expected = self.response, self.captured, self.prompt.num_tokens
        assert response is not None
        if response.error is not None:
            return f"SGLang refused the prompt: {response.error}"
        assert captured is not None
        if captured.num_tokens != expected or response.prompt_tokens != expected:
            return (
                f"{expected} tokens were sent, the engine counted {response.prompt_tokens}, "
                f"{captured.num_tokens} were captured"
            )
        if captured.prompt_crc32 != zlib.crc32(self.prompt.input_ids.astype("<i4", copy=False).tobytes()):
            return "the engine's prompt ids are not the ones that were sent"
        if of_rows and captured.bad is not None:
            site, position, what = captured.bad
            return f"{what} in {site} at position {position} (0-based)"
        return None


class InFlight:
    """An engine with its arena, and the requests it has.

    `lock` guards all of it, and whatever the callers of `send` keep in step with it: `on_done` is called with the lock
    held, on another thread.
    """

    def __init__(self, spec: ReplicaSpec, arena: Arena, layer_sites: tuple[str, ...], log_path: str) -> None:
        """Start the engine in `arena` and wait for the handshake of every leader rank.

        Raises:
            ConfigError: spool or engine arguments.
            EngineStartError: SGLang did not start, or a leader rank did not report.
        """
        self.spec = spec
        self.log_path = log_path
        self.lock = threading.Condition()
        self.arena = arena
        self.admission = Admission(arena.nbytes, spec.spool.high_watermark, spec.spool.low_watermark)
        self.last_progress = time.monotonic()  # a prompt sent, finished or stored
        self.rewritten = 0
        self.capture_stats: dict[int, CaptureStats] = {}  # by data-parallel rank
        self._requests: dict[str, Request] = {}
        self._hellos: list[Hello] = []
        self._serial = 0
        self._fatal: str | None = None
        self._closing = False
        address = f"hsray-{os.getpid()}-{uuid.uuid4().hex[:8]}"
        self.channel = ChannelServer(address, self._on_message, self._on_channel_closed)
        capture = CaptureSettings(
            channel=address,
            arena_path=str(arena.path),
            arena_bytes=arena.nbytes,
            sites=spec.sites,
            layer_sites=layer_sites,
            stored_dtype=spec.dtype,
            allow_untested=spec.allow_untested,
        )
        engine_class = load_named(spec.engine_class)
        before = shared_memory_files(os.getpid())
        semaphores = _name_semaphores(arena.directory.name)
        arena.adopt([semaphores])
        self.engine: PrefillEngine = engine_class(spec.engine, capture)
        # Only what the engine brought: Ray's object store is mapped in this process as well.
        files = shared_memory_files(os.getpid()) - before - {str(arena.path)}
        arena.adopt([semaphores, *files])
        self._loop = asyncio.new_event_loop()
        threading.Thread(target=self._loop.run_forever, name="hsray-engine-loop", daemon=True).start()
        self._await_handshake()

    @property
    def hello(self) -> Hello:
        """What the first leader rank said of its model."""
        return self._hellos[0]

    def __len__(self) -> int:
        return len(self._requests)

    def send(
        self,
        prompt: Prompt,
        slot: Slot,
        on_done: Callable[[Request], None],
        *,
        layout: str = RUN_LAYOUT,
        max_new_tokens: int = 0,
    ) -> Request:
        """Prefill `prompt`, its states at the sites of `layout` into `slot`. Holds the lock."""
        self._serial += 1
        self.last_progress = time.monotonic()
        rid = str(RequestId(self._serial, slot.offset, prompt.num_tokens, layout))
        request = self._requests[rid] = Request(rid, prompt, slot, on_done)
        future = asyncio.run_coroutine_threadsafe(
            self.engine.prefill(rid, prompt.input_ids.tolist(), max_new_tokens), self._loop
        )
        future.add_done_callback(lambda done: self._on_response(rid, done))
        return request

    def release(self, request: Request) -> None:
        """Give the slot of a request that is done back, or give it up. Holds the lock.

        SGLang prefills a stub under a refused request's id, and nothing tells when its write has landed, so that slot
        is not used again. Refusals are rare; when they are not, a fresh replica is the better answer.
        """
        assert request.response is not None
        if request.response.error is None:
            self.admission.release(request.slot)
            return
        self.admission.leak(request.slot)
        if self.admission.leaked_bytes > self.admission.capacity // 8:
            self.break_down("an eighth of the arena is lost to requests that the engine refused")

    def break_down(self, why: str) -> None:
        """The engine is of no more use; the first reason stands."""
        self._fatal = self._fatal or why

    def check(self, error: type[EngineError] = EngineError) -> None:
        """Raise `error` if the engine or its capture broke."""
        if self._fatal is not None:
            raise error(f"{self._fatal}; log: {self.log_path}")

    def shutdown(self) -> None:
        """End the engine's processes and remove the arena."""
        with self.lock:
            self._closing = True
        self.channel.close()
        self.engine.shutdown()
        self.arena.remove()

    def _on_message(self, message: Message) -> None:
        with self.lock:
            if isinstance(message, Hello):
                self._hellos.append(message)
            elif isinstance(message, CaptureFailed):
                self.break_down(f"the capture failed: {message.message}")
            elif isinstance(message, CaptureStats):
                self.capture_stats[message.dp_rank] = message
            else:
                self.rewritten += message.rewritten
                request = self._requests.get(message.rid)
                if request is not None:
                    request.captured = message
                    self._settle(request)
            self.lock.notify_all()

    def _on_channel_closed(self) -> None:
        with self.lock:
            if not self._closing:
                self.break_down("a scheduler process of SGLang ended")
            self.lock.notify_all()

    def _on_response(self, rid: str, done: Any) -> None:
        with self.lock:
            request = self._requests.get(rid)
            if request is None:
                return
            error = done.exception()
            if error is not None:
                self.break_down(f"the engine failed: {type(error).__name__}: {error}")
            else:
                request.response = done.result()
                self._settle(request)
            self.lock.notify_all()

    def _settle(self, request: Request) -> None:
        if request.is_done:
            del self._requests[request.rid]
            self.last_progress = time.monotonic()
            request.on_done(request)

    def _await_handshake(self) -> None:
        deadline = time.monotonic() + self.spec.start_timeout_seconds
        with self.lock:
            while len(self._hellos) < self.engine.num_leaders:
                self.check(EngineStartError)
                if time.monotonic() > deadline:
                    raise EngineStartError(
                        f"{len(self._hellos)} of {self.engine.num_leaders} leader ranks reported their capture within "
                        f"{self.spec.start_timeout_seconds:.0f} s; log: {self.log_path}"
                    )
                self.lock.wait(WAIT_SECONDS)
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
        check_kv_cache(self.engine.facts.get("kv_cache_dtype", "auto"))
        if problems:
            raise ConfigError("the engine does not fit the configuration: " + "; ".join(problems))


def _name_semaphores(owner: str) -> str:
    """Give multiprocessing's semaphores, here and in children, names by which they can be found afterwards.

    Python unlinks them when processes end by themselves; SGLang's are killed. Returns the glob of their files.
    """
    config: dict[str, Any] = getattr(multiprocessing.current_process(), "_config", {})
    config["semprefix"] = f"/mp-hsray-{owner}"
    return f"/dev/shm/sem.mp-hsray-{owner}-*"
