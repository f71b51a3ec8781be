"""One file of another tool, read and checked: tokens and states by site.

Torch and safetensors read the containers, never a pickle that can run code. What is wrong with a file is a `BadFile`
with a reason; what nobody can know from the files is a ConfigError that names the option.
"""

import gzip
import io
import pickle
import zipfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import ml_dtypes
import numpy as np
import numpy.typing as npt

from hsray.errors import HsrayError
from hsray.reader import StateArray
from hsray.records import IntArray, MaskArray

if TYPE_CHECKING:
    import torch

_ROWS_AT_ONCE = 4096
# As unsigned integers: the bits of the exponent, all set in NaN and infinity, and those without the sign.
_BITS: dict[str, tuple[str, int, int]] = {
    "bfloat16": ("<u2", 0x7F80, 0x7FFF),
    "float16": ("<u2", 0x7C00, 0x7FFF),
    "float32": ("<u4", 0x7F800000, 0x7FFFFFFF),
}


class BadFile(HsrayError):
    """A file that cannot become a prompt. `reason` is a short code, as in rejects; the message says more."""

    def __init__(self, reason: str, detail: str) -> None:
        super().__init__(reason, detail)
        self.reason = reason
        self.detail = detail


@dataclass(frozen=True, slots=True, eq=False)
class Stored:
    """What a file holds.

    Attributes:
        input_ids: int32 `[T]`.
        loss_mask: uint8 `[T]`; None if the file has none.
        states: by site, `[T, hidden]`, C-contiguous.
        prompt_id: its name, if the file has one.
    """

    input_ids: IntArray
    loss_mask: MaskArray | None
    states: Mapping[str, StateArray]
    prompt_id: str | None = None

    @property
    def dtype(self) -> str:
        return str(next(iter(self.states.values())).dtype)


@dataclass(frozen=True, slots=True)
class Shape:
    """What the states of every file must be.

    Attributes:
        residual: sites of inner layers, in the order of the file.
        final: the final site, or None.
        hidden_size, vocab_size: of the model.
    """

    residual: tuple[str, ...]
    final: str | None
    hidden_size: int
    vocab_size: int

    @property
    def sites(self) -> tuple[str, ...]:
        return self.residual if self.final is None else (*self.residual, self.final)


def load_torch(path: Path) -> "dict[str, Any]":
    """The dict that `torch.save` wrote, memory-mapped where it is not compressed. Raises BadFile."""
    import torch

    try:
        if path.suffix == ".gz":
            with gzip.open(path, "rb") as file:
                content = torch.load(io.BytesIO(file.read()), map_location="cpu", weights_only=True)
        else:
            mapped = zipfile.is_zipfile(path)  # torch's older container cannot be mapped
            content = torch.load(path, map_location="cpu", weights_only=True, mmap=mapped)
    except (RuntimeError, OSError, EOFError, ValueError, KeyError, pickle.UnpicklingError) as err:
        raise BadFile("unreadable", _brief(err)) from err
    if not isinstance(content, dict):
        raise BadFile("unreadable", f"it holds a {type(content).__name__}, not a dict of tensors")
    return content


def load_safetensors(path: Path) -> "dict[str, torch.Tensor]":
    """The tensors of a safetensors file, memory-mapped. Raises BadFile."""
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    try:
        tensors: dict[str, torch.Tensor] = load_file(path)
    except FileNotFoundError as err:
        raise BadFile("missing_states", "there is no such file") from err
    except (SafetensorError, OSError, ValueError) as err:
        raise BadFile("unreadable", _brief(err)) from err
    return tensors


def token_array(content: Mapping[str, Any], key: str, vocab_size: int) -> IntArray:
    """The ids under `key`, `[T]` or `[1, T]`. Raises BadFile."""
    values = _integers(content, key)
    if not len(values):
        raise BadFile("empty", f"{key} has no token")
    if values.min() < 0 or values.max() >= vocab_size:
        raise BadFile("bad_ids", f"{key} holds {values.min()} to {values.max()}, outside a vocabulary of {vocab_size}")
    return values.astype(np.int32)


