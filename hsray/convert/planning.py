"""Files of another tool -> prompts and rejects, each file looked at whole, in the order of the input."""

import collections
import itertools
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from hsray.convert.readers import Entry, FileFormat
from hsray.convert.stored import BadFile, Shape, Stored, check_values
from hsray.errors import ConfigError
from hsray.export.job import PROMPTS_KEY
from hsray.records import MaskArray, Prompt, Reject

log = logging.getLogger(__name__)

A = TypeVar("A")
B = TypeVar("B")

_THREADS = 4


@dataclass(frozen=True, slots=True)
class Input:
    """What is converted.

    Attributes:
        folder: where the files are.
        files: their format.
        shape: what they must hold.
        mask_all: a file without a loss mask gets one of ones; otherwise it is a question to the user.
    """

    folder: Path
    files: FileFormat
    shape: Shape
    mask_all: bool = False


def first_dtype(source: Input) -> str:
    """The dtype of the first file that can be read; it is the run's.

    Raises:
        ConfigError: there is no file, or none can be read: the message has the first reason.
    """
    problem = ""
    for entry in source.files.entries(source.folder):
        try:
            return source.files.read(entry.path, source.shape).dtype
        except BadFile as err:
            problem = problem or f"{entry.path}: {err.detail}"
    if problem:
        raise ConfigError(f"no file below {source.folder} can be converted. The first: {problem}")
    raise ConfigError(f"there are no {source.files.name} files below {source.folder}")


def read_items(source: Input, dtype: str) -> Iterator[Prompt | Reject]:
    """A prompt or a reject for every entry.

    Raises:
        ConfigError: something that no file says is not said by an option either.
    """
    names = _exported_names(source.folder)
    seen: dict[str, int] = {}
    entries = enumerate(source.files.entries(source.folder))
    for row, entry, found in _in_order(entries, lambda item: (*item, _look(source, item[1], dtype))):
        if isinstance(found, BadFile):
            yield Reject(row, None, str(entry.path), 1, found.reason, found.detail, entry.name[:200])
            continue
        stored, mask = found
        prompt_id = stored.prompt_id or names.get(entry.path.relative_to(source.folder).as_posix()) or entry.name
        if prompt_id in seen:
            detail = f"{prompt_id!r} is the id of row {seen[prompt_id]} as well"
            yield Reject(row, prompt_id, str(entry.path), 1, "duplicate_id", detail, entry.name[:200])
            continue
        seen[prompt_id] = row
        yield Prompt(row, prompt_id, stored.input_ids, mask, str(entry.path), 1)


@dataclass(frozen=True, slots=True, eq=False)
class _Looked:
    """The tokens of a file that is fit to be converted; its states are let go of."""

    input_ids: "np.ndarray[tuple[int], np.dtype[np.int32]]"
    prompt_id: str | None


def _look(source: Input, entry: Entry, dtype: str) -> "tuple[_Looked, MaskArray] | BadFile":
    try:
        stored = source.files.read(entry.path, source.shape)
        if entry.input_ids is not None and not np.array_equal(entry.input_ids, stored.input_ids):
            raise BadFile("token_mismatch", "its ids are not those of its row in the dataset")
        if stored.dtype != dtype:
            raise BadFile("dtype", f"states are {stored.dtype}, those of the first file are {dtype}")
        check_values(stored.states)
        return _Looked(stored.input_ids, stored.prompt_id), _mask(source, entry, stored)
    except BadFile as err:
        return err


def _mask(source: Input, entry: Entry, stored: Stored) -> MaskArray:
    length = len(stored.input_ids)
    if entry.loss_mask is not None:
        if len(entry.loss_mask) != length or not np.isin(entry.loss_mask, (0, 1)).all():
            raise BadFile(
                "bad_mask", f"loss_mask has {len(entry.loss_mask)} values for {length} tokens, or others than 0, 1"
            )
        return entry.loss_mask.astype(np.uint8)
    if stored.loss_mask is not None:
        return stored.loss_mask
    if not source.mask_all:
        raise ConfigError(
            f"--loss-mask: {entry.path} does not say which tokens are to be learned. Give --loss-mask all to take "
            "every token"
        )
    return np.ones(length, np.uint8)


def _exported_names(folder: Path) -> Mapping[str, str]:
    """Prompt ids by file, of files that hsray itself exported."""
    path = folder / PROMPTS_KEY
    if not path.exists():
        return {}
    try:
        table = pq.read_table(path, columns=["file", "prompt_id"])
    except (pa.ArrowException, OSError, KeyError) as err:
        log.warning("%s cannot be read, so prompts are named by their files: %s", path, err)
        return {}
    return {file: name for file, name in zip(*table.to_pydict().values(), strict=True) if file is not None}


def _in_order(items: Iterable[A], work: Callable[[A], B]) -> Iterator[B]:
    """`work` on each item in threads, results in order, a few ahead."""
    remaining = iter(items)
    ahead: collections.deque[Future[B]] = collections.deque()
    with ThreadPoolExecutor(_THREADS, "hsray-convert") as pool:
        try:
            ahead.extend(pool.submit(work, item) for item in itertools.islice(remaining, 2 * _THREADS))
            while ahead:
                result = ahead.popleft().result()
                ahead.extend(pool.submit(work, item) for item in itertools.islice(remaining, 1))
                yield result
        finally:
            for future in ahead:
                future.cancel()
