"""What the codecs share: the error, how work is cut, and bfloat16 bits as float32 and back."""

from collections.abc import Iterator

import ml_dtypes
import numpy as np
import numpy.typing as npt

Bits = npt.NDArray[np.uint16]
Bytes = npt.NDArray[np.uint8]
EncodedBytes = bytes | bytearray | memoryview | Bytes

# Values that are worked on together: what they need on the way stays in a core's second-level cache.
BLOCK_VALUES = 1 << 17
# The exponent bits of a bfloat16, all set in NaN and infinity; and all bits but the sign.
_EXPONENT = 0x7F80
_MAGNITUDE = np.uint16(0x7FFF)


class EncodingError(ValueError):
    """A payload is not what the codec writes. The message says in which way, the caller adds where."""


def row_blocks(rows: int, hidden: int) -> Iterator[slice]:
    """Consecutive rows of about BLOCK_VALUES values."""
    step = max(1, BLOCK_VALUES // hidden)
    for start in range(0, rows, step):
        yield slice(start, min(start + step, rows))


def magnitudes(bits: Bits) -> Bits:
    """The bits without the sign: they order as the absolute values do.

    Raises:
        ValueError: there is NaN or infinity.
    """
    keys: Bits = bits & _MAGNITUDE
    if keys.max(initial=0) >= _EXPONENT:
        raise ValueError("NaN or infinity cannot be stored by a lossy codec")
    return keys


def to_float32(bits: Bits) -> npt.NDArray[np.float32]:
    """Values of bfloat16 bits."""
    values: npt.NDArray[np.float32] = bits.view(ml_dtypes.bfloat16).astype(np.float32)
    return values


def to_bits(values: npt.NDArray[np.float32]) -> Bits:
    """Bits of the nearest bfloat16 values, ties to even."""
    bits: Bits = values.astype(ml_dtypes.bfloat16).view(np.uint16)
    return bits


def check_size(size: int, expected: int, rows: int, hidden: int) -> None:
    if size != expected:
        raise EncodingError(f"{size} bytes, where {rows} rows of {hidden} values take {expected}")
