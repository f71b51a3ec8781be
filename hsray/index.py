"""`index.parquet`: where every segment of every prompt lies, as columns.

The index is derived from the resolutions alone and can be rebuilt at any time; the resolutions are what
counts. Everything here works on whole columns, so that a million segments take seconds.
"""

import copy
from array import array
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq

from hsray.errors import HsrayError
from hsray.ranges import Range
from hsray.records import IndexEntry, Resolution, ShardRecord
from hsray.schema import INDEX_KEY, index_schema, token_columns
from hsray.site_storage import TokenSelection
from hsray.store import Store

# Per column: the type code of `array` while it grows.
_ENTRY_FIELDS = {
    "row": "q",
    "segment": "i",
    "num_segments": "i",
    "token_start": "i",
    "num_tokens": "i",
    "seq_len": "i",
    "row_group": "i",
}


def index_table(
    shards: Iterable[ShardRecord], site_names: Sequence[str], selections: Sequence[TokenSelection] = ()
) -> pa.Table:
    """Table of `schema.index_schema`, sorted by (row, segment), in one chunk.

    The same shards give equal tables, in whatever order they come. They are looked at once, one by one.

    Raises:
        HsrayError: two shards hold the same segment, or an entry lacks the extent of a column.
    """
    keys: list[str] = []
    growing = {name: array(code) for name, code in _ENTRY_FIELDS.items()}
    columns_located = (*token_columns(selections), *site_names)
    growing |= {f"{name}_{part}": array("q") for name in columns_located for part in ("offset", "nbytes")}
    growing |= {f"{name}_xxh3": array("Q") for name in site_names}
    shard_numbers = array("i")
    prompt_ids: list[str] = []
    for number, shard in enumerate(shards):
        keys.append(shard.key)
        for entry in shard.entries:
            shard_numbers.append(number)
            prompt_ids.append(entry.prompt_id)
            for name in _ENTRY_FIELDS:
                growing[name].append(getattr(entry, name))
            _append_extents(growing, entry, columns_located, site_names)
    columns: dict[str, npt.NDArray[Any]] = {
        name: np.frombuffer(values, values.typecode) for name, values in growing.items()
    }
    # The shards' order must not show.
    by_key = sorted(range(len(keys)), key=keys.__getitem__)
    code_of = np.zeros(len(keys), np.int32)
    code_of[by_key] = np.arange(len(keys), dtype=np.int32)
    codes = code_of[np.frombuffer(shard_numbers, np.int32)]
    order = np.lexsort((codes, columns["segment"], columns["row"]))
    columns = {name: values[order] for name, values in columns.items()}
    codes = codes[order]
    again = (np.diff(columns["row"]) == 0) & (np.diff(columns["segment"]) == 0)
    if again.any():
        at = int(np.flatnonzero(again)[0])
        one, other = (keys[by_key[codes[i]]] for i in (at, at + 1))
        raise HsrayError(f"row {columns['row'][at]}, segment {columns['segment'][at]} is in {one} and in {other}")
    arrays = {name: pa.array(values) for name, values in columns.items()}
    arrays["prompt_id"] = pa.array(prompt_ids, pa.string()).take(pa.array(order))
    arrays["shard"] = pa.DictionaryArray.from_arrays(pa.array(codes), pa.array([keys[i] for i in by_key], pa.string()))
    schema = index_schema(site_names, selections)
    return pa.Table.from_arrays([arrays[name] for name in schema.names], schema=schema)


def _append_extents(
    columns: Mapping[str, "array[int]"], entry: IndexEntry, names: Sequence[str], site_names: Sequence[str]
) -> None:
    for name in names:
        extent = entry.extents.get(name)
        if extent is None:
            raise HsrayError(f"row {entry.row} ({entry.prompt_id}): its record has no extent of {name}")
        columns[f"{name}_offset"].append(extent.offset)
        columns[f"{name}_nbytes"].append(extent.nbytes)
        if name in site_names:
            try:
                columns[f"{name}_xxh3"].append(int(extent.xxh3, 16))
            except (ValueError, OverflowError) as err:
                raise HsrayError(f"a record of {name} holds a malformed xxh3: {err}") from err


def write_index(
    store: Store,
    resolutions: Iterable[Resolution],
    site_names: Sequence[str],
    selections: Sequence[TokenSelection] = (),
) -> int:
    """Write `index.parquet` from the shards of `resolutions`, and return its number of rows.

    Pass only records that the lease tree reaches (`ledger.account` names the others). They may be a stream: none is
    kept.
    """
    table = index_table((shard for record in resolutions for shard in record.shards), site_names, selections)
    sink = pa.BufferOutputStream()
    # Offsets compress to a third; hashes do not, and a dictionary of them only costs time.
    pq.write_table(table, sink, compression="zstd", use_dictionary=["shard"], row_group_size=1 << 17)
    store.put(INDEX_KEY, memoryview(sink.getvalue()))
    return int(table.num_rows)


