"""The self-test and the checks of each prompt against a real capture that is wrong on purpose, over two ranks."""

import json
import os
import subprocess
import sys
from typing import Any

import pytest

from tests.mutants.engine import STATE_FAULTS
from tests.runs import ROOT

pytestmark = pytest.mark.alone

# What the message must speak of, so that a fault is not stopped by luck elsewhere.
STOPPED_BY = {
    "norms swapped": "norm(final_prenorm)",
    "postnorm is prenorm": "final_postnorm equals",
    "two aux sites swapped": "layer 0",
    "zero aux rows": "resid_pre_2 is all zeros at position 0",
    "zero final rows": "is all zeros at position",
    "constant aux rows": "resid_pre_2 is the same at every position",
    "constant final rows": "is the same at every position",
    "aux rows shifted by one": "layer 0",
    "final rows shifted by one": "lm_head",
    "aux rows of another request": "layer 0",
    "final rows of another request": "lm_head",
    "NaN in an aux row": "resid_pre_2 has NaN or infinity at position 0",
    "NaN in a final row": "has NaN or infinity at position 0",
    "layer off by one": "layer 0",
    "rank-local partial sums": "layer 0",
    "states of the step before": "layer 0",
}
REFUSED_WITH = {
    "NaN in an aux row": "NaN or infinity in resid_pre_2 at position 0",
    "NaN in a final row": "NaN or infinity in final_prenorm at position 0",
    "zero aux rows": "zeros in resid_pre_2 at position 0",
    "zero final rows": "zeros in final_prenorm at position 8",
    "other prompt ids": "the engine's prompt ids are not the ones that were sent",
}


@pytest.fixture(scope="module")
def seen(tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = tmp_path_factory.mktemp("mutants")
    done = subprocess.run(
        [sys.executable, "-m", "tests.mutants", str(folder)],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1"},
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads(done.stdout)


def test_a_right_capture_passes_every_check(seen: Any) -> None:
    assert seen["self_test"][""] == ""
    assert seen["lease"][""] == []
    assert any("layers 0, 2, 4" in line for line in seen["passed"])


def test_every_fault_is_tried(seen: Any) -> None:
    assert set(STOPPED_BY) == set(seen["self_test"]) - {""}
    assert set(STATE_FAULTS) <= set(STOPPED_BY)


@pytest.mark.parametrize("fault", STOPPED_BY)
def test_the_self_test_stops_the_replica(seen: Any, fault: str) -> None:
    assert STOPPED_BY[fault] in seen["self_test"][fault]


@pytest.mark.parametrize("fault", REFUSED_WITH)
def test_a_prompt_fails_with_site_and_position_not_the_run(seen: Any, fault: str) -> None:
    assert REFUSED_WITH[fault] in " ".join(seen["lease"][fault])
