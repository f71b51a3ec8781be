"""Writes the files of an export: in parallel, with bounded memory, each file whole or not at all, and resumable.

An export is known by what it is made of (`hsray_export.json`, created once): the run, the hashes of the states, the
format and its options. The same command goes on where it was stopped, since a file that is there is complete; another
one is refused. One export at a time to a URL.
"""

import functools
import itertools
import logging
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from datetime import UTC, datetime

import pyarrow as pa
import pyarrow.parquet as pq
import xxhash

import hsray
from hsray.errors import ConfigError, HsrayError
from hsray.export.formats import Format, Piece
from hsray.export.source import BATCH_BYTES, Sample, Source
from hsray.records import JsonDict
from hsray.store import Store, encode_json
from hsray.store_clients import LocalBackend
from hsray.units import format_bytes

log = logging.getLogger(__name__)

EXPORT_KEY = "hsray_export.json"
PROMPTS_KEY = "hsray_prompts.parquet"
COMPLETE_KEY = "hsray_export_complete.json"
THREADS = 8
# Of all pieces that are being written together; one that is larger goes alone.
_MEMORY_BYTES = 2 << 30
# A piece is read, rearranged, and copied once more on its way into a file.
_COPIES = 3
# Parts of an upload.
_UPLOAD_BYTES = 80 << 20
# Small files are made together, so that what lies side by side is read in one request.
_PIECES_TOGETHER = 64
_PROGRESS_SECONDS = 10.0
# Differ between two runs of the same command without meaning anything.
_INCIDENTAL = ("run", "hsray_version", "write_id", "created")


@dataclass(slots=True)
class Exported:
    """What is there.

    Attributes:
        files: those that hold prompts.
        written: the ones of them that this call wrote.
        prompts: in the files.
        left_out: positions of prompts that the tool could not read, with the reason.
        was_complete: there was nothing to do.
    """

    files: int = 0
    written: int = 0
    prompts: int = 0
    left_out: dict[int, str] = field(default_factory=dict)
    was_complete: bool = False

    def to_json(self) -> JsonDict:
        return {
            "files": self.files,
            "written": self.written,
            "prompts": self.prompts,
            "left_out": {str(position): reason for position, reason in self.left_out.items()},
        }


def run_job(store: Store, fmt: Format, identity: JsonDict, *, threads: int = THREADS) -> Exported:
    """Write every file of `fmt` that is not there.

    Args:
        identity: what the export is made of, besides the states themselves.

    Raises:
        ConfigError: the URL holds another export, or something that is none.
        HsrayError: a damaged state; the files that are whole stay.
        StoreError: a store refuses or does not answer.
    """
    _claim(store, {**identity, "states": states_digest(fmt.source), "layout": fmt.layout()})
    there = {info.key for info in store.list()}
    result = Exported(prompts=len(fmt.source))
    progress = _Progress()
    missing = 0
    for piece in fmt.pieces():
        result.files += 1
        missing += piece.key not in there
    with ThreadPoolExecutor(threads, "hsray-export") as pool:
        budget = _Budget(_MEMORY_BYTES)
        stopped = threading.Event()

        def work(group: list[Piece]) -> None:
            with budget.hold(_cost(fmt.source, group)):
                for piece, reason in _write_group(store, fmt, group, stopped):
                    progress.add(missing)
                    if reason is not None:
                        result.left_out[piece.positions.start] = reason

        try:
            wanted = (piece for piece in fmt.pieces() if piece.key not in there)
            _run_bounded(pool, work, _groups(fmt.source, wanted), 4 * threads)
        except BaseException:
            stopped.set()
            raise
    result.written = missing - len(result.left_out)
    result.files -= len(result.left_out)
    result.prompts -= len(result.left_out)
    result.was_complete = COMPLETE_KEY in there and not result.written
    if not result.was_complete:
        for key, data in fmt.closing_files():
            store.put(key, data)
        store.put(PROMPTS_KEY, _prompt_table(fmt, result.left_out))
        _remove_unfinished(store, fmt)
        done = {"finished": datetime.now(UTC).isoformat(timespec="seconds"), **result.to_json()}
        store.put(COMPLETE_KEY, encode_json({k: v for k, v in done.items() if k != "written"}))
    return result


