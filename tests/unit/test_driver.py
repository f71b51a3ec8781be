"""The driver's loop never waits for the store: signals and everything else are heard while it is away."""

import math
import queue
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from hsray.cluster import RunFailed, Totals
from hsray.config import BudgetConfig, make_config
from hsray.driver import Driver, open_scheduler, stop_patience, tries_so_far
from hsray.errors import StoreUnusable
from hsray.events import PlaceFound, ReplicaFailedToStart, ReplicaReady, StopRequested
from hsray.ledger import Ledger
from hsray.plan import load_plan
from hsray.records import Lease, ResolutionSummary
from hsray.resolve import replicas_per_node
from hsray.status.recorder import StatusRecorder
from hsray.store import Store, open_store
from tests.small_run import build_small_run


class FakeCluster:
    """One replica that says what it is and does nothing."""

    def __init__(self) -> None:
        self.started: list[str] = []

    def spawn(self, place: str, replica: str) -> None: ...

    def retire(self, replica: str) -> None: ...

    def cancel_lease(self, *_: Any) -> None: ...

    def start_lease(self, replica: str, lease: Any, attempt: str, plan: Any) -> None:
        self.started.append(lease.lease_id)

    def totals(self) -> Totals:
        return Totals()

    def facts(self) -> list[Any]:
        return [
            SimpleNamespace(
                replica="n1/0#1",
                sglang_version="1",
                model_class="M",
                engine_dtype="bfloat16",
                engine={},
                node="n1",
                log_path="log",
                self_test_passed=("norm",),
                self_test_skipped=("layer 4",),
                gpus=(),
            )
        ]


class StalledStore(Store):
    """Creating waits until it is let go; then it is refused."""

    stalled: threading.Event
    go_on: threading.Event

    def attempt(self, operation: str, key: str, request: Any) -> Any:
        if operation == "create":
            self.stalled.set()
            assert self.go_on.wait(30)
            raise StoreUnusable("told to")
        return super().attempt(operation, key, request)


@pytest.fixture
def driver(tmp_path: Path) -> Driver:
    run = build_small_run(str(tmp_path / "run"), finish=False)
    run.store.delete(["leases/000001.json"])
    plain = open_store(run.url)
    store = StalledStore(plain.url, plain.backend)
    store.stalled, store.go_on = threading.Event(), threading.Event()
    ledger = Ledger(store, run.record["run_id"])
    plan = load_plan(store, run.record["plan"])
    scheduler = open_scheduler(ledger, plan, BudgetConfig())
    assert scheduler is not None
    config = make_config(
        {"model": {"path": "m"}, "prompts": {"path": "p"}, "output": {"url": run.url}, "log": {"interval_seconds": 60}}
    )
    job: Any = SimpleNamespace(config=config, store=store, ledger=ledger, plan=plan)
    cluster: Any = FakeCluster()
    return Driver(job, scheduler, cluster, queue.SimpleQueue(), StatusRecorder(plain, run.record["run_id"]))


def test_a_stop_is_heard_while_a_ready_replica_waits_for_the_store(driver: Driver) -> None:
    store: Any = driver.job.store
    driver.events.put(PlaceFound("n1/0"))
    driver.events.put(ReplicaReady("n1/0#1"))

    def stop() -> None:
        assert store.stalled.wait(30)
        driver.events.put(StopRequested())

    threading.Thread(target=stop).start()
    finished = driver.drive()

    assert finished.reason == "stopped"
    assert not store.go_on.is_set()
    store.go_on.set()


