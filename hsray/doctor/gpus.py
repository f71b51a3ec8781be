"""What nvidia-smi says of this machine's GPUs. Anything it cannot say is left out, not guessed."""

import csv
import shutil
import subprocess
from dataclasses import dataclass

from hsray.doctor.facts import Gpu, GpuProcess

_SECONDS = 60
_GPU_FIELDS = "index,uuid,name,driver_version,memory.total,memory.free,compute_cap"
_PROCESS_FIELDS = "gpu_uuid,pid,process_name,used_memory"
_MIB = 1 << 20


@dataclass(frozen=True, slots=True)
class GpuFacts:
    has_nvidia_smi: bool
    gpus: tuple[Gpu, ...] = ()
    processes: tuple[GpuProcess, ...] = ()
    error: str = ""


def examine_gpus() -> GpuFacts:
    """Ask nvidia-smi, which takes seconds on a large node whose driver is not kept loaded."""
    program = shutil.which("nvidia-smi")
    if program is None:
        return GpuFacts(False)
    try:
        rows = _query(program, f"--query-gpu={_GPU_FIELDS}")
        indices = {row[1]: int(row[0]) for row in rows}
        gpus = tuple(parse_gpu(row) for row in rows)
        processes = tuple(
            GpuProcess(indices[row[0]], int(row[1]), row[2], _mebibytes(row[3]))
            for row in _query(program, f"--query-compute-apps={_PROCESS_FIELDS}")
            if row[0] in indices
        )
    except (OSError, subprocess.SubprocessError, ValueError, IndexError) as err:
        return GpuFacts(True, error=_explain(err))
    return GpuFacts(True, gpus, processes)


def parse_gpu(row: list[str]) -> Gpu:
    """One line of the query, in the order of its fields."""
    index, _, name, driver, total, free, capability = row
    major, _, minor = capability.partition(".")
    return Gpu(int(index), name, driver, _mebibytes(total), _mebibytes(free), (int(major), int(minor)))


def _query(program: str, question: str) -> list[list[str]]:
    answer = subprocess.run(
        [program, question, "--format=csv,noheader,nounits"],
        capture_output=True,
        text=True,
        timeout=_SECONDS,
        check=True,
    )
    return [row for row in csv.reader(answer.stdout.splitlines(), skipinitialspace=True) if row]


def _mebibytes(text: str) -> int:
    """0 where the GPU does not tell (`[N/A]`: its memory is the machine's)."""
    return int(text) * _MIB if text.isdigit() else 0


def _explain(err: Exception) -> str:
    if isinstance(err, subprocess.CalledProcessError):
        lines = (err.stdout + err.stderr).split("\n")
        said = " ".join(line.strip() for line in lines if line.strip())
        return f"exit code {err.returncode}: {said[:300]}"
    return str(err)
