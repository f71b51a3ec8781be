"""A Ray cluster of this machine alone, with nodes that come and go, for drivers that join it."""

import contextlib
import os
import signal
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

os.environ.setdefault("RAY_AUTH_MODE", "disabled")
os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")

# A lost node is noticed in some four seconds instead of fifteen.
_QUICK_HEALTH_CHECKS = {
    "health_check_initial_delay_ms": 1000,
    "health_check_period_ms": 1000,
    "health_check_timeout_ms": 1000,
    "health_check_failure_threshold": 3,
}


@dataclass
class FakeNodes:
    """The cluster: a head without GPUs, and nodes of eight that nobody uses."""

    cluster: Any
    nodes: list[Any] = field(default_factory=list)

    @property
    def address(self) -> str:
        return str(self.cluster.address)

    def add(self, *, gpus: int = 8, cpus: int = 4) -> Any:
        node = self.cluster.add_node(num_cpus=cpus, num_gpus=gpus, object_store_memory=80_000_000)
        self.nodes.append(node)
        return node

    def raylet(self, node: Any) -> Any:
        return node.all_processes["raylet"][0].process

    def kill_raylet(self, node: Any) -> None:
        """As when the machine loses power. The raylet is our child: unless it is waited for, its workers believe that
        it lives."""
        self.raylet(node).kill()
        self.raylet(node).wait()

    def freeze(self, node: Any) -> None:
        """As when the network is cut: the raylet says nothing more, its workers work on."""
        os.kill(self.raylet(node).pid, signal.SIGSTOP)

    def thaw(self, node: Any) -> None:
        os.kill(self.raylet(node).pid, signal.SIGCONT)

    def drain(self, node: Any, seconds: float) -> None:
        """Announce that the node is taken away, as a cloud's spot notice does."""
        import time

        from ray._raylet import GcsClient
        from ray.core.generated import autoscaler_pb2

        accepted, why = GcsClient(address=self.address).drain_node(
            node.node_id,
            autoscaler_pb2.DrainNodeReason.Value("DRAIN_NODE_REASON_PREEMPTION"),
            "test",
            int((time.time() + seconds) * 1000),
        )
        assert accepted, why


@contextlib.contextmanager
def run_ray_cluster(num_nodes: int = 0) -> Iterator[FakeNodes]:
    """A head, and `num_nodes` nodes of eight fake GPUs."""
    from ray.cluster_utils import Cluster

    cluster = Cluster(
        initialize_head=True,
        head_node_args={
            "num_cpus": 8,
            "num_gpus": 0,
            "object_store_memory": 80_000_000,
            "include_dashboard": False,
            "_system_config": _QUICK_HEALTH_CHECKS,
        },
    )
    nodes = FakeNodes(cluster)
    try:
        for _ in range(num_nodes):
            nodes.add()
        yield nodes
    finally:
        for node in nodes.nodes:
            with contextlib.suppress(ProcessLookupError, KeyError, IndexError):
                nodes.thaw(node)
        cluster.shutdown()
