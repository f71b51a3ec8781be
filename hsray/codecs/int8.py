"""`int8-block64-outlier4`: 8-bit integers with a scale for each 64 channels; the four largest values of a row as they
are. Lossy.

The few channels that are a thousand times larger than the rest would take all of an 8-bit range. Kept apart, they are
exact, and the rest has a range of its own.
"""

from typing import TypeVar

import numpy as np
import numpy.typing as npt

from hsray.codecs.encoding import (
    Bits,
    Bytes,
    EncodedBytes,
    EncodingError,
    check_size,
    magnitudes,
    row_blocks,
    to_bits,
    to_float32,
)
from hsray.site_storage import CodecName

_Scalar = TypeVar("_Scalar", bound=np.generic)

# The largest finite bfloat16.
_LARGEST = np.float32(2.0**128 - 2.0**120)
BLOCK = 64
OUTLIERS = 4
_LEVELS = np.float32(127)
# The smallest normal bfloat16: a block of zeros has a scale all the same.
_LEAST_SCALE = np.uint16(0x0080)


class Int8Blocks:
    name: CodecName = "int8-block64-outlier4"
    is_lossless = False

    def encode(self, states: Bits) -> memoryview:
        rows, hidden = states.shape
        payload = np.empty(payload_bytes(rows, hidden), np.uint8)
        channels, outliers, scales, levels = _sections(payload, rows, hidden)
        for block in row_blocks(rows, hidden):
            bits = states[block]
            number = np.arange(len(bits))[:, None]
            # Signed, so that what is taken can be put below everything else.
            keys = magnitudes(bits).view(np.int16)
            taken = channels[block]
            for nth in range(taken.shape[1]):
                taken[:, nth] = keys.argmax(axis=1)
                keys[number[:, 0], taken[:, nth]] = -1
            taken.sort(axis=1)
            outliers[block] = bits[number, taken]
            keys[number, taken] = 0
            rest = to_float32(bits)
            rest[number, taken] = 0
            largest = to_float32(_by_block(keys).max(axis=2).view(np.uint16))
            scale = np.maximum(_round_up(largest / _LEVELS), _LEAST_SCALE)
            scales[block] = scale
            quotients = _by_block(rest) / to_float32(scale)[:, :, None]
            np.rint(quotients, out=quotients)
            # A scale is rounded up, and 127 of it may be more than there is: infinity, once decoded.
            if to_float32(scale).max() > _LARGEST / _LEVELS:
                most = np.floor(_LARGEST / np.maximum(to_float32(scale), 1))[:, :, None]
                np.clip(quotients, -most, most, out=quotients)
            levels[block] = quotients.reshape(len(bits), -1)[:, :hidden].astype(np.int8)
        return payload.data

    def decode(self, payload: EncodedBytes, out: Bits) -> None:
        rows, hidden = out.shape
        channels, outliers, scales, levels = split_payload(np.frombuffer(payload, np.uint8), rows, hidden)
        for block in row_blocks(rows, hidden):
            values = _by_block(levels[block].astype(np.float32))
            values *= to_float32(scales[block])[:, :, None]
            out[block] = to_bits(values.reshape(len(values), -1)[:, :hidden])
            out[block][np.arange(len(values))[:, None], channels[block]] = outliers[block]

    def size_limits(self, rows: int, hidden: int) -> tuple[int, int]:
        return payload_bytes(rows, hidden), payload_bytes(rows, hidden)

    def expected_bytes(self, rows: int, hidden: int) -> int:
        return payload_bytes(rows, hidden)


def payload_bytes(rows: int, hidden: int) -> int:
    return rows * (4 * kept_channels(hidden) + 2 * -(-hidden // BLOCK) + hidden)


def kept_channels(hidden: int) -> int:
    """How many values of a row are kept as they are."""
    return min(OUTLIERS, hidden)


def split_payload(data: Bytes, rows: int, hidden: int) -> tuple[Bits, Bits, Bits, npt.NDArray[np.int8]]:
    """As `_sections`, after a look at what they hold. Raises EncodingError."""
    check_size(len(data), payload_bytes(rows, hidden), rows, hidden)
    channels, outliers, scales, levels = _sections(data, rows, hidden)
    if rows and channels.max() >= hidden:
        raise EncodingError(f"channel {channels.max()} of {hidden}")
    if not ((scales >= _LEAST_SCALE) & (scales < 0x7F80)).all():
        raise EncodingError("a scale is not a positive number")
    return channels, outliers, scales, levels


def _sections(data: Bytes, rows: int, hidden: int) -> tuple[Bits, Bits, Bits, npt.NDArray[np.int8]]:
    """The parts of a payload: channels `[rows, 4]`, their values, scales `[rows, blocks]`, levels `[rows, hidden]`."""
    kept, blocks = kept_channels(hidden), -(-hidden // BLOCK)
    sizes = np.cumsum([0, 2 * rows * kept, 2 * rows * kept, 2 * rows * blocks])
    channels, outliers, scales, levels = np.split(data, sizes[1:])
    if data.ctypes.data % 2:
        # A payload inside a file may begin anywhere.
        channels, outliers, scales = channels.copy(), outliers.copy(), scales.copy()
    return (
        channels.view("<u2").reshape(rows, kept),
        outliers.view("<u2").reshape(rows, kept),
        scales.view("<u2").reshape(rows, blocks),
        levels.view(np.int8).reshape(rows, hidden),
    )


def _by_block(values: npt.NDArray[_Scalar]) -> npt.NDArray[_Scalar]:
    """`[rows, hidden]` as `[rows, blocks, 64]`, zeros at the end."""
    rows, hidden = values.shape
    missing = -hidden % BLOCK
    if missing:
        values = np.pad(values, ((0, 0), (0, missing)))
    return values.reshape(rows, -1, BLOCK)


def _round_up(values: npt.NDArray[np.float32]) -> Bits:
    """Bits of the smallest bfloat16 that is not below; for values from 0 up."""
    return ((values.view(np.uint32) + np.uint32(0xFFFF)) >> np.uint32(16)).astype(np.uint16)
