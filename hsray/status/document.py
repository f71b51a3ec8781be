"""`status/<start>-<id>.json`: what one driver says of itself, about twice a minute and when it ends.

For people only. Nothing that hsray does is decided by these objects; without them, `hsray.status` knows all but the
present. Each driver writes its own, so two drivers do not overwrite each other's.
"""

import logging
import re
from collections.abc import Iterable, Sequence
from datetime import UTC, datetime
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from hsray.history import Point, points_from_json
from hsray.schema import STATUS_PREFIX
from hsray.store import Store, encode_json

log = logging.getLogger(__name__)

# More drivers than that in one run: the first ones are of no interest any more.
MAX_DOCUMENTS = 100
MAX_REPLICAS = 2000
# A driver that keeps silent for longer is taken for dead: four of its intervals.
SILENT_AFTER_INTERVALS = 4
_KEY = re.compile(re.escape(STATUS_PREFIX) + r"\d{8}T\d{6}-[0-9a-f]+\.json")

Phase = Literal["starting", "running", "finishing", "ended"]
ReplicaState = Literal["starting", "ready", "draining"]


class _Part(BaseModel):
    model_config = ConfigDict(frozen=True, extra="ignore", allow_inf_nan=False, use_attribute_docstrings=True)


class ReplicaRow(_Part):
    """One living replica, as it last answered; counters since it started."""

    replica: str
    node: str = ""
    state: ReplicaState
    prompts: int = 0
    tokens: int = 0
    nbytes: int = 0
    in_flight: int = 0
    spool_bytes: int = 0
    spool_capacity: int = 0
    tokens_per_second: float = 0.0
    """Since the document before this one."""
    heard_seconds_ago: float = 0.0


class Incident(_Part):
    """Something that went wrong or was stopped. `kind` is one of `recorder.KINDS`."""

    time: float
    kind: str
    subject: str
    message: str


class Exit(_Part):
    """How the driver ended: as `last_exit.json`."""

    exit_code: int
    name: str
    detail: str


class Counters(_Part):
    """The scheduler's `events.Progress` and the sums over replicas, at `updated`."""

    prompts_total: int = 0
    prompts_committed: int = 0
    prompts_dead: int = 0
    leases_open: int = 0
    leases_running: int = 0
    leases_resolved: int = 0
    leases_lost: int = 0
    retries: int = 0
    speculations: int = 0
    replica_deaths: int = 0
    replicas_starting: int = 0
    replicas_ready: int = 0
    places_abandoned: int = 0
    prompts: int = 0
    tokens: int = 0
    nbytes: int = 0
    in_flight: int = 0
    spool_bytes: int = 0
    spool_capacity: int = 0


class DriverStatus(_Part):
    """One document. Times are Unix seconds by the driver's clock."""

    run_id: str
    host: str
    pid: int
    command: str = ""
    directory: str = ""
    started: float
    updated: float
    turned: float
    """When its loop last turned; `updated` is kept fresh by a thread."""
    interval_seconds: float
    phase: Phase
    exit: Exit | None = None
    counters: Counters = Counters()
    tokens_per_second: float = 0.0
    bytes_per_second: float = 0.0
    prompts_per_second: float = 0.0
    replicas: tuple[ReplicaRow, ...] = ()
    num_replicas: int = 0
    """Before `replicas` was cut to `MAX_REPLICAS`."""
    history: dict[str, list[float]] = Field(default_factory=dict)
    incidents: tuple[Incident, ...] = ()
    """The first and the last ones."""
    num_incidents: dict[str, int] = Field(default_factory=dict)
    """All of them, by kind."""

    def points(self) -> list[Point]:
        """The history; empty where it is damaged, which is said."""
        try:
            return points_from_json(self.history) if self.history else []
        except (KeyError, TypeError, ValueError) as err:
            log.warning("the history that driver %s (pid %d) left cannot be understood: %r", self.host, self.pid, err)
            return []

    def is_silent(self, now: float) -> bool:
        """Whether a driver that has not ended has not been heard of for long."""
        return self.exit is None and now - self.updated > SILENT_AFTER_INTERVALS * max(1.0, self.interval_seconds)


def document_key(started: float, identity: str) -> str:
    """Keys sort by the start of their drivers. `identity` is hexadecimal."""
    return f"{STATUS_PREFIX}{datetime.fromtimestamp(started, UTC):%Y%m%dT%H%M%S}-{identity}.json"


def put_document(store: Store, key: str, document: DriverStatus) -> None:
    """Write or replace it. Raises StoreError."""
    store.put(key, encode_json(document.model_dump(mode="json")))


def read_documents(store: Store, run_id: str, keys: Iterable[str] | None = None) -> list[DriverStatus]:
    """The documents of this run's latest drivers, oldest first. What cannot be read is left out and said.

    Args:
        keys: which; default: those in the store.
    """
    if keys is None:
        keys = (info.key for info in store.list(STATUS_PREFIX))
    latest: Sequence[str] = sorted(key for key in keys if _KEY.fullmatch(key))[-MAX_DOCUMENTS:]
    found = []
    for key in latest:
        document = _read(store, key)
        if document is not None and document.run_id == run_id:
            found.append(document)
    return sorted(found, key=lambda document: document.started)


def _read(store: Store, key: str) -> DriverStatus | None:
    try:
        return DriverStatus.model_validate_json(store.get(key))
    except FileNotFoundError:
        return None  # removed since it was listed
    except ValidationError as err:
        log.warning("%s cannot be understood and is left out: %s", store.locate(key), str(err).splitlines()[0])
        return None
