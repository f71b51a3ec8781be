"""What a running extraction tells Prometheus: names, the seam they go through, the dashboard and the alerts.

`python -m hsray.metrics DIR` writes the Grafana dashboard, the alert rules and a Prometheus configuration
(docs/metrics.md). The core records through `Metrics`, whose default does nothing; the one that speaks to Ray is made
in `hsray.cluster`. Metrics are for watching: what is done stands in the run's records, and in nothing else.
"""

from hsray.metrics.recorder import NO_METRICS, Growth, Metrics
from hsray.metrics.table import ALL, Metric

__all__ = ["ALL", "NO_METRICS", "Growth", "Metric", "Metrics"]
