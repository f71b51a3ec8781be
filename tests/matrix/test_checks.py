"""The matrix's own checks see what they are there for. No engine: transformers' states stand in for captured ones."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from hsray.capture.tested import TESTED_MODELS, WRONG
from tests.matrix.case import (
    SITES,
    States,
    alone_problems,
    claim_problems,
    error_problems,
    load_reference,
    relative_errors,
)
from tests.matrix.cases import ABOVE, ALL, AT, BELOW, FAMILIES, VERSION, Case
from tests.matrix.prompts import EDGE_LENGTHS, edge_prompts, matrix_prompts
from tests.matrix.runner import prepare_family
from tests.matrix.watch import Steps, read_steps
from tests.tiny_models import KINDS, make_tiny_model

LENGTHS = [prompt.num_tokens for prompt in matrix_prompts()]


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> States:
    return load_reference(prepare_family("llama", tmp_path_factory.mktemp("families")))


def copy_of(states: States) -> States:
    return {row: {site: tensor.copy() for site, tensor in by_site.items()} for row, by_site in states.items()}


def test_equal_states_have_no_problem(reference: States) -> None:
    errors = relative_errors(copy_of(reference), reference)

    assert set(errors) == set(SITES)
    assert error_problems(errors, 0.0) == []


def _layer_off_by_one(states: States) -> None:
    for by_site in states.values():
        by_site["resid_pre_3"] = by_site["resid_pre_4"]


def _norm_swapped(states: States) -> None:
    for by_site in states.values():
        by_site["final_prenorm"], by_site["final_postnorm"] = by_site["final_postnorm"], by_site["final_prenorm"]


def _one_row_shifted(states: States) -> None:
    longest = max(states, key=lambda row: len(states[row]["resid_pre_1"]))
    states[longest]["resid_pre_1"][40:42] = states[longest]["resid_pre_1"][41:43]


def _one_value_not_a_number(states: States) -> None:
    states[0]["final_postnorm"][0, 0] = np.nan


def _a_little_too_far(states: States) -> None:
    states[0]["resid_pre_7"] *= 1 + 3e-5


@pytest.mark.parametrize(
    "mutate", [_layer_off_by_one, _norm_swapped, _one_row_shifted, _one_value_not_a_number, _a_little_too_far]
)
def test_wrong_states_are_a_problem(reference: States, mutate: Callable[[States], None]) -> None:
    states = copy_of(reference)
    mutate(states)

    assert error_problems(relative_errors(states, reference), 0.0)


def test_a_missing_prompt_is_an_error(reference: States) -> None:
    states = copy_of(reference)
    del states[3]

    with pytest.raises(KeyError, match=r"\[3\]"):
        relative_errors(states, reference)


def test_prompts_that_differ_when_they_are_alone_are_a_problem() -> None:
    assert error_problems(dict.fromkeys(SITES, 0.0), 1e-5)
    assert error_problems(dict.fromkeys(SITES, 0.0), float("nan"))


AS_CLAIMED = Steps(
    parts=tuple(-(-n // BELOW) for n in LENGTHS), most_prompts=3, leaders=1, num_steps=63, most_tokens=48
)


def test_a_batch_as_the_case_claims_has_no_problem() -> None:
    assert claim_problems(Case("llama"), LENGTHS, AS_CLAIMED) == []


@pytest.mark.parametrize(
    ("case", "steps"),
    [
        (Case("llama"), replace(AS_CLAIMED, parts=(1,) * len(LENGTHS))),
        (Case("llama"), replace(AS_CLAIMED, most_prompts=1)),
        (Case("llama"), replace(AS_CLAIMED, most_tokens=49)),
        (Case("deepseek_v3", tp=2, dp=2), AS_CLAIMED),
        (Case("llama", ABOVE), AS_CLAIMED),
        (Case("llama", -1), AS_CLAIMED),
    ],
    ids=["never cut", "one by one", "step too large", "one rank idle", "cut needlessly", "cut although uncut"],
)
def test_a_batch_that_is_not_what_the_case_claims_is_a_problem(case: Case, steps: Steps) -> None:
    assert claim_problems(case, LENGTHS, steps)


def test_a_prompt_alone_is_cut_where_its_length_says() -> None:
    def seen(parts: int) -> Steps:
        return replace(AS_CLAIMED, parts=(parts,))

    assert alone_problems(Case("llama"), [47, 48, 49, 96], [seen(1), seen(1), seen(2), seen(2)]) == []
    assert alone_problems(Case("llama"), [48, 49], [seen(2), seen(1)])


def test_the_prompts_hold_every_edge_and_long_shared_prefixes() -> None:
    prompts = matrix_prompts()

    assert [prompt.num_tokens for prompt in edge_prompts(prompts)] == list(EDGE_LENGTHS)
    assert {1, BELOW - 1, BELOW, BELOW + 1, 2 * BELOW, AT} <= set(LENGTHS)
    assert max(LENGTHS) == AT
    long = [tuple(prompt.input_ids[: 2 * BELOW]) for prompt in prompts if prompt.num_tokens > 2 * BELOW + 4]
    assert len(long) >= 8
    assert len(set(long)) == 1
    assert len({tuple(prompt.input_ids) for prompt in prompts}) == len(prompts)


def test_the_matrix_and_the_table_of_tested_classes_agree(tmp_path: Path) -> None:
    def model_class(family: str) -> str:
        model = make_tiny_model(family, tmp_path / family, num_layers=1)
        return str(json.loads((model / "config.json").read_text())["architectures"][0])

    assert {model_class(family) for family in FAMILIES} == set(TESTED_MODELS)
    assert {model_class(family) for family in KINDS if family not in FAMILIES} == set(WRONG)
    assert {case.family for case in VERSION} == {case.family for case in ALL} == set(KINDS)


def test_steps_are_read_batch_by_batch(tmp_path: Path) -> None:
    # Prompts 7 and 8 share a step; 9 comes alone, in two parts.
    lines = [[1, [[7, 3, 0, 3], [8, 9, 0, 5]]], [1, [[8, 9, 5, 4]]], [2, [[9, 6, 0, 4]]], [2, [[9, 6, 4, 2]]]]
    file = tmp_path / "steps.jsonl"
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))

    together, alone = read_steps(file, [[3, 9], [6]])

    assert together == Steps(parts=(1, 2), most_prompts=2, leaders=1, num_steps=2, most_tokens=8)
    assert alone == Steps(parts=(2,), most_prompts=1, leaders=1, num_steps=2, most_tokens=4)
    with pytest.raises(ValueError, match="every row"):
        read_steps(file, [[3, 9], [5]])
