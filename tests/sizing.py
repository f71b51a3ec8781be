"""Sizes of a run before it runs: the arithmetic behind docs/sizing.md and the headers of configs/.

What hsray itself computes is asked of hsray (sites, bytes per token, arena). The rest is counted from a model's
config.json, of which tests/model_configs/ holds the fields that matter.

`python -m tests.sizing` prints the header lines of every configuration and the tables of docs/sizing.md.
"""

import json
import math
import shutil
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

from hsray.capture.writer import MAX_STAGING_BYTES
from hsray.checkpoint import ModelFacts, read_facts
from hsray.config import Config, load_config
from hsray.estimate import SECONDS_PER_HOUR, Costs
from hsray.resolve import longest_prompt
from hsray.schema import ITEMSIZE, bytes_per_token
from hsray.sites import Site, resolve_sites
from hsray.spool import auto_arena_bytes
from hsray.units import format_bytes, format_seconds

ROOT = Path(__file__).parents[1]
MODEL_CONFIGS = ROOT / "tests" / "model_configs"
PLACEHOLDERS = ["prompts.path=/data/prompts.jsonl", "output.url=s3://bucket/run"]
# GPUs that a configuration is written for: what they are sold as, and how many a node has.
GPU_GB = {
    "kimi-k2.5-bw": 96,
    "deepseek-v3": 141,
    "qwen3-8b": 80,
    "qwen3-235b-a22b": 80,
    "llama-3.1-8b": 80,
    "llama-3.1-70b": 80,
    "gpt-oss-120b": 96,
    "gpt-oss-20b": 80,
}
GPUS_PER_NODE = 8
# What nvidia-smi shows of them: H100, RTX PRO 6000 Blackwell, H200.
GPU_MIB = {80: 81_559, 96: 97_887, 141: 143_771}
# Of a GPU's memory, what weights and KV cache may take where a configuration does not say; activations take the rest.
STATIC_FRACTION = 0.85


@dataclass(frozen=True)
class Parameters:
    """Weights of a model: experts that a router chooses from, and everything else."""

    routed: int
    other: int
    routed_bits: float
    other_bits: float

    @property
    def count(self) -> int:
        return self.routed + self.other

    @property
    def nbytes(self) -> int:
        return round((self.routed * self.routed_bits + self.other * self.other_bits) / 8)


def count_parameters(model: dict[str, Any]) -> Parameters:
    """Count the matrices; norms and biases are a thousandth of them. Multimodal wrappers count their tower, too."""
    vision = model.get("vision_config", {})
    text = model.get("text_config", model)
    hidden, layers = text["hidden_size"], text["num_hidden_layers"]
    heads, kv_heads = text["num_attention_heads"], text["num_key_value_heads"]
    if "kv_lora_rank" in text:
        latent, query = text["kv_lora_rank"], text["q_lora_rank"]
        nope, rope, value = text["qk_nope_head_dim"], text["qk_rope_head_dim"], text["v_head_dim"]
        attention = hidden * query + query * heads * (nope + rope) + hidden * (latent + rope)
        attention += latent * heads * (nope + value) + heads * value * hidden
    else:
        head = text.get("head_dim") or hidden // heads
        attention = 2 * hidden * head * (heads + kv_heads)
    experts = next((text[k] for k in ("n_routed_experts", "num_experts", "num_local_experts") if k in text), 0)
    dense_layers = text.get("first_k_dense_replace", 0) if experts else layers
    expert = 3 * hidden * text.get("moe_intermediate_size", text["intermediate_size"])
    moe_layers = layers - dense_layers
    other = layers * attention + dense_layers * 3 * hidden * text["intermediate_size"]
    other += moe_layers * (text.get("n_shared_experts", 0) * expert + experts * hidden)
    other += (1 if text.get("tie_word_embeddings") else 2) * text["vocab_size"] * hidden
    if vision:
        width, depth = vision["vt_hidden_size"], vision["vt_num_hidden_layers"]
        other += depth * (4 * width * width + 2 * width * vision["vt_intermediate_size"])
    routed_bits, other_bits = _bits(text.get("quantization_config", {}))
    return Parameters(moe_layers * experts * expert, other, routed_bits, other_bits)


