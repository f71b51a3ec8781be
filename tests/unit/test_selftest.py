"""The self-test catches wrong captures: each fault is injected into right states and must be seen."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import save_file

from hsray.checkpoint import ModelFacts, apply_norm, read_facts
from hsray.errors import SelfTestError
from hsray.selftest import SelfTest, TestPrompt, make_test_prompts

SITES = ("resid_pre_2", "resid_pre_4", "final_prenorm")
HIDDEN, VOCAB, LAYERS = 32, 101, 6
States = dict[str, "np.ndarray[Any, Any]"]


@pytest.fixture
def model(tmp_path: Path) -> Path:
    rng = np.random.default_rng(1)
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "num_hidden_layers": LAYERS,
        "hidden_size": HIDDEN,
        "vocab_size": VOCAB,
        "max_position_embeddings": 512,
        "rms_norm_eps": 1e-5,
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    weights = {
        "model.norm.weight": rng.uniform(0.5, 1.5, HIDDEN).astype(np.float32),
        "lm_head.weight": rng.standard_normal((VOCAB, HIDDEN)).astype(np.float32),
    }
    save_file(weights, tmp_path / "model.safetensors")
    return tmp_path


@pytest.fixture
def facts(model: Path) -> ModelFacts:
    return read_facts(model)


@pytest.fixture
def self_test(model: Path, facts: ModelFacts) -> SelfTest:
    return SelfTest(model, facts, SITES, "float32")


def right_prompts(test: SelfTest) -> list[TestPrompt]:
    rng = np.random.default_rng(2)
    prompts = []
    assert test.norm_weight is not None
    assert test.head is not None
    for ids in make_test_prompts(VOCAB, 300):
        states: States = {s: rng.standard_normal((len(ids), HIDDEN)).astype(np.float32) for s in SITES}
        states["final_postnorm"] = apply_norm(states["final_prenorm"], test.norm_weight, test.facts.norm_eps, "rms")
        token = int((np.asarray(test.head) @ states["final_postnorm"][-1]).argmax())
        prompts.append(TestPrompt(ids, states, token))
    return prompts


def test_right_states_pass_every_check(self_test: SelfTest) -> None:
    report = self_test.check(right_prompts(self_test))

    assert len(report.passed) == 3
    assert report.skipped == []


def zero_row(states: States) -> None:
    states["resid_pre_4"][3] = 0


def constant_rows(states: States) -> None:
    states["resid_pre_4"][:] = states["resid_pre_4"][0]


def nan_row(states: States) -> None:
    states["resid_pre_2"][1, 5] = np.nan


def same_layer_twice(states: States) -> None:
    states["resid_pre_4"][:] = states["resid_pre_2"]


def swapped_norms(states: States) -> None:
    states["final_prenorm"], states["final_postnorm"] = states["final_postnorm"], states["final_prenorm"]


def shifted_rows(states: States) -> None:
    for site in ("final_prenorm", "final_postnorm"):
        states[site] = np.roll(states[site], 1, axis=0)


def partial_sum(states: States) -> None:
    # One of two tensor-parallel ranks' share of the last layer, before the all-reduce.
    states["final_prenorm"] *= 0.5
    states["final_prenorm"][:, ::2] += 0.3


def missing_site(states: States) -> None:
    del states["resid_pre_2"]


def wrong_length(states: States) -> None:
    states["resid_pre_2"] = states["resid_pre_2"][:-1]


FAULTS: list[tuple[Callable[[States], None], str]] = [
    (zero_row, "all zeros at position 3"),
    (constant_rows, "same at every position"),
    (nan_row, "NaN or infinity at position 1"),
    (same_layer_twice, "equals the site before it"),
    (swapped_norms, "differs from final_postnorm"),
    (shifted_rows, "are not the ones this prompt produced"),
    (partial_sum, "differs from final_postnorm"),
    (missing_site, "no states for resid_pre_2"),
    (wrong_length, "expected"),
]


@pytest.mark.parametrize(("fault", "says"), FAULTS, ids=[f.__name__ for f, _ in FAULTS])
def test_a_fault_in_the_capture_is_caught(self_test: SelfTest, fault: Callable[[States], None], says: str) -> None:
    prompts = right_prompts(self_test)
    fault(dict_of(prompts[2]))

    with pytest.raises(SelfTestError, match=says):
        self_test.check(prompts)


def dict_of(prompt: TestPrompt) -> States:
    assert isinstance(prompt.states, dict)
    return prompt.states


def test_rows_of_another_prompt_are_caught(self_test: SelfTest) -> None:
    prompts = right_prompts(self_test)
    mine, other = dict_of(prompts[3]), dict_of(prompts[4])
    n = min(len(mine["final_postnorm"]), len(other["final_postnorm"]))
    for site in mine:
        mine[site][-n:] = other[site][-n:]

    with pytest.raises(SelfTestError, match="are not the ones this prompt produced"):
        self_test.check(prompts)


def test_a_prenorm_nobody_asked_for_may_be_absent(model: Path, facts: ModelFacts) -> None:
    test = SelfTest(model, facts, ("resid_pre_2", "final_postnorm"), "float32")
    prompts = right_prompts(test)
    for prompt in prompts:
        dict_of(prompt)["final_prenorm"][:] = np.nan

    report = test.check(prompts)

    assert any("final_prenorm" in text for text in report.skipped)


def test_bfloat16_rounding_passes(model: Path, facts: ModelFacts) -> None:
    exact = SelfTest(model, facts, SITES, "float32")
    rounded = SelfTest(model, facts, SITES, "bfloat16")
    prompts = [
        TestPrompt(p.input_ids, {s: x.astype(ml_dtypes.bfloat16) for s, x in p.states.items()}, p.next_token)
        for p in right_prompts(exact)
    ]

    assert len(rounded.check(prompts).passed) == 3


def test_a_checkpoint_without_readable_tensors_is_said_to_be_unchecked(model: Path, facts: ModelFacts) -> None:
    prompts = right_prompts(SelfTest(model, facts, SITES, "float32"))
    (model / "model.safetensors").unlink()

    report = SelfTest(model, facts, SITES, "float32").check(prompts)

    assert len(report.passed) == 1
    assert len(report.skipped) == 2


def test_test_prompts_fit_small_engines() -> None:
    for limit in (1, 2, 6, 100, 10_000):
        prompts = make_test_prompts(VOCAB, limit)
        assert prompts
        assert all(1 <= len(p) <= limit for p in prompts)


def two_requests(noise: float) -> tuple[list[TestPrompt], list[TestPrompt]]:
    """States of one prompt by the run's layout and by the layer test's, a stream that each layer changes by a tenth.

    They differ by `noise` (relative), as two batches do.
    """
    rng = np.random.default_rng(3)
    stream = rng.standard_normal((40, HIDDEN)).astype(np.float32)
    seen: States = {}
    for layer in range(2, 6):
        seen[f"resid_pre_{layer}"] = stream
        stream = stream + np.float32(0.1) * rng.standard_normal(stream.shape).astype(np.float32)
    ran = {s: seen[s] + noise * rng.standard_normal(stream.shape).astype(np.float32) for s in SITES if s in seen}
    return [TestPrompt(list(range(40)), ran, 0)], [TestPrompt(list(range(40)), seen, 0)]


@pytest.mark.parametrize("noise", [0.0, 0.02, 0.07])
def test_two_requests_may_differ_as_deep_bfloat16_does(model: Path, facts: ModelFacts, noise: float) -> None:
    SelfTest(model, facts, SITES, "bfloat16")._check_same(*two_requests(noise))


def test_two_requests_with_other_rows_are_caught(model: Path, facts: ModelFacts) -> None:
    prompts, by_layer = two_requests(0.0)
    states = dict_of(prompts[0])
    states["resid_pre_4"][:] = np.roll(states["resid_pre_4"], 1, axis=0)

    with pytest.raises(SelfTestError, match=r"resid_pre_4 differs by .* between two requests with the same ids"):
        SelfTest(model, facts, SITES, "bfloat16")._check_same(prompts, by_layer)


def test_a_layout_that_delivers_the_neighbour_is_caught_whatever_the_noise(model: Path, facts: ModelFacts) -> None:
    prompts, by_layer = two_requests(0.05)
    states = dict_of(prompts[0])
    states["resid_pre_4"][:] += by_layer[0].states["resid_pre_5"] - by_layer[0].states["resid_pre_4"]

    with pytest.raises(SelfTestError, match="resid_pre_4 of one is nearer to resid_pre_5 of the other"):
        SelfTest(model, facts, SITES, "bfloat16")._check_same(prompts, by_layer)
