"""SpecForge's prepared hidden states (sgl-project/SpecForge 0.2.0, `OfflineManifestReader`).

One `torch.save` of a dict a prompt. SpecForge takes every `.ckpt` below a folder, sorted by path, and knows nothing of
layers and norms: its layer ids name the output of a layer, so `resid_pre_3` is 2, and its final state is after the
norm, since its target head is lm_head alone. It has no attention mask of its own, so a file must hold no padding.
"""

from collections.abc import Iterator
from typing import ClassVar, Literal, get_args

from hsray.errors import ConfigError
from hsray.export import torch_files
from hsray.export.formats import Format, Piece, layer_ids, one_file_each
from hsray.export.source import Sample, Source
from hsray.records import JsonDict
from hsray.upload import Upload

Method = Literal["eagle3", "dflash", "dspark"]
METHODS: tuple[Method, ...] = get_args(Method)
# SpecForge's own number.
_FILES_PER_FOLDER = 2000


class SpecForgeFormat(Format):
    """`rows_*/data_*.ckpt`.

    * `eagle3`: `input_ids`, `loss_mask` int64 `[T]`; `hidden_state` `[1, T, hidden]` after the norm;
      `aux_hidden_state` `[1, T, 3 * hidden]`.
    * `dflash`: `input_ids`, `loss_mask`; `hidden_states` `[1, T, sites * hidden]`.
    * `dspark`: the same and `target_last_hidden_states` `[1, T, hidden]` after the norm.
    """

    name: ClassVar[str] = "specforge"

    def __init__(self, source: Source, method: Method) -> None:
        self.source = source
        self.method = method

    def layout(self) -> JsonDict:
        return {"method": self.method, "aux_hidden_state_layer_ids": layer_ids(self.source, -1)}

    def pieces(self) -> Iterator[Piece]:
        return one_file_each(self.source, "", _FILES_PER_FOLDER, "data_", ".ckpt")

    def write(self, piece: Piece, samples: Iterator[Sample], out: Upload) -> str | None:
        sample, selection = next(samples), self.source.selection
        mask = sample.loss_mask
        if self.method != "eagle3" and not (mask[:-1] & mask[1:]).any():
            return "SpecForge's DFlash family needs two loss tokens in a row"
        inner = sample.stack(selection.residual).reshape(1, len(sample), -1)
        arrays = {"input_ids": sample.input_ids, "loss_mask": mask}
        if self.method == "eagle3":
            assert selection.final is not None
            arrays |= {"hidden_state": sample.state(selection.final)[None], "aux_hidden_state": inner}
        else:
            arrays["hidden_states"] = inner
            if selection.final is not None:
                arrays["target_last_hidden_states"] = sample.state(selection.final)[None]
        torch_files.save(torch_files.tensors(arrays), out)
        return None

    def closing_files(self) -> Iterator[tuple[str, bytes]]:
        return iter(())


def check_method(name: str | None) -> Method:
    """Raises ConfigError for a method that SpecForge does not have."""
    for method in METHODS:
        if method == (name or "eagle3"):
            return method
    raise ConfigError(f"--method: {name!r} is none of {', '.join(METHODS)}")
