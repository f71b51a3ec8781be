"""What a driver prints and what it keeps: text, JSON, bounds."""

import io
import json
import logging
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from hsray import log as hsray_log
from hsray.errors import ConfigError
from hsray.log import BURST, ON_SCREEN, PROGRESS_LOGGER, about, add_driver_file, configure_logging

logger = logging.getLogger("hsray.test")


@pytest.fixture
def screen(monkeypatch: pytest.MonkeyPatch) -> Iterator[io.StringIO]:
    """Standard error."""
    stream = io.StringIO()
    # Not the interpreter's own: pytest puts its capture there between a fixture and its test.
    monkeypatch.setattr(hsray_log, "sys", SimpleNamespace(stderr=stream))
    yield stream
    # While `sys` is still replaced: closing says what was left out.
    for handler in logging.getLogger("hsray").handlers:
        handler.close()


class Clock:
    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 1000.0
        monkeypatch.setattr(hsray_log, "time", SimpleNamespace(monotonic=lambda: self.now))


def objects(text: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in text.splitlines()]


def test_text_is_one_line_for_each_event(screen: io.StringIO) -> None:
    configure_logging("info")

    logger.info("replica %s is ready", "r0#1", extra=about(replica="r0#1"))
    logger.debug("not said")

    [line] = screen.getvalue().splitlines()
    assert line.endswith(" INFO replica r0#1 is ready")


def test_json_has_the_sentence_and_its_fields(screen: io.StringIO, tmp_path: Path) -> None:
    configure_logging("debug", "json")
    add_driver_file(tmp_path, "run-1")

    logger.warning("replica %s is gone", "r0#1", extra=about(replica="r0#1", node="gpu-7", path=Path("/x")))
    try:
        raise ValueError("broken")
    except ValueError:
        logger.exception("unexpected")

    first, second = objects(screen.getvalue())
    assert first["message"] == "replica r0#1 is gone"
    assert (first["level"], first["logger"], first["run"]) == ("warning", "hsray.test", "run-1")
    assert (first["replica"], first["node"], first["path"]) == ("r0#1", "gpu-7", "/x")
    assert first["time"].endswith("+00:00")
    assert "ValueError: broken" in second["error"]


def test_the_drivers_file_holds_every_event_of_its_run_as_json(screen: io.StringIO, tmp_path: Path) -> None:
    configure_logging("info")
    path = add_driver_file(tmp_path / "logs", "run-1")

    for row in range(1000):
        logger.warning("prompt p%d is dead", row, extra=about(row=row))

    assert path.name.startswith("driver-")
    assert [o["row"] for o in objects(path.read_text())] == list(range(1000))
    assert {o["run"] for o in objects(path.read_text())} == {"run-1"}
    assert len(screen.getvalue().splitlines()) == BURST


def test_many_events_of_one_kind_are_counted_on_screen(
    screen: io.StringIO, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    clock = Clock(monkeypatch)
    configure_logging("info")
    path = add_driver_file(tmp_path, "run-1")
    for row in range(50):
        logger.warning("prompt p%d is dead", row)
    logger.info("another kind")
    assert "another kind" in screen.getvalue()
    assert "more like" not in screen.getvalue()

    clock.now += 61
    logger.info("anything later")

    said = screen.getvalue().splitlines()
    assert sum("is dead" in line and "more like" not in line for line in said) == BURST
    assert said[-2].endswith(f"WARNING 30 more like 'prompt p%d is dead' within 60 s; all are in {path}")
    logger.warning("prompt p%d is dead", 99)
    assert screen.getvalue().splitlines()[-1].endswith("prompt p99 is dead")


def test_what_was_left_out_is_counted_at_the_end_too(screen: io.StringIO) -> None:
    configure_logging("info")
    for row in range(50):
        logger.warning("prompt p%d is dead", row)

    configure_logging("info")  # closes the handlers, as the end of the process does

    assert screen.getvalue().splitlines()[-1].endswith("30 more like 'prompt p%d is dead' within 60 s")


def test_details_that_were_asked_for_are_all_printed(screen: io.StringIO) -> None:
    configure_logging("debug")

    for number in range(100):
        logger.debug("step %d", number)

    assert len(screen.getvalue().splitlines()) == 100


def test_progress_is_printed_unless_a_bar_shows_it(screen: io.StringIO, tmp_path: Path) -> None:
    configure_logging("info")
    path = add_driver_file(tmp_path, "run-1")
    progress = logging.getLogger(PROGRESS_LOGGER)
    for percent in range(100):
        progress.info("progress  %d%%", percent)
    assert len(screen.getvalue().splitlines()) == 100

    progress.info("progress  %d%%", 100, extra={ON_SCREEN: False})

    assert len(screen.getvalue().splitlines()) == 100
    assert len(path.read_text().splitlines()) == 101


def test_a_folder_that_cannot_be_written_is_named_with_its_key(screen: io.StringIO, tmp_path: Path) -> None:
    configure_logging("info")
    (tmp_path / "file").write_text("")

    with pytest.raises(ConfigError, match=r"log\.dir: cannot write .* Set log\.dir"):
        add_driver_file(tmp_path / "file" / "logs", "run-1")
