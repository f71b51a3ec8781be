"""How a run stands, from what lies in storage: before, during and after, and when nobody says anything any more."""

import io
import itertools
import json
import time
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from hsray import retry_dead
from hsray.errors import ConfigError, ExitCode, HsrayError
from hsray.ledger import Ledger
from hsray.records import DeadPrompt, LeaseFigures, Reopened, Resolution
from hsray.status import __main__ as status_command
from hsray.status.document import Counters, DriverStatus, Exit, Incident, ReplicaRow, document_key, put_document
from hsray.status.heads import HEAD_BYTES, read_heads
from hsray.status.show import MAX_REPLICAS_SHOWN, one_line, render
from hsray.status.survey import RunStatus, Survey
from hsray.store import Store, open_store
from tests.small_run import SmallRun, build_small_run

NOW = 1_800_000_000.0
_numbers = itertools.count()


@pytest.fixture
def run(tmp_path: Path) -> SmallRun:
    """10 rows: 2 rejected, 1 dead, the rest committed; not marked complete."""
    return build_small_run(str(tmp_path / "run"), finish=False)


def speak(store: Store, started: float, updated: float, **fields: Any) -> DriverStatus:
    """A driver's document."""
    document = DriverStatus(
        **{
            "run_id": "small",
            "host": "head",
            "pid": 7,
            "started": started,
            "updated": updated,
            "turned": updated,
            "interval_seconds": 30.0,
            "phase": "running",
            **fields,
        }
    )
    put_document(store, document_key(started, f"{next(_numbers):08x}"), document)
    return document


def look(store: Store, now: float = NOW) -> RunStatus:
    return Survey(open_store(store.url)).look(now)


def text_of(status: RunStatus, width: int = 160) -> str:
    console = Console(file=io.StringIO(), width=width, highlight=False)
    console.print(render(status))
    file: Any = console.file
    return str(file.getvalue())


# ------------------------------------------------------------------ the states of a run


def test_before_anything_is_committed_there_is_a_status(run: SmallRun) -> None:
    run.store.delete([info.key for info in run.store.list("leases/")])
    assert look(run.store).state == "unknown"
    speak(run.store, NOW - 60, NOW - 10, phase="starting", counters=Counters(replicas_starting=2))

    status = look(run.store)

    assert (status.state, status.left, status.exit_code) == ("running", 8, ExitCode.COMPLETE)
    text = text_of(status)
    assert "8 left" in text
    assert "2 starting" in text
    assert "starting, last heard 10s ago" in text
    assert "tok/s" not in text


def test_while_it_runs_there_are_rates_and_an_end(run: SmallRun) -> None:
    run.store.delete(["leases/000002.json"])
    row = ReplicaRow(
        replica="replica", node="n1", state="ready", tokens_per_second=99, spool_bytes=1, spool_capacity=4, in_flight=5
    )
    speak(
        run.store,
        NOW - 600,
        NOW - 20,
        tokens_per_second=180_000,
        bytes_per_second=2.1e9,
        prompts_per_second=0.5,
        replicas=(row,),
        counters=Counters(replicas_ready=1, spool_bytes=41, spool_capacity=100, in_flight=57, retries=3),
    )

    status = look(run.store)

    assert status.eta_seconds == pytest.approx(status.left / 0.5)
    text = text_of(status)
    for part in (
        "180,000 tok/s",
        "2.1 GB/s",
        "eta 4s",
        "41% of",
        "57 prompts in flight",
        "3 leases tried again",
        "n1",
        "25%",
    ):
        assert part in text
    assert "eta 4s" in one_line(status)
    assert "\n" not in one_line(status)


