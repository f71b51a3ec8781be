"""One layer in transformers: it gives what the whole model gives, and says when it cannot be had."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from hsray import oracle
from hsray.checkpoint import read_facts
from hsray.errors import SelfTestError
from hsray.oracle import LayerOracle, OraclePlan, plan_oracle
from hsray.selftest import SelfTest, SelfTestReport, TestPrompt
from tests.tiny_models import VOCAB_SIZE, make_tiny_model, reference_states

SITES = ["resid_pre_1", "resid_pre_4", "resid_pre_7", "final_prenorm"]
FAMILIES = ["llama", "qwen2", "qwen3", "qwen3_moe", "glm4_moe", "deepseek_v3", "kimi_k25"]


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model("llama", tmp_path_factory.mktemp("llama"))


@pytest.mark.parametrize("family", FAMILIES)
def test_a_layer_alone_does_what_it_does_in_the_model(tmp_path: Path, family: str) -> None:
    model = make_tiny_model(family, tmp_path)
    facts = read_facts(model)
    ids = np.random.default_rng(0).integers(0, VOCAB_SIZE, 21).tolist()
    (states,) = reference_states(model, [ids])

    plan = plan_oracle(model, facts, SITES)

    assert plan == OraclePlan((0, 1, 4, 7), ())
    assert plan.sites(facts.num_layers) == (
        "resid_pre_1", "resid_pre_2", "resid_pre_4", "resid_pre_5", "resid_pre_7", "final_prenorm",
    )  # fmt: skip
    for layer in plan.layers:
        output = LayerOracle(model, layer, ids).output(ids, states.get(f"resid_pre_{layer}"))
        want = states.get(f"resid_pre_{layer + 1}", states["final_prenorm"])
        np.testing.assert_allclose(output, want, rtol=1e-5, atol=1e-5)


def test_without_residual_sites_there_is_nothing_to_check(llama: Path) -> None:
    assert plan_oracle(llama, read_facts(llama), ["final_prenorm"]) == OraclePlan((), ())


def test_many_sites_are_spread_and_the_rest_said(llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(oracle, "MAX_LAYERS", 3)

    plan = plan_oracle(llama, read_facts(llama), [f"resid_pre_{i}" for i in range(1, 8)])

    assert plan.layers == (0, 1, 4, 7)
    assert plan.skipped == ("4 of 7 residual sites, to save time",)


def test_quantised_large_and_absent_layers_are_named(
    llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    weights = load_file(llama / "model.safetensors")
    changed: dict[str, Any] = {}
    for name, tensor in weights.items():
        if "layers.4." in name:
            changed[name] = tensor.to(torch.int8)
        elif "layers.7." not in name and "embed_tokens" not in name:
            changed[name] = tensor
    save_file(changed, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text((llama / "config.json").read_text())

    plan = plan_oracle(tmp_path, read_facts(tmp_path), SITES)
    monkeypatch.setattr(oracle, "MAX_LAYER_BYTES", 1000)
    small = plan_oracle(tmp_path, read_facts(tmp_path), ["resid_pre_1"])

    assert plan.layers == (1,)
    assert plan.skipped == (
        "layer 0: the checkpoint has no token embedding",
        "layer 4: its weights are quantised (I8)",
        "layer 7: the checkpoint has no safetensors of it",
    )
    assert small.layers == ()
    assert "GB in float32" in small.skipped[1]


def test_a_model_unknown_to_transformers_is_skipped_not_failed(llama: Path, tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").symlink_to(llama / "model.safetensors")
    config = json.loads((llama / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "model_type": "never_heard_of"}))
    facts = read_facts(tmp_path)
    ids = [3, 4, 5]
    (states,) = reference_states(llama, [ids])
    report = SelfTestReport()

    prompt = TestPrompt(ids, states, 0)
    plan = plan_oracle(tmp_path, facts, SITES)
    SelfTest(tmp_path, facts, SITES, "float32").check_layers(plan, [prompt], [prompt], report)

    assert report.passed == []
    assert any("never_heard_of" in reason for reason in report.skipped)


@pytest.fixture(scope="module")
def right(llama: Path) -> list[TestPrompt]:
    rng = np.random.default_rng(5)
    prompts = [rng.integers(3, VOCAB_SIZE, n).tolist() for n in (2, 5, 64)]
    return [TestPrompt(ids, s, 0) for ids, s in zip(prompts, reference_states(llama, prompts), strict=True)]


def check(model: Path, prompts: list[TestPrompt], dtype: str) -> SelfTestReport:
    facts = read_facts(model)
    report = SelfTestReport()
    plan = plan_oracle(model, facts, SITES)
    SelfTest(model, facts, SITES, dtype).check_layers(plan, prompts, prompts, report)
    return report


def rounded(prompts: list[TestPrompt], scale: float) -> list[TestPrompt]:
    """With the noise of a bfloat16 engine: `scale` of the size of each state's rows, and an expert layer's flips."""
    rng = np.random.default_rng(0)
    noisy = []
    for prompt in prompts:
        states = {}
        for site, s in prompt.states.items():
            size = np.linalg.norm(s, axis=1, keepdims=True) / s.shape[1] ** 0.5
            states[site] = s + scale * size * rng.standard_normal(s.shape, dtype=np.float32)
            states[site][3::16] *= 1.5  # one row in sixteen went another way
        noisy.append(TestPrompt(prompt.input_ids, states, 0))
    return noisy


def test_rounding_of_bfloat16_passes_and_a_wrong_layer_does_not(llama: Path, right: list[TestPrompt]) -> None:
    noisy = rounded(right, 2**-8)

    assert any("layers 0, 1, 4, 7" in line for line in check(llama, noisy, "bfloat16").passed)
    for wrong in ("resid_pre_1", "resid_pre_4", "resid_pre_7"):
        index = int(wrong[-1])
        other = f"resid_pre_{index - 1 if index == 7 else index + 2}"
        mixed = [TestPrompt(p.input_ids, {**p.states, wrong: p.states[other]}, 0) for p in noisy]
        with pytest.raises(SelfTestError, match=r"layer \d of the checkpoint"):
            check(llama, mixed, "bfloat16")


def test_one_prompt_with_the_rows_of_another_is_enough(llama: Path, right: list[TestPrompt]) -> None:
    *short, last = rounded(right, 2**-8)
    turned = {site: s[::-1] for site, s in last.states.items()}

    with pytest.raises(SelfTestError, match="layer 0"):
        check(llama, [*short, TestPrompt(last.input_ids, turned, 0)], "bfloat16")


def test_two_requests_of_one_prompt_must_agree(llama: Path, right: list[TestPrompt]) -> None:
    facts = read_facts(llama)
    other = [TestPrompt(p.input_ids, {**p.states, "resid_pre_3": p.states["resid_pre_2"]}, 0) for p in right]

    with pytest.raises(SelfTestError, match="resid_pre_3 differs"):
        SelfTest(llama, facts, SITES, "bfloat16").check_layers(OraclePlan((), ()), other, right, SelfTestReport())
