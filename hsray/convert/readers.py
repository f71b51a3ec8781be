"""The files of each tool: which there are, in which order, and how one is read."""

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, Protocol

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from hsray.convert.stored import (
    BadFile,
    Shape,
    Stored,
    as_array,
    dequantize,
    load_safetensors,
    load_torch,
    mask_array,
    split_states,
    state_tensor,
    token_array,
)
from hsray.errors import ConfigError

Tokens = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True, eq=False)
class Entry:
    """One prompt to convert.

    Attributes:
        path: the file with its states.
        name: its path below the input, by which it is called where nothing else names it.
        input_ids, loss_mask: where another file than `path` has them.
    """

    path: Path
    name: str
    input_ids: Tokens | None = None
    loss_mask: Tokens | None = None


class FileFormat(Protocol):
    """How one tool stores states.

    Attributes:
        says: what its files leave open, and what the tool itself takes for granted; for messages.
    """

    name: ClassVar[str]
    says: ClassVar[str]

    def entries(self, folder: Path) -> Iterator[Entry]:
        """Every prompt below a folder, in a fixed order. Raises ConfigError."""
        ...

    def read(self, path: Path, shape: Shape) -> Stored:
        """One file. Raises BadFile."""
        ...


class SpecForgeFiles(FileFormat):
    """`.ckpt` and `.ckpt.gz` of SpecForge's prepare_hidden_states: EAGLE-3, DFlash and DSpark."""

    name: ClassVar[str] = "specforge"
    says: ClassVar[str] = (
        "SpecForge's layer id n is resid_post_n (by default 1, L//2-1 and L-4), and its EAGLE-3 and DSpark files end "
        "with final_postnorm"
    )

    def entries(self, folder: Path) -> Iterator[Entry]:
        return _files(folder, "*.ckpt", "*.ckpt.gz")

    def read(self, path: Path, shape: Shape) -> Stored:
        content = load_torch(path)
        inner, last = ("aux_hidden_state", "hidden_state")
        if inner not in content:
            inner, last = ("hidden_states", "target_last_hidden_states")
        return _read_dict(content, inner, last, shape)


class ModelOptFiles(FileFormat):
    """`.pt` of ModelOpt's collect_hidden_states."""

    name: ClassVar[str] = "modelopt"
    says: ClassVar[str] = (
        "ModelOpt's layer id n is resid_post_n in dumps of Hugging Face and resid_pre_n in those of vLLM; the last is "
        "final_postnorm from Hugging Face and final_prenorm from vLLM"
    )

    def entries(self, folder: Path) -> Iterator[Entry]:
        return _files(folder, "*.pt")

    def read(self, path: Path, shape: Shape) -> Stored:
        content = load_torch(path)
        if content.get("hidden_states_prenorm") is True and shape.final == "final_postnorm":
            raise ConfigError(f"--sites: {path} says that its final state is before the norm: name final_prenorm")
        return _read_dict(content, "aux_hidden_states", "hidden_states", shape)


class VllmFiles(FileFormat):
    """`.safetensors` of vLLM's extract_hidden_states connectors."""

    name: ClassVar[str] = "vllm"
    says: ClassVar[str] = "vLLM's layer id n is resid_pre_n, and id L (by default the last) is final_prenorm"

    def entries(self, folder: Path) -> Iterator[Entry]:
        return _files(folder, "*.safetensors")

    def read(self, path: Path, shape: Shape) -> Stored:
        content = load_safetensors(path)
        ids = token_array(content, "token_ids", shape.vocab_size)
        stacked = content.get("hidden_states")
        if stacked is None:
            raise BadFile("missing_key", f"it has no tensor hidden_states; it holds {', '.join(sorted(content))}")
        expected = [len(ids), len(shape.sites), shape.hidden_size]
        if stacked.ndim == 3 and list(stacked.shape[1:]) == expected[1:] and len(stacked) != len(ids):
            raise BadFile("length_mismatch", f"hidden_states has {len(stacked)} tokens, the ids {len(ids)}")
        if list(stacked.shape) != expected:
            raise BadFile(
                "shape",
                f"hidden_states is {list(stacked.shape)}, not {expected}: {', '.join(shape.sites)} of the model",
            )
        if "hidden_states_scales" in content:
            stacked = dequantize(stacked, content["hidden_states_scales"])
        return Stored(ids, mask_array(content, len(ids)), split_states(stacked, shape.sites))