def test_a_driver_that_ended_says_how_and_how_to_go_on(run: SmallRun) -> None:
    run.store.delete(["leases/000002.json"])
    speak(
        run.store,
        NOW - 600,
        NOW - 300,
        phase="ended",
        exit=Exit(exit_code=75, name="interrupted", detail="stopped: stop requested"),
        command="python -m hsray.extract x.yaml",
        directory="/jobs",
    )

    status = look(run.store)

    assert (status.state, status.exit_code, status.eta_seconds) == ("stopped", ExitCode.INTERRUPTED, None)
    text = text_of(status)
    assert "ended 5m00s ago" in text
    assert "exit 75: stopped: stop requested" in text
    assert "python -m hsray.extract x.yaml" in text
    assert "head in /jobs" in text


def test_a_driver_that_vanished_is_not_called_running(run: SmallRun) -> None:
    run.store.delete(["leases/000002.json"])
    speak(run.store, NOW - 7200, NOW - 840, prompts_per_second=5.0, tokens_per_second=5.0)

    status = look(run.store)

    assert (status.state, status.exit_code, status.eta_seconds) == ("silent", ExitCode.INTERRUPTED, None)
    text = text_of(status)
    assert "SILENT" in text
    assert "last heard 14m00s ago and did not say that it ended; 2 prompts are left" in text
    assert "5 tok/s" not in text


def test_an_exit_that_only_last_exit_tells_of_counts(run: SmallRun) -> None:
    speak(run.store, NOW - 7200, NOW - 840)
    at = time.strftime("%Y-%m-%dT%H:%M:%S+00:00", time.gmtime(NOW - 800))
    Ledger(run.store).write_last_exit({"exit_code": 1, "name": "failed", "detail": "no capacity", "time": at})

    status = look(run.store)

    assert (status.state, status.exit_code) == ("stopped", ExitCode.FAILED)
    assert "exit 1: no capacity" in text_of(status)


def test_an_exit_of_an_earlier_driver_does_not_count(run: SmallRun) -> None:
    speak(run.store, NOW - 7200, NOW - 840)
    at = time.strftime("%Y-%m-%dT%H:%M:%S+00:00", time.gmtime(NOW - 9000))
    Ledger(run.store).write_last_exit({"exit_code": 75, "name": "interrupted", "detail": "", "time": at})

    assert look(run.store).state == "silent"


def test_a_run_of_an_hsray_without_documents_has_a_status(run: SmallRun) -> None:
    assert (look(run.store).state, look(run.store).exit_code) == ("unknown", ExitCode.INTERRUPTED)
    assert "No driver has left a status here" in text_of(look(run.store))
    Ledger(run.store).write_last_exit({"exit_code": 5, "name": "store", "detail": "403", "time": "2026-01-01T00:00:00"})

    status = look(run.store)

    assert (status.state, status.exit_code) == ("stopped", ExitCode.STORE)


def test_a_complete_run_is_complete_whoever_spoke_last(run: SmallRun) -> None:
    run.finish()
    speak(run.store, NOW - 60, NOW - 10)

    status = look(run.store)

    assert (status.state, status.left) == ("complete", 0)
    # One of eight is dead; `budgets.max_dead_fraction` allows one in 250.
    assert status.exit_code == ExitCode.INCOMPLETE
    assert "python -m hsray.verify" in text_of(status)


def test_two_drivers_are_told_from_one_that_took_over(run: SmallRun) -> None:
    speak(run.store, NOW - 600, NOW - 50)  # killed
    speak(run.store, NOW - 40, NOW - 10)
    assert look(run.store).num_living == 1

    speak(run.store, NOW - 30, NOW - 5)

    status = look(run.store)
    assert status.num_living == 2
    assert "2 drivers are at work" in text_of(status)


def test_a_loop_that_hangs_shows_although_the_process_lives(run: SmallRun) -> None:
    speak(run.store, NOW - 6000, NOW - 10, turned=NOW - 1000)

    assert "ITS LOOP HAS NOT TURNED FOR 16m30s" in text_of(look(run.store))


# ------------------------------------------------------------------ what is counted


