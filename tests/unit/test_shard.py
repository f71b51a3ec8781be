"""Shards: exact bytes at exact places, all or nothing, and no memory for the states."""

import contextlib
import gc
import mmap
import tracemalloc
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st

from hsray.errors import StoreUnavailable, StoreUnusable
from hsray.records import Prompt, ShardRecord
from hsray.schema import ITEMSIZE, segment_tokens, shard_schema
from hsray.shard import STATISTICS_COLUMNS, ShardRow, column_extents, write_shard
from hsray.store import Store, open_store
from hsray.upload import PART_BYTES
from tests.reference_writer import reference_bytes
from tests.small_run import DTYPES, SITE_NAMES, make_prompt, make_states, metadata

HIDDEN = 16
MB = 1 << 20


def rows_of(lengths: list[int], dtype: str = "bfloat16", hidden_size: int = HIDDEN) -> list[ShardRow]:
    return [
        ShardRow(make_prompt(row, length), make_states(row, length, hidden_size, dtype))
        for row, length in enumerate(lengths)
    ]


def write(
    store: Store, rows: list[ShardRow], dtype: str = "bfloat16", hidden_size: int = HIDDEN, key: str = "data/s.parquet"
) -> ShardRecord:
    return write_shard(
        store,
        key,
        rows,
        sites=SITE_NAMES,
        hidden_size=hidden_size,
        dtype=dtype,
        metadata=metadata(dtype, hidden_size),
    )


@pytest.fixture
def store() -> Iterator[Store]:
    store = open_store("memory://test-shard")
    yield store
    store.delete([info.key for info in store.list()])


def tree_xxh3(data: bytes, record: ShardRecord) -> str:
    """As docs/format.md says."""
    extents = [entry.extents[site] for entry in record.entries for site in SITE_NAMES]
    replaced, done = b"", 0
    for extent in sorted(extents, key=lambda extent: extent.offset):
        replaced += data[done : extent.offset] + bytes.fromhex(extent.xxh3)
        done = extent.offset + extent.nbytes
    return xxhash.xxh3_64_hexdigest(replaced + data[done:])


def assert_extents_hold_the_row(data: bytes, record: ShardRecord, rows: list[ShardRow]) -> None:
    """Byte for byte: what the record says lies at each extent is what was given."""
    by_row = {row.prompt.row: row for row in rows}
    for entry in record.entries:
        row, part = by_row[entry.row], slice(entry.token_start, entry.token_start + entry.num_tokens)
        expected = {site: np.asarray(state)[part].tobytes() for site, state in row.states.items()}
        expected["input_ids"] = row.prompt.input_ids[part].astype("<i4").tobytes()
        expected["loss_mask"] = row.prompt.loss_mask[part].astype("<i4").tobytes()
        assert entry.extents.keys() == expected.keys()
        for column, payload in expected.items():
            extent = entry.extents[column]
            assert extent.nbytes == len(payload)
            assert data[extent.offset : extent.offset + extent.nbytes] == payload, (entry.row, entry.segment, column)
            if column in SITE_NAMES:
                assert extent.xxh3 == xxhash.xxh3_64_hexdigest(payload)


@pytest.mark.parametrize("dtype", list(DTYPES))
@pytest.mark.parametrize("length", [1, 2, 7, 8, 9, 63, 64, 504, 505, 4095, 4096, 4097, 9000])
def test_every_extent_holds_exactly_the_bytes_that_were_given(store: Store, dtype: str, length: int) -> None:
    rows = rows_of([3, length, 1], dtype)

    record = write(store, rows, dtype)

    assert_extents_hold_the_row(store.get(record.key), record, rows)


@settings(max_examples=40, deadline=None)
@given(
    lengths=st.lists(st.integers(1, 300), min_size=1, max_size=6),
    hidden_size=st.sampled_from([1, 3, 64]),
    dtype=st.sampled_from(list(DTYPES)),
)
def test_any_mix_of_lengths_and_widths_round_trips(lengths: list[int], hidden_size: int, dtype: str) -> None:
    store = open_store("memory://test-shard-mix")
    rows = rows_of(lengths, dtype, hidden_size)

    record = write(store, rows, dtype, hidden_size)

    assert_extents_hold_the_row(store.get(record.key), record, rows)


