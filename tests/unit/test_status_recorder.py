"""What a driver leaves in `status/`, and that leaving it never costs the driver anything."""

import random
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from hsray import events as s
from hsray.cluster import Totals
from hsray.config import redact_overrides
from hsray.errors import ExitCode
from hsray.extract import _command
from hsray.records import DeadPrompt, Resolution
from hsray.status.document import MAX_REPLICAS, DriverStatus, ReplicaRow, document_key, read_documents
from hsray.status.recorder import KINDS, StatusRecorder
from hsray.store import Store, open_store
from hsray.testing import FlakyStore

PROGRESS = s.Progress(
    leases_open=7,
    leases_running=4,
    leases_resolving=0,
    leases_resolved=5,
    leases_lost=0,
    prompts_total=100,
    prompts_committed=40,
    prompts_dead=1,
    retries=3,
    speculations=0,
    replica_deaths=1,
    replicas_starting=0,
    replicas_ready=2,
    places_abandoned=0,
)


class Clock:
    def __init__(self, now: float = 1_800_000_000.0) -> None:
        self.now = now

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return open_store(str(tmp_path / "run"))


def only(store: Store) -> DriverStatus:
    (document,) = read_documents(store, "r")
    return document


def test_the_first_document_is_there_at_once_and_the_last_says_how_it_ended(store: Store) -> None:
    clock = Clock()
    recorder = StatusRecorder(store, "r", command="python -m hsray.extract x.yaml", directory="/here", clock=clock)
    recorder.start()
    wait_for(lambda: recorder.key in {info.key for info in store.list("status/")})
    assert (only(store).phase, only(store).exit) == ("starting", None)

    recorder.watch(lambda: [ReplicaRow(replica="r0#1", node="n", state="ready", tokens=500)])
    for second in range(20):
        clock.now += 1
        recorder.turn(PROGRESS, Totals(second, 100 * second, 1000 * second, 9, 40 + second, 100))
    recorder.finishing()
    finishing = only(store)
    recorder.close(ExitCode.INTERRUPTED, "stopped: stop requested")

    assert finishing.phase == "finishing"
    ended = only(store)
    assert ended.exit is not None
    assert (ended.exit.exit_code, ended.exit.name) == (75, "interrupted")
    assert (ended.command, ended.directory) == ("python -m hsray.extract x.yaml", "/here")
    assert (ended.counters.tokens, ended.counters.leases_open, ended.counters.retries) == (1900, 7, 3)
    assert max(p.spool_max for p in ended.points()) == pytest.approx(0.59)
    assert not ended.is_silent(clock.now + 1e6)
    assert not recorder._thread.is_alive()


def test_rates_and_replicas_are_those_of_the_moment(store: Store) -> None:
    clock = Clock()
    recorder = StatusRecorder(store, "r", clock=clock)
    rows = [ReplicaRow(replica="r0#1", state="ready", tokens=1000)]
    recorder.watch(lambda: rows)
    recorder.turn(PROGRESS, Totals())
    recorder._put()
    clock.now += 30
    recorder.turn(PROGRESS, Totals(prompts=60, tokens=30_000, stored_bytes=300_000))
    rows[0] = rows[0].model_copy(update={"tokens": 7000})
    recorder._put()

    document = only(store)
    assert document.phase == "running"
    assert document.tokens_per_second == pytest.approx(1000)
    assert document.prompts_per_second == pytest.approx(2)
    assert document.replicas[0].tokens_per_second == pytest.approx(200)
    assert document.is_silent(clock.now + 121)
    assert not document.is_silent(clock.now + 119)


def test_a_thousand_failures_and_replicas_stay_small(store: Store) -> None:
    clock = Clock()
    recorder = StatusRecorder(store, "r", clock=clock)
    recorder.watch(lambda: [ReplicaRow(replica=f"{'ab' * 28}/{i}#1", node="n", state="ready") for i in range(5000)])
    for i in range(5000):
        clock.now += 1
        recorder.turn(PROGRESS, Totals(i, i, i, i, i, 5000))
        recorder.hear(s.ReplicaDied(f"r0#{i}", f"death {i} " + "x" * 10_000, blame=True))
    recorder._put()

    document = only(store)
    assert document.num_incidents == {"replica_died": 5000}
    assert document.incidents[0].message.startswith("death 0 ")
    assert document.incidents[-1].message.startswith("death 4999 ")
    assert (len(document.replicas), document.num_replicas) == (MAX_REPLICAS, 5000)
    assert store.head(recorder.key).nbytes < 1_500_000


