"""The index is a pure function of the shards, round trips, and refuses what contradicts itself."""

from dataclasses import replace
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from hsray.errors import HsrayError
from hsray.index import Segments, index_table, read_index, write_index
from hsray.records import Extent, IndexEntry, Resolution, ShardRecord
from hsray.schema import INDEX_KEY, index_schema
from hsray.store import Store, open_store

SITES = ["resid_pre_2", "final_prenorm"]


def entry(row: int, segment: int = 0, num_segments: int = 1, tokens: int = 10, row_group: int = 0) -> IndexEntry:
    base = 10_000 * row + 1000 * segment
    extents = {
        "input_ids": Extent(base + 1, 4 * tokens),
        "loss_mask": Extent(base + 101, 4 * tokens),
        **{site: Extent(base + 201 + k, 64 * tokens, f"{2**64 - 1 - base - k:016x}") for k, site in enumerate(SITES)},
    }
    return IndexEntry(
        row=row,
        prompt_id=f"p{row}",
        segment=segment,
        num_segments=num_segments,
        token_start=tokens * segment,
        num_tokens=tokens,
        seq_len=tokens * num_segments,
        row_group=row_group,
        extents=extents,
    )


def shards() -> list[ShardRecord]:
    return [
        ShardRecord("data/b.parquet", 9, "0" * 16, (entry(7), entry(2, 1, 2, row_group=1), entry(2, 0, 2))),
        ShardRecord("data/a.parquet", 9, "1" * 16, (entry(5), entry(0, row_group=1))),
    ]


@pytest.fixture
def store(tmp_path: Any) -> Store:
    return open_store(str(tmp_path))


def test_the_table_is_sorted_by_row_and_segment_and_holds_every_field() -> None:
    table = index_table(shards(), SITES)

    assert table.schema.equals(index_schema(SITES))
    assert list(zip(table["row"].to_pylist(), table["segment"].to_pylist(), strict=True)) == [
        (0, 0),
        (2, 0),
        (2, 1),
        (5, 0),
        (7, 0),
    ]
    third = {name: column[2].as_py() for name, column in zip(table.column_names, table.columns, strict=True)}
    assert third == {
        "prompt_id": "p2",
        "row": 2,
        "segment": 1,
        "num_segments": 2,
        "token_start": 10,
        "num_tokens": 10,
        "seq_len": 20,
        "shard": "data/b.parquet",
        "row_group": 1,
        "input_ids_offset": 21_001,
        "input_ids_nbytes": 40,
        "loss_mask_offset": 21_101,
        "loss_mask_nbytes": 40,
        "resid_pre_2_offset": 21_201,
        "resid_pre_2_nbytes": 640,
        "resid_pre_2_xxh3": 2**64 - 1 - 21_000,
        "final_prenorm_offset": 21_202,
        "final_prenorm_nbytes": 640,
        "final_prenorm_xxh3": 2**64 - 1 - 21_001,
    }


def test_the_order_of_the_shards_does_not_matter() -> None:
    assert index_table(shards(), SITES).equals(index_table(shards()[::-1], SITES))


def test_an_index_without_shards_is_an_empty_table_of_the_same_columns() -> None:
    table = index_table([], SITES)

    assert table.num_rows == 0
    assert table.schema.equals(index_schema(SITES))
    assert len(Segments(table, SITES).prompt_ids) == 0


def test_a_segment_in_two_shards_is_refused_with_both_keys() -> None:
    again = ShardRecord("data/c.parquet", 9, "2" * 16, (entry(5),))

    with pytest.raises(HsrayError, match=r"row 5, segment 0 is in data/a\.parquet and in data/c\.parquet"):
        index_table([*shards(), again], SITES)


def test_a_record_without_the_extent_of_a_site_is_refused() -> None:
    with pytest.raises(HsrayError, match=r"row 7 \(p7\): its record has no extent of resid_pre_9"):
        index_table(shards(), [*SITES, "resid_pre_9"])


def test_a_record_with_a_malformed_hash_is_refused() -> None:
    bad = replace(entry(9), extents={**entry(9).extents, "final_prenorm": Extent(1, 2, "xyz")})

    with pytest.raises(HsrayError, match="malformed xxh3"):
        index_table([ShardRecord("data/c.parquet", 9, "2" * 16, (bad,))], SITES)


