"""What `hsray.status` and the report say of real runs over Ray: running, stopped, killed, complete."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from hsray.errors import ExitCode
from hsray.gc import find_garbage
from hsray.reader import open_run
from hsray.status.survey import RunStatus, Survey
from hsray.testing import fake_states
from hsray.verify import verify_run
from tests.runs import HIDDEN, ROOT, SITES, Run, ended, make_run, random_rows, wait_until

NAN = 1
PROMPTS = 60


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Run]:
    rows = random_rows(PROMPTS)
    rows[1] = {"id": "<b>p1</b>", "input_ids": [200, NAN, 300]}
    made = make_run(
        tmp_path,
        rows,
        overrides=[f"engine.args.nan_token={NAN}", "engine.args.seconds_per_token=0.1", "budgets.max_dead_fraction=1"],
    )
    made.env["HSRAY_TEST_RUN"] = str(tmp_path)
    with ended(made) as it:
        yield it


def look(run: Run) -> RunStatus:
    return Survey(run.store()).look(time.time())


def test_status_follows_a_run_through_a_stop_and_a_kill(run: Run) -> None:
    driver = run.start()
    run.wait_for_resolutions(2)
    running = look(run)
    assert running.state == "running"
    assert running.driver is not None
    assert running.driver.pid == driver.pid
    assert 0 < running.left < PROMPTS
    driver.terminate()
    assert driver.wait(240) == ExitCode.INTERRUPTED, run.log()

    stopped = look(run)
    assert (stopped.state, stopped.exit_code) == ("stopped", ExitCode.INTERRUPTED)
    assert stopped.driver is not None
    assert stopped.driver.exit is not None
    assert stopped.driver.exit.detail == "stopped: stop requested"
    assert str(run.config_path) in stopped.driver.command
    assert stopped.driver.counters.tokens > 0
    assert stopped.driver.num_incidents["stop"] >= 1

    driver = run.start()
    run.wait_for_resolutions(stopped.outcomes.records + 2)
    os.kill(driver.pid, signal.SIGKILL)
    driver.wait()
    wait_until(lambda: len(look(run).drivers) == 2, 60, run.log)
    killed = look(run)
    assert killed.state == "running"  # as far as anybody can tell, for two minutes
    assert Survey(run.store()).look(killed.now + 200).state == "silent"

    assert run.finish() == ExitCode.COMPLETE, run.log()
    assert_complete(run, look(run))


def assert_complete(run: Run, status: RunStatus) -> None:
    committed, dead, rejected = run.outcomes()
    assert (status.state, status.exit_code, status.left) == ("complete", ExitCode.COMPLETE, 0)
    counts = status.outcomes
    assert (counts.prompts, counts.dead, status.rejected) == (len(committed), len(dead), rejected)
    assert (counts.prompts, counts.dead) == (PROMPTS - 1, 1)
    assert sum(tally.prompts for tally in counts.replicas.values()) == PROMPTS - 1
    assert len(status.drivers) == 3

    # The norms that the capture measured are those of what is stored.
    for site in SITES:
        states = [fake_states(site, row.input_ids.tolist(), HIDDEN, "bfloat16") for row in open_run(run.url)]
        norms = np.linalg.norm(np.concatenate(states).astype(np.float32), axis=1)
        assert counts.sites[site].mean == pytest.approx(float(norms.mean()), rel=1e-3)

    page = run.store().get("report.html").decode()
    assert ">complete<" in page
    assert "&lt;b&gt;p1&lt;/b&gt;" in page
    assert page.count("(pid ") == 3  # drivers; one that was killed early left no history to plot
    assert "<b>p1</b>" not in page

    assert verify_run(run.url, full=True).problems == []
    garbage = find_garbage(run.store(), hours=-1)
    assert not [info.key for info in garbage.objects if info.key.startswith(("status/", "report"))]

    command = [sys.executable, "-m", "hsray.status", run.url]
    shown = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    assert shown.startswith("COMPLETE")
