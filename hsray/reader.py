"""Reading a run: `open_run(url)` gives prompts by id, by position and in order, and torch tensors on request.

Promises: only what a resolution committed is seen, in a finished run (by its index) as in one that is in
progress or was interrupted (by its resolutions); nothing is fetched before it is asked for; what was fetched
whole is checked against its recorded hash. Must never need Ray, SGLang, a GPU or a Parquet footer; torch is
imported only where a tensor is asked for.
"""

import copy
import functools
import json
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, NamedTuple

import ml_dtypes
import numpy as np
import pyarrow as pa

from hsray.codecs import Bits, EncodingError, decode_bits
from hsray.errors import HsrayError
from hsray.index import Segments, index_table, read_index
from hsray.ledger import Ledger
from hsray.plan import load_plan
from hsray.prompt_states import Payload, PromptStates, StateArray
from hsray.ranges import RETRY_SECONDS, ByteArray, Range, RangeReader, refuse_after_fork
from hsray.records import IntArray, JsonDict
from hsray.schema import (
    ENGINE_KEY,
    FINAL_NORM_KEY,
    FORMAT_VERSION,
    INDEX_KEY,
    ITEMSIZE,
    RUN_KEY,
    token_columns,
)
from hsray.shard import payload_digest
from hsray.site_storage import (
    Storage,
    TokenSelection,
    positions_column,
    recorded_storage,
    stored_selections,
)
from hsray.store import Store, open_store

if TYPE_CHECKING:
    import torch

__all__ = ["FinalNorm", "Payload", "PromptStates", "Run", "StateArray", "open_run"]

# Iteration fetches batches of this size, and at most so many bytes and batches beyond the one in use.
_BATCH_BYTES = 16 << 20
_AHEAD_BYTES = 64 << 20
_AHEAD_BATCHES = 4

_SAFETENSORS_DTYPES: dict[str, np.dtype[Any]] = {
    "BF16": np.dtype(ml_dtypes.bfloat16),
    "F16": np.dtype("<f2"),
    "F32": np.dtype("<f4"),
    "F64": np.dtype("<f8"),
}


def open_run(url: str, storage_options: Mapping[str, Any] | None = None, *, verify: bool = True) -> "Run":
    """Open the run at `url`, the `output.url` that it was extracted to.

    Args:
        storage_options: as `output.storage_options`; credentials come from the environment.
        verify: check the hash of every whole payload that is read.

    Raises:
        ConfigError: the URL or an option is malformed.
        HsrayError: there is no run, its format is another, or its index is damaged.
        StoreError: the store refuses, or does not answer for five minutes.
    """
    refuse_after_fork()
    store = open_store(url, storage_options, retry_seconds=RETRY_SECONDS)
    ledger = Ledger(store)
    record = ledger.read_run()
    if record is None:
        raise HsrayError(f"there is no run at {url}: it has no {RUN_KEY}. Give the output.url of an extraction")
    if record["format_version"] != FORMAT_VERSION:
        raise HsrayError(f"{url} has format version {record['format_version']}; this hsray reads {FORMAT_VERSION}")
    ledger = Ledger(store, record["run_id"])
    complete = ledger.is_complete()
    sites = [site["name"] for site in record["sites"]]
    selections = stored_selections(recorded_storage(record["sites"], url))
    table = (
        _read_finished(store, sites, selections)
        if complete
        else _follow_resolutions(store, ledger, record, sites, selections)
    )
    return Run(store, storage_options or {}, record, complete, Segments(table, sites, selections), verify)


def _read_finished(store: Store, sites: Sequence[str], selections: Sequence[TokenSelection]) -> pa.Table:
    try:
        return read_index(store, sites, selections)
    except FileNotFoundError as err:
        raise HsrayError(
            f"{store.url} is marked complete but has no {INDEX_KEY}. Run `python -m hsray.verify {store.url}`"
        ) from err


def _follow_resolutions(
    store: Store, ledger: Ledger, record: JsonDict, sites: Sequence[str], selections: Sequence[TokenSelection]
) -> pa.Table:
    summaries, accounting = ledger.account(load_plan(store, record["plan"]).leases)
    standing = ledger.standing(summaries.keys() - accounting.superseded, accounting)
    return index_table((shard for resolution in standing for shard in resolution.shards), sites, selections)


