"""Rows of the input files: JSON lines, JSON arrays, lines of text, CSV, Parquet and Arrow, streamed.

Promises: rows come in file order, each exactly once, with bounded memory whatever the size of a file; a bad
row is a `BadRow` and the next one is still read; a file that breaks off ends the run with ConfigError, because
nobody can say how many rows are missing. Must never know what the keys of a row mean.
"""

import itertools
import json
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from hsray.errors import ConfigError
from hsray.prompts.csv_rows import read_csv
from hsray.prompts.files import InputFile, ReadError, read_blocks
from hsray.prompts.pieces import array_elements, lines
from hsray.prompts.source import MAX_ROW_BYTES, SNIPPET_CHARS, BadRow, Row, SourceRow, snippet, too_large
from hsray.prompts.tables import read_arrow, read_parquet

_UTF8_BOM = b"\xef\xbb\xbf"
_UTF16_BOMS = (b"\xff\xfe", b"\xfe\xff")


def read_rows(file: InputFile, storage_options: Mapping[str, Any], columns: Iterable[str]) -> Iterator[Row]:
    """The rows of one file, in order. Blank lines are no rows.

    `columns` are the keys that anybody will look at; a table with none of them is read whole, so that the reject
    can show what it holds. The row of a `.txt` file has the key `text`.

    Raises:
        ConfigError: the file cannot be opened, breaks off, or is not what its name says. The message names
            the file and the last row that was read.
    """
    if file.format == ".parquet":
        rows = read_parquet(file, storage_options, columns)
    elif file.format == ".arrow":
        rows = read_arrow(file, storage_options, columns)
    else:
        rows = _read_text(file, read_blocks(file, storage_options))
    last = 0
    try:
        for row in rows:
            yield row
            last = row.line
    except ReadError as err:
        place = "line" if file.format in (".jsonl", ".txt") else "row"
        raise ConfigError(f"prompts.path: {file.url}: {err}; it could be read up to {place} {last}") from err


def _read_text(file: InputFile, blocks: Iterator[bytes]) -> Iterator[Row]:
    head = b""
    for block in blocks:
        head += block
        if head.startswith(_UTF16_BOMS):
            raise ConfigError(f"prompts.path: {file.url} is UTF-16; save it as UTF-8")
        if len(head) >= len(_UTF8_BOM) and head.removeprefix(_UTF8_BOM).strip():
            break
    head = head.removeprefix(_UTF8_BOM)
    if file.format in (".csv", ".tsv"):
        yield from read_csv(file.url, itertools.chain([head], blocks), "\t" if file.format == ".tsv" else ",")
        return
    if file.format == ".txt":
        yield from _read_lines(file.url, itertools.chain([head], blocks))
        return
    # By what is inside and not by the name: `.json` is used for JSON lines, `.jsonl` for one array.
    is_array = head.lstrip().startswith(b"[")
    if is_array and file.format == ".jsonl":
        head, is_array = _complete_line(head, blocks)
    content = itertools.chain([head], blocks)
    pieces = array_elements(content) if is_array else lines(content)
    for line, piece in pieces:
        if piece is None:
            yield too_large(file.url, line)
        else:
            yield _parse(file.url, line, piece)


def _parse(url: str, line: int, piece: bytes) -> Row:
    try:
        data = json.loads(piece.decode("utf-8"))
    except UnicodeDecodeError as err:
        return BadRow(url, line, "bad_encoding", f"not UTF-8: {err.reason} at byte {err.start}", snippet(piece))
    except RecursionError:
        return BadRow(url, line, "malformed_json", "nested too deeply", snippet(piece))
    except ValueError as err:  # JSONDecodeError, and integers of thousands of digits
        return BadRow(url, line, "malformed_json", str(err), snippet(piece))
    if not isinstance(data, dict):
        detail = f"a row must be a JSON object, this is {_json_type(data)}"
        return BadRow(url, line, "not_an_object", detail, snippet(piece))
    return SourceRow(url, line, data, len(piece), piece[: 4 * SNIPPET_CHARS])


def _json_type(value: object) -> str:
    if value is None:
        return "null"
    names = {list: "an array", str: "a string", bool: "a boolean", int: "a number", float: "a number"}
    return names[type(value)]


def _complete_line(head: bytes, blocks: Iterator[bytes]) -> tuple[bytes, bool]:
    """The head, read up to the end of its first line, and whether an array begins there that is the whole file.

    It is not, if the first line is an array already and others follow: then each of them is a bad row.
    """
    for block in blocks:
        if b"\n" in head.lstrip() or len(head) > MAX_ROW_BYTES:
            break
        head += block
    first, _, rest = head.lstrip().partition(b"\n")
    try:
        whole = isinstance(json.loads(first), list)
    except (ValueError, RecursionError):
        whole = False
    return head, not (whole and rest.strip())


def _read_lines(url: str, blocks: Iterable[bytes]) -> Iterator[Row]:
    for number, line in lines(blocks, strip=b"\r"):
        if line is None:
            yield too_large(url, number)
            continue
        try:
            yield SourceRow(url, number, {"text": line.decode("utf-8")}, len(line), line[: 4 * SNIPPET_CHARS])
        except UnicodeDecodeError as err:
            yield BadRow(url, number, "bad_encoding", f"not UTF-8: {err.reason} at byte {err.start}", snippet(line))
