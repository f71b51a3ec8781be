"""Names agree everywhere, and what is recorded is what happened."""

import json
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml

from hsray.channel import CaptureStats
from hsray.cluster import Totals, ray_metrics
from hsray.cluster.ray_metrics import RayMetrics
from hsray.config import BudgetConfig
from hsray.errors import ExitCode
from hsray.events import (
    Draining,
    Event,
    LeaseFailed,
    PlaceFound,
    PlaceGone,
    ReplicaDied,
    ReplicaFailedToStart,
    ReplicaReady,
    Resolved,
    SpawnReplica,
    Tick,
)
from hsray.metrics import ALL, NO_METRICS, Growth, Metric
from hsray.metrics import table as names
from hsray.metrics.__main__ import ALERTS, DASHBOARD, main, provision
from hsray.metrics.replica import ReplicaReport
from hsray.metrics.replica_time import ReplicaClock
from hsray.metrics.run import RunReport
from hsray.progress import Snapshot
from hsray.records import Lease, Resolution
from hsray.replica import Replica
from hsray.replica_spec import ReplicaProgress
from hsray.scheduler import Scheduler

ROOT = Path(__file__).parents[2]
# Ray's own labels that rules and panels may use.
RAY_LABELS = {"le", "NodeAddress", "SessionName"}


class Seen:
    """Metrics that remember: gauges by tags, sums of counters, observations, and how often each was recorded."""

    def __init__(self) -> None:
        self.values: dict[tuple[str, ...], float] = {}
        self.calls: Counter[str] = Counter()

    def record(self, metric: Metric, value: float, **tags: str) -> None:
        assert tags.keys() == metric.values.keys()
        for tag, chosen in tags.items():
            assert chosen in metric.values[tag]
        key = (metric.name, *tags.values())
        if metric.kind == "counter":
            assert value >= 0
            value += self.values.get(key, 0.0)
        self.values[key] = value
        self.calls[metric.name] += 1

    def __getitem__(self, key: tuple[Metric, str] | Metric) -> float:
        metric, *tags = key if isinstance(key, tuple) else (key,)
        return self.values[(metric.name, *tags)]


# ------------------------------------------------------------------- names


@pytest.fixture(scope="module")
def shipped(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[str]]:
    """Every PromQL expression by where it is, from the files as users get them."""
    folder = tmp_path_factory.mktemp("shipped")
    provision(folder)
    dashboard = json.loads((folder / DASHBOARD).read_text())
    panels = [panel for panel in dashboard["panels"] if panel["type"] != "row"]
    rules = [rule for group in yaml.safe_load((folder / ALERTS).read_text())["groups"] for rule in group["rules"]]
    return {
        "dashboard": [target["expr"] for panel in panels for target in panel["targets"]],
        "alerts": [rule["expr"] for rule in rules],
    }


def selectors(expression: str) -> Iterator[tuple[str, dict[str, str]]]:
    """(metric name, matchers) of every selector: `{state: ready|starting}`."""
    for name, body in re.findall(r"\b(ray_\w+)(?:\{([^}]*)\})?", expression):
        yield name, dict(re.findall(r'(\w+)\s*(?:=~|!~|!=|=)\s*"([^"]*)"', body))


def base_name(name: str) -> str:
    return re.sub(r"_(bucket|sum|count)$", "", name)


def test_dashboard_and_alerts_use_the_metrics_there_are_and_all_of_them(shipped: dict[str, list[str]]) -> None:
    used = {base_name(name) for exprs in shipped.values() for expr in exprs for name, _ in selectors(expr)}

    assert used == {metric.exported_name for metric in ALL}
    assert {metric.exported_name for metric in ALL} == {
        base_name(name) for expr in shipped["dashboard"] for name, _ in selectors(expr)
    }


def test_dashboard_and_alerts_ask_for_tags_and_values_that_exist(shipped: dict[str, list[str]]) -> None:
    by_name = {metric.exported_name: metric for metric in ALL}
    for expr in [*shipped["dashboard"], *shipped["alerts"]]:
        tags: set[str] = set()
        for name, matchers in selectors(expr):
            metric = by_name[base_name(name)]
            tags |= set(metric.tags)
            assert matchers.keys() <= set(metric.tags), expr
            for tag, pattern in matchers.items():
                if tag in metric.values:
                    assert set(pattern.split("|")) <= set(metric.values[tag]), expr
        grouped = {label.strip() for group in re.findall(r"(?:by|on) \(([^)]*)\)", expr) for label in group.split(",")}
        assert grouped <= tags | RAY_LABELS, expr


