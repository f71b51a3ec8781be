"""Runs cases, one process each, and makes the table."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterable
from importlib.metadata import version
from pathlib import Path

import numpy as np
import torch

from hsray.capture.cpu import cpu_environment
from hsray.records import JsonDict
from tests.matrix.cases import Case
from tests.matrix.prompts import matrix_prompts
from tests.tiny_models import make_tiny_model, reference_states

ROOT = Path(__file__).parents[2]
CASE_SECONDS = 300
# Of each process. Matrices have 64 columns: a second thread would spend its time waiting for the first.
THREADS = 1
COLUMNS = ("case", "sglang", "worst error", "alone", "steps", "cut", "together", "ranks", "seconds", "verdict")


def prepare_family(family: str, folder: Path) -> Path:
    """The family's model and what transformers says of every prompt, made once under `folder`."""
    mine = folder / family
    reference = mine / "reference.npz"
    if not reference.exists():
        model = make_tiny_model(family, mine / "model")
        prompts = matrix_prompts()
        threads = torch.get_num_threads()
        torch.set_num_threads(THREADS)
        try:
            states = reference_states(model, [prompt.input_ids.tolist() for prompt in prompts])
        finally:
            torch.set_num_threads(threads)
        arrays = {
            f"{prompt.row}/{site}": tensor
            for prompt, by_site in zip(prompts, states, strict=True)
            for site, tensor in by_site.items()
        }
        np.savez(reference, **arrays)  # type: ignore[arg-type]
    return mine


def run_in_process(case: Case, folder: Path) -> JsonDict:
    """Run one case under `folder`; an engine that fails is a result with a problem."""
    started = time.monotonic()
    mine = folder / case.name
    shutil.rmtree(mine, ignore_errors=True)
    mine.mkdir(parents=True)
    failure: str | None = None
    try:
        model_folder = prepare_family(case.family, folder / "models")
    except Exception as err:  # noqa: BLE001 - one family must not end the matrix
        return _failed(case, f"no reference: {type(err).__name__}: {err}", started)
    environment = dict(os.environ)
    cpu_environment(environment)
    environment["OMP_NUM_THREADS"] = str(THREADS)
    with (mine / "log").open("w") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", "tests.matrix.case", json.dumps(case.to_json()), str(model_folder), str(mine)],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            cwd=ROOT,
            env=environment,
            start_new_session=True,
        )
        try:
            if process.wait(CASE_SECONDS) != 0:
                failure = f"the process ended with {process.returncode}: {_last_errors(mine)}"
        except subprocess.TimeoutExpired:
            failure = f"not done after {CASE_SECONDS} s"
        finally:
            _kill_session(process)
    if failure is not None:
        return _failed(case, failure, started)
    result: JsonDict = json.loads((mine / "result.json").read_text())
    return {**result, "sglang_version": version("sglang"), "seconds": round(time.monotonic() - started, 1)}


def table_row(result: JsonDict) -> str:
    problems = result["problems"]
    if "errors" not in result:
        verdict = "; ".join(problems) or f"refused, as it must be: {result['refusal']}"
        values = [result["name"], result["sglang_version"], *["-"] * 6, result["seconds"], verdict]
    else:
        values = [
            result["name"],
            result["sglang_version"],
            f"{result['worst_error']:.1e}",
            f"{result['alone_error']:.1e}",
            result["steps"],
            f"{result['split_prompts']} of {result['prompts']}",
            result["most_prompts_in_a_step"],
            result["leaders"],
            result["seconds"],
            "; ".join(problems) or ("ok" if result["tested"] else "ok, but not in hsray/capture/tested.py"),
        ]
    return "| " + " | ".join(str(value) for value in values) + " |"


def table_head() -> str:
    return f"| {' | '.join(COLUMNS)} |\n|{'---|' * len(COLUMNS)}"


def run_all(cases: Iterable[Case], folder: Path, results_file: Path) -> list[JsonDict]:
    """Run `cases` one after another, print a row for each, and write all results as JSON."""
    print(table_head(), flush=True)
    results = []
    for case in cases:
        why_not = case.why_not_on(version("sglang"))
        if why_not is not None:
            print(f"not run: {case.name}: {why_not}", flush=True)
            continue
        results.append(run_in_process(case, folder))
        print(table_row(results[-1]), flush=True)
        results_file.write_text(json.dumps(results, indent=1))
    return results


def _failed(case: Case, problem: str, started: float) -> JsonDict:
    seconds = round(time.monotonic() - started, 1)
    return {**case.to_json(), "sglang_version": version("sglang"), "seconds": seconds, "problems": [problem]}


def _last_errors(folder: Path) -> str:
    """The first exception of the replica's and SGLang's log, and the last, which is the replica's own."""
    logs = [folder / "log", *sorted((folder / "logs").glob("*.log"))]
    lines = [line for log in logs for line in log.read_text(errors="replace").splitlines()]
    errors = [line.strip()[:300] for line in lines if re.match(r"[\w.]*(Error|Exception|UnsupportedModel)\b", line)]
    return " ... ".join(dict.fromkeys([*errors[:1], *errors[-1:]])) or f"see {folder}"


def _kill_session(process: "subprocess.Popen[bytes]") -> None:
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:
        pass
    process.wait()
