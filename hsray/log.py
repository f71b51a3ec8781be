"""The one place that configures logging.

A driver writes to standard error, one line for each event as text or as JSON, and the same events as JSON to
`driver-*.jsonl` beside the logs of the replicas. A replica's process, with everything SGLang prints, writes to a file
of its own (`log_files.py`). Nothing of a replica's output crosses the network: what a driver prints grows with events,
not with replicas, and many events of one kind are counted instead of printed.
"""

import json
import logging
import logging.handlers
import os
import sys
import time
from dataclasses import dataclass
from datetime import UTC, datetime
from io import TextIOWrapper
from pathlib import Path
from typing import Any, Literal

from hsray.errors import ConfigError
from hsray.log_files import MAX_FILE_BYTES, lock_log, take_output

_FORMAT = "%(asctime)s %(levelname)s %(message)s"
_DATE_FORMAT = "%Y-%m-%dT%H:%M:%S"
# So many records of one kind are printed in so many seconds; the rest is counted, and stands in the driver's file.
BURST = 20
WINDOW_SECONDS = 60.0
# Comes once per interval by itself.
PROGRESS_LOGGER = "hsray.progress"
# Attribute of a record that is for the driver's file alone, if false: a bar shows the same.
ON_SCREEN = "hsray_on_screen"

Style = Literal["text", "json"]


def about(**fields: Any) -> dict[str, Any]:
    """Fields of a record beside its sentence: `log.info("...", extra=about(replica=name, node=host))`."""
    return {"hsray_fields": fields}


def first_line(text: str) -> str:
    """Of a reason that ends with the tail of a log, for a place where the tail was shown a moment ago."""
    return text.partition("\n")[0]


class JsonFormatter(logging.Formatter):
    """One JSON object per record: `time` (UTC, milliseconds), `level`, `logger`, `message`, `error` (a traceback), and
    the fields that were given with it. `constant` fields are the same in every record."""

    def __init__(self) -> None:
        super().__init__()
        self.constant: dict[str, Any] = {}

    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, Any] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
            **self.constant,
            **getattr(record, "hsray_fields", {}),
        }
        if record.exc_info:
            line["error"] = self.formatException(record.exc_info)
        return json.dumps(line, ensure_ascii=False, default=str)


@dataclass(slots=True)
class _Kind:
    """Records of one kind within the window that began at `since`."""

    since: float
    printed: int = 0
    left_out: int = 0


class StandardError(logging.Handler):
    """Writes to whatever `sys.stderr` is at the moment: a live bar replaces it, to keep lines above itself.

    Of records with the same template, BURST are printed in WINDOW_SECONDS; then one line says how many there were
    besides. A hundred nodes that die at once, or a million dead prompts, so make no more lines than twenty.
    """

    def __init__(self, style: Style) -> None:
        super().__init__()
        self.setFormatter(JsonFormatter() if style == "json" else logging.Formatter(_FORMAT, _DATE_FORMAT))
        self.file: Path | None = None
        self._kinds: dict[tuple[str, Any], _Kind] = {}

    def emit(self, record: logging.LogRecord) -> None:
        now = time.monotonic()
        self._close_windows(now - WINDOW_SECONDS)
        if not getattr(record, ON_SCREEN, True):
            return
        if record.name == PROGRESS_LOGGER or record.levelno < logging.INFO or self._may_print(record, now):
            self._write(record)

    def _may_print(self, record: logging.LogRecord, now: float) -> bool:
        kind = self._kinds.setdefault((record.name, record.msg), _Kind(now))
        if kind.printed < BURST:
            kind.printed += 1
            return True
        kind.left_out += 1
        return False

    def _close_windows(self, before: float) -> None:
        """Say what was left out in the windows that began before then."""
        for key, kind in list(self._kinds.items()):
            if kind.since > before:
                continue
            del self._kinds[key]
            if kind.left_out:
                where = f"; all are in {self.file}" if self.file else ""
                text = f"{kind.left_out} more like '{key[1]}' within {WINDOW_SECONDS:.0f} s{where}"
                note = logging.LogRecord(key[0], logging.WARNING, "", 0, text, None, None)
                note.hsray_fields = {"left_out": kind.left_out}
                self._write(note)

    def _write(self, record: logging.LogRecord) -> None:
        sys.stderr.write(self.format(record) + "\n")
        sys.stderr.flush()

    def close(self) -> None:
        self._close_windows(float("inf"))
        super().close()


class _DriverFile(logging.handlers.RotatingFileHandler):
    """Holds a lock on the file it writes, so that no replica of the node removes it as an old one."""

    def _open(self) -> TextIOWrapper:
        stream = super()._open()
        lock_log(stream.fileno())
        return stream


def configure_logging(level: str, style: Style = "text") -> None:
    """For command-line processes: hsray's records on standard error."""
    _set_handlers(StandardError(style), level=level)


def add_driver_file(directory: Path, run_id: str) -> Path:
    """Write this driver's records to a file as well, every one of them; returns its path.

    Raises:
        ConfigError: the folder cannot be made or written.
    """
    name = f"driver-{os.uname().nodename}-{os.getpid()}.jsonl"
    try:
        directory.mkdir(parents=True, exist_ok=True)
        file = _DriverFile(directory / name, maxBytes=MAX_FILE_BYTES, backupCount=1, encoding="utf-8")
    except OSError as err:
        raise ConfigError(
            f"log.dir: cannot write {directory} on {os.uname().nodename}: {err.strerror or err}. Set log.dir to a "
            "folder that every node can write"
        ) from err
    formatter = JsonFormatter()
    file.setFormatter(formatter)
    logger = logging.getLogger("hsray")
    formatters = [formatter]
    for handler in logger.handlers:
        if isinstance(handler, StandardError):
            handler.file = directory / name
            formatters += [handler.formatter] if isinstance(handler.formatter, JsonFormatter) else []
    for each in formatters:
        each.constant["run"] = run_id
    logger.addHandler(file)
    return directory / name


def configure_file_logging(directory: Path, name: str, level: str = "info") -> Path:
    """For replica processes: everything that this process and its children print goes to `<directory>/<name>.log`,
    hsray's records of this level and above among it. Returns the path.

    Raises:
        ConfigError: the folder cannot be made or written.
    """
    output = take_output(directory, name)
    handler = logging.StreamHandler(os.fdopen(os.dup(2), "w", buffering=1))
    handler.setFormatter(logging.Formatter(_FORMAT, _DATE_FORMAT))
    _set_handlers(handler, level=level)
    output.watch()
    return output.path


def _set_handlers(handler: logging.Handler, level: str) -> None:
    logger = logging.getLogger("hsray")
    for previous in logger.handlers:
        previous.close()
    logger.handlers[:] = [handler]
    logger.setLevel(level.upper())
    logger.propagate = False