def _bits(quantisation: dict[str, Any]) -> tuple[float, float]:
    """Bits per weight of routed experts and of the rest, scales included."""
    match quantisation.get("quant_method"):
        case None:
            return 16, 16
        case "compressed-tensors":  # a bf16 scale per group; attention and shared experts are left alone
            weights = quantisation["config_groups"]["group_0"]["weights"]
            return weights["num_bits"] + 16 / weights["group_size"], 16
        case "fp8":  # a float32 scale per block; embedding and lm_head, which stay bf16, are half a percent
            return 8 + 32 / math.prod(quantisation["weight_block_size"]), 8
        case "mxfp4":  # an 8-bit exponent per 32
            return 4 + 8 / 32, 16
        case other:
            raise ValueError(f"quant_method {other}")


def kv_bytes_per_token(model: dict[str, Any], tp_size: int) -> int:
    """bf16 KV cache per token on one GPU. A latent (MLA) cache is whole on every GPU; so is a head that cannot be
    split further."""
    text = model.get("text_config", model)
    if "kv_lora_rank" in text:
        values = text["kv_lora_rank"] + text["qk_rope_head_dim"]
    else:
        head = text.get("head_dim") or text["hidden_size"] // text["num_attention_heads"]
        values = 2 * max(1, text["num_key_value_heads"] // tp_size) * head
    return int(text["num_hidden_layers"] * values * 2)


def arena_bytes(shard_bytes: int, largest_prompt: int, replicas: int, tmpfs: int) -> int:
    """What a replica's arena gets of a tmpfs of `tmpfs` bytes under `spool.bytes: auto`."""
    with patch("shutil.disk_usage", return_value=SimpleNamespace(free=tmpfs)):
        return auto_arena_bytes("/tmp", shard_bytes, largest_prompt, replicas)


@dataclass(frozen=True)
class Sizes:
    """A configuration, with the model it is for."""

    name: str
    config: Config
    facts: ModelFacts
    model: dict[str, Any]

    @property
    def tp_size(self) -> int:
        return self.config.engine.tp_size

    @property
    def replicas_per_node(self) -> int:
        return GPUS_PER_NODE // self.tp_size

    @cached_property
    def sites(self) -> tuple[Site, ...]:
        return resolve_sites(self.config.capture.sites, self.facts.num_layers, self.config.capture.final)

    @cached_property
    def bytes_per_token(self) -> int:
        return bytes_per_token(len(self.sites), self.facts.hidden_size, self.config.capture.dtype)

    @cached_property
    def parameters(self) -> Parameters:
        return count_parameters(self.model)

    @property
    def longest_prompt(self) -> int:
        return longest_prompt(self.config, self.facts)

    @property
    def chunk(self) -> int:
        return int(self.config.engine.args["chunked_prefill_size"])

    @property
    def kv_tokens(self) -> int:
        """What the KV cache has to hold: the pool that is configured, or the longest prompt."""
        return int(self.config.engine.args.get("max_total_tokens") or self.longest_prompt)

    @property
    def kv_bytes_per_token(self) -> int:
        return kv_bytes_per_token(self.model, self.tp_size)

    @property
    def staging_bytes(self) -> int:
        return min(self.chunk * self.bytes_per_token, MAX_STAGING_BYTES)

    @cached_property
    def arena_bytes(self) -> int:
        """With enough tmpfs."""
        largest = self.longest_prompt * self.bytes_per_token
        return arena_bytes(self.config.output.shard_bytes, largest, self.replicas_per_node, 1 << 50)

    @cached_property
    def tmpfs_bytes(self) -> int:
        """The smallest tmpfs, in whole GB, on which every replica of a node gets that."""
        step = 1_000_000_000
        size = step
        largest = self.longest_prompt * self.bytes_per_token
        while self.arena_bytes > arena_bytes(
            self.config.output.shard_bytes, largest, self.replicas_per_node, size + 4 * 4096 * self.replicas_per_node
        ):
            size += step
        return size

    @property
    def gpu_bytes(self) -> float:
        """What the headers account for on one GPU: weights, KV cache, both staging buffers."""
        weights = self.parameters.nbytes / self.tp_size
        return weights + self.kv_tokens * self.kv_bytes_per_token + 2 * self.staging_bytes

    def header(self) -> Iterator[str]:
        """The lines that the configuration's header has to have."""
        gpu = GPU_GB[self.name]
        count, per_node = self.tp_size, self.replicas_per_node
        weights = self.parameters.nbytes
        yield f"GPUs     {count} x {gpu} GB per replica, {per_node} replica{'s' * (per_node > 1)} per node of 8"
        yield f"weights  {weights / 1e9:.1f} GB: {weights / count / 1e9:.1f} GB per GPU"
        kv = self.kv_bytes_per_token
        pool = f"{kv * self.kv_tokens / 1e9:.1f} GB for {self.kv_tokens:,} tokens"
        yield f"KV       {kv:,} bytes per token and GPU: {pool}"
        yield f"staging  2 x {self.staging_bytes / 1e6:.0f} MB on a GPU, for steps of {self.chunk:,} tokens"
        width = f"{len(self.sites)} sites x {self.facts.hidden_size:,} x {ITEMSIZE[self.config.capture.dtype]} bytes"
        yield f"states   {width} = {self.bytes_per_token:,} bytes per token"
        arena = self.arena_bytes / 1e9
        yield (
            f"spool    {arena:.1f} GB per replica, {arena * per_node:.1f} GB of memory per node; "
            f"a tmpfs of {self.tmpfs_bytes / 1e9:.0f} GB"
        )


@cache
def load_sizes(name: str) -> Sizes:
    """Sizes of `configs/<name>.yaml`, its placeholders filled in."""
    config = load_config(ROOT / "configs" / f"{name}.yaml", PLACEHOLDERS)
    model_name = Path(config.model.path).name
    model = json.loads((MODEL_CONFIGS / f"{model_name}.json").read_text())
    return Sizes(name, config, facts_of(model_name), model)


def facts_of(model_name: str) -> ModelFacts:
    """As `read_facts` reads them from a model directory."""
    with tempfile.TemporaryDirectory() as folder:
        directory = Path(folder) / model_name
        directory.mkdir()
        shutil.copy(MODEL_CONFIGS / f"{model_name}.json", directory / "config.json")
        return read_facts(directory)


def all_reduce_limit(facts: ModelFacts, bus_gb: float, tp_size: int) -> float:
    """Tokens/s of prefill at which all-reduces alone fill a bus of `bus_gb` GB/s, as nccl-tests count bus bandwidth:
    two a layer, each of hidden size in bf16, each byte of it moved 2 (n - 1) / n times."""
    moved = 2 * facts.num_layers * facts.hidden_size * 2 * 2 * (tp_size - 1) / tp_size
    return bus_gb * 1e9 / moved


@dataclass(frozen=True)
class Job:
    """An example of docs/sizing.md: so many tokens on so many nodes, whose replicas make `tokens_per_second` each."""

    sizes: Sizes
    num_tokens: int
    nodes: int
    tokens_per_second: float
    usd_per_node_hour: float

    @property
    def nbytes(self) -> int:
        return self.num_tokens * self.sizes.bytes_per_token

    @property
    def node_bytes_per_second(self) -> float:
        return self.tokens_per_second * self.sizes.replicas_per_node * self.sizes.bytes_per_token

    @property
    def hours(self) -> float:
        hours = Costs(self.nodes * self.sizes.replicas_per_node, self.tokens_per_second, 0.0).hours(self.num_tokens)
        assert hours is not None
        return hours

    def row(self) -> str:
        """A row of the table of examples."""
        objects = math.ceil(self.nbytes / self.sizes.config.output.shard_bytes)
        node_rate, rate = self.node_bytes_per_second, self.node_bytes_per_second * self.nodes
        cells = [
            f"`{self.sizes.name}`",
            f"{self.num_tokens / 1e6:,.1f}M",
            format_bytes(self.nbytes),
            f"{self.nodes} x {self.sizes.replicas_per_node}",
            f"{self.tokens_per_second / 1e3:,.0f}k",
            f"{node_rate / 1e9:.2f} GB/s, {node_rate * 8 / 1e9:.1f} Gbit/s",
            f"{rate / 1e9:.1f} GB/s",
            format_seconds(self.hours * SECONDS_PER_HOUR),
            f"{objects:,}",
            f"{self.nodes * self.hours * self.usd_per_node_hour:,.0f}",
            f"{self.nbytes / 1e9 * USD_PER_GB_MONTH:,.0f}",
        ]
        return f"| {' | '.join(cells)} |"


# As `python -m hsray.plan --price` has it.
USD_PER_GB_MONTH = 0.023
# Mean of the Kimi-K2.5 job that the examples are about: 10,000 prompts, 17.3 million tokens.
KIMI_PROMPTS, KIMI_TOKENS = 10_000, 17_300_000
# GB/s at 32 MB on 8 RTX PRO 6000 of a dual EPYC board, as reported: NCCL's own two channels, and eight.
BUS_GB = (22.2, 37.6)


def examples() -> list[Job]:
    """The rows of docs/sizing.md, one for each configuration; first the Kimi-K2.5 job, and a hundred of it."""

    def tokens(prompts: int) -> int:
        return prompts * KIMI_TOKENS // KIMI_PROMPTS

    kimi = load_sizes("kimi-k2.5-bw")
    return [
        Job(kimi, tokens(10_000), 1, 8_000, 20),
        Job(kimi, tokens(1_000_000), 20, 8_000, 20),
        Job(load_sizes("deepseek-v3"), tokens(100_000), 4, 20_000, 30),
        Job(load_sizes("qwen3-235b-a22b"), tokens(100_000), 4, 20_000, 25),
        Job(load_sizes("llama-3.1-70b"), tokens(100_000), 2, 8_000, 25),
        Job(load_sizes("qwen3-8b"), tokens(100_000), 1, 40_000, 25),
        Job(load_sizes("llama-3.1-8b"), tokens(100_000), 1, 40_000, 25),
        Job(load_sizes("gpt-oss-120b"), tokens(100_000), 1, 20_000, 20),
        Job(load_sizes("gpt-oss-20b"), tokens(100_000), 1, 40_000, 25),
    ]


def document_lines() -> Iterator[str]:
    """Lines and phrases of docs/sizing.md that hold figures."""
    for name in GPU_GB:
        sizes = load_sizes(name)
        yield (
            f"| `{name}` | {len(sizes.sites)} x {sizes.facts.hidden_size:,} x 2 | {sizes.bytes_per_token:,} | "
            f"{format_bytes(sizes.bytes_per_token * 1_000_000)} |"
        )
        weights = f"{sizes.parameters.nbytes / sizes.tp_size / 1e9:.1f} GB"
        yield (
            f"| `{name}` | {sizes.tp_size} x {GPU_GB[name]} GB | {weights} | "
            f"{sizes.kv_bytes_per_token:,} | 2 x {sizes.staging_bytes / 1e6:.0f} MB |"
        )
        yield (
            f"| `{name}` | {sizes.replicas_per_node} | {sizes.arena_bytes / 1e9:.0f} GB | "
            f"{sizes.arena_bytes * sizes.replicas_per_node / 1e9:.0f} GB | {sizes.tmpfs_bytes / 1e9:.0f} GB |"
        )
    for job in examples():
        yield job.row()
    kimi = load_sizes("kimi-k2.5-bw")
    states = KIMI_TOKENS * kimi.bytes_per_token
    yield f"17.3M x 57,344 = {format_bytes(states)} ({states / 2**30:.0f} GiB)"
    yield f"{states / KIMI_PROMPTS / 1e6:.0f} MB a prompt"
    rate = examples()[0].node_bytes_per_second / 1e9
    yield f"six shards of 1 GB are {kimi.arena_bytes / 1e9 / rate:.0f} s at {rate:.2f} GB/s"
    slow, fast = (all_reduce_limit(kimi.facts, bus, kimi.tp_size) for bus in BUS_GB)
    yield f"{BUS_GB[0]} GB/s are {slow / 1e3:.1f}k tokens/s"
    yield f"{BUS_GB[1]} GB/s are {fast / 1e3:.1f}k tokens/s"


if __name__ == "__main__":
    for config_name in GPU_GB:
        print(f"{config_name}:")
        for header_line in load_sizes(config_name).header():
            print(f"# {header_line}")
    print()
    for document_line in document_lines():
        print(document_line)
