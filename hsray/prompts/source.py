"""Rows as files hold them, before anybody asks what they mean. Nouns only."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from hsray.prompts.rejects import Reason

MAX_ROW_BYTES = 64 << 20
SNIPPET_CHARS = 200


@dataclass(frozen=True, slots=True)
class SourceRow:
    """A row that is a JSON object or a Parquet row.

    Attributes:
        file: URL of the file.
        line: 1-based: line of a file of lines, element of a JSON array, row of a table (header not counted).
        data: its keys and values. A null is an absent key: tables fill the keys a row lacks with nulls.
        nbytes: roughly its size as text.
        start: the first bytes of its text; empty for tables.
    """

    file: str
    line: int
    data: Mapping[str, Any]
    nbytes: int
    start: bytes = field(default=b"", repr=False)

    @property
    def snippet(self) -> str:
        """The start of the row as text, at most 200 characters."""
        if self.start:
            return snippet(self.start)
        return json.dumps(self.data, ensure_ascii=False, default=str)[:SNIPPET_CHARS]


@dataclass(frozen=True, slots=True)
class BadRow:
    """A row that cannot be read. Counts as a row."""

    file: str
    line: int
    reason: Reason
    detail: str
    snippet: str


Row = SourceRow | BadRow


def too_large(file: str, line: int) -> BadRow:
    """The row in place of one over `MAX_ROW_BYTES`."""
    return BadRow(file, line, "row_too_large", f"the row is over {MAX_ROW_BYTES >> 20} MiB", "")


def snippet(piece: bytes) -> str:
    """The start of a row's bytes as text, at most 200 characters."""
    return piece[: 4 * SNIPPET_CHARS].decode("utf-8", errors="replace")[:SNIPPET_CHARS]
