"""The doctor's checks: each failure and each warning is provoked by breaking one thing on a healthy node."""

import dataclasses
from typing import Any

import pytest

from hsray.doctor.check_environment import store_host
from hsray.doctor.check_gpus import has_kernels
from hsray.doctor.checks import check_driver, check_node
from hsray.doctor.facts import (
    Arena,
    GpuProcess,
    Limit,
    ModelFiles,
    SGLang,
    StoredRun,
    StoreFacts,
    Torch,
)
from hsray.doctor.finding import Finding, exit_code, fail, ok, warn
from hsray.doctor.subject import Subject, make_subject
from hsray.errors import ExitCode
from hsray.units import format_bytes
from tests.doctor_facts import GIB, MODEL, config, disk, gpus, inputs, node, run_facts, subject

S3 = {"url": "s3://bucket/run"}
TP1 = {"args": {"tp_size": 1}}
CPU = {"args": {"device": "cpu"}}
RUN = StoredRun("abc", "2026-11-30T10:00:00", "1", 1000, 900, {"capture.sites": "resid_pre_2"})


def bad(findings: list[Finding]) -> list[tuple[str, str]]:
    return [(finding.check, finding.level) for finding in findings if finding.level != "ok"]


def env(**variables: str) -> dict[str, Any]:
    return {"environment": {"RAY_AUTH_MODE": "disabled", **variables}}


def test_a_healthy_gpu_node_has_nothing_to_say() -> None:
    findings = check_node(subject(), node(), is_place=True)

    assert bad(findings) == []
    assert {"python", "sglang", "gpus", "gpu memory", "spool", "memory", "store", "clock"} <= {
        f.check for f in findings
    }


def test_a_healthy_driver_has_nothing_to_say() -> None:
    assert bad(check_driver(subject(), node(), run_facts())) == []


