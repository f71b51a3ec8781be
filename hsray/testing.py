"""Fakes that ship with the package, for our tests and anybody's.

`FlakyStore` is a real `Store` whose requests fail on purpose: before they took effect, after they took effect (the
acknowledgement is lost), or for good. It never sleeps. Seeded, so that a failing test can be replayed. `FakeEngine`
makes up states, so that a whole run over Ray takes seconds.
"""

import asyncio
import mmap
import os
import random
import signal
import threading
import zlib
from collections import Counter, deque
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeVar

import ml_dtypes
import numpy as np

from hsray.capture.settings import CaptureSettings
from hsray.channel import LAYER_LAYOUT, RUN_LAYOUT, TEST_LAYOUT, Captured, ChannelClient, Hello, RequestId
from hsray.crash_points import crash_point
from hsray.engine import EngineSpec, PrefillResponse
from hsray.errors import StoreUnavailable, StoreUnusable
from hsray.sites import FINAL_POSTNORM, FINAL_PRENORM
from hsray.spool import name_gpu
from hsray.store import Store

T = TypeVar("T")
StoreFault = Literal["before", "after", "refused"]


class VirtualTime:
    """A clock that only sleeping moves, in each thread by itself: threads sleep side by side."""

    def __init__(self) -> None:
        self._local = threading.local()

    def now(self) -> float:
        """Seconds this thread has slept."""
        seconds: float = getattr(self._local, "seconds", 0.0)
        return seconds

    def sleep(self, seconds: float) -> None:
        self._local.seconds = self.now() + seconds


class FlakyStore(Store):
    """`inner`, seen through a bad network.

    Args:
        inner: where the objects really are; it may be shared by any number of flaky views.
        rng: gives the seed. Whether a request fails depends on that seed, its operation, its key and how often both
            came before, not on the order of threads.
        before: probability that a request fails without effect (`StoreUnavailable`).
        after: probability that a request takes effect and then fails (`StoreUnavailable`).
        refused: probability of a `StoreUnusable`, without effect.
        operations: which requests may fail at random: put, create, get, head, list, delete, upload. Default: all.
        retry_seconds: patience on the virtual clock. Pauses are 0.25, 0.5, 1, 2, ... s here, so the default tries
            twice and 0 lets the first transient error through.
    """

    def __init__(
        self,
        inner: Store,
        rng: random.Random,
        *,
        before: float = 0.0,
        after: float = 0.0,
        refused: float = 0.0,
        operations: Collection[str] | None = None,
        retry_seconds: float = 0.5,
    ) -> None:
        self.time = VirtualTime()
        super().__init__(
            inner.url,
            inner.backend,
            commit=inner.commit,
            retry_seconds=retry_seconds,
            clock=self.time.now,
            sleep=self.time.sleep,
            jitter=lambda cap: cap / 2,
        )
        self.injected: dict[StoreFault, int] = {"before": 0, "after": 0, "refused": 0}
        self._seed = rng.random()
        self._seen: Counter[tuple[str, str]] = Counter()
        self._chances: dict[StoreFault, float] = {
            "before": before,
            "after": after,
            "refused": refused,
        }
        self._operations = operations
        self._scripted: dict[str, deque[StoreFault]] = {}
        self._fault_lock = threading.Lock()

    def fail_next(self, operation: str, fault: StoreFault, times: int = 1) -> None:
        """Let the next `times` requests of this operation fail in this way, before chance decides again."""
        with self._fault_lock:
            self._scripted.setdefault(operation, deque()).extend([fault] * times)

    def calm(self) -> None:
        """No more faults, scripted or by chance."""
        with self._fault_lock:
            self._scripted.clear()
            self._chances = dict.fromkeys(self._chances, 0.0)

    def attempt(self, operation: str, key: str, request: Callable[[], T]) -> T:
        fault = self._draw(operation, key)
        if fault == "before":
            raise StoreUnavailable(f"{operation} {self.locate(key)}: injected, the request was lost")
        if fault == "refused":
            raise StoreUnusable(f"{operation} {self.locate(key)}: injected, the store refuses")
        answer = super().attempt(operation, key, request)
        if fault == "after":
            raise StoreUnavailable(f"{operation} {self.locate(key)}: injected, the reply was lost")
        return answer

    def _draw(self, operation: str, key: str) -> StoreFault | None:
        with self._fault_lock:
            drawn: StoreFault | None = None
            self._seen[operation, key] += 1
            if scripted := self._scripted.get(operation):
                drawn = scripted.popleft()
            elif self._operations is None or operation in self._operations:
                dice = random.Random(f"{self._seed} {operation} {key} {self._seen[operation, key]}").random()
                for fault, chance in self._chances.items():
                    if dice < chance:
                        drawn = fault
                        break
                    dice -= chance
            if drawn is not None:
                self.injected[drawn] += 1
            return drawn


