"""A run on a real Ray head, watched by a real Prometheus through Ray's own list of nodes: panels, alerts, values.

The run has its troubles on purpose: a prompt that dies, replicas that are killed, a store that throttles.
"""

import json
import os
import re
import signal
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml

from hsray.errors import ExitCode
from hsray.metrics import ALL
from hsray.metrics.__main__ import ALERTS, DASHBOARD, PROMETHEUS, provision
from tests.faultproxy import FaultProxy, run_fault_proxy
from tests.job_cluster import JobCluster, run_job_cluster
from tests.prometheus import Prometheus, find_program, run_prometheus
from tests.runs import Run, ended, make_run, random_rows, wait_until
from tests.seaweed import Seaweed

NAN = 2
FAULTS = 48  # the client tries three times before hsray counts one
PROMPTS = 6000  # more than are done before the last test stops the run
REPORT_MILLISECONDS = 5000  # Ray's own; half of what it is unless told


@dataclass
class Scene:
    folder: Path
    cluster: JobCluster
    prometheus: Prometheus
    run: Run
    proxy: FaultProxy
    driver: Any

    @property
    def run_id(self) -> str:
        return str(self.run.store().get_json("hsray.json")["run_id"])

    def wait_for(self, what: str, condition: Any, timeout: float = 150) -> None:
        def check() -> bool:
            assert self.driver.poll() is None, f"the driver has ended:\n{self.run.log()}"
            if condition():
                return True
            time.sleep(0.5)
            return False

        wait_until(check, timeout, lambda: f"{what}\nfiring: {[*self.prometheus.firing()]}\n{self.run.log()[-3000:]}")


@pytest.fixture(scope="module")
def scene(tmp_path_factory: pytest.TempPathFactory, seaweed: Seaweed) -> Iterator[Scene]:
    find_program("prometheus")  # before anything is started
    folder = tmp_path_factory.mktemp("metrics")
    provisioned = folder / "grafana"
    provision(provisioned)
    credentials = {k: v for k, v in seaweed.env.items() if k != "AWS_ENDPOINT_URL"}
    ray_env = {
        **credentials,
        "RAY_METRICS_GRAFANA_DASHBOARD_OUTPUT_DIR": str(provisioned),
        "RAY_metrics_report_interval_ms": str(REPORT_MILLISECONDS),
    }
    with run_fault_proxy(seaweed.port) as proxy, run_job_cluster(ray_env) as cluster:
        config = _impatient(provisioned, cluster.folder)
        with run_prometheus(folder, config) as prometheus:
            rows = random_rows(PROMPTS)
            rows[3]["input_ids"][1] = NAN
            rows[8:8] = ["{broken"]
            run = make_run(
                folder,
                rows,
                url=seaweed.new_url(),
                storage_options={"endpoint": proxy.endpoint},
                overrides=[
                    f"cluster.address={cluster.gcs_address}",
                    f"engine.args.nan_token={NAN}",
                    "engine.args.seconds_per_token=0.05",
                ],
            )
            run.env |= {**credentials, "RAY_metrics_report_interval_ms": str(REPORT_MILLISECONDS)}
            run.storage_options |= {k: v for k, v in seaweed.storage_options.items() if k != "endpoint"}
            with ended(run):
                yield Scene(folder, cluster, prometheus, run, proxy, run.start())


def _impatient(provisioned: Path, ray_folder: Path) -> Path:
    """The configuration and the rules as they are shipped, but for where this Ray lives and how long things take."""
    rules = yaml.safe_load((provisioned / ALERTS).read_text())
    for rule in rules["groups"][0]["rules"]:
        rule.pop("for", None)
    (provisioned / ALERTS).write_text(yaml.safe_dump(rules))
    config = yaml.safe_load((provisioned / PROMETHEUS).read_text())
    config["global"] = {"scrape_interval": "1s", "evaluation_interval": "1s"}
    (discovery,) = config["scrape_configs"][0]["file_sd_configs"]
    assert discovery["files"] == ["/tmp/ray/session_latest/prom_metrics_service_discovery.json"]
    discovery["files"] = [str(ray_folder / "session_latest" / "prom_metrics_service_discovery.json")]
    discovery["refresh_interval"] = "1s"
    path = provisioned / PROMETHEUS
    path.write_text(yaml.safe_dump(config))
    return path


def test_troubles_raise_their_alerts(scene: Scene) -> None:
    scene.wait_for("replicas are up", lambda: scene.prometheus.value('ray_hsray_replicas{state="ready"}') == 2)
    assert "HsrayReplicasDying" not in scene.prometheus.firing()
    assert "HsrayStoreRetries" not in scene.prometheus.firing()

    for killed in (2, 1):
        count = scene.run.log().count("is ready on") + killed
        for pid in scene.cluster.processes("ReplicaActor")[:killed]:
            os.kill(pid, signal.SIGKILL)
        scene.wait_for("replacements", lambda c=count: scene.run.log().count("is ready on") == c)
    scene.proxy.inject(r"PUT .*/(data|leases)/", "answer", times=FAULTS)  # 503 SlowDown

    for alert in ("HsrayReplicasDying", "HsrayStoreRetries", "HsrayPromptsDead"):
        scene.wait_for(alert, lambda name=alert: name in scene.prometheus.firing())
        annotations = scene.prometheus.firing()[alert]["annotations"]
        assert scene.run_id in annotations["summary"]
        assert "{{" not in json.dumps(annotations)
    assert scene.prometheus.rule_problems() == {}


