"""Reading a run: `open_run(url)` gives prompts by id, by position and in order, and torch tensors on request.

Promises: only what a resolution committed is seen, in a finished run (by its index) as in one that is in
progress or was interrupted (by its resolutions); nothing is fetched before it is asked for; what was fetched
whole is checked against its recorded hash. Must never need Ray, SGLang, a GPU or a Parquet footer; torch is
imported only where a tensor is asked for.
"""

import functools
import json
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, NamedTuple

import ml_dtypes
import numpy as np
import numpy.typing as npt
import pyarrow as pa

from hsray.errors import HsrayError
from hsray.index import Segments, index_table, read_index
from hsray.ledger import Ledger
from hsray.plan import load_plan
from hsray.ranges import RETRY_SECONDS, ByteArray, Range, RangeReader, refuse_after_fork
from hsray.records import IntArray, JsonDict, MaskArray
from hsray.schema import ENGINE_KEY, FINAL_NORM_KEY, FORMAT_VERSION, INDEX_KEY, RUN_KEY, TOKEN_COLUMNS
from hsray.shard import payload_digest
from hsray.store import Store, open_store

if TYPE_CHECKING:
    import torch

StateArray = npt.NDArray[Any]

# Iteration fetches batches of this size, and at most so many bytes and batches beyond the one in use.
_BATCH_BYTES = 16 << 20
_AHEAD_BYTES = 64 << 20
_AHEAD_BATCHES = 4

_NUMPY_DTYPES: dict[str, np.dtype[Any]] = {
    "bfloat16": np.dtype(ml_dtypes.bfloat16),
    "float16": np.dtype("<f2"),
    "float32": np.dtype("<f4"),
}

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
    table = _read_finished(store, sites) if complete else _follow_resolutions(store, ledger, record, sites)
    return Run(store, storage_options or {}, record, complete, Segments(table, sites), verify)


def _read_finished(store: Store, sites: Sequence[str]) -> pa.Table:
    try:
        return read_index(store, sites)
    except FileNotFoundError as err:
        raise HsrayError(
            f"{store.url} is marked complete but has no {INDEX_KEY}. Run `python -m hsray.verify {store.url}`"
        ) from err


