"""Input files: from `prompts.path` to an ordered list of files, their bytes and their hashes.

The one place of hsray.prompts that talks to fsspec. Promises: the order of files depends on names only; a path
that names nothing, or something that is no prompt file, is an error and never an empty input. Whatever a file
system raises leaves here as ConfigError or `ReadError`. Must never know what is inside a file.
"""

import re
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import IO, Any, Protocol
from urllib.parse import urlsplit

import fsspec
import xxhash

from hsray.config import PromptsConfig
from hsray.errors import ConfigError, PromptError

_BLOCK_BYTES = 1 << 20
# Compressed input is fed in smaller pieces, because one piece may expand a thousandfold.
_COMPRESSED_BLOCK_BYTES = 1 << 16
_COMPRESSIONS = (".gz", ".zst")
_TABLES = (".parquet", ".arrow")
_FORMATS = (".jsonl", ".json", ".csv", ".tsv", ".txt", *_TABLES)
# What `datasets` saves beside its .arrow files.
_SAVED_DATASET = frozenset({"state.json", "dataset_info.json", "dataset_dict.json"})
_LOCAL = ("file", "local")


@dataclass(frozen=True, slots=True)
class InputFile:
    """One file of the input, as it was when it was listed.

    Attributes:
        url: as the user would write it: a local path or an fsspec URL.
        nbytes: stored (compressed) size; None if an HTTP server does not tell.
        modified: etag or modification time, whatever the file system has; empty if it has neither. Two
            equal values mean that the file was not written in between.
    """

    url: str
    nbytes: int | None
    modified: str

    @property
    def format(self) -> str:
        """`.jsonl`, `.json`, `.csv`, `.tsv`, `.txt`, `.parquet` or `.arrow`."""
        return _suffixes(self.url)[0]

    @property
    def compression(self) -> str:
        """`.gz`, `.zst` or empty."""
        return _suffixes(self.url)[1]


class ReadError(PromptError):
    """A file breaks off or turns unreadable. The reader adds how far it came and raises ConfigError."""


def input_files(config: PromptsConfig) -> list[InputFile]:
    """The files of `prompts.path`, in input order.

    Paths keep their order. A directory stands for all files below it, a glob for the files it matches, both
    sorted by name. Hidden and marker files are skipped there: `*.crc`, whatever has a `.` or `_` in front of its
    name or of the name of a folder on the way, and the descriptions in a folder that `datasets` saved. A path
    written out is always taken.

    Raises:
        ConfigError: a path that does not exist or cannot be listed, a glob without a match, a directory
            without files, a file whose suffix is not known, text files among others (they may be notes).
    """
    found: list[InputFile] = []
    for path in config.paths:
        found.extend(_expand(path, config.storage_options))
    return found


def hash_file(file: InputFile, storage_options: Mapping[str, Any]) -> str:
    """xxh3-128 of the stored bytes (compressed, if they are), 32 hex digits. Raises ConfigError."""
    digest = xxhash.xxh3_128()
    try:
        for block in _stored_blocks(file, storage_options, _BLOCK_BYTES):
            digest.update(block)
    except ReadError as err:
        raise ConfigError(f"prompts.path: {file.url}: {err}") from err
    return digest.hexdigest()


def read_blocks(file: InputFile, storage_options: Mapping[str, Any]) -> Iterator[bytes]:
    """The decompressed bytes of a text file, in blocks.

    Raises:
        ConfigError: the file cannot be opened.
        ReadError: reading fails part-way, or compressed data is damaged or ends before its end marker.
    """
    if file.compression == ".gz":
        blocks = _stored_blocks(file, storage_options, _COMPRESSED_BLOCK_BYTES)
        # 31: a gzip header is required, and the trailing CRC and length are checked.
        return _decompress(blocks, lambda: zlib.decompressobj(wbits=31), zlib.error, padding=b"\0")
    if file.compression == ".zst":
        import zstandard

        blocks = _stored_blocks(file, storage_options, _COMPRESSED_BLOCK_BYTES)
        return _decompress(blocks, zstandard.ZstdDecompressor().decompressobj, zstandard.ZstdError, padding=b"")
    return _stored_blocks(file, storage_options, _BLOCK_BYTES)


@contextmanager
def open_file(file: InputFile, storage_options: Mapping[str, Any]) -> Iterator[IO[bytes]]:
    """The stored file, seekable. Raises ConfigError if it cannot be opened."""
    fs, name = _filesystem(file.url, storage_options)
    with _configured(file.url, "cannot be opened"):
        handle = fs.open(name, "rb")
    with handle:
        yield handle


class _Decompressor(Protocol):
    @property
    def eof(self) -> bool: ...
    @property
    def unused_data(self) -> bytes: ...
    def decompress(self, data: bytes, /) -> bytes: ...