def test_what_is_written_reads_back_equal(store: Store) -> None:
    one, two = shards()
    resolutions = {
        "000000": Resolution("commit", "000000", "a", "r", (one,)),
        "000001": Resolution("dead", "000001", "a", "r"),
        "000002": Resolution("commit", "000002", "a", "r", (two,)),
    }

    assert write_index(store, resolutions.values(), SITES) == 5

    assert read_index(store, SITES).equals(index_table([one, two], SITES))


def test_an_index_of_many_row_groups_comes_back_in_one_piece(store: Store) -> None:
    extents = entry(0).extents
    many = [
        ShardRecord(
            f"data/{n:04d}.parquet",
            9,
            "0" * 16,
            tuple(IndexEntry(1000 * n + k, f"p{1000 * n + k}", 0, 1, 0, 10, 10, k, extents) for k in range(1000)),
        )
        for n in range(135)
    ]
    write_index(store, [Resolution("commit", "000000", "a", "r", tuple(many[::-1]))], SITES)

    table = read_index(store, SITES)

    assert pq.read_metadata(pa.BufferReader(store.get(INDEX_KEY))).num_row_groups == 2
    assert table.equals(index_table(many, SITES))
    segments = Segments(table, SITES)
    assert segments.prompt_ids[134_999] == "p134999"
    assert segments.where(134_999, "final_prenorm").key == "data/0134.parquet"


def test_a_missing_index_is_a_missing_file(store: Store) -> None:
    with pytest.raises(FileNotFoundError):
        read_index(store, SITES)


def test_an_index_of_other_sites_is_refused(store: Store) -> None:
    write_index(store, [], ["resid_pre_3"])

    with pytest.raises(HsrayError, match="does not have the columns of resid_pre_2, final_prenorm"):
        read_index(store, SITES)


def test_an_object_that_is_no_parquet_is_refused(store: Store) -> None:
    store.put(INDEX_KEY, b"not parquet at all")

    with pytest.raises(HsrayError, match="is not readable"):
        read_index(store, SITES)


def test_segments_know_the_prompts_and_their_places() -> None:
    segments = Segments(index_table(shards(), SITES), SITES)

    assert segments.prompt_ids == ["p0", "p2", "p5", "p7"]
    assert [segments.of(position) for position in range(4)] == [range(1), range(1, 3), range(3, 4), range(4, 5)]
    assert segments.where(2, "resid_pre_2") == ("data/b.parquet", 21_201, 640)


def _change(**fields: Any) -> list[ShardRecord]:
    """The second segment of row 2, changed."""
    one, two = shards()
    entries = tuple(replace(e, **fields) if (e.row, e.segment) == (2, 1) else e for e in one.entries)
    return [replace(one, entries=entries), two]


def _without(segment: int) -> list[ShardRecord]:
    one, two = shards()
    return [replace(one, entries=tuple(e for e in one.entries if (e.row, e.segment) != (2, segment))), two]


@pytest.mark.parametrize(
    "broken",
    [
        pytest.param(_without(0), id="first-segment-missing"),
        pytest.param(_without(1), id="last-segment-missing"),
        pytest.param(_change(segment=2), id="number-skipped"),
        pytest.param(_change(num_segments=3), id="count-wrong"),
        pytest.param(_change(token_start=11), id="gap"),
        pytest.param(_change(num_tokens=9), id="tokens-missing"),
        pytest.param(_change(seq_len=21), id="length-wrong"),
    ],
)
def test_segments_that_do_not_add_up_to_their_prompt_are_refused(broken: list[ShardRecord]) -> None:
    with pytest.raises(HsrayError, match="row 2 exactly once"):
        Segments(index_table(broken, SITES), SITES)


def test_an_index_that_starts_with_a_later_segment_is_refused() -> None:
    table = index_table([ShardRecord("data/a.parquet", 9, "0" * 16, (entry(3, 1, 2),))], SITES)

    with pytest.raises(HsrayError, match="row 3 exactly once"):
        Segments(table, SITES)


def test_hashes_use_all_64_bits() -> None:
    table = index_table(shards(), SITES)

    assert np.iinfo(np.uint64).max in table["resid_pre_2_xxh3"].to_pylist()
