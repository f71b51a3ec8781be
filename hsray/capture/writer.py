"""States into the arena: one plain copy per prompt and site, then one message when a prompt is whole.

On CUDA a step's rows are first copied into one of two staging buffers on the GPU, in the order of the forward
stream; that costs a thousandth of the step, frees SGLang's own tensors at once, and bounds the memory that
capture takes: the buffers are allocated before SGLang sizes its KV pool, so the pool shrinks by them. From there
a side stream copies each prompt's rows of each site into the arena, which is registered with the driver, so the
copies are true DMA to where the shard writer reads; a thread waits for their events. The forward stream never
waits for a copy unless it is two steps ahead. On CPU the arena is written directly.
"""

import logging
import mmap
import os
import queue
import threading
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace

import torch

from hsray.capture.settings import CaptureSettings
from hsray.channel import RUN_LAYOUT, Captured, CaptureFailed, CaptureStats, ChannelClient, RequestId
from hsray.crash_points import crash_point

log = logging.getLogger(__name__)

# Steps whose events the waiting thread may lag behind before the scheduler's thread waits for it.
MAX_OUTSTANDING_STEPS = 64
# Each of the two staging buffers holds a whole step, up to this size; larger steps go through in pieces.
MAX_STAGING_BYTES = 2 << 30
_STATS_SECONDS = 0.5


@dataclass(frozen=True, slots=True)
class Span:
    """Rows `[first_row, first_row + count)` of a step are positions `[start, start + count)` of a prompt."""

    rid: str
    request: RequestId
    first_row: int
    start: int
    count: int
    prompt_crc32: int


@dataclass(slots=True)
class Progress:
    """How much of one prompt is in the arena."""

    written: bytearray
    left: int
    rewritten: int = 0
    norm_sums: list[float] = field(default_factory=list)
    bad: tuple[str, int, str] | None = None


@dataclass(frozen=True, slots=True)
class Step:
    """Copies on their way: what they hold, per-row norms `[sites, rows]` float32 on the host, and their events."""

    spans: list[Span]
    sites: tuple[str, ...]
    norms: torch.Tensor
    started: "torch.cuda.Event | None" = None
    copied: "torch.cuda.Event | None" = None
    finished: "torch.cuda.Event | None" = None  # the norms are there, too


class Staging:
    """Two buffers on the GPU, used in turn. `acquire` makes the forward stream wait for the copies out of one."""

    def __init__(self, nbytes: int, device: torch.device) -> None:
        self.nbytes = nbytes
        self._buffers = [torch.empty(nbytes, dtype=torch.uint8, device=device) for _ in range(2)]
        self._released: list[torch.cuda.Event | None] = [None, None]
        self._turn = 0

    def acquire(self) -> torch.Tensor:
        self._turn ^= 1
        released = self._released[self._turn]
        if released is not None:
            torch.cuda.current_stream().wait_event(released)
        return self._buffers[self._turn]

    def release(self, after: "torch.cuda.Event") -> None:
        """The buffer acquired last may be written to again once `after` has happened."""
        self._released[self._turn] = after