class SpeculatorsFiles(FileFormat):
    """A dataset that `datasets` saved, with `hidden_states/hs_<i>.safetensors` for row i."""

    name: ClassVar[str] = "speculators"
    says: ClassVar[str] = "speculators' layer ids are vLLM's: n is resid_pre_n, and the last state is final_prenorm"

    def entries(self, folder: Path) -> Iterator[Entry]:
        for number, (ids, mask) in enumerate(_dataset_rows(folder)):
            path = folder / "hidden_states" / f"hs_{number}.safetensors"
            yield Entry(path, f"hs_{number}", ids, mask)

    def read(self, path: Path, shape: Shape) -> Stored:
        return VllmFiles().read(path, shape)


FORMATS: Mapping[str, FileFormat] = {
    files.name: files for files in (SpecForgeFiles(), SpeculatorsFiles(), VllmFiles(), ModelOptFiles())
}


def _read_dict(content: Mapping[str, object], inner: str, last: str, shape: Shape) -> Stored:
    ids = token_array(content, "input_ids", shape.vocab_size)
    width = len(shape.residual) * shape.hidden_size
    named = f"{len(shape.residual)} inner layers by --sites, {shape.hidden_size} values each by --model"
    stacked = state_tensor(content, inner, len(ids), width, named)
    states = split_states(stacked.reshape(len(ids), len(shape.residual), shape.hidden_size), shape.residual)
    if shape.final is not None:
        states[shape.final] = as_array(state_tensor(content, last, len(ids), shape.hidden_size, "one state"))
    elif last in content:
        raise ConfigError(f"--sites: the files hold a final state ({last}) as well: name it, as the last one")
    identity = content.get("conversation_id")
    return Stored(ids, mask_array(content, len(ids)), states, identity if isinstance(identity, str) else None)


def _files(folder: Path, *patterns: str) -> Iterator[Entry]:
    found = {path for pattern in patterns for path in folder.rglob(pattern) if path.is_file()}
    for path in sorted(found, key=lambda path: _natural(path.relative_to(folder).as_posix())):
        name = path.relative_to(folder).as_posix()
        for pattern in patterns:
            name = name.removesuffix(pattern[1:])
        yield Entry(path, name)


def _natural(name: str) -> list[tuple[int, int, str]]:
    """data_2 before data_10."""
    parts = re.split(r"(\d+)", name)
    return [(1, int(part), "") if part.isdigit() else (0, 0, part) for part in parts]


def _dataset_rows(folder: Path) -> Iterator[tuple[Tokens, Tokens | None]]:
    """ids and mask of each row of a saved dataset, streamed."""
    try:
        state = json.loads((folder / "state.json").read_text(encoding="utf-8"))
        files = [folder / Path(entry["filename"]).name for entry in state["_data_files"]]
    except (OSError, ValueError, KeyError, TypeError) as err:
        raise ConfigError(
            f"{folder} is no dataset that `datasets` saved (state.json: {err}). Give the data path of speculators; for "
            "a folder with safetensors files alone, convert it as vllm"
        ) from err
    if state.get("_indices_data_files"):
        raise ConfigError(
            f"{folder} is a dataset with an indices mapping. Flatten it (flatten_indices) and save it again"
        )
    for file in files:
        try:
            with pa.memory_map(str(file)) as source, pa.ipc.open_stream(source) as stream:
                for batch in stream:
                    yield from _batch_rows(batch, file)
        except (pa.ArrowException, OSError) as err:
            raise ConfigError(f"{file} cannot be read: {err}") from err


def _batch_rows(batch: pa.RecordBatch, file: Path) -> Iterator[tuple[Tokens, Tokens | None]]:
    names = batch.schema.names
    if "input_ids" not in names:
        raise ConfigError(f"{file} has no column input_ids; it has {', '.join(names)}")
    ids = batch.column(names.index("input_ids"))
    masks = batch.column(names.index("loss_mask")) if "loss_mask" in names else None
    for number in range(batch.num_rows):
        yield _numbers(ids[number]), None if masks is None else _numbers(masks[number])


def _numbers(value: pa.Scalar) -> Tokens:
    numbers: Tokens = value.values.to_numpy(zero_copy_only=False).astype(np.int64)
    return numbers
