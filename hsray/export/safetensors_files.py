"""The safetensors container, written without copying tensors: the library's writers hold a file twice in memory.

Eight bytes of little-endian length, a JSON header of that length (padded with spaces to a multiple of 8) with dtype,
shape and offsets of each tensor, then the tensors one after the other.
"""

import json
from collections.abc import Mapping
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt

from hsray.export.formats import raw_bytes
from hsray.upload import Upload

_NAMES: dict[np.dtype[Any], str] = {
    np.dtype(np.int64): "I64",
    np.dtype(np.int32): "I32",
    np.dtype(np.uint8): "U8",
    np.dtype(np.float32): "F32",
    np.dtype(np.float16): "F16",
    np.dtype(ml_dtypes.bfloat16): "BF16",
}


def save(arrays: Mapping[str, npt.NDArray[Any]], metadata: Mapping[str, str], out: Upload) -> None:
    """Write one file.

    Args:
        arrays: C-contiguous, little-endian. Larger items first, or tensors do not lie aligned.
        metadata: text about the file.
    """
    header: dict[str, Any] = {"__metadata__": dict(metadata)} if metadata else {}
    end = 0
    for name, array in arrays.items():
        header[name] = {
            "dtype": _NAMES[array.dtype],
            "shape": list(array.shape),
            "data_offsets": [end, end + array.nbytes],
        }
        end += array.nbytes
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    out.write(len(text).to_bytes(8, "little") + text)
    for array in arrays.values():
        out.write(raw_bytes(array))
