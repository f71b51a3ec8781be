"""NVIDIA ModelOpt's offline speculative decoding data (Model-Optimizer, `OfflineSupervisedDataset`).

One `torch.save` of a dict a prompt, read with `weights_only=True`; every `.pt` below a folder is taken for one. The
final state is after the norm: a flag can say that it is before it, but only ModelOpt's DFlash heeds it.
"""

from collections.abc import Iterator
from typing import ClassVar

from hsray.export import torch_files
from hsray.export.formats import Format, Piece, layer_ids, one_file_each
from hsray.export.source import Sample, Source
from hsray.records import JsonDict
from hsray.upload import Upload


class ModelOptFormat(Format):
    """`rows_*/<position>.pt`: `input_ids`, `loss_mask` int64 `[T]`, `hidden_states` `[T, hidden]` after the norm,
    `aux_hidden_states` `[T, sites * hidden]`, `hidden_states_prenorm` False, `conversation_id` the prompt's id."""

    name: ClassVar[str] = "modelopt"

    def __init__(self, source: Source) -> None:
        self.source = source

    def layout(self) -> JsonDict:
        return {"eagle_aux_hidden_state_layer_ids": layer_ids(self.source, -1)}

    def pieces(self) -> Iterator[Piece]:
        return one_file_each(self.source, "", 2000, "", ".pt")

    def write(self, piece: Piece, samples: Iterator[Sample], out: Upload) -> str | None:
        sample, selection = next(samples), self.source.selection
        assert selection.final is not None
        arrays = {
            "input_ids": sample.input_ids,
            "loss_mask": sample.loss_mask,
            "hidden_states": sample.state(selection.final),
            "aux_hidden_states": sample.stack(selection.residual).reshape(len(sample), -1),
        }
        facts = {"hidden_states_prenorm": False, "conversation_id": sample.prompt_id}
        torch_files.save({**torch_files.tensors(arrays), **facts}, out)
        return None

    def closing_files(self) -> Iterator[tuple[str, bytes]]:
        return iter(())
