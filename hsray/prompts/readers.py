"""Rows of the input files: JSON lines, JSON arrays and Parquet, streamed.

Promises: rows come in file order, each exactly once, with bounded memory whatever the size of a file; a bad
row is a `BadRow` and the next one is still read; a file that breaks off ends the run with ConfigError, because
nobody can say how many rows are missing. Must never know what the keys of a row mean.
"""

import itertools
import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

import pyarrow as pa
import pyarrow.parquet as pq

from hsray.errors import ConfigError
from hsray.prompts.files import InputFile, ReadError, open_file, read_blocks
from hsray.prompts.rejects import Reason

MAX_ROW_BYTES = 64 << 20
SNIPPET_CHARS = 200

_T = TypeVar("_T")

_UTF8_BOM = b"\xef\xbb\xbf"
_UTF16_BOMS = (b"\xff\xfe", b"\xfe\xff")
_PARQUET_BATCH_BYTES = 8 << 20
_PARQUET_BATCH_ROWS = 256


@dataclass(frozen=True, slots=True)
class SourceRow:
    """A row that is a JSON object or a Parquet row.

    Attributes:
        file: URL of the file.
        line: 1-based: line of a JSON-lines file, element of a JSON array, row of a Parquet file.
        data: its keys and values. A null is an absent key: Parquet fills the keys a row lacks with nulls.
        nbytes: roughly its size as text.
        start: the first bytes of its text; empty for Parquet.
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
            return _snippet(self.start)
        return json.dumps(self.data, ensure_ascii=False, default=str)[:SNIPPET_CHARS]


@dataclass(frozen=True, slots=True)
class BadRow:
    """A row that cannot be read. Counts as a row."""

    file: str
    line: int
    reason: Reason
    detail: str
    snippet: str


def read_rows(
    file: InputFile, storage_options: Mapping[str, Any], columns: Iterable[str]
) -> Iterator[SourceRow | BadRow]:
    """The rows of one file, in order. Blank lines are no rows.

    `columns` are the keys that anybody will look at; a Parquet file with none of them is read whole, so that
    the reject can show what it holds.

    Raises:
        ConfigError: the file cannot be opened, breaks off, or is not what its name says. The message names
            the file and the last row that was read.
    """
    if file.format == ".parquet":
        rows = _read_parquet(file, storage_options, columns)
    else:
        rows = _read_text(file, read_blocks(file, storage_options))
    last = 0
    try:
        for row in rows:
            yield row
            last = row.line
    except ReadError as err:
        place = "line" if file.format == ".jsonl" else "row"
        raise ConfigError(f"prompts.path: {file.url}: {err}; it could be read up to {place} {last}") from err


def _read_text(file: InputFile, blocks: Iterator[bytes]) -> Iterator[SourceRow | BadRow]:
    head = b""
    for block in blocks:
        head += block
        if head.startswith(_UTF16_BOMS):
            raise ConfigError(f"prompts.path: {file.url} is UTF-16; save it as UTF-8")
        if len(head) >= len(_UTF8_BOM) and head.removeprefix(_UTF8_BOM).strip():
            break
    content = itertools.chain([head.removeprefix(_UTF8_BOM)], blocks)
    # By the first character and not by the name alone: `.json` is used for JSON lines too. In a `.jsonl`
    # file a line that is an array is a bad row.
    is_array = file.format == ".json" and head.removeprefix(_UTF8_BOM).lstrip().startswith(b"[")
    pieces = array_elements(content) if is_array else lines(content)
    for line, piece in pieces:
        if piece is None:
            detail = f"the row is over {MAX_ROW_BYTES >> 20} MiB"
            yield BadRow(file.url, line, "row_too_large", detail, "")
        else:
            yield _parse(file.url, line, piece)


def _parse(url: str, line: int, piece: bytes) -> SourceRow | BadRow:
    try:
        data = json.loads(piece.decode("utf-8"))
    except UnicodeDecodeError as err:
        return BadRow(url, line, "bad_encoding", f"not UTF-8: {err.reason} at byte {err.start}", _snippet(piece))
    except RecursionError:
        return BadRow(url, line, "malformed_json", "nested too deeply", _snippet(piece))
    except ValueError as err:  # JSONDecodeError, and integers of thousands of digits
        return BadRow(url, line, "malformed_json", str(err), _snippet(piece))
    if not isinstance(data, dict):
        hint = " (a file that is one JSON array must be named .json)" if isinstance(data, list) else ""
        detail = f"a row must be a JSON object, this is {_json_type(data)}{hint}"
        return BadRow(url, line, "not_an_object", detail, _snippet(piece))
    return SourceRow(url, line, data, len(piece), piece[: 4 * SNIPPET_CHARS])


def _snippet(piece: bytes) -> str:
    return piece[: 4 * SNIPPET_CHARS].decode("utf-8", errors="replace")[:SNIPPET_CHARS]


def _json_type(value: object) -> str:
    if value is None:
        return "null"
    names = {list: "an array", str: "a string", bool: "a boolean", int: "a number", float: "a number"}
    return names[type(value)]


def lines(blocks: Iterable[bytes]) -> Iterator[tuple[int, bytes | None]]:
    """(line number, line) for each line that is not blank; None for a line over `MAX_ROW_BYTES`.

    Wherever the blocks are cut. Lines end with a line feed, and white space around them is taken off, so a
    carriage return in front of it too.
    """
    number = 1
    pending: list[bytes] = []  # the pieces of the line that is not complete yet
    size = 0
    for block in blocks:
        first, *others = block.split(b"\n")
        pieces = [first]
        for other in others:
            yield from _line(number, [*pending, *pieces], size + len(pieces[0]))
            number, pending, size, pieces = number + 1, [], 0, [other]
        size += len(pieces[0])
        # Of a line over the limit only the size is kept.
        pending = [*pending, *pieces] if size <= MAX_ROW_BYTES else []
    yield from _line(number, pending, size)


def _line(number: int, pieces: list[bytes], size: int) -> Iterator[tuple[int, bytes | None]]:
    if size > MAX_ROW_BYTES:
        yield number, None
        return
    line = b"".join(pieces).strip()
    if line:
        yield number, line


_OUTSIDE_STRING = re.compile(rb'["\[\]{}]')
_OUTSIDE_ELEMENT = re.compile(rb'["\[\]{},]')
_INSIDE_STRING = re.compile(rb'["\\]')


class _ArrayScanner:
    """Finds where the elements of one top-level JSON array begin and end, without parsing them.

    Bytes are enough: every structural character of JSON is ASCII, and no byte of a UTF-8 sequence is. Each
    byte is looked at once, so a single element of many megabytes costs no more than many small ones.
    """

    def __init__(self) -> None:
        self.depth = 0  # 0: before or after the array, 1: between elements
        self.closed = False
        self._in_string = False
        self._skip = 0  # bytes of an escape that lie in the next block

    def cuts(self, block: bytes) -> Iterator[int]:
        """Positions in `block` of the brackets of the array and of the commas between its elements."""
        position, self._skip = self._skip, max(0, self._skip - len(block))
        while position < len(block):
            if self._in_string:
                match = _INSIDE_STRING.search(block, position)
                if match is None:
                    return
                position = match.end()
                if match[0] == b'"':
                    self._in_string = False
                else:
                    position += 1
                    self._skip = max(0, position - len(block))
                continue
            match = (_OUTSIDE_ELEMENT if self.depth == 1 else _OUTSIDE_STRING).search(block, position)
            if match is None:
                return
            position = match.end()
            if match[0] == b'"':
                self._in_string = True
            elif match[0] in b"[{":
                self.depth += 1
                if self.depth == 1:
                    yield match.start()
            elif match[0] == b",":
                yield match.start()
            else:
                self.depth -= 1
                if self.depth == 0:
                    self.closed = True
                    yield match.start()
                    return


def array_elements(blocks: Iterable[bytes]) -> Iterator[tuple[int, bytes | None]]:
    """(element number, element) of a top-level JSON array; None for an element over `MAX_ROW_BYTES`.

    Wherever the blocks are cut.

    Raises:
        ReadError: the array is not closed, or something follows it.
    """
    scanner = _ArrayScanner()
    number = 0  # elements begun; 0 before the opening bracket
    pending: list[bytes] = []
    size = 0
    for block in blocks:
        if scanner.closed:
            _nothing_follows(block)
            continue
        start = 0
        for cut in scanner.cuts(block):
            if number:
                piece = block[start:cut]
                too_large = size + len(piece) > MAX_ROW_BYTES
                element = None if too_large else b"".join([*pending, piece]).strip()
                # `[]` has no element; `[1,]` has an empty second one, which is a bad row.
                if element != b"" or number > 1 or not scanner.closed:
                    yield number, element
            number, pending, size, start = number + 1, [], 0, cut + 1
        if scanner.closed:
            _nothing_follows(block[start:])
        elif number:
            size += len(block) - start
            pending = [*pending, block[start:]] if size <= MAX_ROW_BYTES else []
    if not scanner.closed:
        raise ReadError("the JSON array is not closed: the file was cut, or an element has unbalanced brackets")


def _nothing_follows(rest: bytes) -> None:
    if rest.strip():
        raise ReadError("something follows the end of the JSON array")


def _read_parquet(
    file: InputFile, storage_options: Mapping[str, Any], columns: Iterable[str]
) -> Iterator[SourceRow | BadRow]:
    with open_file(file, storage_options) as handle:
        # Both are needed for pyarrow to stream the pages; else it loads the column chunks of a row group whole.
        parquet = _translated(lambda: pq.ParquetFile(handle, buffer_size=_PARQUET_BATCH_BYTES, pre_buffer=False))
        wanted = set(columns)
        names = [name for name in parquet.schema_arrow.names if name in wanted] or parquet.schema_arrow.names
        batch_rows, row_bytes = _parquet_batch(parquet.metadata, names)
        batches = parquet.iter_batches(batch_size=batch_rows, columns=names)
        line = 0
        while (batch := _translated(lambda: next(batches, None))) is not None:
            for position in range(batch.num_rows):
                line += 1
                yield _parquet_row(file.url, line, batch.slice(position, 1), row_bytes)
        if line != parquet.metadata.num_rows:
            raise ReadError(f"the footer promises {parquet.metadata.num_rows} rows")


def _parquet_batch(metadata: pq.FileMetaData, names: list[str]) -> tuple[int, int]:
    """Rows of one batch, and the average bytes of a row over the columns `names`."""
    wanted = set(names)
    total = sum(
        column.total_uncompressed_size
        for group in range(metadata.num_row_groups)
        for column in map(metadata.row_group(group).column, range(metadata.num_columns))
        if column.path_in_schema.split(".", 1)[0] in wanted
    )
    row_bytes = max(1, total // max(1, metadata.num_rows))
    return max(1, min(_PARQUET_BATCH_ROWS, _PARQUET_BATCH_BYTES // row_bytes)), row_bytes


def _parquet_row(url: str, line: int, row: pa.RecordBatch, nbytes: int) -> SourceRow | BadRow:
    try:
        data = row.to_pylist()[0]
    except UnicodeDecodeError as err:
        return BadRow(url, line, "bad_encoding", f"not UTF-8: {err.reason} at byte {err.start}", "")
    return SourceRow(url, line, data, nbytes)


def _translated(call: Callable[[], _T]) -> _T:
    try:
        return call()
    except Exception as err:  # pyarrow's, or the file system's underneath
        raise ReadError(f"not readable as Parquet: {type(err).__name__}: {err}") from err