def test_the_record_has_the_size_and_hash_of_the_whole_object(store: Store) -> None:
    record = write(store, rows_of([5, 4200, 17]))

    data = store.get(record.key)

    assert record.nbytes == len(data) == store.head(record.key).nbytes
    assert record.tree_xxh3 == tree_xxh3(data, record)
    assert record.rows == (0, 1, 2)


def test_a_long_prompt_becomes_consecutive_segments_of_one_row_group_each(store: Store) -> None:
    limit = segment_tokens(len(SITE_NAMES), HIDDEN, "bfloat16")
    assert limit == 4096

    record = write(store, rows_of([9000, 10]))

    told = [(e.row, e.segment, e.num_segments, e.token_start, e.num_tokens, e.seq_len) for e in record.entries]
    assert told == [
        (0, 0, 3, 0, 4096, 9000),
        (0, 1, 3, 4096, 4096, 9000),
        (0, 2, 3, 8192, 808, 9000),
        (1, 0, 1, 0, 10, 10),
    ]
    assert [e.row_group for e in record.entries] == [0, 1, 2, 3]
    footer = pq.read_metadata(pa.BufferReader(store.get(record.key)))
    assert [footer.row_group(g).num_rows for g in range(footer.num_row_groups)] == [1, 1, 1, 1]


def test_the_file_is_plain_parquet_with_checksums_and_the_run_in_its_footer(store: Store) -> None:
    rows = rows_of([5, 4100])
    record = write(store, rows)

    file = pq.ParquetFile(pa.BufferReader(store.get(record.key)), page_checksum_verification=True)

    assert file.schema_arrow.equals(shard_schema(SITE_NAMES))
    stored = {key.decode(): value.decode() for key, value in file.metadata.metadata.items()}
    assert stored == metadata("bfloat16", HIDDEN)
    table = file.read()
    assert table["row"].to_pylist() == [0, 1, 1]
    assert table["prompt_id"].to_pylist() == ["prompt-0", "prompt-1", "prompt-1"]
    assert b"".join(table["resid_pre_5"].to_pylist()[1:]) == np.asarray(rows[1].states["resid_pre_5"]).tobytes()
    assert [m for part in table["loss_mask"].to_pylist()[1:] for m in part] == rows[1].prompt.loss_mask.tolist()


def test_a_changed_byte_in_a_page_is_found_by_any_parquet_reader(store: Store) -> None:
    record = write(store, rows_of([50]))
    data = bytearray(store.get(record.key))
    data[record.entries[0].extents["resid_pre_2"].offset + 11] ^= 1

    file = pq.ParquetFile(pa.BufferReader(bytes(data)), page_checksum_verification=True)

    with pytest.raises(OSError, match="CRC"):
        file.read()


def test_only_the_columns_that_queries_filter_by_have_statistics(store: Store) -> None:
    record = write(store, rows_of([50]))

    group = pq.read_metadata(pa.BufferReader(store.get(record.key))).row_group(0)

    with_statistics = {group.column(c).path_in_schema for c in range(group.num_columns) if group.column(c).is_stats_set}
    assert with_statistics == {"prompt_id", "row", "seq_len"}


def test_states_may_come_as_memoryviews_of_shared_memory_and_are_let_go_of(store: Store) -> None:
    row = rows_of([70])[0]
    maps: dict[str, mmap.mmap] = {}
    for site, state in row.states.items():
        maps[site] = mmap.mmap(-1, state.nbytes)
        maps[site].write(np.asarray(state).tobytes())
    views = {site: memoryview(shared).toreadonly() for site, shared in maps.items()}

    record = write(store, [ShardRow(row.prompt, views)])

    assert_extents_hold_the_row(store.get(record.key), record, [row])
    for site, shared in maps.items():
        views[site].release()
        # Raises BufferError while anything still points into the mapping.
        shared.close()


