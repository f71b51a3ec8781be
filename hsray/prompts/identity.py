"""Who a prompt is: the id it brings or a hash of its content, unique in the run.

Promises: an id depends on the row alone, so a run over the same rows in another order has the same ids; only with
`prompts.duplicates: keep-all` does the first of equal ones have another name than the rest. Memory is one 128-bit
digest per accepted prompt, whatever the length of ids.
"""

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import numpy as np
import xxhash

from hsray.prompts.rejects import RowRejected
from hsray.records import IntArray, MaskArray

DuplicatePolicy = Literal["keep-first", "keep-all", "reject"]


def explicit_id(data: Mapping[str, Any], id_fields: Sequence[str]) -> str | None:
    """The id that the row brings, as text: the first of `id_fields` that is not absent, null, NaN or blank.

    Raises:
        RowRejected: the id is not a string or a number, or cannot be written as UTF-8.
    """
    for name in id_fields:
        value = data.get(name)
        if value is None or (isinstance(value, float) and math.isnan(value)):
            continue
        if not isinstance(value, str | int | float):
            raise RowRejected("bad_id", f"{name} must be a string or a number, not {type(value).__name__}")
        text = str(value)
        try:
            text.encode("utf-8")
        except UnicodeEncodeError as err:
            raise RowRejected("bad_id", f"{name} has a lone surrogate at character {err.start}") from err
        if text.strip():
            return text
    return None


def content_id(input_ids: IntArray, loss_mask: MaskArray) -> str:
    """`h-` and 32 hex digits: xxh3-128 of the little-endian int32 ids `[T]`, then the uint8 mask `[T]`."""
    digest = xxhash.xxh3_128(np.ascontiguousarray(input_ids, dtype="<i4").tobytes())
    digest.update(np.ascontiguousarray(loss_mask, dtype=np.uint8).tobytes())
    return f"h-{digest.hexdigest()}"


class Identities:
    """The ids given out so far, under one policy for duplicates.

    With `reject`, `repeated` has the digests of what is in the input more than once (`Survey`).
    """

    def __init__(self, policy: DuplicatePolicy, repeated: frozenset[bytes] = frozenset()) -> None:
        self._policy = policy
        self._repeated = repeated
        self._seen: set[bytes] = set()
        self._copies: Counter[bytes] = Counter()

    def claim(self, explicit: str | None, input_ids: IntArray, loss_mask: MaskArray) -> str:
        """The prompt id of an otherwise good row.

        Raises:
            RowRejected: another row has this id (`duplicate_id`) or, without an id, this content (`duplicate`),
                and the policy does not keep it.
        """
        prompt_id = content_id(input_ids, loss_mask) if explicit is None else explicit
        if self._take(prompt_id):
            return prompt_id
        if self._policy != "keep-all":
            if explicit is None:
                raise RowRejected("duplicate", f"another row has the same tokens and mask ({prompt_id})")
            raise RowRejected(
                "duplicate_id",
                f"another row has the id {explicit[:80]!r}; if it is not meant to be unique, set prompts.id_field to "
                "one that is (or to a name that no row has), or prompts.duplicates to keep-all",
            )
        content = content_id(input_ids, loss_mask)
        if explicit is not None and self._take(content):
            return content
        digest = _digest(content)
        while True:
            self._copies[digest] += 1
            name = f"{content}#{self._copies[digest] + 1}"
            if self._take(name):
                return name

    def _take(self, prompt_id: str) -> bool:
        digest = _digest(prompt_id)
        if digest in self._seen or digest in self._repeated:
            return False
        self._seen.add(digest)
        return True


class Survey(Identities):
    """Accepts everything, and notes in `repeated` what comes more than once."""

    def __init__(self) -> None:
        super().__init__("reject")
        self.repeated: set[bytes] = set()

    def claim(self, explicit: str | None, input_ids: IntArray, loss_mask: MaskArray) -> str:
        prompt_id = content_id(input_ids, loss_mask) if explicit is None else explicit
        if not self._take(prompt_id):
            self.repeated.add(_digest(prompt_id))
        return prompt_id


def _digest(prompt_id: str) -> bytes:
    digest: bytes = xxhash.xxh3_128_digest(prompt_id.encode())
    return digest
