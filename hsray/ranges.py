"""Many extents of many objects, fetched with few range requests, in threads, also after a fork.

Neighbouring extents become one request and long ones several, so that a caller states what it wants and
nothing else. The object-store client's threads do not survive a fork (a request would hang for ever), so a
forked process, such as a worker of a torch DataLoader, has a fresh process of its own ask for it. Knows
nothing of prompts and sites.
"""

import functools
import io
import os
import pickle
import subprocess
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from typing import Any, NamedTuple, cast

import numpy as np
import numpy.typing as npt

from hsray.errors import HsrayError
from hsray.store import Store, open_store

ByteArray = npt.NDArray[np.uint8]

# Eight requests of 8 MB at a time saturate what one client gets from an object store.
RANGE_BYTES = 8 << 20
RANGE_THREADS = 8
# Two ranges are fetched as one if at most this lies between them: a round trip costs more.
_GAP_BYTES = 256 << 10
# An array over fetched bytes is used as it is if any state dtype may lie at its address.
_ALIGNMENT = 4
# A reader waits so long for a store that does not answer; a driver, which has more to lose, waits longer.
RETRY_SECONDS = 300.0


class Range(NamedTuple):
    """Bytes `offset` to `offset + nbytes` of the object `key`."""

    key: str
    offset: int
    nbytes: int


class _Piece(NamedTuple):
    """A range, and where its bytes belong: at `start` of the slot with this number."""

    key: str
    offset: int
    nbytes: int
    slot: int
    start: int

    @property
    def end(self) -> int:
        return self.offset + self.nbytes


_store_was_used = False
_is_forked = False


def _after_fork() -> None:
    global _is_forked
    _is_forked = _store_was_used


os.register_at_fork(after_in_child=_after_fork)


def refuse_after_fork() -> None:
    """Raise HsrayError in a process whose parent had a store open when it forked: the client would hang."""
    if _is_forked:
        raise HsrayError(
            "the object-store client does not survive a fork. Open the run before the processes fork and use it in "
            "them, or start them with `spawn`"
        )


class RangeReader:
    """Reads from one store. Thread-safe, picklable, and usable in a forked process.

    Args:
        storage_options: those that `store` was opened with.
    """

    def __init__(self, store: Store, storage_options: Mapping[str, Any]) -> None:
        global _store_was_used
        _store_was_used = True
        self._store = store
        self._storage_options = dict(storage_options)
        self._start()

    def _start(self) -> None:
        self._pid = os.getpid()
        self._lock = threading.Lock()
        self._pool: ThreadPoolExecutor | None = None
        self._helper: _Helper | None = None

    def __reduce__(self) -> tuple[Any, ...]:
        return _reopen, (self._store.url, self._storage_options)

    def read(self, slots: Sequence[Sequence[Range]]) -> list[ByteArray]:
        """The bytes of each slot: its ranges one after the other, aligned for any state dtype.

        Raises:
            HsrayError: an object is missing.
            StoreError: an object ends before a range does, or the store refuses, or it does not answer for five
                minutes.
        """
        if self._pid != os.getpid():
            self._start()
        # An in-memory store has no threads, and no other process can see it.
        if _is_forked and not self._store.url.startswith("memory:"):
            with self._lock:
                if self._helper is None:
                    self._helper = _Helper(self._store.url, self._storage_options)
                return self._helper.read(slots)
        values = [np.empty(sum(r.nbytes for r in ranges), np.uint8) for ranges in slots]
        self._run([functools.partial(self._fetch, group, values) for group in _groups(_pieces(slots))])
        return values

    def read_into(self, slots: Sequence[Sequence[Range]], targets: Sequence[ByteArray]) -> None:
        """As `read`, into memory that is already there: `targets[i]` is as long as the ranges of `slots[i]` together.

        Local files are read in place, also in a forked process, without a helper process.
        """
        if self._pid != os.getpid():
            self._start()
        if _is_forked and not (self._store.backend.is_local or self._store.url.startswith("memory:")):
            for target, value in zip(targets, self.read(slots), strict=True):
                np.copyto(target, value)
            return
        self._run([functools.partial(self._fill, group, targets) for group in _groups(_pieces(slots))])

    def read_object(self, key: str) -> bytes:
        """A whole small object. Raises FileNotFoundError if there is none; not available after a fork."""
        refuse_after_fork()
        return self._store.get(key)

    def _open_pool(self) -> ThreadPoolExecutor:
        with self._lock:
            if self._pool is None:
                self._pool = ThreadPoolExecutor(RANGE_THREADS, "hsray-range")
            return self._pool

    def _run(self, steps: Sequence[Callable[[], None]]) -> None:
        if len(steps) == 1:
            steps[0]()
            return
        futures = [self._open_pool().submit(step) for step in steps]
        # None may still write into somebody's memory when the first failure is told.
        wait(futures)
        for future in futures:
            future.result()

    def _fill(self, group: Sequence[_Piece], targets: Sequence[ByteArray]) -> None:
        parts, at = [], group[0].offset
        for piece in group:
            if piece.offset > at:
                parts.append(memoryview(bytearray(piece.offset - at)))
            elif piece.offset < at:
                raise ValueError(f"{piece.key}: bytes {piece.offset} on are asked for twice")
            parts.append(targets[piece.slot][piece.start : piece.start + piece.nbytes].data)
            at = piece.end
        try:
            self._store.read_into(group[0].key, group[0].offset, parts)
        except FileNotFoundError as err:
            raise HsrayError(f"{group[0].key} is missing from {self._store.url}") from err

    def _fetch(self, group: Sequence[_Piece], values: list[ByteArray]) -> None:
        key, first, end = group[0].key, group[0].offset, max(piece.end for piece in group)
        try:
            fetched = np.frombuffer(self._store.get_range(key, first, end - first), np.uint8)
        except FileNotFoundError as err:
            raise HsrayError(f"{key} is missing from {self._store.url}") from err
        for piece in group:
            data = fetched[piece.offset - first : piece.end - first]
            if len(group) == 1 and len(data) == len(values[piece.slot]) and data.ctypes.data % _ALIGNMENT == 0:
                values[piece.slot] = data
            else:
                np.copyto(values[piece.slot][piece.start : piece.start + piece.nbytes], data)


