"""Rows of CSV and TSV files: the first record names the columns, quotes may hold line ends."""

import codecs
import csv
from collections.abc import Iterable, Iterator

from hsray.errors import ConfigError
from hsray.prompts.source import MAX_ROW_BYTES, SNIPPET_CHARS, BadRow, Row, SourceRow


def read_csv(url: str, blocks: Iterable[bytes], delimiter: str) -> Iterator[Row]:
    """The records behind the header. An empty cell is an absent key. `line` counts records.

    Raises:
        ConfigError: the header names a column twice.
    """
    csv.field_size_limit(MAX_ROW_BYTES)
    records = csv.reader(_text_lines(blocks), delimiter=delimiter, strict=True)
    header: list[str] | None = None
    line = 0
    while True:
        try:
            record = next(records)
        except StopIteration:
            return
        except csv.Error as err:
            if header is None:
                raise ConfigError(f"prompts.path: the header of {url} is no CSV: {err}") from err
            line += 1
            yield BadRow(url, line, "malformed_csv", str(err), "")
            continue
        if not record:
            continue
        if header is None:
            header = record
            if len(set(header)) < len(header):
                raise ConfigError(f"prompts.path: the header of {url} names a column twice: {', '.join(header)[:200]}")
            continue
        line += 1
        yield _row(url, line, header, record)


def _row(url: str, line: int, header: list[str], record: list[str]) -> Row:
    joined = ",".join(record)
    shown = joined[:SNIPPET_CHARS].encode("utf-8", errors="replace").decode()
    if len(record) != len(header):
        detail = f"{len(record)} cells, the header has {len(header)}"
        return BadRow(url, line, "malformed_csv", detail, shown)
    try:
        nbytes = len(joined.encode("utf-8"))
    except UnicodeEncodeError:
        return BadRow(url, line, "bad_encoding", "not UTF-8", shown)
    return SourceRow(url, line, {name: cell or None for name, cell in zip(header, record, strict=True)}, nbytes)


def _text_lines(blocks: Iterable[bytes]) -> Iterator[str]:
    # What is not UTF-8 becomes surrogates here, so that the record they are in can be named.
    decoder = codecs.getincrementaldecoder("utf-8")("surrogateescape")
    pending = ""
    for block in blocks:
        *complete, pending = (pending + decoder.decode(block)).split("\n")
        for line in complete:
            yield line + "\n"
    pending += decoder.decode(b"", final=True)
    if pending:
        yield pending