def test_large_states_are_let_go_of_after_success_and_after_a_failure(tmp_path: Path) -> None:
    """Otherwise a slot of the arena could be used again while an upload still reads it."""
    hidden_size, tokens = 4096, 1000
    size = tokens * hidden_size * 2
    for fails in (False, True):
        for url in (str(tmp_path), "memory://test-shard-let-go"):
            full = StoreUnusable("full")
            shared = {site: mmap.mmap(-1, size) for site in SITE_NAMES}
            rows = [
                ShardRow(make_prompt(row, tokens), {site: memoryview(m) for site, m in shared.items()})
                for row in range(2)
            ]
            store = failing_store(url, {2: full} if fails else {})
            with contextlib.suppress(StoreUnusable):
                write(store, rows, hidden_size=hidden_size)
            full.__traceback__ = None
            assert (list(store.list()) == []) == fails
            store.delete([info.key for info in store.list()])
            for row in rows:
                for view in row.states.values():
                    view.release()  # type: ignore[union-attr]
            for m in shared.values():
                # Raises BufferError while anything still points into the mapping.
                m.close()


def test_the_file_is_what_the_stock_writer_makes_of_the_same_rows(store: Store) -> None:
    rows = rows_of([5, 4100, 1])
    record = write(store, rows)
    by_row = {row.prompt.row: row for row in rows}
    table = []
    for entry in record.entries:
        row, part = by_row[entry.row], slice(entry.token_start, entry.token_start + entry.num_tokens)
        fixed = {name: getattr(entry, name) for name in shard_schema([]).names if hasattr(entry, name)}
        tokens = {"input_ids": row.prompt.input_ids[part], "loss_mask": row.prompt.loss_mask[part]}
        table.append(
            fixed | tokens | {site: memoryview(np.asarray(x)[part].tobytes()) for site, x in row.states.items()}
        )

    schema, data = shard_schema(SITE_NAMES), store.get(record.key)
    reference = reference_bytes(schema, table, [*STATISTICS_COLUMNS], metadata("bfloat16", HIDDEN))

    footer = len(data) - 8 - int.from_bytes(data[-8:-4], "little")
    assert data[:footer] == reference[:footer]
    ours, theirs = (pq.ParquetFile(pa.BufferReader(x), page_checksum_verification=True) for x in (data, reference))
    assert ours.schema.equals(theirs.schema)
    assert ours.schema_arrow.equals(theirs.schema_arrow, check_metadata=True)
    assert ours.read().equals(theirs.read())


def test_extents_agree_with_the_footer(store: Store) -> None:
    record = write(store, rows_of([3, 9000, 17]))

    footer = pq.read_metadata(pa.BufferReader(store.get(record.key)))
    for entry in record.entries:
        nbytes = dict.fromkeys(SITE_NAMES, entry.num_tokens * HIDDEN * 2)
        places = column_extents(footer, entry.row_group, entry.num_tokens, nbytes)
        assert {name: (x.offset, x.nbytes) for name, x in entry.extents.items()} == places


def test_shards_may_be_written_side_by_side(tmp_path: Path) -> None:
    hidden_size, store = 1024, open_store(str(tmp_path))
    rows = [rows_of([500, 3, 1700], hidden_size=hidden_size), rows_of([2000, 900], hidden_size=hidden_size)] * 4

    with ThreadPoolExecutor(4) as pool:
        records = list(
            pool.map(lambda i: write(store, rows[i], hidden_size=hidden_size, key=f"data/{i}.parquet"), range(8))
        )

    for record, written in zip(records, rows, strict=True):
        data = store.get(record.key)
        assert record.tree_xxh3 == tree_xxh3(data, record)
        assert_extents_hold_the_row(data, record, written)


def _with(row: ShardRow, **fields: Any) -> ShardRow:
    return ShardRow(replace(row.prompt, **fields), row.states)


def _with_state(row: ShardRow, **states: Any) -> ShardRow:
    return ShardRow(row.prompt, {**row.states, **states})