@dataclass(frozen=True, slots=True)
class FakeBehaviour:
    """How a FakeEngine misbehaves; given as `engine.args` of the same names.

    Attributes:
        crash_token: a prompt that holds this id kills the process, as SIGKILL does.
        last_words: what it prints before it does.
        nan_token: the row of this id becomes NaN in the first site.
        refuse_token: a prompt that holds this id is refused, as SGLang refuses a request.
        seconds_per_token: time a prompt takes; prompts run side by side.
        max_prompt_tokens: longest prompt taken.
        gpu: UUID of the GPU that it says it computes on; none by default.
        chosen_kv_cache: what it says that it chose for its KV cache.
    """

    crash_token: int = -1
    last_words: str = ""
    nan_token: int = -1
    refuse_token: int = -1
    seconds_per_token: float = 0.0
    max_prompt_tokens: int = 1 << 20
    gpu: str = ""
    chosen_kv_cache: str = "auto"
    hidden_size: int = 16
    num_layers: int = 8


def fake_states(site: str, input_ids: Sequence[int], hidden_size: int, dtype: str) -> "np.ndarray[Any, Any]":
    """The states a FakeEngine delivers: `[tokens, hidden_size]`, a pure function of site and prompt."""
    ids = np.asarray(input_ids, dtype="<i4")
    seed = zlib.crc32(site.encode() + ids.tobytes())
    values = np.random.default_rng(seed).standard_normal((len(ids), hidden_size), dtype=np.float32)
    return values.astype(ml_dtypes.bfloat16 if dtype == "bfloat16" else dtype)


class FakeEngine:
    """An engine with the real arena, the real channel and made-up states. No model, no SGLang, no torch.

    `engine_class="hsray.testing:FakeEngine"` gives a whole run over Ray that starts in a second.
    """

    def __init__(self, spec: EngineSpec, capture: CaptureSettings) -> None:
        self.behaviour = FakeBehaviour(**{k: v for k, v in spec.args.items() if k not in ("device", "tp_size")})
        self.capture = capture
        self.max_prompt_tokens = self.behaviour.max_prompt_tokens
        self.num_leaders = 1
        self.facts = {"engine": "fake", "kv_cache_dtype": self.behaviour.chosen_kv_cache}
        if self.behaviour.gpu:
            name_gpu(capture.arena_path, self.behaviour.gpu)
        self.layouts = {
            RUN_LAYOUT: capture.sites,
            TEST_LAYOUT: (*capture.sites, *_missing_finals(capture.sites)),
            LAYER_LAYOUT: capture.layer_sites,
        }
        with Path(capture.arena_path).open("r+b") as file:
            self._map = mmap.mmap(file.fileno(), capture.arena_bytes)
        self._channel = ChannelClient(capture.channel)
        self._channel.send(
            Hello(
                pid=os.getpid(),
                rank=0,
                dp_rank=0,
                sglang_version="fake",
                model_class="FakeModel",
                sites=capture.sites,
                test_sites=self.layouts[TEST_LAYOUT],
                hidden_size=self.behaviour.hidden_size,
                engine_dtype=capture.stored_dtype,
                stored_dtype=capture.stored_dtype,
                num_layers=self.behaviour.num_layers,
                tested=True,
            )
        )

    async def prefill(self, rid: str, input_ids: Sequence[int], max_new_tokens: int = 0) -> PrefillResponse:
        behaviour, request = self.behaviour, RequestId.parse(rid)
        assert request is not None
        await asyncio.sleep(behaviour.seconds_per_token * len(input_ids))
        is_test = request.layout != RUN_LAYOUT
        if behaviour.crash_token in input_ids and not is_test:
            os.write(2, f"{behaviour.last_words}\n".encode())
            os.kill(os.getpid(), signal.SIGKILL)
        if behaviour.refuse_token in input_ids and not is_test:
            return PrefillResponse(0, (), "refused by FakeEngine")
        bad: tuple[str, int, str] | None = None
        norms = []
        for index, site in enumerate(self.layouts[request.layout]):
            states = fake_states(site, input_ids, behaviour.hidden_size, self.capture.stored_dtype)
            if index == 0 and behaviour.nan_token in input_ids and not is_test:
                position = list(input_ids).index(behaviour.nan_token)
                states[position] = np.nan
                bad = (site, position, "NaN or infinity")
            start = request.offset + index * states.nbytes
            self._map[start : start + states.nbytes] = states.tobytes()
            norms.append(float(np.linalg.norm(states.astype(np.float32), axis=1).mean()))
        crc = zlib.crc32(np.asarray(input_ids, "<i4").tobytes())
        if not is_test:
            crash_point("before_captured")
        self._channel.send(Captured(rid, len(input_ids), crc, 0, tuple(norms), bad))
        if not is_test:
            crash_point("after_captured")
        return PrefillResponse(len(input_ids), (0,) * max_new_tokens)

    def shutdown(self) -> None:
        self._channel.close()


def _missing_finals(sites: Sequence[str]) -> tuple[str, ...]:
    return tuple(site for site in (FINAL_PRENORM, FINAL_POSTNORM) if site not in sites)