def test_a_stop_waits_for_leases_only_as_long_as_the_job_server_does(
    driver: Driver, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = open_store(driver.job.store.url)
    job: Any = driver.job
    job.store, job.ledger = store, Ledger(store, driver.job.ledger._run_id)
    monkeypatch.setenv("RAY_JOB_STOP_WAIT_TIME_S", "1")
    driver.events.put(PlaceFound("n1/0"))
    driver.events.put(ReplicaReady("n1/0#1"))
    cluster: Any = driver.cluster
    start_lease = cluster.start_lease

    def start_and_stop(*arguments: Any) -> None:
        start_lease(*arguments)
        driver.events.put(StopRequested())

    cluster.start_lease = start_and_stop  # it never says that the lease is done
    finished = driver.drive()

    assert (finished.reason, finished.detail) == ("stopped", "stop requested; what the engines still held is left")
    assert cluster.started
    # As it stands if the job server kills the driver before it can say more.
    assert store.get_json("last_exit.json")["exit_code"] == 75


@pytest.mark.parametrize(
    ("environment", "seconds"),
    [
        ({}, math.inf),
        ({"RAY_JOB_STOP_WAIT_TIME_S": "60"}, 35),
        ({"RAY_JOB_STOP_WAIT_TIME_S": "10"}, 5),
        ({"RAY_JOB_CONFIG_JSON_ENV_VAR": "{}"}, 1.5),
        ({"RAY_JOB_CONFIG_JSON_ENV_VAR": "{}", "RAY_JOB_STOP_WAIT_TIME_S": "600"}, 575),
    ],
)
def test_a_driver_leaves_before_the_job_server_kills_it(environment: dict[str, str], seconds: float) -> None:
    assert stop_patience(environment) == seconds


def test_the_run_remembers_what_the_self_test_could_not_check(driver: Driver) -> None:
    driver.job.store = open_store(driver.job.store.url)  # type: ignore[misc]

    driver._judge_engine(ReplicaReady("n1/0#1"))

    assert driver.job.store.get_json("engine.json")["self_test"] == {"passed": ["norm"], "skipped": ["layer 4"]}


def test_tries_follow_a_prompt_down_the_tree_but_not_into_a_new_generation() -> None:
    def record(lease_id: str, tries: dict[int, int]) -> ResolutionSummary:
        return ResolutionSummary("commit", lease_id, (), (), tries, (), 0, 0)

    found = {
        "000001": record("000001", {4: 1, 5: 2}),
        "000001.r": record("000001.r", {4: 2}),
        "000001.r.r": record("000001.r.r", {}),
        "000001.r.r.g1": record("000001.r.r.g1", {5: 1}),
    }

    def tries(lease_id: str) -> dict[int, int]:
        return tries_so_far([Lease(lease_id, (4, 5), (9, 9))], found)

    assert tries("000002") == {}
    assert tries("000001.r") == {4: 1, 5: 2}
    assert tries("000001.r.r") == {4: 2, 5: 2}
    assert tries("000001.r.r.g1") == {}
    assert tries("000001.r.r.g1.r") == {5: 1}


def test_a_store_that_refuses_a_ready_replica_ends_the_run(driver: Driver) -> None:
    store: Any = driver.job.store
    store.go_on.set()
    driver.events.put(PlaceFound("n1/0"))
    driver.events.put(ReplicaReady("n1/0#1"))

    with pytest.raises(StoreUnusable, match="told to"):
        driver.drive()
    assert driver.events.empty() or isinstance(driver.events.get(), RunFailed)
    cluster: Any = driver.cluster
    assert cluster.started == []


@pytest.mark.parametrize(
    ("replicas", "engine", "expected"),
    [
        ("auto", {}, 8),
        ("auto", {"tp_size": 8}, 1),
        ("auto", {"tp_size": 16}, 1),
        (1, {}, 1),  # whatever the node: it has the memory for itself
        (16, {"tp_size": 2}, 4),
        (3, {"device": "cpu"}, 3),
        ("auto", {"device": "cpu"}, 1),
    ],
)
def test_replicas_share_a_node_with_those_that_the_run_has(
    replicas: int | str, engine: dict[str, Any], expected: int
) -> None:
    config = make_config(
        {
            "model": {"path": "m"},
            "prompts": {"path": "p"},
            "output": {"url": "o"},
            "cluster": {"replicas": replicas},
            "engine": {"args": engine},
        }
    )

    assert replicas_per_node(config) == expected


def test_a_gpu_belongs_to_one_living_replica(driver: Driver) -> None:
    driver.job.store = open_store(driver.job.store.url)  # type: ignore[misc]
    (first,) = driver.cluster.facts()
    first.gpus = ("GPU-1", "GPU-2")
    second = SimpleNamespace(**{**vars(first), "replica": "n1/1#1", "gpus": ("GPU-2", "GPU-3")})
    both: list[Any] = [first, second]
    driver.cluster.facts = lambda: both  # type: ignore[method-assign]

    assert isinstance(driver._judge_engine(ReplicaReady("n1/0#1")), ReplicaReady)
    refused = driver._judge_engine(ReplicaReady("n1/1#1"))
    assert isinstance(refused, ReplicaFailedToStart)
    assert refused.permanent
    assert "GPU-2 of n1, as n1/0#1 does" in refused.reason

    both.remove(first)  # it died
    assert isinstance(driver._judge_engine(ReplicaReady("n1/1#1")), ReplicaReady)
