"""Checks of a node's memory, shared memory, disks, limits, ports and environment. Pure: facts in, findings out."""

from collections.abc import Iterator

from hsray.doctor.facts import NodeFacts
from hsray.doctor.finding import Finding, fail, ok, warn
from hsray.doctor.subject import Subject
from hsray.units import format_bytes as size

_MEMORY_FILESYSTEMS = ("tmpfs", "ramfs", "hugetlbfs")
# Ray asks for 65,536 where the hard limit allows, and calls less than 4,096 too low for production.
_FEW_FILES, _ENOUGH_FILES = 4096, 65536
# Ray refuses work on a disk that is fuller than this (local_fs_capacity_threshold).
_DISK_FULL = 0.95
_LITTLE_LOG_SPACE = 1_000_000_000
_LONGEST_SOCKET_PATH = 107
_RAY_SOCKET = "/session_2026-01-01_00-00-00_000000_0000000/sockets/plasma_store"
_RAY_WORKER_PORTS = (10002, 19999)
_FEW_PORTS = 2000


def usable_memory(node: NodeFacts) -> int:
    """Bytes that processes started now may take: free memory, or what the control group leaves of it. What arenas of
    dead replicas hold comes back."""
    free = node.memory_free
    if node.memory_limit is not None:
        free = min(free, node.memory_limit - node.memory_used)
    return free + _dead_bytes(node)


def _dead_bytes(node: NodeFacts) -> int:
    return sum(arena.nbytes for arena in node.arenas if arena.is_dead)


def check_memory(subject: Subject, node: NodeFacts) -> Iterator[Finding]:
    replicas = max(1, subject.replicas_on(len(node.gpus)))
    arenas = replicas * subject.arena_bytes(node.spool.free + _dead_bytes(node))
    needed, parts = arenas, f"{replicas} x arena {size(arenas // replicas)}"
    if subject.config.engine.is_cpu:
        weights = subject.cpu_weight_bytes(sum(node.model.elements.values()))
        needed += replicas * weights
        parts += f" and weights {size(weights)}"
    usable = usable_memory(node)
    limit = "" if node.memory_limit is None else f" (control group: {size(node.memory_limit)})"
    seen = f"{size(usable)} of {size(node.memory_total)} free{limit}; the run takes {size(needed)} ({parts}) and more"
    advice = "lower spool.bytes or the number of replicas on this node, or raise its memory limit"
    if needed > usable:
        yield fail("memory", seen, advice)
    elif needed > 0.8 * usable:
        yield warn("memory", seen, f"little is left for Ray and SGLang's own processes: {advice}")
    else:
        yield ok("memory", seen)


def check_spool(subject: Subject, node: NodeFacts) -> Iterator[Finding]:
    """The arithmetic is the replica's own. Arenas of dead replicas are removed when a replica starts."""
    disk, spool = node.spool, subject.config.spool
    if not disk.writable:
        yield fail("spool", f"{disk.path} cannot be written", "give this user write access, or change spool.path")
        return
    replicas = max(1, subject.replicas_on(len(node.gpus)))
    free = disk.free + _dead_bytes(node)
    arena = subject.arena_bytes(free)
    seen = f"{size(free)} of {size(disk.total)} free at {disk.path} ({disk.filesystem}), {replicas} x {size(arena)}"
    enlarge = f"enlarge {disk.path} (docker: --shm-size; Kubernetes: emptyDir with medium Memory), or point spool.path "
    enlarge += "at a larger tmpfs"
    longest = subject.known_longest * subject.per_token
    if replicas * arena > free:
        yield fail("spool", seen, f"lower spool.bytes to {free // replicas:,}, or {enlarge}")
    elif longest > arena:
        yield fail(
            "spool",
            f"{seen}; the longest prompt ({subject.known_longest:,} tokens) needs {size(longest)}",
            f"set spool.bytes to {2 * longest:,}, and {enlarge}, or lower prompts.max_tokens",
        )
    elif spool.bytes == "auto" and arena < subject.wanted_arena_bytes():
        wanted = subject.wanted_arena_bytes()
        yield warn(
            "spool",
            f"{seen} instead of {size(wanted)} (spool.bytes auto takes a quarter of what is free at most)",
            f"prefill may wait for shards being written: set spool.bytes to {min(wanted, free // replicas):,}, "
            f"or {enlarge}",
        )
    else:
        yield ok("spool", seen)
    if disk.filesystem not in _MEMORY_FILESYSTEMS:
        yield warn(
            "spool file system",
            f"{disk.path} is on {disk.filesystem}, not in memory",
            "states would go through a disk: point spool.path at a tmpfs",
        )
    if subject.per_token and 0 < arena // subject.per_token < subject.longest and not longest > arena:
        fits = arena // subject.per_token
        yield ok("longest prompt", f"an arena holds {fits:,} tokens; the engine takes up to {subject.longest:,}")