def test_only_counters_are_rated_and_every_run_can_be_chosen(shipped: dict[str, list[str]]) -> None:
    counters = {metric.exported_name for metric in ALL if metric.kind != "gauge"}
    for expr in [*shipped["dashboard"], *shipped["alerts"]]:
        for name in re.findall(r"(?:rate|increase)\((ray_\w+)", expr):
            assert base_name(name) in counters, expr
    for expr in shipped["dashboard"]:
        assert all(matchers.get("run") == "$run" for _, matchers in selectors(expr)), expr


def test_names_follow_prometheus() -> None:
    assert len({metric.name for metric in ALL}) == len(ALL)
    listed = {value.name for value in vars(names).values() if isinstance(value, Metric)}
    assert listed == {metric.name for metric in ALL}
    for metric in ALL:
        assert re.fullmatch(r"hsray_[a-z_]+", metric.name)
        assert metric.name.endswith("_total") == (metric.kind == "counter")
        assert bool(metric.boundaries) == (metric.kind == "histogram")


def test_series_depend_on_replicas_alone_and_are_few() -> None:
    tags = {tag for metric in ALL for tag in metric.tags}
    assert tags == {"run", "replica", "outcome", "state", "reason", "operation"}
    # A thousand replicas are 40,000 series at most; one Prometheus takes millions.
    assert sum(metric.num_series for metric in ALL if metric.of != "run") <= 40
    assert sum(metric.num_series for metric in ALL if metric.of != "replica") <= 40


def test_docs_name_every_metric_and_every_alert(shipped: dict[str, list[str]], tmp_path: Path) -> None:
    text = (ROOT / "docs" / "metrics.md").read_text()
    provision(tmp_path)
    rules = yaml.safe_load((tmp_path / ALERTS).read_text())["groups"][0]["rules"]

    assert set(re.findall(r"`(hsray_\w+)`", text)) == {metric.name for metric in ALL}
    assert set(re.findall(r"`(Hsray\w+)`", text)) == {rule["alert"] for rule in rules}
    for rule in rules:
        assert rule["labels"]["severity"] in ("info", "warning", "critical")
        assert rule["annotations"].keys() == {"summary", "description"}


# -------------------------------------------------------------------- the run

LEASES = [Lease(f"{i:06d}", (2 * i, 2 * i + 1), (10, 10)) for i in range(6)]


class Watched:
    """The real scheduler, and a report of everything that goes in and comes out."""

    def __init__(self) -> None:
        ids = iter(range(1_000))
        self.scheduler = Scheduler(
            LEASES,
            BudgetConfig(),
            starts={},
            attempts={},
            total_rows=12,
            already_dead=0,
            already_committed=0,
            new_attempt_id=lambda: f"a{next(ids)}",
        )
        self.seen = Seen()
        self.now = 0.0
        self.delivered = 0
        self.retries: dict[str, int] = {}
        self.report = RunReport(
            self.seen,
            rejected=3,
            store_retries=lambda: self.retries,
            clock=lambda: self.now,
            wall_clock=lambda: 1_000_000 + self.now,
        )

    def tell(self, event: Event, wait: float = 100.0) -> list[Any]:
        self.now += wait
        actions = self.scheduler.handle(event, self.now)
        self.report.note(event, actions)
        self.report.record(self.snapshot())
        return actions

    def snapshot(self) -> Snapshot:
        return Snapshot(
            self.scheduler.progress, Totals(prompts=self.delivered, tokens=10 * self.delivered), len(LEASES)
        )

    def start(self, place: str) -> str:
        """A ready replica at a new place."""
        spawned = [a for a in self.tell(PlaceFound(place)) if isinstance(a, SpawnReplica)]
        self.tell(ReplicaReady(spawned[0].replica))
        return spawned[0].replica

    def losses(self) -> dict[str, float]:
        found = {reason: self.seen[names.REPLICA_LOSSES, reason] for reason in names.REPLICA_LOSSES.values["reason"]}
        return {reason: count for reason, count in found.items() if count}


