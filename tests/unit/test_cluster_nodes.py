"""Which nodes suit a replica, and that the installed Ray tells what we ask it."""

from typing import Any

import pytest
from ray._private.state import GlobalState

from hsray.cluster.nodes import place_name, slots_of
from hsray.config import ClusterConfig


def node(**changes: Any) -> dict[str, Any]:
    return {"Resources": {"GPU": 8.0, "hsray_node": 1.0}, "Labels": {"pool": "bw"}, **changes}


@pytest.mark.parametrize(
    ("config", "gpus", "slots"),
    [
        ({}, 8, 1),
        ({}, 2, 4),
        ({}, 3, 2),
        ({}, 16, 0),
        ({"resources": {"hsray_node": 1}}, 8, 1),
        ({"resources": {"hsray_node": 2}}, 8, 0),
        ({"label_selector": {"pool": "bw"}}, 8, 1),
        ({"label_selector": {"pool": "h200"}}, 8, 0),
        ({"label_selector": {"pool": "!h200"}}, 8, 1),  # Ray's own affair
    ],
)
def test_a_node_has_as_many_places_as_replicas_fit(config: dict[str, Any], gpus: int, slots: int) -> None:
    assert slots_of(node(), ClusterConfig(**config), gpus) == slots


def test_a_place_is_called_by_host_and_node() -> None:
    first = node(NodeManagerHostname="gpu-07", NodeID="5f2a90c1" + "0" * 48)
    again = node(NodeManagerHostname="gpu-07", NodeID="7777aaaa" + "0" * 48)

    assert place_name(first, 3) == "gpu-07-5f2a90c1/3"
    assert place_name(first, 3) != place_name(again, 3)


def test_this_ray_tells_which_nodes_are_going_away() -> None:
    """A private call: without it spot notices would be overheard in silence."""
    assert callable(GlobalState.get_draining_nodes)
