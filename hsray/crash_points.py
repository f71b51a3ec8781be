"""Named places at which a test ends the process, as SIGKILL would: `HSRAY_CRASH_AT=after_shard_upload`.

Several names are separated by commas. With `HSRAY_CRASH_MARK=/path` each happens once: the first process to get there
leaves the file `/path.<name>` behind, and those that find it live on. Costs a look into the environment where it is not
asked for. Only the standard library.
"""

import os
import signal

CRASH_AT = "HSRAY_CRASH_AT"
CRASH_MARK = "HSRAY_CRASH_MARK"

DRIVER_POINTS = (
    "before_run_record",  # the plan is stored, nothing names it
    "after_run_record",
    "after_start_record",  # the start is counted, no replica has the lease
    "after_lease_call",
    "before_resolution",  # the shard is stored, the record is not
    "after_resolution",  # the record stands, the scheduler does not know
    "before_index",
    "before_success",
    "after_success",
)
REPLICA_POINTS = (
    "after_arena",  # before the engine starts
    "after_self_test",
    "after_lease_read",
    "before_shard_upload",
    "before_shard_completion",  # every byte is sent, nothing is visible
    "after_shard_upload",
    "before_lease_report",
    "before_captured",  # the states are in the arena, the replica does not know
    "after_captured",
)


def crash_point(name: str) -> None:
    """End this process here if the environment asks for it."""
    if name not in os.environ.get(CRASH_AT, "").split(","):
        return
    mark = os.environ.get(CRASH_MARK)
    if mark is not None:
        try:
            os.close(os.open(f"{mark}.{name}", os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600))
        except FileExistsError:
            return
    os.kill(os.getpid(), signal.SIGKILL)


def crash_environment() -> dict[str, str]:
    """What a child or actor needs in its environment to meet the same crash point; empty in a normal run."""
    return {name: os.environ[name] for name in (CRASH_AT, CRASH_MARK) if name in os.environ}
