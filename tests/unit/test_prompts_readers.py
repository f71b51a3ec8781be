"""Rows of JSON lines, JSON arrays and Parquet: each row once, bad ones named, broken files refused."""

import gzip
import json
import re
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st

from hsray.errors import ConfigError
from hsray.prompts.files import InputFile, ReadError
from hsray.prompts.pieces import array_elements, lines
from hsray.prompts.readers import read_rows
from hsray.prompts.source import MAX_ROW_BYTES, BadRow, SourceRow

Row = SourceRow | BadRow


def read(path: Path, columns: tuple[str, ...] = ("id", "text")) -> list[Row]:
    return list(read_rows(InputFile(str(path), None, ""), {}, columns))


def summary(rows: list[Row]) -> list[tuple[int, Any]]:
    """(line, text) of good rows, (line, reason) of bad ones."""
    return [(row.line, row.data["text"] if isinstance(row, SourceRow) else row.reason) for row in rows]


def write(path: Path, content: bytes) -> Path:
    path.write_bytes(content)
    return path


# ---------------------------------------------------------------- JSON lines


def test_lines_keep_their_numbers_over_bom_crlf_blank_lines_and_a_missing_last_newline(tmp_path: Path) -> None:
    content = b'\xef\xbb\xbf{"text": "a"}\r\n\r\n  \n{"text": "b\xc3\xa9"}\n\n\n {"text": "c"} '

    rows = read(write(tmp_path / "a.jsonl", content))

    assert summary(rows) == [(1, "a"), (4, "b\u00e9"), (7, "c")]
    assert {row.file for row in rows} == {str(tmp_path / "a.jsonl")}


def test_a_bom_in_two_pieces_is_one(tmp_path: Path) -> None:
    stored = gzip.compress(b"\xef") + gzip.compress(b'\xbb\xbf{"text": "a"}\n')

    assert summary(read(write(tmp_path / "a.jsonl.gz", stored))) == [(1, "a")]


@pytest.mark.parametrize(
    ("line", "reason", "detail"),
    [
        (b'{"text": "cut', "malformed_json", "Unterminated string"),
        (b'{"text": 1} {"text": 2}', "malformed_json", "Extra data"),
        (b"\0\0\0\0", "malformed_json", "Expecting value"),
        (b'{"n": ' + b"9" * 5000 + b"}", "malformed_json", "integer"),
        (b"[" * 100_000 + b"]" * 100_000, "malformed_json", "nested too deeply"),
        (b'[{"text": "a"}]', "not_an_object", "an array"),
        (b'"text"', "not_an_object", "a string"),
        (b"null", "not_an_object", "null"),
        (b"true", "not_an_object", "a boolean"),
        (b"1.5", "not_an_object", "a number"),
        (b'{"text": "caf\xe9"}', "bad_encoding", "at byte 13"),
        (b'{"text": "\xed\xa0\x80"}', "bad_encoding", "at byte 10"),
    ],
)
def test_a_bad_line_is_named_and_the_next_one_is_read(tmp_path: Path, line: bytes, reason: str, detail: str) -> None:
    rows = read(write(tmp_path / "a.jsonl", b'{"text": "a"}\n' + line + b'\n{"text": "b"}\n'))

    assert summary(rows) == [(1, "a"), (2, reason), (3, "b")]
    bad = rows[1]
    assert isinstance(bad, BadRow)
    assert re.search(detail, bad.detail)
    assert bad.snippet == line.decode("utf-8", errors="replace")[:200]


def test_a_cut_last_line_is_a_bad_row(tmp_path: Path) -> None:
    rows = read(write(tmp_path / "a.jsonl", b'{"text": "a"}\n{"text": "b'))

    assert summary(rows) == [(1, "a"), (2, "malformed_json")]


@pytest.mark.parametrize("suffix", ["jsonl", "json"])
@pytest.mark.parametrize("content", [b"", b"\n", b"\xef\xbb\xbf", b" \r\n\n"])
def test_an_empty_file_has_no_rows(tmp_path: Path, suffix: str, content: bytes) -> None:
    assert read(write(tmp_path / f"a.{suffix}", content)) == []