# what is broken on the node, what is set in the configuration -> check, level, words of the finding
NODE_CASES: dict[str, tuple[dict[str, Any], dict[str, Any], str, str, str]] = {
    "old python": ({"python": "3.10.12"}, {}, "python", "fail", "3.10.12"),
    "unmet requirement": ({"unmet": ("obstore>=0.12 (not installed)",)}, {}, "packages", "fail", "obstore"),
    "no sglang": ({"sglang": SGLang(error="x"), "packages": {}}, {}, "sglang", "fail", "hsray[gpu]"),
    "broken sglang": ({"sglang": SGLang("0.5.21", (), "OSError: libcudart")}, {}, "sglang", "fail", "libcudart"),
    "untested sglang": ({"sglang": SGLang("0.9.0")}, {}, "sglang", "fail", "0.5.21"),
    "untested sglang allowed": (
        {"sglang": SGLang("0.9.0")},
        {"engine": {"allow_untested": True}},
        *("sglang", "warn", "self-test decides"),
    ),
    "misspelt argument": (
        {},
        {"engine": {"args": {"attention_backed": "triton", "tp_size": 2}}},
        *("engine arguments", "fail", "write attention_backend"),
    ),
    "few files": ({"open_files": Limit(1024, 1024)}, {}, "open files", "warn", "65536"),
    "ray temp read-only": ({"ray_temp": disk("/x", writable=False)}, {}, "Ray's folder", "fail", "RAY_TMPDIR"),
    "ray temp full": ({"ray_temp": disk("/x", free=10 * GIB)}, {}, "Ray's folder", "warn", "95%"),
    "ray temp too long": ({"ray_temp": disk("/" + "x" * 50)}, {}, "Ray's folder", "fail", "107"),
    "logs read-only": ({"logs": disk("/x", writable=False)}, {}, "log folder", "fail", "log.dir"),
    "logs full": ({"logs": disk("/x", free=1000)}, {}, "log folder", "warn", "log.dir"),
    "few ports": ({"ephemeral_ports": (60000, 60999)}, {}, "ports", "warn", "widen"),
    "ports of ray": ({"ephemeral_ports": (10000, 60999)}, {}, "ports", "warn", "32768"),
    "engine port taken": (
        {"listening": frozenset({30000})},
        {"engine": {"args": {"tp_size": 8, "port": 30000}}},
        *("engine port", "fail", "remove engine.args.port"),
    ),
    "engine port shared": (
        {},
        {"engine": {"args": {"tp_size": 2, "port": 30000}}},
        *("engine port", "fail", "every replica"),
    ),
    "proxy": (env(HTTPS_PROXY="http://p:1"), {}, "environment", "warn", "NO_PROXY"),
    "crash point": (env(HSRAY_CRASH_AT="x"), {}, "environment", "warn", "HSRAY_CRASH_AT"),
    "gpus hidden": (env(CUDA_VISIBLE_DEVICES=""), {}, "environment", "fail", "hides"),
    "too few gpus visible": (env(CUDA_VISIBLE_DEVICES="0"), {}, "environment", "fail", "tp_size 2"),
    "blocking launches": (env(CUDA_LAUNCH_BLOCKING="1"), {}, "environment", "warn", "unset"),
    "no p2p": (env(NCCL_P2P_DISABLE="1"), {}, "environment", "warn", "NCCL_P2P_DISABLE"),
    "no shm": (env(NCCL_SHM_DISABLE="1"), {}, "environment", "warn", "NCCL_SHM_DISABLE"),
    "no such interface": (env(NCCL_SOCKET_IFNAME="ib0"), {}, "environment", "fail", "eth0"),
    "other ray address": (
        env(RAY_ADDRESS="a:1"),
        {"cluster": {"address": "b:2"}},
        *("environment", "warn", "which counts"),
    ),
    "job that is killed soon": (
        env(RAY_JOB_CONFIG_JSON_ENV_VAR="***"),
        *({}, "environment", "warn", "RAY_JOB_STOP_WAIT_TIME_S"),
    ),
    "store refuses": (
        {"store": StoreFacts("s3://b/r", error="access denied (403). Check AWS_ACCESS_KEY_ID")},
        *({}, "store", "fail", "access denied"),
    ),
    "half of the credentials": (
        {"store": StoreFacts("s3://b/r", error="no", credentials=("AWS_ACCESS_KEY_ID",))},
        *({}, "store", "fail", "only AWS_ACCESS_KEY_ID is set"),
    ),
    "a profile is not read": (
        {"store": StoreFacts("s3://b/r", error="no", credentials=("AWS_PROFILE",))},
        *({}, "store", "fail", "export-credentials"),
    ),
    "no url": (
        {"store": StoreFacts("x://b", error="output.url: unknown scheme", is_config_error=True)},
        *({}, "output.url", "fail", "scheme"),
    ),
    "single writer": ({}, {"output": {"commit": "single-writer"}}, "store", "warn", "only one driver"),
    "slow store": ({"store": StoreFacts("s3://b/r", seconds=9.0)}, {}, "store", "warn", "took that long"),
    "clock": ({"store": StoreFacts("s3://b/r", skew=-300.0)}, {}, "clock", "warn", "300 s behind"),
    "no gpu": ({"gpus": (), "has_nvidia_smi": False}, {}, "gpus", "fail", "no nvidia-smi"),
    "driver not loaded": ({"gpus": (), "gpu_error": "exit code 9: no driver"}, {}, "gpus", "fail", "exit code 9"),
    "too few gpus": ({"gpus": gpus(1)}, {}, "gpus", "fail", "needs 2"),
    "gpus left over": ({"gpus": gpus(7)}, {}, "gpus", "warn", "1 idle"),
    "mixed gpus": ({"gpus": (*gpus(4), *gpus(4, name="NVIDIA L4"))}, {}, "gpus", "warn", "different"),
    "torch for cpu": ({"torch": Torch("2.11.0+cpu")}, {}, "torch", "fail", "without CUDA"),
    "driver too old": ({"torch": Torch("2.11", "13.0", error="driver too old")}, {}, "torch", "fail", "update it"),
    "torch sees none": ({"torch": Torch("2.11", "13.0", 0)}, {}, "torch", "fail", "sees no GPU"),
    "torch without kernels": (
        {"gpus": gpus(capability=(12, 0)), "torch": Torch("2.6", "12.4", 8, ("sm_80", "sm_90"))},
        *({}, "torch", "fail", "sm_120"),
    ),
    "old gpu": ({"gpus": gpus(capability=(7, 5))}, {}, "capability", "fail", "Ampere"),
    "fa3 on sm120": (
        {"gpus": gpus(capability=(12, 0))},
        {"engine": {"args": {"tp_size": 2, "attention_backend": "fa3"}}},
        *("capability", "fail", "flashinfer or triton"),
    ),
    "moe runner on sm120": (
        {"gpus": gpus(capability=(12, 0)), "sglang": SGLang("0.5.21")},
        {"engine": {"args": {"tp_size": 2, "moe_runner_backend": "flashinfer_trtllm"}}},
        *("capability", "fail", "SGLang chooses"),
    ),
    "no peer access": (
        {"torch": dataclasses.replace(node().torch, apart=((0, 1), (1, 2)))},
        *({}, "peer access", "warn", "1 pairs"),
    ),
    "gpu in use": (
        {"gpus": gpus(free=60 * GIB), "gpu_processes": (GpuProcess(3, 77, "python", 80 * GIB),)},
        *({}, "gpu in use", "warn", "pid 77"),
    ),
    "weights too large": (
        {"model": dataclasses.replace(node().model, weight_bytes=600 * GIB)},
        *({}, "gpu memory", "fail", "tp_size to 8"),
    ),
    "weights nearly too large": (
        {"model": dataclasses.replace(node().model, weight_bytes=245 * GIB)},
        *({}, "gpu memory", "warn", "few prompts"),
    ),
    "no model": (
        {"model": ModelFiles("/m", error="cannot read /m/config.json")},
        {},
        "model files",
        "fail",
        "every node",
    ),
    "cut model": (
        {"model": ModelFiles("/m", problems=("model-2.safetensors is cut off: 5 of 9 bytes",))},
        *({}, "model files", "fail", "cut off"),
    ),
    "little memory": ({"memory_free": 20 * GIB}, {}, "memory", "fail", "spool.bytes"),
    "tight memory": ({"memory_free": 26 * GIB}, {}, "memory", "warn", "little is left"),
    "control group": ({"memory_limit": 30 * GIB, "memory_used": 20 * GIB}, {}, "memory", "fail", "control group"),
    "weights on a cpu": (
        {"memory_free": 20 * GIB},
        {"engine": CPU},
        *("memory", "fail", "weights 34.4 GB"),
    ),
    "spool read-only": ({"spool": disk("/dev/shm/hsray", "tmpfs", writable=False)}, {}, "spool", "fail", "spool.path"),
    "spool too small": ({}, {"spool": {"bytes": 300 * GIB}}, "spool", "fail", "lower spool.bytes to"),
    "spool halved": ({"spool": disk("/s", "tmpfs", free=50 * GIB)}, {}, "spool", "warn", "instead of"),
    "spool on a disk": ({"spool": disk("/data", "xfs")}, {}, "spool file system", "warn", "tmpfs"),
    "dead arenas": ({"arenas": (Arena("/dev/shm/hsray/a", GIB, True),)}, {}, "leftovers", "warn", "/dev/shm/hsray/a"),
    "orphans": ({"orphans": ((5, "sglang::scheduler"),)}, {}, "leftovers", "warn", "5 (sglang::scheduler)"),
    "another ray": ({"raylets": ("/tmp/ray/session_1",)}, {}, "leftovers", "warn", "session_1"),
}


