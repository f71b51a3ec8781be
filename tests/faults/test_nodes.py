"""Fake nodes of eight GPUs that die, freeze, are taken away and join, under one run."""

import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from hsray.errors import ExitCode
from hsray.verify import verify_run
from tests.ray_cluster import FakeNodes, run_ray_cluster
from tests.runs import Run, command_line, ended, kill, make_run, parents, random_rows, wait_until

PROMPTS = 300
pytestmark = [pytest.mark.soak, pytest.mark.timeout(900)]


@pytest.fixture
def cluster() -> Iterator[FakeNodes]:
    with run_ray_cluster(3) as running:
        yield running


@pytest.fixture
def run(tmp_path: Path, cluster: FakeNodes) -> Iterator[Run]:
    made = make_run(
        tmp_path,
        random_rows(PROMPTS),
        overrides=[
            f"cluster.address={cluster.address}",
            "cluster.replicas=auto",
            "engine.args={tp_size: 8, seconds_per_token: 0.1}",
        ],
    )
    with ended(made) as it:
        yield it


def replicas() -> list[int]:
    """Pids of the replicas of the test's cluster: Ray's nodes are this process's children."""
    return [pid for pid in parents() if "ReplicaActor" in command_line(pid)]


def assert_complete(run: Run) -> None:
    committed, dead, rejected = run.outcomes()
    assert (committed, dead, rejected) == (set(range(PROMPTS)), {}, 0)
    assert run.check_states() == PROMPTS
    report = verify_run(run.url, full=True)
    assert report.problems == []


def resolved(run: Run) -> int:
    return sum(1 for _ in run.store().list("leases/"))


def test_nodes_that_die_freeze_go_and_join_lose_and_repeat_nothing(run: Run, cluster: FakeNodes) -> None:
    driver = run.start()
    run.wait_for_resolutions(2)
    dies, freezes, goes = cluster.nodes

    victims = replicas()
    assert len(victims) == 3, run.log()
    kill(victims[0])
    began = time.monotonic()
    wait_until(lambda: run.log().count("is ready on") >= 4, 120, run.log)
    print(f"killed replica replaced after {time.monotonic() - began:.1f} s")

    cluster.freeze(freezes)
    thaw = threading.Timer(20, cluster.thaw, [freezes])
    thaw.start()
    began = time.monotonic()
    cluster.kill_raylet(dies)
    joined = cluster.add()
    wait_until(lambda: f"replica {joined.node_id}/0#1 is ready" in run.log(), 120, run.log)
    print(f"a new node does the work of a lost one after {time.monotonic() - began:.1f} s")
    thaw.join()

    cluster.drain(goes, seconds=60)
    wait_until(lambda: f"retiring replica {goes.node_id}/0#" in run.log(), 60, run.log)
    assert ": drained" in run.log()

    assert driver.wait(500) == ExitCode.COMPLETE, run.log()
    assert_complete(run)


def test_a_driver_that_is_killed_is_submitted_again_while_another_works(run: Run) -> None:
    first, other = run.start(name="first"), run.start(name="other")
    wait_until(lambda: resolved(run) >= 3, 240, lambda: run.log("first") + run.log("other"))

    kill(first.pid)
    first.wait()
    again = run.start(name="again")

    codes = [other.wait(500), again.wait(500)]
    assert codes == [ExitCode.COMPLETE, ExitCode.COMPLETE], run.log("other") + run.log("again")
    assert_complete(run)
