"""clusters/ and the scripts that it runs, without a cluster: Ray's own checks, the shell's, and what hsray needs."""

import copy
import importlib.util
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import click
import jsonschema
import pytest
import yaml

from hsray.config import load_config
from hsray.submit import STOP_WAIT_SECONDS
from tests.sizing import PLACEHOLDERS, ROOT, load_sizes

CLUSTERS = ROOT / "clusters"
FILES = ["bw", "local", "aws", "gcp"]
WITH_WORKERS = ["bw", "aws", "gcp"]
COMMAND_LISTS = [
    "initialization_commands",
    "setup_commands",
    "head_setup_commands",
    "worker_setup_commands",
    "head_start_ray_commands",
    "worker_start_ray_commands",
]
# What the files leave to the user, and Ray insists on.
LEFT_OPEN = {"bw": {"head_ip": "10.0.0.10", "worker_ips": ["10.0.0.11", "10.0.0.12"]}, "gcp": {"project_id": "p"}}
SCRIPTS = ["scripts/start_head.sh", "scripts/start_worker.sh", "clusters/setup_node.sh", "clusters/mount_spool.sh"]


def read(name: str) -> dict[str, Any]:
    data = yaml.safe_load((CLUSTERS / f"{name}.yaml").read_text())
    data["provider"].update(LEFT_OPEN.get(name, {}))
    return dict(data)


def commands(data: dict[str, Any]) -> list[str]:
    return [command for key in COMMAND_LISTS for command in data.get(key, [])]


def only(commands: list[str], what: str) -> str:
    [found] = [command for command in commands if what in command]
    return found


def flags(command: str) -> dict[str, str]:
    return dict(word[2:].split("=", 1) for word in shlex.split(command) if word.startswith("--") and "=" in word)


# ------------------------------------------------------------------ ray up


@pytest.mark.parametrize("name", FILES)
def test_ray_accepts_the_file(name: str) -> None:
    from ray.autoscaler._private.util import prepare_config, validate_config

    prepared = prepare_config(copy.deepcopy(read(name)))

    validate_config(prepared)
    workers = sum(kind["min_workers"] for kind in prepared["available_node_types"].values())
    assert workers == (0 if name == "local" else 2)


@pytest.mark.parametrize("mistake", [{"head_setup_comands": []}, {"max_workers": "two"}, {"auth": {"user": "me"}}])
def test_a_mistake_in_the_file_is_noticed(mistake: dict[str, Any]) -> None:
    from ray.autoscaler._private.util import prepare_config, validate_config

    with pytest.raises((jsonschema.ValidationError, TypeError)):
        validate_config(prepare_config(read("bw") | mistake))


def test_without_addresses_ray_up_stops_and_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    from ray.autoscaler._private.util import prepare_config

    data = yaml.safe_load((CLUSTERS / "bw.yaml").read_text())

    with pytest.raises(click.ClickException):
        prepare_config(data)

    assert "supply a `head_ip` and list of `worker_ips`" in re.sub(r"\s+", " ", "".join(capsys.readouterr()))


def test_without_a_project_ray_up_stops_and_says_so() -> None:
    source = Path(importlib.util.find_spec("ray").origin or "").parent / "autoscaler" / "_private" / "gcp" / "config.py"  # type: ignore[union-attr]

    assert "project_id" not in yaml.safe_load((CLUSTERS / "gcp.yaml").read_text())["provider"]
    # Needs Google's client to run; that the check is there is what the file's header counts on.
    assert "'project_id' must be set in the 'provider' section" in source.read_text()


@pytest.mark.parametrize("name", FILES)
def test_everything_starts_through_the_scripts_and_says_its_authentication(name: str) -> None:
    data = read(name)
    starts = [c for c in commands(data) if "start_head.sh" in c or "start_worker.sh" in c]

    assert len(starts) == (1 if name == "local" else 2)
    for start in starts:
        assert re.search(r"(^|\s)RAY_AUTH_MODE=(disabled|token)\s", start)
    assert "--autoscaling-config=~/ray_bootstrap_config.yaml" in only(data["head_start_ray_commands"], "start_head.sh")
    for key in ("head_start_ray_commands", "worker_start_ray_commands"):
        assert data[key] == [] or data[key][0] == "~/hsray-venv/bin/ray stop"


