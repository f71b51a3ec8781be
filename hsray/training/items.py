"""From bytes of the store to the tensors of one prompt."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from hsray.codecs import EncodingError
from hsray.codecs.on_torch import decode_torch
from hsray.errors import HsrayError
from hsray.ranges import ByteArray, Range
from hsray.reader import Run
from hsray.schema import ITEMSIZE, TOKEN_COLUMNS
from hsray.site_storage import positions_column

# What a DataLoader of `Run.torch_dataset` gives too: `prompt_id`, `input_ids`, `loss_mask`, states by site, and, where
# a site is stored for some tokens only, their positions.
Item = dict[str, Any]

# Every dtype, and every vector instruction, may start here.
_ALIGNMENT = 64
# Half of the work of decoding this one cannot be done on a device; the threads that read do all of it.
_DECODED_ON_CPU = "bf16-hl-zstd"


@dataclass(frozen=True, slots=True)
class Extent:
    """A column of a prompt.

    Attributes:
        segments: where it comes from, and `rows` of states in each (0 for columns that hold none).
        start: where its bytes begin in the prompt's buffer.
        nbytes: how many these are; of an encoded site, those of its values, or the stored ones if a device is to
            decode them.
        scratch: where the stored bytes begin in other memory, if they are decoded from there into the buffer.
    """

    column: str
    segments: tuple[int, ...]
    ranges: tuple[Range, ...]
    rows: tuple[int, ...]
    start: int
    nbytes: int
    scratch: int | None = None

    @property
    def stored_bytes(self) -> int:
        return sum(where.nbytes for where in self.ranges)

    def cut(self, memory: ByteArray) -> Iterator[tuple[int, ByteArray]]:
        """The segments, each with its part of `memory`, which holds the stored bytes."""
        at = 0
        for segment, where in zip(self.segments, self.ranges, strict=True):
            yield segment, memory[at : at + where.nbytes]
            at += where.nbytes


@dataclass(frozen=True, slots=True)
class Layout:
    """The columns of the prompt at `position`, side by side in a buffer of `nbytes`; `scratch_bytes` are needed while
    it is read."""

    position: int
    extents: tuple[Extent, ...]
    nbytes: int
    scratch_bytes: int


def lay_out(run: Run, position: int, sites: Sequence[str], max_tokens: int | None, *, on_device: bool) -> Layout:
    """Only segments that hold one of the first `max_tokens` tokens are in it."""
    index = run.segments
    segments = tuple(s for s in index.of(position) if max_tokens is None or int(index.token_start[s]) < max_tokens)
    extents = []
    start = scratch = 0
    for column in run.columns_for(sites):
        ranges = tuple(index.where(segment, column) for segment in segments)
        stored = sum(where.nbytes for where in ranges)
        rows = tuple(run.rows_of(segment, column) if column in run.storage else 0 for segment in segments)
        if _is_decoded_early(run, column, on_device):
            nbytes = sum(rows) * run.hidden_size * ITEMSIZE[run.dtype]
            extents.append(Extent(column, segments, ranges, rows, start, nbytes, scratch))
            scratch += _aligned(stored)
        else:
            nbytes = stored
            extents.append(Extent(column, segments, ranges, rows, start, nbytes))
        start += _aligned(nbytes)
    return Layout(position, tuple(extents), start, scratch)


def read_prompts(
    run: Run, layouts: Sequence[Layout], buffers: Sequence[torch.Tensor], scratches: Sequence[torch.Tensor]
) -> None:
    """Fetch all columns of some prompts in one go, each prompt into its buffer; check hashes; decode.

    Raises:
        HsrayError: an object is missing or damaged; the message says which, and of which row.
    """
    work = []
    for layout, buffer, scratch in zip(layouts, buffers, scratches, strict=True):
        memory, stored = buffer.numpy(), scratch.numpy()
        for extent in layout.extents:
            values = memory[extent.start : extent.start + extent.nbytes]
            if extent.scratch is None:
                work.append((extent, values, values))
            else:
                work.append((extent, stored[extent.scratch : extent.scratch + extent.stored_bytes], values))
    run.fetch_into([extent.ranges for extent, _, _ in work], [stored for _, stored, _ in work])
    for extent, stored, values in work:
        if extent.column not in run.storage:
            continue
        at = 0
        for (segment, payload), rows in zip(extent.cut(stored), extent.rows, strict=True):
            run.check(payload, segment, extent.column)
            if extent.scratch is not None:
                nbytes = rows * run.hidden_size * ITEMSIZE[run.dtype]
                run.decode(payload, segment, extent.column, values[at : at + nbytes])
                at += nbytes


def make_item(
    run: Run, layout: Layout, buffer: torch.Tensor, device: torch.device | None, max_tokens: int | None
) -> Item:
    """The tensors of a prompt, on `device`. Those on the CPU share the memory of the buffer."""
    item: Item = {"prompt_id": run.prompt_ids[layout.position]}
    # How many of its positions are among the first `max_tokens`, by column.
    counts: dict[str, int] = {}
    for extent in layout.extents:
        column, payload = extent.column, buffer[extent.start : extent.start + extent.nbytes]
        if column not in run.storage:
            numbers = payload.view(torch.int32)
            if column not in TOKEN_COLUMNS and max_tokens is not None:
                counts[column] = int(np.searchsorted(numbers.numpy(), max_tokens))
                numbers = numbers[: counts[column]]
            value = numbers[:max_tokens].to(torch.uint8 if column == "loss_mask" else torch.int64)
            item[column] = value if device is None else value.to(device, non_blocking=True)
            continue
        keep = max_tokens
        if run.storage[column].tokens != "all":
            keep = counts.get(positions_column(run.storage[column].tokens))
        if _is_encoded_still(run, extent):
            item[column] = _decode_there(run, layout.position, extent, payload, device)[:keep]
            continue
        states = payload.view(getattr(torch, run.dtype)).view(-1, run.hidden_size)[:keep]
        item[column] = states if device is None else states.to(device, non_blocking=True)
    return item


def _is_decoded_early(run: Run, column: str, on_device: bool) -> bool:
    return run.is_encoded(column) and (not on_device or run.storage[column].codec == _DECODED_ON_CPU)


def _is_encoded_still(run: Run, extent: Extent) -> bool:
    return run.is_encoded(extent.column) and extent.scratch is None


def _decode_there(
    run: Run, position: int, extent: Extent, payload: torch.Tensor, device: torch.device | None
) -> torch.Tensor:
    parts = []
    for (segment, stored), rows in zip(extent.cut(payload.numpy()), extent.rows, strict=True):
        try:
            parts.append(decode_torch(stored.data, run.storage[extent.column].codec, rows, run.hidden_size, device))
        except EncodingError as err:
            raise HsrayError(
                f"{run.segments.where(segment, extent.column).key}: {extent.column} of prompt "
                f"{run.prompt_ids[position]!r} (row {run.segments.row[segment]}) cannot be decoded: {err}"
            ) from err
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def _aligned(nbytes: int) -> int:
    return -(-nbytes // _ALIGNMENT) * _ALIGNMENT