def states_digest(source: Source) -> str:
    """xxh3-128 of which prompts there are and of the hashes of their states: other states, another digest."""
    segments, digest = source.run.segments, xxhash.xxh3_128()
    digest.update("\0".join(segments.prompt_ids).encode())
    for array in (segments.row, segments.num_tokens, *(segments.xxh3[site] for site in source.selection.stored)):
        digest.update(array.tobytes())
    if source.selection.norm is not None:
        digest.update(source.selection.norm.weight.tobytes())
    return digest.hexdigest()


def _claim(store: Store, identity: JsonDict) -> None:
    """Make the URL this export's, or find that it is."""
    if not _is_known(store):
        stranger = next((info.key for info in store.list() if "#" not in info.key), None)
        if stranger is not None:
            raise ConfigError(
                f"{store.url} holds {stranger} and is no export of hsray. Give an empty folder: loaders take every "
                "file below it for data"
            )
    record = {
        **identity,
        "hsray_version": hsray.__version__,
        "created": datetime.now(UTC).isoformat(timespec="seconds"),
    }
    standing = store.create_once(EXPORT_KEY, record).record
    differing = [
        f"  {key}: it has {standing.get(key)!r}, this would be {record.get(key)!r}"
        for key in sorted({*standing, *record} - set(_INCIDENTAL))
        if standing.get(key) != record.get(key)
    ]
    if differing:
        raise ConfigError(f"{store.url} holds another export:\n" + "\n".join(differing) + "\nGive another folder")


def _is_known(store: Store) -> bool:
    try:
        store.head(EXPORT_KEY)
    except FileNotFoundError:
        return False
    return True


def _write_group(
    store: Store, fmt: Format, group: list[Piece], stopped: threading.Event
) -> Iterator[tuple[Piece, str | None]]:
    """Write pieces one after the other; (piece, why it was left out)."""
    together: Iterator[Sample] | None = None
    if len(group) > 1:
        positions = [position for piece in group for position in piece.positions]
        together = fmt.source.samples(positions, states=group[0].has_states)
    for piece in group:
        if stopped.is_set():
            return
        if together is None:
            yield piece, store.retrying("upload", piece.key, functools.partial(_write_piece, store, fmt, piece))
        else:
            # A few megabytes: one put, which the store itself repeats.
            yield piece, _write_piece(store, fmt, piece, itertools.islice(together, len(piece.positions)))


def _write_piece(store: Store, fmt: Format, piece: Piece, samples: Iterator[Sample] | None = None) -> str | None:
    if samples is None:
        samples = fmt.source.samples(piece.positions, states=piece.has_states)
    with store.upload(piece.key) as upload:
        reason = fmt.write(piece, samples, upload)
        if reason is None:
            upload.complete()
    return reason


def _groups(source: Source, pieces: Iterable[Piece]) -> Iterator[list[Piece]]:
    """Consecutive pieces that are read together."""
    group: list[Piece] = []
    nbytes = 0
    for piece in pieces:
        size = _nbytes(source, piece)
        full = nbytes + size > BATCH_BYTES // 2 or len(group) >= _PIECES_TOGETHER
        if group and (full or piece.has_states != group[0].has_states):
            yield group
            group, nbytes = [], 0
        group.append(piece)
        nbytes += size
    if group:
        yield group


def _nbytes(source: Source, piece: Piece) -> int:
    if not piece.has_states:
        return 24 * int(source.lengths[piece.positions.start : piece.positions.stop].sum())
    return int(source.nbytes[piece.positions.start : piece.positions.stop].sum())


def _cost(source: Source, group: list[Piece]) -> int:
    """Bytes of memory that a group takes at its worst moment."""
    largest = max(int(source.nbytes[p.positions.start : p.positions.stop].max()) if p.has_states else 0 for p in group)
    total = sum(_nbytes(source, piece) for piece in group)
    return _COPIES * max(largest, min(total, BATCH_BYTES)) + min(_UPLOAD_BYTES, 2 * total)