class FinalNorm(NamedTuple):
    """The model's final norm: its weight `[hidden_size]` as the checkpoint holds it, eps, and how the weight is
    used (`rms`: multiplied by it; `rms_one_plus`: by 1 + weight)."""

    weight: StateArray
    eps: float
    kind: str


class Run:
    """A run, open for reading. Thread-safe, picklable, and usable in forked processes.

    A position counts the committed prompts in the order of their input rows, from 0. Rows that were rejected,
    are dead or not done yet have none.

    Attributes:
        url: where it lies.
        record: its `hsray.json`.
        complete: whether the extraction has finished. Otherwise the prompts are those that were committed when
            the run was opened.
        sites: site names, in column order.
        hidden_size: columns of every state.
        dtype: `bfloat16`, `float16` or `float32`.
        storage: by site, its codec and which of a prompt's tokens have a state.
        token_columns: `input_ids`, `loss_mask`, and a column of positions for each selection of tokens.
        segments: the index.
        verify: whether hashes are checked.
    """

    def __init__(
        self,
        store: Store,
        storage_options: Mapping[str, Any],
        record: JsonDict,
        complete: bool,
        segments: Segments,
        verify: bool,
    ) -> None:
        self.url = store.url
        self.record = record
        self.complete = complete
        self.sites: tuple[str, ...] = tuple(site["name"] for site in record["sites"])
        self.hidden_size: int = record["model"]["hidden_size"]
        self.dtype: str = record["dtype"]
        self.storage: Storage = recorded_storage(record["sites"], self.url)
        self.token_columns = token_columns(stored_selections(self.storage))
        self.segments = segments
        self.verify = verify
        self._ranges = RangeReader(store, storage_options)

    def __len__(self) -> int:
        return len(self.segments.prompt_ids)

    def __contains__(self, prompt_id: object) -> bool:
        return prompt_id in self._positions

    def __getitem__(self, prompt_id: str) -> "PromptStates":
        """The prompt of this id. Raises KeyError if it was not committed."""
        return PromptStates(self, self._positions[prompt_id])

    def __iter__(self) -> Iterator["PromptStates"]:
        return self.scan()

    @property
    def prompt_ids(self) -> Sequence[str]:
        """The id at each position."""
        return self.segments.prompt_ids

    def at(self, position: int) -> "PromptStates":
        """The prompt at this position. Raises IndexError outside 0 .. len - 1."""
        if not 0 <= position < len(self):
            raise IndexError(f"position {position} of a run of {len(self)} prompts")
        return PromptStates(self, position)

    def part(self, start: int, stop: int) -> "Run":
        """The prompts at positions `start` to `stop`, as a run of their own, whose pickle has only their index."""
        if not 0 <= start <= stop <= len(self):
            raise IndexError(f"positions {start} to {stop} of a run of {len(self)} prompts")
        part = copy.copy(self)
        part.__dict__.pop("_positions", None)
        part.segments = self.segments.part(start, stop)
        return part

    def scan(self, sites: Sequence[str] | None = None) -> Iterator["PromptStates"]:
        """Every prompt in order, with its tokens and these sites (default: all) already fetched.

        Threads fetch ahead: about 64 MB beyond the 16 MB in use, or one prompt where a prompt is larger.
        """
        columns = (*self.token_columns, *self.known(sites))
        batches = deque(self._batches(columns))
        ahead: deque[tuple[int, Future[list[PromptStates]]]] = deque()
        pool = ThreadPoolExecutor(_AHEAD_BATCHES, "hsray-scan")
        try:
            while batches or ahead:
                while batches and len(ahead) < _AHEAD_BATCHES:
                    positions, nbytes = batches[0]
                    if ahead and sum(size for size, _ in ahead) + nbytes > _AHEAD_BYTES:
                        break
                    batches.popleft()
                    ahead.append((nbytes, pool.submit(self.load, positions, columns)))
                # Popped before they are handed out, so that a prompt is freed when its user lets go of it.
                prompts = deque(ahead.popleft()[1].result())
                while prompts:
                    yield prompts.popleft()
        finally:
            pool.shutdown(wait=True, cancel_futures=True)

    def load(self, positions: Sequence[int], columns: Sequence[str]) -> list["PromptStates"]:
        """The prompts at `positions`, with `columns` (sites and `token_columns`) fetched in one go and decoded."""
        prompts = [self.at(position) for position in positions]
        wanted = [(prompt, column) for prompt in prompts for column in columns]
        slots = [[self.segments.where(s, column) for s in prompt.segments] for prompt, column in wanted]
        for (prompt, column), payload in zip(wanted, self._ranges.read(slots), strict=True):
            parts = []
            if column in self.storage:
                start = 0
                for segment in prompt.segments:
                    nbytes = int(self.segments.nbytes[column][segment])
                    parts.append((segment, payload[start : start + nbytes]))
                    self.check(parts[-1][1], segment, column)
                    start += nbytes
            prompt.keep(column, self._decoded(column, parts) if self.is_encoded(column) else payload)
        return prompts

    def columns_for(self, sites: Sequence[str]) -> tuple[str, ...]:
        """What must be read to have `sites`: tokens, positions of those that are stored for some tokens only, sites."""
        partial = {positions_column(self.storage[s].tokens): None for s in sites if self.storage[s].tokens != "all"}
        return (*token_columns(()), *partial, *sites)

    def is_encoded(self, column: str) -> bool:
        """Whether the stored bytes of a column are others than those of its values."""
        return column in self.storage and self.storage[column].codec != "none"

    def rows_of(self, segment: int, site: str) -> int:
        """How many tokens of a segment have a state at `site`: all, or those that `storage[site].tokens` selects."""
        tokens = self.storage[site].tokens
        if tokens == "all":
            return int(self.segments.num_tokens[segment])
        return int(self.segments.nbytes[positions_column(tokens)][segment]) // 4

    def decode(self, payload: ByteArray, segment: int, site: str, out: ByteArray) -> None:
        """Decode the stored payload of an encoded site.

        Args:
            payload: all of it; `check` says whether it is what was written.
            out: the bytes of the values, `rows_of(segment, site) * hidden_size * 2` of them, at an even address.

        Raises:
            HsrayError: the payload is not one of that codec and size; the message says which one it is.
        """
        rows = self.rows_of(segment, site)
        bits: Bits = out.view(np.uint16).reshape(rows, self.hidden_size)
        if rows == 0 and not len(payload):
            return
        try:
            decode_bits(self.storage[site].codec, payload.data, rows, self.hidden_size, bits)
        except EncodingError as err:
            codec = self.storage[site].codec
            raise HsrayError(f"{self._place(segment, site)} is not {codec} of {rows} tokens: {err}") from err

    def _decoded(self, site: str, parts: Sequence[tuple[int, ByteArray]]) -> ByteArray:
        token_bytes = self.hidden_size * ITEMSIZE[self.dtype]
        sizes = [self.rows_of(segment, site) * token_bytes for segment, _ in parts]
        values = np.empty(sum(sizes), np.uint8)
        start = 0
        for (segment, payload), size in zip(parts, sizes, strict=True):
            self.decode(payload, segment, site, values[start : start + size])
            start += size
        return values

    def fetch(self, ranges: Sequence[Range]) -> ByteArray:
        """The bytes of these ranges, one after the other."""
        return self._ranges.read([ranges])[0]

    def fetch_into(self, slots: Sequence[Sequence[Range]], targets: Sequence[ByteArray]) -> None:
        """Fill each of `targets` with the bytes of the ranges of its slot, in parallel, without other memory."""
        self._ranges.read_into(slots, targets)

    def check(self, payload: ByteArray, segment: int, site: str) -> None:
        """Raise HsrayError if a payload is not the one that was written. Nothing where `verify` is off."""
        if self.verify and payload_digest(payload.data) != int(self.segments.xxh3[site][segment]):
            raise HsrayError(f"{self._place(segment, site)} does not have the hash it was written with")

    def _place(self, segment: int, site: str) -> str:
        where = self.segments.where(segment, site)
        position = int(np.searchsorted(self.segments.first, segment, side="right")) - 1
        return (
            f"{where.key}: {site} of prompt {self.prompt_ids[position]!r} (row {self.segments.row[segment]}, "
            f"token {self.segments.token_start[segment]} on, bytes {where.offset} to {where.offset + where.nbytes})"
        )

    def torch_dataset(self, sites: Sequence[str] | None = None) -> "torch.utils.data.Dataset[dict[str, Any]]":
        """A map-style dataset over positions, for a DataLoader with any number of workers, forked or spawned.

        Items hold `prompt_id`, `input_ids` (int64 `[T]`), `loss_mask` (uint8 `[T]`), and each of `sites`
        (default: all) as a tensor `[T, hidden_size]` of the run's dtype; of a site that is stored for some tokens
        only, as `[len(positions), hidden_size]`, with their positions (int64) under `positions_loss` or
        `positions_through_last_loss`. Prompts differ in length, so a
        DataLoader needs a `collate_fn` of your own, or `batch_size=None`.
        """
        return _make_dataset(self, self.known(sites))

    def engine(self) -> JsonDict:
        """What the engine of the run said of itself: `sglang_version`, `engine_dtype`, `tp_size`, ..."""
        facts: JsonDict = json.loads(self._ranges.read_object(ENGINE_KEY))["engine"]
        return facts

    def final_norm(self) -> FinalNorm | None:
        """The final norm that turns `final_prenorm` into `final_postnorm`; None if the run has none stored."""
        from safetensors import deserialize

        try:
            data = self._ranges.read_object(FINAL_NORM_KEY)
        except FileNotFoundError:
            return None
        model, tensor = self.record["model"], dict(deserialize(data))["weight"]  # type: ignore[no-untyped-call]
        # safetensors' own numpy loader has no bfloat16.
        weight = np.frombuffer(tensor["data"], _SAFETENSORS_DTYPES[tensor["dtype"]])
        return FinalNorm(weight, model["norm_eps"], model["norm_kind"])

    def known(self, sites: Sequence[str] | None) -> tuple[str, ...]:
        """`sites`, or all of them for None. Raises KeyError for one that the run does not have."""
        for site in sites or ():
            if site not in self.sites:
                raise KeyError(f"{site}: this run has {', '.join(self.sites)}")
        return self.sites if sites is None else tuple(sites)

    @functools.cached_property
    def _positions(self) -> dict[str, int]:
        return {prompt_id: position for position, prompt_id in enumerate(self.prompt_ids)}

    def _batches(self, columns: Sequence[str]) -> Iterator[tuple[range, int]]:
        """Consecutive positions and their bytes in memory."""
        token_bytes = self.hidden_size * ITEMSIZE[self.dtype]
        cumulated = np.cumsum(
            sum(
                # Encoded, they are smaller.
                self.segments.num_tokens.astype(np.int64) * token_bytes
                if self.is_encoded(column)
                else self.segments.nbytes[column]
                for column in columns
            )
        )
        ends = cumulated[self.segments.first[1:] - 1]
        start, before = 0, 0
        while start < len(self):
            stop = max(start + 1, int(np.searchsorted(ends, before + _BATCH_BYTES, side="right")))
            yield range(start, stop), int(ends[stop - 1]) - before
            start, before = stop, int(ends[stop - 1])