class StateWriter:
    """The capture side's end of the arena.

    Args:
        layouts: sites by the layout a request names.
        step_rows: most rows of one step, for the size of the staging buffers; more are taken in pieces.
    """

    def __init__(
        self,
        settings: CaptureSettings,
        layouts: Mapping[str, tuple[str, ...]],
        hidden_size: int,
        device: torch.device,
        channel: ChannelClient,
        *,
        step_rows: int,
        dp_rank: int = 0,
    ) -> None:
        self.layouts = layouts
        self.hidden_size = hidden_size
        self.dtype: torch.dtype = getattr(torch, settings.stored_dtype)
        self.channel = channel
        self._progress: dict[str, Progress] = {}
        self._stats = CaptureStats(dp_rank, 0, 0, 0, 0.0, 0.0, 0.0)
        self._stats_sent = 0.0
        self._enqueue_seconds = self._waited_seconds = 0.0
        file = os.open(settings.arena_path, os.O_RDWR | os.O_CLOEXEC)
        try:
            self._map = mmap.mmap(file, settings.arena_bytes)
        finally:
            os.close(file)
        self._arena = torch.frombuffer(self._map, dtype=torch.uint8)
        self._staging: Staging | None = None
        if device.type == "cuda":
            self._register()
            largest = self._row_bytes(max(layouts.values(), key=len))
            wanted = step_rows * self._row_bytes(layouts[RUN_LAYOUT])
            self._staging = Staging(max(largest, min(wanted, MAX_STAGING_BYTES)), device)
            log.info("capture reserves 2 x %d bytes on the GPU for steps of %d rows", self._staging.nbytes, step_rows)
            self._stream = torch.cuda.Stream(device=device)  # type: ignore[no-untyped-call]
            self._steps: queue.Queue[Step] = queue.Queue(maxsize=MAX_OUTSTANDING_STEPS)
            # SGLang names its device "cuda"; which one that is, the thread that loaded the model knows.
            index = torch.cuda.current_device()
            threading.Thread(target=self._finish_steps, args=(index,), name="hsray-capture", daemon=True).start()

    def _register(self) -> None:
        # Page-locks the mapping: copies into it are true DMA, and asynchronous.
        runtime = torch.cuda.cudart()  # type: ignore[no-untyped-call]
        code = runtime.cudaHostRegister(self._arena.data_ptr(), self._arena.numel(), 0)
        if int(code) != 0:
            raise RuntimeError(
                f"cudaHostRegister of the {self._arena.numel():,}-byte arena failed with CUDA error {int(code)}: "
                "raise the locked-memory limit (ulimit -l unlimited) or lower spool.bytes"
            )

    def _row_bytes(self, sites: tuple[str, ...]) -> int:
        return len(sites) * self.hidden_size * self.dtype.itemsize

    def put(self, spans: list[Span], states: Mapping[str, torch.Tensor]) -> None:
        """Copy the rows of `spans` out of `states` (each `[rows, hidden]`, any stride) into their slots.

        On CUDA it returns before that has happened; the states may be overwritten by what is enqueued on the
        current stream afterwards.
        """
        started = time.perf_counter()
        try:
            for layout, group in self._by_layout(spans):
                rows = max(span.first_row + span.count for span in group)
                chosen = {site: self._checked(states, site, rows) for site in layout}
                if self._staging is None:
                    self._finish(self._copy(group, chosen))
                else:
                    self._stage(group, chosen)
        except Exception as err:
            self.channel.send(CaptureFailed(f"{type(err).__name__}: {err}"))
            raise
        self._enqueue_seconds += time.perf_counter() - started

    def _by_layout(self, spans: list[Span]) -> list[tuple[tuple[str, ...], list[Span]]]:
        groups: dict[str, list[Span]] = {}
        for span in spans:
            groups.setdefault(span.request.layout, []).append(span)
        return [(self.layouts[name], group) for name, group in groups.items()]

    def _checked(self, states: Mapping[str, torch.Tensor], site: str, rows: int) -> torch.Tensor:
        state = states.get(site)
        if state is None:
            raise RuntimeError(f"the model did not deliver {site}")
        if state.dim() != 2 or state.shape[0] < rows or state.shape[1] != self.hidden_size:
            raise RuntimeError(f"{site} is {tuple(state.shape)}, expected at least ({rows}, {self.hidden_size})")
        return state

    def _copy(self, spans: list[Span], states: Mapping[str, torch.Tensor]) -> Step:
        """On a CPU: straight into the arena, done on return."""
        norms = torch.stack([torch.linalg.vector_norm(s, dim=-1, dtype=torch.float32) for s in states.values()])
        for span in spans:
            slot = self._slot(span.request, len(states))
            for index, state in enumerate(states.values()):
                rows = state[span.first_row : span.first_row + span.count]
                slot[index, span.start : span.start + span.count].copy_(rows)
        return Step(spans, tuple(states), norms)

    def _stage(self, spans: list[Span], states: Mapping[str, torch.Tensor]) -> None:
        """On CUDA: through the staging buffers, in as many pieces as it takes."""
        assert self._staging is not None
        sites = tuple(states)
        capacity = self._staging.nbytes // self._row_bytes(sites)
        for first_row, piece in cut_spans(spans, capacity):
            count = piece[-1].first_row + piece[-1].count
            buffer = self._staging.acquire()[: count * self._row_bytes(sites)]
            staged = buffer.view(self.dtype).view(len(sites), count, self.hidden_size)
            for index, state in enumerate(states.values()):
                staged[index].copy_(state[first_row : first_row + count], non_blocking=True)
            self._stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(self._stream):
                started = self._stream.record_event(_timing_event())
                for span in piece:
                    slot = self._slot(span.request, len(sites))
                    for index in range(len(sites)):
                        rows = staged[index, span.first_row : span.first_row + span.count]
                        slot[index, span.start : span.start + span.count].copy_(rows, non_blocking=True)
                copied = self._stream.record_event(_timing_event())
                # A float32 accumulator without a float32 copy of the states; NaN and infinity come through.
                norms = torch.linalg.vector_norm(staged, dim=-1, dtype=torch.float32)
                host = torch.empty(norms.shape, dtype=norms.dtype, pin_memory=True)
                host.copy_(norms, non_blocking=True)
                finished = self._stream.record_event()
                self._staging.release(finished)
            waiting = time.perf_counter()
            self._steps.put(Step(piece, sites, host, started, copied, finished))
            self._waited_seconds += time.perf_counter() - waiting

    def _slot(self, request: RequestId, num_sites: int) -> torch.Tensor:
        """The slot of a prompt as `[sites, tokens, hidden]` of the stored dtype."""
        shape = (num_sites, request.num_tokens, self.hidden_size)
        nbytes = num_sites * request.num_tokens * self.hidden_size * self.dtype.itemsize
        return self._arena[request.offset : request.offset + nbytes].view(self.dtype).view(shape)

    def _finish_steps(self, device_index: int) -> None:
        """The waiting thread. Whatever ends it is said on the channel: a replica that hears nothing waits long."""
        try:
            torch.cuda.set_device(device_index)  # a new thread starts on GPU 0
            while True:
                self._finish(self._steps.get())
        except OSError:
            return  # the replica is gone; so is this process, in a moment
        except Exception as err:  # noqa: BLE001 - a thread's last word; the replica ends the engine on it
            self.channel.send(CaptureFailed(f"{type(err).__name__}: {err}"))

    def _finish(self, step: Step) -> None:
        """Wait for copies to land, account for them, and report prompts that are whole."""
        copy_seconds = 0.0
        if step.started is not None and step.copied is not None and step.finished is not None:
            step.finished.synchronize()
            copy_seconds = step.started.elapsed_time(step.copied) / 1000
        norms = step.norms.numpy()
        # NaN and infinities fail the first, rows of zeros the second; neither is ever a hidden state.
        good = ((norms - norms) == 0) & (norms > 0)
        for span in step.spans:
            progress = self._progress.get(span.rid)
            if progress is None:
                total = span.request.num_tokens
                progress = self._progress[span.rid] = Progress(bytearray(total), total, 0, [0.0] * len(step.sites))
            fresh = progress.written.count(0, span.start, span.start + span.count)
            progress.written[span.start : span.start + span.count] = b"\x01" * span.count
            progress.left -= fresh
            progress.rewritten += span.count - fresh
            for index, site in enumerate(step.sites):
                rows = slice(span.first_row, span.first_row + span.count)
                progress.norm_sums[index] += float(norms[index, rows].sum())
                if progress.bad is None and not good[index, rows].all():
                    row = int((~good[index, rows]).argmax())
                    what = "zeros" if norms[index, rows][row] == 0 else "NaN or infinity"
                    progress.bad = (site, span.start + row, what)
            if progress.left == 0:
                del self._progress[span.rid]
                total = span.request.num_tokens
                if span.request.layout == RUN_LAYOUT:
                    crash_point("before_captured")
                self.channel.send(
                    Captured(
                        rid=span.rid,
                        num_tokens=total,
                        prompt_crc32=span.prompt_crc32,
                        rewritten=progress.rewritten,
                        mean_norm=tuple(s / (total + progress.rewritten) for s in progress.norm_sums),
                        bad=progress.bad,
                    )
                )
        self._count(step, copy_seconds)

    def _count(self, step: Step, copy_seconds: float) -> None:
        rows = sum(span.count for span in step.spans)
        self._stats = replace(
            self._stats,
            steps=self._stats.steps + 1,
            rows=self._stats.rows + rows,
            nbytes=self._stats.nbytes + rows * self._row_bytes(step.sites),
            copy_seconds=self._stats.copy_seconds + copy_seconds,
            enqueue_seconds=self._enqueue_seconds,
            waited_seconds=self._waited_seconds,
        )
        now = time.monotonic()
        if now - self._stats_sent >= _STATS_SECONDS:
            self._stats_sent = now
            self.channel.send(self._stats)


def _timing_event() -> "torch.cuda.Event":
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]


def cut_spans(spans: list[Span], capacity: int) -> Iterator[tuple[int, list[Span]]]:
    """Spans in pieces of at most `capacity` rows, gaps between them included.

    Yields the first row of each piece in the step, and its spans with rows counted from there.
    """
    piece: list[Span] = []
    base = 0
    for span in sorted(spans, key=lambda s: s.first_row):
        done = 0
        while done < span.count:
            row = span.first_row + done
            if piece and row >= base + capacity:
                yield base, piece
                piece = []
            if not piece:
                base = row
            count = min(span.count - done, base + capacity - row)
            piece.append(replace(span, first_row=row - base, start=span.start + done, count=count))
            done += count
    if piece:
        yield base, piece
