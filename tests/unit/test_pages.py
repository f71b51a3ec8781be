"""Hand-made Parquet: what pyarrow writes of the same rows, byte for byte up to the footer, and the same footer."""

import struct
import zlib
from pathlib import Path
from typing import Any

import duckdb
import numpy as np
import polars as pl
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st

from hsray import pages
from hsray.pages import PageWriter
from hsray.schema import shard_schema
from tests.reference_writer import reference_bytes

SCHEMA = shard_schema(["resid_pre_2", "final_prenorm"])
STATISTICS = ["prompt_id", "row", "seq_len"]
METADATA = {"hsray.model": "größe", "hsray.empty": "", "hsray.long": "x" * 1000}
INT64_MIN, INT64_MAX = -(2**63), 2**63 - 1


def make_row(tokens: int, nbytes: int = 64, **fixed: Any) -> dict[str, Any]:
    rng = np.random.default_rng(tokens)
    return {
        "prompt_id": f"prompt-{tokens}",
        "row": tokens,
        "segment": 0,
        "num_segments": 1,
        "token_start": 0,
        "num_tokens": tokens,
        "seq_len": tokens,
        "input_ids": rng.integers(0, 2**31, tokens, dtype=np.int32),
        "loss_mask": rng.integers(0, 2, tokens, dtype=np.uint8),
        "resid_pre_2": memoryview(rng.bytes(nbytes)),
        "final_prenorm": memoryview(rng.bytes(nbytes)),
        **fixed,
    }


def write_pages(rows: list[dict[str, Any]]) -> tuple[bytes, list[dict[str, tuple[int, int]]]]:
    """The file, and the extents of each row group."""
    pages = PageWriter(SCHEMA, STATISTICS)
    data, extents = b"", []
    for row in rows:
        group = pages.row_group(row)
        for head, payload in zip(group.heads, group.payloads, strict=True):
            data += head + payload
        extents.append(group.extents)
        assert pages.nbytes == len(data)
    data += pages.footer(METADATA, "hsray version 1.2.3")
    assert pages.nbytes == len(data)
    return data, extents


def before_footer(data: bytes) -> bytes:
    (size,) = struct.unpack("<I", data[-8:-4])
    return data[: -8 - size]


def told(data: bytes) -> dict[str, Any]:
    """All that a footer says, without its author and its size."""
    footer = pq.read_metadata(pa.BufferReader(data))
    said: dict[str, Any] = footer.to_dict()
    del said["created_by"], said["serialized_size"]
    said["metadata"] = footer.metadata
    for group in said["row_groups"]:
        for column in group["columns"]:
            column["encodings"] = sorted(column["encodings"])
    return said


def assert_as_the_reference(rows: list[dict[str, Any]]) -> None:
    data, _ = write_pages(rows)
    reference = reference_bytes(SCHEMA, rows, STATISTICS, METADATA)

    # Headers, CRCs, levels, values, page statistics.
    assert before_footer(data) == before_footer(reference)
    assert told(data) == told(reference)
    ours, theirs = (
        pq.ParquetFile(pa.BufferReader(file), page_checksum_verification=True) for file in (data, reference)
    )
    assert ours.schema.equals(theirs.schema)
    assert ours.schema_arrow.equals(theirs.schema_arrow, check_metadata=True)
    assert ours.read().equals(theirs.read())


@pytest.mark.parametrize("tokens", [*range(1, 34), 63, 64, 65, 127, 128, 129, 504, 505, 4095, 4096, 8191, 8192, 70_000])
def test_a_row_of_any_length_is_what_pyarrow_writes(tokens: int) -> None:
    assert_as_the_reference([make_row(tokens)])


@pytest.mark.parametrize("nbytes", [0, 1, 123, 124, 127, 128, 16_379, 16_380, 1 << 21, (1 << 21) + 1])
def test_a_payload_of_any_size_is_what_pyarrow_writes(nbytes: int) -> None:
    assert_as_the_reference([make_row(3, nbytes)])


@settings(max_examples=60, deadline=None)
@given(
    tokens=st.lists(st.integers(1, 300), min_size=1, max_size=20),
    prompt_id=st.text(st.characters(exclude_categories=["Cs"]), max_size=80),
    row=st.integers(INT64_MIN, INT64_MAX),
    seq_len=st.integers(-(2**31), 2**31 - 1),
)
def test_any_values_are_what_pyarrow_writes(tokens: list[int], prompt_id: str, row: int, seq_len: int) -> None:
    assert_as_the_reference([make_row(n, prompt_id=prompt_id, row=row, seq_len=seq_len) for n in tokens])


def test_a_footer_of_many_row_groups_is_what_pyarrow_writes() -> None:
    assert_as_the_reference([make_row(1 + n % 3, 4, row=n) for n in range(700)])


