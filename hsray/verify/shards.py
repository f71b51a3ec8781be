"""Do the shards hold what the records say? Sizes, footers, tokens; every byte if asked."""

import itertools
import json
import logging
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq

from hsray.codecs import EncodingError, decode_bits, find_codec
from hsray.errors import HsrayError, StoreError
from hsray.plan import Plan, read_lease_prompts
from hsray.ranges import ObjectFile, Range, RangeReader
from hsray.records import Extent, IndexEntry, JsonDict, Lease, Prompt, Reopened, Resolution, ShardRecord
from hsray.schema import (
    DATA_PREFIX,
    FORMAT_VERSION,
    ITEMSIZE,
    LEASES_PREFIX,
    TOKEN_COLUMNS,
    segment_tokens,
    shard_schema,
    token_columns,
)
from hsray.shard import ObjectDigest, column_extents, hex_digest, payload_digest
from hsray.site_storage import positions_column, recorded_storage, stored_selections
from hsray.store import Store
from hsray.token_selection import select_positions
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
        reopened: rows that do not count where these have them: they were damaged, and are stored anew.
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
        reopened: Reopened,
        full: bool,
    ) -> None:
        self.store = store
        self.ranges = ranges
        self.record = record
        self.plan = plan
        self.standing = standing
        self.report = report
        self.reopened = reopened
        self.full = full
        self.sites = [site["name"] for site in record["sites"]]
        self.storage = recorded_storage(record["sites"], store.url)
        self.selections = stored_selections(self.storage)
        self.token_columns = token_columns(self.selections)
        self.dtype: str = record["dtype"]
        self.hidden_size: int = record["model"]["hidden_size"]
        self.token_bytes: int = self.hidden_size * ITEMSIZE[self.dtype]
        self.segment_tokens = segment_tokens(len(self.sites), self.hidden_size, self.dtype)
        self.objects: dict[str, int] = {}

    def run(self) -> None:
        self.objects = {info.key: info.nbytes for info in self.store.list(DATA_PREFIX)}
        counting = [r.without(self.reopened.of(r.lease_id)) for rs in self.standing.values() for r in rs]
        named = [shard for resolution in counting for shard in resolution.shards]
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
            again = self.reopened.of(resolution.lease_id)
            for whole in resolution.shards:
                counting = whole.without(again)
                if counting.entries:
                    self._check_shard(counting, whole, prompts)

    def _check_shard(self, shard: ShardRecord, whole: ShardRecord, prompts: Mapping[int, Prompt]) -> None:
        """`shard` has only the entries that count, `whole` all that were written."""
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
        self._check_file(shard, whole, prompts)
        if self.full:
            self._check_bytes(shard, whole)

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

    def _check_file(self, shard: ShardRecord, whole: ShardRecord, prompts: Mapping[int, Prompt]) -> None:
        """Footer and token columns of a shard agree with its record and with the plan."""
        try:
            source = ObjectFile(self.store, shard.key, shard.nbytes)
            file = pq.ParquetFile(pa.PythonFile(source, mode="r"), page_checksum_verification=True, pre_buffer=True)
            self._check_footer(shard, file)
            table = file.read(columns=[*_SCALAR_COLUMNS, *self.token_columns], use_threads=False).combine_chunks()
        except (pa.ArrowException, OSError, KeyError) as err:
            self.report.add("layout", f"cannot be read as Parquet: {err}", key=shard.key)
            return
        if table.num_rows != len(whole.entries):
            self.report.add("contents", f"{table.num_rows} rows, not the {len(whole.entries)} recorded", key=shard.key)
            return
        fixed = {name: table[name].to_pylist() for name in _SCALAR_COLUMNS}
        tokens = {name: _lists(table[name]) for name in self.token_columns}
        for entry in shard.entries:
            self.report.count("contents")
            at = entry.row_group
            for name in _SCALAR_COLUMNS:
                if fixed[name][at] != getattr(entry, name):
                    message = f"{name} is {fixed[name][at]!r}, recorded as {getattr(entry, name)!r}"
                    self._content_problem(shard, entry, message)
            if entry.row in prompts:
                for name, values in self._planned_tokens(prompts[entry.row], entry):
                    if not np.array_equal(tokens[name][at], values):
                        self._content_problem(shard, entry, f"{name} are not those of the plan")

    def _planned_tokens(self, prompt: Prompt, entry: IndexEntry) -> Iterator[tuple[str, npt.NDArray[Any]]]:
        """What the token columns of a segment should hold."""
        start, stop = entry.token_start, entry.token_start + entry.num_tokens
        yield "input_ids", prompt.input_ids[start:stop]
        yield "loss_mask", prompt.loss_mask[start:stop]
        for selection in self.selections:
            positions = select_positions(selection, prompt.loss_mask)
            yield positions_column(selection), positions[(positions >= start) & (positions < stop)]

    def _content_problem(self, shard: ShardRecord, entry: IndexEntry, message: str) -> None:
        self.report.add("contents", message, key=shard.key, row=entry.row, prompt_id=entry.prompt_id)

    def _check_footer(self, shard: ShardRecord, file: pq.ParquetFile) -> None:
        self.report.count("layout")
        footer = file.metadata
        if not file.schema_arrow.equals(shard_schema(self.sites, selections=self.selections)):
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
        self._check_site_metadata(shard, stored.get("hsray.sites", ""))
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

    def _check_site_metadata(self, shard: ShardRecord, said: str) -> None:
        """The shard says of its sites what `hsray.json` says: which, and how they are stored."""
        try:
            found = [(s["name"], s.get("codec", "none"), s.get("tokens", "all")) for s in json.loads(said)]
        except (ValueError, KeyError, TypeError, AttributeError) as err:
            self.report.add("layout", f"hsray.sites cannot be understood: {err!r}", key=shard.key)
            return
        expected = [(site, self.storage[site].codec, self.storage[site].tokens) for site in self.sites]
        if found != expected:
            message = f"hsray.sites has (name, codec, tokens) {found}, the run has {expected}"
            self.report.add("layout", message, key=shard.key)

    def _extents(self, footer: pq.FileMetaData, entry: IndexEntry) -> dict[str, tuple[int, int]]:
        """By the footer. How many positions there are is as recorded; whether they are the plan's is in `contents`."""
        missing = [name for name in (*self.token_columns, *self.sites) if name not in entry.extents]
        if missing:
            raise ValueError(f"its record has no extent of {', '.join(missing)}")
        positions = {name: entry.extents[name].nbytes // 4 for name in self.token_columns[len(TOKEN_COLUMNS) :]}
        nbytes = {site: self._payload_bytes(entry, site) for site in self.sites}
        return column_extents(footer, entry.row_group, entry.num_tokens, nbytes, positions)

    def _rows(self, entry: IndexEntry, site: str) -> int:
        tokens = self.storage[site].tokens
        return entry.num_tokens if tokens == "all" else entry.extents[positions_column(tokens)].nbytes // 4

    def _payload_bytes(self, entry: IndexEntry, site: str) -> int:
        """What a payload takes: of a codec whose size depends on the values, what is recorded. Raises ValueError."""
        rows, recorded = self._rows(entry, site), entry.extents[site].nbytes
        codec = find_codec(self.storage[site].codec)
        if codec is None or rows == 0:
            return rows * self.token_bytes
        least, most = codec.size_limits(rows, self.hidden_size)
        if not least <= recorded <= most:
            raise ValueError(
                f"{site}: {recorded} bytes recorded, where {codec.name} of {rows} rows has {least} to {most}"
            )
        return recorded

    def _check_bytes(self, shard: ShardRecord, written: ShardRecord) -> None:
        """Every byte of a shard, in order: its hash, those of its payloads, and that values are finite.

        Payloads enter the hash of the whole by what was recorded of them: a damaged one is a problem of its row alone,
        and one that no longer counts is none.
        """
        whole = ObjectDigest()
        rows = set(shard.rows)
        for start, stop, entries in _regions(written):
            data = self.ranges.read([[Range(shard.key, start, stop - start)]])[0]
            done = 0
            payloads = [(entry.extents[site], entry, site) for entry in entries for site in self.sites]
            for extent, entry, site in sorted(payloads, key=lambda payload: payload[0].offset):
                first = extent.offset - start
                payload = data[first : first + extent.nbytes]
                whole.update(data[done:first].data)
                if entry.row in rows:
                    self._check_payload(shard, entry, site, payload)
                whole.update_payload(_recorded_digest(extent))
                done = first + extent.nbytes
            whole.update(data[done:].data)
        self.report.count("hashes")
        if whole.hexdigest() != shard.tree_xxh3:
            message = "the object does not hash to what was recorded, apart from payloads"
            self.report.add("hashes", message, key=shard.key)

    def _check_payload(self, shard: ShardRecord, entry: IndexEntry, site: str, payload: npt.NDArray[np.uint8]) -> None:
        self.report.count("hashes")
        if hex_digest(payload_digest(payload.data)) != entry.extents[site].xxh3:
            message = f"{site} of segment {entry.segment} does not hash to what was recorded"
            self.report.add("hashes", message, key=shard.key, row=entry.row, prompt_id=entry.prompt_id)
            if self.storage[site].codec != "none":
                return  # nothing can be said of its values
        try:
            payload = self._decoded(entry, site, payload)
        except EncodingError as err:
            message = f"{site} of segment {entry.segment} cannot be decoded: {err}"
            self.report.add("values", message, key=shard.key, row=entry.row, prompt_id=entry.prompt_id)
            return
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
            where = f"token {entry.token_start + first}"
            if self.storage[site].tokens != "all":
                where = f"row {first} of {positions_column(self.storage[site].tokens)} in segment {entry.segment}"
            message = f"{bad} values of {site} are NaN or infinite, the first at {where}"
            self.report.add("values", message, key=shard.key, row=entry.row, prompt_id=entry.prompt_id)

    def _decoded(self, entry: IndexEntry, site: str, payload: npt.NDArray[np.uint8]) -> npt.NDArray[np.uint8]:
        """The bytes of its values. Raises EncodingError."""
        codec, rows = self.storage[site].codec, self._rows(entry, site)
        if codec == "none" or (rows == 0 and not len(payload)):
            return payload
        return decode_bits(codec, payload.data, rows, self.hidden_size).reshape(-1).view(np.uint8)


def _recorded_digest(extent: Extent) -> int:
    try:
        return int(extent.xxh3, 16)
    except ValueError:
        return 0  # no digest; the payload's own check reports it


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
