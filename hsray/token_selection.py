"""Which positions of a prompt have a stored state, from its loss mask.

Trainers align mask and states in three ways: the state that a loss token's loss reads is that of the position
before the token (which predicts it), of the token itself, or of the position after it. So every selection takes a
loss token together with its two neighbours, and whichever way a trainer counts, the states its loss reads are
there:

* `all`: every position.
* `loss`: loss tokens and their neighbours. What is read position by position needs no more: the target states of
  EAGLE-3, probes, sparse autoencoders, heads without attention.
* `through_last_loss`: from the first position to the neighbour after the last loss token. What attends to earlier
  positions needs these: the input states of EAGLE-3, DFlash and of MTP layers. It drops only what comes after the
  last answer.

A prompt without a loss token has no position in the last two; such prompts are rejected before anything is captured
(`prompts.empty_mask`).
"""

import numpy as np

from hsray.records import IntArray, MaskArray
from hsray.site_storage import TokenSelection


def select_positions(selection: TokenSelection, loss_mask: MaskArray) -> IntArray:
    """Ascending int32 positions of a prompt that have a state.

    Args:
        loss_mask: uint8 `[T]` of the whole prompt, not of a segment.
    """
    length = len(loss_mask)
    if selection == "all":
        return np.arange(length, dtype=np.int32)
    is_loss = loss_mask != 0
    if selection == "through_last_loss":
        last = int(np.flatnonzero(is_loss)[-1]) if is_loss.any() else -2
        return np.arange(min(last + 2, length), dtype=np.int32)
    chosen = is_loss.copy()
    chosen[:-1] |= is_loss[1:]
    chosen[1:] |= is_loss[:-1]
    return np.flatnonzero(chosen).astype(np.int32)