@pytest.mark.parametrize("name", WITH_WORKERS)
def test_workers_have_the_gpus_and_labels_that_the_configuration_asks_for(name: str) -> None:
    from ray._private.label_utils import validate_label_key, validate_label_value

    data = read(name)
    start = flags(only(data["worker_start_ray_commands"], "start_worker.sh"))
    labels = dict(label.split("=") for label in start["labels"].split(","))
    config = load_sizes("kimi-k2.5-bw").config

    assert start["num-gpus"] == "8"
    assert only(data["worker_setup_commands"], "setup_node.sh").endswith("--gpus 8 --compute-capability 12.0")
    assert labels.items() >= config.cluster.label_selector.items()
    for key, value in labels.items():
        validate_label_key(key)
        validate_label_value(value)
    if "available_node_types" in data:
        worker = data["available_node_types"]["bw"]
        assert (worker["labels"], worker["resources"]["GPU"]) == (labels, 8)
    assert flags(only(data["head_start_ray_commands"], "start_head.sh"))["num-gpus"] == "0"


@pytest.mark.parametrize("name", WITH_WORKERS)
def test_the_spool_is_where_the_configuration_wants_it_and_large_enough_for_all(name: str) -> None:
    _, _, size, folder = shlex.split(only(read(name)["worker_start_ray_commands"], "mount_spool.sh"))
    names = [path.stem for path in (ROOT / "configs").glob("*.yaml") if path.stem != "quickstart"]

    assert load_sizes("kimi-k2.5-bw").config.spool.path == folder
    assert int(size.removesuffix("g")) * 2**30 >= max(load_sizes(n).tmpfs_bytes for n in names)


@pytest.mark.parametrize("name", FILES)
def test_what_a_node_installs_from_travels_to_it(name: str) -> None:
    mounts = read(name)["file_mounts"]
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]

    assert all(target == f"~/hsray/{source}" and (ROOT / source).exists() for target, source in mounts.items())
    needed = {"pyproject.toml", "hsray", "clusters", project["readme"], *project["license-files"]}
    used = {word.split("/")[2] for c in commands(read(name)) for word in c.split() if word.startswith("~/hsray/")}
    assert needed | used <= set(mounts.values())
    for command in commands(read(name)):
        for script in re.findall(r"~/hsray/(\S+\.sh)", command):
            assert (ROOT / script).is_file(), script


def test_versions_are_the_same_everywhere() -> None:
    versions = dict(line.split("==") for line in (CLUSTERS / "versions.txt").read_text().splitlines() if "==" in line)
    lock = (ROOT / "scripts" / "lock" / "cpu.txt").read_text().splitlines()
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    rayjob = yaml.safe_load((CLUSTERS / "kuberay" / "rayjob.yaml").read_text())

    assert {f"{package}=={version}" for package, version in versions.items()} <= set(lock)
    assert f"sglang=={versions['sglang']}" in extras["gpu"]
    assert rayjob["spec"]["rayClusterSpec"]["rayVersion"] == versions["ray"]
    for name in WITH_WORKERS:
        assert f"'ray[default]=={versions['ray']}'" in (CLUSTERS / f"{name}.yaml").read_text()


# ------------------------------------------------------------------- shell


@pytest.mark.parametrize("name", FILES)
def test_commands_are_good_shell(name: str, tmp_path: Path) -> None:
    lines = commands(read(name))
    # Each is a shell of its own on the node; ray up defines RAY_HEAD_IP.
    text = "#!/usr/bin/env bash\nRAY_HEAD_IP=${RAY_HEAD_IP:?}\n" + "".join(f"(\n{line}\n)\n" for line in lines)
    script = tmp_path / "commands.sh"
    script.write_text(text)

    check_shell(script)


@pytest.mark.parametrize("script", [*SCRIPTS, "clusters/node_env.sh"])
def test_scripts_are_good_shell(script: str) -> None:
    path = ROOT / script

    check_shell(path)
    assert os.access(path, os.X_OK) == (script in SCRIPTS)