def test_counts_are_those_of_the_ledger(run: SmallRun) -> None:
    run.finish()
    success = run.store.get_json("_SUCCESS")

    status = look(run.store)

    counts = status.outcomes
    assert (counts.prompts, counts.dead, status.rejected, status.left) == (
        success["committed"],
        success["dead"],
        success["rejected"],
        0,
    )
    assert (counts.tokens, counts.nbytes, counts.shards) == (
        success["tokens"],
        success["stored_bytes"],
        success["shards"],
    )
    assert counts.dead_reasons == {("prompt_permanent", "too odd"): 1}
    assert status.to_json()["reject_reasons"] == {"empty": 2}
    json.dumps(status.to_json())


def test_prompts_that_were_re_opened_are_left_again(run: SmallRun) -> None:
    run.finish()
    survey = Survey(open_store(run.url))
    assert survey.look(NOW).state == "complete"

    assert retry_dead.main([run.url]) == 0

    status = survey.look(NOW)
    assert (status.state != "complete", status.outcomes.dead, status.left) == (True, 0, 1)
    assert look(run.store).outcomes.dead == 0


def test_a_second_look_reads_only_what_is_new(run: SmallRun) -> None:
    class Counting(Store):
        read: list[str]

        def attempt(self, operation: str, key: str, request: Any) -> Any:
            if operation == "get":
                self.read.append(key)
            return super().attempt(operation, key, request)

    plain = open_store(run.url)
    last = plain.get("leases/000002.json")
    plain.delete(["leases/000002.json"])
    store = Counting(plain.url, plain.backend)
    store.read = []
    survey = Survey(store)
    first = survey.look(NOW)
    assert first.left == 2
    plain.put("leases/000002.json", last)
    store.read.clear()

    second = survey.look(NOW)

    assert second.left == 0
    assert [key for key in store.read if key.startswith("leases/")] == ["leases/000002.json"]


def test_only_the_first_bytes_of_a_record_are_read(tmp_path: Path) -> None:
    run = build_small_run(str(tmp_path / "run"), lengths=(3,) * 60, finish=False)
    infos = sorted(run.store.list("leases/"), key=lambda info: info.key)
    assert all(info.nbytes < HEAD_BYTES for info in infos)
    record = run.resolution("000005")
    record["shards"][0]["entries"] *= 30
    run.overwrite("leases/000005.json", {"figures": record.pop("figures"), **record})
    store = open_store(run.url)
    whole = {key: store.get_json(key) for key in ("leases/000005.json",)}
    assert len(json.dumps(whole)) > 3 * HEAD_BYTES
    canonical = json.dumps(whole["leases/000005.json"], sort_keys=True, separators=(",", ":")).encode()
    # What follows the first bytes is not even looked at.
    store.put("leases/000005.json", canonical[: 2 * HEAD_BYTES] + b"\xff" * HEAD_BYTES)

    (head,) = read_heads(store, [info for info in store.list("leases/") if "000005" in info.key], Reopened())

    assert (head.prompts, head.tokens, head.kind, head.replica) == (3, 9, "commit", "replica")


@pytest.mark.parametrize("old", [True, False])
def test_records_without_figures_and_long_ones_are_read_whole(run: SmallRun, old: bool) -> None:
    dead = tuple(DeadPrompt(i, f"p{i}", "crash", 'a "quoted", "shards":[] reason ' * 9, 3) for i in range(40))
    resolution = Resolution("dead", "000009", "a9", "replica", dead=dead, figures=LeaseFigures(ended=NOW))
    record = {**resolution.to_json(), "write_id": "w"}
    if old:
        del record["figures"]
    canonical = json.dumps(record, sort_keys=True, separators=(",", ":")).encode()
    assert len(canonical) > HEAD_BYTES
    run.store.put("leases/000009.json", canonical)
    (info,) = (info for info in run.store.list("leases/") if "000009" in info.key)

    (head,) = read_heads(run.store, [info], Reopened())

    assert len(head.dead) == 40
    assert head.figures.ended == (info.modified.timestamp() if old else NOW)


