"""Prompts and their states -> one Parquet object, uploaded whole.

Promises: nothing is visible under the key before the last byte was accepted; plain states go to the store from
where they are, without a copy, so memory does not grow with them (encoded ones are made a little ahead, by threads);
each of their bytes is read from memory once, for the page CRC and the payload's digest, with the GIL released; the
returned record says where every payload lies. Knows nothing of leases, replicas or the spool: a state is a buffer.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import xxhash
from typing_extensions import Buffer

from hsray import __version__
from hsray.crash_points import crash_point
from hsray.pages import PageWriter, Values
from hsray.payloads import State, payloads_ahead
from hsray.records import Extent, IndexEntry, IntArray, MaskArray, Prompt, ShardRecord
from hsray.schema import ITEMSIZE, TOKEN_COLUMNS, segment_tokens, shard_schema
from hsray.site_storage import Storage, TokenSelection, positions_column, storage_of, stored_selections
from hsray.store import Store
from hsray.token_selection import select_positions

# A thrift-compact header of one data page without statistics takes at most 35 bytes; two pages need at least 38.
_MAX_PAGE_HEADER_BYTES = 35
# Repetition and definition levels of one list: two length prefixes and two short run-length sequences.
_MAX_LIST_LEVEL_BYTES = 24
# Only these are worth a footer entry: query engines skip row groups by them.
STATISTICS_COLUMNS = ("prompt_id", "row", "seq_len")


@dataclass(frozen=True, slots=True, eq=False)
class ShardRow:
    """One prompt and its states.

    Attributes:
        prompt: the tokens.
        states: for each site, a C-contiguous buffer of `num_tokens * hidden_size * itemsize` bytes:
            little-endian `[num_tokens, hidden_size]`. It is read in place, until `write_shard` returns, and
            must not change meanwhile.
    """

    prompt: Prompt
    states: Mapping[str, memoryview | np.ndarray[Any, Any]]


def write_shard(
    store: Store,
    key: str,
    rows: Sequence[ShardRow],
    *,
    sites: Sequence[str],
    hidden_size: int,
    dtype: str,
    metadata: Mapping[str, str],
    storage: Storage | None = None,
) -> ShardRecord:
    """Write `rows`, in the given order, as the object `key`: one row group per segment.

    Args:
        sites: site names, in column order; every row has a state for each and for nothing else.
        dtype: `bfloat16`, `float16` or `float32`.
        metadata: key-value metadata of the footer (`schema.shard_metadata`).
        storage: codec and tokens of sites; a site that is not in it is stored plainly and whole.

    Raises:
        ValueError: no rows, a row twice, states or tokens that do not fit, a codec for another dtype than bfloat16,
            or NaN for a lossy one. A bug of the caller.
        StoreUnavailable: the store did not take it for `retry_seconds`. Nothing is visible under `key`.
        StoreUnusable: the store refuses. Nothing is visible under `key`.
    """
    token_bytes = hidden_size * ITEMSIZE[dtype]
    views = _checked_states(rows, sites, token_bytes)
    selections = stored_selections(storage)
    if dtype != "bfloat16" and any(storage_of(storage, site).codec != "none" for site in sites):
        raise ValueError(f"codecs are for bfloat16, not for {dtype}")
    limit = segment_tokens(len(sites), hidden_size, dtype)
    segments = _segments(rows, limit, selections)
    states = [
        {
            site: State(
                data=views[segment.number][site][segment.start * token_bytes : segment.stop * token_bytes],
                hidden_size=hidden_size,
                token_bytes=token_bytes,
                codec=storage_of(storage, site).codec,
                rows=segment.stored_rows(storage_of(storage, site).tokens),
            )
            for site in sites
        }
        for segment in segments
    ]

    crash_point("before_shard_upload")

    def attempt() -> ShardRecord:
        pages = PageWriter(shard_schema(sites, selections=selections), STATISTICS_COLUMNS)
        digest = ObjectDigest()
        entries = []
        with store.upload(key) as upload, payloads_ahead(states) as made:
            for segment, payloads in zip(segments, made, strict=True):
                group = pages.row_group(_values(segment, payloads))
                pieces: list[Buffer] = []
                for head, payload_xxh3, payload in zip(group.heads, group.digests, group.payloads, strict=True):
                    digest.update(head)
                    digest.update_payload(payload_xxh3)
                    pieces += (head, payload)
                digests = dict(zip(payloads, group.digests, strict=True))
                upload.writelines(pieces)
                entries.append(_located(segment.entry, group.extents, digests))
            footer = pages.footer(metadata, f"hsray version {__version__}")
            digest.update(footer)
            upload.write(footer)
            crash_point("before_shard_completion")
            upload.complete()
        return ShardRecord(key=key, nbytes=pages.nbytes, tree_xxh3=digest.hexdigest(), entries=tuple(entries))

    # A long upload cannot be resumed, but the states are still here: begin again, with the store's patience.
    return store.retrying("upload", key, attempt)


def payload_digest(payload: memoryview) -> int:
    """xxh3-64 of a C-contiguous buffer."""
    # Not by the one-shot function, which holds the GIL in xxhash 3.
    digest = xxhash.xxh3_64()
    digest.update(payload)
    return digest.intdigest()


def hex_digest(digest: int) -> str:
    """The 16 hex digits in which records spell an xxh3-64."""
    return f"{digest:016x}"


class ObjectDigest:
    """`ShardRecord.tree_xxh3`: xxh3-64 of an object in which each payload is replaced by its own xxh3-64.

    It covers every byte of the object, and reads a payload no second time. Fed in the order of the object.
    """

    def __init__(self) -> None:
        self._digest = xxhash.xxh3_64()

    def update(self, data: Buffer) -> None:
        """Bytes of the object that belong to no payload of a site."""
        self._digest.update(data)

    def update_payload(self, digest: int) -> None:
        """A payload of a site, by its xxh3-64: eight bytes, the most significant first."""
        self._digest.update(digest.to_bytes(8, "big"))

    def hexdigest(self) -> str:
        return hex_digest(self._digest.intdigest())


def column_extents(
    footer: pq.FileMetaData,
    row_group: int,
    num_tokens: int,
    nbytes: Mapping[str, int],
    positions: Mapping[str, int] | None = None,
) -> dict[str, tuple[int, int]]:
    """Where the payloads of a row group lie, by its footer: column -> (offset, nbytes).

    A site is one required value in one uncompressed PLAIN page, so its payload is the end of the page. The
    values of `input_ids` and `loss_mask` are the last `4 * num_tokens` bytes of theirs (Parquet stores uint8
    as int32), those of a column of positions the last 4 for each.

    Args:
        num_tokens: tokens of the segment.
        nbytes: payload bytes of each site. A wrong size is noticed if it is off by more than a page header.
        positions: how many values each column of positions has.

    Raises:
        ValueError: the row group is laid out in another way, or its sizes are others.
    """
    group = footer.row_group(row_group)
    chunks = {chunk.path_in_schema.split(".")[0]: chunk for chunk in map(group.column, range(group.num_columns))}
    extents: dict[str, tuple[int, int]] = {}
    lengths = {**dict.fromkeys(TOKEN_COLUMNS, num_tokens), **(positions or {})}
    for column, size in [*((name, 4 * length) for name, length in lengths.items()), *nbytes.items()]:
        chunk = chunks.get(column)
        if chunk is None:
            raise ValueError(f"row group {row_group} has no column {column}")
        is_list = column in lengths
        around = chunk.total_compressed_size - size
        least, most = (2 * 4, _MAX_LIST_LEVEL_BYTES) if is_list else (4, 4)
        if (
            group.num_rows != 1
            or chunk.num_values != max(1, lengths.get(column, 1))
            or chunk.compression != "UNCOMPRESSED"
            or chunk.has_dictionary_page
            or chunk.total_uncompressed_size != chunk.total_compressed_size
            or not least < around <= most + _MAX_PAGE_HEADER_BYTES
        ):
            raise ValueError(
                f"row group {row_group}, column {column}: not one PLAIN page of {size} bytes ({group.num_rows} rows, "
                f"{chunk.num_values} values, {chunk.compression}, {chunk.total_compressed_size} bytes)"
            )
        extents[column] = (chunk.data_page_offset + around, size)
    return extents


@dataclass(frozen=True, slots=True, eq=False)
class _Segment:
    """What one row group holds beside states. `entry` has no extents yet.

    Attributes:
        number: which of the given rows it is of.
        positions: by selection, the positions in the prompt that lie in this segment.
    """

    number: int
    entry: IndexEntry
    input_ids: IntArray
    loss_mask: MaskArray
    positions: Mapping[TokenSelection, IntArray]

    @property
    def start(self) -> int:
        return self.entry.token_start

    @property
    def stop(self) -> int:
        return self.entry.token_start + self.entry.num_tokens

    def stored_rows(self, selection: TokenSelection) -> IntArray | None:
        """The selected rows of the segment, counted from its own start; None for all."""
        return None if selection == "all" else self.positions[selection] - np.int32(self.start)


def _checked_states(rows: Sequence[ShardRow], sites: Sequence[str], token_bytes: int) -> list[dict[str, memoryview]]:
    """The states of each row as bytes, in column order."""
    if not rows or not sites:
        raise ValueError("a shard needs at least one row and one site")
    seen: set[int] = set()
    checked = []
    for row in rows:
        prompt, length = row.prompt, row.prompt.num_tokens
        name = f"row {prompt.row} ({prompt.prompt_id})"
        if prompt.row in seen:
            raise ValueError(f"{name} is given twice")
        seen.add(prompt.row)
        if length == 0:
            raise ValueError(f"{name} has no tokens")
        if prompt.input_ids.dtype != np.int32 or prompt.input_ids.shape != (length,):
            raise ValueError(f"{name}: input_ids are {prompt.input_ids.dtype}, not int32 [{length}]")
        if prompt.loss_mask.dtype != np.uint8 or prompt.loss_mask.shape != (length,):
            raise ValueError(
                f"{name}: loss_mask is {prompt.loss_mask.dtype} {list(prompt.loss_mask.shape)}, not uint8 [{length}]"
            )
        if set(row.states) != set(sites):
            raise ValueError(f"{name}: states of {sorted(row.states)}, not of {sorted(sites)}")
        views = {site: _as_bytes(row.states[site], f"{name}, {site}") for site in sites}
        for site, view in views.items():
            if view.nbytes != length * token_bytes:
                raise ValueError(f"{name}, {site}: {view.nbytes} bytes, not {length} tokens of {token_bytes} bytes")
        checked.append(views)
    return checked


def _segments(rows: Sequence[ShardRow], limit: int, selections: Sequence[TokenSelection]) -> list[_Segment]:
    segments: list[_Segment] = []
    for index, row in enumerate(rows):
        prompt = row.prompt
        chosen = {selection: select_positions(selection, prompt.loss_mask) for selection in selections}
        starts = range(0, prompt.num_tokens, limit)
        for number, start in enumerate(starts):
            stop = min(start + limit, prompt.num_tokens)
            entry = IndexEntry(
                row=prompt.row,
                prompt_id=prompt.prompt_id,
                segment=number,
                num_segments=len(starts),
                token_start=start,
                num_tokens=stop - start,
                seq_len=prompt.num_tokens,
                row_group=len(segments),
                extents={},
            )
            inside = {name: places[(places >= start) & (places < stop)] for name, places in chosen.items()}
            tokens = slice(start, stop)
            segments.append(_Segment(index, entry, prompt.input_ids[tokens], prompt.loss_mask[tokens], inside))
    return segments


def _as_bytes(state: memoryview | np.ndarray[Any, Any], name: str) -> memoryview:
    contiguous = state.flags.c_contiguous if isinstance(state, np.ndarray) else state.c_contiguous
    if not contiguous:
        raise ValueError(f"{name}: the state is not C-contiguous")
    if isinstance(state, np.ndarray):
        # The buffer protocol has no bfloat16; a view as bytes works for every dtype.
        return state.reshape(-1).view(np.uint8).data
    return state.cast("B")


def _values(segment: _Segment, payloads: Mapping[str, memoryview]) -> Values:
    """One row of the file, by column."""
    entry = segment.entry
    return {
        "prompt_id": entry.prompt_id,
        "row": entry.row,
        "segment": entry.segment,
        "num_segments": entry.num_segments,
        "token_start": entry.token_start,
        "num_tokens": entry.num_tokens,
        "seq_len": entry.seq_len,
        "input_ids": segment.input_ids,
        "loss_mask": segment.loss_mask,
        **{positions_column(name): places for name, places in segment.positions.items()},
        **payloads,
    }


def _located(entry: IndexEntry, extents: Mapping[str, tuple[int, int]], digests: Mapping[str, int]) -> IndexEntry:
    """`entry` with its extents."""
    return replace(
        entry,
        extents={
            column: Extent(offset, nbytes, hex_digest(digests[column]) if column in digests else "")
            for column, (offset, nbytes) in extents.items()
        },
    )