@pytest.mark.parametrize("case", NODE_CASES)
def test_a_broken_node_is_told_what_to_do(case: str) -> None:
    facts, settings, check, level, words = NODE_CASES[case]

    findings = check_node(subject(**settings), node(**facts), is_place=True)

    (found,) = [finding for finding in findings if finding.check == check and finding.level != "ok"]
    assert found.level == level
    assert words in f"{found.seen} {found.advice}"


DRIVER_CASES: dict[str, tuple[dict[str, Any], dict[str, Any], str, str, str]] = {
    "nothing answers": ({}, {"ray_address": "h:6379", "ray_error": "refused"}, "ray", "fail", "refused"),
    "no ray beside the driver": ({}, {"ray_address": "h:6379"}, "ray", "fail", "ray job submit"),
    "token mode without a token": (env(RAY_AUTH_MODE="token"), {}, "ray authentication", "fail", "auth_token"),
    "auth mode left to ray": (
        {"environment": {}, "raylets": ("/tmp/ray/s",)},
        {"ray_address": "h:6379"},
        *("ray authentication", "warn", "same on every node"),
    ),
    "another run": (
        {"store": StoreFacts("s3://b/r", run=dataclasses.replace(RUN, parts={"capture.sites": "resid_pre_9"}))},
        *({}, "run", "fail", "resid_pre_9 there, resid_pre_2 now"),
    ),
    "another format": (
        {"store": StoreFacts("s3://b/r", run=dataclasses.replace(RUN, format_version="7"))},
        *({}, "run", "fail", "format 7"),
    ),
    "disk too small": (
        {"store": StoreFacts("/out", disk=disk("/out", free=1_000_000), run=RUN)},
        *({}, "output disk", "fail", "32.8 MB"),
    ),
    "disk of one machine": (
        {"store": StoreFacts("/out", disk=disk("/out")), "raylets": ("/tmp/ray/s",)},
        {"ray_address": "h:6379"},
        *("output disk", "warn", "shared file system"),
    ),
    "no tokenizer": ({}, {"tokenizer_error": "no tokenizer can be loaded"}, "tokenizer", "fail", "loaded"),
    "unreadable prompts": ({}, {"inputs": inputs(error="prompts.path: no file")}, "prompts", "fail", "no file"),
    "no rows": ({}, {"inputs": inputs(rows=0, lengths=(), rejects={})}, "prompts", "fail", "no row"),
    "nothing but rejects": (
        *({}, {"inputs": inputs(rows=6, lengths=())}),
        *("prompts", "fail", "too_long 6"),
    ),
    "many rejects": (
        *({}, {"inputs": inputs(rows=8, lengths=(5, 5))}),
        *("prompts", "warn", "meant to be refused"),
    ),
}


