"""Figures over time in bounded memory, however long a run takes: `History`, and rates of the last minute.

Pure: times come with the figures. Counters (tokens, bytes, prompts) are totals, so thinning loses no work; of the
fill levels between two points, mean and maximum are kept.
"""

import math
from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from hsray.records import JsonDict

MAX_POINTS = 1024

# Rates are means over this window, so that a pause shows and a spike does not.
_WINDOW_SECONDS = 60.0
_COLUMNS = ("time", "tokens", "nbytes", "prompts", "spool_mean", "spool_max", "in_flight", "replicas")


@dataclass(frozen=True, slots=True)
class Point:
    """What one driver had done at a time, and what it held.

    Attributes:
        time: Unix seconds.
        tokens, nbytes, prompts: delivered by the replicas since the driver started.
        spool_mean, spool_max: fill of all arenas together, 0 to 1, since the point before.
        in_flight: prompts in the engines, the most since the point before.
        replicas: ready replicas.
    """

    time: float
    tokens: int
    nbytes: int
    prompts: int
    spool_mean: float
    spool_max: float
    in_flight: int
    replicas: int


class History:
    """At most `limit` points. When it is full, every second one goes, and further ones come half as often."""

    def __init__(self, limit: int = MAX_POINTS, step_seconds: float = 1.0) -> None:
        if limit < 4:
            raise ValueError(f"a history of {limit} points shows nothing")
        self._limit = limit
        self._step = step_seconds
        self._points: list[Point] = []
        self._pending: list[Point] = []

    def __len__(self) -> int:
        return len(self._points) + bool(self._pending)

    def __iter__(self) -> Iterator[Point]:
        yield from self._points
        if self._pending:
            yield _merge(self._pending)

    def add(self, point: Point) -> None:
        """Take in a point; cheap enough for every turn of the driver's loop."""
        if not self._points:
            self._points.append(point)
            return
        self._pending.append(point)
        if point.time - self._points[-1].time < self._step:
            if len(self._pending) > 64:  # a fast loop under a long step
                self._pending = [_merge(self._pending)]
            return
        self._points.append(_merge(self._pending))
        self._pending = []
        if len(self._points) >= self._limit:
            self._step *= 2
            # The first point is the origin of every rate; after it, neighbours become one.
            rest = self._points[1:]
            self._points[1:] = [_merge(rest[i : i + 2]) for i in range(0, len(rest), 2)]

    def to_json(self) -> JsonDict:
        """Columns of equal length; times to a tenth of a second, fills to a thousandth."""
        points = [*self]
        digits = {"time": 1, "spool_mean": 3, "spool_max": 3}
        return {
            name: [round(v, digits[name]) if name in digits else v for v in (getattr(p, name) for p in points)]
            for name in _COLUMNS
        }


def points_from_json(data: Mapping[str, Any]) -> list[Point]:
    """Inverse of `History.to_json`. Raises KeyError, TypeError or ValueError on anything else."""
    points = [Point(*values) for values in zip(*(data[name] for name in _COLUMNS), strict=True)]
    for point in points:
        if not all(math.isfinite(getattr(point, name)) for name in _COLUMNS):
            raise ValueError(f"a point of the history is not a number: {point}")
    return points


def _merge(points: list[Point]) -> Point:
    last = points[-1]
    return Point(
        last.time,
        last.tokens,
        last.nbytes,
        last.prompts,
        spool_mean=sum(p.spool_mean for p in points) / len(points),
        spool_max=max(p.spool_max for p in points),
        in_flight=max(p.in_flight for p in points),
        replicas=last.replicas,
    )


class RateMeter:
    """Tokens, bytes and prompts per second over the last minute."""

    def __init__(self) -> None:
        self._points: deque[tuple[float, int, int, int]] = deque()

    def add(self, now: float, tokens: int, nbytes: int, prompts: int) -> None:
        self._points.append((now, tokens, nbytes, prompts))
        while len(self._points) > 2 and self._points[0][0] < now - _WINDOW_SECONDS:
            self._points.popleft()

    def rates(self) -> tuple[float, float, float]:
        """(tokens/s, bytes/s, prompts/s); zeros until there are two points."""
        if len(self._points) < 2:
            return 0.0, 0.0, 0.0
        (t0, *old), (t1, *new) = self._points[0], self._points[-1]
        elapsed = max(1e-6, t1 - t0)
        tokens, nbytes, prompts = ((b - a) / elapsed for a, b in zip(old, new, strict=True))
        return tokens, nbytes, prompts
