import json
from typing import Any

import pytest

from hsray.capture.settings import CaptureSettings
from hsray.engine import FIXED_ARGUMENTS, EngineSpec, check_arguments, check_kv_cache, engine_arguments
from hsray.errors import ConfigError

KNOWN = [
    *FIXED_ARGUMENTS,
    *("log_level", "random_seed", "disable_cuda_graph", "skip_server_warmup", "device", "dtype", "port", "nccl_port"),
    *("attention_backend", "sleep_on_idle", "max_total_tokens", "model_path", "trust_remote_code", "tp_size"),
]


@pytest.mark.parametrize(
    ("args", "says"),
    [
        ({"disable_radix_cache": False}, "shared prefix"),
        ({"pp_size": 2}, "pipeline"),
        ({"pp": 2}, "pipeline"),
        ({"speculative_algorithm": "EAGLE3"}, "draft"),
        ({"enable_two_batch_overlap": True}, "two-batch"),
        ({"attn_cp_size": 2}, "context parallelism"),
        ({"skip_tokenizer_init": False}, "tokenized once"),
        ({"enable_return_hidden_states": True}, "slower"),
        ({"nnodes": 2}, "one replica per node"),
        ({"model_path": "x"}, "model.path"),
        ({"nccl_port": 1}, "set by hsray"),
    ],
)
def test_what_correctness_depends_on_cannot_be_overridden(args: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=says) as refused:
        check_arguments(args)

    assert f"engine.args.{next(iter(args))}" in str(refused.value)


def test_saying_what_hsray_does_anyway_is_fine() -> None:
    check_arguments({"disable_radix_cache": True, "pp_size": 1, "tp_size": 8, "kv_cache_dtype": "bf16"})


def test_other_arguments_go_through_verbatim_and_win_over_defaults() -> None:
    spec = EngineSpec("m", args={"tp_size": 8, "disable_cuda_graph": False, "log_level": "error"})

    merged = engine_arguments(spec, KNOWN)

    assert (merged["tp_size"], merged["disable_cuda_graph"], merged["log_level"]) == (8, False, "error")
    assert merged["disable_radix_cache"] is True
    assert merged["model_path"] == "m"


def test_two_engines_get_ports_of_their_own() -> None:
    spec = EngineSpec("m")

    ports = [engine_arguments(spec, KNOWN)[name] for name in ("port", "nccl_port") for _ in range(2)]

    assert len(set(ports)) == 4


def test_a_version_without_an_argument_is_not_given_it() -> None:
    merged = engine_arguments(EngineSpec("m"), [k for k in KNOWN if k != "enable_prefill_context_parallel"])

    assert "enable_prefill_context_parallel" not in merged


def test_the_cpu_engine_takes_the_exact_backend() -> None:
    merged = engine_arguments(EngineSpec("m", args={"device": "cpu"}, is_cpu=True), KNOWN)

    assert (merged["device"], merged["attention_backend"], merged["dtype"]) == ("cpu", "torch_native", "float32")


def test_capture_settings_survive_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    given = CaptureSettings(
        "address", "/dev/shm/a", 4096, ("resid_pre_1", "final_prenorm"), "bfloat16", ("resid_pre_2",)
    )
    for name, value in given.to_environment().items():
        monkeypatch.setenv(name, value)

    assert CaptureSettings.from_environment() == given


def test_capture_settings_written_by_hand_need_no_defaults(monkeypatch: pytest.MonkeyPatch) -> None:
    required = {
        "channel": "a",
        "arena_path": "b",
        "arena_bytes": 1,
        "sites": ["final_prenorm"],
        "stored_dtype": "float32",
    }
    monkeypatch.setenv("HSRAY_CAPTURE", json.dumps(required))

    settings = CaptureSettings.from_environment()

    assert settings == CaptureSettings("a", "b", 1, ("final_prenorm",), "float32")


@pytest.mark.parametrize("dtype", ["fp8_e5m2", "fp8_e4m3", "fp4_e2m1", "int8", "torch.float8_e4m3fn", "nvfp4"])
def test_a_quantised_kv_cache_is_refused(dtype: str) -> None:
    with pytest.raises(ConfigError, match=f"kv_cache_dtype: {dtype} quantises"):
        check_kv_cache(dtype)


@pytest.mark.parametrize("dtype", ["auto", "bf16", "bfloat16", "float16", "torch.bfloat16", "torch.float32"])
def test_a_kv_cache_in_the_dtype_of_the_model_is_taken(dtype: str) -> None:
    check_kv_cache(dtype)
