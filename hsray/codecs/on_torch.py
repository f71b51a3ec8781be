"""Decoding on a torch device: the stored bytes go there, which are fewer, and become bfloat16 there.

Of `bf16-hl-zstd`, the Huffman-coded half is decoded on the CPU first, and the two halves are put together on the
device. The result has the same bits as `codecs.decode_bits`.
"""

from typing import TYPE_CHECKING

import numpy as np

from hsray.codecs import fp8, int8
from hsray.codecs.byte_planes import high_plane
from hsray.codecs.encoding import Bytes, EncodedBytes
from hsray.site_storage import CodecName

if TYPE_CHECKING:
    import torch


def decode_torch(
    raw: EncodedBytes, codec: CodecName, num_tokens: int, hidden: int, device: "torch.device | str | None" = None
) -> "torch.Tensor":
    """A stored payload as bfloat16 `[num_tokens, hidden]` on `device` (default: the CPU).

    Args:
        raw: the payload in host memory; from pinned memory, the copy to the device does not wait, and the memory must
            not change until the device is done.
        codec: any codec but `none`.
        num_tokens: rows of the payload; of a site that is stored for some tokens only, as many as have a state.

    Raises:
        EncodingError: the payload is not one of that codec and size.
    """
    import torch

    data = np.frombuffer(raw, np.uint8)
    if num_tokens == 0 and not len(data):
        return torch.empty((0, hidden), dtype=torch.bfloat16, device=device)
    if codec == "bf16-hl-zstd":
        return _join_planes(data, num_tokens, hidden, device)
    if codec == "fp8-token":
        return _scale_rows(data, num_tokens, hidden, device)
    if codec == "int8-block64-outlier4":
        return _scale_blocks(data, num_tokens, hidden, device)
    raise ValueError(f"codec {codec!r} needs no decoding or is not known")


def _join_planes(data: Bytes, rows: int, hidden: int, device: "torch.device | str | None") -> "torch.Tensor":
    import torch

    count = rows * hidden
    high = _on_device(high_plane(data.data, count), device)
    low = _on_device(data[:count], device)
    # Little-endian: the low byte comes first.
    return torch.stack((low, high), dim=1).view(torch.bfloat16).reshape(rows, hidden)


def _scale_rows(data: Bytes, rows: int, hidden: int, device: "torch.device | str | None") -> "torch.Tensor":
    import torch

    fp8.split_payload(data, rows, hidden)  # looked at here: asking the device would wait for it
    there = _on_device(data, device)
    scales = there[: 4 * rows].clone().view(torch.float32)
    codes = there[4 * rows :].view(rows, hidden).view(torch.float8_e4m3fn)
    return (codes.to(torch.float32) * scales[:, None]).to(torch.bfloat16)


def _scale_blocks(data: Bytes, rows: int, hidden: int, device: "torch.device | str | None") -> "torch.Tensor":
    import torch

    int8.split_payload(data, rows, hidden)
    kept, blocks = int8.kept_channels(hidden), -(-hidden // int8.BLOCK)
    there = _on_device(data, device)
    sizes = [2 * rows * kept, 2 * rows * kept, 2 * rows * blocks, rows * hidden]
    # Copied, because a view of another type needs an address that fits.
    parts: list[torch.Tensor] = [part.clone() for part in torch.split(there, sizes)]
    channels = parts[0].view(torch.int16).view(rows, kept).to(torch.int64) & 0xFFFF
    outliers = parts[1].view(torch.bfloat16).view(rows, kept)
    scales = parts[2].view(torch.bfloat16).view(rows, blocks).to(torch.float32)
    levels = parts[3].view(torch.int8).view(rows, hidden).to(torch.float32)
    levels *= scales.repeat_interleave(int8.BLOCK, dim=1)[:, :hidden]
    states = levels.to(torch.bfloat16)
    states.scatter_(1, channels, outliers)
    return states


def _on_device(data: Bytes, device: "torch.device | str | None") -> "torch.Tensor":
    import torch

    # torch warns about read-only memory, which is only read here.
    host = torch.from_numpy(data) if data.flags.writeable else _borrow(data)
    return host.to(device, non_blocking=True) if device is not None else host


def _borrow(data: Bytes) -> "torch.Tensor":
    import torch

    return torch.frombuffer(bytearray(data), dtype=torch.uint8)
