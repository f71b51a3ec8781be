"""Tiny random models of every family hsray was tested on, with a tokenizer, and their reference hidden states.

One of them, gemma3, is here because SGLang captures it wrongly (hsray/capture/tested.py).

A directory made here looks to SGLang and transformers like a released checkpoint: config.json, float32
safetensors, a byte-level BPE tokenizer of 512 entries with a ChatML template. The weights are random but not
degenerate: norms are not one, biases are not zero, attention is neither flat nor one-hot, routers disagree, so
that a tensor from the wrong layer, norm, position or prompt does not compare equal by accident.

`python tests/tiny_models.py KIND DIR` builds one from the shell.
"""

import json
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    from transformers import PreTrainedModel

KINDS = (
    "llama",
    "mistral",
    "ministral3",
    "phi3",
    "arcee",
    "qwen2",
    "qwen3",
    "qwen3_moe",
    "glm4",
    "glm4_moe",
    "deepseek_v3",
    "kimi_k25",
    "gemma3",
)

VOCAB_SIZE = 512
PAD_ID, BOS_ID, EOS_ID = 0, 1, 2
CONTEXT_LENGTH = 4096

_SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
_CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)

# Only decides which 253 byte pairs become tokens; every text can be encoded.
_TOKENIZER_CORPUS = (
    "The harbour master counts the boats that come in before the storm and writes each name in the book.",
    "A prompt is read once, rendered with its chat template, and turned into the ids that the model will see.",
    "system\nYou are a patient assistant who answers in a few plain sentences.",
    "user\nWhat is the distance between the two stations, and how long does the train need?",
    "assistant\nThe line is 84 kilometres long. At 120 kilometres per hour that takes 42 minutes.",
    "def total(values):\n    result = 0\n    for value in values:\n        result += value\n    return result",
    "There are three things to check: the water, the temperature of the oven, and the time on the clock.",
    "When the tide turns, the current in the channel runs against the wind and the waves become steep.",
    "Le matin, les marchands ouvrent leurs boutiques et la place se remplit. Der Weg zum Bahnhof ist kurz.",
    "In 1974, 1985 and 2003 the river rose over its banks; the wall that stands there now was built in 2006.",
)


def make_tiny_model(kind: str, directory: Path, *, seed: int = 0, hidden_size: int = 64, num_layers: int = 8) -> Path:
    """Write a random float32 model of one family, with tokenizer, into `directory`.

    Args:
        kind: one of `KINDS`. `kimi_k25` has no image processor: start SGLang with `enable_multimodal=False`.
            Attention kernels that want heads of 64 need `hidden_size=256` for `qwen2`; the others have them.
        directory: where config.json, model.safetensors and the tokenizer files go; made if absent.
        seed: of all weights. Equal arguments give equal bytes.
        hidden_size: width H of the residual stream.
        num_layers: decoder layers L. The eagle3 preset needs 6; the default makes it `[2, 4, 5]`.

    Returns:
        `directory`.

    Raises:
        ValueError: an unknown kind.
    """
    if kind not in KINDS:
        raise ValueError(f"unknown kind {kind!r}; known: {', '.join(KINDS)}")
    directory.mkdir(parents=True, exist_ok=True)
    model = _random_model(kind, seed=seed, hidden_size=hidden_size, num_layers=num_layers)
    if kind == "kimi_k25":
        _save_kimi(model, directory)
    else:
        model.save_pretrained(directory)
        _add_to_config(directory, _SGLANG_KEYS.get(kind, {}))
    _save_tokenizer(directory)
    return directory


def reference_states(
    directory: Path, input_ids_list: Sequence[Sequence[int]]
) -> list[dict[str, npt.NDArray[np.float32]]]:
    """What transformers computes for each prompt alone, in float32 with eager attention on the CPU.

    Args:
        directory: a model made by `make_tiny_model`, or any model directory that transformers can load.
        input_ids_list: token ids, one sequence of T >= 1 ids per prompt.

    Returns:
        Per prompt, float32 `[T, H]` under every site name of the model: `resid_pre_1` .. `resid_pre_{L-1}`,
        `final_prenorm` (the input of the final norm) and `final_postnorm` (its output).
    """
    import torch

    model = _load_text_model(directory)
    seen: dict[str, torch.Tensor] = {}

    def before_norm(_module: torch.nn.Module, args: tuple[torch.Tensor, ...]) -> None:
        seen["final_prenorm"] = args[0]

    def after_norm(_module: torch.nn.Module, _args: tuple[torch.Tensor, ...], output: torch.Tensor) -> None:
        seen["final_postnorm"] = output

    norm = model.model.norm
    handles = [norm.register_forward_pre_hook(before_norm), norm.register_forward_hook(after_norm)]
    results = []
    try:
        for input_ids in input_ids_list:
            with torch.inference_mode():
                output = model(torch.tensor([list(input_ids)]), output_hidden_states=True, use_cache=False)
            tensors = {f"resid_pre_{i}": output.hidden_states[i] for i in range(1, len(output.hidden_states) - 1)}
            results.append({site: tensor[0].numpy().copy() for site, tensor in {**tensors, **seen}.items()})
    finally:
        for handle in handles:
            handle.remove()
    return results


