"""The wrapper round `sglang.Engine`: arguments, environment, ports, submission. One engine per process.

`FIXED_ARGUMENTS` are what correctness depends on; they are set here and refused elsewhere. Everything else in
`engine.args` goes to SGLang verbatim. SGLang is imported when an engine is made, not before.
"""

import importlib
import os
import socket
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from hsray.capture.settings import CaptureSettings
from hsray.errors import ConfigError, EngineStartError

SGLANG_ENGINE = "hsray.engine:SGLangEngine"

# argument -> (value, why)
FIXED_ARGUMENTS: dict[str, tuple[Any, str]] = {
    "disable_radix_cache": (True, "a shared prefix would be served from the cache and its states never computed"),
    "skip_tokenizer_init": (True, "prompts are tokenized once, while planning"),
    "pp_size": (1, "layers of other pipeline stages cannot be captured"),
    "enable_two_batch_overlap": (False, "two-batch overlap skips the capture of hidden states"),
    "speculative_algorithm": (None, "draft and verify passes would be captured as if they were prompts"),
    # One idea under the names of different versions.
    "enable_prefill_context_parallel": (False, "prefill context parallelism splits the rows of a prompt over ranks"),
    "enable_prefill_cp": (False, "prefill context parallelism splits the rows of a prompt over ranks"),
    "dcp_size": (1, "context parallelism splits the rows of a prompt over ranks"),
    "enable_layernorm_sp": (False, "sequence-parallel norms split the rows of a prompt over ranks"),
    "attn_cp_size": (1, "context parallelism splits the rows of a prompt over ranks"),
    "enable_return_hidden_states": (False, "SGLang's own return path is up to 23 times slower than prefill"),
    "nnodes": (1, "one engine per node; use one replica per node instead"),
    "allow_auto_truncate": (False, "prompts are never cut in silence"),
}
# Not among these: whatever stores keys and values in fewer bits, and so changes every state after the first layer.
KV_CACHE_DTYPES = ("auto", "bf16", "bfloat16", "fp16", "float16", "float32")
# Set unless the user says otherwise.
DEFAULT_ARGUMENTS: dict[str, Any] = {
    "log_level": "info",
    "random_seed": 0,
    # For pure prefill of 8k to 16k tokens a step there is nothing to gain from graphs.
    "disable_cuda_graph": True,
    "skip_server_warmup": True,
    # Prompts are text; a multimodal wrapper would otherwise want its image processor.
    "enable_multimodal": False,
}
CPU_ARGUMENTS: dict[str, Any] = {
    "attention_backend": "torch_native",
    "dtype": "float32",
    # Otherwise SGLang sizes its KV pool by the machine's memory: gigabytes.
    "max_total_tokens": 20_000,
}
# A change of one of these in the middle of a run gives other numbers.
NUMBERS_DEPEND_ON = (
    "sglang_version",
    "model_class",
    "engine_dtype",
    "tp_size",
    "dp_size",
    "quantization",
    "kv_cache_dtype",
    "attention_backend",
    "chunked_prefill_size",
)
# hsray decides these per replica or from another key of the configuration.
_OWNED = {"model_path": "model.path", "trust_remote_code": "model.trust_remote_code", "rid": None, "nccl_port": None}


@dataclass(frozen=True, slots=True)
class EngineSpec:
    """What an engine is made of; picklable.

    `is_cpu` makes the engine run without SGLang's compiled kernels (see hsray/capture/cpu.py).
    """

    model_path: str
    trust_remote_code: bool = False
    args: Mapping[str, Any] = field(default_factory=dict)
    env: Mapping[str, str] = field(default_factory=dict)
    is_cpu: bool = False


@dataclass(frozen=True, slots=True)
class PrefillResponse:
    """What the engine said of one request: tokens it counted, tokens it generated, or why it refused."""

    prompt_tokens: int
    output_ids: tuple[int, ...]
    error: str | None = None


class PrefillEngine(Protocol):
    """What a replica needs of an engine; `hsray.testing.FakeEngine` is the other implementation."""

    max_prompt_tokens: int
    num_leaders: int
    facts: dict[str, str]

    async def prefill(self, rid: str, input_ids: Sequence[int], max_new_tokens: int = 0) -> PrefillResponse: ...

    def shutdown(self) -> None: ...


def check_arguments(args: Mapping[str, Any]) -> None:
    """Raise ConfigError for an `engine.args` entry that hsray owns or that correctness forbids."""
    aliases = {"tp": "tp_size", "pp": "pp_size", "dp": "dp_size"}
    for name, value in args.items():
        fixed = FIXED_ARGUMENTS.get(aliases.get(name, name))
        if fixed is not None and value != fixed[0]:
            raise ConfigError(f"engine.args.{name}: must be {fixed[0]!r}, because {fixed[1]}. Remove it")
        if name in _OWNED:
            owner = _OWNED[name]
            raise ConfigError(f"engine.args.{name} is set by hsray" + (f": use {owner}" if owner else ". Remove it"))
    check_kv_cache(str(args.get("kv_cache_dtype", "auto")))


def check_kv_cache(dtype: str) -> None:
    """Raise ConfigError for a quantised KV cache. SGLang may choose one itself, for a checkpoint or an attention
    backend that asks for it, so what it says after its start is checked as well."""
    if dtype.removeprefix("torch.") not in KV_CACHE_DTYPES:
        raise ConfigError(
            f"engine.args.kv_cache_dtype: {dtype} quantises keys and values, so that every state after the first layer "
            "is another than the model's. Set bfloat16"
        )


