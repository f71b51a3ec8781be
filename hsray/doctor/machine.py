"""Facts of this machine from the kernel: memory, limits, file systems, ports, processes. Standard library only.

`proc` and `cgroups` are where the kernel shows them; tests show others.
"""

import os
import re
import resource
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path

from hsray.doctor.facts import Disk, Limit

PROC = Path("/proc")
CGROUPS = Path("/sys/fs/cgroup")
# An unlimited cgroup v1 says the largest multiple of the page size instead of nothing.
_NO_LIMIT = 1 << 60
_LISTENING = "0A"
_NAMES = re.compile(
    r"(NCCL_|RAY_|SGLANG_|CUDA_|NVIDIA_|TORCH|PYTORCH_|HF_|TRANSFORMERS_|OMP_|HSRAY_)\w+"
    r"|AWS_ENDPOINT_URL\w*|AWS_REGION|AWS_CA_BUNDLE|TMPDIR|LD_LIBRARY_PATH|LD_PRELOAD|PYTHONPATH|(HTTPS?|ALL|NO)_PROXY",
    re.IGNORECASE,
)
_SECRET = re.compile(r"TOKEN|SECRET|PASSWORD|CREDENTIAL|(API|ACCESS)_?KEY|JOB_CONFIG", re.IGNORECASE)
_NOT_SECRET = ("PATH", "PARALLELISM")
_USERINFO = re.compile(r"(?<=://)[^/@]+@")


def disk(path: str) -> Disk:
    """The file system that holds `path`, or its nearest parent that exists."""
    wanted = Path(path).expanduser().absolute()
    nearest = wanted
    while not nearest.exists():
        nearest = nearest.parent
    space = os.statvfs(nearest)
    return Disk(
        path=str(wanted),
        exists=nearest == wanted,
        writable=_can_write(nearest),
        filesystem=_filesystem(nearest),
        total=space.f_blocks * space.f_frsize,
        free=space.f_bavail * space.f_frsize,
    )


def _can_write(folder: Path) -> bool:
    """By trying: permission bits say little to root, to a mount of another machine, or of a kernel's file system."""
    try:
        Path(tempfile.mkdtemp(prefix=".hsray-doctor-", dir=folder)).rmdir()
    except OSError:
        return False
    return True


def _filesystem(path: Path) -> str:
    """Type of the file system mounted nearest above `path`, as the kernel names it."""
    real = path.resolve()
    best, kind = -1, "unknown"
    for line in _lines(PROC / "self/mountinfo"):
        before, _, after = line.partition(" - ")
        mounted = Path(before.split()[4].encode().decode("unicode_escape"))
        # A later line of the same mount point covers the earlier one.
        if real.is_relative_to(mounted) and len(mounted.parts) >= best:
            best, kind = len(mounted.parts), after.split()[0]
    return kind


def memory(proc: Path = PROC) -> tuple[int, int]:
    """(total, available) bytes."""
    found = {}
    for line in _lines(proc / "meminfo"):
        name, _, value = line.partition(":")
        if name in ("MemTotal", "MemAvailable"):
            found[name] = int(value.split()[0]) * 1024
    return found.get("MemTotal", 0), found.get("MemAvailable", 0)


def memory_limit(proc: Path = PROC, cgroups: Path = CGROUPS) -> tuple[int | None, int]:
    """(limit, used) of the control group with the least room, among ours and those above it; (None, 0) without one."""
    tightest: tuple[int | None, int] = (None, 0)
    for folder, limit_name, used_name in _groups(proc, cgroups):
        limit, used = _number(folder / limit_name), _number(folder / used_name)
        if limit is None or limit >= _NO_LIMIT or used is None:
            continue
        if tightest[0] is None or limit - used < tightest[0] - tightest[1]:
            tightest = limit, used
    return tightest


def _groups(proc: Path, cgroups: Path) -> Iterator[tuple[Path, str, str]]:
    for line in _lines(proc / "self/cgroup"):
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            root, names = cgroups, ("memory.max", "memory.current")
        elif "memory" in controllers.split(","):
            root, names = cgroups / "memory", ("memory.limit_in_bytes", "memory.usage_in_bytes")
        else:
            continue
        # Inside a container the path may be the host's; the root shown here is then the container's own group.
        folder = root / path.lstrip("/")
        while True:
            yield folder, *names
            if folder == root:
                break
            folder = folder.parent


def _number(file: Path) -> int | None:
    try:
        return int(file.read_text())
    except (OSError, ValueError):  # "max" is no limit
        return None


def limit(kind: int) -> Limit:
    """`kind` is resource.RLIMIT_NOFILE or alike."""
    soft, hard = (None if value == resource.RLIM_INFINITY else value for value in resource.getrlimit(kind))
    return Limit(soft, hard)


def listening(proc: Path = PROC) -> frozenset[int]:
    """TCP ports on which somebody listens."""
    ports = set()
    for name in ("tcp", "tcp6"):
        for line in _lines(proc / "net" / name):
            fields = line.split()
            if len(fields) > 3 and fields[3] == _LISTENING:
                ports.add(int(fields[1].rpartition(":")[2], 16))
    return frozenset(ports)


def ephemeral_ports(proc: Path = PROC) -> tuple[int, int]:
    """First and last port that the kernel gives away; (0, 0) if it does not say."""
    for line in _lines(proc / "sys/net/ipv4/ip_local_port_range"):
        first, last = line.split()
        return int(first), int(last)
    return 0, 0


def environment(variables: Mapping[str, str]) -> dict[str, str]:
    """Those variables that change how engines and clusters behave. Secrets and passwords in URLs are masked."""
    found = {}
    for name, value in sorted(variables.items()):
        if _NAMES.fullmatch(name):
            is_secret = _SECRET.search(name) and not name.upper().endswith(_NOT_SECRET)
            found[name] = "***" if is_secret else _USERINFO.sub("***@", value)
    return found


def raylets(proc: Path = PROC) -> tuple[str, ...]:
    """Session folders of Ray nodes that run on this machine, one per node."""
    sessions = []
    for _, command in _processes(proc):
        if command and command[0].endswith("/raylet"):
            sessions += [part.partition("=")[2] for part in command if part.startswith("--session_dir=")]
    return tuple(sorted(sessions))


def orphans(proc: Path = PROC) -> tuple[tuple[int, str], ...]:
    """SGLang's processes whose parent is gone, as (pid, name)."""
    found = []
    for pid, command in _processes(proc):
        name = command[0] if command else ""
        if name.startswith("sglang::") and _parent(proc, pid) == 1:
            found.append((pid, name))
    return tuple(sorted(found))


def _processes(proc: Path) -> Iterator[tuple[int, list[str]]]:
    for entry in proc.iterdir():
        if entry.name.isdigit():
            try:
                raw = (entry / "cmdline").read_bytes()
            except OSError:  # it ended while we looked
                continue
            yield int(entry.name), raw.decode(errors="replace").rstrip("\0").split("\0")


def _parent(proc: Path, pid: int) -> int:
    try:
        # The name in brackets may hold anything.
        return int((proc / str(pid) / "stat").read_text().rpartition(")")[2].split()[1])
    except OSError:
        return 0


def _lines(file: Path) -> list[str]:
    try:
        return file.read_text().splitlines()
    except OSError:
        return []