def _reopen(url: str, storage_options: dict[str, Any]) -> RangeReader:
    return RangeReader(open_store(url, storage_options, retry_seconds=RETRY_SECONDS), storage_options)


def _pieces(slots: Sequence[Sequence[Range]]) -> list[_Piece]:
    """The ranges cut to RANGE_BYTES, in the order of their objects' bytes."""
    pieces = []
    for slot, ranges in enumerate(slots):
        start = 0
        for key, offset, nbytes in ranges:
            for cut in range(0, nbytes, RANGE_BYTES):
                pieces.append(_Piece(key, offset + cut, min(RANGE_BYTES, nbytes - cut), slot, start + cut))
            start += nbytes
    pieces.sort(key=lambda piece: (piece.key, piece.offset))
    return pieces


def _groups(pieces: Iterable[_Piece]) -> Iterator[list[_Piece]]:
    """Pieces that one request fetches together."""
    group: list[_Piece] = []
    for piece in pieces:
        if group and not (
            piece.key == group[0].key
            and piece.offset - group[-1].end <= _GAP_BYTES
            and piece.end - group[0].offset <= RANGE_BYTES
        ):
            yield group
            group = []
        group.append(piece)
    if group:
        yield group


class ObjectFile(io.RawIOBase):
    """An object as a read-only file for pyarrow.

    Args:
        nbytes: its size; nothing beyond is asked for.
    """

    def __init__(self, store: Store, key: str, nbytes: int) -> None:
        self._store = store
        self._key = key
        self._nbytes = nbytes
        self._position = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._position

    def seek(self, offset: int, whence: int = io.SEEK_SET, /) -> int:
        self._position = offset + {io.SEEK_SET: 0, io.SEEK_CUR: self._position, io.SEEK_END: self._nbytes}[whence]
        return self._position

    def read(self, size: int = -1, /) -> bytes:
        end = self._nbytes if size < 0 else min(self._nbytes, self._position + size)
        if end <= self._position:
            return b""
        data = bytes(self._store.get_range(self._key, self._position, end - self._position))
        self._position = end
        return data


class _Helper:
    """A fresh process that reads for a forked one, over two pipes. It ends when its standard input does."""

    def __init__(self, url: str, storage_options: Mapping[str, Any]) -> None:
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
        self._process = subprocess.Popen(
            [sys.executable, "-c", "from hsray.ranges import serve; serve()"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=environment,
            # A Ctrl-C at the terminal is for the process that asks.
            start_new_session=True,
        )
        self._send((url, dict(storage_options)))

    def read(self, slots: Sequence[Sequence[Range]]) -> list[ByteArray]:
        answers = cast(io.BufferedReader, self._process.stdout)
        try:
            self._send([list(map(tuple, ranges)) for ranges in slots])
            answer = pickle.load(answers)
            if isinstance(answer, Exception):
                raise answer
            values: list[ByteArray] = [np.empty(nbytes, np.uint8) for nbytes in answer]
            for value in values:
                if answers.readinto(value.data) != len(value):
                    raise EOFError
        except (EOFError, BrokenPipeError) as err:
            raise HsrayError(f"the process that reads for the forked process {os.getpid()} has ended") from err
        return values

    def _send(self, message: Any) -> None:
        requests = cast(io.BufferedWriter, self._process.stdin)
        pickle.dump(message, requests)
        requests.flush()


def serve() -> None:
    """The helper's loop: a store, then requests, each answered by sizes and bytes or by an exception."""
    requests = sys.stdin.buffer
    # Whatever prints must not come between the answers.
    with os.fdopen(os.dup(1), "wb") as answers:
        os.dup2(2, 1)
        url, storage_options = pickle.load(requests)
        reader: RangeReader | None = None
        while True:
            try:
                slots = pickle.load(requests)
            except EOFError:
                return
            try:
                reader = reader or _reopen(url, storage_options)
                values = reader.read([[Range(*r) for r in ranges] for ranges in slots])
            except Exception as err:  # noqa: BLE001 - raised in the process that asked
                pickle.dump(err, answers)
            else:
                pickle.dump([value.nbytes for value in values], answers)
                for value in values:
                    answers.write(value.data)
            answers.flush()
