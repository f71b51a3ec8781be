"""States into the arena: one plain copy per prompt and site, then one message when a prompt is whole.

On CUDA the arena is registered with the driver, so device-to-host copies on one side stream land where the
shard writer reads, without a staging buffer and without blocking the forward stream; a thread waits for
their events. On CPU the same arena is written directly.
"""

import mmap
import os
import queue
import threading
from collections.abc import Mapping
from dataclasses import dataclass, field

import torch

from hsray.capture.settings import CaptureSettings
from hsray.channel import Captured, CaptureFailed, ChannelClient, RequestId

# Steps whose copies may be outstanding before the forward loop waits: bounds the GPU memory they pin.
MAX_OUTSTANDING_STEPS = 8


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
    bad: tuple[str, int] | None = None


@dataclass(frozen=True, slots=True)
class Step:
    """One step's copies: what they hold, per-row norms `[sites, rows]` float32 on the host, and their event."""

    spans: list[Span]
    sites: tuple[str, ...]
    norms: torch.Tensor
    event: "torch.cuda.Event | None"


class StateWriter:
    """The capture side's end of the arena."""

    def __init__(
        self,
        settings: CaptureSettings,
        layouts: Mapping[str, tuple[str, ...]],
        hidden_size: int,
        device: torch.device,
        channel: ChannelClient,
    ) -> None:
        self.layouts = layouts
        self.hidden_size = hidden_size
        self.dtype: torch.dtype = getattr(torch, settings.stored_dtype)
        self.channel = channel
        self._progress: dict[str, Progress] = {}
        file = os.open(settings.arena_path, os.O_RDWR | os.O_CLOEXEC)
        try:
            self._map = mmap.mmap(file, settings.arena_bytes)
        finally:
            os.close(file)
        self._arena = torch.frombuffer(self._map, dtype=torch.uint8)
        self._stream: torch.cuda.Stream | None = None
        if device.type == "cuda":
            self._register()
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

    def put(self, spans: list[Span], states: Mapping[str, torch.Tensor]) -> None:
        """Copy the rows of `spans` out of `states` (each `[rows, hidden]`, contiguous) into their slots.

        Returns before the copies are done on CUDA; the states must not be written to until the current
        stream reaches this point.
        """
        try:
            if self._stream is None:
                for layout, group in self._by_layout(spans):
                    self._finish(self._copy(group, layout, states, non_blocking=False))
                return
            self._stream.wait_stream(torch.cuda.current_stream())
            for layout, group in self._by_layout(spans):
                with torch.cuda.stream(self._stream):
                    step = self._copy(group, layout, states, non_blocking=True)
                self._steps.put(step)
            for state in states.values():
                # The caching allocator must not hand this memory out while the copies run.
                state.record_stream(self._stream)
        except Exception as err:
            self.channel.send(CaptureFailed(f"{type(err).__name__}: {err}"))
            raise

    def _by_layout(self, spans: list[Span]) -> list[tuple[tuple[str, ...], list[Span]]]:
        groups: dict[str, list[Span]] = {}
        for span in spans:
            groups.setdefault(span.request.layout, []).append(span)
        return [(self.layouts[name], group) for name, group in groups.items()]

    def _copy(
        self, spans: list[Span], sites: tuple[str, ...], states: Mapping[str, torch.Tensor], non_blocking: bool
    ) -> Step:
        rows = max(span.first_row + span.count for span in spans)
        norms = []
        for index, site in enumerate(sites):
            state = states.get(site)
            if state is None:
                raise RuntimeError(
                    f"this model and layout did not deliver {site}: its final norm was not called in a way that "
                    "shows the residual stream. Use final_postnorm (capture.final: postnorm)"
                    if site == "final_prenorm"
                    else f"the model did not deliver {site}"
                )
            if state.shape[0] < rows or state.shape[1] != self.hidden_size:
                raise RuntimeError(f"{site} is {tuple(state.shape)}, expected at least ({rows}, {self.hidden_size})")
            # A float32 accumulator without a float32 copy of the states; NaN and infinity come through.
            norms.append(torch.linalg.vector_norm(state[:rows], dim=-1, dtype=torch.float32))
            stored = state if state.dtype == self.dtype else state[:rows].to(self.dtype)
            for span in spans:
                target = self._slot(span.request, len(sites))[index, span.start : span.start + span.count]
                target.copy_(stored[span.first_row : span.first_row + span.count], non_blocking=non_blocking)
        stacked = torch.stack(norms)
        if self._stream is None:
            return Step(spans, sites, stacked, None)
        host = torch.empty(stacked.shape, dtype=stacked.dtype, pin_memory=True)
        host.copy_(stacked, non_blocking=True)
        return Step(spans, sites, host, self._stream.record_event())

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
                step = self._steps.get()
                assert step.event is not None
                step.event.synchronize()
                self._finish(step)
        except OSError:
            return  # the replica is gone; so is this process, in a moment
        except Exception as err:  # noqa: BLE001 - a thread's last word; the replica ends the engine on it
            self.channel.send(CaptureFailed(f"{type(err).__name__}: {err}"))

    def _finish(self, step: Step) -> None:
        """Account for copies that have landed, and report prompts that are whole."""
        norms = step.norms.numpy()
        finite = (norms - norms) == 0  # False for NaN and infinities
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
                if progress.bad is None and not finite[index, rows].all():
                    progress.bad = (site, span.start + int((~finite[index, rows]).argmax()))
            if progress.left == 0:
                del self._progress[span.rid]
                total = span.request.num_tokens
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
