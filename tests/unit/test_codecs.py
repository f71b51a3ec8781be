"""Codecs: the bytes on disk, what they lose, and that damage is an error."""

import io
import struct
from collections.abc import Callable

import ml_dtypes
import numpy as np
import pytest
import torch
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as st_numpy

from hsray.codecs import Bits, EncodingError, decode_bits, find_codec
from hsray.codecs.byte_planes import FRAME_VALUES
from hsray.codecs.encoding import BLOCK_VALUES
from hsray.codecs.on_torch import decode_torch
from hsray.site_storage import CODECS, CodecName

ENCODED: list[CodecName] = [name for name in CODECS if name != "none"]
LOSSY: list[CodecName] = ["fp8-token", "int8-block64-outlier4"]
PLANES: CodecName = "bf16-hl-zstd"


def encode(name: CodecName, bits: Bits) -> bytes:
    codec = find_codec(name)
    assert codec is not None
    return bytes(codec.encode(bits))


def to_bits(values: "np.ndarray[tuple[int, ...], np.dtype[np.float32]] | list[list[float]]") -> Bits:
    return np.asarray(values, np.float32).astype(ml_dtypes.bfloat16).view(np.uint16)


def to_values(bits: Bits) -> "np.ndarray[tuple[int, ...], np.dtype[np.float64]]":
    return bits.view(ml_dtypes.bfloat16).astype(np.float64)


