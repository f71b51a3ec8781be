"""DeepSpec's target cache, version 2 (deepseek-ai/DeepSpec, `CacheDataset`).

Shards of raw little-endian tensors, an index of 56-byte records, a manifest. Where everything lies follows from the
lengths of the prompts alone. DeepSpec asserts that the manifest's layer ids and model name equal those of the training
configuration; a layer id is the layer whose output it is, so `resid_pre_3` is 2. The last state is after the norm.
"""

import json
import struct
from collections.abc import Iterator
from typing import ClassVar, Final

import numpy as np

from hsray.errors import ConfigError
from hsray.export.formats import Format, Piece, layer_ids, raw_bytes
from hsray.export.source import Sample, Source
from hsray.records import JsonDict
from hsray.upload import Upload

# sample_id, shard_id, seq_len, then the offsets of ids, attention mask, loss mask, inner states and last states.
_RECORD: Final = struct.Struct("<QIIQQQQQ")
_SHARD_BYTES: Final = 4 << 30


class DeepSpecFormat(Format):
    """`manifest.json`, `samples.idx`, `shard-*.bin`; states are bfloat16.

    Args:
        model_name: `target_model_name_or_path` of the training configuration.
        shard_bytes: a shard is closed before it would pass this.
    """

    name: ClassVar[str] = "deepspec"

    def __init__(self, source: Source, model_name: str, shard_bytes: int = _SHARD_BYTES) -> None:
        if source.run.dtype != "bfloat16":
            raise ConfigError(
                f"DeepSpec takes bfloat16 states, and this run has {source.run.dtype}: extract it as that"
            )
        self.source = source
        self.model_name = model_name
        self.shard_bytes = shard_bytes
        hidden = source.run.hidden_size
        self._sizes = (4, 1, 1, 2 * hidden * len(source.selection.residual), 2 * hidden)

    def layout(self) -> JsonDict:
        return {"target_layer_ids": layer_ids(self.source, -1), "target_model_name_or_path": self.model_name}

    def pieces(self) -> Iterator[Piece]:
        token_bytes = sum(self._sizes)
        start = nbytes = number = 0
        for position, length in enumerate(self.source.lengths.tolist()):
            if position > start and nbytes + length * token_bytes > self.shard_bytes:
                yield Piece(_shard(number), range(start, position))
                start, nbytes, number = position, 0, number + 1
            nbytes += length * token_bytes
        yield Piece(_shard(number), range(start, len(self.source)))

    def write(self, piece: Piece, samples: Iterator[Sample], out: Upload) -> str | None:
        selection = self.source.selection
        assert selection.final is not None
        for sample in samples:
            out.write(raw_bytes(sample.input_ids.astype("<i4")))
            out.write(bytes([1]) * len(sample))
            out.write(raw_bytes(sample.loss_mask.astype(np.uint8)))
            out.write(raw_bytes(sample.stack(selection.residual)))
            out.write(raw_bytes(sample.state(selection.final)))
        return None

    def closing_files(self) -> Iterator[tuple[str, bytes]]:
        index = bytearray()
        pieces = list(self.pieces())
        for number, piece in enumerate(pieces):
            at = 0
            for position in piece.positions:
                length = int(self.source.lengths[position])
                offsets = []
                for size in self._sizes:
                    offsets.append(at)
                    at += size * length
                index += _RECORD.pack(position, number, length, *offsets)
        yield "samples.idx", bytes(index)
        manifest = {
            "version": 2,
            "num_samples": len(self.source),
            "num_shards": len(pieces),
            "target_layer_ids": layer_ids(self.source, -1),
            "hidden_dtype": "bfloat16",
            "token_dtype": "int32",
            "mask_dtype": "uint8",
            "index_record_size": _RECORD.size,
            "hidden_size": self.source.run.hidden_size,
            "shards": [{"shard_id": number, "file_name": piece.key} for number, piece in enumerate(pieces)],
            "target_model_name_or_path": self.model_name,
        }
        yield "manifest.json", json.dumps(manifest, indent=2, sort_keys=True).encode()


def _shard(number: int) -> str:
    return f"shard-{number:05d}.bin"