def test_what_is_counted_is_what_happened(scene: Scene) -> None:
    run = f'run="{scene.run_id}"'
    value = scene.prometheus.value

    scene.wait_for("the dead prompt", lambda: value(f'ray_hsray_prompts{{{run},outcome="dead"}}') == 1)
    scene.wait_for("prompts add up", lambda: value(f"sum(ray_hsray_prompts{{{run}}})") == PROMPTS + 1)
    assert value(f'ray_hsray_prompts{{{run},outcome="rejected"}}') == 1
    scene.wait_for("losses", lambda: value(f"sum(ray_hsray_replica_losses_total{{{run}}})") == 3)
    assert value(f'ray_hsray_replica_losses_total{{{run},reason="died"}}') == 3
    scene.wait_for("every fault", lambda: {fault.times for fault in scene.proxy._faults} == {0})
    retries = f"sum(ray_hsray_storage_retries_total{{{run}}})"
    scene.wait_for("retries", lambda: FAULTS / 6 < (value(retries) or 0) <= FAULTS / 3)
    scene.wait_for("bytes", lambda: (value(f"sum(ray_hsray_stored_bytes_total{{{run}}})") or 0) > 0)
    seconds = f"max(sum by (replica) (rate(ray_hsray_replica_seconds_total{{{run}}}[1m])))"
    scene.wait_for("every second of a replica is in one state", lambda: 0.5 < (value(seconds) or 0) < 1.3)


def test_every_panel_shows_data(scene: Scene) -> None:
    dashboard = json.loads((scene.folder / "grafana" / DASHBOARD).read_text())
    panels = [panel for panel in dashboard["panels"] if panel["type"] != "row"]
    seen = set()
    for panel in panels:
        for target in panel["targets"]:
            expression = target["expr"].replace("$__rate_interval", "1m").replace("$run", scene.run_id)
            assert "$" not in expression
            scene.wait_for(
                f"{panel['title']}: {expression}",
                lambda e=expression: [s for s in scene.prometheus.query(e) if s["value"][1] != "NaN"],
                timeout=60,
            )
            seen.add(expression)
    assert len(seen) > 20
    runs = dashboard["templating"]["list"][1]["definition"]
    assert runs == "label_values(ray_hsray_prompts, run)"
    assert {s["metric"]["run"] for s in scene.prometheus.query("ray_hsray_prompts")} == {scene.run_id}


def test_every_alert_is_about_series_that_exist(scene: Scene) -> None:
    rules = yaml.safe_load((scene.folder / "grafana" / ALERTS).read_text())["groups"][0]["rules"]
    for rule in rules:
        selectors = re.findall(r"ray_hsray_\w+(?:\{[^}]*\})?", rule["expr"])
        assert selectors
        for selector in selectors:
            scene.wait_for(f"{rule['alert']}: {selector}", lambda s=selector: scene.prometheus.query(s), timeout=60)


def test_every_metric_is_exported(scene: Scene) -> None:
    for metric in ALL:
        name = metric.exported_name + ("_bucket" if metric.kind == "histogram" else "")
        scene.wait_for(name, lambda n=name: scene.prometheus.query(n), timeout=60)
        for series in scene.prometheus.query(name):
            labels = series["metric"]
            assert labels["run"] == scene.run_id
            for tag, values in metric.values.items():
                assert labels[tag] in values
            assert "replica" not in labels or re.fullmatch(r"driver|r[01]#\d+", labels["replica"])
            ours = labels.keys() - {"le", "__name__", "job", "instance", "Component", "NodeAddress", "SessionName"}
            assert {tag for tag in ours if not tag.startswith("otel_")} <= {*metric.tags, "Version", "WorkerId"}


def test_ray_tells_grafana_where_the_dashboard_is(scene: Scene) -> None:
    metrics = scene.cluster.folder / "session_latest" / "metrics"
    provider = yaml.safe_load((metrics / "grafana/provisioning/dashboards/default.yml").read_text())

    assert provider["providers"][0]["options"]["path"] == str(scene.folder / "grafana")
    beside = {path.name for path in (scene.folder / "grafana").glob("*.json")}
    assert {DASHBOARD, "default_grafana_dashboard.json"} <= beside


def test_an_ended_driver_takes_its_gauges_along(scene: Scene) -> None:
    scene.driver.send_signal(signal.SIGTERM)
    assert scene.driver.wait(60) == ExitCode.INTERRUPTED, scene.run.log()

    def gone() -> bool:
        time.sleep(0.5)
        return not scene.prometheus.query("ray_hsray_replicas")

    wait_until(gone, 40, lambda: str(scene.prometheus.query("ray_hsray_replicas")))
    assert scene.prometheus.value("sum(ray_hsray_tokens_total)") is not None
    assert "cannot be recorded" not in scene.run.log()
