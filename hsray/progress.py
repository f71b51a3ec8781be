"""What is seen of a running extraction: a live bar on a terminal, one structured line per interval elsewhere."""

import sys
import time
from collections import deque
from dataclasses import dataclass
from types import TracebackType
from typing import Self, TextIO

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from hsray.cluster import Totals
from hsray.events import Progress as SchedulerProgress
from hsray.units import format_bytes, format_seconds

# Rates are means over this window, so that a pause shows and a spike does not.
_WINDOW_SECONDS = 60.0


@dataclass(frozen=True, slots=True)
class Snapshot:
    """One line's worth of state."""

    scheduler: SchedulerProgress
    totals: Totals
    leases_total: int


class RateMeter:
    """Tokens, bytes and prompts per second over the last minute."""

    def __init__(self) -> None:
        self._points: deque[tuple[float, int, int, int]] = deque()

    def add(self, now: float, tokens: int, nbytes: int, prompts: int) -> None:
        self._points.append((now, tokens, nbytes, prompts))
        while len(self._points) > 2 and self._points[0][0] < now - _WINDOW_SECONDS:
            self._points.popleft()

    def rates(self) -> tuple[float, float, float]:
        """(tokens/s, bytes/s, prompts/s); zeros until there are two points."""
        if len(self._points) < 2:
            return 0.0, 0.0, 0.0
        (t0, *old), (t1, *new) = self._points[0], self._points[-1]
        elapsed = max(1e-6, t1 - t0)
        tokens, nbytes, prompts = ((b - a) / elapsed for a, b in zip(old, new, strict=True))
        return tokens, nbytes, prompts


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


class ProgressDisplay:
    """Context manager; call `update` about once a second."""

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
        elif now >= self._next_line:
            self._next_line = now + self._interval
            self._stream.write(f"{time.strftime('%Y-%m-%dT%H:%M:%S')} progress  {describe(snapshot, self._meter)}\n")
            self._stream.flush()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._bar is not None:
            self._bar.stop()
