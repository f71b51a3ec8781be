"""Metrics through Ray: each process hands them to the agent of its node, where Prometheus fetches them."""

import logging
import threading
from typing import Any

from hsray.metrics.table import Metric

log = logging.getLogger(__name__)

_lock = threading.Lock()
# Ray keeps metrics by name in each process, so they are made once whoever records.
_made: dict[str, Any] = {}
_warned: set[str] = set()


class RayMetrics:
    """Records with the same tags always, for instance `run` and `replica`. Use it once Ray is connected.

    A call takes some ten microseconds. Where the node's agent does not run, or Ray's metrics are switched off, nothing
    is recorded and nothing fails.
    """

    def __init__(self, **always: str) -> None:
        self._always = always

    def record(self, metric: Metric, value: float, **tags: str) -> None:
        known = {name: self._always[name] for name in metric.tags if name in self._always}
        try:
            _hand_over(metric, value, {**known, **tags})
        except Exception:
            # Whatever Ray has against it: nobody's run ends for a metric.
            if metric.name not in _warned:
                _warned.add(metric.name)
                log.warning("metric %s cannot be recorded", metric.name, exc_info=True)


def _hand_over(metric: Metric, value: float, tags: dict[str, str]) -> None:
    made = _ray_metric(metric)
    if metric.kind == "gauge":
        made.set(value, tags)
    elif metric.kind == "histogram":
        made.observe(value, tags)
    elif value > 0:
        made.inc(value, tags)
    else:
        # `inc` refuses the zero from which Prometheus has to see a counter grow.
        made._record(0.0, tags)


def _ray_metric(metric: Metric) -> Any:
    from ray.util import metrics

    with _lock:
        made = _made.get(metric.name)
        if made is None:
            if metric.kind == "gauge":
                made = metrics.Gauge(metric.name, metric.meaning, metric.tags)
            elif metric.kind == "histogram":
                made = metrics.Histogram(metric.name, metric.meaning, list(metric.boundaries), metric.tags)
            else:
                made = metrics.Counter(metric.name, metric.meaning, metric.tags)
            _made[metric.name] = made
    return made
