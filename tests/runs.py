"""Whole runs as a user starts them: a driver process over real Ray, with made-up or real engines."""

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from hsray.ledger import Ledger
from hsray.plan import load_plan
from hsray.reader import open_run
from hsray.store import Store, open_store
from hsray.testing import fake_states
from tests.tiny_tokenizers import make_tokenizer

ROOT = Path(__file__).parents[1]
FAKE = "hsray.testing:FakeEngine"
SGLANG = "hsray.engine:SGLangEngine"
HIDDEN, LAYERS, VOCAB = 16, 8, 1000
SITES = ["resid_pre_2", "resid_pre_5", "final_prenorm"]


@dataclass
class Run:
    """One run in a folder of its own.

    Attributes:
        overrides: always passed, `key=value`.
        env: added to the environment of every driver.
        prefix: a command that runs the driver's command line.
    """

    folder: Path
    engine_class: str = FAKE
    url: str = ""
    overrides: list[str] = field(default_factory=list)
    env: dict[str, str] = field(default_factory=dict)
    prefix: list[str] = field(default_factory=list)
    storage_options: dict[str, Any] = field(default_factory=dict)
    started: list["subprocess.Popen[str]"] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.url = self.url or str(self.folder / "run")

    @property
    def config_path(self) -> Path:
        return self.folder / "run.yaml"

    @property
    def spool(self) -> Path:
        return self.folder / "spool"

    def start(self, *overrides: str, name: str = "driver") -> "subprocess.Popen[str]":
        log = (self.folder / f"{name}.log").open("a")
        process = subprocess.Popen(
            [
                *self.prefix,
                sys.executable,
                "-m",
                "tests.drive",
                self.engine_class,
                str(self.config_path),
                *self.overrides,
                *overrides,
            ],
            stdout=log,
            stderr=subprocess.STDOUT,
            text=True,
            cwd=ROOT,
            env={**os.environ, **self.env},
            start_new_session=True,
        )
        self.started.append(process)
        return process

    def finish(self, *overrides: str, name: str = "driver", timeout: float = 240) -> int:
        process = self.start(*overrides, name=name)
        try:
            return process.wait(timeout)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"the driver did not end:\n{self.log(name)}") from None

    def log(self, name: str = "driver") -> str:
        return (self.folder / f"{name}.log").read_text()

    def store(self) -> Store:
        return open_store(self.url, self.storage_options, retry_seconds=30)

    def wait_for_resolutions(self, count: int, timeout: float = 180) -> None:
        store = self.store()

        def is_there() -> bool:
            if all(process.poll() is not None for process in self.started):
                raise AssertionError(f"the driver has ended:\n{self.log()}")
            return sum(1 for _ in store.list("leases/")) >= count

        wait_until(is_there, timeout, lambda: self.log())

    def processes(self, pattern: str) -> list[int]:
        """Pids of processes of this run's drivers whose command line or name holds `pattern`."""
        return [pid for pid in descendants([p.pid for p in self.started]) if pattern in command_line(pid)]

    def outcomes(self) -> tuple[set[int], dict[int, Any], int]:
        """(committed rows, dead by row, rejected rows), after checking that they add up to the input."""
        store = self.store()
        ledger = Ledger(store)
        record = ledger.read_run()
        assert record is not None
        plan = load_plan(store, record["plan"])
        _, found = ledger.account(plan.leases)
        assert not found.open
        assert len(found.committed) + len(found.dead) + plan.num_rejects == plan.num_rows
        assert not set(found.committed) & set(found.dead)
        return set(found.committed), found.dead, plan.num_rejects

    def check_states(self) -> int:
        """Every committed prompt holds exactly the FakeEngine's states; returns how many there are."""
        count = 0
        for row in open_run(self.url, self.storage_options):
            for site in SITES:
                expected = fake_states(site, row.input_ids.tolist(), HIDDEN, "bfloat16")
                assert np.array_equal(row[site].view(np.uint16), expected.view(np.uint16)), (row.prompt_id, site)
            count += 1
        return count

    def assert_nothing_left(self) -> None:
        """No process of any driver of this run, no arena.

        Ray's own per-node agents get two minutes: after a SIGKILL of the driver they first try to tell a GCS
        that is gone. Replicas and engines get seconds.
        """
        sessions = {p.pid for p in self.started}

        def left(agents: bool) -> list[str]:
            found = processes_of(sessions, str(self.folder))
            return [p for p in found if agents or not re.search("DashboardAgent|RuntimeEnvAgent", p)]

        wait_until(lambda: not left(agents=False), 30, lambda: str(left(agents=False)))
        wait_until(lambda: not left(agents=True), 150, lambda: str(left(agents=True)))
        wait_until(lambda: not list(self.spool.glob("*")), 20, lambda: str(list(self.spool.rglob("*"))))


