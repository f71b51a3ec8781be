"""From states in shared memory to the payloads of a shard: chosen rows, encoded, a little ahead of the writer.

A site that is stored plainly and whole is handed on as it lies, without a copy or a thread. Otherwise the payloads of
one segment (240 MB at most before encoding) and some 64 MB more are in memory. Knows nothing of files.
"""

import contextlib
import os
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np

from hsray.codecs import find_codec
from hsray.records import IntArray
from hsray.site_storage import CodecName

# Of one shard. A replica writes up to four at once.
ENCODE_THREADS = min(4, os.cpu_count() or 1)
# States whose payloads are being made, or are made and not yet taken; one state more than that where it is larger.
_AHEAD_BYTES = 64 << 20


@dataclass(frozen=True, slots=True, eq=False)
class State:
    """The states of one site in one segment, as they are to be stored.

    Attributes:
        data: C-contiguous little-endian `[tokens, hidden]`, as bytes.
        hidden_size: columns.
        token_bytes: bytes of a row.
        codec: how it is encoded.
        rows: ascending rows that are stored; None for all.
    """

    data: memoryview
    hidden_size: int
    token_bytes: int
    codec: CodecName = "none"
    rows: IntArray | None = None

    @property
    def is_plain(self) -> bool:
        return self.codec == "none" and self.rows is None

    def payload(self) -> memoryview:
        """What is stored; nothing at all where there are no rows.

        Raises:
            ValueError: a lossy codec met NaN or infinity.
        """
        data = self.data if self.rows is None else _take(self.data, self.rows, self.token_bytes)
        codec = find_codec(self.codec)
        if codec is None or not data.nbytes:
            return data
        return codec.encode(np.frombuffer(data, np.uint16).reshape(-1, self.hidden_size))


def _take(data: memoryview, rows: IntArray, token_bytes: int) -> memoryview:
    if not len(rows):
        return data[:0]
    first, last = int(rows[0]), int(rows[-1])
    if last - first + 1 == len(rows):
        return data[first * token_bytes : (last + 1) * token_bytes]
    taken = np.frombuffer(data, np.uint8).reshape(-1, token_bytes)[rows]
    return taken.reshape(-1).data


@contextlib.contextmanager
def payloads_ahead(segments: Sequence[Mapping[str, State]]) -> Iterator[Iterator[dict[str, memoryview]]]:
    """The payloads of each segment by site, in order; they are made by threads until the block ends."""
    if all(state.is_plain for segment in segments for state in segment.values()):
        yield ({site: state.data for site, state in segment.items()} for segment in segments)
        return
    pool = ThreadPoolExecutor(ENCODE_THREADS, "hsray-encode")
    try:
        yield _ahead(segments, pool)
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


def _ahead(segments: Sequence[Mapping[str, State]], pool: ThreadPoolExecutor) -> Iterator[dict[str, memoryview]]:
    waiting = deque(state for segment in segments for state in segment.values())
    started: deque[tuple[int, Future[memoryview]]] = deque()

    def fill() -> None:
        while waiting and (not started or sum(size for size, _ in started) + waiting[0].data.nbytes <= _AHEAD_BYTES):
            state = waiting.popleft()
            started.append((state.data.nbytes, pool.submit(state.payload)))

    for segment in segments:
        payloads = {}
        for site in segment:
            fill()
            payloads[site] = started.popleft()[1].result()
        yield payloads
