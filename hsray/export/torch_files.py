"""Files that `torch.save` makes. Torch is loaded when the first one is written."""

from collections.abc import Mapping
from typing import IO, TYPE_CHECKING, Any, cast

import ml_dtypes
import numpy as np
import numpy.typing as npt

from hsray.upload import Upload

if TYPE_CHECKING:
    import torch


def save(content: Any, out: Upload) -> None:
    """`torch.save` into an upload."""
    import torch

    torch.save(content, cast(IO[bytes], _Copies(out)))


def tensors(arrays: Mapping[str, npt.NDArray[Any]]) -> "dict[str, torch.Tensor]":
    return {name: tensor(array) for name, array in arrays.items()}


def tensor(array: npt.NDArray[Any]) -> "torch.Tensor":
    """A torch tensor over the memory of a numpy array; bfloat16 too, which numpy does not know."""
    import torch

    if not array.flags.writeable:
        array = array.copy()  # torch warns of others
    if array.dtype == np.dtype(ml_dtypes.bfloat16):
        return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(array)


class _Copies:
    """Torch hands out memory of its own that it uses again; an upload wants what does not change."""

    def __init__(self, out: Upload) -> None:
        self._out = out

    def write(self, data: Any) -> int:
        return self._out.write(bytes(data))

    def flush(self) -> None:
        self._out.flush()
