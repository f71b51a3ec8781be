"""Encodings of a site's states on disk: bfloat16 bits in, bytes out, and back. docs/format.md gives the bytes.

All numbers are little-endian. A payload does not say how many rows it holds or how wide they are; the index and
`hsray.json` do. Only numpy, ml_dtypes and zstandard are used, so that a writer's thread needs no torch; each call keeps
to one core and lets the GIL go where it works.
"""

import sys
from typing import Protocol

import numpy as np
import numpy.typing as npt

from hsray.codecs.byte_planes import BytePlanes
from hsray.codecs.encoding import Bits, EncodedBytes, EncodingError
from hsray.codecs.fp8 import Fp8Token
from hsray.codecs.int8 import Int8Blocks
from hsray.site_storage import CodecName

__all__ = ["Bits", "Codec", "EncodedBytes", "EncodingError", "decode_bits", "find_codec"]

if sys.byteorder != "little":
    raise ImportError("hsray's codecs work on the memory of little-endian machines")


class Codec(Protocol):
    """One encoding of bfloat16 states.

    Attributes:
        name: as metadata spells it.
        is_lossless: whether decoding gives the same bits.
    """

    name: CodecName
    is_lossless: bool

    def encode(self, states: Bits) -> memoryview:
        """The payload of C-contiguous uint16 `[rows, hidden]`, the bits of bfloat16 values.

        Raises:
            ValueError: a lossy codec met NaN or infinity.
        """
        ...

    def decode(self, payload: EncodedBytes, out: Bits) -> None:
        """Fill `out`, C-contiguous uint16 `[rows, hidden]`.

        Raises:
            EncodingError: the payload is not one of that many rows.
        """
        ...

    def size_limits(self, rows: int, hidden: int) -> tuple[int, int]:
        """Smallest and largest payload of so many rows, in bytes."""
        ...

    def expected_bytes(self, rows: int, hidden: int) -> int:
        """What a payload of real states takes; exact where the size is fixed."""
        ...


_CODECS: dict[CodecName, Codec] = {codec.name: codec for codec in (BytePlanes(), Fp8Token(), Int8Blocks())}


def find_codec(name: CodecName) -> Codec | None:
    """The codec of this name; None for `none`, the plain tensor."""
    return None if name == "none" else _CODECS[name]


def decode_bits(name: CodecName, payload: EncodedBytes, rows: int, hidden: int, out: Bits | None = None) -> Bits:
    """A payload as uint16 `[rows, hidden]`, the bits of bfloat16 values: in `out`, or in an array of its own.

    Args:
        name: any codec but `none`.

    Raises:
        EncodingError: the payload is not one of that many rows.
    """
    target: npt.NDArray[np.uint16] = np.empty((rows, hidden), np.uint16) if out is None else out
    _CODECS[name].decode(payload, target)
    return target