def test_what_went_wrong_is_noted_and_everything_else_is_not(store: Store) -> None:
    recorder = StatusRecorder(store, "r", clock=Clock())
    dead = DeadPrompt(4, "p4", "crash", "it kills", 3)
    for what in (
        s.ReplicaDied("r0#1", "OOM", blame=True),
        s.ReplicaFailedToStart("r1#1", "no port", permanent=False),
        s.RetireReplica("r0#2", "silent"),
        s.AbandonPlace("r0", "four deaths"),
        s.Draining("r1#2"),
        s.LeaseFailed("r1#2", "000003", "a", "storage", "503"),
        s.Resolved(Resolution("split", "000004", "a", "r"), ours=True),
        s.Resolved(Resolution("dead", "000004.a", "a", "r", dead=(dead,)), ours=True),
        s.StopRequested(),
        s.Finished("stopped", "stop requested"),
        # Not worth a word:
        s.Tick(),
        s.ReplicaReady("r0#3"),
        s.LeaseFailed("r1#2", "000005", "a", "cancelled", ""),
        s.Resolved(Resolution("dead", "000006", "a", "r", dead=(dead,)), ours=False),
        s.Finished("complete", ""),
        s.SpawnReplica("r0", "r0#4"),
    ):
        recorder.hear(what)
    recorder._put()

    document = only(store)
    assert document.num_incidents == {**dict.fromkeys(KINDS, 1), "stop": 2}
    assert {i.message for i in document.incidents if i.kind == "prompt_dead"} == {"crash: it kills"}


def test_a_store_that_refuses_is_said_once_and_holds_nobody_up(store: Store, caplog: pytest.LogCaptureFixture) -> None:
    flaky = FlakyStore(store, random.Random(0), refused=1.0)
    recorder = StatusRecorder(flaky, "r", interval_seconds=0.01)
    with caplog.at_level("WARNING", logger="hsray.status.recorder"):
        recorder.start()
        wait_for(lambda: flaky.injected["refused"] >= 3)
        recorder.close(ExitCode.COMPLETE, "complete")

    assert len([r for r in caplog.records if "is not stored" in r.message]) == 1
    assert not recorder._thread.is_alive()
    flaky.calm()
    assert read_documents(store, "r") == []


def test_a_store_that_hangs_delays_the_end_only_so_long(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    go_on = threading.Event()

    class Hanging(Store):
        def put(self, key: str, data: Any) -> None:
            go_on.wait(60)

    monkeypatch.setattr("hsray.status.recorder._LAST_PUT_SECONDS", 0.2)
    recorder = StatusRecorder(Hanging(store.url, store.backend), "r")
    recorder.start()

    recorder.close(ExitCode.COMPLETE, "complete")

    assert recorder._thread.is_alive()
    assert recorder._thread.daemon
    go_on.set()


def test_a_mistake_in_a_row_costs_a_document_not_the_run(store: Store) -> None:
    recorder = StatusRecorder(store, "r", clock=Clock())
    recorder.watch(lambda: 1 / 0)  # type: ignore[arg-type, return-value]
    recorder._put()
    assert read_documents(store, "r") == []

    recorder.watch(tuple)
    recorder._put()
    assert len(read_documents(store, "r")) == 1


def test_a_driver_whose_prefix_was_taken_leaves_no_last_word(store: Store) -> None:
    recorder = StatusRecorder(store, "r", interval_seconds=3600)
    recorder.start()
    wait_for(lambda: recorder.key in {info.key for info in store.list("status/")})
    store.delete([recorder.key])

    recorder.abandon()
    recorder._thread.join(30)

    assert [*store.list("status/")] == []


def test_documents_of_other_runs_and_other_files_are_left_out(store: Store, caplog: pytest.LogCaptureFixture) -> None:
    for i, run_id in enumerate(("r", "other", "r")):
        recorder = StatusRecorder(store, run_id, clock=Clock(1_800_000_000.0 + i))
        recorder._put()
    store.put(document_key(1_800_000_009.0, "ab"), b"{broken")
    store.put(document_key(1_800_000_010.0, "cd"), b'{"run_id": "r"}')
    store.put("status/notes.txt", b"mine")

    found = read_documents(store, "r")

    assert [d.started for d in found] == [1_800_000_000.0, 1_800_000_002.0]


def test_counters_are_the_scheduler_s_and_the_replicas_(store: Store) -> None:
    recorder = StatusRecorder(store, "r", clock=Clock())
    recorder.turn(replace(PROGRESS, speculations=11), Totals(stored_bytes=5))
    recorder._put()

    counters = only(store).counters
    assert (counters.speculations, counters.prompts_committed, counters.nbytes) == (11, 40, 5)


def wait_for(is_so: "Any") -> None:
    deadline = time.monotonic() + 60
    while not is_so():
        assert time.monotonic() < deadline
        time.sleep(0.01)


@pytest.mark.parametrize(
    ("argument", "shown"),
    [
        ("cluster.replicas=2", "cluster.replicas=2"),
        ("run.yaml", "run.yaml"),
        ("prompts.max_tokens=9", "prompts.max_tokens=9"),
        ("output.storage_options.secret_access_key=hush", 'output.storage_options.secret_access_key="***"'),
        (
            "output.storage_options={endpoint: x, secret_access_key: hush}",
            'output.storage_options={"endpoint": "x", "secret_access_key": "***"}',
        ),
    ],
)
def test_the_command_to_resume_holds_no_secret(argument: str, shown: str) -> None:
    assert redact_overrides([argument]) == [shown]


def test_the_command_is_one_that_can_be_typed() -> None:
    command = _command(["/x/site-packages/hsray/extract.py", "my run.yaml", "engine.env.HF_TOKEN=hush"])

    assert command == "python -m hsray.extract 'my run.yaml' 'engine.env.HF_TOKEN=\"***\"'"
    assert _command(["/x/drive.py", "a"]) == "python /x/drive.py a"
