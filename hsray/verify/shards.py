"""Do the shards hold what the records say? Sizes, footers, tokens; every byte if asked."""

import itertools
import logging
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq

from hsray.errors import HsrayError, StoreError
from hsray.plan import Plan, read_lease_prompts
from hsray.ranges import ObjectFile, Range, RangeReader
from hsray.records import IndexEntry, JsonDict, Lease, Prompt, Resolution, ShardRecord
from hsray.schema import (
    DATA_PREFIX,
    FORMAT_VERSION,
    ITEMSIZE,
    LEASES_PREFIX,
    TOKEN_COLUMNS,
    segment_tokens,
    shard_schema,
)
from hsray.shard import ObjectDigest, column_extents, hex_digest, payload_digest
from hsray.store import Store
from hsray.verify.report import Report

log = logging.getLogger(__name__)

# Root leases that are checked side by side: enough to hide the latency of small reads.
_THREADS = 8
# Row groups are read together up to this size when every byte is read.
_REGION_BYTES = 32 << 20
# Values are looked at in pieces: of each, numpy makes two arrays.
_PIECE_BYTES = 8 << 20
_SCALAR_COLUMNS = ("prompt_id", "row", "segment", "num_segments", "token_start", "num_tokens", "seq_len")
# Unsigned view of a value, and the bits of its exponent: all set means NaN or infinity.
_EXPONENTS: dict[str, tuple[str, int]] = {
    "bfloat16": ("<u2", 0x7F80),
    "float16": ("<u2", 0x7C00),
    "float32": ("<u4", 0x7F800000),
}


