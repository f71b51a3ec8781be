"""What a replica spends its time on."""

import time
from collections.abc import Callable, Mapping
from typing import get_args

from hsray.metrics.table import ReplicaTime


class ReplicaClock:
    """Seconds by state since the replica is ready. Not thread-safe; the replica holds its lock around every call.

    Starts idle. `enter` is called whenever the state may have changed, which is twice per prompt.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._seconds: dict[ReplicaTime, float] = dict.fromkeys(get_args(ReplicaTime), 0.0)
        self._state: ReplicaTime = "idle"
        self._since = clock()

    def enter(self, state: ReplicaTime) -> None:
        """From now on the replica is in `state`; it may have been before."""
        now = self._clock()
        self._seconds[self._state] += now - self._since
        self._state, self._since = state, now

    def seconds(self) -> Mapping[ReplicaTime, float]:
        """Up to now. A copy."""
        self.enter(self._state)
        return dict(self._seconds)
