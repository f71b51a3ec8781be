import json
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import save_file

from hsray.checkpoint import apply_norm, final_norm_weight, find_tensor, lm_head_weight, model_fingerprint, read_facts
from hsray.errors import ConfigError

CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "num_hidden_layers": 4,
    "hidden_size": 8,
    "vocab_size": 16,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-6,
}


def write(path: Path, config: dict[str, Any], tensors: dict[str, "np.ndarray[Any, Any]"]) -> None:
    (path / "config.json").write_text(json.dumps(config))
    save_file(tensors, path / "model.safetensors")


def test_facts_are_read_through_a_multimodal_wrapper(tmp_path: Path) -> None:
    wrapper = {"architectures": ["KimiK25ForConditionalGeneration"], "model_type": "kimi_k25", "text_config": CONFIG}
    write(tmp_path, wrapper, {})

    facts = read_facts(tmp_path)

    assert (facts.architecture, facts.num_layers, facts.hidden_size) == ("KimiK25ForConditionalGeneration", 4, 8)


@pytest.mark.parametrize("missing", ["hidden_size", "num_hidden_layers", "vocab_size"])
def test_a_config_that_lacks_a_field_is_refused_by_name(tmp_path: Path, missing: str) -> None:
    write(tmp_path, {k: v for k, v in CONFIG.items() if k != missing}, {})

    with pytest.raises(ConfigError, match=missing):
        read_facts(tmp_path)


def test_a_directory_without_config_is_refused_with_advice(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"no config\.json"):
        read_facts(tmp_path)


def test_bfloat16_tensors_are_found_by_the_end_of_their_name(tmp_path: Path) -> None:
    norm = np.arange(8).astype(ml_dtypes.bfloat16)
    head = np.ones((16, 8), np.float32)
    write(
        tmp_path,
        CONFIG,
        {
            "language_model.model.norm.weight": norm,
            "language_model.lm_head.weight": head,
            "language_model.model.layers.0.self_attn.q_norm.weight": np.zeros(2, np.float32),
        },
    )

    found = final_norm_weight(tmp_path)

    assert found is not None
    assert np.array_equal(found, norm)
    assert find_tensor(tmp_path, "no_such") is None
    lm_head = lm_head_weight(tmp_path, tied=False)
    assert lm_head is not None
    assert lm_head.shape == (16, 8)


def test_a_tied_model_uses_its_embedding(tmp_path: Path) -> None:
    write(tmp_path, CONFIG, {"model.embed_tokens.weight": np.full((16, 8), 2.0, np.float32)})

    assert lm_head_weight(tmp_path, tied=False) is None
    head = lm_head_weight(tmp_path, tied=True)
    assert head is not None
    assert head[0, 0] == 2.0


def test_the_fingerprint_follows_config_and_weights(tmp_path: Path) -> None:
    write(tmp_path, CONFIG, {"a": np.zeros(4, np.float32)})
    first = model_fingerprint(tmp_path)
    assert model_fingerprint(tmp_path) == first

    write(tmp_path, CONFIG, {"a": np.zeros(5, np.float32)})
    other_weights = model_fingerprint(tmp_path)
    write(tmp_path, {**CONFIG, "rope_theta": 1.0}, {"a": np.zeros(4, np.float32)})
    other_config = model_fingerprint(tmp_path)

    assert other_weights["model.weights"] != first["model.weights"]
    assert other_weights["model.config"] == first["model.config"]
    assert other_config["model.config"] != first["model.config"]


def test_norms_match_their_definition() -> None:
    rng = np.random.default_rng(0)
    x, w = rng.standard_normal((3, 8)).astype(np.float32), rng.standard_normal(8).astype(np.float32)
    unit = x / np.sqrt((x**2).mean(axis=1, keepdims=True) + 1e-6)

    assert np.allclose(apply_norm(x, w, 1e-6, "rms"), unit * w)
    assert np.allclose(apply_norm(x, w, 1e-6, "rms_one_plus"), unit * (1 + w))
