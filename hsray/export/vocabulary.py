"""Token frequencies and the map between a draft's small vocabulary and the target's.

The draft's vocabulary are the tokens that the loss sees most often; of equally frequent ones, those with the lower id;
if there are too few, the lowest ids that are left. `d2t` holds offsets: the target's id of draft token `i` is
`i + d2t[i]`. `t2d` is true where the draft has a target's token.
"""

import io
from collections.abc import Iterator
from typing import Any, ClassVar, NamedTuple

import numpy as np
import numpy.typing as npt

from hsray.errors import ConfigError, HsrayError
from hsray.export import torch_files
from hsray.export.formats import Format, Piece
from hsray.export.source import Sample, Source
from hsray.records import JsonDict
from hsray.upload import Upload


class VocabularyMap(NamedTuple):
    """`d2t` int64 `[draft_vocab]`, `t2d` bool `[target_vocab]`, and the share of loss tokens that the draft has."""

    d2t: npt.NDArray[np.int64]
    t2d: npt.NDArray[np.bool_]
    coverage: float


def count_tokens(source: Source) -> npt.NDArray[np.int64]:
    """How often each id of the vocabulary is a loss token, `[vocab_size]`."""
    counts = np.zeros(source.run.record["model"]["vocab_size"], np.int64)
    for sample in source.samples(range(len(source)), states=False):
        ids = sample.input_ids[sample.loss_mask != 0]
        if len(ids) and ids.max() >= len(counts):
            raise HsrayError(
                f"prompt {sample.prompt_id!r} (row {sample.row}) has token {ids.max()}, and the model's vocabulary "
                f"ends at {len(counts)}"
            )
        counts += np.bincount(ids, minlength=len(counts))
    return counts


def map_vocabulary(counts: npt.NDArray[np.int64], draft_size: int) -> VocabularyMap:
    """The most frequent `draft_size` tokens.

    Raises:
        ConfigError: names --draft-vocab-size.
    """
    if not 1 <= draft_size <= len(counts):
        raise ConfigError(f"--draft-vocab-size: {draft_size} of a vocabulary of {len(counts)} tokens")
    # Stable, so that of equals the lower id comes first; zeros fill up with the lowest ids likewise.
    chosen = np.sort(np.argsort(-counts, kind="stable")[:draft_size])
    t2d = np.zeros(len(counts), np.bool_)
    t2d[chosen] = True
    total = int(counts.sum())
    return VocabularyMap(chosen - np.arange(draft_size), t2d, float(counts[chosen].sum() / total) if total else 0.0)


def frequencies(counts: npt.NDArray[np.int64]) -> dict[int, int]:
    """Token id -> count, of those that occur."""
    return {int(token): int(counts[token]) for token in np.flatnonzero(counts)}


class VocabularyFormat(Format):
    """No states: `token_freq.pt` (speculators), and with a draft size `vocab_mapping.pt` (SpecForge, AngelSlim),
    `d2t.pt` (ModelOpt), `d2t-<size>.npy` and `t2d-<size>.npy` (speculators)."""

    name: ClassVar[str] = "vocabulary"

    def __init__(self, source: Source, draft_size: int | None) -> None:
        self.source = source
        self.draft_size = draft_size
        if draft_size is not None:
            map_vocabulary(np.zeros(source.run.record["model"]["vocab_size"], np.int64), draft_size)

    def layout(self) -> JsonDict:
        return {"draft_vocab_size": self.draft_size}

    def pieces(self) -> Iterator[Piece]:
        return iter(())

    def write(self, piece: Piece, samples: Iterator[Sample], out: Upload) -> str | None:
        raise NotImplementedError("there are no pieces")

    def closing_files(self) -> Iterator[tuple[str, bytes]]:
        counts = count_tokens(self.source)
        yield "token_freq.pt", torch_bytes(frequencies(counts))
        if self.draft_size is None:
            return
        found = map_vocabulary(counts, self.draft_size)
        d2t, t2d = torch_files.tensor(found.d2t), torch_files.tensor(found.t2d)
        yield "vocab_mapping.pt", torch_bytes({"d2t": d2t, "t2d": t2d})
        yield "d2t.pt", torch_bytes(d2t)
        yield f"d2t-{self.draft_size}.npy", _npy(found.d2t)
        yield f"t2d-{self.draft_size}.npy", _npy(found.t2d)


def torch_bytes(content: Any) -> bytes:
    """What `torch.save` makes of something small."""
    import torch

    data = io.BytesIO()
    torch.save(content, data)
    return data.getvalue()


def _npy(array: npt.NDArray[Any]) -> bytes:
    data = io.BytesIO()
    np.save(data, array)
    return data.getvalue()
