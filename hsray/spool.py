"""The spool: one shared-memory arena per replica, between SGLang's processes and the shard writer.

The replica creates the arena and decides where every prompt goes; the capture side only maps the file and
writes where the request id tells it to. A slot is site-major `[sites, tokens, hidden]`, so each site of a
prompt is one contiguous extent and no CPU ever transposes. Space is allocated with `posix_fallocate` before
it is mapped: a full tmpfs is an ENOSPC here, never a SIGBUS later. Only numpy and the standard library.
"""

import bisect
import errno
import fcntl
import logging
import mmap
import os
import re
import shutil
import subprocess
import time
import uuid
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from hsray.errors import ConfigError, SpoolFull
from hsray.reaper import LEFTOVERS_NAME, LOCK_NAME, remove_arena, start_reaper

log = logging.getLogger(__name__)

ARENA_NAME = "arena"
# Written into the lock file: a folder is an arena by its name and by this, so that a spool.path shared with
# strangers (/dev/shm itself) costs them nothing.
_MARK = b"hsray arena\n"
_NAME = re.compile(r"(\.new-)?[0-9a-f]{16}")
_NEW_PREFIX = ".new-"
_GPU_PREFIX = "gpu-"
_ABANDONED_NEW_SECONDS = 3600.0
_NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.ENOMEM)
# Slots start on a page: a D2H copy never shares a page with another prompt's.
ALIGNMENT = 4096


@dataclass(frozen=True, slots=True)
class Slot:
    """A place in the arena: `[offset, offset + nbytes)`; `reserved` is what the allocator holds for it."""

    offset: int
    nbytes: int
    reserved: int


