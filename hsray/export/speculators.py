"""speculators' offline data (vllm-project/speculators 0.9.0, `ArrowDataset` and `FileTransfer`).

A dataset as `datasets.save_to_disk` writes it, with tokens, and for row i of it `hidden_states/hs_i.safetensors`. The
last of the stacked states is the final one before the norm, as vLLM hands it out: the trainer applies the verifier's
norm itself. Layer ids are those of vLLM: `resid_pre_3` is 3.

The dataset is written here and not by `datasets`: Arrow streams of bounded size, straight to any store.
"""

import hashlib
import json
from collections.abc import Iterator
from typing import ClassVar, Final

import numpy as np
import pyarrow as pa

from hsray.export import safetensors_files
from hsray.export.formats import Format, Piece, layer_ids
from hsray.export.source import Sample, Source
from hsray.export.vocabulary import count_tokens, frequencies, torch_bytes
from hsray.records import JsonDict
from hsray.upload import Upload

_TOKENS_PER_FILE: Final = 1 << 25
_TOKENS_PER_BATCH: Final = 1 << 20
_FEATURES: Final = {
    "input_ids": {"feature": {"dtype": "int64", "_type": "Value"}, "_type": "List"},
    "loss_mask": {"feature": {"dtype": "int64", "_type": "Value"}, "_type": "List"},
    "seq_len": {"dtype": "int64", "_type": "Value"},
}
_SCHEMA: Final = pa.schema(
    [("input_ids", pa.list_(pa.int64())), ("loss_mask", pa.list_(pa.int64())), ("seq_len", pa.int64())],
    metadata={"huggingface": json.dumps({"info": {"features": _FEATURES}})},
)


class SpeculatorsFormat(Format):
    """`data-*.arrow`, `state.json` and `dataset_info.json` with `input_ids`, `loss_mask` and `seq_len`;
    `hidden_states/hs_<i>.safetensors` with `hidden_states` `[T, sites + 1, hidden]` and `token_ids` int64 `[T]`;
    `token_freq.pt`."""

    name: ClassVar[str] = "speculators"

    def __init__(self, source: Source) -> None:
        self.source = source
        self._starts = _split(source)

    def layout(self) -> JsonDict:
        return {"layer_ids": [*layer_ids(self.source, 0), self.source.run.record["model"]["num_layers"]]}

    def pieces(self) -> Iterator[Piece]:
        for position in range(len(self.source)):
            yield Piece(f"hidden_states/hs_{position}.safetensors", range(position, position + 1))
        ends = [*self._starts[1:], len(self.source)]
        for name, start, end in zip(self._data_files(), self._starts, ends, strict=True):
            yield Piece(name, range(start, end), has_states=False)

    def write(self, piece: Piece, samples: Iterator[Sample], out: Upload) -> str | None:
        if piece.has_states:
            sample = next(samples)
            arrays = {"token_ids": sample.input_ids, "hidden_states": sample.stack(self.source.selection.exported)}
            safetensors_files.save(arrays, {}, out)
            return None
        with pa.ipc.new_stream(out, _SCHEMA) as stream:
            rows: list[Sample] = []
            tokens = 0
            for sample in samples:
                rows.append(sample)
                tokens += len(sample)
                if tokens >= _TOKENS_PER_BATCH:
                    stream.write_batch(_batch(rows))
                    rows, tokens = [], 0
            if rows:
                stream.write_batch(_batch(rows))
        return None

    def closing_files(self) -> Iterator[tuple[str, bytes]]:
        yield "token_freq.pt", torch_bytes(frequencies(count_tokens(self.source)))
        yield "dataset_info.json", json.dumps({"features": _FEATURES}, indent=2).encode()
        # What `datasets` caches its own results under; any text that changes with the content will do.
        fingerprint = hashlib.sha256(f"{self.source.run.record['run_id']}:{len(self.source)}".encode()).hexdigest()[:16]
        state: JsonDict = {
            "_data_files": [{"filename": name} for name in self._data_files()],
            "_fingerprint": fingerprint,
            "_format_columns": None,
            "_format_kwargs": {},
            # The loader compares with torch.equal, which takes no lists.
            "_format_type": "torch",
            "_output_all_columns": False,
            "_split": None,
        }
        yield "state.json", json.dumps(state, indent=2, sort_keys=True).encode()

    def _data_files(self) -> list[str]:
        return [f"data-{number:05d}-of-{len(self._starts):05d}.arrow" for number in range(len(self._starts))]


def _split(source: Source) -> list[int]:
    """First position of each Arrow file."""
    starts, tokens = [0], 0
    for position, length in enumerate(source.lengths.tolist()):
        if tokens and tokens + length > _TOKENS_PER_FILE:
            starts.append(position)
            tokens = 0
        tokens += length
    return starts


def _batch(samples: list[Sample]) -> pa.RecordBatch:
    lengths = np.array([len(sample) for sample in samples], np.int64)
    offsets = pa.array(np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32))
    columns = [
        pa.ListArray.from_arrays(offsets, pa.array(np.concatenate([sample.input_ids for sample in samples]))),
        pa.ListArray.from_arrays(offsets, pa.array(np.concatenate([sample.loss_mask for sample in samples]))),
        pa.array(lengths),
    ]
    return pa.RecordBatch.from_arrays(columns, schema=_SCHEMA)