def _decompress(
    blocks: Iterable[bytes], start: Callable[[], _Decompressor], error: type[Exception], padding: bytes
) -> Iterator[bytes]:
    # Members and frames may follow one another. Not zstandard's own stream reader: it takes a cut frame for
    # the end of the file.
    member: _Decompressor | None = None
    num_members = 0
    for block in blocks:
        rest = block
        while rest:
            if member is None:
                rest = rest.lstrip(padding) if padding and num_members else rest
                if not rest:
                    break
                member = start()
                num_members += 1
            try:
                data = member.decompress(rest)
            except error as err:
                raise ReadError(f"the compressed data is damaged ({err})") from err
            rest = b""
            if member.eof:
                rest = member.unused_data
                member = None
            if data:
                yield data
    if member is not None or num_members == 0:
        raise ReadError("the compressed data ends before its end marker: the file was cut")


def _stored_blocks(file: InputFile, storage_options: Mapping[str, Any], block_bytes: int) -> Iterator[bytes]:
    with open_file(file, storage_options) as handle:
        while True:
            try:
                block = handle.read(block_bytes)
            except Exception as err:  # each file system has its own exceptions
                raise ReadError(f"reading fails: {_explain(err)}") from err
            if not block:
                return
            yield block


def _expand(path: str, storage_options: Mapping[str, Any]) -> list[InputFile]:
    fs, name = _filesystem(path, storage_options)
    with _configured(path, "cannot be listed"):
        fs.invalidate_cache()
        try:
            info = fs.info(name)
        except FileNotFoundError:
            info = None
        if info is not None and info["type"] != "directory":
            # A name that exists is taken as it is, whatever glob characters are in it.
            return [_checked(path, info, path)]
        if info is not None:
            matches = fs.find(name, detail=True)
        elif fsspec.core.has_magic(name):
            matches = fs.glob(name, detail=True)
        else:
            raise ConfigError(f"prompts.path: {path} does not exist")

    root = name if info is not None else re.split(r"[*?\[]", name, maxsplit=1)[0].rpartition("/")[0]
    saved = any(match.endswith(".arrow") for match in matches)
    files = [
        _checked(_spelled(path, fs, match), found, path)
        for match, found in sorted(matches.items())
        if found["type"] != "directory" and not _is_marker(match[len(root) :]) and not (saved and _describes(match))
    ]
    if not files:
        what = "is a directory without prompt files" if info is not None else "matches no file"
        raise ConfigError(f"prompts.path: {path} {what} (names that start with . or _ and *.crc do not count)")
    notes = [file.url for file in files if file.format == ".txt"]
    if notes and len(notes) < len(files):
        raise ConfigError(
            f"prompts.path: {path} holds {notes[0]} beside files of other kinds; each of its lines would be a prompt. "
            "Name the files you mean, as in dir/*.jsonl"
        )
    return files


def _describes(name: str) -> bool:
    return PurePosixPath(name).name in _SAVED_DATASET


def _is_marker(name: str) -> bool:
    return name.endswith((".crc", "/")) or any(part.startswith((".", "_")) for part in PurePosixPath(name).parts)


def _checked(url: str, info: Mapping[str, Any], path: str) -> InputFile:
    file = InputFile(url, info.get("size"), _modified(info))
    if file.format not in _FORMATS or (file.format in _TABLES and file.compression):
        place = "" if url == path else f" (found by {path}; name the files you mean, as in dir/*.jsonl)"
        raise ConfigError(
            f"prompts.path: {url} is no prompt file: known are .jsonl, .json, .csv, .tsv and .txt, each also with .gz "
            f"or .zst, and .parquet and .arrow{place}"
        )
    return file


def _suffixes(url: str) -> tuple[str, str]:
    name = urlsplit(url).path if url.startswith(("http://", "https://")) else url.split("::", 1)[0]
    path = PurePosixPath(name.lower())
    if path.suffix in _COMPRESSIONS:
        return PurePosixPath(path.stem).suffix, path.suffix
    return path.suffix, ""


def _modified(info: Mapping[str, Any]) -> str:
    for key in ("ETag", "etag", "mtime", "LastModified", "last_modified", "updated"):
        if info.get(key) is not None:
            return str(info[key]).strip('"')
    return ""


def _spelled(path: str, fs: Any, name: str) -> str:
    """`name`, found on `fs` by expanding `path`, written the way `path` is written."""
    if fsspec.utils.get_protocol(path) in _LOCAL:
        if "://" not in path and not Path(path).is_absolute() and Path(name).is_relative_to(Path.cwd()):
            return str(Path(name).relative_to(Path.cwd()))
        return name
    url: str = fs.unstrip_protocol(name)
    _, chain, outer = path.partition("::")
    return url + chain + outer


def _filesystem(url: str, storage_options: Mapping[str, Any]) -> tuple[Any, str]:
    with _configured(url, "cannot be opened"):
        options = {} if fsspec.utils.get_protocol(url) in _LOCAL else storage_options
        fs, name = fsspec.core.url_to_fs(url, **options)
        return fs, name


@contextmanager
def _configured(url: str, what: str) -> Iterator[None]:
    """Turn whatever a file system raises (OSError, ImportError, botocore's own, ...) into ConfigError."""
    try:
        yield
    except ConfigError:
        raise
    except Exception as err:
        raise ConfigError(f"prompts.path: {url} {what}: {_explain(err)}") from err


def _explain(err: Exception) -> str:
    if isinstance(err, FileNotFoundError):
        return "no such file"
    return f"{type(err).__name__}: {err}" if str(err) else type(err).__name__