def _make_dataset(run: Run, sites: tuple[str, ...]) -> "torch.utils.data.Dataset[dict[str, Any]]":
    dataset: torch.utils.data.Dataset[dict[str, Any]] = _dataset_class()(run, sites)
    return dataset


@functools.cache
def _dataset_class() -> Any:
    import torch

    class RunDataset(torch.utils.data.Dataset[dict[str, Any]]):
        def __init__(self, run: Run, sites: tuple[str, ...]) -> None:
            self.run = run
            self.sites = sites

        def __reduce__(self) -> tuple[Any, ...]:
            return _make_dataset, (self.run, self.sites)

        def __len__(self) -> int:
            return len(self.run)

        def __getitem__(self, position: int) -> dict[str, Any]:
            return self.__getitems__([position])[0]

        def __getitems__(self, positions: list[int]) -> list[dict[str, Any]]:
            return [self._item(p) for p in self.run.load(positions, (*self.run.token_columns, *self.sites))]

        def _item(self, prompt: PromptStates) -> dict[str, Any]:
            return {
                "prompt_id": prompt.prompt_id,
                "input_ids": torch.from_numpy(prompt.input_ids.astype(np.int64)),
                "loss_mask": torch.from_numpy(prompt.loss_mask),
                **{column: torch.from_numpy(places.astype(np.int64)) for column, places in self._positions(prompt)},
                **{site: prompt.tensor(site) for site in self.sites},
            }

        def _positions(self, prompt: PromptStates) -> Iterator[tuple[str, IntArray]]:
            for site in self.sites:
                tokens = self.run.storage[site].tokens
                if tokens != "all":
                    yield positions_column(tokens), prompt.positions(site)

    return RunDataset
