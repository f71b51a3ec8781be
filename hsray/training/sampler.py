"""Batches of positions for `Run.torch_dataset`: every prompt is fetched by itself, so the order may be any.

For prompts of a megabyte and more, which is most models, this reads as fast as a `PromptStream`, mixes over the whole
run, and its order does not depend on the number of workers or ranks.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from torch.utils.data import Sampler

from hsray.reader import Run
from hsray.training.order import BatchOrder, Uneven
from hsray.training.ranks import resolve_rank
from hsray.training.schedule import usable_prompts
from hsray.training.state import State, check_settings, describe

# Prompts of about this many batches are sorted by length together.
_POOL_BATCHES = 64


class TokenBatchSampler(Sampler[list[int]]):
    """A `batch_sampler` for `DataLoader(run.torch_dataset(sites), ...)`: batches of about equally long prompts.

    All ranks work out the same list of batches; rank r takes every `world_size`-th from r. So a state may be loaded on
    another number of ranks or workers: the list goes on where it was left.

    Args:
        run: the run that the dataset is of.
        batch_tokens: most tokens of a batch, padding counted.
        positions: only these of the run, such as a training split. Default: all.
        min_tokens: leave shorter prompts out.
        shuffle: over the whole run, anew in every epoch. Otherwise in the order of the input.
        seed: of the order.
        rank, world_size: default: those of torch.distributed, or 0 of 1.
        uneven: of the last round, which may have a batch for some ranks only. `keep`: give it to those. `drop`: to
            nobody. `repeat`: the others get the first batches of the epoch once more.

    Raises:
        ConfigError: a setting does not fit the run; the message says which and what to do.

    Attributes:
        epoch: see `set_epoch`.
        left_out: prompts shorter than `min_tokens`.
    """

    def __init__(
        self,
        run: Run,
        *,
        batch_tokens: int,
        positions: Sequence[int] | None = None,
        min_tokens: int = 1,
        shuffle: bool = True,
        seed: int = 0,
        rank: int | None = None,
        world_size: int | None = None,
        uneven: Uneven = "keep",
    ) -> None:
        self.rank, self.world_size = resolve_rank(rank, world_size)
        self.epoch = 0
        self._tokens, usable, self.left_out = usable_prompts(run, positions, batch_tokens, None, min_tokens)
        self._positions = np.flatnonzero(usable)
        self._batch_tokens = batch_tokens
        self._seed = seed if shuffle else None
        self._uneven = uneven
        self._begin = 0
        self._given = 0
        self._settings = {
            "run_id": run.record["run_id"],
            "prompts": describe(usable),
            "batch_tokens": batch_tokens,
            "seed": self._seed,
        }

    def set_epoch(self, epoch: int) -> None:
        """Which epoch iterations give, from its start, until this is called again."""
        self.epoch = epoch
        self._begin = self._given = 0

    def __len__(self) -> int:
        """Batches of this rank from where the next iteration starts. Counts them: seconds per million prompts."""
        return len(self._mine(self._all()))

    def __iter__(self) -> Iterator[list[int]]:
        batches = self._mine(self._all())
        self._given, self._begin = self._begin, 0
        for batch in batches:
            self._given += self.world_size
            yield batch

    def state_dict(self) -> State:
        """After the last batch that was asked for. A DataLoader with workers asks ahead of what it gives out: take the
        state from torchdata's StatefulDataLoader, or `state_after`."""
        return {"epoch": self.epoch, "batches": self._given or self._begin, "settings": dict(self._settings)}

    def state_after(self, batches: int) -> State:
        """The state after so many batches that this rank has trained on since the epoch began."""
        return {"epoch": self.epoch, "batches": batches * self.world_size, "settings": dict(self._settings)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Let the next iteration go on from there.

        Raises:
            ConfigError: the state is of another run, or was saved under other settings; the message lists them.
        """
        check_settings(state["settings"], self._settings)
        self.set_epoch(state["epoch"])
        self._begin = state["batches"]

    def _all(self) -> list[list[int]]:
        """The batches of all ranks."""
        positions, seed = self._positions, None
        if self._seed is not None:
            seed = f"{self._seed} {self.epoch}"
            positions = np.random.default_rng((self._seed, self.epoch)).permutation(positions)
        order = BatchOrder(
            # The pool counts tokens here: nothing is in memory yet.
            [positions[at : at + 1] for at in range(len(positions))],
            self._tokens,
            self._tokens,
            batch_tokens=self._batch_tokens,
            pool_bytes=_POOL_BATCHES * self._batch_tokens,
            seed=seed,
        )
        return list(iter(order.next_batch, None))

    def _mine(self, batches: list[list[int]]) -> list[list[int]]:
        left = batches[self._begin :]
        rounds = len(left) / self.world_size
        if self._uneven == "drop":
            left = left[: math.floor(rounds) * self.world_size]
        elif self._uneven == "repeat":
            missing = math.ceil(rounds) * self.world_size - len(left)
            left = left + [batches[at % len(batches)] for at in range(missing)]
        return left[self.rank :: self.world_size]
