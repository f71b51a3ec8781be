"""Prompts of different lengths, padded to one batch, on whatever device they are."""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from hsray.training.buffers import BufferPool
from hsray.training.items import Item

Batch = dict[str, Any]

# Of batches. They are large and of ever new sizes, which the allocator would get from the kernel each time.
_memory = BufferPool()
# numpy has no bfloat16, and to copy it needs none.
_SAME_SIZE = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def copy_into(target: torch.Tensor, source: torch.Tensor) -> None:
    """Copy between tensors of one dtype, shape and device.

    On the CPU by numpy, in this thread: torch would share it out to threads that then spin while they wait for the
    next, which costs three times the CPU on a busy machine.
    """
    if target.device.type != "cpu":
        target.copy_(source)
        return
    bits = _SAME_SIZE[target.element_size()]
    np.copyto(target.view(bits).numpy(), source.view(bits).numpy())


def clear(target: torch.Tensor) -> None:
    """Set to zero; see `copy_into`."""
    if target.device.type != "cpu":
        target.zero_()
    else:
        target.view(_SAME_SIZE[target.element_size()]).numpy()[:] = 0


def empty(shape: Sequence[int], like: torch.Tensor) -> torch.Tensor:
    """A tensor of this shape, with anything in it, on the device and of the dtype of another."""
    if like.device.type != "cpu":
        return like.new_empty(shape)
    return _memory.take(math.prod(shape) * like.element_size()).view(like.dtype).view(*shape)


def pad(rows: Sequence[torch.Tensor], length: int, fill: int = 0) -> torch.Tensor:
    """`[len(rows), length, ...]`, `fill` where a row has ended."""
    # Not new_zeros: most of it is written right away.
    padded = empty((len(rows), length, *rows[0].shape[1:]), rows[0])
    for target, row in zip(padded, rows, strict=True):
        copy_into(target[: len(row)], row)
        if fill:
            target[len(row) :] = fill
        else:
            clear(target[len(row) :])
    return padded


def pad_batch(items: Sequence[Item]) -> Batch:
    """All that the items hold, padded at the end to the longest of T tokens.

    Returns:
        `prompt_id`: list of B strings; `input_ids` int64, `loss_mask` uint8 and `attention_mask` bool `[B, T]`, 0 on
        padding; each site `[B, T, hidden_size]` in the run's dtype. Nothing is shifted. A site that is stored for some
        tokens only is `[B, most stored, hidden_size]`, and `positions_loss` or `positions_through_last_loss`, int64,
        -1 on padding, says of which.
    """
    lengths = [len(item["input_ids"]) for item in items]
    batch: Batch = {"prompt_id": [item["prompt_id"] for item in items]}
    for name in items[0]:
        if name != "prompt_id":
            rows = [item[name] for item in items]
            batch[name] = pad(rows, max(map(len, rows)), -1 if name.startswith("positions_") else 0)
    batch["attention_mask"] = length_mask(lengths, batch["input_ids"].device)
    return batch


def length_mask(lengths: Sequence[int], device: torch.device) -> torch.Tensor:
    """bool `[len(lengths), max(lengths)]`: True where a row has a token."""
    ends = torch.tensor(lengths, device=device)
    return torch.arange(max(lengths), device=device) < ends[:, None]