def free_port() -> int:
    """A TCP port nobody listens on now. SGLang binds it seconds later: a lost race is a failed start, retried."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def engine_arguments(spec: EngineSpec, known: Sequence[str]) -> dict[str, Any]:
    """Final arguments of `sglang.Engine`. `known` are the fields of this version's ServerArgs: a fixed argument
    that the version does not have yet cannot be switched on either, and is left out."""
    check_arguments(spec.args)
    merged: dict[str, Any] = {k: v for k, v in DEFAULT_ARGUMENTS.items() if k in known}
    if spec.is_cpu:
        merged.update({"device": "cpu", **{k: v for k, v in CPU_ARGUMENTS.items() if k in known}})
    merged.update(spec.args)
    merged.update({k: v for k, (v, _) in FIXED_ARGUMENTS.items() if k in known})
    merged.update(
        model_path=spec.model_path,
        trust_remote_code=spec.trust_remote_code,
        nccl_port=free_port(),
    )
    merged.setdefault("port", free_port())
    return merged


class SGLangEngine:
    """One `sglang.Engine` with capture. Make it on a thread that lives as long as the process: SGLang's
    children die with the thread that started them."""

    scheduler_function = "hsray.capture.launch:run_scheduler_process"
    """What runs in each scheduler process; spawn finds it by name."""

    def __init__(self, spec: EngineSpec, capture: CaptureSettings) -> None:
        """Start the engine; blocks until the model is loaded.

        Raises:
            ConfigError: an argument that SGLang does not know or that hsray refuses.
            EngineStartError: SGLang did not start.
        """
        os.environ.update(spec.env)
        os.environ.update(capture.to_environment())
        if spec.is_cpu:
            from hsray.capture.cpu import cpu_environment

            cpu_environment(os.environ)
        engine_module = importlib.import_module("sglang.srt.entrypoints.engine")
        known = known_arguments()
        arguments = engine_arguments(spec, known)
        unknown = unknown_arguments(arguments, known)
        if unknown:
            raise ConfigError(f"engine.args.{unknown[0]} is not an argument of this SGLang")
        capture_engine = type(
            "CaptureEngine",
            (engine_module.Engine,),
            {"run_scheduler_process_func": staticmethod(load_named(self.scheduler_function))},
        )
        try:
            self._engine = capture_engine(**arguments)
        except SystemExit as err:  # SGLang exits where another library would raise
            raise EngineStartError(f"SGLang ended while starting (exit code {err.code})") from err
        except Exception as err:
            raise EngineStartError(f"SGLang did not start: {type(err).__name__}: {err}") from err
        limit = getattr(self._engine.tokenizer_manager, "max_req_input_len", None)
        context = int(self._engine.tokenizer_manager.context_len)
        # The scheduler refuses a request of max_req_input_len tokens or more.
        self.max_prompt_tokens = min(context - 1, int(limit) - 1 if limit else context - 1)
        resolved = self._engine.server_args
        self.num_leaders = int(resolved.dp_size)
        self.facts = {
            name: str(getattr(resolved, name, ""))
            for name in (
                "tp_size",
                "dp_size",
                "dtype",
                "quantization",
                "kv_cache_dtype",
                "attention_backend",
                "chunked_prefill_size",
                "max_total_tokens",
                "context_length",
                "random_seed",
                "disable_cuda_graph",
            )
        }

    async def prefill(self, rid: str, input_ids: Sequence[int], max_new_tokens: int = 0) -> PrefillResponse:
        """Prefill one prompt. Always call it from the same event loop."""
        try:
            answer = await self._engine.async_generate(
                input_ids=list(input_ids),
                sampling_params={"max_new_tokens": max_new_tokens, "temperature": 0.0},
                rid=rid,
            )
        except ValueError as err:  # SGLang's own validation of this one request
            return PrefillResponse(0, (), str(err))
        meta = answer["meta_info"]
        reason = meta.get("finish_reason") or {}
        error = str(reason.get("message", "aborted")) if reason.get("type") == "abort" else None
        return PrefillResponse(int(meta.get("prompt_tokens", 0)), tuple(answer.get("output_ids") or ()), error)

    def shutdown(self) -> None:
        self._engine.shutdown()


def known_arguments() -> list[str]:
    """What this version of SGLang takes as arguments of its engine. Imports SGLang."""
    return list(_fields(importlib.import_module("sglang.srt.server_args").ServerArgs))


def unknown_arguments(args: Iterable[str], known: Sequence[str]) -> list[str]:
    """Those of `args` that are neither in `known` nor a short name of one, sorted."""
    return sorted(set(args) - set(known) - {"tp", "pp", "dp", "ep"})


def _fields(struct: Any) -> Sequence[str]:
    """Field names of ServerArgs: a dataclass up to 0.5.1x, a msgspec Struct later."""
    names = getattr(struct, "__struct_fields__", None) or list(getattr(struct, "__dataclass_fields__", {}))
    return list(names)


def load_named(path: str) -> Any:
    """What `module:name` names, for example an engine class."""
    module, _, name = path.partition(":")
    return getattr(importlib.import_module(module), name)