def read_index(store: Store, site_names: Sequence[str], selections: Sequence[TokenSelection] = ()) -> pa.Table:
    """Read `index.parquet`, in one chunk.

    Raises:
        FileNotFoundError: there is none: the run is not finished.
        HsrayError: it is not an index of these sites.
    """
    data = store.get(INDEX_KEY)
    try:
        table = pq.read_table(pa.BufferReader(data))
    except (pa.ArrowException, OSError) as err:
        raise HsrayError(f"{INDEX_KEY} is not readable: {err}") from err
    expected = index_schema(site_names, selections)
    if not table.schema.equals(expected):
        raise HsrayError(f"{INDEX_KEY} does not have the columns of {', '.join(site_names)}: {table.schema.names}")
    return table.unify_dictionaries().combine_chunks()


class Segments:
    """The index as arrays, one element per segment, sorted by (row, segment).

    The segments of the prompt at position p are `first[p]` to `first[p + 1]`.

    Raises:
        HsrayError: the segments of a prompt do not add up to the prompt.
    """

    def __init__(self, table: pa.Table, sites: Sequence[str], selections: Sequence[TokenSelection] = ()) -> None:
        arrays: dict[str, npt.NDArray[Any]] = {
            name: table[name].to_numpy() for name in table.column_names if name not in ("prompt_id", "shard")
        }
        shard = table["shard"].combine_chunks()
        self.shard_keys: list[str] = shard.dictionary.to_pylist()
        self.shard: npt.NDArray[np.int32] = shard.indices.to_numpy()
        self.row = arrays["row"]
        self.num_tokens = arrays["num_tokens"]
        self.token_start = arrays["token_start"]
        self.seq_len = arrays["seq_len"]
        located = (*token_columns(selections), *sites)
        self.offset = {name: arrays[f"{name}_offset"] for name in located}
        self.nbytes = {name: arrays[f"{name}_nbytes"] for name in located}
        self.xxh3 = {site: arrays[f"{site}_xxh3"] for site in sites}
        heads = np.flatnonzero(np.diff(self.row, prepend=-1))
        self.first = np.append(heads, table.num_rows)
        self.prompt_ids: list[str] = table["prompt_id"].combine_chunks().take(pa.array(heads)).to_pylist()
        self._check(arrays["segment"], arrays["num_segments"])

    def _check(self, number: npt.NDArray[Any], num_segments: npt.NDArray[Any]) -> None:
        if not len(number):
            return
        heads, counts = self.first[:-1], np.diff(self.first)
        head = np.repeat(heads, counts)
        tokens_before = np.cumsum(self.num_tokens, dtype=np.int64) - self.num_tokens
        wrong = (
            (number != np.arange(len(number)) - head)
            | (num_segments != np.repeat(counts, counts))
            | (self.token_start != tokens_before - tokens_before[head])
            | (self.seq_len != np.repeat(np.add.reduceat(self.num_tokens, heads), counts))
        )
        if wrong.any():
            row = self.row[np.flatnonzero(wrong)[0]]
            raise HsrayError(f"the index does not hold each segment of row {row} exactly once")

    def part(self, start: int, stop: int) -> "Segments":
        """The segments of positions `start` to `stop`, which count from 0 again in it."""
        begin, end = int(self.first[start]), int(self.first[stop])
        part = copy.copy(self)
        for name, value in vars(self).items():
            if isinstance(value, dict):
                setattr(part, name, {column: array[begin:end] for column, array in value.items()})
            elif isinstance(value, np.ndarray):
                setattr(part, name, value[begin:end])
        part.first = self.first[start : stop + 1] - begin
        part.prompt_ids = self.prompt_ids[start:stop]
        # Of a large run, most shards are elsewhere.
        used, codes = np.unique(self.shard[begin:end], return_inverse=True)
        part.shard = codes.astype(np.int32)
        part.shard_keys = [self.shard_keys[code] for code in used]
        return part

    def of(self, position: int) -> range:
        return range(int(self.first[position]), int(self.first[position + 1]))

    def where(self, segment: int, column: str) -> Range:
        """The payload of a column."""
        key = self.shard_keys[self.shard[segment]]
        return Range(key, int(self.offset[column][segment]), int(self.nbytes[column][segment]))
