"""Who a prompt is: the id it brings or a hash of its content, unique in the run.

Promises: an id depends on the row alone, never on its position, so a run over the same rows in another order has
the same ids. Memory is one 128-bit digest per accepted prompt, whatever the length of ids.
"""

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import xxhash

from hsray.prompts.rejects import RowRejected
from hsray.records import IntArray, MaskArray


def explicit_id(data: Mapping[str, Any], id_field: str) -> str | None:
    """The id that the row brings, as text; None where it is absent, null, NaN or blank.

    Raises:
        RowRejected: the id is not a string or a number.
    """
    value = data.get(id_field)
    if value is None or (isinstance(value, float) and math.isnan(value)):
        return None
    if not isinstance(value, str | int | float):
        raise RowRejected("bad_id", f"{id_field} must be a string or a number, not {type(value).__name__}")
    text = str(value)
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as err:
        raise RowRejected("bad_id", f"{id_field} has a lone surrogate at character {err.start}") from err
    return text if text.strip() else None


def content_id(input_ids: IntArray, loss_mask: MaskArray) -> str:
    """`h-` and 32 hex digits: xxh3-128 of the little-endian int32 ids `[T]`, then the uint8 mask `[T]`."""
    digest = xxhash.xxh3_128(np.ascontiguousarray(input_ids, dtype="<i4").tobytes())
    digest.update(np.ascontiguousarray(loss_mask, dtype=np.uint8).tobytes())
    return f"h-{digest.hexdigest()}"


class Identities:
    """The ids given out so far. The first row with an id keeps it."""

    def __init__(self, id_field: str) -> None:
        self._id_field = id_field
        self._seen: set[bytes] = set()

    def claim(self, explicit: str | None, input_ids: IntArray, loss_mask: MaskArray) -> str:
        """The prompt id of an otherwise good row.

        Raises:
            RowRejected: an earlier accepted row has this id (`duplicate_id`) or, without an id, this content
                (`duplicate`).
        """
        prompt_id = content_id(input_ids, loss_mask) if explicit is None else explicit
        digest = xxhash.xxh3_128_digest(prompt_id.encode())
        if digest in self._seen:
            if explicit is None:
                raise RowRejected("duplicate", f"an earlier row has the same tokens and mask ({prompt_id})")
            raise RowRejected(
                "duplicate_id",
                f"an earlier row has the {self._id_field} {explicit[:80]!r}; if it is not meant to be unique, set "
                "prompts.id_field to one that is, or to a name that no row has",
            )
        self._seen.add(digest)
        return prompt_id
