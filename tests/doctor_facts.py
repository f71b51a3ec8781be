"""A node, a model and a configuration with which nothing is wrong, for tests that break one thing at a time."""

import dataclasses
import importlib
import os
import time
from typing import Any

from hsray.checkpoint import ModelFacts
from hsray.config import Config, make_config
from hsray.doctor.facts import (
    Disk,
    Gpu,
    InputFacts,
    Limit,
    ModelFiles,
    NodeFacts,
    RunFacts,
    SGLang,
    StoreFacts,
    Torch,
)
from hsray.doctor.subject import Subject
from hsray.errors import HsrayError
from hsray.schema import bytes_per_token
from hsray.site_storage import resolve_storage
from hsray.sites import resolve_sites

GIB = 1 << 30
MODEL = ModelFacts(
    name="Qwen3-8B",
    architecture="Qwen3ForCausalLM",
    model_type="qwen3",
    num_layers=36,
    hidden_size=4096,
    vocab_size=151_936,
    context_length=40_960,
    norm_eps=1e-6,
    norm_kind="rms",
    tie_word_embeddings=False,
)


def config(**sections: dict[str, Any]) -> Config:
    data: dict[str, Any] = {
        "model": {"path": "/models/Qwen3-8B"},
        "prompts": {"path": "/data/prompts.jsonl"},
        "output": {"url": "s3://bucket/run"},
        "engine": {"args": {"tp_size": 2}},
    }
    for name, changes in sections.items():
        data[name] = {**data.get(name, {}), **changes}
    return make_config(data)


def subject(known_longest: int = 0, model: ModelFacts = MODEL, **sections: dict[str, Any]) -> Subject:
    made = config(**sections)
    sites = resolve_sites(made.capture.sites, model.num_layers, made.capture.final)
    per_token = bytes_per_token(len(sites), model.hidden_size, made.capture.dtype)
    storage = resolve_storage(made.capture.codec, made.capture.tokens, sites, model.num_layers)
    return Subject(made, model, sites, per_token, longest=40_953, storage=storage, known_longest=known_longest)


def disk(path: str, filesystem: str = "ext4", total: int = 1000 * GIB, free: int = 900 * GIB, **changes: Any) -> Disk:
    return Disk(
        **{"path": path, "exists": True, "writable": True, **changes}, filesystem=filesystem, total=total, free=free
    )


def gpus(count: int = 8, **changes: Any) -> tuple[Gpu, ...]:
    healthy = Gpu(0, "NVIDIA H200", "580.159.03", 140 * GIB, 139 * GIB, (9, 0))
    return tuple(dataclasses.replace(healthy, **{"index": n, **changes}) for n in range(count))


def node(**changes: Any) -> NodeFacts:
    healthy = NodeFacts(
        host="n1",
        python="3.12.3",
        packages={"hsray": "0.1.0", "ray": "2.60.0", "sglang": "0.5.21", "torch": "2.11.0", "transformers": "5.12.1"},
        unmet=(),
        cpus=128,
        memory_total=2000 * GIB,
        memory_free=1900 * GIB,
        memory_limit=None,
        memory_used=0,
        open_files=Limit(1024, 1_048_576),
        locked_memory=Limit(8 << 20, 8 << 20),
        spool=disk("/dev/shm/hsray", "tmpfs"),
        shm=disk("/dev/shm", "tmpfs"),
        ray_temp=disk("/tmp/ray"),
        logs=disk("/tmp/hsray-logs"),
        arenas=(),
        ephemeral_ports=(32768, 60999),
        listening=frozenset({22}),
        interfaces=("lo", "eth0"),
        environment={"RAY_AUTH_MODE": "disabled"},
        raylets=(),
        orphans=(),
        has_nvidia_smi=True,
        gpu_error="",
        gpus=gpus(),
        gpu_processes=(),
        torch=Torch("2.11.0+cu130", "13.0", 8, ("sm_80", "sm_90", "sm_100", "sm_120")),
        sglang=SGLang("0.5.21", ("tp_size", "attention_backend", "chunked_prefill_size", "port")),
        model=ModelFiles("/models/Qwen3-8B", "", 5, 16 * GIB, {"BF16": 8 * GIB}, (), "0123456789ab"),
        store=StoreFacts("s3://bucket/run", seconds=0.2, skew=0.0, credentials=("AWS_ACCESS_KEY_ID",)),
        in_ray=False,
        auth_token=False,
        began=1000.0,
        ended=1010.0,
    )
    return dataclasses.replace(healthy, **changes)


def run_facts(**changes: Any) -> RunFacts:
    inputs = InputFacts(
        files=2,
        nbytes=10_000_000,
        has_template=True,
        rows=256,
        lengths=(100,) * 250,
        rejects={"too_long": (6, "a:1: x")},
    )
    healthy = RunFacts("", inputs, "", "", {"capture.sites": "resid_pre_2", "prompts.limit": "null"})
    return dataclasses.replace(healthy, **changes)


def inputs(**changes: Any) -> InputFacts:
    return dataclasses.replace(run_facts().inputs, **changes)


# What nodes of a Ray cluster are asked to do: they import it from here.


def where() -> tuple[str, str]:
    import ray

    return ray.get_runtime_context().get_node_id(), os.environ.get("RAY_RAYLET_PID", "")


def refuse() -> None:
    raise HsrayError("not here")


def lacking() -> None:
    importlib.import_module("no_such_package")


def linger() -> None:
    time.sleep(60)