def test_figures_of_a_lease_come_back_from_its_record() -> None:
    figures = LeaseFigures(ended=NOW, seconds=12.5, spool_peak=77, mean_norms={"final_prenorm": 3.5})
    resolution = Resolution("commit", "000001", "a", "r", figures=figures)

    assert Resolution.from_json(resolution.to_json()) == resolution
    old = resolution.to_json()
    del old["figures"]
    assert Resolution.from_json(old).figures == LeaseFigures()


def test_a_record_that_is_none_is_named(run: SmallRun) -> None:
    run.store.put("leases/000001.json", b'{"kind": "commit"}')

    with pytest.raises(HsrayError, match=r"leases/000001\.json is not a resolution"):
        look(run.store)


def test_mean_norms_are_weighted_by_tokens(run: SmallRun) -> None:
    for lease_id, norm in (("000000", 2.0), ("000001", 4.0)):
        record = run.resolution(lease_id)
        record["figures"]["mean_norms"] = {"final_prenorm": norm}
        run.overwrite(f"leases/{lease_id}.json", record)
    tokens = [run.resolution(i)["figures"]["tokens"] for i in ("000000", "000001")]

    tally = look(run.store).outcomes.sites["final_prenorm"]

    assert tally.mean == pytest.approx((2 * tokens[0] + 4 * tokens[1]) / sum(tokens))
    assert (tally.lowest, tally.highest) == (2.0, 4.0)


# ------------------------------------------------------------------ the display and the command


def test_text_from_inputs_cannot_move_the_cursor(run: SmallRun) -> None:
    record = run.resolution("000002")
    record["dead"][0]["message"] = "\x1b[2J[bold red]boo\x07\r\u202e"
    run.overwrite("leases/000002.json", record)
    incident = Incident(time=NOW, kind="replica_died", subject="r\x1b[1A", message="\x1b]0;title\x07")
    speak(run.store, NOW - 60, NOW - 10, incidents=(incident,), command="\x1b[31mx")

    text = text_of(look(run.store))

    assert not {"\x1b", "\x07", "\r", "\u202e"} & set(text)
    assert "[bold red]boo" in text


def test_a_thousand_replicas_fit_on_a_screen(run: SmallRun) -> None:
    rows = tuple(ReplicaRow(replica=f"{i:056x}/0#1", node="n", state="ready") for i in range(1000))
    speak(run.store, NOW - 60, NOW - 10, replicas=rows, num_replicas=1000)

    status = look(run.store)

    assert len(status.to_json()["replicas"]) == 1001
    lines = text_of(status).splitlines()
    assert len(lines) < MAX_REPLICAS_SHOWN + 25
    assert any("961 more" in line for line in lines)
    assert max(map(len, lines)) <= 160


def test_the_command_prints_for_people_and_programs(
    run: SmallRun, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    run.finish()
    assert status_command.main([run.url]) == ExitCode.INCOMPLETE
    assert "COMPLETE" in capsys.readouterr().out

    assert status_command.main([run.url, "--json"]) == ExitCode.INCOMPLETE
    assert json.loads(capsys.readouterr().out)["committed"] == 7

    assert status_command.main([run.url, "--watch"]) == ExitCode.INCOMPLETE
    line = capsys.readouterr().out
    assert "complete" in line
    assert line.count("\n") == 1

    assert status_command.main([str(tmp_path / "nowhere")]) == ExitCode.CONFIG
    assert status_command.main(["gopher://x"]) == ExitCode.CONFIG


def test_watching_goes_on_until_the_run_ends(
    run: SmallRun, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    looks = []

    def sleep(seconds: float) -> None:
        looks.append(seconds)
        if len(looks) == 2:
            run.finish()

    monkeypatch.setattr(status_command.time, "sleep", sleep)

    assert status_command.main([run.url, "--watch", "--interval", "0.1"]) == ExitCode.INCOMPLETE
    assert looks == [0.5, 0.5]
    assert len(capsys.readouterr().out.splitlines()) == 3


def test_there_is_no_status_without_a_run(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"no hsray\.json"):
        look(open_store(str(tmp_path)))