class SlotAllocator:
    """First-fit allocation of byte ranges in `[0, capacity)`, with coalescing. Not thread-safe."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self._free: list[tuple[int, int]] = [(0, capacity)]  # (offset, nbytes), sorted, never adjacent
        self.used_bytes = 0

    def allocate(self, nbytes: int) -> Slot | None:
        """The lowest free slot of at least `nbytes`, or None if there is none now."""
        need = max(1, -(-nbytes // ALIGNMENT)) * ALIGNMENT
        for i, (offset, size) in enumerate(self._free):
            if size >= need:
                if size == need:
                    del self._free[i]
                else:
                    self._free[i] = (offset + need, size - need)
                self.used_bytes += need
                return Slot(offset, nbytes, need)
        return None

    def free(self, slot: Slot) -> None:
        """Give a slot back. Raises ValueError if any of it is free already."""
        start, end = slot.offset, slot.offset + slot.reserved
        i = bisect.bisect_left(self._free, (start, 0))
        before = self._free[i - 1] if i else None
        after = self._free[i] if i < len(self._free) else None
        if (before and before[0] + before[1] > start) or (after and after[0] < end) or end > self.capacity:
            raise ValueError(f"slot {slot} is not allocated")
        if after and after[0] == end:
            end += after[1]
            del self._free[i]
        if before and before[0] + before[1] == start:
            start = before[0]
            del self._free[i - 1]
            i -= 1
        self._free.insert(i, (start, end - start))
        self.used_bytes -= slot.reserved


class Admission:
    """Byte budget with hysteresis: closes above the high watermark, opens again below the low one.

    A prompt larger than the high watermark is let into an empty arena: it would never fit otherwise.
    Not thread-safe; the replica holds its lock around every call.
    """

    def __init__(self, capacity: int, high_watermark: float, low_watermark: float) -> None:
        self.allocator = SlotAllocator(capacity)
        self.high_bytes = int(capacity * high_watermark)
        self.low_bytes = int(capacity * low_watermark)
        self.is_open = True
        self.leaked_bytes = 0

    @property
    def used_bytes(self) -> int:
        """Bytes of slots that will come back."""
        return self.allocator.used_bytes - self.leaked_bytes

    @property
    def capacity(self) -> int:
        return self.allocator.capacity

    def admit(self, nbytes: int) -> Slot | None:
        """A slot, or None while there is no room.

        Raises:
            SpoolFull: the arena could not hold `nbytes` even when empty.
        """
        if nbytes > self.capacity // ALIGNMENT * ALIGNMENT:
            raise SpoolFull(
                f"the prompt needs {nbytes:,} bytes of hidden states, the arena has {self.capacity:,}: "
                "raise spool.bytes (and the size of the file system at spool.path)"
            )
        used = self.used_bytes
        if not self.is_open and used <= self.low_bytes:
            self.is_open = True
        if used and (not self.is_open or used + nbytes > self.high_bytes):
            self.is_open = False
            return None
        return self.allocator.allocate(nbytes)

    def release(self, slot: Slot) -> None:
        self.allocator.free(slot)

    def leak(self, slot: Slot) -> None:
        """Never use the slot again: the engine may still write to it."""
        self.leaked_bytes += slot.reserved


class Arena:
    """The owner's end: makes the file, maps it, removes it. One per replica incarnation."""

    def __init__(self, root: str | Path, nbytes: int) -> None:
        """Create `<root>/<uuid>/arena` of `nbytes` bytes, all of them really allocated.

        Raises:
            ConfigError: `root` is not writable.
            SpoolFull: the file system has no room (now: a dead predecessor's arena may be about to go).
        """
        root = Path(root)
        self.nbytes = nbytes
        name = uuid.uuid4().hex[:16]
        staging, self.directory = root / f"{_NEW_PREFIX}{name}", root / name
        try:
            staging.mkdir(parents=True, mode=0o700)
            # Held for the life of this process and freed by the kernel at its death, in whatever pid
            # namespace: a folder whose lock can be taken has no owner.
            self._lock = os.open(staging / LOCK_NAME, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
            fcntl.flock(self._lock, fcntl.LOCK_EX)
            os.write(self._lock, _MARK)
            staging.rename(self.directory)
        except OSError as err:
            shutil.rmtree(staging, ignore_errors=True)
            # Without room it may be another replica's arena that is about to be refused, or a dead one's.
            kind = SpoolFull if err.errno in _NO_ROOM else ConfigError
            raise kind(f"spool.path: cannot make a folder in {root}: {err.strerror}") from err
        self.path = self.directory / ARENA_NAME
        try:
            start_reaper(self.directory)
        except (OSError, subprocess.CalledProcessError) as err:
            log.warning("no reaper for %s: %s. Should this process be killed, the next replica sweeps", self.path, err)
        file = os.open(self.path, os.O_CREAT | os.O_EXCL | os.O_RDWR | os.O_CLOEXEC, 0o600)
        try:
            os.posix_fallocate(file, 0, nbytes)
            self._map = mmap.mmap(file, nbytes)
        except OSError as err:
            self.remove()
            if err.errno in _NO_ROOM:
                free = shutil.disk_usage(root).free
                raise SpoolFull(
                    f"spool.bytes: {nbytes:,} bytes do not fit into {root}, which has {free:,} free: "
                    "lower spool.bytes, point spool.path at a larger tmpfs, or enlarge it "
                    "(docker: --shm-size, Kubernetes: an emptyDir with medium Memory)"
                ) from err
            raise ConfigError(f"spool.path: cannot allocate the arena in {root}: {err.strerror}") from err
        finally:
            os.close(file)

    def view(self, offset: int, nbytes: int) -> memoryview:
        """Zero-copy view of arena bytes. Release it before `remove`."""
        return memoryview(self._map)[offset : offset + nbytes]

    def adopt(self, files: Iterable[str | Path]) -> None:
        """Name shared-memory files (absolute paths or globs) that go with this arena, whoever removes it: what
        SGLang's processes would have unlinked themselves had they not been killed."""
        (self.directory / LEFTOVERS_NAME).write_text("\n".join(str(file) for file in files))

    def remove(self) -> None:
        """Unlink the arena and what it adopted, and let go of the lock. Views already given out stay readable."""
        remove_arena(self.directory)
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1


def name_gpu(arena_path: str | Path, uuid: str) -> None:
    """Note beside the arena that a process of its replica computes on this GPU. Each rank does it for its own."""
    Path(arena_path).with_name(f"{_GPU_PREFIX}{uuid}").touch(mode=0o600)


def named_gpus(arena_path: str | Path) -> tuple[str, ...]:
    """UUIDs of the GPUs that the replica of an arena uses, sorted; empty on CPUs."""
    return tuple(sorted(f.name.removeprefix(_GPU_PREFIX) for f in Path(arena_path).parent.glob(f"{_GPU_PREFIX}*")))


def sweep(root: str | Path) -> list[Path]:
    """Remove arenas under `root` whose owner is dead; returns what was removed.

    An arena of a live process, of whatever run or container, keeps its lock and is left alone.
    """
    removed = []
    for directory in Path(root).glob("*"):
        if not _NAME.fullmatch(directory.name):
            continue
        is_new = directory.name.startswith(_NEW_PREFIX)
        try:
            if is_new and time.time() - directory.stat().st_mtime < _ABANDONED_NEW_SECONDS:
                continue  # its owner may be between mkdir and flock
            lock = os.open(directory / LOCK_NAME, os.O_RDWR | os.O_CLOEXEC)
        except OSError:
            continue  # not an arena, another user's, or removed by its owner just now
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if os.pread(lock, len(_MARK), 0) != _MARK:
                continue
        except OSError:
            continue
        else:
            remove_arena(directory)
            removed.append(directory)
        finally:
            os.close(lock)
    return removed


@dataclass(frozen=True, slots=True)
class FoundArena:
    """An arena of some replica: its folder, its size in bytes, and whether its owner is dead."""

    directory: Path
    nbytes: int
    is_dead: bool


def find_arenas(root: str | Path) -> list[FoundArena]:
    """The arenas under `root` that this user may look at. Changes nothing."""
    found = []
    for directory in sorted(Path(root).glob("*")):
        if not _NAME.fullmatch(directory.name) or directory.name.startswith(_NEW_PREFIX):
            continue
        try:
            lock = os.open(directory / LOCK_NAME, os.O_RDONLY | os.O_CLOEXEC)
        except OSError:
            continue
        try:
            if os.pread(lock, len(_MARK), 0) != _MARK:
                continue
            nbytes = (directory / ARENA_NAME).stat().st_blocks * 512
            fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            found.append(FoundArena(directory, nbytes, is_dead=False))
        except OSError:
            continue
        else:
            found.append(FoundArena(directory, nbytes, is_dead=True))
        finally:
            os.close(lock)
    return found


def shared_memory_files(pid: int) -> set[str]:
    """Files under /dev/shm that the process or any of its descendants has mapped."""
    try:
        with open(f"/proc/{pid}/maps") as maps:  # noqa: PTH123
            # The path is the sixth field; deleted files have nothing left to remove.
            paths = [line.split(maxsplit=5)[5].rstrip() for line in maps if "/dev/shm/" in line]
        children = [
            int(child)
            for task in Path(f"/proc/{pid}/task").iterdir()
            for child in (task / "children").read_text().split()
        ]
    except OSError:  # it ended while we looked
        return set()
    found = {path for path in paths if not path.endswith("(deleted)")}
    return found.union(*(shared_memory_files(child) for child in children))


# Four leases side by side below the high watermark, and room for prompts that straddle it.
_AUTO_SHARDS = 6


def auto_arena_bytes(root: str | Path, shard_bytes: int, largest_prompt_bytes: int, replicas_per_node: int) -> int:
    """Arena size for `spool.bytes: auto`: six shards or two of the largest prompt, whichever is more, at
    most a quarter of what is free at `root` shared by the node's replicas, in whole pages.

    Raises ConfigError if `root` cannot be made.
    """
    root = Path(root)
    try:
        root.mkdir(parents=True, exist_ok=True)
        free = shutil.disk_usage(root).free
    except OSError as err:
        raise ConfigError(f"spool.path: {root} is not usable: {err.strerror}") from err
    return arena_bytes_of(free, shard_bytes, largest_prompt_bytes, replicas_per_node)


def arena_bytes_of(free: int, shard_bytes: int, largest_prompt_bytes: int, replicas_per_node: int) -> int:
    """The arithmetic of `auto_arena_bytes`, for a file system with `free` bytes."""
    wanted = max(_AUTO_SHARDS * shard_bytes, 2 * largest_prompt_bytes)
    nbytes = min(wanted, free // 4 // max(1, replicas_per_node))
    return max(ALIGNMENT, nbytes // ALIGNMENT * ALIGNMENT)
