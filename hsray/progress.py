"""What is seen of a running extraction: a live bar on a terminal, one structured line per interval elsewhere."""

import logging
import sys
import time
from dataclasses import asdict, dataclass
from types import TracebackType
from typing import Any, Self, TextIO

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from hsray.cluster import Totals
from hsray.events import Progress as SchedulerProgress
from hsray.history import RateMeter
from hsray.log import ON_SCREEN, PROGRESS_LOGGER, about
from hsray.units import format_bytes, format_seconds

log = logging.getLogger(PROGRESS_LOGGER)


@dataclass(frozen=True, slots=True)
class Snapshot:
    """One line's worth of state."""

    scheduler: SchedulerProgress
    totals: Totals
    leases_total: int


def describe(snapshot: Snapshot, meter: RateMeter) -> str:
    """The structured line."""
    scheduler, totals = snapshot.scheduler, snapshot.totals
    done = snapshot.leases_total - scheduler.leases_open
    tokens, nbytes, prompts = meter.rates()
    finished = scheduler.prompts_committed + scheduler.prompts_dead
    left = scheduler.prompts_total - finished
    spool = 100 * totals.spool_bytes / totals.spool_capacity if totals.spool_capacity else 0.0
    parts = [
        f"{max(0, done)}/{snapshot.leases_total} leases",
        f"{finished}/{scheduler.prompts_total} prompts {100 * finished / max(1, scheduler.prompts_total):.1f}%",
        f"{tokens:,.0f} tok/s",
        f"{format_bytes(nbytes)}/s",
        f"spool {spool:.0f}%",
        f"{totals.in_flight} in flight",
        f"{scheduler.replicas_ready} replicas",
        f"{scheduler.retries} retries",
        f"{scheduler.prompts_dead} dead",
    ]
    if prompts > 0:
        parts.append(f"eta {format_seconds(left / prompts)}")
    return "  ".join(parts)


def figures(snapshot: Snapshot, meter: RateMeter) -> dict[str, Any]:
    """What the line says, as fields for machines; the scheduler's counts under their own names."""
    tokens, nbytes, prompts = meter.rates()
    return {
        **asdict(snapshot.scheduler),
        "leases_total": snapshot.leases_total,
        "tokens_per_second": round(tokens, 1),
        "bytes_per_second": round(nbytes),
        "prompts_per_second": round(prompts, 3),
        "in_flight": snapshot.totals.in_flight,
        "spool_bytes": snapshot.totals.spool_bytes,
        "spool_capacity": snapshot.totals.spool_capacity,
    }


class ProgressDisplay:
    """Context manager; call `update` about once a second.

    A line is logged at each interval. Where the stream is a terminal, a bar is shown, and the line goes to the driver's
    file alone.
    """

    def __init__(self, total: int, done: int, interval_seconds: float, stream: TextIO = sys.stderr) -> None:
        self._stream = stream
        self._interval = interval_seconds
        self._next_line = 0.0
        self._meter = RateMeter()
        self._bar: Progress | None = None
        self._total, self._done = total, done

    def __enter__(self) -> Self:
        self._next_line = time.monotonic() + self._interval
        if self._stream.isatty():
            self._bar = Progress(
                TextColumn("{task.description}"),
                BarColumn(),
                MofNCompleteColumn(),
                TextColumn("{task.fields[detail]}"),
                TimeElapsedColumn(),
                console=Console(file=self._stream),
                transient=False,
            )
            self._bar.start()
            self._task = self._bar.add_task("prompts", total=self._total, completed=self._done, detail="starting")
        return self

    def update(self, snapshot: Snapshot) -> None:
        now = time.monotonic()
        totals = snapshot.totals
        if snapshot.scheduler.replicas_ready or totals.tokens:
            # Loading the model is not part of the rate.
            self._meter.add(now, totals.tokens, totals.stored_bytes, totals.prompts)
        if self._bar is not None:
            finished = snapshot.scheduler.prompts_committed + snapshot.scheduler.prompts_dead
            tokens, nbytes, _ = self._meter.rates()
            detail = f"{tokens:,.0f} tok/s  {format_bytes(nbytes)}/s  {snapshot.scheduler.prompts_dead} dead"
            if not snapshot.scheduler.replicas_ready:
                detail = "starting the engine"
            # Prompts stored but not yet resolved count as well: a lease of minutes should not look stuck.
            self._bar.update(self._task, completed=max(finished, self._done + totals.prompts), detail=detail)
        if now >= self._next_line:
            self._next_line = now + self._interval
            extra = about(**figures(snapshot, self._meter)) | {ON_SCREEN: self._bar is None}
            log.info("progress  %s", describe(snapshot, self._meter), extra=extra)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._bar is not None:
            self._bar.stop()