@pytest.mark.parametrize("length", [4095, 4096, 4097, 100_000])
def test_a_long_prompt_id_is_kept_out_of_the_footer_as_pyarrow_does(length: int) -> None:
    rows = [make_row(2, prompt_id="x" * length)]

    assert_as_the_reference(rows)
    footer = pq.read_metadata(pa.BufferReader(write_pages(rows)[0]))
    assert footer.row_group(0).column(0).statistics.has_min_max == (length <= 4096)
    assert footer.serialized_size < 5000 + 2 * 4096


def test_extents_are_where_the_raw_values_lie() -> None:
    rows = [make_row(n) for n in (1, 9, 200)]
    data, extents = write_pages(rows)

    for row, places in zip(rows, extents, strict=True):
        assert places.keys() == {"input_ids", "loss_mask", "resid_pre_2", "final_prenorm"}
        for name, (offset, nbytes) in places.items():
            value = row[name]
            expected = bytes(value) if isinstance(value, memoryview) else value.astype("<i4").tobytes()
            assert data[offset : offset + nbytes] == expected


def test_payloads_are_handed_on_and_not_copied() -> None:
    row = make_row(5, 1 << 20)

    group = PageWriter(SCHEMA).row_group(row)

    assert [payload is row[name] for name, payload in zip(SCHEMA.names[-2:], group.payloads, strict=True)] == [True] * 2
    assert sum(map(len, group.heads)) < 1000


@pytest.mark.parametrize("column", SCHEMA.names)
def test_a_changed_byte_of_any_page_is_found_by_its_crc(column: str) -> None:
    data = bytearray(write_pages([make_row(50)])[0])
    chunk = pq.read_metadata(pa.BufferReader(data)).row_group(0).column(SCHEMA.names.index(column))
    data[chunk.data_page_offset + chunk.total_compressed_size - 1] ^= 1

    with pytest.raises(OSError, match="CRC"):
        pq.ParquetFile(pa.BufferReader(bytes(data)), page_checksum_verification=True).read()


def test_other_readers_see_the_reference(tmp_path: Path) -> None:
    rows = [make_row(n, 200) for n in (1, 8, 300)]
    ours, theirs = tmp_path / "ours.parquet", tmp_path / "theirs.parquet"
    ours.write_bytes(write_pages(rows)[0])
    theirs.write_bytes(reference_bytes(SCHEMA, rows, STATISTICS, METADATA))

    assert pl.read_parquet(ours).equals(pl.read_parquet(theirs))
    with duckdb.connect() as connection:
        for query in ("SELECT * FROM read_parquet(?)", "SELECT * FROM read_parquet(?) WHERE row = 8"):
            assert (
                connection.execute(query, [str(ours)]).fetchall() == connection.execute(query, [str(theirs)]).fetchall()
            )


@pytest.mark.parametrize(
    "fields",
    [
        pytest.param([pa.field("x", pa.binary())], id="nullable"),
        pytest.param([pa.field("x", pa.float32(), nullable=False)], id="another-type"),
        pytest.param([pa.field("x", pa.list_(pa.int64()), nullable=False)], id="another-list"),
        pytest.param([pa.field("x", pa.list_(pa.int32()), nullable=False)], id="nullable-elements"),
    ],
)
def test_a_column_that_it_cannot_write_is_refused(fields: list[pa.Field]) -> None:
    with pytest.raises(ValueError, match="column"):
        PageWriter(pa.schema([*fields, pa.field("p", pa.binary(), nullable=False)]))


@pytest.mark.parametrize("kinds", [["binary", "int32"], ["int32"], ["binary", "int32", "binary"]])
def test_payloads_must_be_the_last_columns(kinds: list[str]) -> None:
    types = {"binary": pa.binary(), "int32": pa.int32()}

    with pytest.raises(ValueError, match="last columns"):
        PageWriter(pa.schema([pa.field(f"c{i}", types[kind], nullable=False) for i, kind in enumerate(kinds)]))


class _Huge:
    """Two GiB of nothing, which need no memory before they are touched."""

    def __init__(self) -> None:
        self.view = memoryview(np.zeros(2**31 - 4, np.uint8))


def test_a_value_that_no_page_can_hold_is_refused() -> None:
    with pytest.raises(ValueError, match="final_prenorm: 2147483648 bytes"):
        PageWriter(SCHEMA).row_group(make_row(1, final_prenorm=_Huge().view))


def test_a_list_without_elements_is_what_pyarrow_writes() -> None:
    rows = [make_row(3), make_row(1, input_ids=np.empty(0, np.int32)), make_row(2, loss_mask=np.empty(0, np.uint8))]

    assert_as_the_reference(rows)
    _, extents = write_pages(rows)
    assert extents[1]["input_ids"][1] == extents[2]["loss_mask"][1] == 0


def test_checksums_of_a_payload_in_pieces_are_those_of_the_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    data = memoryview(np.random.default_rng(0).bytes(1000))
    monkeypatch.setattr(pages, "_PIECE_BYTES", 300)

    assert pages._checksums(data, 17) == (zlib.crc32(data, 17), xxhash.xxh3_64_intdigest(data))
    assert pages._checksums(data[:0], 17) == (17, xxhash.xxh3_64_intdigest(b""))
