"""An independent answer to "is this the stream that enters layer i?": transformers runs layer i alone.

Given captured inputs of a decoder layer, one layer's weights from the checkpoint and transformers' own code give,
in float32 on the CPU, what must have been captured one layer further on. Nothing of SGLang takes part, a wrong
index cannot pass (another layer has other weights), and one layer fits into memory where the model does not. From
the token ids themselves, the embedding and layer 0 give `resid_pre_1`, which ties the rows to the prompt.
"""

import copy
import importlib
import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from hsray.checkpoint import ModelFacts, tensor_names
from hsray.sites import FINAL_PRENORM

# In float32. A dense layer of a 70B model has 3.4 GB; a DeepSeek-V3 expert layer 45 GB.
MAX_LAYER_BYTES = 8 << 30
# Layers looked at when many sites are captured: each costs reading its weights.
MAX_LAYERS = 6
_FLOAT_DTYPES = ("F32", "F16", "BF16")


@dataclass(frozen=True, slots=True)
class OraclePlan:
    """Which layers can be checked, and why others cannot.

    Attributes:
        layers: layer indices i; the input of i must give the input of i + 1 (the final residual stream for the
            last). Layer 0 starts from the token ids.
        skipped: reasons, each a sentence, for the log.
    """

    layers: tuple[int, ...]
    skipped: tuple[str, ...]

    def sites(self, num_layers: int) -> tuple[str, ...]:
        """Sites that the check needs, in forward order."""
        inputs = {i for layer in self.layers for i in (layer, layer + 1) if 0 < i < num_layers}
        last = (FINAL_PRENORM,) if num_layers - 1 in self.layers else ()
        return (*(f"resid_pre_{i}" for i in sorted(inputs)), *last)


def plan_oracle(model_path: str | Path, facts: ModelFacts, sites: Sequence[str]) -> OraclePlan:
    """Choose the layers: those that read a residual site among `sites`, and layer 0."""
    indices = [int(site.removeprefix("resid_pre_")) for site in sites if site.startswith("resid_pre_")]
    if not indices:
        return OraclePlan((), ())
    skipped: list[str] = []
    if len(indices) > MAX_LAYERS:
        chosen = [indices[round(k * (len(indices) - 1) / (MAX_LAYERS - 1))] for k in range(MAX_LAYERS)]
        skipped.append(f"{len(indices) - MAX_LAYERS} of {len(indices)} residual sites, to save time")
        indices = chosen
    names = tensor_names(model_path)
    layers = []
    for layer in [0, *indices]:
        problem = _problem(names, layer)
        if problem is None:
            layers.append(layer)
        else:
            skipped.append(f"layer {layer}: {problem}")
    return OraclePlan(tuple(layers), tuple(skipped))


def _problem(names: dict[str, tuple[str, int]], layer: int) -> str | None:
    tensors = {name: info for name, info in names.items() if _layer_key(name, layer) is not None}
    if not tensors:
        return "the checkpoint has no safetensors of it"
    if layer == 0 and not any(name.endswith("embed_tokens.weight") for name in names):
        return "the checkpoint has no token embedding"
    quantised = sorted({dtype for dtype, _ in tensors.values() if dtype not in _FLOAT_DTYPES})
    if quantised:
        return f"its weights are quantised ({', '.join(quantised)})"
    nbytes = 4 * sum(count for _, count in tensors.values())
    if nbytes > MAX_LAYER_BYTES:
        return f"its weights take {nbytes / 1e9:.0f} GB in float32"
    return None


def _layer_key(name: str, layer: int) -> str | None:
    """What follows `layers.<layer>.` in a tensor name of the text model."""
    match = re.fullmatch(rf"(?:.*\.)?layers\.{layer}\.(.+)", name)
    return match[1] if match and "vision" not in name else None