@pytest.mark.parametrize("case", DRIVER_CASES)
def test_a_broken_driver_is_told_what_to_do(case: str) -> None:
    facts, run, check, level, words = DRIVER_CASES[case]

    findings = check_driver(subject(), node(**facts), run_facts(**run))

    (found,) = [finding for finding in findings if finding.check == check and finding.level != "ok"]
    assert found.level == level
    assert words in f"{found.seen} {found.advice}"


def test_a_run_that_fits_is_continued() -> None:
    findings = check_driver(subject(), node(store=StoreFacts("s3://b/r", run=RUN)), run_facts())

    assert bad(findings) == []
    assert "would continue it" in next(finding.seen for finding in findings if finding.check == "run")


def test_too_many_rejects_are_those_the_budget_does_not_allow() -> None:
    strict = subject(budgets={"max_rejected_fraction": 0.01})

    assert bad(check_driver(strict, node(), run_facts())) == [("prompts", "warn")]


@pytest.mark.parametrize(("longest", "level"), [(100, "ok"), (9000, "fail")])
def test_the_longest_prompt_has_to_fit_into_an_arena(longest: int, level: str) -> None:
    made = subject(known_longest=longest, spool={"bytes": 100_000_000})

    (spool,) = [finding for finding in check_node(made, node(), is_place=True) if finding.check == "spool"]

    assert spool.level == level
    assert (f"spool.bytes to {2 * longest * made.per_token:,}" in spool.advice) == (level == "fail")


def test_what_dead_arenas_hold_comes_back() -> None:
    made = subject(spool={"bytes": 10 * GIB})
    full = {"spool": disk("/dev/shm/hsray", "tmpfs", free=20 * GIB), "memory_free": 21 * GIB}
    left = (Arena("/dev/shm/hsray/a", 40 * GIB, True),)

    assert ("spool", "fail") in bad(check_node(made, node(**full), is_place=True))
    assert bad(check_node(made, node(**full, arenas=left), is_place=True)) == [("leftovers", "warn")]
    in_use = (Arena("/dev/shm/hsray/a", 40 * GIB, False),)
    assert ("spool", "fail") in bad(check_node(made, node(**full, arenas=in_use), is_place=True))


def test_a_machine_without_replicas_is_not_asked_for_gpus_or_models() -> None:
    bare = node(gpus=(), torch=Torch(), sglang=SGLang(), model=ModelFiles("/m", error="none"))

    assert bad(check_node(subject(), bare, is_place=False)) == []


def test_quantization_shrinks_weights_and_a_quantized_model_is_as_it_is() -> None:
    big = dataclasses.replace(node().model, weight_bytes=400 * GIB)
    to_fp8 = subject(engine={"args": {"tp_size": 2, "quantization": "fp8"}})

    def level(made: Subject, model: ModelFiles) -> str:
        findings = check_node(made, node(model=model, sglang=SGLang("0.5.21")), is_place=True)
        return next(finding.level for finding in findings if finding.check == "gpu memory")

    assert level(subject(), big) == "fail"
    assert level(to_fp8, big) == "ok"
    assert level(to_fp8, dataclasses.replace(big, quantized=True)) == "fail"


@pytest.mark.parametrize(
    ("args", "tokens"), [({"chunked_prefill_size": 4096}, 4096), ({"chunked_prefill_size": -1}, 16384)]
)
def test_staging_buffers_hold_a_step_of_prefill(args: dict[str, Any], tokens: int) -> None:
    made = subject(engine={"args": {"tp_size": 2, **args}})

    findings = check_node(made, node(), is_place=True)

    seen = next(finding.seen for finding in findings if finding.check == "gpu memory")
    assert f"{format_bytes(2 * tokens * made.per_token)} for the capture" in seen


def test_memory_that_a_gpu_does_not_tell_is_not_judged() -> None:
    findings = check_node(subject(), node(gpus=gpus(total=0, free=0)), is_place=True)

    assert bad(findings) == []
    assert "gpu memory" not in {finding.check for finding in findings}


