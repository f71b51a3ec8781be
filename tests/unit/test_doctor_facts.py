"""What the doctor collects: from a kernel, a driver, a model directory, a store and an input made up for the test."""

import json
import os
import stat
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from hsray.config import Config, load_config, make_config
from hsray.doctor import machine
from hsray.doctor.child import ask
from hsray.doctor.facts import Limit
from hsray.doctor.gpus import examine_gpus
from hsray.doctor.inputs import examine_run, knock
from hsray.doctor.measure import measure_spool, measure_store
from hsray.doctor.model_files import examine_model
from hsray.doctor.prefill import choose
from hsray.doctor.probe import examine_software
from hsray.doctor.storage import examine_store
from hsray.doctor.subject import make_subject
from hsray.errors import HsrayError, SpoolFull
from hsray.resolve import resolve_names
from hsray.spool import Arena, find_arenas
from hsray.store import open_store
from tests.runs import SITES, make_run, wait_until
from tests.small_run import build_small_run


def write(folder: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)


# ----------------------------------------------------------------- machine


def test_memory_is_what_is_available_not_what_is_unused(tmp_path: Path) -> None:
    write(tmp_path, {"meminfo": "MemTotal: 100 kB\nMemFree: 5 kB\nMemAvailable: 60 kB\n"})

    assert machine.memory(tmp_path) == (102_400, 61_440)


@pytest.mark.parametrize(
    ("cgroup", "files", "expected"),
    [
        ("0::/a/b\n", {"a/memory.max": "100", "a/memory.current": "30", "a/b/memory.max": "max"}, (100, 30)),
        # The group with the least room counts, not the one with the lowest limit.
        (
            "0::/a/b\n",
            {"a/memory.max": "100", "a/memory.current": "90", "a/b/memory.max": "50", "a/b/memory.current": "10"},
            (100, 90),
        ),
        # In a container the path is the host's, and only the root is there.
        ("0::/docker/abc\n", {"memory.max": "70", "memory.current": "1"}, (70, 1)),
        (
            "3:cpu:/\n4:memory:/a\n",
            {"memory/a/memory.limit_in_bytes": "80", "memory/a/memory.usage_in_bytes": "8"},
            (80, 8),
        ),
        (
            "4:memory:/\n",
            {"memory/memory.limit_in_bytes": str((1 << 63) - 4096), "memory/memory.usage_in_bytes": "8"},
            (None, 0),
        ),
        ("", {}, (None, 0)),
    ],
)
def test_the_tightest_control_group_is_found(
    tmp_path: Path, cgroup: str, files: dict[str, str], expected: tuple[int | None, int]
) -> None:
    write(tmp_path, {"proc/self/cgroup": cgroup, **{f"sys/{name}": text for name, text in files.items()}})

    assert machine.memory_limit(tmp_path / "proc", tmp_path / "sys") == expected


def test_a_disk_is_judged_by_its_nearest_folder_that_exists(tmp_path: Path) -> None:
    found = machine.disk(str(tmp_path / "a" / "b"))

    assert (found.exists, found.writable, found.path) == (False, True, str(tmp_path / "a" / "b"))
    assert 0 < found.free <= found.total
    (tmp_path / "file").touch()
    assert not machine.disk(str(tmp_path / "file" / "below")).writable


def test_a_tmpfs_is_known_by_its_type(small_tmpfs: Path) -> None:
    found = machine.disk(str(small_tmpfs / "hsray"))

    assert found.filesystem == "tmpfs"
    assert found.total == 16 << 20


def test_ports_and_their_range(tmp_path: Path) -> None:
    line = (
        "  0: 0100007F:{port:04X} 00000000:0000 {state} 00000000:00000000 00:00000000 00000000 0 0 1 1 0 100 0 0 10 0\n"
    )
    tcp = "  sl  local_address\n" + line.format(port=30000, state="0A") + line.format(port=4444, state="01")
    write(tmp_path, {"net/tcp": tcp, "sys/net/ipv4/ip_local_port_range": "1024\t65000\n"})

    assert machine.listening(tmp_path) == frozenset({30000})
    assert machine.ephemeral_ports(tmp_path) == (1024, 65000)


