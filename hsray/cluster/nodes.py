"""The nodes of the Ray cluster: which live, which are being drained, which suit a replica."""

from typing import Any

from hsray.config import ClusterConfig


def alive_nodes() -> list[dict[str, Any]]:
    import ray

    return [node for node in ray.nodes() if node["Alive"]]


def draining_nodes() -> list[str]:
    """Ids of nodes that are announced to go away. Nothing in Ray's public API tells."""
    from ray._private.state import state

    return list(state.get_draining_nodes())


def place_name(node: dict[str, Any], slot: int) -> str:
    """What a place on this node is called, in logs, records and file names: `gpu-07-5f2a90c1/0`. The host alone would
    not do: nodes on one machine share it, and one that comes back is another node."""
    return f"{node['NodeManagerHostname']}-{node['NodeID'][:8]}/{slot}"


def slots_of(node: dict[str, Any], config: ClusterConfig, gpus_per_replica: int) -> int:
    """How many replicas the node has room for, were it empty; 0 if it lacks a label or a resource that they need
    (Ray's `in(...)` and `!x` are left to Ray)."""
    labels, resources = node.get("Labels", {}), node["Resources"]
    plain = {k: v for k, v in config.label_selector.items() if not v.startswith(("!", "in("))}
    if any(labels.get(key) != value for key, value in plain.items()):
        return 0
    if any(resources.get(key, 0) < amount for key, amount in config.resources.items()):
        return 0
    return int(resources.get("GPU", 0)) // gpus_per_replica
