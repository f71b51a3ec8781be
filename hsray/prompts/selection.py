"""Which rows are input, and in which order: a pure function of the files, the filter, the seed and the limit."""

import pickle
import struct
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from itertools import islice
from pathlib import Path
from typing import Any

import xxhash

from hsray.config import PromptsConfig
from hsray.errors import HsrayError
from hsray.prompts.source import Row, SourceRow
from hsray.prompts.tally import Tally

# One of them is in memory at a time.
_BUCKETS = 256


def select_rows(rows: Iterable[Row], config: PromptsConfig, tally: Tally) -> Iterator[Row]:
    """Filter, then shuffle, then limit. Without a shuffle nothing is read beyond the limit."""
    kept = _filtered(rows, config.where, tally) if config.where else iter(rows)
    if config.shuffle_seed is not None:
        kept = _shuffled(kept, config.shuffle_seed)
    return islice(kept, config.limit)


def _filtered(rows: Iterable[Row], where: Mapping[str, Any], tally: Tally) -> Iterator[Row]:
    wanted = {key: value if isinstance(value, list) else [value] for key, value in where.items()}
    for row in rows:
        # A row that cannot be read cannot be asked either: it stays, and is rejected.
        if isinstance(row, SourceRow) and not all(row.data.get(key) in values for key, values in wanted.items()):
            tally.file(row.file).filtered += 1
        else:
            yield row


def _shuffled(rows: Iterable[Row], seed: int) -> Iterator[Row]:
    """The rows sorted by a hash of seed and position, by way of the temporary disk.

    Buckets are ranges of hashes, so that each can be sorted alone.
    """
    with tempfile.TemporaryDirectory(prefix="hsray-shuffle-") as folder:
        paths = [Path(folder) / f"{number:03d}" for number in range(_BUCKETS)]
        files = [path.open("wb") for path in paths]
        try:
            for position, row in enumerate(rows):
                key: int = xxhash.xxh3_64_intdigest(struct.pack("<Q", position), seed=seed)
                try:
                    pickle.dump((key, position, row), files[key * _BUCKETS >> 64], pickle.HIGHEST_PROTOCOL)
                except OSError as err:
                    raise HsrayError(f"prompts.shuffle_seed: cannot write to {folder} (TMPDIR): {err}") from err
        finally:
            for file in files:
                file.close()
        for path in paths:
            yield from (row for _, _, row in sorted(_load(path), key=lambda entry: entry[:2]))
            path.unlink()


def _load(path: Path) -> Iterator[tuple[int, int, Row]]:
    with path.open("rb") as file:
        while True:
            try:
                yield pickle.load(file)
            except EOFError:
                return