def check_leftovers(subject: Subject, node: NodeFacts) -> Iterator[Finding]:
    dead = [arena for arena in node.arenas if arena.is_dead]
    live = len(node.arenas) - len(dead)
    if dead:
        yield warn(
            "leftovers",
            f"{len(dead)} arenas of dead replicas hold {size(_dead_bytes(node))} in {node.spool.path}",
            "the next replica removes them; to do it now, delete "
            + ", ".join(arena.path for arena in dead[:3])
            + (", ..." if len(dead) > 3 else ""),
        )
    if node.orphans:
        pids = ", ".join(f"{pid} ({name})" for pid, name in node.orphans[:5])
        yield warn(
            "leftovers",
            f"processes of SGLang without a parent: {pids}",
            "they may hold GPU memory: end them by their pid",
        )
    # Where this runs on a Ray node, one raylet is that node's own.
    others = len(node.raylets) - (1 if node.in_ray or subject.config.cluster.address else 0)
    if others > 0 and not subject.config.engine.is_cpu:
        yield warn(
            "leftovers",
            f"{others} other Ray nodes run on this machine: {', '.join(node.raylets[:3])}",
            "they know nothing of this run and may give away the same GPUs; `ray stop` there, if they are not needed",
        )
    if not dead and not node.orphans:
        yield ok("leftovers", "none" + (f"; {live} arenas in use" if live else ""))


def check_limits(subject: Subject, node: NodeFacts) -> Iterator[Finding]:
    soft, hard = node.open_files.soft, node.open_files.hard
    seen = f"{_number(soft)} open files, at most {_number(hard)}"
    if hard is not None and hard < _FEW_FILES:
        yield warn("open files", seen, f"raise the hard limit to {_ENOUGH_FILES} (ulimit -Hn, LimitNOFILE, --ulimit)")
    else:
        yield ok("open files", seen)
    if not subject.config.engine.is_cpu:
        locked = node.locked_memory.soft
        shown = "no limit" if locked is None else f"limit {size(locked)}, which the CUDA driver does not count against"
        yield ok("locked memory", shown)


def check_disks(subject: Subject, node: NodeFacts) -> Iterator[Finding]:
    temp, logs = node.ray_temp, node.logs
    seen = f"{size(temp.free)} of {size(temp.total)} free at {temp.path}"
    if not temp.writable:
        yield fail("Ray's folder", f"{temp.path} cannot be written", "set RAY_TMPDIR to a folder that can be")
    elif temp.total and 1 - temp.free / temp.total > _DISK_FULL:
        yield warn("Ray's folder", seen, "Ray refuses work on a disk that is 95% full: free space, or set RAY_TMPDIR")
    else:
        yield ok("Ray's folder", seen)
    if len(temp.path + _RAY_SOCKET) > _LONGEST_SOCKET_PATH:
        yield fail(
            "Ray's folder",
            f"{temp.path} is {len(temp.path)} characters long",
            f"sockets below it may have {_LONGEST_SOCKET_PATH} at most: set RAY_TMPDIR to a shorter path",
        )
    if not logs.writable:
        yield fail("log folder", f"{logs.path} cannot be written", "set log.dir to a folder that can be")
    elif logs.free < _LITTLE_LOG_SPACE:
        yield warn("log folder", f"{size(logs.free)} free at {logs.path}", "free space, or set log.dir")
    else:
        yield ok("log folder", f"{size(logs.free)} free at {logs.path}")


def check_ports(subject: Subject, node: NodeFacts) -> Iterator[Finding]:
    first, last = node.ephemeral_ports
    seen = f"the kernel gives away {first} to {last}"
    if last and last - first < _FEW_PORTS:
        yield warn("ports", seen, "every connection takes one: widen net.ipv4.ip_local_port_range")
    elif last and first <= _RAY_WORKER_PORTS[1] and last >= _RAY_WORKER_PORTS[0]:
        yield warn(
            "ports",
            f"{seen}; workers of `ray start` want {_RAY_WORKER_PORTS[0]} to {_RAY_WORKER_PORTS[1]}",
            "set net.ipv4.ip_local_port_range to begin at 32768, or give `ray start` other --min-worker-port and "
            "--max-worker-port",
        )
    else:
        yield ok("ports", seen if last else "the kernel does not say which ones it gives away")
    port = subject.config.engine.args.get("port")
    if port is None:
        return
    if int(port) in node.listening:
        yield fail(
            "engine port", f"somebody listens on {port} already", "remove engine.args.port: hsray finds a free one"
        )
    elif subject.replicas_on(len(node.gpus)) > 1:
        yield fail(
            "engine port",
            f"every replica of the node would take port {port}",
            "remove engine.args.port: hsray finds a free one for each",
        )


def _number(limit: int | None) -> str:
    return "unlimited" if limit is None else f"{limit:,}"
