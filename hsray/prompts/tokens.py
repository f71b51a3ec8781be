"""Rows of token ids, with a mask, labels or attention of the same length. Unshifted, one entry a token."""

from collections.abc import Mapping
from typing import Any

import numpy as np

from hsray.prompts.fields import plain_list
from hsray.prompts.rejects import Reason, RowRejected
from hsray.prompts.rows import TokenRow

_MASK_NAMES = ("loss_mask", "assistant_masks", "assistant_mask", "completion_mask")
MASK_KEYS = (*_MASK_NAMES, "labels", "attention_mask")

IGNORED_LABEL = -100


def parse_tokens(data: Mapping[str, Any], vocab_size: int) -> TokenRow:
    """`input_ids` in [0, vocab_size) and, of the same length:

    * `loss_mask` (or `assistant_masks`, `assistant_mask`, `completion_mask`): 0 and 1, as numbers or booleans;
    * else `labels`: -100, or the token itself;
    * `attention_mask`: zeros at either end are padding, which is taken off.

    Each may be nested one level, as the batch of one that tokenizers return.

    Raises:
        RowRejected: `bad_input_ids`, `id_out_of_range`, `bad_loss_mask`, `bad_labels`, `unsupported_field`.
    """
    ids = _integers(data["input_ids"], "input_ids", "bad_input_ids")
    length = len(ids)
    key = next((name for name in _MASK_NAMES if data.get(name) is not None), None)
    mask = None
    if key is not None:
        mask = _mask(data[key], key, length)
    elif data.get("labels") is not None:
        mask = _labels(data["labels"], ids)

    attended = slice(0, length)
    if data.get("attention_mask") is not None:
        attended = _attended(_mask(data["attention_mask"], "attention_mask", length))
    kept = ids[attended]
    if kept and not (min(kept) >= 0 and max(kept) < vocab_size):
        wrong = next(i for i in kept if not 0 <= i < vocab_size)
        raise RowRejected("id_out_of_range", f"input_ids holds {wrong}; the model has {vocab_size} ids")
    return TokenRow(
        np.array(kept, dtype=np.int32),
        None if mask is None else np.array(mask[attended], dtype=np.uint8),
        length - len(kept),
    )


def _integers(value: object, name: str, reason: Reason) -> list[int]:
    items = _flat(value)
    if items is None or not set(map(type, items)) <= {int}:
        raise RowRejected(reason, f"{name} must be a list of integers, not {_described(value)}")
    return items


def _mask(value: object, name: str, num_tokens: int) -> list[int]:
    mask = _flat(value)
    if mask is None or not set(map(type, mask)) <= {int, bool, float} or not set(mask) <= {0, 1}:
        raise RowRejected("bad_loss_mask", f"{name} must be a list of 0 and 1, not {_described(value)}")
    if len(mask) != num_tokens:
        raise RowRejected("bad_loss_mask", f"{name} has {len(mask)} entries for {num_tokens} input_ids")
    return [int(entry) for entry in mask]


def _labels(value: object, ids: list[int]) -> list[int]:
    labels = _integers(value, "labels", "bad_labels")
    if len(labels) != len(ids):
        raise RowRejected("bad_labels", f"labels has {len(labels)} entries for {len(ids)} input_ids")
    for position, (label, token) in enumerate(zip(labels, ids, strict=True)):
        if label not in (IGNORED_LABEL, token):
            raise RowRejected(
                "bad_labels",
                f"labels[{position}] is {label}, neither {IGNORED_LABEL} nor the token there ({token}): labels must be "
                "aligned with input_ids, not shifted",
            )
    return [int(label != IGNORED_LABEL) for label in labels]


def _attended(attention: list[int]) -> slice:
    # Padded data sets carry pads inside input_ids; the engine would prefill them as tokens.
    if 1 not in attention:
        return slice(0, 0)
    first, last = attention.index(1), len(attention) - attention[::-1].index(1)
    if 0 in attention[first:last]:
        raise RowRejected("unsupported_field", "attention_mask has zeros between ones; padding belongs at the ends")
    return slice(first, last)


def _flat(value: object) -> list[Any] | None:
    if isinstance(value, np.ndarray) and value.ndim == 2 and len(value) == 1:
        value = value[0]
    items = plain_list(value)
    if items is not None and len(items) == 1 and isinstance(items[0], list | np.ndarray):
        items = plain_list(items[0])
    return items


def _described(value: object) -> str:
    items = plain_list(value)
    if items is None:
        return type(value).__name__
    return f"a list of {', '.join(sorted({type(item).__name__ for item in items}))} such as {items[:3]!r:.80}"