def test_utf16_is_refused_with_the_fix(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", '{"text": "a"}\n'.encode("utf-16"))

    with pytest.raises(ConfigError, match=r"a\.jsonl is UTF-16; save it as UTF-8"):
        read(path)


def test_a_line_over_the_limit_costs_one_row_and_a_long_one_is_read(tmp_path: Path) -> None:
    long = b'{"text": "' + b"x" * (30 << 20) + b'"}\n'
    over = b'{"text": "' + b"x" * MAX_ROW_BYTES + b'"}\n'

    rows = read(write(tmp_path / "a.jsonl", long + over + b'{"text": "b"}\n'))

    assert [(row.line, getattr(row, "reason", None)) for row in rows] == [(1, None), (2, "row_too_large"), (3, None)]
    assert isinstance(rows[0], SourceRow)
    assert len(rows[0].data["text"]) == 30 << 20


@settings(deadline=None)
@given(st.lists(st.binary(max_size=12)), st.integers(1, 7))
def test_lines_do_not_depend_on_where_blocks_are_cut(parts: list[bytes], step: int) -> None:
    text = b"\n".join(parts)
    blocks = [text[i : i + step] for i in range(0, len(text), step)]

    expected = [(n, line.strip()) for n, line in enumerate(text.split(b"\n"), 1) if line.strip()]

    assert list(lines(blocks)) == expected


# ------------------------------------------------------------- compression


@pytest.mark.parametrize(
    ("suffix", "compress"),
    [(".gz", gzip.compress), (".zst", zstandard.ZstdCompressor().compress)],
    ids=["gz", "zst"],
)
def test_a_cut_compressed_file_ends_the_run_and_says_how_far_it_could_be_read(
    tmp_path: Path, suffix: str, compress: Callable[[bytes], bytes]
) -> None:
    content = b"".join(b'{"text": "%064x"}\n' % (n * 7919**15) for n in range(20_000))
    path = write(tmp_path / f"a.jsonl{suffix}", compress(content))
    assert len(read(path)) == 20_000

    path.write_bytes(path.read_bytes()[:-100])
    rows: list[Row] = []
    with pytest.raises(ConfigError, match=r"prompts\.path: .*a\.jsonl.*was cut; it could be read up to line") as caught:
        rows.extend(row for row in read_rows(InputFile(str(path), None, ""), {}, ("text",)))

    last = int(str(caught.value).rsplit(" ", 1)[1])
    assert 0 < last < 20_000


# -------------------------------------------------------------- JSON arrays

json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)


@settings(deadline=None)
@given(st.lists(json_values, max_size=6), st.sampled_from([None, 0, 2]), st.booleans(), st.integers(1, 9))
def test_an_array_is_cut_into_its_elements_wherever_blocks_are_cut(
    values: list[Any], indent: int | None, ascii_only: bool, step: int
) -> None:
    text = json.dumps(values, indent=indent, ensure_ascii=ascii_only).encode("utf-8", errors="surrogatepass")
    blocks = [text[i : i + step] for i in range(0, len(text), step)]

    elements = list(array_elements(blocks))

    assert [number for number, _ in elements] == list(range(1, len(values) + 1))
    assert [json.loads(element) for _, element in elements if element is not None] == values


def test_a_json_file_is_an_array_or_lines_by_its_first_character(tmp_path: Path) -> None:
    array = b'\xef\xbb\xbf \n[\n {"text": "a]\\"}"},\n {"text": "b", "more": [[1], {}]}\n]\n'

    assert summary(read(write(tmp_path / "a.json", array))) == [(1, 'a]"}'), (2, "b")]
    assert summary(read(write(tmp_path / "b.json", b'{"text": "a"}\n{"text": "b"}\n'))) == [(1, "a"), (2, "b")]
    assert summary(read(write(tmp_path / "c.json.gz", gzip.compress(array)))) == [(1, 'a]"}'), (2, "b")]
    assert read(write(tmp_path / "d.json", b" [ ] ")) == []


def test_bad_elements_of_an_array_are_named_and_the_others_are_read(tmp_path: Path) -> None:
    content = b'[{"text": "a"}, {"text": nope}, 7, {"text": "\xff"}, , {"text": "b"},]'

    assert summary(read(write(tmp_path / "a.json", content))) == [
        (1, "a"),
        (2, "malformed_json"),
        (3, "not_an_object"),
        (4, "bad_encoding"),
        (5, "malformed_json"),
        (6, "b"),
        (7, "malformed_json"),
    ]


def test_an_element_over_the_limit_costs_one_row(tmp_path: Path) -> None:
    over = b'{"text": "' + b"x" * MAX_ROW_BYTES + b'"}'

    rows = read(write(tmp_path / "a.json", b'[{"text": "a"}, ' + over + b', {"text": "b"}]'))

    assert summary(rows) == [(1, "a"), (2, "row_too_large"), (3, "b")]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b'[{"text": "a"}, {"text": "b', "array is not closed.*up to row 1"),
        (b'[{"text": "a"}, {"text": "b"}', "array is not closed.*up to row 1"),
        (b'[{"text": "a"}, {"text": "b"},', "array is not closed.*up to row 2"),
        (b'[{"text": "a"}] {"text": "b"}', "something follows the end.*up to row 1"),
        (b"[", "array is not closed.*up to row 0"),
    ],
)
def test_an_array_that_does_not_end_where_the_file_does_ends_the_run(
    tmp_path: Path, content: bytes, message: str
) -> None:
    with pytest.raises(ConfigError, match=rf"prompts\.path: .*a\.json: .*{message}"):
        read(write(tmp_path / "a.json", content))


