"""`bf16-hl-zstd`: the low bytes as they are, the high bytes (sign and exponent) Huffman-coded by zstd. Lossless.

A hidden state's low byte is noise; its high byte carries some 2.9 bits. Matches do not help on either, so zstd is set
to find next to none: what is left is its Huffman coder, which comes within a hundredth of the order-0 entropy.
"""

import numpy as np
import zstandard

from hsray.codecs.encoding import Bits, Bytes, EncodedBytes, EncodingError
from hsray.site_storage import CodecName

# High bytes of one zstd frame. Part of the format.
FRAME_VALUES = 1 << 18
# A skippable frame: decoders of plain zstd pass over it.
SKIPPABLE_MAGIC = 0x184D2A50
# Of real states; the figures are in docs/format.md.
_EXPECTED_RATIO = 0.68

_PARAMETERS = zstandard.ZstdCompressionParameters(
    strategy=zstandard.STRATEGY_FAST,
    target_length=0,
    min_match=7,
    hash_log=6,
    chain_log=6,
    search_log=1,
    window_log=17,
    write_content_size=True,
    write_checksum=False,
)


class BytePlanes:
    name: CodecName = "bf16-hl-zstd"
    is_lossless = True

    def encode(self, states: Bits) -> memoryview:
        values = states.reshape(-1)
        count = len(values)
        starts = range(0, count, FRAME_VALUES)
        head = count + _table_bytes(len(starts))
        payload = np.empty(self.size_limits(*states.shape)[1], np.uint8)
        low = payload[:count]
        sizes = np.empty(len(starts), "<u4")
        high = np.empty(min(count, FRAME_VALUES), np.uint8)
        compressor = zstandard.ZstdCompressor(compression_params=_PARAMETERS)
        end = head
        for number, start in enumerate(starts):
            part = values[start : start + FRAME_VALUES]
            # As numbers, not as bytes two apart: numpy has vector code for these casts.
            np.copyto(low[start : start + len(part)], part, casting="unsafe")
            plane = np.right_shift(part, 8, out=high[: len(part)], casting="unsafe")
            frame = compressor.compress(plane.data)
            payload[end : end + len(frame)] = np.frombuffer(frame, np.uint8)
            sizes[number] = len(frame)
            end += len(frame)
        table = payload[count:head]
        table[:8] = np.array([SKIPPABLE_MAGIC, sizes.nbytes], "<u4").view(np.uint8)
        table[8:] = sizes.view(np.uint8)
        return payload[:end].data

    def decode(self, payload: EncodedBytes, out: Bits) -> None:
        data = np.frombuffer(payload, np.uint8)
        values = out.reshape(-1)
        low, frames = data[: len(values)], _frames(data, len(values))
        decompressor = zstandard.ZstdDecompressor()
        for start, frame in zip(range(0, len(values), FRAME_VALUES), frames, strict=True):
            part = values[start : start + FRAME_VALUES]
            plane = decompress_frame(decompressor, frame, len(part))
            np.multiply(plane, 256, out=part, dtype=np.uint16)
            np.bitwise_or(part, low[start : start + len(part)], out=part)

    def size_limits(self, rows: int, hidden: int) -> tuple[int, int]:
        count = rows * hidden
        frames = -(-count // FRAME_VALUES)
        least = count + _table_bytes(frames)
        # ZSTD_COMPRESSBOUND of each frame, and some.
        return least, least + count + (count >> 8) + 128 * frames

    def expected_bytes(self, rows: int, hidden: int) -> int:
        return round(_EXPECTED_RATIO * 2 * rows * hidden)


def high_plane(payload: EncodedBytes, count: int) -> Bytes:
    """The high bytes of `count` values. Raises EncodingError."""
    data = np.frombuffer(payload, np.uint8)
    plane = np.empty(count, np.uint8)
    decompressor = zstandard.ZstdDecompressor()
    for start, frame in zip(range(0, count, FRAME_VALUES), _frames(data, count), strict=True):
        part = plane[start : start + FRAME_VALUES]
        part[:] = decompress_frame(decompressor, frame, len(part))
    return plane


def decompress_frame(decompressor: zstandard.ZstdDecompressor, frame: memoryview, size: int) -> Bytes:
    """What a frame holds, which must be `size` bytes. Raises EncodingError."""
    try:
        # Looked at first: the decompressor allocates whatever a frame says.
        said = zstandard.frame_content_size(frame)
        if said != size:
            raise EncodingError(f"a zstd frame of {said} bytes, where {size} are due")
        plane = np.frombuffer(decompressor.decompress(frame, allow_extra_data=False), np.uint8)
    except zstandard.ZstdError as err:
        raise EncodingError(f"the high plane is damaged: {err}") from err
    return plane


def _frames(data: Bytes, count: int) -> list[memoryview]:
    """The frames of `count` high bytes, by the table before them. Raises EncodingError."""
    number = -(-count // FRAME_VALUES)
    head = count + _table_bytes(number)
    if len(data) < head:
        raise EncodingError(f"{len(data)} bytes, where {count} values take more than {head}")
    table = data[count:head].tobytes()
    magic, nbytes = np.frombuffer(table[:8], "<u4").tolist()
    if magic != SKIPPABLE_MAGIC or nbytes != 4 * number:
        raise EncodingError(f"no table of {number} frames after the low plane of {count} bytes")
    sizes: list[int] = np.frombuffer(table[8:], "<u4").tolist()
    if head + sum(sizes) != len(data):
        raise EncodingError(f"{len(data)} bytes, where the frames end at {head + sum(sizes)}")
    frames = []
    for size in sizes:
        frames.append(data[head : head + size].data)
        head += size
    return frames


def _table_bytes(frames: int) -> int:
    return 8 + 4 * frames