def _empty(row: ShardRow) -> ShardRow:
    prompt = replace(row.prompt, input_ids=np.empty(0, np.int32), loss_mask=np.empty(0, np.uint8))
    return ShardRow(prompt, {site: state[:0] for site, state in row.states.items()})


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        pytest.param(lambda row: _empty(row), "has no tokens", id="no-tokens"),
        pytest.param(
            lambda row: _with(row, input_ids=row.prompt.input_ids.astype(np.int64)),
            "input_ids are int64",
            id="ids-int64",
        ),
        pytest.param(
            lambda row: _with(row, input_ids=row.prompt.input_ids[None]), "input_ids are int32, not", id="ids-2d"
        ),
        pytest.param(
            lambda row: _with(row, loss_mask=row.prompt.loss_mask[:-1]), "loss_mask is uint8", id="mask-short"
        ),
        pytest.param(
            lambda row: _with(row, loss_mask=row.prompt.loss_mask.astype(bool)), "loss_mask is bool", id="mask-bool"
        ),
        pytest.param(
            lambda row: ShardRow(row.prompt, {s: v for s, v in row.states.items() if s != "resid_pre_5"}),
            "states of",
            id="site-missing",
        ),
        pytest.param(lambda row: _with_state(row, resid_pre_9=row.states["resid_pre_2"]), "states of", id="site-extra"),
        pytest.param(
            lambda row: _with_state(row, resid_pre_2=np.asarray(row.states["resid_pre_2"])[:-1]),
            "not 20 tokens of 32 bytes",
            id="state-short",
        ),
        pytest.param(
            lambda row: _with_state(row, resid_pre_2=np.asarray(row.states["resid_pre_2"]).astype(np.float32)),
            "not 20 tokens of 32 bytes",
            id="state-of-another-dtype",
        ),
        pytest.param(
            lambda row: _with_state(row, resid_pre_2=np.asfortranarray(row.states["resid_pre_2"])),
            "not C-contiguous",
            id="array-transposed",
        ),
        pytest.param(
            lambda row: _with_state(row, resid_pre_2=memoryview(bytes(20 * 32 * 2))[::2]),
            "not C-contiguous",
            id="view-strided",
        ),
    ],
)
def test_rows_that_do_not_fit_are_refused_before_anything_is_uploaded(
    store: Store, spoil: Callable[[ShardRow], ShardRow], message: str
) -> None:
    good, bad = rows_of([20, 20])

    with pytest.raises(ValueError, match=message):
        write(store, [good, spoil(bad)])

    assert list(store.list()) == []


def test_a_row_given_twice_is_refused(store: Store) -> None:
    row = rows_of([20])[0]

    with pytest.raises(ValueError, match="given twice"):
        write(store, [row, row])


def test_a_shard_of_no_rows_is_refused(store: Store) -> None:
    with pytest.raises(ValueError, match="at least one row"):
        write(store, [])


class FailingStore(Store):
    """Fails the uploads whose numbers (of requests, from 0) are in `failing`."""

    failing: dict[int, Exception]
    requests = 0

    def attempt(self, operation: str, key: str, request: Callable[[], Any]) -> Any:
        if operation in ("upload", "put"):
            self.requests += 1
            if self.requests - 1 in self.failing:
                raise self.failing[self.requests - 1]
        return super().attempt(operation, key, request)


def failing_store(url: str, failing: dict[int, Exception], retry_seconds: float = 60.0) -> FailingStore:
    now = [0.0]
    plain = open_store(url)

    def sleep(seconds: float) -> None:
        now[0] += seconds

    store = FailingStore(plain.url, plain.backend, retry_seconds=retry_seconds, clock=lambda: now[0], sleep=sleep)
    store.failing = failing
    return store