class LayerOracle:
    """One decoder layer in transformers. Reads its weights when made; drop it to free them.

    Raises whatever transformers raises on a model it cannot build; the caller reports that as not checked.
    """

    def __init__(self, model_path: str | Path, layer: int, input_ids: Sequence[int] = ()) -> None:
        """`input_ids`: for layer 0, every token id that will be asked for."""
        transformers = importlib.import_module("transformers")
        torch = importlib.import_module("torch")
        self.layer = layer
        self._torch = torch
        config = _one_layer(_text_config(transformers, Path(model_path)), layer)
        self._token_rows = {token: row for row, token in enumerate(sorted(set(input_ids)))}
        weights = self._weights(Path(model_path), layer)
        config.vocab_size = max(1, len(self._token_rows))
        # Ids outside the shortened vocabulary.
        for special in ("pad_token_id", "bos_token_id", "eos_token_id"):
            setattr(config, special, None)
        config.tie_word_embeddings = False
        model_class = transformers.MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
        transformers.utils.logging.disable_progress_bar()
        verbosity = transformers.utils.logging.get_verbosity()
        transformers.utils.logging.set_verbosity_error()  # the norm and the head are missing on purpose
        try:
            model = model_class.from_pretrained(
                None,
                config=config,
                state_dict=weights,
                dtype=torch.float32,
                attn_implementation="eager",
                experts_implementation="eager",
            )
        finally:
            transformers.utils.logging.set_verbosity(verbosity)
        self._body = model.model
        self._body.norm = torch.nn.Identity()

    def output(self, input_ids: Sequence[int], states: "np.ndarray[Any, Any] | None") -> "np.ndarray[Any, Any]":
        """What leaves the layer.

        Args:
            input_ids: the prompt, T ids.
            states: what enters, `[T, hidden]`; None for layer 0, which embeds the ids.

        Returns:
            float32 `[T, hidden]`.
        """
        torch = self._torch
        with torch.inference_mode():
            if states is None:
                rows = torch.tensor([[self._token_rows[token] for token in input_ids]])
                result = self._body(input_ids=rows, use_cache=False)
            else:
                embeds = torch.from_numpy(states.astype(np.float32))[None]
                result = self._body(inputs_embeds=embeds, use_cache=False)
        output: np.ndarray[Any, Any] = result.last_hidden_state[0].numpy()
        return output

    def _weights(self, path: Path, layer: int) -> dict[str, Any]:
        torch = self._torch
        safetensors = importlib.import_module("safetensors")
        weights: dict[str, Any] = {}
        for file in sorted(path.glob("*.safetensors")):
            with safetensors.safe_open(file, "pt") as tensors:
                for name in tensors.keys():  # noqa: SIM118 - not a dict
                    key = _layer_key(name, layer)
                    if key is not None:
                        weights[f"model.layers.0.{key}"] = tensors.get_tensor(name)
                    elif name.endswith("embed_tokens.weight") and "vision" not in name:
                        table = tensors.get_slice(name)
                        rows = [table[token : token + 1] for token in self._token_rows]
                        width = table.get_shape()[1]
                        weights["model.embed_tokens.weight"] = torch.cat(rows) if rows else torch.zeros(1, width)
        return weights


def _text_config(transformers: Any, path: Path) -> Any:
    raw = json.loads((path / "config.json").read_text(encoding="utf-8"))
    text = raw.get("text_config") or raw
    fields = {name: value for name, value in text.items() if name not in ("model_type", "auto_map")}
    # Kimi K2's text model is a DeepSeek-V3 under a name of its own.
    model_type = {"kimi_k2": "deepseek_v3"}.get(text["model_type"], text["model_type"])
    return transformers.AutoConfig.for_model(model_type, **fields)


def _one_layer(config: Any, layer: int) -> Any:
    """The configuration of a model that consists of this layer, as its layer 0."""
    config = copy.deepcopy(config)
    for name, value in list(vars(config).items()):
        if isinstance(value, list | tuple) and len(value) == config.num_hidden_layers:
            setattr(config, name, type(value)([value[layer]]))  # layer_types and the like
    dense = getattr(config, "first_k_dense_replace", None)
    if dense is not None:
        config.first_k_dense_replace = int(layer < dense)
    step = getattr(config, "decoder_sparse_step", None)
    if step:
        is_sparse = layer not in (config.mlp_only_layers or []) and (layer + 1) % step == 0
        config.mlp_only_layers, config.decoder_sparse_step = [] if is_sparse else [0], 1
    config.num_hidden_layers = 1
    return config
