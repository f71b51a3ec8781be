"""Who reads what, and in which order: pure functions of lengths, places, a seed and an epoch.

Every process of a training job works out the same answer alone, so nothing is negotiated and a position in the order
is one number. A block is a few neighbours in a shard, read in one go; a stream is the blocks of one reader (one rank,
or one DataLoader worker of a rank). Nothing here reads a byte or knows torch.
"""

import bisect
import heapq
import random
from collections.abc import Sequence
from typing import Literal

import numpy as np
import numpy.typing as npt

from hsray.index import Segments

Uneven = Literal["keep", "drop", "repeat"]
Positions = npt.NDArray[np.int64]
# Blocks each reader gets at least, where there are prompts enough: so that all get about as many tokens.
_BLOCKS_PER_READER = 16


def disk_order(segments: Segments, column: str) -> Positions:
    """All positions of a run, in the order in which their bytes lie in the shards."""
    heads = segments.first[:-1]
    order: Positions = np.lexsort((segments.offset[column][heads], segments.shard[heads]))
    return order


def cut_blocks(order: Positions, nbytes: npt.NDArray[np.int64], block_bytes: int) -> list[Positions]:
    """`order` in pieces of at most `block_bytes`, or one prompt. `nbytes` is by position."""
    ends = np.cumsum(nbytes[order])
    blocks = []
    start, before = 0, 0
    while start < len(order):
        stop = max(start + 1, int(np.searchsorted(ends, before + block_bytes, side="right")))
        blocks.append(order[start:stop])
        start, before = stop, int(ends[stop - 1])
    return blocks


