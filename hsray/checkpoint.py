"""What hsray reads from a model directory: facts, a fingerprint, and single tensors. No torch, no transformers.

Nested configurations (multimodal wrappers with a `text_config`) are read through. Tensors come as numpy views
over the memory-mapped safetensors files, so looking at one row of a 2 GB lm_head reads one row.
"""

import hashlib
import json
import math
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import ml_dtypes
import numpy as np

from hsray.errors import ConfigError

NormKind = Literal["rms", "rms_one_plus"]
# Gemma multiplies by (1 + weight).
_ONE_PLUS_NORMS = frozenset({"gemma", "gemma2", "gemma3", "gemma3_text"})
_SAFETENSORS_DTYPES: dict[str, Any] = {
    "F32": np.float32,
    "F16": np.float16,
    "BF16": ml_dtypes.bfloat16,
    "F64": np.float64,
}


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """What the rest of hsray must know about a model.

    `context_length` is in tokens; `norm_kind` says how the final norm uses its weight: `rms` multiplies by
    it, `rms_one_plus` by 1 + weight.
    """

    name: str
    architecture: str
    model_type: str
    num_layers: int
    hidden_size: int
    vocab_size: int
    context_length: int
    norm_eps: float
    norm_kind: NormKind
    tie_word_embeddings: bool


def _read_config(path: Path) -> dict[str, Any]:
    try:
        config = json.loads((path / "config.json").read_text(encoding="utf-8"))
    except FileNotFoundError as err:
        raise ConfigError(
            f"model.path: {path} has no config.json. hsray needs a local model directory, the same path on every "
            "node; download the model first (for example with `hf download`)"
        ) from err
    except (OSError, ValueError) as err:
        raise ConfigError(f"model.path: cannot read {path / 'config.json'}: {err}") from err
    if not isinstance(config, dict):
        raise ConfigError(f"model.path: {path / 'config.json'} is not a JSON object")
    return config


def read_facts(path: str | Path) -> ModelFacts:
    """Read config.json. Raises ConfigError naming model.path and the field that is missing."""
    path = Path(path)
    config = _read_config(path)
    nested = config.get("text_config")
    text: dict[str, Any] = nested if isinstance(nested, dict) else config

    def number(*names: str) -> Any:
        for name in names:
            for source in (text, config):
                if isinstance(source.get(name), int | float):
                    return source[name]
        raise ConfigError(f"model.path: {path / 'config.json'} has no {' or '.join(names)}")

    model_type = str(text.get("model_type", config.get("model_type", "")))
    return ModelFacts(
        name=path.resolve().name,
        architecture=str((config.get("architectures") or ["unknown"])[0]),
        model_type=model_type,
        num_layers=int(number("num_hidden_layers")),
        hidden_size=int(number("hidden_size")),
        vocab_size=int(number("vocab_size")),
        context_length=int(number("max_position_embeddings")),
        norm_eps=float(number("rms_norm_eps", "layer_norm_eps", "layer_norm_epsilon", "norm_eps")),
        norm_kind="rms_one_plus" if model_type in _ONE_PLUS_NORMS else "rms",
        tie_word_embeddings=bool(text.get("tie_word_embeddings", config.get("tie_word_embeddings", False))),
    )


def model_fingerprint(path: str | Path) -> dict[str, str]:
    """Hashes that change when the model does: of config.json, and of the weights' index and tensor headers.

    Reading every weight byte of a 600 GB checkpoint takes minutes; names, shapes, offsets and file sizes
    do not, and catch another revision of any published model. An edit of values in place is not seen.
    """
    path = Path(path)
    config_hash = hashlib.sha256((path / "config.json").read_bytes()).hexdigest()[:32]
    weights = hashlib.sha256()
    index = path / "model.safetensors.index.json"
    if index.exists():
        weights.update(index.read_bytes())
    for file in sorted(path.glob("*.safetensors")):
        weights.update(f"{file.name}:{file.stat().st_size}:".encode())
        weights.update(json.dumps(_header(file), sort_keys=True).encode())
    return {"model.config": config_hash, "model.weights": weights.hexdigest()[:32]}


def _header(file: Path) -> dict[str, Any]:
    with file.open("rb") as stream:
        length = int.from_bytes(stream.read(8), "little")
        header: dict[str, Any] = json.loads(stream.read(length))
    return header


def tensor_names(path: str | Path) -> dict[str, tuple[str, int]]:
    """Every tensor in the directory's safetensors files: its dtype as safetensors spells it, and its elements."""
    tensors = {}
    for file in sorted(Path(path).glob("*.safetensors")):
        for name, entry in _header(file).items():
            if name != "__metadata__":
                tensors[name] = (str(entry["dtype"]), math.prod(entry["shape"]))
    return tensors


def find_tensor(path: str | Path, pattern: str) -> "np.ndarray[Any, Any] | None":
    """The tensor whose name matches the regular expression to its end, as a read-only memory-mapped array.

    Returns None if the directory has no such tensor in safetensors, or holds it quantised. bfloat16 comes as
    `ml_dtypes.bfloat16`.
    """
    regex = re.compile(rf"(?:^|.*\.)(?:{pattern})$")
    for file in sorted(Path(path).glob("*.safetensors")):
        for name, entry in _header(file).items():
            if name == "__metadata__" or not regex.fullmatch(name):
                continue
            dtype = _SAFETENSORS_DTYPES.get(entry["dtype"])
            if dtype is None:
                return None
            with file.open("rb") as stream:
                base = 8 + int.from_bytes(stream.read(8), "little")
            start, _end = entry["data_offsets"]
            return np.memmap(file, dtype=dtype, mode="r", offset=base + start, shape=tuple(entry["shape"]))
    return None


def final_norm_weight(path: str | Path) -> "np.ndarray[Any, Any] | None":
    """Weight `[hidden]` of the final norm, or None if the checkpoint does not show it."""
    return find_tensor(path, r"model\.norm\.weight|model\.language_model\.norm\.weight")


def lm_head_weight(path: str | Path, tied: bool) -> "np.ndarray[Any, Any] | None":
    """Weight `[vocab, hidden]` of the output projection: `lm_head`, or the token embedding where tied."""
    head = find_tensor(path, r"lm_head\.weight")
    return find_tensor(path, r"embed_tokens\.weight") if head is None and tied else head


def apply_norm(
    states: "np.ndarray[Any, Any]", weight: "np.ndarray[Any, Any]", eps: float, kind: NormKind
) -> "np.ndarray[Any, Any]":
    """The final RMS norm in float32: `final_postnorm` from `final_prenorm`.

    Args:
        states: `[tokens, hidden]`, any float dtype.
        weight: `[hidden]`.
        eps, kind: from `ModelFacts` (or `hsray.json`).

    Returns:
        float32 `[tokens, hidden]`.
    """
    x = states.astype(np.float32)
    scale = weight.astype(np.float32) + (1.0 if kind == "rms_one_plus" else 0.0)
    normed: np.ndarray[Any, Any] = x / np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + eps) * scale
    return normed