def test_raylets_and_orphans_are_seen(tmp_path: Path) -> None:
    raylet = "/x/ray/core/src/ray/raylet/raylet\0--session_dir=/tmp/ray/session_7\0"
    write(
        tmp_path,
        {
            "10/cmdline": raylet,
            "10/stat": "10 (raylet) S 1 0",
            "20/cmdline": "sglang::scheduler_TP0\0",
            "20/stat": "20 (sglang::schedul) S 1 0",
            "21/cmdline": "sglang::scheduler_TP1\0",
            "21/stat": "21 (a) b) S 20 0",
            "self/stat": "x",
        },
    )

    assert machine.raylets(tmp_path) == ("/tmp/ray/session_7",)
    assert machine.orphans(tmp_path) == ((20, "sglang::scheduler_TP0"),)


def test_the_environment_is_shown_without_secrets() -> None:
    shown = machine.environment(
        {
            "HF_TOKEN": "hf_secret",
            "RAY_AUTH_TOKEN": "s",
            "RAY_AUTH_TOKEN_PATH": "/t",
            "TOKENIZERS_PARALLELISM": "false",
            "https_proxy": "http://me:pass@proxy:1",
            "NCCL_DEBUG": "INFO",
            "AWS_SECRET_ACCESS_KEY": "s",
            "AWS_ENDPOINT_URL": "http://store",
            "RAY_JOB_CONFIG_JSON_ENV_VAR": '{"runtime_env": {"env_vars": {"X": "secret"}}}',
            "HOME": "/root",
        }
    )

    assert shown == {
        "HF_TOKEN": "***",
        "RAY_AUTH_TOKEN": "***",
        "RAY_AUTH_TOKEN_PATH": "/t",
        "https_proxy": "http://***@proxy:1",
        "NCCL_DEBUG": "INFO",
        "AWS_ENDPOINT_URL": "http://store",
        "RAY_JOB_CONFIG_JSON_ENV_VAR": "***",
    }


def test_limits_of_this_process_are_read() -> None:
    import resource

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    assert machine.limit(resource.RLIMIT_NOFILE) == Limit(
        None if soft == resource.RLIM_INFINITY else soft, None if hard == resource.RLIM_INFINITY else hard
    )


# -------------------------------------------------------------------- gpus

_GPUS = """0, GPU-aa, NVIDIA H200, 580.159.03, 143771, 143200, 9.0
1, GPU-bb, NVIDIA GB10, 580.159.03, [N/A], [N/A], 12.1
"""
_PROCESSES = """GPU-aa, 4711, "python3, really", 1024
GPU-zz, 1, gone, 5
"""


