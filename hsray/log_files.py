"""The log file of a replica: everything its process and SGLang's processes print, bounded in size, readable later.

The file takes the place of the process's standard output and error, and children inherit it, so the last words of
whatever dies are in it without anybody's help. No pipe lies between: nothing that prints can be held up, and nothing
is lost with a reader. Bounding it therefore means to cut the file that others keep open: it is copied to NAME.log.1
and emptied, and appending goes on at its start.
"""

import fcntl
import glob
import logging
import os
import re
import shutil
import sys
import threading
from pathlib import Path

from hsray.errors import ConfigError

log = logging.getLogger(__name__)

# SGLang prints one line for each step: some 250 bytes, 2 to 25 times a second. This is an hour of it at least.
MAX_FILE_BYTES = 32 << 20
# Of one run on one node. Files of the living are kept whatever they add up to: 2 x MAX_FILE_BYTES for each.
MAX_FOLDER_BYTES = 1 << 30
_CHECK_SECONDS = 10.0


class OutputFile:
    """The open log of this process and its children.

    Attributes:
        path: where it is.
    """

    def __init__(self, path: Path, descriptor: int, max_bytes: int = MAX_FILE_BYTES) -> None:
        self.path = path
        self._descriptor = descriptor
        self._max_bytes = max_bytes

    def watch(self) -> None:
        """Keep the size bounded from now on, in a thread that ends with the process."""
        threading.Thread(target=self._watch_forever, name="hsray-log", daemon=True).start()

    def _watch_forever(self) -> None:
        pause = threading.Event()
        while not pause.wait(_CHECK_SECONDS):
            try:
                self.bound()
            except OSError as err:  # a full disk: the next try may find room, and the engine goes on either way
                log.warning("cannot cut the log %s: %s", self.path, err)

    def bound(self) -> bool:
        """Move the content to `NAME.log.1`, over what is there, if the file is too large. Whether it was.

        What others print between the end of the copy and the cut is lost: some microseconds of lines.
        """
        if os.fstat(self._descriptor).st_size <= self._max_bytes:
            return False
        earlier = self.path.with_name(self.path.name + ".1")
        with self.path.open("rb") as source, earlier.open("wb") as target:
            shutil.copyfileobj(source, target, 1 << 20)
            os.ftruncate(self._descriptor, 0)
        os.write(self._descriptor, f"--- earlier lines: {earlier.name}; older ones are gone ---\n".encode())
        return True


def take_output(directory: Path, name: str) -> OutputFile:
    """Send everything that this process and its children print to `<directory>/<name>.log`.

    A name that a living process uses (two drivers at once on one run) gets a number: `<name>-2.log`. Files of dead
    processes are removed, oldest first, where the folder holds too much.

    Args:
        name: made safe for a file name.

    Raises:
        ConfigError: the folder cannot be made or written.
    """
    try:
        directory.mkdir(parents=True, exist_ok=True)
        remove_old_logs(directory)
        path, descriptor = _open_free(directory, file_stem(name))
    except OSError as err:
        raise ConfigError(
            f"log.dir: cannot write {directory} on {os.uname().nodename}: {err.strerror or err}. Set log.dir to a "
            "folder that every node can write"
        ) from err
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    return OutputFile(path, descriptor)


def file_stem(name: str) -> str:
    return re.sub(r"[^\w.-]+", "_", name)


def find_log(directory: str | Path, name: str) -> Path | None:
    """The log of the latest process of this name, on this machine."""
    stem = file_stem(name)
    named = Path(directory).glob(f"{glob.escape(stem)}*.log")
    found = [path for path in named if re.fullmatch(r"(-\d+)?", path.stem[len(stem) :])]
    return max(found, key=lambda p: p.stat().st_mtime, default=None)


def tail(path: str | Path, lines: int = 25, width: int = 400) -> str:
    """The last lines of a log on this machine, each cut to `width` characters; empty if it cannot be read.

    SGLang prints all its arguments in one line of several thousand characters.
    """
    try:
        with open(path, "rb") as file:  # noqa: PTH123 - the binary mode matters, not the API
            file.seek(0, os.SEEK_END)
            file.seek(max(0, file.tell() - 64_000))
            text = file.read().decode("utf-8", errors="replace")
    except OSError:
        return ""
    kept = text.splitlines()[-lines:]
    return "\n".join(line if len(line) <= width else line[: width - 3] + "..." for line in kept)


def remove_old_logs(directory: Path, max_bytes: int = MAX_FOLDER_BYTES) -> list[Path]:
    """Remove logs of dead processes, oldest first, until the folder holds at most `max_bytes`; those removed."""
    sizes = {}
    for path in directory.iterdir():
        if re.search(r"\.(log|jsonl)(\.1)?$", path.name):
            try:
                stat = path.stat()
            except FileNotFoundError:
                continue  # another replica of this node does the same
            sizes[path] = (stat.st_mtime, stat.st_size)
    total = sum(size for _, size in sizes.values())
    removed = []
    for path in sorted(sizes, key=lambda p: sizes[p]):
        if total <= max_bytes:
            break
        if _is_in_use(path.with_name(path.name.removesuffix(".1"))):
            continue
        path.unlink(missing_ok=True)
        removed.append(path)
        total -= sizes[path][1]
    return removed


def _open_free(directory: Path, stem: str) -> tuple[Path, int]:
    number = 1
    while True:
        path = directory / (f"{stem}.log" if number == 1 else f"{stem}-{number}.log")
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        if lock_log(descriptor):
            return path, descriptor
        os.close(descriptor)
        number += 1


def lock_log(descriptor: int) -> bool:
    """Mark an open log as in use for as long as any process holds it open; False if another one does."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        return True  # a file system without locks: names are shared there, as they are in any folder of logs
    return True


def _is_in_use(path: Path) -> bool:
    try:
        descriptor = os.open(path, os.O_RDWR)
    except OSError:
        return False
    try:
        return not lock_log(descriptor)
    finally:
        os.close(descriptor)
