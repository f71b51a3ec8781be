"""One function, run once on every node of a Ray cluster: what a driver can ask before it has replicas."""

import logging
import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from hsray.cluster.errors import cause_of
from hsray.cluster.nodes import alive_nodes, slots_of
from hsray.config import ClusterConfig
from hsray.errors import ConfigError, HsrayError

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class NodeAnswer(Generic[T]):
    """What one node said.

    Attributes:
        node_id: Ray's.
        address: of the node.
        gpus: that Ray gives away there.
        slots: replicas that fit there, were it empty.
        answer: of the function; None if there is none, and `error` says why.
    """

    node_id: str
    address: str
    gpus: int
    slots: int
    answer: T | None
    error: str


def ask_every_node(
    config: ClusterConfig, gpus_per_replica: int, function: Callable[[], T], timeout_seconds: float
) -> list[NodeAnswer[T]]:
    """Run `function` on each living node, on all at once; nodes that are busy answer too, since it reserves nothing.

    Args:
        gpus_per_replica: 0 on CPU.
        function: picklable, of a module that the nodes have.
        timeout_seconds: for all of them together.

    Raises:
        ConfigError: no cluster is named, or it cannot be reached.
    """
    import ray

    address = config.address or os.environ.get("RAY_ADDRESS")
    if address in (None, "", "local"):
        raise ConfigError("cluster.address: no cluster is named there or in RAY_ADDRESS, so there are no nodes to ask")
    _connect(address)
    try:
        nodes = sorted(alive_nodes(), key=lambda node: str(node["NodeManagerAddress"]))
        calls = {node["NodeID"]: _call(node["NodeID"], function) for node in nodes}
        ray.wait(list(calls.values()), num_returns=len(calls), timeout=timeout_seconds)
        return [_answer(node, calls[node["NodeID"]], config, gpus_per_replica, timeout_seconds) for node in nodes]
    finally:
        ray.shutdown()


def run_on_node(config: ClusterConfig, node_id: str, gpus: int, function: Callable[[], T], timeout_seconds: float) -> T:
    """Run `function` on one node with so many GPUs reserved for it.

    Raises:
        ConfigError: the cluster cannot be reached, or the node had no room for it in time.
        HsrayError: what the function raised.
    """
    import ray

    _connect(config.address or os.environ.get("RAY_ADDRESS"))
    try:
        call = _call(node_id, function, gpus)
        try:
            answer: T = ray.get(call, timeout=timeout_seconds)
        except ray.exceptions.GetTimeoutError as err:
            raise ConfigError(
                f"node {node_id[:8]} did not answer within {timeout_seconds:.0f} s: are its GPUs given to others?"
            ) from err
        except ray.exceptions.RayError as err:
            cause = cause_of(err)
            raise (cause if isinstance(cause, HsrayError) else HsrayError(_brief(cause))) from err
        return answer
    finally:
        ray.shutdown()


def _connect(address: str | None) -> None:
    # As RayCluster.start: said, not guessed by Ray's version.
    os.environ.setdefault("RAY_AUTH_MODE", "disabled")
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    import ray

    try:
        ray.init(address=address, log_to_driver=False, logging_level=logging.WARNING)
    except (ConnectionError, RuntimeError, ValueError) as err:
        raise ConfigError(f"cluster.address: cannot connect to Ray at {address}: {err}") from err


def _call(node_id: str, function: Callable[[], Any], gpus: int = 0) -> Any:
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    pinned = ray.remote(_run).options(
        num_cpus=0,
        num_gpus=gpus,
        max_retries=0,
        scheduling_strategy=NodeAffinitySchedulingStrategy(node_id, soft=False),
    )
    return pinned.remote(function)


def _run(function: Callable[[], Any]) -> Any:
    return function()


def _answer(
    node: dict[str, Any], call: Any, config: ClusterConfig, gpus_per_replica: int, timeout_seconds: float
) -> NodeAnswer[Any]:
    import ray

    answer, error = None, ""
    try:
        answer = ray.get(call, timeout=0)
    except ray.exceptions.GetTimeoutError:
        error = f"no answer within {timeout_seconds:.0f} s"
    except ray.exceptions.RayError as err:
        cause = cause_of(err)
        error = _brief(cause)
    gpus = int(node["Resources"].get("GPU", 0))
    slots = slots_of(node, config, gpus_per_replica) if gpus_per_replica else 1
    return NodeAnswer(node["NodeID"], str(node["NodeManagerAddress"]), gpus, slots, answer, error)


def _brief(cause: BaseException) -> str:
    """Ray's messages end with what it is about, after a traceback."""
    last = (str(cause).strip().splitlines() or [""])[-1].strip()
    return f"{type(cause).__name__}: {last}"