@pytest.fixture
def nvidia_smi(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    def install(script: str) -> None:
        program = tmp_path / "nvidia-smi"
        program.write_text(f"#!/bin/sh\n{script}\n")
        program.chmod(program.stat().st_mode | stat.S_IXUSR)
        monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")

    return install


def test_what_nvidia_smi_says(nvidia_smi: Callable[[str], None]) -> None:
    nvidia_smi(f"case $1 in *query-gpu*) cat <<'E'\n{_GPUS}E\n;; *) cat <<'E'\n{_PROCESSES}E\n;; esac")

    found = examine_gpus()

    assert [(gpu.index, gpu.name, gpu.total >> 20, gpu.capability) for gpu in found.gpus] == [
        (0, "NVIDIA H200", 143771, (9, 0)),
        (1, "NVIDIA GB10", 0, (12, 1)),
    ]
    assert [(p.gpu, p.pid, p.name, p.used) for p in found.processes] == [(0, 4711, "python3, really", 1 << 30)]
    assert (found.has_nvidia_smi, found.error) == (True, "")


def test_a_driver_that_is_not_loaded_is_quoted(nvidia_smi: Callable[[str], None]) -> None:
    nvidia_smi("echo 'NVIDIA-SMI has failed because it could not communicate with the NVIDIA driver.'; exit 9")

    found = examine_gpus()

    assert found.gpus == ()
    assert "exit code 9: NVIDIA-SMI has failed" in found.error


def test_an_answer_that_is_no_table_is_an_error_not_a_crash(nvidia_smi: Callable[[str], None]) -> None:
    nvidia_smi("echo 'zero, what'")

    assert examine_gpus().error


# ------------------------------------------------------------------- probe


@pytest.fixture
def child(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[[str], None]:
    """Another program in the place of Python's, for processes that are asked."""

    def install(script: str) -> None:
        program = tmp_path / "python"
        program.write_text(f"#!/bin/sh\n{script}\n")
        program.chmod(program.stat().st_mode | stat.S_IXUSR)
        monkeypatch.setattr(sys, "executable", str(program))

    return install


def test_an_import_that_kills_the_process_is_an_error_with_its_last_words(child: Callable[[str], None]) -> None:
    child("echo 'libcuda.so: cannot open' >&2; kill -SEGV $$")

    torch, sglang = examine_software(is_cpu=False, has_gpus=True, environment={})

    assert torch.error == sglang.error
    assert "exit code -11" in sglang.error
    assert "libcuda.so" in sglang.error


def test_the_answer_crosses_the_process(child: Callable[[str], None]) -> None:
    answer = {
        "torch": {
            "version": "2",
            "cuda": "13.0",
            "devices": 2,
            "architectures": ["sm_90"],
            "apart": [[0, 1]],
            "error": "",
        },
        "sglang": {"version": "0.5.21", "arguments": ["tp_size"], "error": ""},
    }
    child(f"cat >/dev/null; echo noise >&2; echo '{json.dumps(answer)}'")

    torch, sglang = examine_software(is_cpu=False, has_gpus=True, environment={})

    assert (torch.apart, torch.architectures, sglang.arguments) == (((0, 1),), ("sm_90",), ("tp_size",))


def test_a_child_that_hangs_is_given_up(child: Callable[[str], None]) -> None:
    child("exec sleep 60")

    with pytest.raises(HsrayError, match="not done within 0 s"):
        ask("probe", {}, 0.2, os.environ)


def test_a_child_ends_with_whoever_asked() -> None:
    code = "from hsray.doctor.child import Answer; import os, time; Answer(); print(os.getpid()); time.sleep(60)"
    parent = (
        "import subprocess, sys, time\n"
        f"subprocess.Popen([sys.executable, '-c', {code!r}], stdin=subprocess.PIPE).communicate(b'{{}}')\n"
    )
    asking = subprocess.Popen([sys.executable, "-c", parent], stderr=subprocess.PIPE, text=True)
    assert asking.stderr is not None
    pid = int(asking.stderr.readline())  # the child's own standard output is for its answer

    asking.kill()
    asking.wait()

    wait_until(lambda: not Path(f"/proc/{pid}/exe").exists(), 30, lambda: f"{pid} lives on")


# ------------------------------------------------------------------- model


@pytest.fixture
def model(tmp_path: Path) -> Path:
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    names = ["model-1.safetensors", "model-2.safetensors"]
    for number, name in enumerate(names):
        save_file({f"w{number}": np.zeros((4, 8), np.float16), f"n{number}": np.zeros(8, np.float32)}, folder / name)
    index = {"weight_map": {f"{kind}{n}": names[n] for n in range(2) for kind in "wn"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return folder


def test_a_whole_model_is_measured_and_named_by_its_content(model: Path) -> None:
    found = examine_model(str(model))

    assert (found.error, found.problems, found.files) == ("", (), 2)
    assert found.weight_bytes == 2 * (4 * 8 * 2 + 8 * 4)
    assert found.elements == {"F16": 64, "F32": 16}
    assert not found.quantized
    (model / "config.json").write_text('{"text_config": {"quantization_config": {"quant_method": "fp8"}}}')
    again = examine_model(str(model))
    assert again.quantized
    assert again.digest != found.digest


def _cut(model: Path) -> None:
    file = model / "model-2.safetensors"
    file.write_bytes(file.read_bytes()[:-5])


def _beheaded(model: Path) -> None:
    (model / "model-2.safetensors").write_bytes(b"abc")


def _pointer(model: Path) -> None:
    (model / "model-1.safetensors").write_text("version https://git-lfs.github.com/spec/v1\noid sha256:1\nsize 9\n")


def _grown(model: Path) -> None:
    with (model / "model-1.safetensors").open("ab") as file:
        file.write(b"x")


def _missing(model: Path) -> None:
    (model / "model-1.safetensors").unlink()


def _tensor_missing(model: Path) -> None:
    save_file({"w1": np.zeros(1, np.float16)}, model / "model-2.safetensors")


def _unfinished(model: Path) -> None:
    (model / "abc.incomplete").touch()


def _bad_index(model: Path) -> None:
    (model / "model.safetensors.index.json").write_text("[")


def _no_safetensors(model: Path) -> None:
    for file in model.glob("*.safetensors*"):
        file.unlink()
    (model / "pytorch_model.bin").touch()


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (_cut, "model-2.safetensors is cut off: "),
        (_beheaded, "model-2.safetensors is cut off: 3 bytes"),
        (_pointer, "model-1.safetensors is a git-lfs pointer"),
        (_grown, "model-1.safetensors is too long"),
        (_missing, "model-1.safetensors is missing"),
        (_tensor_missing, "1 tensors of the index are in no file, first n1"),
        (_unfinished, "abc.incomplete is an unfinished download"),
        (_bad_index, "index.json cannot be read"),
        (_no_safetensors, "only weights in another format"),
    ],
)
def test_a_damaged_model_is_told_file_by_file(model: Path, damage: Callable[[Path], None], words: str) -> None:
    damage(model)

    found = examine_model(str(model))

    assert len(found.problems) == 1
    assert words in found.problems[0]
    assert found.digest == ""


def test_a_model_that_is_not_there(tmp_path: Path) -> None:
    assert "No such file" in examine_model(str(tmp_path / "nowhere")).error


def test_of_many_missing_files_only_some_are_named(model: Path) -> None:
    index = {"weight_map": {f"w{n}": f"model-{n}.safetensors" for n in range(60)}}
    (model / "model.safetensors.index.json").write_text(json.dumps(index))

    problems = examine_model(str(model)).problems

    assert len(problems) == 6
    assert problems[-1].startswith("and ")


# ------------------------------------------------------------------- store


def at(url: str, **output: Any) -> Config:
    sections = {"model": {"path": "/m"}, "prompts": {"path": "/p"}, "output": {"url": url, **output}}
    return make_config(sections)


def test_a_local_store_is_left_as_it_was(tmp_path: Path) -> None:
    found = examine_store(at(str(tmp_path / "a" / "run")))

    assert (found.error, found.skew, found.run) == ("", None, None)
    assert found.disk is not None
    assert not found.disk.exists
    assert list(tmp_path.iterdir()) == []


def test_what_a_store_holds_is_told(tmp_path: Path) -> None:
    built = build_small_run(str(tmp_path / "run"))

    found = examine_store(at(built.url))

    assert found.run is not None
    assert (found.run.run_id, found.run.format_version) == ("small", "1")
    assert found.run.num_tokens == built.record["plan"]["num_tokens"]
    assert not [path for path in (tmp_path / "run").iterdir() if path.name.startswith(".hsray")]


@pytest.mark.parametrize(
    ("url", "words", "is_config_error"),
    [
        ("memory://x", "other", True),
        ("s4://x", "unknown scheme", True),
        ("/proc/nothing/here", "proc", False),
    ],
)
def test_a_store_that_cannot_be_used_says_why(url: str, words: str, is_config_error: bool) -> None:
    found = examine_store(at(url, retry_seconds=1))

    assert words in found.error
    assert found.is_config_error is is_config_error


def test_credentials_are_named_never_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "AKIA-not-to-be-seen")
    monkeypatch.delenv("AWS_SECRET_ACCESS_KEY", raising=False)

    found = examine_store(at("memory://x"))

    assert "AWS_ACCESS_KEY_ID" in found.credentials
    assert "not-to-be-seen" not in repr(found)


# ------------------------------------------------------------------- input


def load(folder: Path, *overrides: str, rows: list[Any] | None = None) -> Config:
    run = make_run(folder, rows if rows is not None else [{"id": str(n), "text": f"hello {n}"} for n in range(7)])
    return resolve_names(load_config(run.config_path, overrides))


def test_the_first_rows_are_read_as_the_run_reads_them(tmp_path: Path) -> None:
    rows = [*({"id": f"a{n}", "text": "hello"} for n in range(5)), "{broken", {"id": "b", "text": ""}]
    subject, _ = make_subject(load(tmp_path, rows=rows))

    found = examine_run(subject)

    assert (found.tokenizer_error, found.ray_address) == ("", "")
    assert (found.inputs.rows, len(found.inputs.lengths), found.inputs.is_all) == (7, 5, True)
    assert found.inputs.rejects["malformed_json"][1].startswith(str(tmp_path / "prompts.jsonl") + ":6: ")
    assert found.fingerprint["capture.sites"] == ",".join(SITES)


def test_a_long_input_is_read_in_part_whatever_needs_all_of_it(tmp_path: Path) -> None:
    rows = [{"id": f"a{n}", "text": f"hello {n}"} for n in range(400)]
    config = load(tmp_path, "prompts.shuffle_seed=3", "prompts.duplicates=reject", rows=rows)

    found = examine_run(make_subject(config)[0]).inputs

    assert (found.rows, found.is_all, found.error) == (256, False, "")
    limited = config.model_copy(update={"prompts": config.prompts.model_copy(update={"limit": 10})})
    assert examine_run(make_subject(limited)[0]).inputs.is_all


def test_a_tokenizer_that_does_not_load_is_told(tmp_path: Path) -> None:
    config = load(tmp_path, f"model.tokenizer_path={tmp_path}")

    found = examine_run(make_subject(config)[0])

    assert "no tokenizer" in found.tokenizer_error
    assert found.fingerprint == {}


def test_prompts_that_are_not_there_are_told(tmp_path: Path) -> None:
    found = examine_run(make_subject(load(tmp_path, "prompts.path=/nowhere.jsonl"))[0])

    assert "/nowhere.jsonl" in found.inputs.error


@pytest.mark.parametrize(("address", "words"), [("", ""), ("auto", ""), ("127.0.0.1:1", "refused"), ("h:x", "no port")])
def test_knocking_at_ray(address: str, words: str) -> None:
    assert words in knock(address).lower()
    assert bool(knock(address)) is bool(words)


# ------------------------------------------------------------- arenas, rates


def test_arenas_are_found_with_their_owner_dead_or_alive(tmp_path: Path) -> None:
    arena = Arena(tmp_path, 1 << 20)
    try:
        (found,) = find_arenas(tmp_path)
        assert (found.directory, found.nbytes, found.is_dead) == (arena.directory, 1 << 20, False)
        # A dead owner's lock is free.
        dead = tmp_path / "0123456789abcdef"
        dead.mkdir()
        (dead / "lock").write_bytes((arena.directory / "lock").read_bytes())
        (dead / "arena").write_bytes(b"x" * 4096)
        (tmp_path / "fedcba9876543210").mkdir()
        assert {a.directory: a.is_dead for a in find_arenas(tmp_path)} == {arena.directory: False, dead: True}
    finally:
        arena.remove()


def test_rates_leave_nothing_behind(tmp_path: Path) -> None:
    store = open_store(str(tmp_path / "run"))

    assert measure_spool(str(tmp_path / "spool"), 1 << 20) > 0
    assert measure_store(store, 100_000, seconds=0.1) > 0

    assert [path.name for path in tmp_path.iterdir()] == ["spool"]
    assert find_arenas(tmp_path / "spool") == []


def test_a_spool_without_room_is_an_error(small_tmpfs: Path) -> None:
    with pytest.raises(SpoolFull):
        measure_spool(str(small_tmpfs), 64 << 20)


def test_prompts_to_measure_with_have_the_lengths_of_the_input() -> None:
    assert choose([10, 20], 45) == [10, 20, 10, 20]
    assert choose([100], 1) == [100]
