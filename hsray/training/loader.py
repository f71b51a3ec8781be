"""The short way: batches of a run, epoch after epoch, from where a checkpoint left off."""

from collections.abc import Iterator, Mapping
from typing import Any

from torch.utils.data import DataLoader

from hsray.errors import ConfigError
from hsray.training.collate import Batch
from hsray.training.state import State
from hsray.training.stream import PromptStream


class Loader:
    """Iterates over a `PromptStream`, once per `for`, and counts what it has given out.

        loader = Loader(PromptStream(url, batch_tokens=8192, collate=Eagle3Collate(run)))
        for epoch in range(3):
            for batch in loader:
                ...                                      # train, and now and then:
                checkpoint["data"] = loader.state_dict()

    Each `for` gives one epoch from its start, or from where `load_state_dict` says, and then the next one.

    Args:
        stream: where batches come from.
        num_workers: processes that read and collate. With 0, threads of this process read ahead, which is enough to
            saturate most networks; take workers where `collate` is slow.
        options: of `torch.utils.data.DataLoader`, such as `multiprocessing_context`, `prefetch_factor`, `pin_memory`.

    Raises:
        ConfigError: `persistent_workers`, which could not be told where to go on.
    """

    def __init__(self, stream: PromptStream, num_workers: int = 0, **options: Any) -> None:
        if options.get("persistent_workers"):
            raise ConfigError("persistent_workers: such workers cannot be told where to go on; leave it out")
        self.stream = stream
        self._num_workers = num_workers
        self._given = 0
        self._starts_at = 0
        self._loader: DataLoader[Batch] = DataLoader(stream, batch_size=None, num_workers=num_workers, **options)

    @property
    def epoch(self) -> int:
        """The epoch that is being given out, or comes next."""
        return self.stream.epoch

    def __len__(self) -> int:
        """Batches of this rank in the epoch. Counts them: some seconds per million prompts."""
        return self.stream.num_batches(self._num_workers)

    def __iter__(self) -> Iterator[Batch]:
        self._given, self._starts_at = self._starts_at, 0
        if not self._given:
            self.stream.set_epoch(self.epoch)
        for batch in self._loader:
            self._given += 1
            yield batch
        self.stream.set_epoch(self.epoch + 1)
        self._given = 0

    def state_dict(self) -> State:
        """Where the next epoch goes on if it starts from here: after the batch that was given out last."""
        return self.stream.state_after(self._given or self._starts_at, self._num_workers)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Let the next `for` go on from there. Raises ConfigError as `PromptStream.load_state_dict`."""
        self.stream.load_state_dict(state)
        self._given, self._starts_at = 0, state["batches"]
