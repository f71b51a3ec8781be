"""Which of how many processes of a training job this is."""

import torch.distributed

from hsray.errors import ConfigError


def resolve_rank(rank: int | None, world_size: int | None) -> tuple[int, int]:
    """`(rank, world_size)` as given, or those of torch.distributed, or (0, 1) where that is not in use.

    Raises:
        ConfigError: only one of them is given, or the rank is not below the world size.
    """
    if (rank is None) != (world_size is None):
        raise ConfigError(f"give rank and world_size together, got rank={rank} and world_size={world_size}")
    if rank is None or world_size is None:
        if not (torch.distributed.is_available() and torch.distributed.is_initialized()):
            return 0, 1
        return torch.distributed.get_rank(), torch.distributed.get_world_size()
    if not 0 <= rank < world_size:
        raise ConfigError(f"rank must be 0 to world_size - 1, got rank={rank} of {world_size}")
    return rank, world_size
