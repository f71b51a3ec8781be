"""AngelSlim's offline EAGLE-3 files (Tencent/AngelSlim, `OfflineEagle3Dataset`).

One `torch.save` of a dict a prompt; every `.ckpt` below a folder is one, sorted by path. Unlike SpecForge's, ids and
mask have a batch dimension. The final state comes from a hook on the final norm, so it is after it.
"""

from collections.abc import Iterator
from typing import ClassVar

from hsray.export import torch_files
from hsray.export.formats import Format, Piece, layer_ids, one_file_each
from hsray.export.source import Sample, Source
from hsray.records import JsonDict
from hsray.upload import Upload

# AngelSlim's own number.
_FILES_PER_FOLDER = 5000


class AngelSlimFormat(Format):
    """`rank_0/rows_*/data_*.ckpt`: `input_ids`, `loss_mask` int64 `[1, T]`, `hidden_states` `[1, T, 3 * hidden]`,
    `target_hiddens` `[1, T, hidden]` after the norm."""

    name: ClassVar[str] = "angelslim"

    def __init__(self, source: Source) -> None:
        self.source = source

    def layout(self) -> JsonDict:
        return {"layer_outputs": layer_ids(self.source, -1)}

    def pieces(self) -> Iterator[Piece]:
        return one_file_each(self.source, "rank_0/", _FILES_PER_FOLDER, "data_", ".ckpt")

    def write(self, piece: Piece, samples: Iterator[Sample], out: Upload) -> str | None:
        sample, selection = next(samples), self.source.selection
        assert selection.final is not None
        arrays = {
            "input_ids": sample.input_ids[None],
            "loss_mask": sample.loss_mask[None],
            "hidden_states": sample.stack(selection.residual).reshape(1, len(sample), -1),
            "target_hiddens": sample.state(selection.final)[None],
        }
        torch_files.save(torch_files.tensors(arrays), out)
        return None

    def closing_files(self) -> Iterator[tuple[str, bytes]]:
        return iter(())