@pytest.mark.parametrize("request_number", [1, 2, 3])
def test_nothing_is_visible_when_the_store_refuses_in_the_middle(tmp_path: Any, request_number: int) -> None:
    hidden_size = 4096
    rows = rows_of([1000, 1000], hidden_size=hidden_size)
    store = failing_store(str(tmp_path), {request_number: StoreUnusable("full")})

    with pytest.raises(StoreUnusable, match="full"):
        write(store, rows, hidden_size=hidden_size)
    gc.collect()

    assert list(store.list()) == []
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == []


def test_a_broken_upload_is_begun_again_and_gives_the_same_object(tmp_path: Any) -> None:
    hidden_size = 4096
    rows = rows_of([1000, 1000], hidden_size=hidden_size)
    store = failing_store(str(tmp_path), {2: StoreUnavailable("broken pipe"), 6: StoreUnavailable("broken pipe")})

    record = write(store, rows, hidden_size=hidden_size)

    data = store.get(record.key)
    assert store.requests > 7
    assert record.tree_xxh3 == tree_xxh3(data, record)
    assert_extents_hold_the_row(data, record, rows)


def test_a_store_that_stays_away_ends_the_upload_with_nothing_visible(tmp_path: Any) -> None:
    store = failing_store(str(tmp_path), {n: StoreUnavailable("503") for n in range(1000)}, retry_seconds=5.0)

    with pytest.raises(StoreUnavailable, match="given up"):
        write(store, rows_of([20]))

    assert list(store.list()) == []


class _Swallow:
    """An upload that keeps nothing, so that only the writer's own memory counts."""

    def __init__(self) -> None:
        self.nbytes = 0

    def __enter__(self) -> "_Swallow":
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def write(self, data: Any) -> int:
        return self.writelines([data])

    def writelines(self, buffers: Any) -> int:
        nbytes = sum(len(data) for data in buffers)
        self.nbytes += nbytes
        return nbytes

    def complete(self) -> None:
        pass


class _SwallowingStore(Store):
    def upload(self, key: str) -> Any:
        return _Swallow()


class _Breaking(_Swallow):
    """Breaks at one write, and tells what is written to it after that."""

    def __init__(self, breaks_at: int) -> None:
        super().__init__()
        self.left = breaks_at
        self.late_writes = 0

    def writelines(self, buffers: Any) -> int:
        self.left -= 1
        if self.left == -1:
            raise StoreUnusable("broken")
        if self.left < -1:
            self.late_writes += 1
        return super().writelines(buffers)


class _BreakingStore(Store):
    breaking: _Breaking

    def upload(self, key: str) -> Any:
        return self.breaking


@pytest.mark.filterwarnings("error::pytest.PytestUnraisableExceptionWarning")
def test_after_a_failure_at_any_write_nothing_more_is_written_and_nothing_complains() -> None:
    plain = open_store("memory://test-shard-breaking")
    store = _BreakingStore(plain.url, plain.backend)
    broken: list[_Breaking] = []
    while True:
        store.breaking = _Breaking(breaks_at=len(broken))
        try:
            write(store, rows_of([5, 6]))
        except StoreUnusable:
            broken.append(store.breaking)
        else:
            break
    gc.collect()

    # Two row groups and the footer.
    assert len(broken) == 3
    assert [upload.late_writes for upload in broken] == [0] * len(broken)