class ShardAudit:
    """Checks the shards that `standing` resolutions name against them and against the plan.

    Args:
        standing: for each root lease, the resolutions that count.
        full: read every byte: hashes, and that values are finite.
    """

    def __init__(
        self,
        store: Store,
        ranges: RangeReader,
        record: JsonDict,
        plan: Plan,
        standing: Mapping[str, list[Resolution]],
        report: Report,
        *,
        full: bool,
    ) -> None:
        self.store = store
        self.ranges = ranges
        self.record = record
        self.plan = plan
        self.standing = standing
        self.report = report
        self.full = full
        self.sites = [site["name"] for site in record["sites"]]
        self.dtype: str = record["dtype"]
        self.hidden_size: int = record["model"]["hidden_size"]
        self.token_bytes = self.hidden_size * ITEMSIZE[self.dtype]
        self.segment_tokens = segment_tokens(len(self.sites), self.hidden_size, self.dtype)
        self.objects: dict[str, int] = {}

    def run(self) -> None:
        self.objects = {info.key: info.nbytes for info in self.store.list(DATA_PREFIX)}
        named = [s for resolutions in self.standing.values() for r in resolutions for s in r.shards]
        unreferenced = self.objects.keys() - {shard.key for shard in named}
        self.report.counts |= {
            "shards": len(named),
            "bytes": sum(shard.nbytes for shard in named),
            "unreferenced_objects": len(unreferenced),
            "unreferenced_bytes": sum(self.objects[key] for key in unreferenced),
        }
        with ThreadPoolExecutor(_THREADS) as pool:
            roots = [root for root in self.plan.leases if root.lease_id in self.standing]
            for done, _ in enumerate(pool.map(self._check_root, roots), start=1):
                if done % 100 == 0:
                    log.info("%d of %d root leases checked", done, len(roots))

    def _check_root(self, root: Lease) -> None:
        ref = self.plan.refs[root.lease_id]
        try:
            prompts = {prompt.row: prompt for prompt in read_lease_prompts(self.store, ref, root.rows)}
        except (HsrayError, pa.ArrowException, OSError) as err:
            if isinstance(err, StoreError):
                raise
            self.report.add("plan", f"row group {ref.row_group} cannot be read: {err}", key=ref.object)
            return
        for row, expected in zip(root.rows, root.num_tokens, strict=True):
            if prompts[row].num_tokens != expected:
                self.report.add("plan", f"{prompts[row].num_tokens} tokens, its lease says {expected}", row=row)
        for resolution in self.standing[root.lease_id]:
            for dead in resolution.dead:
                if dead.row in prompts and dead.prompt_id != prompts[dead.row].prompt_id:
                    key = f"{LEASES_PREFIX}{resolution.lease_id}.json"
                    name = prompts[dead.row].prompt_id
                    self.report.add("contents", f"dead as {dead.prompt_id!r}", key=key, row=dead.row, prompt_id=name)
            for shard in resolution.shards:
                self._check_shard(shard, prompts)

    def _check_shard(self, shard: ShardRecord, prompts: Mapping[int, Prompt]) -> None:
        self.report.count("shards")
        held = f"it holds rows {', '.join(map(str, shard.rows[:8]))}{', ...' if len(shard.rows) > 8 else ''}"
        if shard.key not in self.objects:
            self.report.add("shards", f"is missing; {held}", key=shard.key)
            return
        if self.objects[shard.key] != shard.nbytes:
            size = self.objects[shard.key]
            self.report.add("shards", f"has {size} bytes, not the {shard.nbytes} recorded; {held}", key=shard.key)
            return
        for row in shard.rows:
            self._check_segments(shard, row, prompts)
        self._check_file(shard, prompts)
        if self.full:
            self._check_bytes(shard)

    def _check_segments(self, shard: ShardRecord, row: int, prompts: Mapping[int, Prompt]) -> None:
        """The recorded segments of a row are those that its prompt has."""
        recorded = [
            (e.segment, e.num_segments, e.token_start, e.num_tokens, e.seq_len, e.prompt_id)
            for e in shard.entries
            if e.row == row
        ]
        prompt = prompts.get(row)
        if prompt is None:
            return  # not a row of this lease, which the accounting has reported
        length = prompt.num_tokens
        starts = range(0, length, self.segment_tokens)
        expected = [
            (i, len(starts), start, min(self.segment_tokens, length - start), length, prompt.prompt_id)
            for i, start in enumerate(starts)
        ]
        if sorted(recorded) != expected:
            message = f"recorded as (segment, of, start, tokens, length, id) {recorded}, planned as {expected}"
            self.report.add("contents", message, key=shard.key, row=row, prompt_id=prompt.prompt_id)

    def _check_file(self, shard: ShardRecord, prompts: Mapping[int, Prompt]) -> None:
        """Footer and token columns of a shard agree with its record and with the plan."""
        try:
            source = ObjectFile(self.store, shard.key, shard.nbytes)
            file = pq.ParquetFile(pa.PythonFile(source, mode="r"), page_checksum_verification=True, pre_buffer=True)
            self._check_footer(shard, file)
            table = file.read(columns=[*_SCALAR_COLUMNS, *TOKEN_COLUMNS], use_threads=False).combine_chunks()
        except (pa.ArrowException, OSError, KeyError) as err:
            self.report.add("layout", f"cannot be read as Parquet: {err}", key=shard.key)
            return
        if table.num_rows != len(shard.entries):
            self.report.add("contents", f"{table.num_rows} rows, not the {len(shard.entries)} recorded", key=shard.key)
            return
        fixed = {name: table[name].to_pylist() for name in _SCALAR_COLUMNS}
        tokens = {name: _lists(table[name]) for name in TOKEN_COLUMNS}
        for entry in shard.entries:
            self.report.count("contents")
            at = entry.row_group
            for name in _SCALAR_COLUMNS:
                if fixed[name][at] != getattr(entry, name):
                    message = f"{name} is {fixed[name][at]!r}, recorded as {getattr(entry, name)!r}"
                    self._content_problem(shard, entry, message)
            if entry.row in prompts:
                planned = prompts[entry.row]
                stop = entry.token_start + entry.num_tokens
                for name, values in (("input_ids", planned.input_ids), ("loss_mask", planned.loss_mask)):
                    if not np.array_equal(tokens[name][at], values[entry.token_start : stop]):
                        self._content_problem(shard, entry, f"{name} are not those of the plan")

    def _content_problem(self, shard: ShardRecord, entry: IndexEntry, message: str) -> None:
        self.report.add("contents", message, key=shard.key, row=entry.row, prompt_id=entry.prompt_id)

    def _check_footer(self, shard: ShardRecord, file: pq.ParquetFile) -> None:
        self.report.count("layout")
        footer = file.metadata
        if not file.schema_arrow.equals(shard_schema(self.sites)):
            self.report.add("layout", f"columns are {file.schema_arrow.names}", key=shard.key)
            return
        stored = {key.decode(): value.decode() for key, value in (footer.metadata or {}).items()}
        expected = {
            "hsray.format_version": str(FORMAT_VERSION),
            "hsray.dtype": self.dtype,
            "hsray.hidden_size": str(self.hidden_size),
            "hsray.codec": self.record["codec"],
            "hsray.run_id": self.record["run_id"],
        }
        for name, value in expected.items():
            if stored.get(name) != value:
                self.report.add("layout", f"{name} is {stored.get(name)!r}, the run's is {value!r}", key=shard.key)
        for entry in shard.entries:
            recorded = {column: (extent.offset, extent.nbytes) for column, extent in entry.extents.items()}
            try:
                extents = self._extents(footer, entry)
            except (ValueError, IndexError) as err:
                self.report.add("layout", str(err), key=shard.key, row=entry.row, prompt_id=entry.prompt_id)
                continue
            if extents != recorded:
                self.report.add(
                    "layout",
                    f"payloads lie at {extents}, recorded as {recorded}",
                    key=shard.key,
                    row=entry.row,
                    prompt_id=entry.prompt_id,
                )

    def _extents(self, footer: pq.FileMetaData, entry: IndexEntry) -> dict[str, tuple[int, int]]:
        nbytes = dict.fromkeys(self.sites, entry.num_tokens * self.token_bytes)
        return column_extents(footer, entry.row_group, entry.num_tokens, nbytes)

    def _check_bytes(self, shard: ShardRecord) -> None:
        """Every byte of a shard, in order: its hash, those of its payloads, and that values are finite."""
        whole = ObjectDigest()
        for start, stop, entries in _regions(shard):
            data = self.ranges.read([[Range(shard.key, start, stop - start)]])[0]
            done = 0
            payloads = [(entry.extents[site], entry, site) for entry in entries for site in self.sites]
            for extent, entry, site in sorted(payloads, key=lambda payload: payload[0].offset):
                first = extent.offset - start
                payload = data[first : first + extent.nbytes]
                whole.update(data[done:first].data)
                whole.update_payload(self._check_payload(shard, entry, site, payload))
                done = first + extent.nbytes
            whole.update(data[done:].data)
        self.report.count("hashes")
        if whole.hexdigest() != shard.tree_xxh3:
            self.report.add("hashes", "the object does not hash to what was recorded", key=shard.key)

    def _check_payload(self, shard: ShardRecord, entry: IndexEntry, site: str, payload: npt.NDArray[np.uint8]) -> int:
        """Returns the digest of what is there."""
        self.report.count("hashes")
        digest = payload_digest(payload.data)
        if hex_digest(digest) != entry.extents[site].xxh3:
            message = f"{site} of segment {entry.segment} does not hash to what was recorded"
            self.report.add("hashes", message, key=shard.key, row=entry.row, prompt_id=entry.prompt_id)
        self.report.count("values", payload.nbytes // ITEMSIZE[self.dtype])
        unsigned, exponent = _EXPONENTS[self.dtype]
        bad = first = 0
        for start in range(0, payload.nbytes, _PIECE_BYTES):
            values = np.frombuffer(payload[start : start + _PIECE_BYTES].data, unsigned)
            flagged = np.flatnonzero((values & exponent) == exponent)
            if len(flagged) and not bad:
                first = (start + int(flagged[0]) * ITEMSIZE[self.dtype]) // self.token_bytes
            bad += len(flagged)
        if bad:
            message = f"{bad} values of {site} are NaN or infinite, the first at token {entry.token_start + first}"
            self.report.add("values", message, key=shard.key, row=entry.row, prompt_id=entry.prompt_id)
        return digest


def _regions(shard: ShardRecord) -> Iterator[tuple[int, int, list[IndexEntry]]]:
    """The whole object as consecutive (start, stop, entries that lie in it), each about as large as one read."""
    start = 0
    inside: list[IndexEntry] = []
    for entry in sorted(shard.entries, key=lambda e: e.row_group):
        first = min(extent.offset for extent in entry.extents.values())
        stop = max(extent.offset + extent.nbytes for extent in entry.extents.values())
        if not start <= first < stop <= shard.nbytes:
            continue  # an extent that cannot be; the footer check has reported it
        if inside and stop - start > _REGION_BYTES:
            yield start, first, inside
            start, inside = first, []
        inside.append(entry)
    yield start, shard.nbytes, inside


def _lists(column: pa.ChunkedArray) -> list[npt.NDArray[Any]]:
    lists = column.combine_chunks()
    offsets, values = lists.offsets.to_numpy(), lists.values.to_numpy()
    return [values[a:b] for a, b in itertools.pairwise(offsets)]
