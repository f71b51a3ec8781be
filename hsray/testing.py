"""Fakes that ship with the package, for our tests and anybody's.

`FlakyStore` is a real `Store` whose requests fail on purpose: before they took effect, after they took effect (the
acknowledgement is lost), or for good. It never sleeps. Seeded, so that a failing test can be replayed.
"""

import random
import threading
from collections import deque
from collections.abc import Callable, Collection
from typing import Literal, TypeVar

from hsray.errors import StoreUnavailable, StoreUnusable
from hsray.store import Store

T = TypeVar("T")
StoreFault = Literal["before", "after", "refused"]


class VirtualTime:
    """A clock that only sleeping moves. Safe to share between threads."""

    def __init__(self) -> None:
        self._seconds = 0.0
        self._lock = threading.Lock()

    def now(self) -> float:
        """Seconds slept so far, by everybody together."""
        with self._lock:
            return self._seconds

    def sleep(self, seconds: float) -> None:
        with self._lock:
            self._seconds += seconds


class FlakyStore(Store):
    """`inner`, seen through a bad network.

    Args:
        inner: where the objects really are; it may be shared by any number of flaky views.
        rng: decides about every request.
        before: probability that a request fails without effect (`StoreUnavailable`).
        after: probability that a request takes effect and then fails (`StoreUnavailable`).
        refused: probability of a `StoreUnusable`, without effect.
        operations: which requests may fail at random: put, create, get, head, list, delete, upload. Default: all.
        retry_seconds: patience on the virtual clock; 0 lets the first transient error through to the caller.
        time: share one to see all pauses.
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
        retry_seconds: float = 1.0,
        on_retry: Callable[[str, int], None] | None = None,
        time: VirtualTime | None = None,
    ) -> None:
        self.time = time or VirtualTime()
        super().__init__(
            inner.url,
            inner.backend,
            commit=inner.commit,
            retry_seconds=retry_seconds,
            on_retry=on_retry,
            clock=self.time.now,
            sleep=self.time.sleep,
        )
        self.injected: dict[StoreFault, int] = {"before": 0, "after": 0, "refused": 0}
        self._dice = rng
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
        fault = self._draw(operation)
        if fault == "before":
            raise StoreUnavailable(f"{operation} {self.locate(key)}: injected, the request was lost")
        if fault == "refused":
            raise StoreUnusable(f"{operation} {self.locate(key)}: injected, the store refuses")
        answer = super().attempt(operation, key, request)
        if fault == "after":
            raise StoreUnavailable(f"{operation} {self.locate(key)}: injected, the reply was lost")
        return answer

    def _draw(self, operation: str) -> StoreFault | None:
        with self._fault_lock:
            drawn: StoreFault | None = None
            if scripted := self._scripted.get(operation):
                drawn = scripted.popleft()
            elif self._operations is None or operation in self._operations:
                dice = self._dice.random()
                for fault, chance in self._chances.items():
                    if dice < chance:
                        drawn = fault
                        break
                    dice -= chance
            if drawn is not None:
                self.injected[drawn] += 1
            return drawn
