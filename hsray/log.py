"""The one place that configures logging.

Ours goes to standard error, one line per event; SGLang's and Ray's goes to files whose path is printed. A
replica process hands its whole standard output and error to its file, so that whatever SGLang's children print
ends there as well.
"""

import logging
import os
import re
import sys
from pathlib import Path

_FORMAT = "%(asctime)s %(levelname)s %(message)s"
_DATE_FORMAT = "%Y-%m-%dT%H:%M:%S"


class _StandardError(logging.Handler):
    """Writes to whatever `sys.stderr` is at the moment: a live bar replaces it, to keep lines above itself."""

    def emit(self, record: logging.LogRecord) -> None:
        sys.stderr.write(self.format(record) + "\n")
        sys.stderr.flush()


def configure_logging(level: str) -> None:
    """For command-line processes: hsray's records on standard error."""
    handler = _StandardError()
    handler.setFormatter(logging.Formatter(_FORMAT, _DATE_FORMAT))
    logger = logging.getLogger("hsray")
    logger.handlers[:] = [handler]
    logger.setLevel(level.upper())
    logger.propagate = False


def configure_file_logging(directory: Path, name: str) -> Path:
    """For replica processes: everything this process and its children print goes to `<directory>/<name>.log`.

    Returns the path. The name is made safe for a file name.
    """
    directory.mkdir(parents=True, exist_ok=True)
    path = directory / (re.sub(r"[^\w.-]+", "_", name) + ".log")
    file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    os.dup2(file, 1)
    os.dup2(file, 2)
    os.close(file)
    handler = logging.StreamHandler(os.fdopen(os.dup(2), "w", buffering=1))
    handler.setFormatter(logging.Formatter(_FORMAT, _DATE_FORMAT))
    logger = logging.getLogger("hsray")
    logger.handlers[:] = [handler]
    logger.setLevel(logging.INFO)
    logger.propagate = False
    return path


def tail(path: str | Path, lines: int = 30) -> str:
    """The last lines of a log on this machine; empty if it cannot be read."""
    try:
        with open(path, "rb") as file:  # noqa: PTH123 - the binary mode matters, not the API
            file.seek(0, os.SEEK_END)
            file.seek(max(0, file.tell() - 64_000))
            text = file.read().decode("utf-8", errors="replace")
    except OSError:
        return ""
    return "\n".join(text.splitlines()[-lines:])
