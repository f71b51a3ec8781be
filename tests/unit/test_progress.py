import io
import logging
from collections.abc import Iterator
from dataclasses import replace

import pytest

from hsray.cluster import Totals
from hsray.events import Progress
from hsray.log import ON_SCREEN
from hsray.progress import ProgressDisplay, RateMeter, Snapshot, describe, format_bytes, format_seconds

STATE = Progress(
    leases_open=788,
    leases_running=4,
    leases_resolving=0,
    leases_resolved=412,
    leases_lost=0,
    prompts_total=10_000,
    prompts_committed=3_430,
    prompts_dead=2,
    retries=3,
    speculations=0,
    replica_deaths=0,
    replicas_starting=0,
    replicas_ready=2,
    places_abandoned=0,
)


def test_one_line_says_what_an_operator_asks() -> None:
    meter = RateMeter()
    meter.add(0.0, 0, 0, 0)
    meter.add(10.0, 1_800_000, 21_000_000_000, 100)
    totals = Totals(100, 1_800_000, 21_000_000_000, 57, 41, 100)

    line = describe(Snapshot(STATE, totals, 1200), meter)

    for part in (
        "412/1200 leases",
        "34.3%",
        "180,000 tok/s",
        "2.1 GB/s",
        "spool 41%",
        "3 retries",
        "2 dead",
        "eta 10m",
    ):
        assert part in line
    assert "\n" not in line


def test_before_the_first_prompt_there_is_no_eta() -> None:
    line = describe(Snapshot(replace(STATE, prompts_committed=0), Totals(), 1200), RateMeter())

    assert "eta" not in line
    assert "0 tok/s" in line


def test_rates_forget_what_is_older_than_a_minute() -> None:
    meter = RateMeter()
    for second in range(0, 200, 10):
        meter.add(float(second), 1000 * min(second, 100), 0, 0)

    tokens, _, _ = meter.rates()

    assert tokens == 0.0


@pytest.fixture
def records() -> Iterator[list[logging.LogRecord]]:
    """What is logged as progress."""
    kept: list[logging.LogRecord] = []
    handler = logging.Handler()
    handler.emit = kept.append  # type: ignore[method-assign]
    logger = logging.getLogger("hsray.progress")
    before = logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    yield kept
    logger.removeHandler(handler)
    logger.setLevel(before)


def test_a_log_gets_lines_without_control_codes(records: list[logging.LogRecord]) -> None:
    stream = io.StringIO()
    with ProgressDisplay(10, 0, interval_seconds=0.0, stream=stream) as display:
        for _ in range(3):
            display.update(Snapshot(STATE, Totals(), 1200))

    assert stream.getvalue() == ""
    assert len(records) == 3
    for record in records:
        assert record.getMessage().startswith("progress  412/1200 leases")
        assert getattr(record, ON_SCREEN)
        assert record.__dict__["hsray_fields"]["prompts_committed"] == 3_430
        assert record.__dict__["hsray_fields"]["leases_total"] == 1200


def test_a_terminal_gets_a_bar_and_the_line_goes_to_the_file(records: list[logging.LogRecord]) -> None:
    stream = io.StringIO()
    stream.isatty = lambda: True  # type: ignore[method-assign]
    with ProgressDisplay(10_000, 0, interval_seconds=0.0, stream=stream) as display:
        display.update(Snapshot(STATE, Totals(), 1200))

    assert "3432/10000" in stream.getvalue()
    assert [getattr(record, ON_SCREEN) for record in records] == [False]


@pytest.mark.parametrize(
    ("seconds", "text"), [(5, "5s"), (65, "1m05s"), (3599.7, "1h00m"), (6720, "1h52m"), (100_000, "27h46m")]
)
def test_durations_read_well(seconds: float, text: str) -> None:
    assert format_seconds(seconds) == text


@pytest.mark.parametrize(("nbytes", "text"), [(999, "999 B"), (2_100_000_000, "2.1 GB"), (9.9e13, "99.00 TB")])
def test_sizes_are_decimal(nbytes: float, text: str) -> None:
    assert format_bytes(nbytes) == text
