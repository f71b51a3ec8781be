"""Where what is said: a run whose engine dies, seen from the driver's output, its file, and the replicas' files."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from hsray.errors import ExitCode
from tests.runs import Run, ended, make_run, random_rows

CRASH = 1


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Run]:
    rows = random_rows(8)
    rows[4]["input_ids"][0] = CRASH
    made = make_run(
        tmp_path,
        rows,
        overrides=[
            f"engine.args.crash_token={CRASH}",
            "engine.args.last_words=CUDA error, an illegal memory access was encountered",
            "budgets.lease_crashes=1",
            "budgets.max_dead_fraction=0.5",
            "output.max_lease_prompts=1",
            "cluster.replicas=1",
            "log.format=json",
        ],
    )
    made.env["HSRAY_TEST_RUN"] = str(tmp_path)
    with ended(made) as it:
        yield it


def events(text: str) -> list[dict[str, Any]]:
    """The lines that are JSON objects: standard output is for people."""
    return [json.loads(line) for line in text.splitlines() if line.startswith("{")]


def test_an_engines_last_words_are_in_the_drivers_error_and_in_the_dead_record(run: Run) -> None:
    assert run.finish() == ExitCode.COMPLETE, run.log()

    said = events(run.log())
    failures = [event for event in said if event["message"].startswith("replica ") and "failed: " in event["message"]]
    assert failures
    for event in failures:
        reason, *tail = event["message"].splitlines()
        assert "its worker process has died" in reason
        assert tail[0].startswith(f"--- the end of {run.folder}/logs/{event['replica'].replace('#', '_')}.log")
        assert tail[-1] == "CUDA error, an illegal memory access was encountered"
        assert event["level"] == "error"
    _, dead, _ = run.outcomes()
    assert "an illegal memory access" in dead[4].message
    [death] = [event for event in said if event.get("row") == 4]
    assert death["prompt_id"] == "p4"
    assert "\n" not in death["message"]

    # The driver's file has the same events and those that were not for the screen, under the run's id.
    [file] = (run.folder / "logs").glob("driver-*.jsonl")
    kept = events(file.read_text())
    run_id = run.store().get_json("hsray.json")["run_id"]
    assert {event["run"] for event in kept} == {run_id}
    assert [e["message"] for e in kept if e["level"] == "error"] == [
        e["message"] for e in said if e["level"] == "error"
    ]
    assert [e for e in kept if e["logger"] == "hsray.progress"][-1]["replicas_ready"] >= 0
    assert kept[-1]["message"].startswith("exit 0 (complete)")

    # One file for each incarnation; what it says of its work stays there.
    files = sorted(path.name for path in (run.folder / "logs").glob("*.log"))
    assert {"r0_1.log", "r0_2.log"} <= set(files)
    assert len(files) == sum(event["message"].startswith("starting replica") for event in said)
    assert any("mean norm" in path.read_text() for path in (run.folder / "logs").glob("*.log"))
    assert "mean norm" not in "".join(event["message"].partition("\n")[0] for event in said)
    assert "Unhandled error" not in run.log()
    assert "Traceback" not in run.log()
