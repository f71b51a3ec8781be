"""scripts/start_head.sh and start_worker.sh start a real Ray on this machine."""

import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.sizing import ROOT

DEADLINE_SECONDS = 240
# A second Ray on this machine must not meet the first one's ports, nor a node wait for leases that there are none of.
QUIET = ["--object-store-memory=80000000", "--min-worker-port=0", "--max-worker-port=0", "--num-cpus=1", "--block"]


def free_ports(count: int) -> list[int]:
    import socket

    sockets = [socket.socket() for _ in range(count)]
    for each in sockets:
        each.bind(("127.0.0.1", 0))
    ports = [int(each.getsockname()[1]) for each in sockets]
    for each in sockets:
        each.close()
    return ports


@pytest.fixture
def environment(tmp_path: Path) -> Iterator[tuple[dict[str, str], Path]]:
    """Of a node whose virtual environment is ours; and a short folder, for Ray's sockets."""
    clean = {k: v for k, v in os.environ.items() if not k.startswith("RAY_")}
    folder = Path(tempfile.mkdtemp(prefix="hs-", dir="/tmp"))
    yield (
        clean | {"HSRAY_VENV": sys.prefix, "HOME": str(tmp_path), "RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S": "0"},
        folder,
    )
    shutil.rmtree(folder, ignore_errors=True)


def start(script: str, *args: str, env: dict[str, str], log: Path) -> "subprocess.Popen[bytes]":
    """In a session of its own, once it has said that Ray runs. Ray gives its own processes 30 s, which a machine that
    is busy with other things may not keep: that, and nothing else, is tried again."""
    for attempt in range(3):
        with log.open("wb") as output:
            process = subprocess.Popen(
                ["bash", str(ROOT / script), *args, *QUIET],
                env=env,
                stdout=output,
                stderr=output,
                start_new_session=True,
            )
        deadline = time.monotonic() + DEADLINE_SECONDS
        try:
            while process.poll() is None and time.monotonic() < deadline:
                if "Ray runtime started" in log.read_text():
                    return process
                time.sleep(0.5)
        except BaseException:
            stop(process)
            raise
        stop(process)
        if attempt == 2 or "timed out during startup" not in log.read_text():
            pytest.fail(f"{script}: {log.read_text()}")
    raise AssertionError("unreachable")


def stop(process: "subprocess.Popen[bytes]") -> None:
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:
        pass
    process.wait()


@pytest.mark.timeout(900)
def test_a_head_and_a_worker_make_a_cluster(environment: tuple[dict[str, str], Path], tmp_path: Path) -> None:
    env, folder = environment
    port, client, *metrics = free_ports(4)
    started = []
    try:
        head_args = [f"--port={port}", "--num-gpus=0", f"--metrics-export-port={metrics[0]}"]
        head_args += ["--labels=hsray.io/pool=head", "--include-dashboard=false", f"--temp-dir={folder}"]
        head_args.append(f"--ray-client-server-port={client}")
        started.append(start("scripts/start_head.sh", *head_args, env=env, log=tmp_path / "head.log"))
        worker_args = [f"127.0.0.1:{port}", "--num-gpus=8", f"--metrics-export-port={metrics[1]}"]
        worker_args += ["--labels=hsray.io/pool=bw"]
        started.append(start("scripts/start_worker.sh", *worker_args, env=env, log=tmp_path / "worker.log"))
        code = (
            f"import ray; ray.init('127.0.0.1:{port}', log_to_driver=False)\n"
            "for n in ray.nodes(): print(n['Alive'], n['Resources'].get('GPU'), n['Labels']['hsray.io/pool'])"
        )
        joined = subprocess.run(
            [sys.executable, "-c", code],
            env=env | {"RAY_AUTH_MODE": "disabled"},
            capture_output=True,
            text=True,
            check=False,
        )
    finally:
        for process in reversed(started):
            stop(process)

    assert sorted(joined.stdout.split("\n"))[1:] == ["True 8.0 bw", "True None head"], joined.stderr
    assert (tmp_path / "hsray-grafana" / "hsray_grafana_dashboard.json").exists()
