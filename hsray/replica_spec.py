"""What a replica is told at its start, and what it tells of itself. Plain data: the driver has no use for an engine."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from hsray.channel import CaptureStats
from hsray.checkpoint import ModelFacts
from hsray.config import SpoolConfig
from hsray.engine import EngineSpec
from hsray.metrics.table import ReplicaTime
from hsray.schema import bytes_per_token
from hsray.site_storage import Storage


@dataclass(frozen=True, slots=True)
class ReplicaSpec:
    """All a replica needs to know; picklable, the same for every replica of a run."""

    run_url: str
    storage_options: Mapping[str, Any]
    commit: Literal["conditional", "single-writer"]
    retry_seconds: float
    engine: EngineSpec
    facts: ModelFacts
    sites: tuple[str, ...]
    dtype: str
    spool: SpoolConfig
    shard_bytes: int
    shard_metadata: Mapping[str, str]
    largest_prompt_tokens: int
    start_timeout_seconds: float
    request_timeout_seconds: float
    log_dir: str
    log_level: str = "info"
    allow_untested: bool = False
    replicas_per_node: int = 1
    engine_class: str = "hsray.engine:SGLangEngine"
    storage: Storage = field(default_factory=dict)  # codec and tokens of the sites that are not stored plainly

    @property
    def prompt_bytes_per_token(self) -> int:
        return bytes_per_token(len(self.sites), self.facts.hidden_size, self.dtype)


@dataclass(frozen=True, slots=True)
class ReplicaFacts:
    """What a ready replica says of itself."""

    replica: str
    node: str
    pid: int
    log_path: str
    arena_bytes: int
    model_class: str
    sglang_version: str
    engine_dtype: str
    engine: Mapping[str, str]
    self_test_passed: tuple[str, ...]
    self_test_skipped: tuple[str, ...]
    gpus: tuple[str, ...] = ()  # UUIDs


@dataclass(frozen=True, slots=True)
class ReplicaProgress:
    """Counters since the replica started, and what it holds now.

    `write_seconds` and `write_cpu_seconds` are of the lease threads while they write shards; `capture` holds the
    latest word of each data-parallel rank's capture. `spool_budget` is the fill of the arena, in bytes, above which
    nothing is admitted; `seconds` since it is ready by what it was doing (`hsray.metrics.table.ReplicaTime`);
    `storage_retries` repeated requests by operation.
    """

    prompts: int
    tokens: int
    stored_bytes: int
    in_flight: int
    spool_bytes: int
    spool_capacity: int
    spool_budget: int
    rewritten_rows: int
    write_seconds: float
    write_cpu_seconds: float
    capture: tuple[CaptureStats, ...]
    seconds: Mapping[ReplicaTime, float]
    storage_retries: Mapping[str, int]