def fitting_block_bytes(total_bytes: int, num_readers: int, largest: int) -> int:
    """At most `largest`, and so small that every reader gets several blocks."""
    return max(1, min(largest, total_bytes // (num_readers * _BLOCKS_PER_READER)))


def deal(blocks: Sequence[Positions], tokens: npt.NDArray[np.int64], num_readers: int) -> list[list[Positions]]:
    """The blocks of each reader: every block goes to the one with the fewest tokens so far."""
    streams: list[list[Positions]] = [[] for _ in range(num_readers)]
    fewest = [(0, reader) for reader in range(num_readers)]
    for block in blocks:
        have, reader = fewest[0]
        streams[reader].append(block)
        heapq.heapreplace(fewest, (have + int(tokens[block].sum()), reader))
    return streams


class BatchOrder:
    """The batches of one stream. `next_batch` gives one after the other.

    With a seed, a pool of at most `pool_bytes` (or one block) is kept filled with blocks; a batch is a random prompt
    of the pool and those of the nearest lengths, as many as fit `batch_tokens` when padded to the longest. Without a
    seed, batches are neighbours in the order of the blocks.

    Attributes:
        blocks: what it is made of.
        num_read: how many of them have gone into the pool.
    """

    def __init__(
        self,
        blocks: Sequence[Positions],
        tokens: npt.NDArray[np.int64],
        nbytes: npt.NDArray[np.int64],
        *,
        batch_tokens: int,
        pool_bytes: int,
        seed: str | None,
    ) -> None:
        self.blocks = blocks
        self.num_read = 0
        self._tokens = tokens
        self._nbytes = nbytes
        self._batch_tokens = batch_tokens
        self._pool_bytes = pool_bytes if seed is not None else 0
        self._random = random.Random(seed) if seed is not None else None
        # (tokens, tie breaker, position): sorted by length with a seed, else in order.
        self._pool: list[tuple[int, float, int]] = []
        self._held_bytes = 0

    @property
    def held(self) -> list[int]:
        """Positions in the pool: read, and in no batch yet."""
        return [position for _, _, position in self._pool]

    def next_batch(self) -> list[int] | None:
        """Positions of the next batch, or None after the last one."""
        self._fill()
        if not self._pool:
            return None
        start, stop = self._next_in_order() if self._random is None else self._near_a_random_one(self._random)
        batch = [position for _, _, position in self._pool[start:stop]]
        del self._pool[start:stop]
        self._held_bytes -= int(self._nbytes[batch].sum())
        return batch

    def skip(self, count: int) -> int:
        """Pass over so many batches, or as many as there are; returns how many that were."""
        for passed in range(count):
            if self.next_batch() is None:
                return passed
        return count

    def count(self) -> int:
        """How many batches are left. Uses them up."""
        return sum(1 for _ in iter(self.next_batch, None))

    def _fill(self) -> None:
        while self.num_read < len(self.blocks):
            block = self.blocks[self.num_read]
            nbytes = int(self._nbytes[block].sum())
            if self._random is None:
                if self._pool_suffices():
                    return
            elif self._pool and self._held_bytes + nbytes > self._pool_bytes:
                return
            for tokens, position in zip(self._tokens[block].tolist(), block.tolist(), strict=True):
                if self._random is None:
                    self._pool.append((tokens, 0.0, position))
                else:
                    bisect.insort(self._pool, (tokens, self._random.random(), position))
            self._held_bytes += nbytes
            self.num_read += 1

    def _pool_suffices(self) -> bool:
        """Whether the next batch is full without another block."""
        return bool(self._pool) and self._next_in_order()[1] < len(self._pool)

    def _next_in_order(self) -> tuple[int, int]:
        longest = 0
        for stop, (tokens, _, _) in enumerate(self._pool):
            longest = max(longest, tokens)
            if stop and longest * (stop + 1) > self._batch_tokens:
                return 0, stop
        return 0, len(self._pool)

    def _near_a_random_one(self, dice: random.Random) -> tuple[int, int]:
        pool = self._pool
        start = dice.randrange(len(pool))
        stop = start + 1
        while True:
            count = stop - start + 1
            shorter = start > 0 and count * pool[stop - 1][0] <= self._batch_tokens
            longer = stop < len(pool) and count * pool[stop][0] <= self._batch_tokens
            if shorter and (not longer or pool[start][0] - pool[start - 1][0] <= pool[stop][0] - pool[stop - 1][0]):
                start -= 1
            elif longer:
                stop += 1
            else:
                return start, stop


def quotas(counts: Sequence[Sequence[int]], uneven: Uneven) -> list[list[int]]:
    """How many batches each worker of each rank delivers, given how many each has.

    `keep` changes nothing; `drop` lets every rank stop after as many as the rank with the fewest has; `repeat` lets
    it go on, from the start of its workers' own streams, to as many as the rank with the most has.
    """
    totals = [sum(workers) for workers in counts]
    if uneven == "keep":
        return [list(workers) for workers in counts]
    if uneven == "drop":
        return [split_taken(workers, min(totals))[0] for workers in counts]
    extended = []
    for workers, total in zip(counts, totals, strict=True):
        mine = list(workers)
        # A worker without a batch has none to repeat.
        able = [worker for worker, count in enumerate(mine) if count]
        for _ in range((max(totals) - total) if able else 0):
            mine[min(able, key=lambda worker: mine[worker])] += 1
        extended.append(mine)
    return extended


def split_taken(counts: Sequence[int], taken: int) -> tuple[list[int], int]:
    """After `taken` batches of a rank: how many came from each worker, and whose turn it is.

    Workers take turns, and who has none left is passed over: this is a DataLoader's order.
    """
    rounds, left = 0, taken
    alive = sum(1 for count in counts if count > 0)
    for count in sorted(counts):
        if not alive or left < (count - rounds) * alive:
            break
        left -= (count - rounds) * alive
        rounds = count
        alive = sum(1 for other in counts if other > count)
    if alive:
        rounds += left // alive
        left %= alive
    given = [min(count, rounds) for count in counts]
    turn = 0
    for worker, count in enumerate(counts):
        if count > rounds:
            if left == 0:
                turn = worker
                break
            given[worker] += 1
            left -= 1
    else:
        turn = next((worker for worker, count in enumerate(counts) if count > given[worker]), 0)
    return given, turn