def _run_bounded(
    pool: ThreadPoolExecutor, work: Callable[[list[Piece]], None], groups: Iterator[list[Piece]], ahead: int
) -> None:
    """`work` on every group, `ahead` of them submitted at a time. Raises the first error."""
    running: set[Future[None]] = {pool.submit(work, group) for group in itertools.islice(groups, ahead)}
    try:
        while running:
            done, running = wait(running, return_when=FIRST_COMPLETED)
            for future in done:
                future.result()
            running |= {pool.submit(work, group) for group in itertools.islice(groups, len(done))}
    except BaseException:
        for future in running:
            future.cancel()
        raise


class _Budget:
    """At most so many bytes at a time, or one holder."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._used = 0
        self._freed = threading.Condition()

    def hold(self, nbytes: int) -> "_Holding":
        with self._freed:
            while self._used and self._used + nbytes > self._limit:
                self._freed.wait()
            self._used += nbytes
        return _Holding(self, nbytes)

    def free(self, nbytes: int) -> None:
        with self._freed:
            self._used -= nbytes
            self._freed.notify_all()


@dataclass(frozen=True, slots=True)
class _Holding:
    budget: _Budget
    nbytes: int

    def __enter__(self) -> None:
        pass

    def __exit__(self, *_: object) -> None:
        self.budget.free(self.nbytes)


class _Progress:
    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._files = 0
        self._last = time.monotonic()

    def add(self, total: int) -> None:
        with self._lock:
            self._files += 1
            if time.monotonic() - self._last < _PROGRESS_SECONDS:
                return
            self._last = time.monotonic()
            log.info("%d of %d files", self._files, total)


def _prompt_table(fmt: Format, left_out: dict[int, str]) -> bytes:
    """Which prompt is in which file."""
    source = fmt.source
    run = source.run
    files: list[str | None] = [None] * len(source)
    for piece in fmt.pieces():
        if piece.has_states:
            for position in piece.positions:
                files[position] = piece.key if position not in left_out else None
    rows = run.segments.row[run.segments.first[:-1]]
    table = pa.table(
        {
            "file": pa.array(files, pa.string()),
            "position": pa.array(range(len(source)), pa.int64()),
            "row": pa.array(rows, pa.int64()),
            "prompt_id": pa.array(run.prompt_ids, pa.string()),
            "num_tokens": pa.array(source.lengths, pa.int64()),
            "left_out": pa.array([left_out.get(position) for position in range(len(source))], pa.string()),
        }
    )
    sink = pa.BufferOutputStream()
    pq.write_table(table, sink, compression="zstd")
    data: bytes = sink.getvalue().to_pybytes()
    return data


def _remove_unfinished(store: Store, fmt: Format) -> None:
    """Local files that a killed export never renamed."""
    if not isinstance(store.backend, LocalBackend):
        return
    root = store.backend.root
    left = {path: path.relative_to(root).as_posix().rpartition("#")[0] for path in root.rglob("*#[0-9]*")}
    ours = {piece.key for piece in fmt.pieces()} if left else set()
    for path, key in left.items():
        if key in ours:
            path.unlink(missing_ok=True)


def describe(result: Exported, store: Store, source: Source) -> str:
    """One line for people."""
    total = format_bytes(int(source.nbytes.sum()))
    files = f"{result.files:,} file{'' if result.files == 1 else 's'}"
    text = f"{result.prompts:,} prompts ({total} of states) in {files} at {store.url}"
    if not result.files:
        text = f"the tokens of {result.prompts:,} prompts, counted, at {store.url}"
    if result.was_complete:
        text = f"complete already: {text}"
    if result.left_out:
        reasons = sorted(set(result.left_out.values()))
        text += f"; left out {len(result.left_out):,}: {'; '.join(reasons)} ({PROMPTS_KEY} lists them)"
    return text


def check_has_prompts(source: Source, url: str) -> None:
    """Raises HsrayError where there is nothing to export."""
    if not len(source):
        raise HsrayError(f"{url} has no committed prompt to export")