@pytest.fixture
def run() -> Watched:
    return Watched()


def test_prompts_and_leases_add_up_whatever_happens(run: Watched) -> None:
    replica = run.start("n1/0")
    running = len(run.scheduler._attempts)
    assert run.seen[names.LEASES, "running"] == running > 0

    run.tell(ReplicaDied(replica, "killed", blame=True))
    run.tell(Tick())

    prompts = {outcome: run.seen[names.PROMPTS, outcome] for outcome in names.PROMPTS.values["outcome"]}
    assert prompts == {"committed": 0, "dead": 0, "rejected": 3, "open": 12}
    leases = {state: run.seen[names.LEASES, state] for state in names.LEASES.values["state"]}
    assert sum(leases.values()) == 6
    assert min(leases.values()) >= 0
    assert run.seen[names.LEASE_RETRIES] == running


def test_a_death_is_told_from_a_lost_node(run: Watched) -> None:
    first, second = run.start("n1/0"), run.start("n2/0")

    run.tell(ReplicaDied(first, "segmentation fault", blame=True))
    run.tell(ReplicaDied(second, "node died", blame=False))
    run.tell(Tick())

    assert run.losses() == {"died": 1, "node_lost": 1}


def test_a_place_that_goes_takes_its_replica_along(run: Watched) -> None:
    run.start("n1/0")

    run.tell(PlaceGone("n1/0"))
    run.tell(Tick())

    assert run.losses() == {"node_lost": 1}


def test_a_drained_replica_is_no_failure(run: Watched) -> None:
    replica = run.start("n1/0")
    run.tell(Draining(replica))
    assert run.losses() == {}
    for attempt in list(run.scheduler._attempts.values()):
        run.tell(LeaseFailed(replica, attempt.lease_id, attempt.attempt, "cancelled", "drain"))
    run.tell(Tick())

    assert run.losses() == {"drained": 1}


def test_an_announced_loss_while_draining_is_a_drain(run: Watched) -> None:
    replica = run.start("n1/0")
    run.tell(Draining(replica))

    run.tell(ReplicaDied(replica, "preempted", blame=False))
    run.tell(Tick())

    assert run.losses() == {"drained": 1}


def test_a_broken_engine_counts_once(run: Watched) -> None:
    replica = run.start("n1/0")
    attempt = next(iter(run.scheduler._attempts.values()))

    run.tell(LeaseFailed(replica, attempt.lease_id, attempt.attempt, "replica", "nothing has moved"))
    run.tell(Tick())

    assert run.losses() == {"engine_failed": 1}


def test_a_store_that_fails_loses_no_replica(run: Watched) -> None:
    replica = run.start("n1/0")
    attempt = next(iter(run.scheduler._attempts.values()))

    run.tell(LeaseFailed(replica, attempt.lease_id, attempt.attempt, "storage", "503"))
    run.tell(Tick())

    assert run.losses() == {}


def test_a_refusal_to_start_counts_once_and_gives_the_place_up(run: Watched) -> None:
    spawned = [a for a in run.tell(PlaceFound("n1/0")) if isinstance(a, SpawnReplica)]

    run.tell(ReplicaFailedToStart(spawned[0].replica, "no such model class", permanent=True))
    run.report.record(run.snapshot(), at_once=True)

    assert run.losses() == {"failed_to_start": 1}
    assert run.seen[names.PLACES_GIVEN_UP] == 1


def test_zeros_come_first(run: Watched) -> None:
    run.report.record(run.snapshot())

    recorded = {name for name, *_ in run.seen.values}
    assert recorded == {m.name for m in ALL if m.of != "replica"} - {names.ETA.name}
    assert all(run.seen[names.STORAGE_RETRIES, op] == 0 for op in names.STORAGE_RETRIES.values["operation"])
    assert run.losses() == {}


def test_it_is_recorded_every_five_seconds_however_fast_the_loop_turns(run: Watched) -> None:
    for _ in range(1000):
        run.tell(Tick(), wait=0.01)
    assert run.seen.calls[names.PLACES_GIVEN_UP.name] == 2

    run.report.record(run.snapshot(), at_once=True)
    assert run.seen.calls[names.PLACES_GIVEN_UP.name] == 3


