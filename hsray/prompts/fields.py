"""Checks and conversions of single values of a row, shared by its parsers. Pure; refusals are `RowRejected`."""

import json
from collections.abc import Mapping
from typing import Any

import numpy as np

from hsray.prompts.rejects import RowRejected

MEDIA_KEYS = ("image", "images", "video", "videos", "audio", "audios")
FAILURE_KEYS = ("status", "error", "finish_reason")

_FAILED = frozenset({"error", "failed", "failure"})


def is_void(value: object) -> bool:
    """Whether a key carries nothing: files that mix rows fill it with one of these."""
    if isinstance(value, str):
        return value.strip() in ("", "[]", "{}", "null")
    return value is None or value is False or (isinstance(value, list | dict) and not value)


def encodable(text: str, place: str) -> str:
    """`text` itself. JSON escapes can spell half of a surrogate pair, which no tokenizer takes."""
    if not text.isascii():
        try:
            text.encode("utf-8")
        except UnicodeEncodeError as err:
            raise RowRejected("bad_encoding", f"{place} has a lone surrogate at character {err.start}") from err
    return text


def plain_list(value: object) -> list[Any] | None:
    """A list or a one-dimensional array as a list; None for anything else."""
    if isinstance(value, np.ndarray):
        return value.tolist() if value.ndim == 1 else None
    return value if isinstance(value, list) else None


def from_json(value: object, place: str) -> object:
    """Columns that cannot nest hold lists and objects as JSON text: what the text says."""
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value)
    except (ValueError, RecursionError) as err:
        raise RowRejected("bad_field", f"{place} is text, but no JSON: {err}") from err


def refuse_media(data: Mapping[str, Any]) -> None:
    for key in MEDIA_KEYS:
        if not is_void(data.get(key)):
            raise RowRejected("multimodal", f"the row has {key}; only text is supported")


def refuse_failed_row(data: Mapping[str, Any], place: str = "the row") -> None:
    """Refuse what a script that regenerated answers marked as failed, or as cut at its token limit.

    A cut answer has no end of turn, but a template would write one, and the mask would teach to stop there.
    """
    hint = "; if the key means something else here, name it in prompts.ignore_fields"
    if isinstance(data.get("status"), str) and data["status"].strip().lower() in _FAILED:
        raise RowRejected("source_error", f"{place} has the status {data['status']}{hint}")
    if not is_void(data.get("error")):
        raise RowRejected("source_error", f"{place} has an error: {str(data['error'])[:80]!r}{hint}")
    if data.get("finish_reason") == "length":
        raise RowRejected("source_error", f"{place} has finish_reason length: its answer was cut{hint}")
