"""What is exported, read by the real loaders of SpecForge and speculators, with real states compared bit by bit."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from hsray.export import export_run
from tests.export_runs import make_export_run
from tests.runs import ROOT

LOADERS = Path(sys.prefix + "-loaders/bin/python")


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """URLs: the run, and its exports by name."""
    folder = tmp_path_factory.mktemp("exported")
    urls = {"run": make_export_run(folder)}
    for name, format_name, options in (
        ("specforge", "specforge", {}),
        ("dspark", "specforge", {"method": "dspark"}),
        ("speculators", "speculators", {}),
        ("vocabulary", "vocabulary", {"draft_vocab_size": 60}),
    ):
        urls[name] = str(folder / name)
        export_run(urls["run"], format_name, urls[name], **options)  # type: ignore[arg-type]
    return urls


def check(program: str, *arguments: str) -> dict[str, Any]:
    if not LOADERS.exists():
        missing = f"{LOADERS} is missing: run scripts/install --dev"
        (pytest.fail if os.environ.get("CI") else pytest.skip)(missing)
    command = [str(LOADERS), "-m", f"tests.loader_checks.{program}", *arguments]
    done = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, check=False, env={**os.environ, "HF_HUB_OFFLINE": "1"}
    )
    assert done.returncode == 0, done.stderr[-5000:]
    seen: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return seen


def test_specforge_reads_what_it_gets(exported: dict[str, str]) -> None:
    names = ("run", "specforge", "dspark", "vocabulary")

    seen = check("specforge_check", *(exported[name] for name in names))

    assert seen["version"] == "0.2.0"
    assert seen["eagle3"] == 12
    assert seen["dspark"] + len(seen["left_out"]) == 12
    assert 1 in seen["left_out"]  # a prompt of one token


def test_speculators_reads_what_it_gets(exported: dict[str, str]) -> None:
    names = ("run", "speculators", "vocabulary")

    seen = check("speculators_check", *(exported[name] for name in names))

    assert seen == {"version": "0.9.0", "items": 12}
