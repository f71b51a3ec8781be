"""safetensors: one file a prompt, with every site under its own name. For tools that have no format of their own."""

from collections.abc import Iterator
from typing import ClassVar

import numpy as np

from hsray.export import safetensors_files
from hsray.export.formats import Format, Piece, one_file_each
from hsray.export.source import Sample, Source
from hsray.records import JsonDict
from hsray.upload import Upload


class SafetensorsFormat(Format):
    """`rows_*/<position>.safetensors`: `input_ids` int32 `[T]`, `loss_mask` uint8 `[T]`, each site `[T, hidden]`;
    metadata `prompt_id`, `row` and `run_id`."""

    name: ClassVar[str] = "safetensors"

    def __init__(self, source: Source) -> None:
        self.source = source

    def layout(self) -> JsonDict:
        return {"tensors": ["input_ids", "loss_mask", *self.source.selection.exported]}

    def pieces(self) -> Iterator[Piece]:
        return one_file_each(self.source, "", 2000, "", ".safetensors")

    def write(self, piece: Piece, samples: Iterator[Sample], out: Upload) -> str | None:
        sample = next(samples)
        arrays = {
            "input_ids": sample.input_ids.astype(np.int32),
            **{site: sample.state(site) for site in self.source.selection.exported},
            "loss_mask": sample.loss_mask.astype(np.uint8),
        }
        run_id = self.source.run.record["run_id"]
        metadata = {"prompt_id": sample.prompt_id, "row": str(sample.row), "run_id": run_id}
        safetensors_files.save(arrays, metadata, out)
        return None

    def closing_files(self) -> Iterator[tuple[str, bytes]]:
        return iter(())