def _follow_resolutions(store: Store, ledger: Ledger, record: JsonDict, sites: Sequence[str]) -> pa.Table:
    summaries, accounting = ledger.account(load_plan(store, record["plan"]).leases)
    standing = ledger.stream(sorted(summaries.keys() - accounting.superseded))
    return index_table((shard for resolution in standing for shard in resolution.shards), sites)


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

    def scan(self, sites: Sequence[str] | None = None) -> Iterator["PromptStates"]:
        """Every prompt in order, with its tokens and these sites (default: all) already fetched.

        Threads fetch ahead: about 64 MB beyond the 16 MB in use, or one prompt where a prompt is larger.
        """
        columns = (*TOKEN_COLUMNS, *self.known(sites))
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
        """The prompts at `positions`, with `columns` (sites, `input_ids`, `loss_mask`) fetched in one go."""
        prompts = [self.at(position) for position in positions]
        wanted = [(prompt, column) for prompt in prompts for column in columns]
        slots = [[self.segments.where(s, column) for s in prompt.segments] for prompt, column in wanted]
        for (prompt, column), payload in zip(wanted, self._ranges.read(slots), strict=True):
            if column not in TOKEN_COLUMNS:
                start = 0
                for segment in prompt.segments:
                    nbytes = int(self.segments.nbytes[column][segment])
                    self.check(payload[start : start + nbytes], segment, column)
                    start += nbytes
            prompt.keep(column, payload)
        return prompts

    def fetch(self, ranges: Sequence[Range]) -> ByteArray:
        """The bytes of these ranges, one after the other."""
        return self._ranges.read([ranges])[0]

    def check(self, payload: ByteArray, segment: int, site: str) -> None:
        """Raise HsrayError if a payload is not the one that was written. Nothing where `verify` is off."""
        if self.verify and payload_digest(payload.data) != int(self.segments.xxh3[site][segment]):
            where = self.segments.where(segment, site)
            position = int(np.searchsorted(self.segments.first, segment, side="right")) - 1
            raise HsrayError(
                f"{where.key}: {site} of prompt {self.prompt_ids[position]!r} (row {self.segments.row[segment]}, "
                f"token {self.segments.token_start[segment]} on, bytes {where.offset} to {where.offset + where.nbytes})"
                " does not have the hash it was written with"
            )

    def torch_dataset(self, sites: Sequence[str] | None = None) -> "torch.utils.data.Dataset[dict[str, Any]]":
        """A map-style dataset over positions, for a DataLoader with any number of workers, forked or spawned.

        Items hold `prompt_id`, `input_ids` (int64 `[T]`), `loss_mask` (uint8 `[T]`), and each of `sites`
        (default: all) as a tensor `[T, hidden_size]` of the stored dtype. Prompts differ in length, so a
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
        """Consecutive positions and their bytes."""
        cumulated = np.cumsum(sum(self.segments.nbytes[column] for column in columns))
        ends = cumulated[self.segments.first[1:] - 1]
        start, before = 0, 0
        while start < len(self):
            stop = max(start + 1, int(np.searchsorted(ends, before + _BATCH_BYTES, side="right")))
            yield range(start, stop), int(ends[stop - 1]) - before
            start, before = stop, int(ends[stop - 1])


class PromptStates(Mapping[str, StateArray]):
    """One prompt: its tokens, and its states by site name. Everything is fetched when it is first asked for.

    States are `[seq_len, hidden_size]` arrays of the stored dtype (`ml_dtypes.bfloat16`, float16, float32).
    They are kept as long as this object is, and may be read-only.

    Attributes:
        run: the run it belongs to.
        prompt_id: its name.
        row: its input row.
        seq_len: its number of tokens.
        segments: which of `run.segments` it consists of.
    """

    def __init__(self, run: Run, position: int) -> None:
        self.run = run
        self.segments = run.segments.of(position)
        self.prompt_id = run.prompt_ids[position]
        self.row = int(run.segments.row[self.segments.start])
        self.seq_len = int(run.segments.seq_len[self.segments.start])
        self._position = position
        self._values: dict[str, npt.NDArray[Any]] = {}

    # A mapping compares by its items, which arrays cannot.
    __eq__ = object.__eq__
    __hash__ = object.__hash__

    def __repr__(self) -> str:
        return f"PromptStates({self.prompt_id!r}, row={self.row}, seq_len={self.seq_len}, sites={self.run.sites})"

    def __len__(self) -> int:
        return len(self.run.sites)

    def __iter__(self) -> Iterator[str]:
        return iter(self.run.sites)

    def __contains__(self, site: object) -> bool:
        # Without this, asking would fetch.
        return site in self.run.sites

    def __getitem__(self, site: str) -> StateArray:
        self.run.known([site])
        return self._value(site)

    @property
    def input_ids(self) -> IntArray:
        """int32 `[seq_len]`."""
        return self._value("input_ids")

    @property
    def loss_mask(self) -> MaskArray:
        """uint8 `[seq_len]`, aligned with `input_ids`."""
        return self._value("loss_mask")

    def load(self, sites: Sequence[str] | None = None) -> "PromptStates":
        """Fetch the tokens and these sites (default: all) together, which takes fewer requests than one by one."""
        missing = [c for c in (*TOKEN_COLUMNS, *self.run.known(sites)) if c not in self._values]
        self._values |= self.run.load([self._position], missing)[0]._values
        return self

    def read(self, site: str, start: int, stop: int) -> StateArray:
        """Tokens `start` to `stop` of a state, `[stop - start, hidden_size]`: only these bytes are fetched.

        Segments that are read in part cannot be checked against their hash.

        Raises:
            IndexError: not 0 <= start <= stop <= seq_len.
        """
        self.run.known([site])
        if not 0 <= start <= stop <= self.seq_len:
            raise IndexError(f"tokens {start} to {stop} of {self.prompt_id!r}, which has {self.seq_len}")
        if site in self._values:
            return self._values[site][start:stop]
        index = self.run.segments
        parts: list[tuple[int, Range]] = []
        for segment in self.segments:
            first, length = int(index.token_start[segment]), int(index.num_tokens[segment])
            begin, end = max(start - first, 0), min(stop - first, length)
            if begin < end:
                whole = index.where(segment, site)
                token_bytes = whole.nbytes // length
                parts.append(
                    (segment, Range(whole.key, whole.offset + begin * token_bytes, (end - begin) * token_bytes))
                )
        payload = self.run.fetch([where for _, where in parts])
        at = 0
        for segment, where in parts:
            if where.nbytes == index.nbytes[site][segment]:
                self.run.check(payload[at : at + where.nbytes], segment, site)
            at += where.nbytes
        return self._typed(site, payload)

    def tensor(self, site: str) -> "torch.Tensor":
        """The state as a torch tensor `[seq_len, hidden_size]` that shares its memory. Do not write to it."""
        return _tensor(self[site], self.run.dtype)

    def keep(self, column: str, payload: ByteArray) -> None:
        """Take the bytes of a whole column."""
        self._values[column] = self._typed(column, payload)

    def _value(self, column: str) -> npt.NDArray[Any]:
        if column not in self._values:
            # Both token columns lie side by side and are small.
            columns = TOKEN_COLUMNS if column in TOKEN_COLUMNS else (column,)
            self._values |= self.run.load([self._position], columns)[0]._values
        return self._values[column]

    def _typed(self, column: str, payload: ByteArray) -> npt.NDArray[Any]:
        if column == "input_ids":
            return payload.view("<i4")
        if column == "loss_mask":
            # Parquet has no type of one byte.
            return payload.view("<i4").astype(np.uint8)
        return payload.view(_NUMPY_DTYPES[self.run.dtype]).reshape(-1, self.run.hidden_size)


def _tensor(array: npt.NDArray[Any], dtype: str) -> "torch.Tensor":
    import torch
    from torch.utils.dlpack import from_dlpack

    # By way of Arrow, because torch warns about read-only arrays and numpy does not export bfloat16.
    data = pa.py_buffer(array.reshape(-1).view(np.uint8))
    flat = from_dlpack(pa.Array.from_buffers(pa.uint8(), array.nbytes, [None, data]))
    tensor: torch.Tensor = flat.view(getattr(torch, dtype)).reshape(array.shape)
    return tensor


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
            return [self._item(p) for p in self.run.load(positions, (*TOKEN_COLUMNS, *self.sites))]

        def _item(self, prompt: PromptStates) -> dict[str, Any]:
            return {
                "prompt_id": prompt.prompt_id,
                "input_ids": torch.from_numpy(prompt.input_ids.astype(np.int64)),
                "loss_mask": torch.from_numpy(prompt.loss_mask),
                **{site: prompt.tensor(site) for site in self.sites},
            }

    return RunDataset