def check_shell(script: Path) -> None:
    parsed = subprocess.run(["bash", "-n", script], capture_output=True, text=True, check=False)
    assert parsed.returncode == 0, parsed.stderr
    if not shutil.which("shellcheck"):
        if os.environ.get("CI") or os.environ.get("HSRAY_REQUIRE_SERVICES") == "1":
            pytest.fail("shellcheck is missing: scripts/install --dev installs it")
        pytest.skip("needs shellcheck: apt-get install shellcheck")
    # SC2088: Ray expands the tilde of --autoscaling-config itself. SC2086: an address has no spaces.
    command = ["shellcheck", "-x", "--exclude=SC2088,SC2086", script]
    checked = subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT)
    assert checked.returncode == 0, checked.stdout


@pytest.fixture
def stub(tmp_path: Path) -> Callable[[str, str], Path]:
    """Makes programs in a folder that stands for a node's virtual environment."""
    binaries = tmp_path / "venv" / "bin"
    binaries.mkdir(parents=True)

    def make(name: str, body: str) -> Path:
        path = binaries / name
        path.write_text(f"#!/bin/bash\n{body}\n")
        path.chmod(0o755)
        return path

    return make


def run(script: str, *args: str, env: dict[str, str]) -> subprocess.CompletedProcess[str]:
    clean = {k: v for k, v in os.environ.items() if not k.startswith(("RAY_", "HSRAY_"))}
    command = ["bash", str(ROOT / script), *args]
    return subprocess.run(command, env=clean | env, capture_output=True, text=True, timeout=120, check=False)


@pytest.fixture
def node(stub: Callable[[str, str], Path], tmp_path: Path) -> dict[str, str]:
    """Environment of a node whose `ray` says what it was called with, and in which environment."""
    stub("ray", 'echo "CALLED $*"; env | grep -E "^RAY_|^PATH="; ulimit -n')
    stub("python", f'exec {sys.executable} "$@"')
    return {"HSRAY_VENV": str(tmp_path / "venv"), "HOME": str(tmp_path), "PYTHONPATH": str(ROOT)}


def called(result: subprocess.CompletedProcess[str]) -> list[str]:
    assert result.returncode == 0, result.stderr
    [line] = [line for line in result.stdout.splitlines() if line.startswith("CALLED ")]
    return line.split()[1:]


def test_start_head_sets_what_a_cluster_for_hsray_needs(node: dict[str, str], tmp_path: Path) -> None:
    result = run("scripts/start_head.sh", "--port=7000", "--num-gpus=0", env=node)

    words = called(result)
    assert words[:2] == ["start", "--head"]
    # The user's argument comes last, and wins.
    assert [word for word in words if word.startswith("--port=")][-1] == "--port=7000"
    assert {"--object-store-memory=2000000000", "--metrics-export-port=8080", "--num-gpus=0"} <= set(words)
    seen = dict(line.split("=", 1) for line in result.stdout.splitlines() if re.match(r"[A-Z_]+=", line))
    assert seen["RAY_AUTH_MODE"] == "disabled"
    assert {"RAY_PROMETHEUS_HOST", "RAY_GRAFANA_HOST", "RAY_GRAFANA_IFRAME_HOST"} <= seen.keys()
    assert seen["PATH"].split(":")[0] == f"{tmp_path}/venv/bin"
    dashboards = Path(seen["RAY_METRICS_GRAFANA_DASHBOARD_OUTPUT_DIR"])
    assert dashboards == tmp_path / "hsray-grafana"
    assert list(dashboards.glob("*dashboard.json"))


def test_start_scripts_keep_what_the_environment_says(node: dict[str, str]) -> None:
    said = {"RAY_AUTH_MODE": "token", "RAY_GRAFANA_HOST": "http://grafana:3000"}

    head = run("scripts/start_head.sh", env=node | said)
    worker = run("scripts/start_worker.sh", "10.0.0.1:7000", "--num-gpus=8", env=node | said)

    assert "RAY_AUTH_MODE=token" in head.stdout
    assert "RAY_GRAFANA_IFRAME_HOST=http://grafana:3000" in head.stdout
    assert "RAY_AUTH_MODE=token" in worker.stdout
    assert {"--address=10.0.0.1:7000", "--num-gpus=8"} <= set(called(worker))


def test_start_worker_knows_the_heads_usual_port(node: dict[str, str]) -> None:
    assert "--address=head-node:6379" in called(run("scripts/start_worker.sh", "head-node", env=node))


@pytest.mark.parametrize("args", [[], ["--num-gpus=8"]])
def test_start_worker_needs_an_address(node: dict[str, str], args: list[str]) -> None:
    refused = run("scripts/start_worker.sh", *args, env=node)

    assert (refused.returncode, refused.stderr.startswith("usage: ")) == (2, True)