def states(rows: int, hidden: int, seed: int = 0) -> Bits:
    """Like hidden states: channels of different size, and one row with massive activations."""
    rng = np.random.default_rng(seed)
    values = rng.standard_normal((rows, hidden)) * np.exp(rng.standard_normal(hidden))
    values[0, [1 % hidden, hidden // 2]] *= 3000
    return to_bits(values.astype(np.float32))


def test_none_has_no_codec() -> None:
    assert find_codec("none") is None


# The bytes of docs/format.md, read by hand.


def read_planes(payload: bytes, rows: int, hidden: int) -> Bits:
    count = rows * hidden
    low, rest = payload[:count], payload[count:]
    magic, size = struct.unpack("<II", rest[:8])
    assert magic == 0x184D2A50
    assert size == 4 * -(-count // FRAME_VALUES)
    # A decoder that knows nothing of the table passes over it.
    high = zstandard.ZstdDecompressor().stream_reader(io.BytesIO(rest), read_across_frames=True).read()
    assert len(high) == count
    return np.array([a | b << 8 for a, b in zip(low, high, strict=True)], np.uint16).reshape(rows, hidden)


def e4m3fn(code: int) -> float:
    exponent, mantissa = code >> 3 & 0xF, code & 7
    size = mantissa * 2.0**-9 if exponent == 0 else (8 + mantissa) * 2.0 ** (exponent - 10)
    return -size if code >> 7 else size


def read_fp8(payload: bytes, rows: int, hidden: int) -> Bits:
    scales = struct.unpack(f"<{rows}f", payload[: 4 * rows])
    codes = payload[4 * rows :]
    assert len(codes) == rows * hidden
    values = np.array([e4m3fn(code) for code in codes], np.float32).reshape(rows, hidden)
    return to_bits(values * np.array(scales, np.float32)[:, None])


def read_int8(payload: bytes, rows: int, hidden: int) -> Bits:
    kept, blocks = min(4, hidden), -(-hidden // 64)
    channels = struct.unpack(f"<{rows * kept}H", payload[: 2 * rows * kept])
    outliers = struct.unpack(f"<{rows * kept}H", payload[2 * rows * kept :][: 2 * rows * kept])
    rest = payload[4 * rows * kept :]
    scales = to_values(np.frombuffer(rest[: 2 * rows * blocks], "<u2"))
    levels = struct.unpack(f"<{rows * hidden}b", rest[2 * rows * blocks :])
    values = [level * scales[n // hidden * blocks + n % hidden // 64] for n, level in enumerate(levels)]
    bits = to_bits(np.array(values, np.float32).reshape(rows, hidden))
    for i in range(rows):
        for j in range(kept):
            assert levels[i * hidden + channels[i * kept + j]] == 0
            bits[i, channels[i * kept + j]] = outliers[i * kept + j]
        assert list(channels[i * kept :][:kept]) == sorted(set(channels[i * kept :][:kept]))
    return bits


BY_HAND: dict[CodecName, Callable[[bytes, int, int], Bits]] = {
    "bf16-hl-zstd": read_planes,
    "fp8-token": read_fp8,
    "int8-block64-outlier4": read_int8,
}
# The two largest prime rows and columns make blocks and frames end within a row.
SHAPES = [(1, 1), (1, 3), (2, 64), (3, 65), (17, 130)]


@pytest.mark.parametrize("name", ENCODED)
@pytest.mark.parametrize(("rows", "hidden"), SHAPES)
def test_the_bytes_are_those_of_the_documentation(name: CodecName, rows: int, hidden: int) -> None:
    bits = states(rows, hidden)
    payload = encode(name, bits)

    assert np.array_equal(BY_HAND[name](payload, rows, hidden), decode_bits(name, payload, rows, hidden))


def test_vector_of_byte_planes() -> None:
    bits = np.array([[0x3F80, 0xBF80, 0x0000], [0x7F7F, 0x4049, 0xC2F7]], np.uint16)
    # Low bytes, a skippable frame with the size of the one that follows, and six bytes that zstd leaves as they are.
    payload = bytes.fromhex("8080007f49f7502a4d18040000000f00000028b52ffd20063100003fbf007f40c2")
    # Of 512 bytes 0x3f and 0x40, compressed.
    packed = bytes.fromhex("502a4d18040000001300000028b52ffd6000014d0000103f3f0100fb2ac002")
    high = np.full(512, 0x3F, np.uint16)
    high[zstandard_high(packed) == 0x40] = 0x40

    assert np.array_equal(decode_bits(PLANES, payload, 2, 3), bits)
    assert np.array_equal(decode_bits(PLANES, bytes(512) + packed, 8, 64), (high << 8).reshape(8, 64))


def zstandard_high(packed: bytes) -> "np.ndarray[tuple[int], np.dtype[np.uint8]]":
    return np.frombuffer(zstandard.ZstdDecompressor().decompress(packed[12:]), np.uint8)


def test_vector_of_fp8() -> None:
    bits = to_bits([[1.0, -2.0, 0.3, 448.0], [0.0, 0.0, 0.0, 0.0], [-0.001, 3e38, 7.0, 0.015625]])
    payload = bytes.fromhex("0000803f000080009224017b38c02a7e00000000807e0000")

    assert encode("fp8-token", bits) == payload
    decoded = decode_bits("fp8-token", payload, 3, 4)
    assert decoded.tolist() == [[0x3F80, 0xC000, 0x3EA0, 0x43E0], [0, 0, 0, 0], [0x8000, 0x7F62, 0, 0]]


def test_vector_of_int8() -> None:
    values = np.zeros((2, 66), np.float32)
    values[0] = np.arange(66) - 20
    values[0, [5, 64]] = 1000, -3000
    values[1, [0, 65]] = -0.5, 2
    payload = bytes.fromhex(
        "05003f0040004100" "0000010002004100"  # channels
        "7a442c423cc53442" "00bf000000000040"  # their values
        "aa3e8000" "80008000"  # scales
        "c4c7cacdd000d6d9dcdfe2e5e8ebeef1f4f7fafd000306090c0f1215181b1e2124272a2d303336393c3f4245484b4e5154575a5d6063"
        "66696c6f7275787b7e000000"
    ) + bytes(66)  # fmt: skip

    assert encode("int8-block64-outlier4", to_bits(values)) == payload
    decoded = to_values(decode_bits("int8-block64-outlier4", payload, 2, 66))
    # Largest of the first block without its outliers: 42, in steps of 0.33203125.
    assert decoded[0, [0, 5, 19, 62, 63, 64]].tolist() == [-19.875, 1000, -0.99609375, 41.75, 43, -3008]
    assert decoded[1, [0, 1, 65]].tolist() == [-0.5, 0, 2]


# What they lose.


@settings(max_examples=60, deadline=None)
@given(st_numpy.arrays(np.uint16, st.tuples(st.integers(1, 9), st.integers(1, 70))))
def test_byte_planes_give_back_every_bit_of_anything(bits: Bits) -> None:
    assert np.array_equal(decode_bits(PLANES, encode(PLANES, bits), *bits.shape), bits)


@pytest.mark.parametrize("count", [FRAME_VALUES - 1, FRAME_VALUES, FRAME_VALUES + 1, 2 * FRAME_VALUES + 7])
def test_byte_planes_of_several_frames(count: int) -> None:
    bits = states(count, 1)

    payload = encode(PLANES, bits)

    assert np.array_equal(decode_bits(PLANES, payload, count, 1), bits)
    assert struct.unpack("<I", payload[count + 4 : count + 8]) == (4 * -(-count // FRAME_VALUES),)


def finite(bits: Bits) -> Bits:
    """NaN and infinity lose a bit of their exponent."""
    return np.where(bits & 0x7F80 == 0x7F80, bits & 0xFF7F, bits)


@settings(max_examples=60, deadline=None)
@given(st_numpy.arrays(np.uint16, st.tuples(st.integers(1, 5), st.integers(1, 70))).map(finite))
def test_lossy_codecs_stay_within_half_a_step_of_any_finite_values(bits: Bits) -> None:
    original = to_values(bits)
    largest = np.abs(original).max(axis=1, keepdims=True)
    rounding = np.abs(original) * 2.0**-8 + 2.0**-133

    fp8 = to_values(decode_bits("fp8-token", encode("fp8-token", bits), *bits.shape))
    # Three bits of mantissa; below the smallest normal, steps of 2^-9 of a scale.
    allowed = np.maximum(np.abs(original) * 2.0**-4, np.maximum(largest / 448, 2.0**-126) * 2.0**-10)
    assert (np.abs(fp8 - original) <= allowed * (1 + 1e-6) + rounding).all()

    int8 = to_values(decode_bits("int8-block64-outlier4", encode("int8-block64-outlier4", bits), *bits.shape))
    kept = np.sort(np.abs(original), axis=1)[:, : max(0, original.shape[1] - 4)]
    left = kept.max(axis=1, keepdims=True, initial=0)
    # A scale is at most a bfloat16 step above a 127th of the largest.
    step = np.maximum(left / 127 * (1 + 2.0**-7), 2.0**-126)
    assert (np.abs(int8 - original) <= step / 2 * (1 + 1e-6) + rounding).all()


def test_the_largest_values_of_all_stay_finite() -> None:
    largest = np.full((3, 70), 0x7F7F, np.uint16)
    largest[1] |= 0x8000

    for name in ("fp8-token", "int8-block64-outlier4"):
        decoded = to_values(decode_bits(name, encode(name, largest), *largest.shape))
        assert (np.abs(decoded - to_values(largest)) <= 2.0**-4 * np.abs(to_values(largest))).all()


def test_massive_activations_survive_lossy_codecs() -> None:
    bits = states(64, 576)
    original = to_values(bits)

    for name, relative, cosine in (("fp8-token", 0.03, 0.9990), ("int8-block64-outlier4", 0.012, 0.9999)):
        decoded = to_values(decode_bits(name, encode(name, bits), 64, 576))
        rest = np.argsort(np.abs(original).max(axis=0))[:-4]
        assert np.linalg.norm((decoded - original)[:, rest]) < relative * np.linalg.norm(original[:, rest])
        products = (decoded * original).sum(axis=1)
        cosines = products / np.linalg.norm(decoded, axis=1) / np.linalg.norm(original, axis=1)
        assert cosines.min() > cosine


def test_fp8_codes_are_the_nearest_of_the_exact_quotients() -> None:
    bits = states(300, 97, seed=3)

    codes = np.frombuffer(encode("fp8-token", bits), np.uint8)[4 * 300 :].reshape(300, 97)

    values = bits.view(ml_dtypes.bfloat16).astype(np.float32)
    scales = np.abs(values).max(axis=1, keepdims=True) / np.float32(448)
    assert np.array_equal(codes, (values / scales).astype(ml_dtypes.float8_e4m3fn).view(np.uint8))


@pytest.mark.parametrize("name", LOSSY)
@pytest.mark.parametrize("odd", [0x7F80, 0xFF80, 0x7FC0, 0xFFFF])
def test_lossy_codecs_refuse_what_is_not_finite(name: CodecName, odd: int) -> None:
    bits = states(3, 8)
    bits[2, 7] = odd

    with pytest.raises(ValueError, match="NaN or infinity"):
        encode(name, bits)


def test_work_that_is_cut_gives_what_the_parts_give() -> None:
    rows = 2 * BLOCK_VALUES // 96 + 11
    bits = states(rows, 96)

    for name in LOSSY:
        whole = decode_bits(name, encode(name, bits), rows, 96)
        parts = [decode_bits(name, encode(name, bits[i : i + 1]), 1, 96) for i in (0, BLOCK_VALUES // 96, rows - 1)]
        assert np.array_equal(whole[[0, BLOCK_VALUES // 96, rows - 1]], np.concatenate(parts))


# Sizes, places, damage.


@pytest.mark.parametrize("name", ENCODED)
@pytest.mark.parametrize(("rows", "hidden"), [*SHAPES, (400, 700)])
def test_sizes_are_within_the_limits(name: CodecName, rows: int, hidden: int) -> None:
    codec = find_codec(name)
    assert codec is not None
    least, most = codec.size_limits(rows, hidden)
    noise = np.random.default_rng(0).integers(0, 0x7F7F, (rows, hidden), dtype=np.uint16)

    for bits in (states(rows, hidden), np.zeros((rows, hidden), np.uint16), noise):
        assert least <= len(encode(name, bits)) <= most
    if not codec.is_lossless:
        assert codec.expected_bytes(rows, hidden) == least == most


@pytest.mark.parametrize("name", ENCODED)
def test_a_payload_may_lie_anywhere_and_be_decoded_in_place(name: CodecName) -> None:
    bits = states(5, 70)
    payload = encode(name, bits)
    file = np.frombuffer(b"\0" * 3 + payload + b"\0", np.uint8)
    out = np.zeros((5, 70), np.uint16)

    returned = decode_bits(name, file[3:-1], 5, 70, out)

    assert returned is out
    assert np.array_equal(out, decode_bits(name, payload, 5, 70))


@pytest.mark.parametrize("name", ENCODED)
def test_a_payload_of_another_size_is_refused(name: CodecName) -> None:
    payload = encode(name, states(4, 70))

    for damaged in (b"", payload[:3], payload[:-1], payload + b"\0", payload[1:]):
        with pytest.raises(EncodingError):
            decode_bits(name, damaged, 4, 70)
        with pytest.raises(EncodingError):
            decode_torch(damaged, name, 4, 70)
    with pytest.raises(EncodingError):
        decode_bits(name, payload, 5, 70)


def test_damage_that_shows_is_refused_and_never_crashes() -> None:
    """Without hashes: whatever one byte is changed to, decoding gives an error or an array."""
    for name in ENCODED:
        payload = encode(name, states(3, 66))
        refused = 0
        for at in range(len(payload)):
            damaged = bytearray(payload)
            damaged[at] ^= 0xFF
            try:
                assert decode_bits(name, damaged, 3, 66).shape == (3, 66)
            except EncodingError:
                refused += 1
        assert refused > 0


@pytest.mark.parametrize("name", ENCODED)
def test_torch_decodes_to_the_same_bits(name: CodecName) -> None:
    for rows, hidden in [*SHAPES, (300, 577)]:
        payload = encode(name, states(rows, hidden))
        expected = decode_bits(name, payload, rows, hidden)
        for raw in (payload, np.frombuffer(bytearray(payload), np.uint8)):
            for device in (None, "cpu", torch.device("cpu")):
                tensor = decode_torch(raw, name, rows, hidden, device)
                assert tensor.dtype == torch.bfloat16
                assert np.array_equal(tensor.view(torch.int16).numpy().view(np.uint16), expected)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA GPU")
@pytest.mark.parametrize("name", ENCODED)
def test_a_gpu_decodes_to_the_same_bits(name: CodecName) -> None:
    payload = encode(name, states(513, 4096))

    tensor = decode_torch(payload, name, 513, 4096, "cuda")

    expected = decode_bits(name, payload, 513, 4096)
    assert np.array_equal(tensor.cpu().view(torch.int16).numpy().view(np.uint16), expected)


def test_no_rows_need_no_bytes() -> None:
    for name in ENCODED:
        assert decode_torch(b"", name, 0, 8).shape == (0, 8)
    with pytest.raises(ValueError, match="'none' needs no decoding"):
        decode_torch(b"\0\0", "none", 1, 1)
