"""What a run's drivers did over time, on one axis from which the pauses between them are cut out."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from hsray.history import Point
from hsray.status.document import DriverStatus
from hsray.status.survey import Outcomes

BINS = 240
FloatArray = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Stretch:
    """A driver's part of the axis: `begin` to `begin + seconds` is its time since `started` (Unix seconds)."""

    started: float
    begin: float
    seconds: float


@dataclass(frozen=True, slots=True)
class Timeline:
    """Means and maxima of equal bins of the working time. Arrays are `[BINS]`, or empty where nothing is known.

    Attributes:
        seconds: length of the axis.
        stretches: whose it is.
        tokens, nbytes: delivered per second.
        spool_mean, spool_max: fill of the arenas, 0 to 1.
        replicas: ready ones.
        from_records: whether there is no more than the times of the resolutions to go by.
    """

    seconds: float
    stretches: tuple[Stretch, ...]
    tokens: FloatArray
    nbytes: FloatArray
    spool_mean: FloatArray
    spool_max: FloatArray
    replicas: FloatArray
    from_records: bool = False

    def place(self, time: float) -> float | None:
        """Where a time (Unix seconds) is on the axis, 0 to 1; None if no driver was at work."""
        for stretch in reversed(self.stretches):
            if stretch.started - 1 <= time <= stretch.started + stretch.seconds + 1:
                at = stretch.begin + min(max(0.0, time - stretch.started), stretch.seconds)
                return at / self.seconds if self.seconds else 0.0
        return None


def make_timeline(drivers: Sequence[DriverStatus], outcomes: Outcomes) -> Timeline:
    """From the drivers' histories; where these show no work, from the times of the resolutions."""
    histories = [(driver, points) for driver in drivers if len(points := driver.points()) > 1]
    if not any(points[-1].tokens for _, points in histories):
        return _from_records(outcomes)
    axis, tokens, nbytes = [], [], []
    spool_mean, spool_max, replicas = [], [], []
    stretches: list[Stretch] = []
    begin = total_tokens = total_nbytes = 0.0
    for driver, points in histories:
        started = driver.started
        end = max(points[-1].time, driver.updated)
        times = _column(points, "time") - started + begin
        axis.append(times)
        tokens.append(_column(points, "tokens") + total_tokens)
        nbytes.append(_column(points, "nbytes") + total_nbytes)
        spool_mean.append(_column(points, "spool_mean"))
        spool_max.append(_column(points, "spool_max"))
        replicas.append(_column(points, "replicas"))
        stretches.append(Stretch(started, begin, max(0.0, end - started)))
        begin += stretches[-1].seconds
        total_tokens, total_nbytes = float(tokens[-1][-1]), float(nbytes[-1][-1])
    at = np.concatenate(axis)
    edges = np.linspace(0.0, begin, BINS + 1)
    middles = (edges[1:] + edges[:-1]) / 2
    return Timeline(
        seconds=begin,
        stretches=tuple(stretches),
        tokens=_rate(edges, at, np.concatenate(tokens)),
        nbytes=_rate(edges, at, np.concatenate(nbytes)),
        spool_mean=np.interp(middles, at, np.concatenate(spool_mean)),
        spool_max=_maxima(edges, middles, at, np.concatenate(spool_max)),
        replicas=np.interp(middles, at, np.concatenate(replicas)),
    )


def _from_records(outcomes: Outcomes) -> Timeline:
    empty = np.zeros(0)
    ended = np.frombuffer(outcomes.ended, np.float64)
    if len(ended) < 2 or ended.max() <= ended.min():
        return Timeline(0.0, (), empty, empty, empty, empty, empty, from_records=True)
    order = np.argsort(ended)
    at = ended[order] - ended[order[0]]
    edges = np.linspace(0.0, float(at[-1]), BINS + 1)
    tokens = np.cumsum(np.frombuffer(outcomes.ended_tokens, np.int64)[order]).astype(np.float64)
    nbytes = np.cumsum(np.frombuffer(outcomes.ended_nbytes, np.int64)[order]).astype(np.float64)
    stretch = Stretch(float(ended[order[0]]), 0.0, float(at[-1]))
    return Timeline(
        seconds=float(at[-1]),
        stretches=(stretch,),
        tokens=_rate(edges, at, tokens),
        nbytes=_rate(edges, at, nbytes),
        spool_mean=empty,
        spool_max=empty,
        replicas=empty,
        from_records=True,
    )


def _column(points: Sequence[Point], name: str) -> FloatArray:
    return np.array([getattr(point, name) for point in points], np.float64)


def _rate(edges: FloatArray, at: FloatArray, totals: FloatArray) -> FloatArray:
    return np.maximum(0.0, np.diff(np.interp(edges, at, totals)) / np.maximum(1e-9, np.diff(edges)))


def _maxima(edges: FloatArray, middles: FloatArray, at: FloatArray, values: FloatArray) -> FloatArray:
    found = np.interp(middles, at, values)
    bins = np.clip(np.searchsorted(edges, at, side="right") - 1, 0, len(middles) - 1)
    np.maximum.at(found, bins, values)
    return found
