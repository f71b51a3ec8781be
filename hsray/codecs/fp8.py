"""`fp8-token`: each row as float8 (e4m3fn) with a float32 scale of its own. Lossy.

The scale puts the row's largest value at 448, the largest of e4m3fn. Without one, the massive activations that most
models have at single tokens would be cut off.
"""

import functools

import ml_dtypes
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

_LARGEST = np.float32(448)
# The smallest normal float32: a row of zeros has a scale all the same.
_LEAST_SCALE = np.float32(2.0**-126)


class Fp8Token:
    name: CodecName = "fp8-token"
    is_lossless = False

    def encode(self, states: Bits) -> memoryview:
        rows, hidden = states.shape
        payload = np.empty(rows * (4 + hidden), np.uint8)
        scales = payload[: 4 * rows].view("<f4")
        codes = payload[4 * rows :].reshape(rows, hidden)
        nearest = _nearest_codes()
        for block in row_blocks(rows, hidden):
            bits = states[block]
            largest = to_float32(magnitudes(bits).max(axis=1))
            scale = scales[block]
            np.maximum(largest / _LARGEST, _LEAST_SCALE, out=scale)
            quotients = to_float32(bits)
            quotients /= scale[:, None]
            np.take(nearest, _round_to_odd(quotients), out=codes[block], mode="clip")
        return payload.data

    def decode(self, payload: EncodedBytes, out: Bits) -> None:
        rows, hidden = out.shape
        scales, codes = split_payload(np.frombuffer(payload, np.uint8), rows, hidden)
        numbers = _code_values()
        for block in row_blocks(rows, hidden):
            values = np.take(numbers, codes[block], mode="clip")
            values *= scales[block][:, None]
            out[block] = to_bits(values)

    def size_limits(self, rows: int, hidden: int) -> tuple[int, int]:
        return rows * (4 + hidden), rows * (4 + hidden)

    def expected_bytes(self, rows: int, hidden: int) -> int:
        return rows * (4 + hidden)


def split_payload(data: Bytes, rows: int, hidden: int) -> tuple[npt.NDArray[np.float32], Bytes]:
    """Scales `[rows]` and codes `[rows, hidden]`. Raises EncodingError."""
    check_size(len(data), rows * (4 + hidden), rows, hidden)
    # A payload inside a file may begin anywhere.
    scales = np.frombuffer(data[: 4 * rows].tobytes(), "<f4")
    if not (np.isfinite(scales) & (scales > 0)).all():
        raise EncodingError("a scale is not a positive number")
    return scales, data[4 * rows :].reshape(rows, hidden)


def _round_to_odd(values: npt.NDArray[np.float32]) -> Bits:
    """The upper half of each float32, with its last bit set where the lower half was not zero.

    Seven bits of mantissa and that one are enough to round to three correctly, so that a table of all of them does.
    """
    whole = values.view(np.uint32)
    rest = whole.astype(np.uint16)  # the lower half
    np.minimum(rest, 1, out=rest)
    upper = np.right_shift(whole, 16, dtype=np.uint32).astype(np.uint16)
    upper |= rest
    return upper


@functools.cache
def _nearest_codes() -> Bytes:
    """The e4m3fn code nearest to each bfloat16, ties to even."""
    values = to_float32(np.arange(1 << 16, dtype=np.uint16))
    with np.errstate(invalid="ignore", over="ignore"):
        codes: Bytes = values.astype(ml_dtypes.float8_e4m3fn).view(np.uint8)
    return codes


@functools.cache
def _code_values() -> npt.NDArray[np.float32]:
    values: npt.NDArray[np.float32] = np.arange(256, dtype=np.uint8).view(ml_dtypes.float8_e4m3fn).astype(np.float32)
    return values