def test_start_scripts_say_what_to_do_without_ray(tmp_path: Path) -> None:
    refused = run("scripts/start_head.sh", env={"HSRAY_VENV": str(tmp_path), "PATH": "/usr/bin:/bin"})

    assert refused.returncode == 1
    assert "run clusters/setup_node.sh first" in refused.stderr


@pytest.mark.parametrize("script", ["scripts/start_head.sh", "scripts/start_worker.sh"])
def test_help_is_the_comment_on_top(script: str, node: dict[str, str]) -> None:
    shown = run(script, "--help", env=node)

    assert shown.returncode == 0
    assert script in shown.stdout
    assert "set -euo" not in shown.stdout


# -------------------------------------------------------------- setup_node


@pytest.fixture
def setup(stub: Callable[[str, str], Path], tmp_path: Path) -> dict[str, str]:
    """A virtual environment whose pip only notes its arguments; its Python is ours."""
    log = tmp_path / "pip.log"
    stub("python", f'if [ "$2" = pip ]; then echo "$*" >> {log}; exit 0; fi; exec {sys.executable} "$@"')
    return {"HSRAY_VENV": str(tmp_path / "venv"), "PYTHON": sys.executable, "PYTHONPATH": str(ROOT)}


def nvidia_smi(stub: Callable[[str, str], Path], *gpus: str, status: int = 0) -> str:
    return str(stub("nvidia-smi", f"printf '%s\\n' {shlex.join(gpus)}; exit {status}").parent)


def test_setup_installs_once_and_then_checks_only(setup: dict[str, str], tmp_path: Path) -> None:
    first = run("clusters/setup_node.sh", env=setup)
    second = run("clusters/setup_node.sh", env=setup)

    assert (first.returncode, second.returncode) == (0, 0), first.stderr
    assert "sglang==0.5.21" in first.stdout
    [install] = (tmp_path / "pip.log").read_text().splitlines()
    assert f"-c {CLUSTERS}/versions.txt {ROOT}[gpu]" in install


def test_setup_stops_when_pip_does_and_tries_again(setup: dict[str, str], stub: Callable[[str, str], Path]) -> None:
    stub("python", f'if [ "$2" = pip ]; then exit 9; fi; exec {sys.executable} "$@"')
    assert run("clusters/setup_node.sh", env=setup).returncode == 9
    assert run("clusters/setup_node.sh", env=setup).returncode == 9


def test_setup_stops_on_an_old_python(setup: dict[str, str], stub: Callable[[str, str], Path]) -> None:
    old = stub("old-python", "exit 1")

    refused = run("clusters/setup_node.sh", env=setup | {"PYTHON": str(old)})

    assert refused.returncode == 1
    assert "Python 3.11 or newer" in refused.stderr


GPU = "NVIDIA RTX PRO 6000 Blackwell Server Edition, 97887 MiB, 580.95.05, 12.0"


@pytest.mark.parametrize(
    ("gpus", "status", "says"),
    [
        ([GPU] * 7, 0, "7 GPUs answer, the cluster's configuration says 8"),
        ([GPU] * 7 + [GPU.replace("580", "575")], 0, "the GPUs differ: "),
        ([GPU.replace("12.0", "9.0")] * 8, 0, "has compute capability 9.0, this cluster's configuration is for 12.0"),
        (
            ["NVIDIA-SMI has failed because it couldn't communicate with the NVIDIA driver."],
            9,
            "nvidia-smi fails: NVIDIA",
        ),
    ],
)
def test_setup_stops_on_gpus_that_are_not_the_clusters(
    gpus: list[str], status: int, says: str, setup: dict[str, str], stub: Callable[[str, str], Path]
) -> None:
    path = nvidia_smi(stub, *gpus, status=status)
    env = setup | {"PATH": f"{path}:{os.environ['PATH']}"}

    refused = run("clusters/setup_node.sh", "--gpus", "8", "--compute-capability", "12.0", env=env)

    assert refused.returncode == 1
    assert says in refused.stderr


