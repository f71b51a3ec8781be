"""Everything hsray knows about the insides of SGLang and its models: the one file to change for a new version.

The stable surface from 0.5.12 to 0.5.23 is: `capture_aux_hidden_states` on the ForCausalLM that owns a
`logits_processor`, `layers_to_capture` (or a per-layer setter) and `norm` on its inner `.model`, and the
arguments of `LogitsProcessor.forward`. Index i is the input of layer i, Hugging Face `hidden_states[i]`.
`set_eagle3_layers_to_capture` of the ForCausalLM is not used: whether it adds one depends on the family.
"""

from collections.abc import Sequence
from typing import Any

import torch

from hsray.capture.tested import untested


class UnsupportedModel(RuntimeError):
    """The model has no capture path, or not the one its site list needs. The message names the class."""


def check_tested(sglang_version: str, model_class: str, allow_untested: bool) -> bool:
    """Whether version and class were tested. Raises UnsupportedModel if not, unless allowed."""
    problem = untested(sglang_version, model_class)
    if problem is not None and not allow_untested:
        raise UnsupportedModel(problem)
    return problem is None


def find_capture_owner(model: torch.nn.Module) -> Any:
    """The ForCausalLM that owns the aux capture flag; it may sit inside a multimodal wrapper."""
    queue: list[torch.nn.Module] = [model]
    seen: set[int] = set()
    while queue:
        module = queue.pop(0)
        if id(module) in seen:
            continue
        seen.add(id(module))
        if hasattr(module, "capture_aux_hidden_states") and hasattr(module, "logits_processor"):
            return module
        for name in ("language_model", "model", "thinker", "text_model"):
            inner = getattr(module, name, None)
            if isinstance(inner, torch.nn.Module):
                queue.append(inner)
    raise UnsupportedModel(
        f"{type(model).__name__} has no aux hidden-state capture in this SGLang: no module with "
        "capture_aux_hidden_states and logits_processor was found in it"
    )


def num_layers(owner: Any) -> int:
    config = owner.config
    return int(getattr(config, "text_config", config).num_hidden_layers)


def enable_aux_capture(owner: Any, indices: Sequence[int]) -> None:
    """Make the model hand its residual stream at `indices` to the LogitsProcessor, in ascending order.

    Raises UnsupportedModel for indices outside 1 .. L-1 (0 crashes llama; L is dropped in silence by most).
    """
    layers = num_layers(owner)
    if list(indices) != sorted(set(indices)) or not all(1 <= i < layers for i in indices):
        raise UnsupportedModel(f"capture indices must ascend within 1 .. {layers - 1}: {list(indices)}")
    inner = owner.model
    if not hasattr(inner, "layers_to_capture") and not hasattr(inner, "set_eagle3_layers_to_capture"):
        raise UnsupportedModel(f"{type(inner).__name__} has neither layers_to_capture nor its setter")
    owner.capture_aux_hidden_states = True
    if hasattr(inner, "set_eagle3_layers_to_capture"):  # Qwen MoE keeps a flag on each layer
        inner.set_eagle3_layers_to_capture(list(indices))
    else:
        inner.layers_to_capture = list(indices)


def final_norm(owner: Any) -> torch.nn.Module:
    """The final norm module, whose second output is the residual stream before it."""
    norm = getattr(owner.model, "norm", None)
    if not isinstance(norm, torch.nn.Module):
        raise UnsupportedModel(f"{type(owner.model).__name__} has no module named norm")
    return norm


def unpack_aux(aux: Any, count: int, hidden_size: int) -> list[torch.Tensor]:
    """Aux states as `count` contiguous tensors `[rows, hidden_size]`.

    SGLang hands over a list, or (DeepSeek) one packed `[rows, count * hidden_size]` tensor. The packed form
    is split with one device copy: a strided device-to-host copy would be staged synchronously.
    """
    if isinstance(aux, torch.Tensor):
        if aux.shape[-1] != count * hidden_size:
            raise UnsupportedModel(f"packed aux states are {tuple(aux.shape)}, expected width {count} x {hidden_size}")
        return list(aux.view(-1, count, hidden_size).transpose(0, 1).contiguous().unbind(0))
    states = list(aux)
    if len(states) != count:
        raise UnsupportedModel(f"the model delivered {len(states)} aux states, {count} were asked for")
    return [state.contiguous() for state in states]


def is_capture_leader() -> bool:
    """True on the one rank of each attention group that holds full rows and copies them out."""
    try:
        from sglang.srt.runtime_context import get_parallel
    except ImportError:  # up to 0.5.14
        from sglang.srt.layers.dp_attention import get_attention_tp_rank

        return int(get_attention_tp_rank()) == 0
    parallel = get_parallel()
    return parallel.attn_tp_rank == 0 and getattr(parallel, "attn_cp_rank", 0) == 0
