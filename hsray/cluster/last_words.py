"""The end of a replica's log, wherever it is: what SGLang said before it died belongs to the reason of the death."""

import logging
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from hsray.cluster.nodes import alive_nodes
from hsray.log_files import find_log, tail

log = logging.getLogger(__name__)

# Reading is a task on the replica's node: a second or two, and a node that is ill must not hold up the event.
_TIMEOUT_SECONDS = 20.0
_READERS = 8
MARK = "--- the end of "


class LogReader:
    """Fetches ends of logs beside the polling thread.

    Args:
        directory: folder of logs, the same path on every node.
    """

    def __init__(self, directory: str) -> None:
        self._directory = directory
        self._pool = ThreadPoolExecutor(_READERS, thread_name_prefix="hsray-log-reader")

    def submit(self, work: Callable[[], None]) -> None:
        self._pool.submit(work)

    def with_log(self, reason: str, replica: str, node_id: str | None) -> str:
        """`reason` and the last lines of the replica's log, or where that is if it cannot be read from here."""
        where, text = self._read(replica, node_id)
        return f"{reason}\n{MARK}{where} ---\n{text}" if text else f"{reason}\nlog: {where}"

    def close(self) -> None:
        self._pool.shutdown(wait=False, cancel_futures=True)

    def _read(self, replica: str, node_id: str | None) -> tuple[str, str]:
        """(path and host, text); the text is empty if the node is gone or does not answer."""
        import ray

        here = ray.get_runtime_context().get_node_id()
        if node_id in (None, here):
            path, text = read_end(self._directory, replica)
            return path, text
        node = next((n for n in alive_nodes() if n["NodeID"] == node_id), None)
        if node is None:
            return f"{self._directory} on node {str(node_id)[:8]}, which is gone", ""
        host = node["NodeManagerHostname"]
        try:
            path, text = ray.get(_read_on(str(node_id), self._directory, replica), timeout=_TIMEOUT_SECONDS)
        except Exception as err:  # noqa: BLE001 - whatever Ray says: the death itself must be reported
            log.debug("cannot read the log of %s on %s: %s", replica, host, err)
            return f"{self._directory} on {host}", ""
        return f"{path} on {host}", text


def read_end(directory: str, replica: str) -> tuple[str, str]:
    """(path, last lines) of the latest log of a replica on this machine."""
    path = find_log(directory, replica)
    return (str(path), tail(path)) if path is not None else (directory, "")


def node_of_actor(actor: Any) -> str | None:
    """The node that Ray started an actor on, also of a dead one; nothing in Ray's public API tells of those without
    its dashboard."""
    from ray._private import state

    try:
        found = state.actors(actor._actor_id.hex()).get("Address", {}).get("NodeID")
    except Exception as err:  # noqa: BLE001 - whatever Ray says: the death itself must be reported
        log.debug("cannot ask Ray where an actor was: %s", err)
        return None
    return str(found) if found else None


def _read_on(node_id: str, directory: str, replica: str) -> Any:
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    pinned = ray.remote(read_end).options(
        num_cpus=0, max_retries=0, scheduling_strategy=NodeAffinitySchedulingStrategy(node_id, soft=False)
    )
    return pinned.remote(directory, replica)