def test_eta_is_there_while_prompts_are_delivered(run: Watched) -> None:
    run.start("n1/0")
    assert (names.ETA.name,) not in run.seen.values
    for _ in range(3):
        run.delivered += 2
        run.tell(Tick(), wait=10)

    # 6 prompts in the 30 s since it was ready; all 12 are open, as none is committed.
    assert run.seen[names.ETA] == pytest.approx(12 / (6 / 30))

    for _ in range(10):
        run.tell(Tick(), wait=10)
    del run.seen.values[(names.ETA.name,)]
    run.tell(Tick(), wait=10)
    assert (names.ETA.name,) not in run.seen.values


def test_progress_is_what_was_resolved_not_what_was_said(run: Watched) -> None:
    run.start("n1/0")
    assert run.seen[names.LAST_PROGRESS] == 1_000_000
    run.tell(Tick())
    assert run.seen[names.LAST_PROGRESS] == 1_000_000

    attempt = next(iter(run.scheduler._attempts.values()))
    run.tell(Resolved(Resolution("commit", attempt.lease_id, attempt.attempt, attempt.replica), True))

    assert run.seen[names.LAST_PROGRESS] == 1_000_000 + run.now


def test_repeated_requests_of_the_driver_are_counted(run: Watched) -> None:
    run.tell(Tick())
    run.retries = {"create": 2}
    run.tell(Tick())
    run.retries = {"create": 5, "list": 1}
    run.tell(Tick())

    assert run.seen[names.STORAGE_RETRIES, "create"] == 5
    assert run.seen[names.STORAGE_RETRIES, "list"] == 1
    assert run.seen[names.STORAGE_RETRIES, "put"] == 0


# ---------------------------------------------------------------- the replica

PROGRESS = ReplicaProgress(
    prompts=3,
    tokens=1000,
    stored_bytes=5_000_000,
    in_flight=7,
    spool_bytes=600,
    spool_capacity=1000,
    spool_budget=800,
    rewritten_rows=0,
    write_seconds=1.0,
    write_cpu_seconds=0.5,
    capture=(),
    seconds={"prefill": 6.0, "spool": 2.0, "write": 0.0, "idle": 1.0},
    storage_retries={"upload": 4},
)


def test_a_replica_records_all_of_its_metrics() -> None:
    seen = Seen()
    report = ReplicaReport(seen)

    report.record(PROGRESS)
    ranks = tuple(CaptureStats(rank, 1, 1, 1, 0.0, seconds, 0.0) for rank, seconds in enumerate((1.0, 3.0)))
    report.record(replace(PROGRESS, tokens=1500, capture=ranks, in_flight=0))

    recorded = {name for name, *_ in seen.values}
    assert recorded == {m.name for m in ALL if m.of != "run"} - {names.UPLOAD_SECONDS.name}
    assert seen[names.TOKENS] == 1500
    assert seen[names.IN_FLIGHT] == 0
    assert seen[names.SPOOL_BUDGET] == 800
    assert seen[names.REPLICA_SECONDS, "spool"] == 2.0
    assert seen[names.CAPTURE_SECONDS] == 2.0
    assert seen[names.STORAGE_RETRIES, "upload"] == 4
    assert seen[names.STORAGE_RETRIES, "get"] == 0


def test_a_counter_is_told_of_growth_and_of_the_first_zero() -> None:
    told: list[float] = []

    class Told:
        def record(self, metric: Metric, value: float, **tags: str) -> None:
            told.append(value)

    growth = Growth(Told())
    for total in (0, 0, 3, 3, 10):
        growth.record_total(names.TOKENS, total)

    assert told == [0, 3, 7]


def test_every_second_is_in_one_state() -> None:
    now = [100.0]
    clock = ReplicaClock(lambda: now[0])

    now[0] = 101.0
    clock.enter("prefill")
    now[0] = 104.0
    clock.enter("prefill")
    now[0] = 104.5
    clock.enter("spool")
    now[0] = 106.0

    assert clock.seconds() == {"prefill": 3.5, "spool": 1.5, "write": 0.0, "idle": 1.0}
    now[0] = 107.0
    assert clock.seconds()["spool"] == 2.5


