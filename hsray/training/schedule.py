"""The batches of every rank and worker in every epoch: `order.py`, applied to a run."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from hsray.errors import ConfigError
from hsray.reader import Run
from hsray.schema import ITEMSIZE
from hsray.training.order import (
    BatchOrder,
    Positions,
    Uneven,
    cut_blocks,
    deal,
    disk_order,
    fitting_block_bytes,
    quotas,
)

# A block is fetched in one go; eight requests of 8 MB, of neighbouring blocks, saturate a client.
_BLOCK_BYTES = 16 << 20


def check_setting(name: str, value: int | None, least: int) -> None:
    """Raise ConfigError if a setting is too small."""
    if value is not None and value < least:
        raise ConfigError(f"{name} must be at least {least}, got {value}")


def usable_prompts(
    run: Run, positions: Sequence[int] | None, batch_tokens: int, max_tokens: int | None, min_tokens: int
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.bool_], int]:
    """Tokens of the prompt at each position, cut at `max_tokens`; whether it is one of `positions` (default: all) and
    has `min_tokens`; and how many of `positions` have not.

    Raises:
        ConfigError: none has, or one does not fit a batch, or a position is not of the run or is there twice.
    """
    check_setting("batch_tokens", batch_tokens, 1)
    check_setting("max_tokens", max_tokens, 1)
    index = run.segments
    whole = index.seq_len[index.first[:-1]].astype(np.int64)
    tokens = whole if max_tokens is None else np.minimum(whole, max_tokens)
    wanted = np.ones(len(run), np.bool_)
    if positions is not None:
        chosen = np.asarray(positions, np.int64)
        if len(chosen) and not 0 <= chosen.min() <= chosen.max() < len(run):
            raise ConfigError(f"positions {chosen.min()} to {chosen.max()}: {run.url} has 0 to {len(run) - 1}")
        wanted[:] = False
        wanted[chosen] = True
        if wanted.sum() != len(chosen):
            raise ConfigError("positions: one is there twice")
    usable = wanted & (tokens >= min_tokens)
    if not usable.any():
        raise ConfigError(
            f"none of {wanted.sum()} prompts of {run.url} has at least {min_tokens} tokens; nothing is left to read"
        )
    fits = np.where(usable, tokens, 0)
    if fits.max() > batch_tokens:
        at = int(fits.argmax())
        raise ConfigError(
            f"prompt {run.prompt_ids[at]!r} has {tokens[at]} tokens and fits no batch of {batch_tokens}: raise "
            "batch_tokens, or set max_tokens to cut long prompts"
        )
    return tokens, usable, int(wanted.sum() - usable.sum())


def memory_bytes(run: Run, sites: Sequence[str], max_tokens: int | None) -> npt.NDArray[np.int64]:
    """Bytes in memory of the prompt at each position: whole segments, up to the one that `max_tokens` is in. Of a site
    that is encoded, those of its values."""
    index = run.segments
    token_bytes = run.hidden_size * ITEMSIZE[run.dtype]
    total = np.zeros(len(index.row), np.int64)
    for column in run.columns_for(sites):
        if run.is_encoded(column):
            # At most: a site may be stored for some tokens only.
            total += index.num_tokens.astype(np.int64) * token_bytes
        else:
            total += index.nbytes[column]
    if max_tokens is not None:
        total[index.token_start >= max_tokens] = 0
    by_position: npt.NDArray[np.int64] = np.add.reduceat(total, index.first[:-1])
    return by_position


@dataclass(frozen=True)
class Schedule:
    """What each of `world_size * num_workers` readers does.

    Attributes:
        positions: the prompts, in the order of the disk.
        tokens, nbytes: by position.
        disk_rank: by position, its place in `positions`.
        seed: of the order, or None for the order of the disk.
        pool_bytes: in which a reader mixes.
    """

    positions: Positions
    tokens: npt.NDArray[np.int64]
    nbytes: npt.NDArray[np.int64]
    disk_rank: npt.NDArray[np.int64]
    batch_tokens: int
    pool_bytes: int
    seed: int | None
    world_size: int
    uneven: Uneven

    @classmethod
    def of(
        cls,
        run: Run,
        sites: Sequence[str],
        tokens: npt.NDArray[np.int64],
        usable: npt.NDArray[np.bool_],
        *,
        max_tokens: int | None,
        batch_tokens: int,
        pool_bytes: int,
        seed: int | None,
        world_size: int,
        uneven: Uneven,
    ) -> "Schedule":
        order = disk_order(run.segments, run.columns_for(sites)[-1])
        disk_rank = np.empty(len(order), np.int64)
        disk_rank[order] = np.arange(len(order))
        return cls(
            positions=order[usable[order]],
            tokens=tokens,
            nbytes=memory_bytes(run, sites, max_tokens),
            disk_rank=disk_rank,
            batch_tokens=batch_tokens,
            pool_bytes=pool_bytes,
            seed=seed,
            world_size=world_size,
            uneven=uneven,
        )

    def batch_order(self, epoch: int, rank: int, worker: int, num_workers: int) -> BatchOrder:
        """The batches of one worker of one rank."""
        reader = rank * num_workers + worker
        return self._batch_order(self._streams(epoch, num_workers)[reader], epoch, reader)

    def quotas(self, epoch: int, num_workers: int) -> list[list[int]]:
        """How many batches each worker of each rank delivers. Counts all of them.

        Raises:
            ConfigError: a rank has none, but must have as many as the others.
        """
        streams = self._streams(epoch, num_workers)
        counts = [self._batch_order(stream, epoch, reader).count() for reader, stream in enumerate(streams)]
        by_rank = [counts[at : at + num_workers] for at in range(0, len(counts), num_workers)]
        idle = sum(1 for workers in by_rank if not any(workers))
        if idle and self.uneven != "keep":
            raise ConfigError(
                f"{len(self.positions)} prompts are too few for {self.world_size} ranks of {num_workers} readers: "
                f"{idle} get none, so uneven={self.uneven!r} cannot make them equal. Use fewer ranks or workers"
            )
        return quotas(by_rank, self.uneven)

    def reread(self, positions: Sequence[int], num_workers: int) -> list[Positions]:
        """Prompts from here and there as blocks."""
        held = np.array(positions, np.int64)
        return cut_blocks(held[np.argsort(self.disk_rank[held])], self.nbytes, self._block_bytes(num_workers))

    def _block_bytes(self, num_workers: int) -> int:
        total = int(self.nbytes[self.positions].sum())
        return fitting_block_bytes(total, self.world_size * num_workers, _BLOCK_BYTES)

    def _streams(self, epoch: int, num_workers: int) -> list[list[Positions]]:
        blocks = cut_blocks(self.positions, self.nbytes, self._block_bytes(num_workers))
        if self.seed is not None:
            shuffled = np.random.default_rng((self.seed, epoch)).permutation(len(blocks))
            blocks = [blocks[at] for at in shuffled]
        return deal(blocks, self.tokens, self.world_size * num_workers)

    def _batch_order(self, blocks: Sequence[Positions], epoch: int, reader: int) -> BatchOrder:
        return BatchOrder(
            blocks,
            self.tokens,
            self.nbytes,
            batch_tokens=self.batch_tokens,
            pool_bytes=self.pool_bytes,
            seed=None if self.seed is None else f"{self.seed} {epoch} {reader}",
        )
