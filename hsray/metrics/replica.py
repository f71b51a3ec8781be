"""What a replica reports of itself, from its own counters."""

from typing import get_args

from hsray.metrics.recorder import Growth, Metrics
from hsray.metrics.table import (
    CAPTURE_SECONDS,
    IN_FLIGHT,
    REPLICA_SECONDS,
    SPOOL_BUDGET,
    SPOOL_BYTES,
    STORAGE_RETRIES,
    STORED_BYTES,
    TOKENS,
    StoreOperation,
)
from hsray.replica_spec import ReplicaProgress


class ReplicaReport:
    """Records a replica's progress whenever it is asked for, every few seconds (`hsray_upload_seconds` apart)."""

    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics
        self._growth = Growth(metrics)

    def record(self, progress: ReplicaProgress) -> None:
        self._metrics.record(IN_FLIGHT, progress.in_flight)
        self._metrics.record(SPOOL_BYTES, progress.spool_bytes)
        self._metrics.record(SPOOL_BUDGET, progress.spool_budget)
        self._growth.record_total(TOKENS, progress.tokens)
        self._growth.record_total(STORED_BYTES, progress.stored_bytes)
        for state, seconds in progress.seconds.items():
            self._growth.record_total(REPLICA_SECONDS, seconds, state=state)
        ranks = progress.capture
        in_capture = sum(rank.enqueue_seconds for rank in ranks) / max(1, len(ranks))
        self._growth.record_total(CAPTURE_SECONDS, in_capture)
        for operation in get_args(StoreOperation):
            count = progress.storage_retries.get(operation, 0)
            self._growth.record_total(STORAGE_RETRIES, count, operation=operation)
