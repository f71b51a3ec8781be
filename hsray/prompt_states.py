"""One prompt of a run as its reader sees it: tokens, positions, and states by site name, fetched when asked for."""

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import ml_dtypes
import numpy as np
import numpy.typing as npt
import pyarrow as pa

from hsray.errors import HsrayError
from hsray.ranges import ByteArray, Range
from hsray.records import IntArray, MaskArray
from hsray.schema import ITEMSIZE
from hsray.site_storage import CodecName, positions_column

if TYPE_CHECKING:
    import torch

    from hsray.reader import Run

StateArray = npt.NDArray[Any]

_NUMPY_DTYPES: dict[str, np.dtype[Any]] = {
    "bfloat16": np.dtype(ml_dtypes.bfloat16),
    "float16": np.dtype("<f2"),
    "float32": np.dtype("<f4"),
}


class Payload(NamedTuple):
    """A site's states of one segment as they are stored: `num_rows` rows in the encoding `codec`."""

    data: ByteArray
    num_rows: int
    codec: CodecName


class PromptStates(Mapping[str, StateArray]):
    """One prompt: its tokens, and its states by site name. Everything is fetched when it is first asked for.

    States are `[seq_len, hidden_size]` arrays of the run's dtype (`ml_dtypes.bfloat16`, float16, float32), decoded
    where they are stored in an encoding. Of a site that is stored for some tokens only (`run.storage[site].tokens`),
    row i is the state at `positions(site)[i]`. They are kept as long as this object is, and may be read-only.

    Attributes:
        run: the run it belongs to.
        prompt_id: its name.
        row: its input row.
        seq_len: its number of tokens.
        segments: which of `run.segments` it consists of.
    """

    def __init__(self, run: "Run", position: int) -> None:
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

    def positions(self, site: str) -> IntArray:
        """int32, ascending: the positions that have a state at `site`, one for each of its rows."""
        self.run.known([site])
        tokens = self.run.storage[site].tokens
        if tokens == "all":
            return np.arange(self.seq_len, dtype=np.int32)
        return self._value(positions_column(tokens))

    def payloads(self, site: str) -> list[Payload]:
        """The stored bytes of a site, one payload for each segment, checked and not decoded. They are not kept."""
        self.run.known([site])
        index = self.run.segments
        data = self.run.fetch([index.where(segment, site) for segment in self.segments])
        payloads, at = [], 0
        for segment in self.segments:
            nbytes = int(index.nbytes[site][segment])
            self.run.check(data[at : at + nbytes], segment, site)
            rows = self.run.rows_of(segment, site)
            payloads.append(Payload(data[at : at + nbytes], rows, self.run.storage[site].codec))
            at += nbytes
        return payloads

    def load(self, sites: Sequence[str] | None = None) -> "PromptStates":
        """Fetch the tokens and these sites (default: all) together, which takes fewer requests than one by one."""
        missing = [c for c in (*self.run.token_columns, *self.run.known(sites)) if c not in self._values]
        self._values |= self.run.load([self._position], missing)[0]._values
        return self

    def read(self, site: str, start: int, stop: int) -> StateArray:
        """Tokens `start` to `stop` of a state, `[stop - start, hidden_size]`: only these bytes are fetched, of an
        encoded site the whole segments that they are in.

        Segments that are read in part cannot be checked against their hash.

        Raises:
            IndexError: not 0 <= start <= stop <= seq_len.
            HsrayError: one of these tokens has no state at this site.
        """
        self.run.known([site])
        if not 0 <= start <= stop <= self.seq_len:
            raise IndexError(f"tokens {start} to {stop} of {self.prompt_id!r}, which has {self.seq_len}")
        begin, end = self._rows_between(site, start, stop)
        if site in self._values:
            return self._values[site][begin:end]
        return self._read_encoded(site, begin, end) if self.run.is_encoded(site) else self._read_plain(site, begin, end)

    def _rows_between(self, site: str, start: int, stop: int) -> tuple[int, int]:
        """Which rows of a site are tokens `start` to `stop`."""
        tokens = self.run.storage[site].tokens
        if tokens == "all":
            return start, stop
        positions = self.positions(site)
        begin = int(np.searchsorted(positions, start))
        end = begin + stop - start
        if not np.array_equal(positions[begin:end], np.arange(start, stop)):
            missing = np.setdiff1d(np.arange(start, stop), positions)[0]
            raise HsrayError(
                f"token {missing} of {self.prompt_id!r} has no state at {site}, which is stored for the tokens "
                f"`{tokens}`: positions({site!r}) has them"
            )
        return begin, end

    def _overlapping(self, site: str, begin: int, end: int) -> Iterator[tuple[int, int, int]]:
        """(segment, from, to) for each segment that holds some of the rows `begin` to `end`, in its own rows."""
        first = 0
        for segment in self.segments:
            rows = self.run.rows_of(segment, site)
            inside = max(begin - first, 0), min(end - first, rows)
            if inside[0] < inside[1]:
                yield segment, *inside
            first += rows

    def _read_plain(self, site: str, begin: int, end: int) -> StateArray:
        token_bytes = self.run.hidden_size * ITEMSIZE[self.run.dtype]
        index = self.run.segments
        parts: list[tuple[int, Range]] = []
        for segment, first, last in self._overlapping(site, begin, end):
            whole = index.where(segment, site)
            parts.append((segment, Range(whole.key, whole.offset + first * token_bytes, (last - first) * token_bytes)))
        payload = self.run.fetch([where for _, where in parts])
        at = 0
        for segment, where in parts:
            if where.nbytes == index.nbytes[site][segment]:
                self.run.check(payload[at : at + where.nbytes], segment, site)
            at += where.nbytes
        return self._typed(site, payload)

    def _read_encoded(self, site: str, begin: int, end: int) -> StateArray:
        overlapping = list(self._overlapping(site, begin, end))
        index = self.run.segments
        data = self.run.fetch([index.where(segment, site) for segment, _, _ in overlapping])
        token_bytes = self.run.hidden_size * ITEMSIZE[self.run.dtype]
        values = np.empty((end - begin) * token_bytes, np.uint8)
        at = filled = 0
        for segment, first, last in overlapping:
            payload = data[at : at + int(index.nbytes[site][segment])]
            self.run.check(payload, segment, site)
            whole = np.empty(self.run.rows_of(segment, site) * token_bytes, np.uint8)
            self.run.decode(payload, segment, site, whole)
            part = whole[first * token_bytes : last * token_bytes]
            values[filled : filled + len(part)] = part
            at += len(payload)
            filled += len(part)
        return self._typed(site, values)

    def tensor(self, site: str) -> "torch.Tensor":
        """The state as a torch tensor `[rows, hidden_size]` that shares its memory. Do not write to it."""
        return _tensor(self[site], self.run.dtype)

    def keep(self, column: str, payload: ByteArray) -> None:
        """Take the bytes of a whole column, decoded."""
        self._values[column] = self._typed(column, payload)

    def _value(self, column: str) -> npt.NDArray[Any]:
        if column not in self._values:
            # The token columns lie side by side and are small.
            columns = self.run.token_columns if column in self.run.token_columns else (column,)
            self._values |= self.run.load([self._position], columns)[0]._values
        return self._values[column]

    def _typed(self, column: str, payload: ByteArray) -> npt.NDArray[Any]:
        if column in self.run.token_columns and column != "loss_mask":
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
