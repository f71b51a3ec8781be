"""The driver tells its recorder what happens, and dates its records."""

import queue
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from hsray.cluster import Totals
from hsray.config import BudgetConfig, make_config
from hsray.driver import Driver, open_scheduler
from hsray.errors import ExitCode
from hsray.events import LeaseDone, PlaceFound, ReplicaReady
from hsray.ledger import Ledger
from hsray.plan import load_plan
from hsray.records import Lease, LeaseFigures, LeaseOutcome, PromptFailure
from hsray.status.document import ReplicaRow, read_documents
from hsray.status.recorder import StatusRecorder
from hsray.status.survey import Survey
from tests.small_run import build_small_run
from tests.unit.test_driver import FakeCluster


class RefusingCluster(FakeCluster):
    """One replica that fails every prompt for good."""

    def __init__(self, events: "queue.SimpleQueue[Any]") -> None:
        super().__init__()
        self.events = events

    def start_lease(self, replica: str, lease: Lease, attempt: str, plan: Any) -> None:
        failures = tuple(PromptFailure(row, f"prompt-{row}", "prompt_permanent", "no") for row in lease.rows)
        figures = LeaseFigures(seconds=2.5, spool_peak=77)
        self.events.put(LeaseDone(replica, LeaseOutcome(lease.lease_id, attempt, (), failures, figures)))

    def totals(self) -> Totals:
        return Totals(tokens=500, spool_bytes=1, spool_capacity=4)

    def rows(self) -> list[ReplicaRow]:
        return [ReplicaRow(replica="n1/0#1", state="ready", tokens=500)]


def test_a_driver_leaves_its_story_and_dates_its_records(tmp_path: Path) -> None:
    run = build_small_run(str(tmp_path / "run"), finish=False)
    run.store.delete(["leases/000001.json"])
    ledger = Ledger(run.store, run.record["run_id"])
    plan = load_plan(run.store, run.record["plan"])
    budgets = BudgetConfig(max_dead_fraction=1.0)
    scheduler = open_scheduler(ledger, plan, budgets)
    assert scheduler is not None
    config = make_config({"model": {"path": "m"}, "prompts": {"path": "p"}, "output": {"url": run.url}})
    job: Any = SimpleNamespace(config=config, store=run.store, ledger=ledger, plan=plan)
    events: queue.SimpleQueue[Any] = queue.SimpleQueue()
    cluster: Any = RefusingCluster(events)
    recorder = StatusRecorder(run.store, run.record["run_id"], interval_seconds=3600)
    recorder.start()
    recorder.watch(cluster.rows)
    events.put(PlaceFound("n1/0"))
    events.put(ReplicaReady("n1/0#1"))
    before = time.time()

    finished = Driver(job, scheduler, cluster, events, recorder).drive()

    assert finished.reason == "complete"
    recorder.finishing()
    recorder.close(ExitCode.COMPLETE, "complete")
    (document,) = read_documents(run.store, run.record["run_id"])
    assert document.exit is not None
    assert document.num_incidents == {"prompt_dead": 3}
    assert (document.counters.prompts_dead, document.counters.tokens) == (4, 500)
    assert document.points()[-1].spool_max == 0.25
    figures = run.resolution("000001")["figures"]
    assert before - 1 <= figures["ended"] <= time.time() + 1
    assert (figures["seconds"], figures["spool_peak"]) == (2.5, 77)
    assert Survey(run.store).look(time.time()).outcomes.dead == 4
