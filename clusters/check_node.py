"""Is this machine what a cluster expects of a node? Its versions and its GPUs; prints every problem, and exits with 1.

Run by clusters/setup_node.sh, with the Python whose packages are looked at. `python -m hsray.doctor` looks at much
more, for a run; this is what has to fit before there is a cluster to run on.
"""

import argparse
import importlib.metadata
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

VERSIONS = Path(__file__).with_name("versions.txt")
_GPU_FIELDS = ("name", "memory.total", "driver_version", "compute_cap")


def wanted_versions(text: str) -> dict[str, str]:
    """Package to version, from a constraints file of `name==version` lines."""
    lines = (line.partition("#")[0].strip() for line in text.splitlines())
    return {name.strip(): version.strip() for name, _, version in (line.partition("==") for line in lines if line)}


def version_problems(wanted: dict[str, str]) -> Iterator[str]:
    for package, version in wanted.items():
        try:
            installed = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            yield f"{package} is not installed in {sys.prefix}; the cluster has {version}"
            continue
        if installed != version:
            yield (
                f"{package} is {installed} in {sys.prefix}, the cluster has {version} ({VERSIONS}): remove the virtual "
                "environment and set the node up again, or change the version for all nodes"
            )
    try:
        from hsray.capture.tested import TESTED_VERSIONS
    except ImportError as err:
        yield f"hsray cannot be imported in {sys.prefix}: {err}"
        return
    if "sglang" in wanted and wanted["sglang"] not in TESTED_VERSIONS:
        tested = ", ".join(TESTED_VERSIONS)
        yield f"{VERSIONS} has sglang {wanted['sglang']}, on which the capture was not tested (tested: {tested})"


def find_gpus() -> list[tuple[str, ...]] | str:
    """One row of `_GPU_FIELDS` per GPU, or why there are none."""
    command = ["nvidia-smi", f"--query-gpu={','.join(_GPU_FIELDS)}", "--format=csv,noheader"]
    try:
        answer = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    except FileNotFoundError:
        return "there is no nvidia-smi: install the NVIDIA driver"
    except subprocess.TimeoutExpired:
        return "nvidia-smi does not answer for a minute: a GPU has fallen off its bus, look at dmesg and reboot"
    if answer.returncode != 0:
        return f"nvidia-smi fails: {(answer.stdout + answer.stderr).strip()}"
    return [tuple(field.strip() for field in line.split(",")) for line in answer.stdout.splitlines() if line.strip()]


def gpu_problems(gpus: list[tuple[str, ...]] | str, count: int, capability: str | None) -> Iterator[str]:
    if isinstance(gpus, str):
        yield gpus
        return
    if len(gpus) != count:
        yield f"{len(gpus)} GPUs answer, the cluster's configuration says {count} (--gpus, --num-gpus)"
    if len(set(gpus)) > 1:
        yield f"the GPUs differ: {'; '.join(', '.join(gpu) for gpu in sorted(set(gpus)))}"
    for found in sorted({gpu[-1] for gpu in gpus}):
        if capability is not None and found != capability:
            yield f"{gpus[0][0]} has compute capability {found}, this cluster's configuration is for {capability}"


def kernel_problems(gpus: list[tuple[str, ...]] | str) -> Iterator[str]:
    """Whether the installed torch has kernels for these GPUs: without, the first one ends in "no kernel image"."""
    if isinstance(gpus, str) or not gpus:
        return
    try:
        import torch
    except ImportError as err:
        yield f"torch cannot be imported in {sys.prefix}: {err}"
        return
    built_for = torch.cuda.get_arch_list()
    if not built_for:
        yield f"torch {torch.__version__} sees no GPU: it is a build for CPUs, or its CUDA is newer than the driver"
    for capability in sorted({gpu[-1] for gpu in gpus}):
        arch = f"sm_{capability.replace('.', '')}"
        # sm_80 code runs on sm_86 and sm_89, sm_120 code on sm_121: the same major.
        if built_for and not any(name.startswith(arch[:-1]) for name in built_for):
            yield f"torch {torch.__version__} has no kernels for {arch} (it has {', '.join(built_for)})"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--gpus", type=int, default=0, help="GPUs that the node has to have; 0: none are looked at")
    parser.add_argument("--compute-capability", help="of every GPU, for example 12.0")
    args = parser.parse_args()
    problems = list(version_problems(wanted_versions(VERSIONS.read_text())))
    if args.gpus:
        gpus = find_gpus()
        wrong_gpus = list(gpu_problems(gpus, args.gpus, args.compute_capability))
        problems += wrong_gpus or list(kernel_problems(gpus))
    for problem in problems:
        print(f"check_node: {problem}", file=sys.stderr)
    if not problems:
        seen = f", {args.gpus} x {gpus[0][0]}" if args.gpus else ""
        python = ".".join(map(str, sys.version_info[:3]))
        print(f"check_node: Python {python}, {', '.join(VERSIONS.read_text().split()[-2:])}{seen}")
    return bool(problems)


if __name__ == "__main__":
    sys.exit(main())