def mask_array(content: Mapping[str, Any], length: int) -> MaskArray | None:
    """`loss_mask` as uint8, or None if there is none. Raises BadFile."""
    if "loss_mask" not in content:
        return None
    values = _integers(content, "loss_mask")
    if len(values) != length:
        raise BadFile("length_mismatch", f"loss_mask has {len(values)} tokens, the ids {length}")
    if not np.isin(values, (0, 1)).all():
        raise BadFile("bad_mask", "loss_mask holds other values than 0 and 1")
    return values.astype(np.uint8)


def state_tensor(content: Mapping[str, Any], key: str, length: int, width: int, what: str) -> "torch.Tensor":
    """The tensor under `key` as `[T, width]`; one of `[1, T, width]` too. Raises BadFile."""
    tensor = _tensor(content, key)
    if tensor.ndim == 3 and tensor.shape[0] == 1:
        tensor = tensor[0]
    if tensor.ndim != 2 or tensor.shape[1] != width:
        raise BadFile("shape", f"{key} is {list(content[key].shape)}, not [{length}, {width}]: {what}")
    if tensor.shape[0] != length:
        raise BadFile("length_mismatch", f"{key} has {tensor.shape[0]} tokens, the ids {length}")
    return tensor


def split_states(stacked: "torch.Tensor", sites: Sequence[str]) -> dict[str, StateArray]:
    """`[T, sites, hidden]` by site, each C-contiguous."""
    return {site: as_array(stacked[:, number]) for number, site in enumerate(sites)}


def as_array(tensor: "torch.Tensor") -> StateArray:
    """A state as numpy. Raises BadFile for a dtype that runs do not have."""
    import torch

    if tensor.dtype not in (torch.bfloat16, torch.float16, torch.float32):
        raise BadFile("dtype", f"states are {str(tensor.dtype).removeprefix('torch.')}")
    tensor = tensor.contiguous()
    if tensor.dtype == torch.bfloat16:
        return tensor.view(torch.int16).numpy().view(ml_dtypes.bfloat16)
    array: StateArray = tensor.numpy()
    return array


def check_values(states: Mapping[str, StateArray]) -> None:
    """Every value is finite and no row is zero, as in everything hsray captures. Raises BadFile."""
    for site, state in states.items():
        unsigned, exponent, magnitude = _BITS[str(state.dtype)]
        bits = state.view(unsigned)
        for start in range(0, len(bits), _ROWS_AT_ONCE):
            part = bits[start : start + _ROWS_AT_ONCE]
            if (bad := ((part & exponent) == exponent).any(axis=1)).any():
                raise BadFile(
                    "not_finite", f"NaN or infinity in {site} at position {start + int(bad.argmax())} (0-based)"
                )
            if (bad := ((part & magnitude) == 0).all(axis=1)).any():
                raise BadFile("zeros", f"all zeros in {site} at position {start + int(bad.argmax())} (0-based)")


def dequantize(stacked: "torch.Tensor", scales: "torch.Tensor") -> "torch.Tensor":
    """What hs-connectors makes of its fp8 states: `[T, n, hidden]` times a scale a token, in bfloat16."""
    import torch

    return stacked.to(torch.bfloat16) * scales.to(torch.bfloat16)


def _integers(content: Mapping[str, Any], key: str) -> npt.NDArray[np.int64]:
    tensor = _tensor(content, key)
    if tensor.ndim == 2 and tensor.shape[0] == 1:
        tensor = tensor[0]
    if tensor.ndim != 1 or tensor.is_floating_point() or tensor.is_complex():
        raise BadFile("shape", f"{key} is {tensor.dtype} {list(tensor.shape)}, not integers [T]")
    import torch

    values: npt.NDArray[np.int64] = tensor.to(torch.int64).numpy()
    return values


def _tensor(content: Mapping[str, Any], key: str) -> "torch.Tensor":
    import torch

    value = content.get(key)
    if not isinstance(value, torch.Tensor):
        found = ", ".join(sorted(map(str, content))) or "nothing"
        raise BadFile("missing_key", f"it has no tensor {key}; it holds {found}")
    return value


def _brief(err: BaseException) -> str:
    text = str(err).strip().splitlines()
    return f"{type(err).__name__}: {text[0][:200] if text else ''}"