@pytest.fixture(scope="module")
def check_node() -> ModuleType:
    spec = importlib.util.spec_from_file_location("check_node", CLUSTERS / "check_node.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_other_versions_than_the_clusters_are_problems(check_node: ModuleType) -> None:
    wanted = check_node.wanted_versions("# why\nray==2.1.0  # old\nno-such-package==1\nsglang==9.9.9\n")

    problems = list(check_node.version_problems(wanted))

    assert re.match(r"ray is 2\.\d+\.\d+ in .*, the cluster has 2\.1\.0 .*set the node up again", problems[0])
    assert "no-such-package is not installed" in problems[1]
    assert "has sglang 9.9.9, on which the capture was not tested" in problems[-1]
    assert list(check_node.version_problems(check_node.wanted_versions((CLUSTERS / "versions.txt").read_text()))) == []


@pytest.mark.parametrize(
    ("built_for", "says"),
    [
        (["sm_80", "sm_90", "sm_120"], None),
        (["sm_120a"], None),
        (["sm_80", "sm_90"], "has no kernels for sm_120 (it has sm_80, sm_90)"),
        ([], "sees no GPU: it is a build for CPUs"),
    ],
)
def test_a_torch_without_kernels_for_the_gpu_is_a_problem(
    built_for: list[str], says: str | None, check_node: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    import torch

    monkeypatch.setattr(torch.cuda, "get_arch_list", lambda: built_for)

    problems = list(check_node.kernel_problems([tuple(GPU.split(", "))]))

    assert len(problems) == (says is not None)
    assert says is None or says in problems[0]


def test_a_node_without_a_driver_is_told_to_install_it(
    check_node: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))

    [problem] = check_node.gpu_problems(check_node.find_gpus(), 8, None)

    assert "install the NVIDIA driver" in problem


# -------------------------------------------------------------- mount_spool


@pytest.fixture
def mount_point(tmp_path: Path) -> Iterator[Path]:
    folder = tmp_path / "spool"
    probe = tmp_path / "probe"
    probe.mkdir()
    if os.getuid() != 0 or subprocess.run(["mount", "-t", "tmpfs", "probe", probe], check=False).returncode != 0:
        pytest.skip("needs root that may mount")
    subprocess.run(["umount", probe], check=True)
    yield folder
    subprocess.run(["umount", folder], check=False, capture_output=True)


def test_the_spool_is_mounted_once_and_resized_in_place(mount_point: Path) -> None:
    env = {"PATH": os.environ["PATH"]}

    first = run("clusters/mount_spool.sh", "32m", str(mount_point), env=env)
    (mount_point / "kept").write_text("x")
    second = run("clusters/mount_spool.sh", "64m", str(mount_point), env=env)

    assert (first.returncode, second.returncode) == (0, 0), first.stderr + second.stderr
    assert shutil.disk_usage(mount_point).total == 64 * 2**20
    assert (mount_point / "kept").exists()
    assert mount_point.stat().st_mode & 0o1777 == 0o1777


def test_a_spool_is_not_mounted_over_something_else() -> None:
    refused = run("clusters/mount_spool.sh", "32m", "/proc", env={"PATH": os.environ["PATH"]})

    assert refused.returncode == 1
    assert "/proc is a mounted proc, not a tmpfs" in refused.stderr


# ------------------------------------------------------------------ KubeRay


@pytest.fixture(scope="module")
def rayjob() -> dict[str, Any]:
    return dict(yaml.safe_load((CLUSTERS / "kuberay" / "rayjob.yaml").read_text()))


@pytest.fixture(scope="module")
def schema() -> jsonschema.Draft7Validator:
    return jsonschema.Draft7Validator(json.loads((ROOT / "tests" / "rayjob_schema.json").read_text()))


def pods(rayjob: dict[str, Any]) -> list[dict[str, Any]]:
    cluster = rayjob["spec"]["rayClusterSpec"]
    return [cluster["headGroupSpec"], *cluster["workerGroupSpecs"]]


def decimal_bytes(quantity: str) -> float:
    number, unit = re.fullmatch(r"(\d+)(\w+)", quantity).groups()  # type: ignore[union-attr]
    return float(int(number) * {"G": 1e9, "Gi": 2**30}[unit])


def test_the_rayjob_fits_the_schema(rayjob: dict[str, Any], schema: jsonschema.Draft7Validator) -> None:
    assert [error.message for error in schema.iter_errors(rayjob)] == []


@pytest.mark.parametrize(
    "break_it",
    [
        lambda spec: spec.update(backofLimit=3),
        lambda spec: spec.update(backoffLimit="three"),
        lambda spec: spec["rayClusterSpec"]["workerGroupSpecs"][0].update(maxReplica=3),
        lambda spec: spec["rayClusterSpec"]["workerGroupSpecs"][0].pop("groupName"),
        lambda spec: spec["rayClusterSpec"]["headGroupSpec"]["rayStartParams"].update({"num-gpus": 0}),
        lambda spec: spec["rayClusterSpec"]["workerGroupSpecs"][0]["template"]["spec"].pop("containers"),
    ],
)
def test_the_schema_notices_mistakes(
    break_it: Callable[[dict[str, Any]], object], rayjob: dict[str, Any], schema: jsonschema.Draft7Validator
) -> None:
    broken = copy.deepcopy(rayjob)
    break_it(broken["spec"])

    assert list(schema.iter_errors(broken))


def test_the_job_resumes_by_itself_and_gets_the_time_to_stop(rayjob: dict[str, Any]) -> None:
    spec = rayjob["spec"]

    assert spec["backoffLimit"] > 0
    assert spec["shutdownAfterJobFinishes"]
    assert not [key for key in spec if key.startswith("entrypoint") and key != "entrypoint"]
    environment = yaml.safe_load(spec["runtimeEnvYAML"])["env_vars"]
    assert environment == {"RAY_JOB_STOP_WAIT_TIME_S": str(STOP_WAIT_SECONDS)}
    for pod in pods(rayjob):
        assert pod["template"]["spec"]["terminationGracePeriodSeconds"] > STOP_WAIT_SECONDS
        for container in pod["template"]["spec"]["containers"]:
            assert {"name": "RAY_AUTH_MODE", "value": "disabled"} in container["env"]
        assert int(pod["rayStartParams"]["object-store-memory"]) == 2_000_000_000


def test_every_mount_of_a_pod_has_its_volume(rayjob: dict[str, Any]) -> None:
    for pod in pods(rayjob):
        spec = pod["template"]["spec"]
        mounted = {mount["name"] for container in spec["containers"] for mount in container["volumeMounts"]}
        assert mounted == {volume["name"] for volume in spec["volumes"]}


def test_the_worker_has_what_the_configuration_asks_for(rayjob: dict[str, Any]) -> None:
    sizes = load_sizes("kimi-k2.5-bw")
    worker = pods(rayjob)[1]
    [container] = worker["template"]["spec"]["containers"]
    volumes = {volume["name"]: volume for volume in worker["template"]["spec"]["volumes"]}
    mounts = {mount["mountPath"]: volumes[mount["name"]] for mount in container["volumeMounts"]}
    memory = {name: v["emptyDir"]["sizeLimit"] for name, v in volumes.items() if "emptyDir" in v}

    assert worker["rayStartParams"]["num-gpus"] == container["resources"]["limits"]["nvidia.com/gpu"]
    assert int(worker["rayStartParams"]["num-gpus"]) == sizes.tp_size * sizes.replicas_per_node
    assert worker["labels"].items() >= sizes.config.cluster.label_selector.items()
    spool = mounts[sizes.config.spool.path]["emptyDir"]
    assert spool["medium"] == "Memory"
    assert decimal_bytes(spool["sizeLimit"]) >= sizes.tmpfs_bytes
    assert str(Path(sizes.config.model.path).parent) in mounts
    # Memory volumes count against the limit of the pod.
    assert sum(map(decimal_bytes, memory.values())) < decimal_bytes(container["resources"]["limits"]["memory"])


def test_the_configuration_that_the_job_mounts_is_one_that_loads(rayjob: dict[str, Any]) -> None:
    text = (CLUSTERS / "kuberay" / "rayjob.yaml").read_text()
    [source] = re.findall(r"--from-file=run\.yaml=(\S+)", text)
    [head] = pods(rayjob)[0]["template"]["spec"]["containers"]

    assert rayjob["spec"]["entrypoint"].split() == ["python", "-m", "hsray.extract", "/etc/hsray/run.yaml"]
    assert "/etc/hsray" in {mount["mountPath"] for mount in head["volumeMounts"]}
    assert load_config(ROOT / source, PLACEHOLDERS).model.path == "/models/Kimi-K2.5"
