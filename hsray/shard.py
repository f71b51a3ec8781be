"""Prompts and their states -> one Parquet object, uploaded whole.

Promises: nothing is visible under the key before the last byte was accepted; states go to the store from
where they are, without a copy, so memory does not grow with them; each of their bytes is read twice, once for
the page CRC and once for the payload's digest, with the GIL released; the returned record says where every
payload lies. Knows nothing of leases, replicas or the spool: a state is a buffer.
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
from hsray.records import Extent, IndexEntry, IntArray, MaskArray, Prompt, ShardRecord
from hsray.schema import ITEMSIZE, TOKEN_COLUMNS, segment_tokens, shard_schema
from hsray.store import Store

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
) -> ShardRecord:
    """Write `rows`, in the given order, as the object `key`: one row group per segment.

    Args:
        sites: site names, in column order; every row has a state for each and for nothing else.
        dtype: `bfloat16`, `float16` or `float32`.
        metadata: key-value metadata of the footer (`schema.shard_metadata`).

    Raises:
        ValueError: no rows, a row twice, or states or tokens that do not fit. A bug of the caller.
        StoreUnavailable: the store did not take it for `retry_seconds`. Nothing is visible under `key`.
        StoreUnusable: the store refuses. Nothing is visible under `key`.
    """
    token_bytes = hidden_size * ITEMSIZE[dtype]
    views = _checked_states(rows, sites, token_bytes)
    segments = _segments(rows, views, segment_tokens(len(sites), hidden_size, dtype), token_bytes)

    crash_point("before_shard_upload")

    def attempt() -> ShardRecord:
        pages = PageWriter(shard_schema(sites), STATISTICS_COLUMNS)
        digest = ObjectDigest()
        entries = []
        with store.upload(key) as upload:
            for segment in segments:
                group = pages.row_group(_values(segment))
                pieces: list[Buffer] = []
                digests = {}
                for head, (site, payload) in zip(group.heads, segment.payloads.items(), strict=True):
                    digests[site] = payload_digest(payload)
                    digest.update(head)
                    digest.update_payload(digests[site])
                    pieces += (head, payload)
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
    footer: pq.FileMetaData, row_group: int, num_tokens: int, nbytes: Mapping[str, int]
) -> dict[str, tuple[int, int]]:
    """Where the payloads of a row group lie, by its footer: column -> (offset, nbytes).

    A site is one required value in one uncompressed PLAIN page, so its payload is the end of the page. The
    values of `input_ids` and `loss_mask` are the last `4 * num_tokens` bytes of theirs (Parquet stores uint8
    as int32).

    Args:
        num_tokens: tokens of the segment.
        nbytes: payload bytes of each site. A wrong size is noticed if it is off by more than a page header.

    Raises:
        ValueError: the row group is laid out in another way, or its sizes are others.
    """
    group = footer.row_group(row_group)
    chunks = {chunk.path_in_schema.split(".")[0]: chunk for chunk in map(group.column, range(group.num_columns))}
    extents: dict[str, tuple[int, int]] = {}
    for column, size in [*((name, 4 * num_tokens) for name in TOKEN_COLUMNS), *nbytes.items()]:
        chunk = chunks.get(column)
        if chunk is None:
            raise ValueError(f"row group {row_group} has no column {column}")
        is_list = column in TOKEN_COLUMNS
        around = chunk.total_compressed_size - size
        least, most = (2 * 4, _MAX_LIST_LEVEL_BYTES) if is_list else (4, 4)
        if (
            group.num_rows != 1
            or chunk.num_values != (num_tokens if is_list else 1)
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
    """What one row group holds. `entry` has no extents yet."""

    entry: IndexEntry
    input_ids: IntArray
    loss_mask: MaskArray
    payloads: Mapping[str, memoryview]


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


def _segments(
    rows: Sequence[ShardRow], views: Sequence[Mapping[str, memoryview]], limit: int, token_bytes: int
) -> list[_Segment]:
    segments: list[_Segment] = []
    for row, states in zip(rows, views, strict=True):
        prompt = row.prompt
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
            payloads = {site: view[start * token_bytes : stop * token_bytes] for site, view in states.items()}
            segments.append(_Segment(entry, prompt.input_ids[start:stop], prompt.loss_mask[start:stop], payloads))
    return segments


def _as_bytes(state: memoryview | np.ndarray[Any, Any], name: str) -> memoryview:
    contiguous = state.flags.c_contiguous if isinstance(state, np.ndarray) else state.c_contiguous
    if not contiguous:
        raise ValueError(f"{name}: the state is not C-contiguous")
    if isinstance(state, np.ndarray):
        # The buffer protocol has no bfloat16; a view as bytes works for every dtype.
        return state.reshape(-1).view(np.uint8).data
    return state.cast("B")


def _values(segment: _Segment) -> Values:
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
        **segment.payloads,
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
