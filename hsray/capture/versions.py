"""Everything hsray knows about the insides of SGLang and its models: the one file to change for a new version.

The stable surface from 0.5.12 to 0.5.23 is: `capture_aux_hidden_states` on the ForCausalLM that owns a
`logits_processor`, `layers_to_capture` (or a per-layer setter) and `norm` on its inner `.model`, and the
arguments of `LogitsProcessor.forward`. Index i is the input of layer i, Hugging Face `hidden_states[i]`.
`set_eagle3_layers_to_capture` of the ForCausalLM is not used: whether it adds one depends on the family.
"""

import functools
from collections.abc import Sequence
from typing import Any

import torch

from hsray.capture.tested import untested

_LAYER_FLAG = "_is_layer_to_capture"


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


def set_aux_capture(owner: Any, indices: Sequence[int]) -> None:
    """Make the model hand its residual stream at `indices`, and at no other layer, to the LogitsProcessor.

    May be called between any two forward passes; every rank must make the same call.

    Raises UnsupportedModel for indices outside 1 .. L-1 (0 crashes llama; L is dropped in silence by most).
    """
    layers = num_layers(owner)
    if list(indices) != sorted(set(indices)) or not all(1 <= i < layers for i in indices):
        raise UnsupportedModel(f"capture indices must ascend within 1 .. {layers - 1}: {list(indices)}")
    inner = owner.model
    if not hasattr(inner, "layers_to_capture") and not hasattr(inner, "set_eagle3_layers_to_capture"):
        raise UnsupportedModel(f"{type(inner).__name__} has neither layers_to_capture nor its setter")
    if hasattr(inner, "set_eagle3_layers_to_capture"):  # Qwen MoE keeps a flag on each layer, and only ever sets it
        for layer in inner.layers:
            if getattr(layer, _LAYER_FLAG, False):
                setattr(layer, _LAYER_FLAG, False)
        inner.set_eagle3_layers_to_capture(list(indices))
    else:
        inner.layers_to_capture = list(indices)


def deliver_states(owner: Any, hidden_size: int) -> None:
    """Wrap the forward of the model's body so that it always hands on `(postnorm, [aux ..., prenorm])`.

    The residual stream before the final norm is not among what SGLang hands on. Riding with the aux states it
    reaches the LogitsProcessor on every path: a recorded CUDA graph replays the body without its Python, but
    delivers all of its outputs. Where the norm is not called as a module, not-a-number stands for it.
    Packed aux states `[rows, K * hidden]` (DeepSeek) come apart as views.
    """
    inner = owner.model
    body_forward = inner.forward
    seen: list[torch.Tensor] = []

    def after_final_norm(_module: Any, args: Any, output: Any) -> None:
        # (normed, residual) from a fused add + norm; a norm of one input leaves the stream in that input.
        seen.append(output[1] if isinstance(output, tuple) else args[0])

    @functools.wraps(body_forward)
    def forward(*args: Any, **kwargs: Any) -> tuple[torch.Tensor, list[torch.Tensor]]:
        seen.clear()
        output = body_forward(*args, **kwargs)
        postnorm, aux = output if isinstance(output, tuple) else (output, [])
        if isinstance(aux, torch.Tensor):
            # Not -1: an idle data-parallel rank runs with no rows.
            aux = aux.view(*aux.shape[:-1], aux.shape[-1] // hidden_size, hidden_size).unbind(-2)
        return postnorm, [*aux, seen.pop() if seen else torch.full_like(postnorm, torch.nan)]

    final_norm(owner).register_forward_hook(after_final_norm)
    inner.forward = forward
    owner.capture_aux_hidden_states = True


def final_norm(owner: Any) -> torch.nn.Module:
    """The final norm module, whose second output is the residual stream before it."""
    norm = getattr(owner.model, "norm", None)
    if not isinstance(norm, torch.nn.Module):
        raise UnsupportedModel(f"{type(owner.model).__name__} has no module named norm")
    return norm


def run_eagerly(forward_batch: Any) -> None:
    """Keep this batch off recorded graphs: they only know the layers that were switched on when recording."""
    from sglang.srt.model_executor.forward_batch_info import CaptureHiddenMode

    # A graph recorded without hidden states cannot serve a batch that asks for all of them.
    forward_batch.capture_hidden_mode = CaptureHiddenMode.FULL


def is_capture_leader() -> bool:
    """True on the one rank of each attention group that holds full rows and copies them out."""
    try:
        from sglang.srt.runtime_context import get_parallel
    except ImportError:  # up to 0.5.14
        from sglang.srt.layers.dp_attention import get_attention_tp_rank

        return int(get_attention_tp_rank()) == 0
    parallel = get_parallel()
    return parallel.attn_tp_rank == 0 and getattr(parallel, "attn_cp_rank", 0) == 0


def step_rows(server_args: Any) -> int:
    """Most rows of one prefill step, as far as SGLang is told (a single longer prompt may exceed it)."""
    chunk = int(getattr(server_args, "chunked_prefill_size", None) or -1)
    return chunk if chunk > 0 else int(server_args.max_prefill_tokens)
