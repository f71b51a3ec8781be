"""What a format is: which files it consists of, and what is in each."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol

import numpy as np
import numpy.typing as npt

from hsray.export.source import Sample, Source
from hsray.records import JsonDict
from hsray.upload import Upload


@dataclass(frozen=True, slots=True)
class Piece:
    """One file.

    Attributes:
        key: below the export's URL; made of positions, never of prompt ids, which are anybody's text.
        positions: the prompts in it.
        has_states: or only their tokens.
    """

    key: str
    positions: range
    has_states: bool = True


class Format(Protocol):
    """One tool's files. A pure function of the source: the same export gives the same bytes."""

    name: ClassVar[str]
    source: Source

    def layout(self) -> JsonDict:
        """What the files do not say of themselves and a reader must know: layers, norm, options. JSON."""
        ...

    def pieces(self) -> Iterator[Piece]:
        """Every file but the closing ones."""
        ...

    def write(self, piece: Piece, samples: Iterator[Sample], out: Upload) -> str | None:
        """Write a piece from its samples, which come in order and once.

        Returns:
            None, or why the tool could not read this prompt: it is left out then, and what was written is dropped.
        """
        ...

    def closing_files(self) -> Iterator[tuple[str, bytes]]:
        """Small files that make the export readable, written when every piece is there."""
        ...


def raw_bytes(array: npt.NDArray[Any]) -> memoryview:
    """A C-contiguous array as flat bytes, without a copy. The buffer protocol has no bfloat16."""
    return array.reshape(-1).view(np.uint8).data


def one_file_each(source: Source, folder_prefix: str, group: int, name: str, suffix: str) -> Iterator[Piece]:
    """A file for each prompt, `group` of them to a folder. Names sort as the prompts do."""
    for position in range(len(source)):
        start = position // group * group
        folder = f"{folder_prefix}rows_{start:08d}-{start + group:08d}"
        yield Piece(f"{folder}/{name}{position:08d}{suffix}", range(position, position + 1))


def layer_ids(source: Source, offset: int) -> list[int]:
    """The residual sites as integers of a tool that counts `resid_pre_i` as `i + offset`."""
    return [int(site.removeprefix("resid_pre_")) + offset for site in source.selection.residual]
