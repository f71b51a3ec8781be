"""Processes die in the middle of a run; every prompt still counts exactly once."""

import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from hsray.errors import ExitCode
from hsray.verify import verify_run
from tests.runs import Run, ended, kill, make_run, random_rows, wait_until

PROMPTS = 60
SLOW = ["engine.args.seconds_per_token=0.02"]


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Run]:
    made = make_run(tmp_path, random_rows(PROMPTS), overrides=list(SLOW))
    made.env["HSRAY_TEST_RUN"] = str(tmp_path)
    with ended(made) as it:
        yield it


def assert_complete(run: Run) -> None:
    committed, dead, rejected = run.outcomes()
    assert committed == set(range(PROMPTS))
    assert not dead
    assert rejected == 0
    assert run.check_states() == PROMPTS
    assert verify_run(run.url, full=True).problems == []
    run.assert_nothing_left()


def test_a_killed_replica_is_replaced_and_its_prompts_go_back(run: Run) -> None:
    driver = run.start()
    run.wait_for_resolutions(2)
    victims = run.processes("ReplicaActor")
    assert len(victims) == 2, run.log()

    kill(victims[0])

    assert driver.wait(240) == ExitCode.COMPLETE, run.log()
    assert run.log().count("starting replica") == 3
    assert_complete(run)


def test_a_killed_driver_leaves_no_process_and_the_same_command_resumes(run: Run) -> None:
    driver = run.start()
    run.wait_for_resolutions(3)

    kill(driver.pid)
    driver.wait()

    wait_until(lambda: not run.processes("ray::"), 30, lambda: "replicas outlived the driver")
    assert run.finish(name="second") == ExitCode.COMPLETE, run.log("second")
    assert "Resuming run" in run.log("second")
    assert_complete(run)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT], ids=["SIGTERM", "SIGINT"])
def test_a_signal_commits_what_is_complete_and_exits_75(run: Run, number: signal.Signals) -> None:
    driver = run.start()
    run.wait_for_resolutions(2)
    before = sum(1 for _ in run.store().list("leases/"))

    driver.send_signal(number)

    assert driver.wait(60) == ExitCode.INTERRUPTED, run.log()
    assert "The same command resumes" in run.log()
    assert sum(1 for _ in run.store().list("leases/")) >= before
    assert run.store().get_json("last_exit.json")["exit_code"] == 75
    run.assert_nothing_left()

    assert run.finish(name="second") == ExitCode.COMPLETE, run.log("second")
    assert_complete(run)


def test_two_drivers_at_once_do_the_run_once(run: Run) -> None:
    first, second = run.start(name="first"), run.start(name="second")

    codes = [first.wait(240), second.wait(240)]

    assert codes == [ExitCode.COMPLETE, ExitCode.COMPLETE], run.log("first") + run.log("second")
    assert_complete(run)
