"""A cluster as `ray start` makes it: a run that is submitted, stopped and submitted again; logs on another node."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from hsray.cluster.last_words import LogReader
from hsray.cluster.nodes import alive_nodes
from hsray.errors import ExitCode
from hsray.verify import verify_run
from tests.job_cluster import JobCluster, run_job_cluster
from tests.runs import FAKE, ROOT, Run, make_run, random_rows, wait_until

PROMPTS = 300


@pytest.fixture(scope="module")
def cluster() -> Iterator[JobCluster]:
    with run_job_cluster() as head:
        yield head


def test_a_job_that_is_stopped_and_submitted_again_delivers_every_prompt_once(
    cluster: JobCluster, tmp_path: Path
) -> None:
    folder = tmp_path / "made"
    folder.mkdir()
    run = make_run(folder, random_rows(PROMPTS))
    # What `--print-submit` sends along: the configuration and nothing else.
    submitted = tmp_path / "submitted"
    submitted.mkdir()
    (submitted / "run.yaml").write_bytes(run.config_path.read_bytes())
    command = ["python", "-m", "tests.drive", FAKE, "run.yaml"]
    slowly = [*command, "engine.args.seconds_per_token=0.1"]  # most of a minute, if nobody stops it
    environment = {"RAY_JOB_STOP_WAIT_TIME_S": "60", "PYTHONPATH": str(ROOT)}

    cluster.submit("first", submitted, slowly, environment)
    wait_until(lambda: len(resolved(run)) >= 2 or cluster.has_ended("first"), 90, lambda: str(cluster.info("first")))
    cluster.stop("first")

    assert cluster.info("first")["status"] == "STOPPED"
    said = cluster.follow("first")
    assert "SIGTERM: committing what is complete" in said
    assert run.store().get_json("last_exit.json")["exit_code"] == ExitCode.INTERRUPTED
    done = resolved(run)
    assert 2 <= len(done) < PROMPTS // 5
    assert nothing_left(cluster, run)

    cluster.submit("second", submitted, command, environment)
    said = cluster.follow("second")

    assert "Resuming run" in said
    assert cluster.info("second")["status"] == "SUCCEEDED"
    assert cluster.info("second")["driver_exit_code"] == ExitCode.COMPLETE
    assert run.store().get_json("last_exit.json")["exit_code"] == ExitCode.COMPLETE
    assert done <= resolved(run)
    committed, dead, rejected = run.outcomes()
    assert (committed, dead, rejected) == (set(range(PROMPTS)), {}, 0)
    assert run.check_states() == PROMPTS
    assert verify_run(run.url, full=True).problems == []
    assert nothing_left(cluster, run)


def test_the_end_of_a_log_comes_from_its_node_and_a_lost_node_is_named(cluster: JobCluster, tmp_path: Path) -> None:
    import ray

    (tmp_path / "gpu-7_0_1.log").write_text("one\ntwo\n")
    reader = LogReader(str(tmp_path))
    ray.init(address=cluster.gcs_address, log_to_driver=False, logging_level="ERROR")
    try:
        head = {node["NodeID"] for node in ray.nodes()}
        with cluster.another_node():
            [node] = [node for node in ray.nodes() if node["NodeID"] not in head]
            told = reader.with_log("it died", "gpu-7/0#1", node["NodeID"])
            where = f"{tmp_path}/gpu-7_0_1.log on {node['NodeManagerHostname']}"
            assert told == f"it died\n--- the end of {where} ---\none\ntwo"

        wait_until(lambda: node["NodeID"] not in {n["NodeID"] for n in alive_nodes()}, 60, lambda: str(ray.nodes()))
        told = reader.with_log("it died", "gpu-7/0#1", node["NodeID"])
        assert told == f"it died\nlog: {tmp_path} on node {node['NodeID'][:8]}, which is gone"
        assert reader.with_log("it died", "never-started", None) == f"it died\nlog: {tmp_path}"
    finally:
        reader.close()
        ray.shutdown()


def resolved(run: Run) -> set[str]:
    return {str(key) for key in run.store().list("leases/")}


def nothing_left(cluster: JobCluster, run: Run) -> bool:
    """No replica, no driver, no arena: the head is as before the job."""

    def is_clean() -> bool:
        return not cluster.processes("ReplicaActor") and not cluster.processes("tests.drive")

    wait_until(is_clean, 30, lambda: str(cluster.processes("")))
    return not list(run.spool.glob("*"))