def make_run(folder: Path, rows: Sequence[Any], **options: Any) -> Run:
    """A FakeEngine run over `rows` (JSON objects, or raw lines), five prompts to a lease."""
    run = Run(folder, **options)
    model = folder / "model"
    make_tokenizer(model)
    config = {
        "architectures": ["FakeModel"],
        "model_type": "fake",
        "num_hidden_layers": LAYERS,
        "hidden_size": HIDDEN,
        "vocab_size": VOCAB,
        "max_position_embeddings": 4096,
        "rms_norm_eps": 1e-5,
    }
    (model / "config.json").write_text(json.dumps(config))
    lines = [row if isinstance(row, str) else json.dumps(row) for row in rows]
    (folder / "prompts.jsonl").write_text("\n".join(lines) + "\n")
    settings = {
        "model": {"path": str(model)},
        "prompts": {"path": str(folder / "prompts.jsonl")},
        "capture": {"sites": SITES},
        "output": {
            "url": run.url,
            "max_lease_prompts": 5,
            "storage_options": run.storage_options,
            "retry_seconds": 60,
        },
        "engine": {"args": {"device": "cpu"}},
        "cluster": {"replicas": 2, "cpus_per_replica": 0.5},
        "spool": {"path": str(run.spool), "bytes": 8 << 20},
        "log": {"dir": str(folder / "logs"), "interval_seconds": 2},
    }
    run.config_path.write_text(yaml.safe_dump(settings))
    return run


def random_rows(count: int, seed: int = 0, longest: int = 60) -> list[dict[str, Any]]:
    """Rows of ids 100 and up; lower ones are for tests that mark prompts."""
    rng = np.random.default_rng(seed)
    return [
        {"id": f"p{i}", "input_ids": rng.integers(100, VOCAB, int(rng.integers(2, longest))).tolist()}
        for i in range(count)
    ]


def wait_until(done: Callable[[], bool], timeout: float, explain: Callable[[], str]) -> None:
    deadline = time.monotonic() + timeout
    while not done():
        if time.monotonic() > deadline:
            raise AssertionError(f"waited {timeout} s in vain:\n{explain()}")
        time.sleep(0.1)


def command_line(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
    except OSError:
        return ""


def parents() -> dict[int, int]:
    found = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError):
                found[int(entry.name)] = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
    return found


def descendants(roots: Sequence[int]) -> list[int]:
    tree = parents()
    found: list[int] = []
    queue = list(roots)
    while queue:
        parent = queue.pop()
        children = [pid for pid, p in tree.items() if p == parent]
        found += children
        queue += children
    return found


def processes_of(sessions: set[int], folder: str) -> list[str]:
    """Living processes in the drivers' sessions, or (Ray and SGLang make sessions of their own) whose
    environment names the run's folder."""
    found = []
    for pid in parents():
        if pid == os.getpid():
            continue
        try:
            stat = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
            environment = Path(f"/proc/{pid}/environ").read_bytes().decode(errors="replace")
        except OSError:
            continue
        if stat[0] != "Z" and (int(stat[3]) in sessions or (folder and folder in environment)):
            found.append(f"{pid} {command_line(pid)[:100]}")
    return found


def kill(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)


@contextlib.contextmanager
def ended(run: Run) -> Iterator[Run]:
    """Whatever the test did, nothing of the run outlives it."""
    try:
        yield run
    finally:
        for process in run.started:
            if process.poll() is None:
                process.terminate()
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(30)
            if process.poll() is None:
                process.kill()
                process.wait()