# What SGLang reads from config.json and the transformers class does not write.
_DEEPSEEK_KEYS: dict[str, Any] = {"moe_layer_freq": 1, "topk_method": "noaux_tc", "scoring_func": "sigmoid"}
_SGLANG_KEYS: dict[str, dict[str, Any]] = {"deepseek_v3": _DEEPSEEK_KEYS}


def _random_model(kind: str, *, seed: int, hidden_size: int, num_layers: int) -> "PreTrainedModel":
    import torch
    import transformers

    sizes: dict[str, Any] = {
        "vocab_size": VOCAB_SIZE,
        "hidden_size": hidden_size,
        "intermediate_size": 4 * hidden_size,
        "num_hidden_layers": num_layers,
        # Eight heads of 64: every attention kernel of SGLang takes them, and so does any tp up to 8.
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 64,
        "max_position_embeddings": CONTEXT_LENGTH,
        "tie_word_embeddings": False,
        "pad_token_id": PAD_ID,
        "bos_token_id": BOS_ID,
        "eos_token_id": EOS_ID,
    }
    routed: dict[str, Any] = {
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 2 * hidden_size,
        "norm_topk_prob": True,
    }
    shared: dict[str, Any] = {"n_routed_experts": 8, "n_shared_experts": 1, "first_k_dense_replace": 1}
    config: transformers.PretrainedConfig
    if kind == "llama":
        config = transformers.LlamaConfig(**sizes)
    elif kind == "mistral":
        # SGLang's Mistral attends to everything, as the released ones since 0.2 do.
        config = transformers.MistralConfig(**sizes, sliding_window=None)
    elif kind == "ministral3":
        config = transformers.Ministral3Config(**sizes)
    elif kind == "phi3":
        config = transformers.Phi3Config(**sizes)
    elif kind == "arcee":
        config = transformers.ArceeConfig(**sizes)
    elif kind == "qwen2":
        # Qwen2 has no head size of its own, and SGLang on the CPU computes it from these two.
        sizes |= {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": hidden_size // 4}
        config = transformers.Qwen2Config(**sizes)
    elif kind == "qwen3":
        config = transformers.Qwen3Config(**sizes)
    elif kind == "qwen3_moe":
        config = transformers.Qwen3MoeConfig(**sizes, **routed, num_experts=8, decoder_sparse_step=1)
    elif kind == "glm4":
        config = transformers.Glm4Config(**sizes)
    elif kind == "gemma3":
        # SGLang ties Gemma's output projection to the embedding whatever config.json says.
        config = transformers.Gemma3TextConfig(**{**sizes, "tie_word_embeddings": True}, query_pre_attn_scalar=64)
    elif kind == "glm4_moe":
        config = transformers.Glm4MoeConfig(
            **sizes, **routed, **shared, n_group=1, topk_group=1, partial_rotary_factor=0.5, use_qk_norm=True
        )
    else:
        # Kimi K2.5's text model is a DeepSeek-V3 with one expert group. The latent sizes are the released ones,
        # the only ones the MLA kernels take.
        groups: dict[str, Any] = (
            {"n_group": 1, "topk_group": 1} if kind == "kimi_k25" else {"n_group": 2, "topk_group": 1}
        )
        latent: dict[str, Any] = {
            "q_lora_rank": 48,
            "kv_lora_rank": 512,
            "qk_nope_head_dim": 128,
            "qk_rope_head_dim": 64,
            "v_head_dim": 128,
        }
        yarn: dict[str, Any] = {
            "rope_type": "yarn",
            "rope_theta": 10000.0,
            "factor": 4.0,
            "original_max_position_embeddings": CONTEXT_LENGTH // 4,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "mscale": 1.0,
            "mscale_all_dim": 1.0,
        }
        del sizes["head_dim"]
        sizes["num_key_value_heads"] = sizes["num_attention_heads"]
        config = transformers.DeepseekV3Config(
            **sizes, **routed, **shared, **groups, **latent, routed_scaling_factor=2.5, rope_parameters=yarn
        )
    with torch.random.fork_rng(devices=[]):
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    _randomise(model, seed)
    return model


def _randomise(model: "PreTrainedModel", seed: int) -> None:
    import torch

    generator = torch.Generator().manual_seed(seed)

    def fill(tensor: torch.Tensor, mean: float, std: float) -> None:
        tensor.copy_(mean + std * torch.randn(tensor.shape, generator=generator))

    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "embed_tokens" in name:
                fill(parameter, 0.0, 1.0)
            elif parameter.dim() >= 2:
                # A gain of 1.25 over the fan-in: each layer adds about as much as it reads.
                fill(parameter, 0.0, 1.25 / parameter.shape[-1] ** 0.5)
            elif "norm" in name:
                fill(parameter, 1.0, 0.2)
            else:
                fill(parameter, 0.0, 0.1)
        for name, buffer in model.named_buffers():
            if "e_score_correction_bias" in name:
                fill(buffer, 0.0, 0.1)


def _add_to_config(directory: Path, extra: dict[str, Any]) -> None:
    path = directory / "config.json"
    config = json.loads(path.read_text(encoding="utf-8"))
    path.write_text(json.dumps({**config, **extra}, indent=2, sort_keys=True) + "\n", encoding="utf-8")


def _save_kimi(text_model: "PreTrainedModel", directory: Path) -> None:
    """Wrap a DeepSeek-V3 text model as the multimodal Kimi K2.5; its vision tower has a config and no weights."""
    from safetensors.torch import load_file, save_file

    with tempfile.TemporaryDirectory() as scratch:
        text_model.save_pretrained(scratch)
        weights = load_file(Path(scratch) / "model.safetensors")
        text_config = json.loads((Path(scratch) / "config.json").read_text(encoding="utf-8"))
    save_file(
        {f"language_model.{name}": tensor for name, tensor in weights.items()},
        directory / "model.safetensors",
        metadata={"format": "pt"},
    )
    config = {
        "architectures": ["KimiK25ForConditionalGeneration"],
        "model_type": "kimi_k25",
        "dtype": "float32",
        "pad_token_id": PAD_ID,
        "bos_token_id": BOS_ID,
        "eos_token_id": EOS_ID,
        "media_placeholder_token_id": VOCAB_SIZE - 1,
        "text_config": {**text_config, **_DEEPSEEK_KEYS},
        "vision_config": {
            "model_type": "kimi_k25",
            "hidden_size": 64,
            "num_hidden_layers": 1,
            "num_attention_heads": 2,
            "intermediate_size": 128,
            "vt_hidden_size": 64,
            "vt_num_hidden_layers": 1,
            "vt_num_attention_heads": 2,
            "vt_intermediate_size": 128,
            "text_hidden_size": text_config["hidden_size"],
            "mm_hidden_size": 64,
            "init_pos_emb_height": 8,
            "init_pos_emb_width": 8,
        },
    }
    (directory / "config.json").write_text(json.dumps(config, indent=2, sort_keys=True) + "\n", encoding="utf-8")


def _load_text_model(directory: Path) -> "PreTrainedModel":
    from safetensors.torch import load_file, save_file

    config = json.loads((directory / "config.json").read_text(encoding="utf-8"))
    if config["model_type"] != "kimi_k25":
        return _load_eager(directory)
    with tempfile.TemporaryDirectory() as scratch:
        weights = load_file(directory / "model.safetensors")
        text_weights = {n.removeprefix("language_model."): w for n, w in weights.items()}
        save_file(text_weights, Path(scratch) / "model.safetensors", metadata={"format": "pt"})
        (Path(scratch) / "config.json").write_text(json.dumps(config["text_config"]), encoding="utf-8")
        return _load_eager(Path(scratch))


def _load_eager(directory: Path) -> "PreTrainedModel":
    import torch
    from transformers import AutoModelForCausalLM

    # Eager experts too: the grouped matrix product that is otherwise chosen is another implementation to trust.
    model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(
        directory,
        dtype=torch.float32,
        attn_implementation="eager",
        experts_implementation="eager",
        local_files_only=True,
    )
    return model


def _save_tokenizer(directory: Path) -> None:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=list(_SPECIAL_TOKENS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    bpe.train_from_iterator(_TOKENIZER_CORPUS, trainer)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=bpe,
        pad_token=_SPECIAL_TOKENS[PAD_ID],
        bos_token=_SPECIAL_TOKENS[BOS_ID],
        eos_token=_SPECIAL_TOKENS[EOS_ID],
        model_max_length=CONTEXT_LENGTH,
    )
    tokenizer.chat_template = _CHAT_TEMPLATE
    tokenizer.save_pretrained(directory)


if __name__ == "__main__":
    if len(sys.argv) != 3 or sys.argv[1] not in KINDS:
        sys.exit(f"usage: python tests/tiny_models.py {{{','.join(KINDS)}}} DIR")
    print(make_tiny_model(sys.argv[1], Path(sys.argv[2])))
