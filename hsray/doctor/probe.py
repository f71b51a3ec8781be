"""What torch and SGLang say of themselves, asked in a process of its own: `python -m hsray.doctor.probe`.

Importing them takes seconds and a gigabyte, may fail in any way (a missing library of CUDA ends the process), and a
process that has looked at a GPU holds memory on it.
"""

import importlib
import os
import sys
from collections.abc import Mapping
from itertools import permutations
from typing import Any

from hsray.doctor.child import Answer, ask
from hsray.doctor.facts import SGLang, Torch
from hsray.errors import HsrayError

_SECONDS = 300
# Set in every process that a Ray node starts.
IN_RAY = "RAY_RAYLET_PID"


def examine_software(*, is_cpu: bool, has_gpus: bool, environment: Mapping[str, str]) -> tuple[Torch, SGLang]:
    """Run the probe. `environment` is `engine.env`: what the engine's processes will see on top of ours."""
    variables = {**os.environ, **environment}
    if IN_RAY in os.environ:
        # Ray may hide the GPUs from a task that reserves none.
        variables.pop("CUDA_VISIBLE_DEVICES", None)
    try:
        answer = ask("probe", {"is_cpu": is_cpu, "has_gpus": has_gpus}, _SECONDS, variables)
    except HsrayError as err:
        return Torch(error=str(err)), SGLang(error=str(err))
    torch, sglang = answer["torch"], answer["sglang"]
    torch["architectures"] = tuple(torch["architectures"])
    torch["apart"] = tuple((a, b) for a, b in torch["apart"])
    sglang["arguments"] = tuple(sglang["arguments"])
    return Torch(**torch), SGLang(**sglang)


def probe_torch(has_gpus: bool) -> dict[str, Any]:
    found: dict[str, Any] = {
        "version": "",
        "cuda": "",
        "devices": 0,
        "architectures": [],
        "apart": [],
        "error": "",
    }
    try:
        torch = importlib.import_module("torch")
        found["version"], found["cuda"] = str(torch.__version__), str(torch.version.cuda or "")
        if has_gpus and torch.version.cuda:
            torch.cuda.init()
            found["devices"] = torch.cuda.device_count()
            found["architectures"] = list(torch.cuda.get_arch_list())
            found["apart"] = [
                pair
                for pair in permutations(range(found["devices"]), 2)
                if pair[0] < pair[1] and not torch.cuda.can_device_access_peer(*pair)
            ]
    except Exception as err:  # noqa: BLE001 - a broken installation fails in every way
        found["error"] = f"{type(err).__name__}: {err}"
    return found


def probe_sglang(is_cpu: bool) -> dict[str, Any]:
    found: dict[str, Any] = {"version": "", "arguments": [], "error": ""}
    try:
        if is_cpu:
            from hsray.capture.cpu import cpu_environment

            cpu_environment(os.environ)
        from hsray.engine import known_arguments

        found["version"] = str(importlib.import_module("sglang").__version__)
        # What a replica imports; the argument list is the smaller half of it.
        importlib.import_module("sglang.srt.entrypoints.engine")
        found["arguments"] = list(known_arguments())
    except (Exception, SystemExit) as err:  # noqa: BLE001
        found["error"] = f"{type(err).__name__}: {err}"
    return found


def main() -> int:
    answer = Answer()
    is_cpu, has_gpus = answer.options["is_cpu"], answer.options["has_gpus"]
    answer.give({"torch": probe_torch(has_gpus), "sglang": probe_sglang(is_cpu)})
    return 0


if __name__ == "__main__":
    sys.exit(main())
