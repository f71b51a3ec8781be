"""Fakes that ship with the package, for our tests and anybody's.

`FlakyStore` is a real `Store` whose requests fail on purpose: before they took effect, after they took effect (the
acknowledgement is lost), or for good. It never sleeps. Seeded, so that a failing test can be replayed.
"""

import random
import threading
from collections import Counter, deque
from collections.abc import Callable, Collection
from typing import Literal, TypeVar

from hsray.errors import StoreUnavailable, StoreUnusable
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
        on_retry: Callable[[str, int], None] | None = None,
    ) -> None:
        self.time = VirtualTime()
        super().__init__(
            inner.url,
            inner.backend,
            commit=inner.commit,
            retry_seconds=retry_seconds,
            on_retry=on_retry,
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
