"""Imports go one way, and what must stay light stays light."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[2] / "hsray"

# Lowest first. A module may import from its own level or below.
LEVELS = [
    {
        "errors",
        "records",
        "sites",
        "site_storage",
        "token_selection",
        "schema",
        "log",
        "log_files",
        "channel",
        "crash_points",
        "units",
        "reaper",
    },
    {
        "config",
        "store",
        "store_errors",
        "store_clients",
        "upload",
        "pages",
        "codecs",
        "payloads",
        "spool",
        "checkpoint",
        "ranges",
        "quickstart",
    },
    {
        "prompts",
        "resolve",
        "submit",
        "plan",
        "estimate",
        "plan_report",
        "ledger",
        "index",
        "shard",
        "reader",
        "prompt_states",
        "events",
        "history",
        "scheduler",
        "budget",
        "lease_queue",
    },
    {"status", "report", "verify", "export", "convert", "finish", "gc", "retry_dead", "training", "ray_data"},
    {
        "capture",
        "engine",
        "oracle",
        "selftest",
        "metrics",
        "replica_spec",
        "inflight",
        "probe",
        "replica",
        "cluster",
        "progress",
    },
    {"extract", "driver", "doctor", "repair", "testing"},
]
LEVEL = {name: number for number, names in enumerate(LEVELS) for name in names}
HEAVY = ("ray", "sglang", "torch", "transformers")


def modules() -> list[Path]:
    return sorted(p for p in PACKAGE.rglob("*.py") if "cpu_stand_ins" not in p.parts and p.name != "__init__.py")


def owner(path: Path) -> str:
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


def imported(path: Path) -> set[str]:
    """Names of hsray modules imported anywhere in the file, except for types alone."""
    names = set()
    tree = ast.parse(path.read_text(encoding="utf-8"))
    typing_only = {
        id(node)
        for guard in ast.walk(tree)
        if isinstance(guard, ast.If) and getattr(guard.test, "id", "") == "TYPE_CHECKING"
        for node in ast.walk(guard)
    }
    for node in ast.walk(tree):
        if id(node) in typing_only:
            continue
        if isinstance(node, ast.ImportFrom) and node.module and node.module.split(".")[0] == "hsray":
            parts = node.module.split(".")
            names |= {parts[1]} if len(parts) > 1 else {alias.name for alias in node.names}
        elif isinstance(node, ast.Import):
            names |= {a.name.split(".")[1] for a in node.names if a.name.startswith("hsray.")}
    return names & set(LEVEL)


def test_every_module_has_a_level() -> None:
    assert {owner(path) for path in modules()} <= set(LEVEL)


@pytest.mark.parametrize("path", modules(), ids=lambda p: str(p.relative_to(PACKAGE)))
def test_imports_go_down_only(path: Path) -> None:
    mine = LEVEL[owner(path)]

    upward = {name for name in imported(path) if LEVEL[name] > mine}

    assert not upward, f"{owner(path)} (level {mine}) imports {sorted(upward)} from above"


def test_only_two_modules_import_ray() -> None:
    users = set()
    for path in modules():
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            names = [a.name for a in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            if any(name.split(".")[0] == "ray" for name in names):
                users.add(owner(path))

    assert users == {"cluster", "ray_data"}


@pytest.mark.parametrize(
    ("module", "forbidden"),
    [
        ("hsray", (*HEAVY, "pyarrow", "obstore")),
        ("hsray.reader", HEAVY),
        ("hsray.verify", HEAVY),
        ("hsray.export", HEAVY),
        ("hsray.convert", HEAVY),
        ("hsray.repair", HEAVY),
        ("hsray.status.__main__", HEAVY),
        ("hsray.report.__main__", HEAVY),
        ("hsray.prompts", HEAVY),
        ("hsray.plan", HEAVY),
        ("hsray.ledger", HEAVY),
        ("hsray.scheduler", HEAVY),
        ("hsray.extract", (*HEAVY, "pyarrow", "obstore")),
        ("hsray.doctor.__main__", (*HEAVY, "pyarrow", "obstore")),
        ("hsray.doctor.collect", HEAVY),
        ("hsray.replica", ("ray", "sglang", "torch", "transformers")),
        ("hsray.cluster", HEAVY),
        ("hsray.capture.hooks", ("ray", "pyarrow", "sglang", "obstore")),
        ("hsray.capture.launch", ("ray", "pyarrow", "obstore", "sglang")),
        ("hsray.site_storage", (*HEAVY, "numpy", "pyarrow", "obstore")),
        ("hsray.codecs", (*HEAVY, "pyarrow", "obstore")),
        ("hsray.spool", (*HEAVY, "pyarrow", "obstore")),
        ("hsray.metrics", (*HEAVY, "pyarrow", "obstore", "pydantic")),
    ],
)
def test_a_fresh_import_stays_light(module: str, forbidden: tuple[str, ...]) -> None:
    code = f"import {module}, sys; print([m for m in {forbidden!r} if m in sys.modules])"

    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout

    assert loaded.strip() == "[]"
