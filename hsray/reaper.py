"""Removes an arena once its owner is dead, however it died: `python reaper.py DIRECTORY` is a process of its own.

A replica that is killed (with its driver, by the OOM killer) cannot clean up, and where no other replica starts on the
node nothing would. The reaper waits for the lock that the kernel frees at the owner's death. It runs by its path, not
as a module of the package, and needs only the standard library: nothing of the owner's environment has to be there.
"""

import fcntl
import glob
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

LOCK_NAME = "lock"
LEFTOVERS_NAME = "leftovers"


def start_reaper(directory: Path) -> None:
    """Leave a process behind that removes `directory` when the lock in it, which the caller holds, is free.

    It belongs to no session or process group of the caller's, so what kills those leaves it alone.
    """
    subprocess.run(
        [sys.executable, "-I", "-S", __file__, str(directory)],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
        cwd="/",
        check=True,
    )


def remove_arena(directory: Path) -> None:
    """Remove what the arena adopted (`leftovers`: one absolute path or glob a line), then its folder."""
    try:
        names = (directory / LEFTOVERS_NAME).read_text().splitlines()
    except OSError:
        names = []
    for name in names:
        for file in glob.glob(name):  # noqa: PTH207 - Path.glob takes no absolute pattern
            Path(file).unlink(missing_ok=True)
    shutil.rmtree(directory, ignore_errors=True)


def _wait_and_remove(directory: Path) -> None:
    try:
        lock = os.open(directory / LOCK_NAME, os.O_RDWR)
    except OSError:
        return  # removed by its owner already
    fcntl.flock(lock, fcntl.LOCK_EX)
    remove_arena(directory)


if __name__ == "__main__":
    # Its parent, which would be the owner, ends at once: what kills an owner's children does not find it.
    if os.fork() == 0:
        for interrupt in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(interrupt, signal.SIG_IGN)
        _wait_and_remove(Path(sys.argv[1]))