@pytest.mark.parametrize(
    ("in_engine", "is_open", "pending", "state"),
    [
        (1, True, [1], "prefill"),
        (1, False, [1], "prefill"),  # no room, but the engine still has something to do
        (0, False, [1], "spool"),
        (0, False, [], "write"),
        (0, True, [], "write"),
        (0, True, None, "idle"),
    ],
)
def test_a_replica_knows_what_it_is_doing(in_engine: int, is_open: bool, pending: list[int] | None, state: str) -> None:
    now = [0.0]
    replica = object.__new__(Replica)  # a whole one takes the process's standard output over
    replica._time = ReplicaClock(lambda: now[0])
    replica._runs = [] if pending is None else [SimpleNamespace(pending=pending)]  # type: ignore[list-item]

    class InFlight:
        admission = SimpleNamespace(is_open=is_open)

        def __len__(self) -> int:
            return in_engine

    replica.in_flight = InFlight()  # type: ignore[assignment]
    replica._note_time()
    now[0] = 1.0

    assert replica._time.seconds()[state] == 1.0  # type: ignore[index]


# ------------------------------------------------------------------- the seam


def test_without_anybody_listening_nothing_happens() -> None:
    NO_METRICS.record(names.TOKENS, 1.0)


def test_what_ray_has_against_a_metric_is_said_once_and_ends_nothing(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(metric: Metric) -> Any:
        raise RuntimeError("no agent")

    monkeypatch.setattr(ray_metrics, "_ray_metric", refuse)
    monkeypatch.setattr(ray_metrics, "_warned", set())
    metrics = RayMetrics(run="r", replica="r0#1")

    for _ in range(3):
        metrics.record(names.TOKENS, 1.0)

    assert [record.getMessage() for record in caplog.records] == ["metric hsray_tokens_total cannot be recorded"]


def test_ray_gets_the_process_tags_that_a_metric_has(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[Any] = []

    class Made:
        def set(self, value: float, tags: dict[str, str]) -> None:
            told.append(("set", value, tags))

        def inc(self, value: float, tags: dict[str, str]) -> None:
            told.append(("inc", value, tags))

        def observe(self, value: float, tags: dict[str, str]) -> None:
            told.append(("observe", value, tags))

        def _record(self, value: float, tags: dict[str, str]) -> None:
            told.append(("zero", value, tags))

    monkeypatch.setattr(ray_metrics, "_ray_metric", lambda metric: Made())
    metrics = RayMetrics(run="r", replica="driver")

    metrics.record(names.PROMPTS, 5, outcome="dead")
    metrics.record(names.STORAGE_RETRIES, 0, operation="put")
    metrics.record(names.STORAGE_RETRIES, 2, operation="put")
    metrics.record(names.UPLOAD_SECONDS, 0.5)

    both = {"run": "r", "replica": "driver"}
    assert told == [
        ("set", 5, {"run": "r", "outcome": "dead"}),
        ("zero", 0.0, {**both, "operation": "put"}),
        ("inc", 2, {**both, "operation": "put"}),
        ("observe", 0.5, both),
    ]


# ------------------------------------------------------------------ the command


def test_the_command_writes_three_files_and_says_what_to_do(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(tmp_path / "new" / "folder")]) == ExitCode.COMPLETE

    written = sorted(path.name for path in (tmp_path / "new" / "folder").iterdir())
    assert written == ["hsray_alerts.yml", "hsray_grafana_dashboard.json", "prometheus.yml"]
    said = capsys.readouterr().out
    assert f"RAY_METRICS_GRAFANA_DASHBOARD_OUTPUT_DIR={tmp_path}/new/folder" in said


def test_a_folder_that_cannot_be_written_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").write_text("")

    assert main([str(tmp_path / "file" / "folder")]) == ExitCode.CONFIG

    assert f"{tmp_path}/file/folder" in capsys.readouterr().err


def test_the_command_runs_without_ray(tmp_path: Path) -> None:
    code = (
        "import sys; from hsray.metrics.__main__ import main; main(sys.argv[1:]); "
        "print([m for m in ('ray', 'pyarrow', 'obstore') if m in sys.modules])"
    )

    said = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True, check=True
    ).stdout

    assert said.splitlines()[-1] == "[]"
