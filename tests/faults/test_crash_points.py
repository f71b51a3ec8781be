"""kill -9 at every named point; the same command goes on, and the run is what it would have been."""

import hashlib
import re
import shutil
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from hsray.crash_points import CRASH_AT, CRASH_MARK, DRIVER_POINTS, REPLICA_POINTS
from hsray.errors import ExitCode
from hsray.reader import open_run
from hsray.verify import verify_run
from tests.ray_cluster import FakeNodes, run_ray_cluster
from tests.runs import ROOT, SITES, Run, ended, make_run, random_rows

PROMPTS = 20


@pytest.fixture(scope="module")
def cluster() -> Iterator[FakeNodes]:
    with run_ray_cluster() as running:
        yield running


def new_run(folder: Path, cluster: FakeNodes) -> Run:
    return make_run(folder, random_rows(PROMPTS), overrides=[f"cluster.address={cluster.address}"])


def contents(run: Run) -> dict[str, Any]:
    """Everything a reader sees: ids, tokens, and a digest of every state."""
    return {
        row.prompt_id: [row.input_ids.tolist(), *(hashlib.sha256(row[site].tobytes()).hexdigest() for site in SITES)]
        for row in open_run(run.url)
    }


@pytest.fixture(scope="module")
def uninterrupted(cluster: FakeNodes, planned: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    run = new_run(tmp_path_factory.mktemp("uninterrupted"), cluster)
    shutil.copytree(planned, run.url)
    with ended(run):
        assert run.finish() == ExitCode.COMPLETE, run.log()
        found = contents(run)
    assert len(found) == PROMPTS
    return found


@pytest.fixture(scope="module")
def planned(cluster: FakeNodes, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of which the record stands and nothing else is done. Planning imports transformers, which takes longer
    than everything after it."""
    run = new_run(tmp_path_factory.mktemp("planned"), cluster)
    run.env[CRASH_AT] = "after_run_record"
    with ended(run):
        assert run.finish() == -signal.SIGKILL, run.log()
    return Path(run.url)


def assert_as_if_nothing_happened(run: Run, uninterrupted: dict[str, Any]) -> None:
    committed, dead, rejected = run.outcomes()
    assert (committed, dead, rejected) == (set(range(PROMPTS)), {}, 0)
    assert contents(run) == uninterrupted
    assert verify_run(run.url, full=True).problems == []
    run.assert_nothing_left()


def test_a_driver_that_is_killed_at_every_point_goes_on_each_time(
    cluster: FakeNodes, uninterrupted: dict[str, Any], tmp_path: Path
) -> None:
    run = new_run(tmp_path, cluster)
    run.env |= {CRASH_AT: ",".join(DRIVER_POINTS), CRASH_MARK: str(tmp_path / "crashed")}
    with ended(run):
        codes = []
        while not codes or (codes[-1] == -signal.SIGKILL and len(codes) <= len(DRIVER_POINTS)):
            codes.append(run.finish())

        # Several points may be reached by the commit threads at the same moment: they fall to one kill.
        assert all((tmp_path / f"crashed.{point}").exists() for point in DRIVER_POINTS), run.log()
        assert codes[-1] == ExitCode.COMPLETE, run.log()
        assert len(codes) > len(DRIVER_POINTS) // 2
        assert_as_if_nothing_happened(run, uninterrupted)


def test_replicas_that_are_killed_at_every_point_cost_nothing(
    cluster: FakeNodes, uninterrupted: dict[str, Any], planned: Path, tmp_path: Path
) -> None:
    run = new_run(tmp_path, cluster)
    shutil.copytree(planned, run.url)
    run.env |= {CRASH_AT: ",".join(REPLICA_POINTS), CRASH_MARK: str(tmp_path / "crashed")}
    with ended(run):
        code = run.finish("budgets.lease_crashes=20", "budgets.replica_deaths=21", "budgets.lease_starts=20")

        assert all((tmp_path / f"crashed.{point}").exists() for point in REPLICA_POINTS), run.log()
        assert code == ExitCode.COMPLETE, run.log()
        assert_as_if_nothing_happened(run, uninterrupted)


@pytest.mark.soak
@pytest.mark.parametrize("point", [*DRIVER_POINTS, *REPLICA_POINTS])
def test_a_process_that_is_killed_there_costs_nothing(
    point: str, cluster: FakeNodes, uninterrupted: dict[str, Any], planned: Path, tmp_path: Path
) -> None:
    run = new_run(tmp_path, cluster)
    if point not in ("before_run_record", "after_run_record"):
        shutil.copytree(planned, run.url)
    run.env |= {CRASH_AT: point, CRASH_MARK: str(tmp_path / "crashed")}
    with ended(run):
        code = run.finish()
        assert (tmp_path / f"crashed.{point}").exists(), f"nothing got to {point}:\n{run.log()}"
        if point in DRIVER_POINTS:
            assert code == -signal.SIGKILL, run.log()
            code = run.finish(name="second")
            assert code == ExitCode.COMPLETE, run.log("second")
        assert code == ExitCode.COMPLETE, run.log()
        assert_as_if_nothing_happened(run, uninterrupted)


def test_every_point_is_in_the_code_and_every_call_is_listed() -> None:
    called = {
        name
        for path in (ROOT / "hsray").rglob("*.py")
        for name in re.findall(r'crash_point\("(\w+)"\)', path.read_text())
    }

    assert called == {*DRIVER_POINTS, *REPLICA_POINTS}
