"""An iterable dataset over a run: blocks of neighbours are read in long pieces, mixed in bounded memory, and handed out
as batches of about equally long prompts.

Promises: in an epoch, ranks and workers together see every prompt once (but for what `uneven` says); the order is a
pure function of the run, the settings, the seed, the epoch and the number of ranks and workers; memory is bounded by
`shuffle_bytes + prefetch_bytes` and a batch; an epoch can be left, and gone on with, at any batch. Readers share
nothing and say nothing to each other.
"""

import logging
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch.utils.data import IterableDataset, get_worker_info

from hsray.errors import ConfigError
from hsray.reader import Run, open_run
from hsray.training.blocks import BlockReader, Loaded
from hsray.training.buffers import BufferPool
from hsray.training.collate import Batch, pad_batch
from hsray.training.items import Item, make_item
from hsray.training.order import BatchOrder, Uneven, split_taken
from hsray.training.ranks import resolve_rank
from hsray.training.schedule import Schedule, check_setting, usable_prompts
from hsray.training.state import State, check_settings, describe

logger = logging.getLogger(__name__)

Collate = Callable[[Sequence[Item]], Batch]


class PromptStream(IterableDataset[Batch]):
    """Batches of a run, for `Loader`, or for a DataLoader with `batch_size=None` and any number of workers.

    Args:
        run: the run, or its URL.
        sites: which states to read. Default: those that `collate` names in its attribute `sites`, or all.
        collate: makes a batch of items (dicts as of `Run.torch_dataset`).
        batch_tokens: most tokens of a batch, padding counted.
        positions: read only these of the run, such as a training split. Default: all.
        max_tokens: cut prompts after so many tokens. Without it, one longer than `batch_tokens` is an error.
        min_tokens: leave shorter prompts out. Default: what `collate` names in `min_tokens`, or 1.
        shuffle: mix, anew in every epoch. Otherwise the order is that of the shards.
        seed: of the order.
        shuffle_bytes: memory in which prompts are mixed, per reader. Blocks of neighbours of up to 16 MB are shuffled
            over the whole run in any case.
        prefetch_bytes: most bytes read ahead, per reader.
        rank, world_size: default: those of torch.distributed, or 0 of 1.
        uneven: ranks rarely have equally many batches. `keep`: each delivers its own. `drop`: all stop after as many
            as the rank with the fewest has; with `shuffle`, other prompts are missing in every epoch. `repeat`: all go
            on, from the start of their own, to as many as the rank with the most has. The last two count the batches
            of all ranks, some seconds per million prompts.
        device: a CUDA device: batches are made there, from page-locked memory. Not in DataLoader workers.

    Raises:
        ConfigError: a setting does not fit the run; the message says which and what to do.

    Attributes:
        run: the run.
        left_out: prompts shorter than `min_tokens`.
    """

    def __init__(
        self,
        run: Run | str,
        sites: Sequence[str] | None = None,
        *,
        batch_tokens: int,
        collate: Collate = pad_batch,
        positions: Sequence[int] | None = None,
        max_tokens: int | None = None,
        min_tokens: int | None = None,
        shuffle: bool = True,
        seed: int = 0,
        shuffle_bytes: int = 1 << 30,
        prefetch_bytes: int = 128 << 20,
        rank: int | None = None,
        world_size: int | None = None,
        uneven: Uneven = "keep",
        device: str | torch.device | None = None,
    ) -> None:
        check_setting("shuffle_bytes", shuffle_bytes, 0)
        check_setting("prefetch_bytes", prefetch_bytes, 0)
        self.run = open_run(run) if isinstance(run, str) else run
        self.sites = self.run.known(getattr(collate, "sites", None) if sites is None else sites)
        self.rank, self.world_size = resolve_rank(rank, world_size)
        least = getattr(collate, "min_tokens", 1) if min_tokens is None else min_tokens
        tokens, usable, self.left_out = usable_prompts(self.run, positions, batch_tokens, max_tokens, least)
        if self.left_out:
            logger.warning("%d prompts of fewer than %d tokens are left out", self.left_out, least)
        self._schedule = Schedule.of(
            self.run,
            self.sites,
            tokens,
            usable,
            max_tokens=max_tokens,
            batch_tokens=batch_tokens,
            pool_bytes=shuffle_bytes,
            seed=seed if shuffle else None,
            world_size=self.world_size,
            uneven=uneven,
        )
        self._collate = collate
        self._max_tokens = max_tokens
        self._prefetch_bytes = prefetch_bytes
        self._device = None if device is None else torch.device(device)
        # Shared, so that workers that stay alive between epochs see it change.
        self._epoch = torch.zeros((), dtype=torch.int64).share_memory_()  # type: ignore[no-untyped-call]
        self._resumed: State | None = None
        self._delivered = 0
        # Of this process, and kept from epoch to epoch.
        self._pool: BufferPool | None = None
        self._settings = {
            "run_id": self.run.record["run_id"],
            "prompts": describe(usable),
            "sites": list(self.sites),
            "batch_tokens": batch_tokens,
            "max_tokens": max_tokens,
            "seed": self._schedule.seed,
            "shuffle_bytes": shuffle_bytes if shuffle else None,
            "uneven": uneven,
            "rank": self.rank,
            "world_size": self.world_size,
        }

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_pool": None}

    @property
    def epoch(self) -> int:
        """The epoch that the next iteration gives."""
        return int(self._epoch)

    def set_epoch(self, epoch: int) -> None:
        """Which epoch iterations give, from its start, until this is called again."""
        self._epoch.fill_(epoch)
        self._resumed = None
        self._delivered = 0

    def num_batches(self, num_workers: int = 0) -> int:
        """How many batches this rank gets in this epoch with so many DataLoader workers.

        Counts them: some seconds per million prompts.
        """
        return sum(self._schedule.quotas(self.epoch, max(1, num_workers))[self.rank])

    def state_dict(self) -> State:
        """Where this process is: after the last batch that it has yielded.

        Of DataLoader workers only they know: take the state from `Loader`, or from torchdata's StatefulDataLoader.
        """
        info = get_worker_info()
        if info is None:
            return self.state_after(self._delivered, 1)
        return {**self.state_after(self._delivered, info.num_workers), "worker": info.id}

    def state_after(self, batches: int, num_workers: int) -> State:
        """The state after so many batches that a DataLoader with so many workers has given in this epoch."""
        workers = max(1, num_workers)
        return {"epoch": self.epoch, "batches": batches, "workers": workers, "settings": dict(self._settings)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Let the next iteration go on from there: same batches, same order.

        Raises:
            ConfigError: the state is of another run, or was saved under other settings; the message lists them.
        """
        check_settings(state["settings"], self._settings)
        self.set_epoch(state["epoch"])
        self._resumed = dict(state)
        self._delivered = state["batches"]

    def __iter__(self) -> Iterator[Batch]:
        info = get_worker_info()
        physical, num_workers = (info.id, info.num_workers) if info else (0, 1)
        if info and self._device is not None:
            raise ConfigError(
                f"device={self._device}: DataLoader workers cannot make batches there. Use num_workers=0 (threads do "
                "the reading), or leave device out"
            )
        worker, skip, limit = self._place(physical, num_workers)
        self._resumed = None
        self._delivered = skip
        return self._batches(worker, num_workers, skip, limit)

    def _place(self, physical: int, num_workers: int) -> tuple[int, int, int | None]:
        """Which of the rank's workers this process stands for, how many batches to skip, after how many to stop."""
        state, quota = self._resumed, None
        if state is not None and state["workers"] != num_workers:
            raise ConfigError(
                f"this state was saved with {state['workers']} DataLoader workers, and there are {num_workers}: use as "
                "many, or start an epoch with set_epoch"
            )
        must_count = state is not None and "worker" not in state and num_workers > 1
        if must_count or self._schedule.uneven != "keep":
            quota = self._schedule.quotas(self.epoch, num_workers)[self.rank]
        worker, skip = physical, 0
        if state is not None:
            skip = state["batches"]
            if must_count and quota is not None:
                given, turn = split_taken(quota, skip)
                # A DataLoader asks its first worker first, so that one stands for whose turn it is.
                worker = (physical + turn) % num_workers
                skip = given[worker]
        return worker, skip, quota[worker] if quota is not None and self._schedule.uneven != "keep" else None

    def _batches(self, worker: int, num_workers: int, skip: int, limit: int | None) -> Iterator[Batch]:
        if self._pool is None:
            self._pool = BufferPool(pinned=self._device is not None)
        pool = self._pool
        epoch = self.epoch
        left = None if limit is None else limit - skip
        while left is None or left > 0:
            order = self._schedule.batch_order(epoch, self.rank, worker, num_workers)
            passed = order.skip(skip)
            if passed == skip or left is None:
                for batch in self._one_pass(order, num_workers, pool):
                    self._delivered += 1
                    left = None if left is None else left - 1
                    yield batch
                    if left == 0:
                        return
            if left is None:
                return
            # `repeat`: from the start again.
            skip -= passed

    def _one_pass(self, order: BatchOrder, num_workers: int, pool: BufferPool) -> Iterator[Batch]:
        """What is left of an order. What its pool holds already is read again."""
        reader = BlockReader(
            self.run,
            self.sites,
            [*self._schedule.reread(order.held, num_workers), *order.blocks[order.num_read :]],
            nbytes=self._schedule.nbytes,
            max_tokens=self._max_tokens,
            ahead_bytes=self._prefetch_bytes,
            pool=pool,
            on_device=self._device is not None,
        )
        arrived: dict[int, Loaded] = {}
        on_their_way: deque[tuple[torch.cuda.Event, list[Loaded]]] = deque()
        try:
            while (positions := order.next_batch()) is not None:
                while not arrived.keys() >= set(positions):
                    arrived |= {loaded.layout.position: loaded for loaded in reader.next_block()}
                loaded = [arrived.pop(position) for position in positions]
                items = [make_item(self.run, p.layout, p.buffer, self._device, self._max_tokens) for p in loaded]
                batch = self._collate(items)
                if self._device is not None:
                    # Copies to the GPU still read the buffers.
                    event = torch.cuda.Event()  # type: ignore[no-untyped-call]
                    event.record(torch.cuda.current_stream(self._device))
                    on_their_way.append((event, loaded))
                    while len(on_their_way) > 1:
                        on_their_way.popleft()[0].synchronize()
                # Or they would live on while the trainer trains.
                del items, loaded
                yield batch
        finally:
            reader.close()
            for event, _ in on_their_way:
                event.synchronize()