def test_something_behind_the_array_is_seen_in_a_later_block_too() -> None:
    assert list(array_elements([b"[1]", b" ", b"\n"])) == [(1, b"1")]
    with pytest.raises(ReadError, match="something follows"):
        list(array_elements([b"[1]", b" ", b"x"]))


def test_a_large_array_on_one_line_is_read_in_bounded_memory(tmp_path: Path) -> None:
    row = {"text": "x" * 20_000}
    path = write(tmp_path / "a.json", json.dumps([row] * 2_000).encode())
    assert path.stat().st_size > 40_000_000

    tracemalloc.start()
    count = sum(1 for _ in read_rows(InputFile(str(path), None, ""), {}, ("text",)))
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()

    assert count == 2_000
    assert peak < 8 << 20


# ------------------------------------------------------------------ Parquet


def test_parquet_rows_come_in_order_over_row_groups_and_batches(tmp_path: Path) -> None:
    table = pa.table({"id": range(1000), "text": [f"t{n}" for n in range(1000)], "other": [[n] for n in range(1000)]})
    pq.write_table(table, tmp_path / "a.parquet", row_group_size=300)

    rows = read(tmp_path / "a.parquet")

    assert summary(rows) == [(n + 1, f"t{n}") for n in range(1000)]
    assert all(isinstance(row, SourceRow) and set(row.data) == {"id", "text"} for row in rows)
    assert isinstance(rows[7], SourceRow)
    assert rows[7].snippet == '{"id": 7, "text": "t7"}'


def test_a_parquet_file_without_any_known_column_shows_what_it_holds(tmp_path: Path) -> None:
    pq.write_table(pa.table({"prompt": ["hello"]}), tmp_path / "a.parquet")

    [row] = read(tmp_path / "a.parquet")

    assert isinstance(row, SourceRow)
    assert row.data == {"prompt": "hello"}


def test_long_parquet_rows_are_read_in_small_batches(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    table = pa.table({"text": [f"{n:07d}" + "x" * 993_000 for n in range(100)]})
    # One value a page: a reader cannot take less than a page at a time.
    pq.write_table(table, path, use_dictionary=False, write_batch_size=1, compression="none")
    del table

    # What pyarrow decodes lies in its pool; what it reads through a Python file lies in Python's memory.
    pool = pa.default_memory_pool()
    before, decoded, count = pool.bytes_allocated(), 0, 0
    tracemalloc.start()
    for row in read_rows(InputFile(str(path), None, ""), {}, ("text",)):
        decoded = max(decoded, pool.bytes_allocated() - before)
        count += 1
        assert row.line == count
    _, read_bytes = tracemalloc.get_traced_memory()
    tracemalloc.stop()

    # Of 99 MB in one row group.
    assert count == 100
    assert decoded < 40 << 20
    assert read_bytes < 40 << 20


def test_a_parquet_file_without_rows_is_empty(tmp_path: Path) -> None:
    pq.write_table(pa.table({"text": pa.array([], pa.string())}), tmp_path / "a.parquet")

    assert read(tmp_path / "a.parquet") == []


def test_invalid_utf8_in_parquet_costs_one_row(tmp_path: Path) -> None:
    raw = pa.array([b"a", b"caf\xe9", b"b"], pa.binary())
    text = pa.Array.from_buffers(pa.string(), len(raw), raw.buffers())
    pq.write_table(pa.table({"text": text}), tmp_path / "a.parquet")

    assert summary(read(tmp_path / "a.parquet")) == [(1, "a"), (2, "bad_encoding"), (3, "b")]


def test_a_broken_parquet_file_ends_the_run(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    table = pa.table({"text": [f"{n:064x}" for n in range(5000)]})
    pq.write_table(table, path, row_group_size=1000, use_dictionary=False, compression="zstd")
    good = path.read_bytes()
    third = pq.ParquetFile(path).metadata.row_group(2).column(0).data_page_offset

    damaged = bytearray(good)
    damaged[third + 60 : third + 400] = b"\xff" * 340
    for content, message in [
        (good[:-20], "not readable as a table.*up to row 0"),
        (b"", "not readable as a table.*up to row 0"),
        (b"PAR1", "not readable as a table.*up to row 0"),
        (bytes(damaged), r"not readable as a table.*up to row 1\d{3}"),
    ]:
        with pytest.raises(ConfigError, match=rf"(?s)prompts\.path: .*a\.parquet: {message}"):
            read(write(path, content))


def test_a_parquet_file_with_fewer_rows_than_its_footer_says_ends_the_run(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    pq.write_table(pa.table({"text": [f"{n}" for n in range(2000)]}), path, row_group_size=1000)
    # The number of rows of the file, an i64 field of the footer as a zigzag varint: 2000 becomes 2001.
    content = path.read_bytes()
    assert content.count(b"\x16\xa0\x1f") == 1
    write(path, content.replace(b"\x16\xa0\x1f", b"\x16\xa2\x1f"))

    with pytest.raises(
        ConfigError, match=r"a\.parquet: the footer promises 2001 rows; it could be read up to row 2000"
    ):
        read(path)
