"""The seam between what is measured and who exports it."""

from typing import Final, Protocol

from hsray.metrics.table import Metric


class Metrics(Protocol):
    """Where metrics go. Called from any thread, some times a second at most: never per prompt or token."""

    def record(self, metric: Metric, value: float, **tags: str) -> None:
        """A gauge's value, what a counter has grown by, or an observation for a histogram.

        `tags`: those of `metric.values`, all of them. The process's own (`run`, `replica`) are known.
        """


class _NoMetrics:
    def record(self, metric: Metric, value: float, **tags: str) -> None:
        """Nobody asked."""


NO_METRICS: Final[Metrics] = _NoMetrics()


class Growth:
    """Counters of which totals are known: records what each has grown by. Not thread-safe.

    Record a total while it is still zero, too: what Prometheus sees first, it does not take for an increase.
    """

    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics
        self._known: dict[tuple[str, ...], float] = {}

    def record_total(self, metric: Metric, total: float, **tags: str) -> None:
        key = (metric.name, *tags.values())
        before = self._known.get(key)
        if before is None or total > before:
            self._metrics.record(metric, total - (before or 0.0), **tags)
            self._known[key] = total
