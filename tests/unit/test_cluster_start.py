"""A local Ray on a machine that is too busy to start it in Ray's 30 seconds."""

from typing import Any

import pytest
import ray

from hsray.cluster import RayCluster
from hsray.config import ClusterConfig
from hsray.errors import HsrayError

TIMED_OUT = "The current node timed out during startup. This could happen because some of the raylet failed to startup"


class Starts:
    """Stands for `ray.init`; fails so many times."""

    def __init__(self, failures: int) -> None:
        self.failures, self.calls, self.shutdowns = failures, 0, 0

    def init(self, **_: Any) -> None:
        self.calls += 1
        if self.calls <= self.failures:
            raise Exception(TIMED_OUT)

    def shutdown(self) -> None:
        self.shutdowns += 1


@pytest.fixture
def cluster(monkeypatch: pytest.MonkeyPatch) -> RayCluster:
    class Spec:
        log_dir = "/nowhere"

    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    spec: Any = Spec()
    return RayCluster(ClusterConfig(replicas=1), spec, 0, lambda _: None)


def test_a_local_ray_that_does_not_start_is_tried_once_more(
    cluster: RayCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    starts = Starts(failures=1)
    monkeypatch.setattr(ray, "init", starts.init)
    monkeypatch.setattr(ray, "shutdown", starts.shutdown)

    cluster._start_local()

    assert (starts.calls, starts.shutdowns) == (2, 1)


def test_the_second_failure_is_said(cluster: RayCluster, monkeypatch: pytest.MonkeyPatch) -> None:
    starts = Starts(failures=2)
    monkeypatch.setattr(ray, "init", starts.init)
    monkeypatch.setattr(ray, "shutdown", starts.shutdown)

    with pytest.raises(HsrayError, match="Ray does not start on this machine: The current node timed out"):
        cluster.start()

    assert starts.calls == 2
