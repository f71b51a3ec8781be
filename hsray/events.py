"""The words between the scheduler and whoever drives it: events, actions, and one picture of progress.

Owns `Event` (what happened: the driver reports it), `Action` (what the driver must do), `FinishReason` and
`Progress`. Frozen values that hold only names, numbers and records, so they may go to any thread or process.
They decide nothing: which action follows which event is `scheduler.py`'s, how it is performed the driver's.
"""

from dataclasses import dataclass
from typing import Literal

from hsray.budget import Overrun
from hsray.records import Lease, LeaseOutcome, Resolution

FinishReason = Literal["complete", "stopped", "no_capacity"] | Overrun


# Events: what happened.


@dataclass(frozen=True, slots=True)
class PlaceFound:
    """A replica may run at `place` (a node and a slot on it) from now on. Known and abandoned places are ignored."""

    place: str


@dataclass(frozen=True, slots=True)
class PlaceGone:
    """Nothing can run at `place` any more. A replica there is lost without blame. For a planned end send
    `Draining` first."""

    place: str


@dataclass(frozen=True, slots=True)
class ReplicaReady:
    """The replica passed its self-test and takes leases."""

    replica: str


@dataclass(frozen=True, slots=True)
class ReplicaDied:
    """The replica is lost. `blame` is False for announced losses (drain, preemption): its leases go back as if
    never started."""

    replica: str
    reason: str
    blame: bool


@dataclass(frozen=True, slots=True)
class ReplicaFailedToStart:
    """The replica never became ready. `permanent`: trying again at this place cannot help (configuration,
    self-test)."""

    replica: str
    reason: str
    permanent: bool


@dataclass(frozen=True, slots=True)
class LeaseDone:
    """The attempt ended and this is what it delivered; its shards are uploaded."""

    replica: str
    outcome: LeaseOutcome


@dataclass(frozen=True, slots=True)
class LeaseFailed:
    """The attempt delivered nothing while its replica lives.

    `storage`: the shard could not be uploaded; no prompt is to blame. `replica`: the engine is broken; the
    replica is retired as if it had died. `cancelled`: nothing was complete when `CancelLease` came.
    """

    replica: str
    lease_id: str
    attempt: str
    kind: Literal["storage", "replica", "cancelled"]
    message: str


@dataclass(frozen=True, slots=True)
class Resolved:
    """The answer to a `Resolve`: the record that stands, and whether it is ours or another driver's."""

    resolution: Resolution
    ours: bool


@dataclass(frozen=True, slots=True)
class Draining:
    """The replica's node goes away: finish what runs, start nothing. Once idle the replica is retired, and unless
    `PlaceGone` comes within a minute another one is started at its place."""

    replica: str


@dataclass(frozen=True, slots=True)
class StopRequested:
    """Commit what is complete and end."""


@dataclass(frozen=True, slots=True)
class Tick:
    """Time passed. Needed about once a second: restarts after a pause and the grace period hang on it."""


Event = (
    PlaceFound
    | PlaceGone
    | ReplicaReady
    | ReplicaDied
    | ReplicaFailedToStart
    | LeaseDone
    | LeaseFailed
    | Resolved
    | Draining
    | StopRequested
    | Tick
)


# Actions: what the driver must do.


@dataclass(frozen=True, slots=True)
class SpawnReplica:
    """Start a replica. Answer: `ReplicaReady`, `ReplicaFailedToStart` or `ReplicaDied`."""

    place: str
    replica: str


@dataclass(frozen=True, slots=True)
class RetireReplica:
    """Kill the replica, if it still lives. It is forgotten here: no answer is needed and none is believed."""

    replica: str
    reason: str


@dataclass(frozen=True, slots=True)
class StartLease:
    """Record start `number`, then start the attempt. Answer: `LeaseDone`, `LeaseFailed` or `ReplicaDied`."""

    replica: str
    lease: Lease
    attempt: str
    number: int


@dataclass(frozen=True, slots=True)
class CancelLease:
    """End the attempt early. Answer as for `StartLease`.

    `keep`: upload what is complete and report it (the run stops); else drop it (another attempt's record
    stands).
    """

    replica: str
    lease_id: str
    attempt: str
    keep: bool


@dataclass(frozen=True, slots=True)
class Resolve:
    """Create the lease's record once. Answer: exactly one `Resolved`.

    A dead prompt that no replica reported on has no `prompt_id` here; whoever writes the record looks it up.
    """

    resolution: Resolution


@dataclass(frozen=True, slots=True)
class DiscardShards:
    """These objects are garbage: a standing record names another attempt. Deleting them is optional."""

    keys: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class AbandonPlace:
    """No replica will be started at this place again."""

    place: str
    reason: str


@dataclass(frozen=True, slots=True)
class Finished:
    """Nothing is outstanding, or nothing can proceed. Replicas may still be up; shut them down."""

    reason: FinishReason
    detail: str


Action = SpawnReplica | RetireReplica | StartLease | CancelLease | Resolve | DiscardShards | AbandonPlace | Finished


@dataclass(frozen=True, slots=True)
class Progress:
    """One consistent picture for the progress line and the metrics.

    `prompts_*` count the whole run, earlier drivers included; the other counters this driver. `leases_open`
    includes queued, running and resolving ones. `retries` counts leases that went back to the queue and
    remainders that hold prompts to be tried again; speculative copies are counted apart.
    """

    leases_open: int
    leases_running: int
    leases_resolving: int
    leases_resolved: int
    leases_lost: int
    prompts_total: int
    prompts_committed: int
    prompts_dead: int
    retries: int
    speculations: int
    replica_deaths: int
    replicas_starting: int
    replicas_ready: int
    places_abandoned: int