@pytest.mark.parametrize(
    ("capability", "architectures", "runs"),
    [
        ((9, 0), ("sm_80", "sm_90a"), True),
        ((8, 9), ("sm_80", "sm_86"), True),
        ((8, 0), ("sm_86",), False),
        ((12, 0), ("sm_90", "sm_100"), False),
        ((12, 0), ("sm_90", "compute_90"), True),
        ((9, 0), ("compute_100",), False),
        ((12, 1), ("sm_120",), True),
    ],
)
def test_kernels_run_within_their_major_version(
    capability: tuple[int, int], architectures: tuple[str, ...], runs: bool
) -> None:
    assert has_kernels(capability, architectures) is runs


@pytest.mark.parametrize(
    ("variables", "warned"),
    [
        ({"HTTPS_PROXY": "http://p"}, True),
        ({"https_proxy": "http://p", "NO_PROXY": "localhost,.amazonaws.com"}, False),
        ({"https_proxy": "http://p", "no_proxy": "*"}, False),
        ({"HTTPS_PROXY": "http://p", "NO_PROXY": "zonaws.com"}, True),
        ({"HTTP_PROXY": "http://p"}, False),
        ({"HTTP_PROXY": "http://p", "AWS_ENDPOINT_URL": "http://store:9000"}, True),
        ({"HTTP_PROXY": "http://p", "AWS_ENDPOINT_URL": "http://store:9000", "NO_PROXY": "store"}, False),
    ],
)
def test_only_a_proxy_in_front_of_the_store_counts(variables: dict[str, str], warned: bool) -> None:
    findings = check_node(subject(), node(**env(**variables)), is_place=True)

    assert (("environment", "warn") in bad(findings)) is warned


def test_the_host_of_the_store() -> None:
    assert store_host("/data", {}, {}) == ("", False)
    assert store_host("gs://b/p", {}, {}) == ("storage.googleapis.com", False)
    assert store_host("s3://b/p", {"endpoint": "http://h:1"}, {"AWS_ENDPOINT_URL": "https://other"}) == ("h", True)


@pytest.mark.parametrize("wanted", ["eth0", "=eth0", "eth", "ib0,eth", "^docker"])
def test_interfaces_are_named_as_nccl_has_it(wanted: str) -> None:
    assert bad(check_node(subject(), node(**env(NCCL_SOCKET_IFNAME=wanted)), is_place=True)) == []


def test_peer_access_does_not_matter_between_replicas() -> None:
    apart = dataclasses.replace(node().torch, apart=((1, 2), (3, 4)))

    assert bad(check_node(subject(), node(torch=apart), is_place=True)) == []
    assert bad(check_node(subject(engine=TP1), node(torch=apart), is_place=True)) == []


def test_a_finding_that_is_not_ok_says_what_to_do() -> None:
    with pytest.raises(ValueError, match="what to do"):
        warn("x", "seen", "")


@pytest.mark.parametrize(
    ("findings", "code"),
    [
        ([ok("a", "x"), warn("b", "x", "y")], ExitCode.COMPLETE),
        ([fail("a", "x", "y")], ExitCode.CONFIG),
        ([fail("store", "x", "y"), fail("a", "x", "y")], ExitCode.STORE),
        ([warn("store", "x", "y")], ExitCode.COMPLETE),
    ],
)
def test_exit_codes(findings: list[Finding], code: ExitCode) -> None:
    assert exit_code(findings) is code


def test_a_configuration_without_a_model_is_a_finding_not_an_end() -> None:
    made, findings = make_subject(config(model={"path": "/nowhere"}, engine={"args": {"pp_size": 2, "tp_size": 2}}))

    assert made.model is None
    assert bad(findings) == [("engine arguments", "fail"), ("model", "fail")]
    assert bad(check_node(made, node(sglang=SGLang("0.5.21")), is_place=True)) == []


def test_the_needs_of_a_node_are_the_replicas_own() -> None:
    made = subject(known_longest=1000)

    assert MODEL.hidden_size * 2 * len(made.sites) == made.per_token
    assert made.replicas_on(8) == 4
    assert subject(cluster={"replicas": 2}).replicas_on(8) == 2
    assert subject(engine=CPU, cluster={"replicas": 3}).replicas_on(0) == 3
    assert made.arena_bytes(1000 * GIB) == made.wanted_arena_bytes()
    assert made.arena_bytes(16 * GIB) == GIB  # a quarter, by four replicas
    assert subject(spool={"bytes": 12345}).arena_bytes(0) == 12345
