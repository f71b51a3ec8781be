"""A real Prometheus for tests: Debian's, which `scripts/install --dev` puts beside Python."""

import contextlib
import json
import os
import shutil
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

START_SECONDS = 60.0


def find_program(name: str) -> str:
    """`prometheus` or `promtool`. Where it is missing the test is skipped; in CI it fails."""
    beside = Path(sys.executable).parent / name
    found = str(beside) if beside.exists() else shutil.which(name)
    if found is None:
        must = os.environ.get("CI") or os.environ.get("HSRAY_REQUIRE_SERVICES") == "1"
        (pytest.fail if must else pytest.skip)(f"{name} is not installed: scripts/install --dev")
    return found


@dataclass(frozen=True)
class Prometheus:
    """A running server."""

    url: str

    def query(self, expression: str) -> list[dict[str, Any]]:
        """The series of an instant query, each with `metric` (labels) and `value` (time, text)."""
        answer = self._get("query", query=expression)
        if answer["resultType"] in ("scalar", "string"):
            return [{"metric": {}, "value": answer["result"]}]
        found: list[dict[str, Any]] = answer["result"]
        return found

    def value(self, expression: str) -> float | None:
        """Of a query with one series; None if there is none."""
        found = self.query(expression)
        assert len(found) <= 1, f"{expression}: {found}"
        return float(found[0]["value"][1]) if found else None

    def firing(self) -> dict[str, dict[str, Any]]:
        """Alerts that fire now, by name; of several with one name, one."""
        return {a["labels"]["alertname"]: a for a in self._get("alerts")["alerts"] if a["state"] == "firing"}

    def rule_problems(self) -> dict[str, str]:
        """The last error of each rule that could not be evaluated."""
        rules = [rule for group in self._get("rules")["groups"] for rule in group["rules"]]
        assert rules
        return {rule["name"]: rule["lastError"] for rule in rules if rule.get("lastError")}

    def _get(self, what: str, **parameters: str) -> Any:
        url = f"{self.url}/api/v1/{what}?{urllib.parse.urlencode(parameters)}"
        try:
            with urllib.request.urlopen(url, timeout=30) as answer:
                return json.load(answer)["data"]
        except urllib.error.HTTPError as err:
            raise AssertionError(f"{url}: {err.read().decode()}") from err


@contextlib.contextmanager
def run_prometheus(folder: Path, config: Path) -> Iterator[Prometheus]:
    """Start a server on loopback with this configuration and its data in `folder`; stop it at the end."""
    program = find_program("prometheus")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    log = folder / "prometheus.log"
    with log.open("w") as output:
        process = subprocess.Popen(
            [
                program,
                f"--config.file={config}",
                f"--storage.tsdb.path={folder / 'tsdb'}",
                f"--web.listen-address=127.0.0.1:{port}",
            ],
            stdout=output,
            stderr=subprocess.STDOUT,
        )
    server = Prometheus(f"http://127.0.0.1:{port}")
    try:
        _wait_until_ready(server, process, log)
        yield server
    finally:
        process.terminate()
        process.wait(30)


def _wait_until_ready(server: Prometheus, process: "subprocess.Popen[bytes]", log: Path) -> None:
    deadline = time.monotonic() + START_SECONDS
    while True:
        try:
            with urllib.request.urlopen(f"{server.url}/-/ready", timeout=5):
                return
        except (urllib.error.URLError, OSError) as err:
            if process.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(f"Prometheus did not start ({err})\n{log.read_text()[-2000:]}") from err
            time.sleep(0.1)
