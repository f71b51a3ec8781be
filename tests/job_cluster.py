"""A Ray head of this machine alone with a job server, as `ray start --head` makes it, and the `ray job` commands."""

import contextlib
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.runs import descendants, kill, wait_until

RAY = str(Path(sys.executable).parent / "ray")
# Ports that Ray would otherwise choose by number, and find taken by another Ray on this machine.
_PORTS = (
    "--port",
    "--dashboard-port",
    "--dashboard-agent-listen-port",
    "--dashboard-agent-grpc-port",
    "--runtime-env-agent-port",
    "--ray-client-server-port",
    "--node-manager-port",
    "--object-manager-port",
    "--metrics-export-port",
)


@dataclass
class JobCluster:
    """A head with a job server; `process` is `ray start --block`.

    `address` is the job server's, `gcs_address` what drivers connect to that are no jobs.
    """

    address: str
    gcs_address: str
    process: "subprocess.Popen[str]"
    folder: Path
    environment: dict[str, str]

    def submit(self, name: str, working_dir: Path, entrypoint: list[str], env: Mapping[str, str]) -> None:
        """Hand a job over without waiting for it."""
        runtime_env = json.dumps({"env_vars": dict(env)})
        self.ray(
            *("job", "submit", "--no-wait", "--submission-id", name, "--working-dir", str(working_dir)),
            *("--runtime-env-json", runtime_env, "--", *entrypoint),
        )

    def follow(self, name: str, timeout: float = 120) -> str:
        """What the job has printed, once it has ended."""
        return self.ray("job", "logs", "--follow", name, timeout=timeout)

    def stop(self, name: str, timeout: float = 120) -> str:
        """`ray job stop`; returns when the job has ended."""
        return self.ray("job", "stop", name, timeout=timeout)

    def info(self, name: str) -> dict[str, Any]:
        """The job server's record: `status`, `driver_exit_code`, ..."""
        with urllib.request.urlopen(f"{self.address}/api/jobs/{name}", timeout=30) as answer:
            found: dict[str, Any] = json.load(answer)
        return found

    def has_ended(self, name: str) -> bool:
        return self.info(name)["status"] in ("STOPPED", "SUCCEEDED", "FAILED")

    @contextlib.contextmanager
    def another_node(self) -> Iterator[None]:
        """A second node without CPUs, on this machine as well; ended as `ray start --block` ends on SIGTERM."""
        with (self.folder / "node.log").open("w") as log:
            process = subprocess.Popen(
                [
                    RAY,
                    "start",
                    "--block",
                    "--address",
                    self.gcs_address,
                    "--num-cpus",
                    "0",
                    "--object-store-memory",
                    "80000000",
                ],
                stdout=log,
                stderr=subprocess.STDOUT,
                env=self.environment,
                start_new_session=True,
            )
            try:
                wait_until(
                    lambda: "Ray runtime started" in (self.folder / "node.log").read_text(),
                    120,
                    lambda: (self.folder / "node.log").read_text(),
                )
                yield
            finally:
                _end(process)

    def processes(self, pattern: str) -> list[int]:
        """Living processes under this head whose command line holds `pattern`."""
        found = []
        for pid in descendants([self.process.pid]):
            with contextlib.suppress(OSError):
                words = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
                if pattern in words:
                    found.append(pid)
        return found

    def ray(self, group: str, command: str, *arguments: str, timeout: float = 120) -> str:
        """`ray GROUP COMMAND ...` against this head; what it printed."""
        done = subprocess.run(
            [RAY, group, command, "--address", self.address, *arguments],
            env=self.environment,
            capture_output=True,
            text=True,
            timeout=timeout,
            check=False,
        )
        head = (self.folder / "head.log").read_text()
        assert done.returncode == 0, f"ray {group} {command}: {done.stdout}\n{done.stderr}\nthe head: {head}"
        return done.stdout


_TRIES = 3


@contextlib.contextmanager
def run_job_cluster(env: Mapping[str, str] | None = None) -> Iterator[JobCluster]:
    """Start a head with ports and a folder of its own, and `env` added to its environment; end every process of it."""
    # Ray gives its own processes 30 s, which a busy machine may exceed.
    for number in range(_TRIES):
        with _head(env or {}) as cluster:
            try:
                wait_until(lambda: _is_up(cluster), 240, lambda: (cluster.folder / "head.log").read_text())
            except AssertionError:
                if number == _TRIES - 1:
                    raise
                continue
            yield cluster
            return


@contextlib.contextmanager
def _head(env: Mapping[str, str]) -> Iterator[JobCluster]:
    # Ray's sockets live below its folder, and their paths must stay under 108 bytes.
    folder = Path(tempfile.mkdtemp(prefix="hsjob-", dir="/tmp"))
    ports = dict(zip(_PORTS, _free_ports(len(_PORTS)), strict=True))
    environment = {
        **{k: v for k, v in os.environ.items() if not k.startswith("RAY_")},
        "RAY_AUTH_MODE": "disabled",
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_TMPDIR": str(folder),
        # `python` in an entrypoint is looked up in the head's PATH.
        "PATH": f"{Path(RAY).parent}:{os.environ['PATH']}",
        **env,
    }
    log = (folder / "head.log").open("w")
    process = subprocess.Popen(
        [
            *(RAY, "start", "--head", "--block", "--node-ip-address", "127.0.0.1", "--temp-dir", str(folder)),
            *("--dashboard-host", "127.0.0.1", "--num-cpus", "8", "--object-store-memory", "80000000"),
            *(word for option, port in ports.items() for word in (option, str(port))),
        ],
        stdout=log,
        stderr=subprocess.STDOUT,
        text=True,
        env=environment,
        start_new_session=True,
    )
    cluster = JobCluster(
        address=f"http://127.0.0.1:{ports['--dashboard-port']}",
        gcs_address=f"127.0.0.1:{ports['--port']}",
        process=process,
        folder=folder,
        environment=environment,
    )
    try:
        yield cluster
    finally:
        _end(process)
        log.close()
        shutil.rmtree(folder, ignore_errors=True)


def _end(process: "subprocess.Popen[Any]") -> None:
    family = {process.pid, *descendants([process.pid])}
    process.send_signal(signal.SIGTERM)
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(20)
    for pid in family:
        kill(pid)
    process.wait()


def _is_up(cluster: JobCluster) -> bool:
    """The job server answers before the node is whole."""
    log = (cluster.folder / "head.log").read_text()
    assert cluster.process.poll() is None, log
    if "Ray runtime started" in log:
        try:
            with urllib.request.urlopen(f"{cluster.address}/api/jobs/", timeout=5) as answer:
                return bool(answer.status == 200)
        except OSError:
            pass
    time.sleep(0.3)
    return False


def _free_ports(count: int) -> list[int]:
    held = [socket.socket() for _ in range(count)]
    try:
        for probe in held:
            probe.bind(("127.0.0.1", 0))
        return [int(probe.getsockname()[1]) for probe in held]
    finally:
        for probe in held:
            probe.close()