def _peak_of_writing(store: Store, row: ShardRow, count: int, hidden_size: int) -> tuple[int, ShardRecord]:
    """Python's memory at its highest, in bytes. Payloads are not its own: numpy's and mmap's are given."""
    rows = [ShardRow(replace(row.prompt, row=number, prompt_id=f"p{number}"), row.states) for number in range(count)]
    tracemalloc.start()
    try:
        record = write(store, rows, hidden_size=hidden_size)
        return tracemalloc.get_traced_memory()[1], record
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("tokens", [2048, 60_000])
def test_writing_takes_no_memory_for_states_however_long_the_prompt(tmp_path: Path, tokens: int) -> None:
    hidden_size = 1024
    payload = np.ones((tokens, hidden_size), DTYPES["bfloat16"])
    row = ShardRow(make_prompt(0, tokens), dict.fromkeys(SITE_NAMES, payload))
    pool = pa.default_memory_pool()
    pool_before = pool.bytes_allocated()

    peak, record = _peak_of_writing(open_store(str(tmp_path)), row, 60_000 // tokens, hidden_size)

    assert record.nbytes > 60_000 // tokens * len(SITE_NAMES) * payload.nbytes > 340 * MB
    # What may still become one plain put is held; then token columns, page headers and index entries.
    assert peak < PART_BYTES + 3 * MB
    assert pool.bytes_allocated() == pool_before


def test_wide_states_are_cut_into_segments_below_the_row_group_limit() -> None:
    hidden_size = 40_000
    limit = segment_tokens(len(SITE_NAMES), hidden_size, "float32")
    state = np.zeros((limit + 1, hidden_size), np.float32)
    plain = open_store("memory://test-shard-wide")
    row = ShardRow(make_prompt(0, limit + 1), dict.fromkeys(SITE_NAMES, state))

    record = write(_SwallowingStore(plain.url, plain.backend), [row], "float32", hidden_size)

    assert [e.num_tokens for e in record.entries] == [limit, 1]
    assert len(SITE_NAMES) * hidden_size * 4 * limit <= 240_000_000


def _parquet(table: pa.Table, **options: Any) -> pq.FileMetaData:
    sink = pa.BufferOutputStream()
    settings = {"compression": "none", "use_dictionary": False, "write_statistics": False, "store_schema": False}
    pq.write_table(table, sink, **(settings | options))
    return pq.read_metadata(pa.BufferReader(sink.getvalue()))


def _one_row_table(num_tokens: int, payload: bytes, rows: int = 1) -> pa.Table:
    schema = pa.schema([shard_schema(["resid_pre_1"]).field(n) for n in ("input_ids", "loss_mask", "resid_pre_1")])
    return pa.table(
        {
            "input_ids": [[1] * num_tokens] * rows,
            "loss_mask": [[1] * num_tokens] * rows,
            "resid_pre_1": [payload] * rows,
        },
        schema=schema,
    )


def test_the_layout_that_extents_rely_on_is_accepted() -> None:
    footer = _parquet(_one_row_table(4, bytes(range(64))))

    assert column_extents(footer, 0, 4, {"resid_pre_1": 64})["resid_pre_1"][1] == 64


@pytest.mark.parametrize(
    ("table", "options", "num_tokens", "nbytes"),
    [
        pytest.param(_one_row_table(4, bytes(64)), {"compression": "zstd"}, 4, 64, id="compressed"),
        pytest.param(_one_row_table(4, bytes(64)), {"use_dictionary": True}, 4, 64, id="dictionary"),
        pytest.param(_one_row_table(4, bytes(64), rows=2), {}, 4, 64, id="two-rows-in-a-group"),
        pytest.param(_one_row_table(4, bytes(64)), {}, 4, 32, id="another-payload-size"),
        pytest.param(_one_row_table(5, bytes(64)), {}, 4, 64, id="another-token-count"),
    ],
)
def test_any_other_layout_is_refused(table: pa.Table, options: dict[str, Any], num_tokens: int, nbytes: int) -> None:
    footer = _parquet(table, **options)

    with pytest.raises(ValueError, match="row group 0"):
        column_extents(footer, 0, num_tokens, {"resid_pre_1": nbytes})


def test_a_missing_column_is_named() -> None:
    footer = _parquet(_one_row_table(4, bytes(64)))

    with pytest.raises(ValueError, match="no column resid_pre_2"):
        column_extents(footer, 0, 4, {"resid_pre_2": 64})


def test_entries_name_the_prompt_they_belong_to(store: Store) -> None:
    prompt: Prompt = make_prompt(41, 6)

    record = write(store, [ShardRow(prompt, make_states(41, 6, HIDDEN, "bfloat16"))])

    entry = record.entries[0]
    assert (entry.row, entry.prompt_id, entry.seq_len) == (41, "prompt-41", 6)
    assert ITEMSIZE["bfloat16"] * HIDDEN * 6 == entry.extents["resid_pre_2"].nbytes
