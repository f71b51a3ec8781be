"""Blocks of prompts, read ahead of their use and in order, into buffers that are used again."""

from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from hsray.errors import HsrayError
from hsray.reader import Run
from hsray.training.buffers import BufferPool
from hsray.training.items import Layout, lay_out, read_prompts
from hsray.training.order import Positions

# Blocks on their way at the same time; each is fetched with up to eight requests.
_BLOCKS_IN_FLIGHT = 4


@dataclass(frozen=True, slots=True)
class Loaded:
    """A prompt that is in memory."""

    layout: Layout
    buffer: torch.Tensor


class BlockReader:
    """Reads `blocks` of a run, at most `ahead_bytes` (or one block) beyond what `next_block` has given out.

    Args:
        nbytes: bytes in memory, by position.
        pool: where buffers come from.
        on_device: prompts go to a device, which decodes what it can.
    """

    def __init__(
        self,
        run: Run,
        sites: Sequence[str],
        blocks: Sequence[Positions],
        *,
        nbytes: npt.NDArray[np.int64],
        max_tokens: int | None,
        ahead_bytes: int,
        pool: BufferPool,
        on_device: bool,
    ) -> None:
        self._run = run
        self._sites = sites
        self._nbytes = nbytes
        self._max_tokens = max_tokens
        self._ahead_bytes = ahead_bytes
        self._pool = pool
        self._on_device = on_device
        self._waiting = deque(blocks)
        self._ahead: deque[tuple[int, Future[list[Loaded]]]] = deque()
        self._threads = ThreadPoolExecutor(_BLOCKS_IN_FLIGHT, "hsray-block")

    def next_block(self) -> list[Loaded]:
        """The prompts of the next block. Raises IndexError after the last one, and whatever reading it raised."""
        self._submit()
        _, future = self._ahead.popleft()
        # What this one leaves free is used while its prompts are.
        loaded = future.result()
        self._submit()
        return loaded

    def close(self) -> None:
        """End the threads; blocks that nobody took are dropped."""
        self._threads.shutdown(wait=True, cancel_futures=True)
        self._ahead.clear()

    def _submit(self) -> None:
        while self._waiting and len(self._ahead) < _BLOCKS_IN_FLIGHT:
            block = self._waiting[0]
            nbytes = int(self._nbytes[block].sum())
            if self._ahead and sum(size for size, _ in self._ahead) + nbytes > self._ahead_bytes:
                return
            self._waiting.popleft()
            self._ahead.append((nbytes, self._threads.submit(self._read, block)))

    def _read(self, block: Positions) -> list[Loaded]:
        layouts = [
            lay_out(self._run, position, self._sites, self._max_tokens, on_device=self._on_device)
            for position in block.tolist()
        ]
        buffers = [self._pool.take(layout.nbytes) for layout in layouts]
        scratches = [self._pool.take(layout.scratch_bytes) for layout in layouts]
        try:
            read_prompts(self._run, layouts, buffers, scratches)
        except HsrayError as err:
            rows = sorted(int(self._run.segments.row[self._run.segments.first[p]]) for p in block.tolist())
            what = f"row {rows[0]}" if len(rows) == 1 else f"{len(rows)} of the rows {rows[0]} to {rows[-1]}"
            raise type(err)(f"{err} (while reading {what} of {self._run.url})") from err
        return [Loaded(layout, buffer) for layout, buffer in zip(layouts, buffers, strict=True)]
