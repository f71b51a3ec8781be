"""Every metric: name, kind, meaning, tags. The dashboard, the alert rules and docs/metrics.md use these and no others.

Ray puts `ray_` in front of each name and adds labels of its own (`NodeAddress`, `WorkerId`, `SessionName`, ...). No tag
holds a prompt, a lease or a message: the number of series depends on replicas alone.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Final, Literal, get_args

Kind = Literal["counter", "gauge", "histogram"]

Outcome = Literal["committed", "dead", "rejected", "open"]
LeaseState = Literal["queued", "running", "resolving", "resolved"]
ReplicaState = Literal["starting", "ready"]
ReplicaLoss = Literal["died", "engine_failed", "failed_to_start", "node_lost", "drained", "place_given_up"]
ReplicaTime = Literal["prefill", "spool", "write", "idle"]
StoreOperation = Literal["put", "create", "get", "head", "list", "delete", "upload"]


@dataclass(frozen=True, slots=True)
class Metric:
    """One metric.

    Attributes:
        name: without Ray's prefix.
        meaning: its help text; says the unit.
        of: `run`: recorded by the driver, for the whole run. `replica`: recorded by each replica about itself, with
            its name as the tag `replica`. `process`: by both; the driver's tag `replica` is `driver`.
        values: further tags, and every value that each may have.
        boundaries: upper bounds of a histogram's buckets.
    """

    name: str
    kind: Kind
    meaning: str
    of: Literal["run", "replica", "process"]
    values: Mapping[str, tuple[str, ...]] = field(default_factory=lambda: MappingProxyType({}))
    boundaries: tuple[float, ...] = ()

    @property
    def tags(self) -> tuple[str, ...]:
        """Names of all tags, those that every series of the process has (`run`, `replica`) first."""
        return ("run", *(() if self.of == "run" else ("replica",)), *self.values)

    @property
    def exported_name(self) -> str:
        """The name in Prometheus, of a histogram without `_bucket`, `_sum` and `_count`."""
        return f"ray_{self.name}"

    @property
    def num_series(self) -> int:
        """Most series per process."""
        series = len(self.boundaries) + 3 if self.kind == "histogram" else 1
        for values in self.values.values():
            series *= len(values)
        return series


PROMPTS: Final = Metric(
    "hsray_prompts",
    "gauge",
    "Input rows of the run by outcome, earlier drivers included; open ones are planned and not decided yet. They add "
    "up to the input.",
    "run",
    {"outcome": get_args(Outcome)},
)
LEASES: Final = Metric(
    "hsray_leases",
    "gauge",
    "Leases of the run by state; resolved ones include those of earlier drivers.",
    "run",
    {"state": get_args(LeaseState)},
)
LEASE_RETRIES: Final = Metric(
    "hsray_lease_retries_total",
    "counter",
    "Leases that went back to the queue, and remainders that hold prompts to be tried again.",
    "run",
)
REPLICAS: Final = Metric(
    "hsray_replicas", "gauge", "Replicas that are up, by state.", "run", {"state": get_args(ReplicaState)}
)
REPLICA_LOSSES: Final = Metric(
    "hsray_replica_losses_total",
    "counter",
    "Replicas that ended before the run did, by reason. Each is replaced unless its place is gone or given up.",
    "run",
    {"reason": get_args(ReplicaLoss)},
)
PLACES_GIVEN_UP: Final = Metric(
    "hsray_places_given_up", "gauge", "Places where no replica will be started again by this driver.", "run"
)
ETA: Final = Metric(
    "hsray_eta_seconds",
    "gauge",
    "Seconds until the last prompt at the rate of the last minute. Absent while nothing is delivered.",
    "run",
)
LAST_PROGRESS: Final = Metric(
    "hsray_last_progress_timestamp_seconds",
    "gauge",
    "Unix time at which the driver last saw a lease resolved; before the first one, of its start.",
    "run",
)
TOKENS: Final = Metric(
    "hsray_tokens_total", "counter", "Tokens of prompts whose states are whole in the arena.", "replica"
)
STORED_BYTES: Final = Metric("hsray_stored_bytes_total", "counter", "Bytes of shards that the store has.", "replica")
UPLOAD_SECONDS: Final = Metric(
    "hsray_upload_seconds",
    "histogram",
    "Seconds from the first byte of a shard to the store's acknowledgement of the last, retries included.",
    "replica",
    boundaries=(0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 180, 600, 1800),
)
IN_FLIGHT: Final = Metric("hsray_in_flight_prompts", "gauge", "Prompts in the engine.", "replica")
SPOOL_BYTES: Final = Metric(
    "hsray_spool_bytes",
    "gauge",
    "Bytes of the arena in use: of prompts in the engine and of states that the store does not have yet.",
    "replica",
)
SPOOL_BUDGET: Final = Metric(
    "hsray_spool_budget_bytes",
    "gauge",
    "Bytes of the arena above which no prompt enters the engine (spool.high_watermark).",
    "replica",
)
REPLICA_SECONDS: Final = Metric(
    "hsray_replica_seconds_total",
    "counter",
    "Seconds of a ready replica by what it was doing. prefill: the engine has prompts. spool: it has none because "
    "those that wait have no room in the arena. write: leases only wait for their shards. idle: no lease.",
    "replica",
    {"state": get_args(ReplicaTime)},
)
CAPTURE_SECONDS: Final = Metric(
    "hsray_capture_seconds_total",
    "counter",
    "Seconds that SGLang's scheduler thread spent in the capture (mean over data-parallel ranks). On a GPU, kernels "
    "run on meanwhile: it is the most that capturing can have cost.",
    "replica",
)
STORAGE_RETRIES: Final = Metric(
    "hsray_storage_retries_total",
    "counter",
    "Requests to the store that failed for the moment, in each of the client's own three quick tries, and were "
    "repeated, by operation. Parts of a large upload are repeated by the client alone: see hsray_upload_seconds.",
    "process",
    {"operation": get_args(StoreOperation)},
)

ALL: Final = (
    PROMPTS,
    LEASES,
    LEASE_RETRIES,
    REPLICAS,
    REPLICA_LOSSES,
    PLACES_GIVEN_UP,
    ETA,
    LAST_PROGRESS,
    TOKENS,
    STORED_BYTES,
    UPLOAD_SECONDS,
    IN_FLIGHT,
    SPOOL_BYTES,
    SPOOL_BUDGET,
    REPLICA_SECONDS,
    CAPTURE_SECONDS,
    STORAGE_RETRIES,
)
