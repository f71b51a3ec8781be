"""Object storage: one URL -> `Store`, the same on memory, local files, S3, GCS and Azure.

Promises: an object is visible whole or not at all; `create_once` has exactly one winner per key and never guesses
who it was; a transient error is retried with full jitter until `retry_seconds` have passed; every other error is a
`StoreUnusable` that names the fix. obstore's exceptions are caught here and nowhere else. Calls block, may come
from any thread, and must not cross a fork (obstore's threads do not survive one).

This module never knows what a key means.
"""

import contextlib
import copy
import json
import logging
import os
import random
import re
import threading
import time
import urllib.parse
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Literal, Protocol, Self, TypeVar, get_args

import obstore
from obstore.exceptions import AlreadyExistsError, BaseError, InvalidPathError, NotSupportedError, PreconditionError
from obstore.store import AzureStore, GCSStore, LocalStore, MemoryStore, S3Store
from typing_extensions import Buffer

from hsray.errors import ConfigError, StoreError, StoreUnavailable, StoreUnusable
from hsray.records import JsonDict

logger = logging.getLogger(__name__)

T = TypeVar("T")
CommitMode = Literal["conditional", "single-writer"]
Client = AzureStore | GCSStore | LocalStore | MemoryStore | S3Store
Purpose = Literal["small", "bulk", "upload"]

PART_BYTES: Final = 16 * 1024 * 1024
PARTS_IN_FLIGHT: Final = 4
PROBE_SECONDS: Final = 60.0
FIRST_PAUSE_SECONDS: Final = 0.5
MAX_PAUSE_SECONDS: Final = 30.0
# User metadata that proves whose multipart upload an object is. Azure allows only identifiers as names.
WRITE_ID_ATTRIBUTE: Final = "hsraywriteid"


@dataclass(frozen=True, slots=True)
class ObjectInfo:
    """One stored object: key relative to the store's URL, size in bytes, time of last write (UTC)."""

    key: str
    nbytes: int
    modified: datetime


@dataclass(frozen=True, slots=True)
class CreateResult:
    """Outcome of `create_once`: whether the record that stands is ours, and that record."""

    won: bool
    record: JsonDict


class _KeyExists(Exception):
    """A conditional put found the key taken, perhaps by an earlier try of the same put."""


class Backend(Protocol):
    """Where the objects are. `prefix` is empty or ends with a slash, and is not part of any key."""

    prefix: str

    @property
    def is_local(self) -> bool: ...

    def client(self, purpose: Purpose = "small", *, writing: bool = False) -> Client:
        """The obstore client for small requests, for whole large bodies, or for streaming uploads.

        Raises FileNotFoundError if a local root does not exist and nothing is being written.
        """
        ...


class RemoteBackend:
    """A bucket, or a named piece of this process's memory."""

    is_local = False

    def __init__(self, clients: Mapping[Purpose, Client], prefix: str) -> None:
        self.prefix = prefix
        self._clients = clients

    def client(self, purpose: Purpose = "small", *, writing: bool = False) -> Client:
        return self._clients[purpose]


class LocalBackend:
    """A directory, made when the first object is written."""

    is_local = True
    prefix = ""

    def __init__(self, root: Path) -> None:
        self.root = root
        self._client: LocalStore | None = None

    def client(self, purpose: Purpose = "small", *, writing: bool = False) -> Client:
        if self._client is None or (writing and not self.root.is_dir()):
            if not writing and not self.root.is_dir():
                raise FileNotFoundError(str(self.root))
            self._client = LocalStore(self.root, mkdir=True)
        return self._client


def _full_jitter(cap: float) -> float:
    return random.uniform(0.0, cap)


class Store:
    """Objects under one URL. Keys are relative to it, made of plain segments joined by single slashes.

    Made by `open_store`. Every method may raise `StoreUnavailable` once `retry_seconds` have passed without an
    answer, and `StoreUnusable` at once when the store refuses. A missing object is a builtin FileNotFoundError;
    a missing bucket is a `StoreUnusable`.
    """

    def __init__(
        self,
        url: str,
        backend: Backend,
        *,
        commit: CommitMode = "conditional",
        retry_seconds: float = 1800.0,
        on_retry: Callable[[str, int], None] | None = None,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
        jitter: Callable[[float], float] = _full_jitter,
    ) -> None:
        self.url = url
        self.backend = backend
        self.commit = commit
        self.retry_seconds = retry_seconds
        self._on_retry = on_retry
        self._clock = clock
        self._sleep = sleep
        self._jitter = jitter

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.url!r})"

    # -- whole objects

    def put(self, key: str, data: Buffer) -> None:
        """Write a whole object, replacing what was there. `data` is any C-contiguous buffer."""
        view = _byte_view(data)
        if view.nbytes > PART_BYTES:
            self.retrying("put", key, lambda: self._put_parts(key, view))
        else:
            self.retrying("put", key, lambda: self.attempt("put", key, lambda: self._put_whole(key, view)))

    def create_once(self, key: str, record: JsonDict) -> CreateResult:
        """Create a JSON record if the key is free. Exactly one caller wins, over any number of processes.

        The record is stored with a fresh `write_id`, by which the winner knows itself when an acknowledgement was
        lost: after every unclear answer the key is read back, and an absent key means try again. After a
        `StoreUnavailable` the record may or may not stand; a later call tells.

        Returns:
            Whether this call's record stands, and the record that does (with its `write_id`).

        Raises:
            StoreUnusable: the store has no conditional put, or the key holds something that is no JSON object.
        """
        mine: JsonDict = {**record, "write_id": uuid.uuid4().hex}
        body = encode_json(mine)

        def attempt() -> CreateResult:
            unclear: Exception
            try:
                self.attempt("create", key, lambda: self._create(key, body))
                return CreateResult(True, mine)
            except (_KeyExists, StoreUnavailable) as err:
                unclear = err
            try:
                standing = self._read_json(key)
            except FileNotFoundError:
                # Not there, so nobody has won: a conflict of two writers (409), or our request never arrived.
                raise StoreUnavailable(f"not stored: {unclear}") from unclear
            return CreateResult(standing.get("write_id") == mine["write_id"], standing)

        return self.retrying("create", key, attempt)

    def get(self, key: str) -> bytes:
        """The whole object, copied once. For large objects `get_range` copies nothing."""
        return self.retrying("get", key, lambda: self._get(key, "bulk"))

    def get_json(self, key: str) -> JsonDict:
        """The JSON object under `key`. Raises StoreUnusable, naming the key, if it holds anything else."""
        return self.retrying("get", key, lambda: self._read_json(key))

    def get_range(self, key: str, start: int, nbytes: int) -> memoryview:
        """`nbytes` bytes from offset `start`: a read-only view of the received buffer, without a copy.

        Raises:
            StoreError: the object ends before `start + nbytes`.
        """
        if start < 0 or nbytes < 0:
            raise ValueError(f"start and nbytes must not be negative, got {start} and {nbytes}")
        if nbytes == 0:
            return memoryview(b"")

        def request() -> memoryview:
            client = self.backend.client("bulk" if nbytes > PART_BYTES else "small")
            return memoryview(obstore.get_range(client, self._path(key), start=start, length=nbytes))

        try:
            view = self.retrying("get", key, lambda: self.attempt("get", key, request))
        except StoreUnusable as err:
            # Every store refuses a range that begins past the end in words of its own; the size tells.
            size = self.head(key).nbytes
            if start < size:
                raise
            raise StoreError(self._too_short(key, start, nbytes, size)) from err
        if view.nbytes != nbytes:
            raise StoreError(self._too_short(key, start, nbytes, start + view.nbytes))
        return view

    def head(self, key: str) -> ObjectInfo:
        """Size and time of one object."""
        return self.retrying("head", key, lambda: self._head(key))

    def list(self, prefix: str = "") -> Iterator[ObjectInfo]:
        """Stream all objects below a folder (`""` or a key ending with a slash), in no promised order."""
        if prefix and not prefix.endswith("/"):
            raise ValueError(f"list takes a folder such as 'leases/', got {prefix!r}")
        folder = self.backend.prefix + prefix
        patience = _Patience(self, "list", prefix)
        last: str | None = None
        while True:
            try:
                stream = self._list_stream(folder, last)
                while batch := self._next_batch(stream, prefix):
                    for meta in batch:
                        yield ObjectInfo(meta["path"][len(self.backend.prefix) :], meta["size"], meta["last_modified"])
                    last = batch[-1]["path"]
                    patience = _Patience(self, "list", prefix)
                return
            except FileNotFoundError:
                return  # a local run that has not written anything yet
            except StoreUnavailable as err:
                if last is not None and self.backend.is_local:
                    raise  # a directory has no order to resume in
                patience.wait(err)

    def delete(self, keys: Iterable[str]) -> None:
        """Delete objects. A key that does not exist is no error."""
        names = [*keys]
        paths = [self._path(key) for key in names]
        if not paths:
            return
        what = names[0] if len(names) == 1 else f"{names[0]} and {len(names) - 1} more"
        self.retrying("delete", what, lambda: self.attempt("delete", what, lambda: self._delete(paths)))

    def upload(self, key: str) -> "Upload":
        """A large object, written piece by piece with bounded memory; see `Upload`."""
        self._path(key)
        return Upload(self, key)

    def probe(self) -> None:
        """Check in at most a minute that this URL can hold a run: reachable, writable, with a working conditional put.

        Writes and deletes one scratch object.

        Raises:
            StoreUnusable: it cannot; the message says what to change.
        """
        key = f".hsray-probe-{uuid.uuid4().hex}"
        prober = copy.copy(self)
        prober.retry_seconds = min(self.retry_seconds, PROBE_SECONDS)
        try:
            prober.create_once(key, {"probe": 1})
            second = prober.create_once(key, {"probe": 2})
            if second.won:
                raise StoreUnusable(
                    f"{self.url} ignores conditional puts (If-None-Match): two drivers could both win a lease. Use a "
                    "store that has them, or set output.commit: single-writer if only one driver ever writes here"
                )
        except StoreUnavailable as err:
            raise StoreUnusable(
                f"{self.url} is of no use for {prober.retry_seconds:.0f} s: {err.__cause__}. Check output.url, the "
                "network, output.storage_options.endpoint or AWS_ENDPOINT_URL, and that credentials are set"
            ) from err
        try:
            prober.delete([key])
        except StoreError as err:
            # A bucket that forbids deleting can hold a run; only gc needs the permission.
            logger.warning("scratch object not deleted key=%s: %s", key, err)

    # -- requests

    def attempt(self, operation: str, key: str, request: Callable[[], T]) -> T:
        """Run one request and translate its exception. Every request of this module passes here exactly once.

        `operation` is one of put, create, get, head, list, delete, upload. Overridden by `testing.FlakyStore`.
        """
        try:
            return request()
        except (BaseError, OSError, NotImplementedError) as err:
            raise _translate(err, operation, self.locate(key), self.url) from err

    def retrying(self, operation: str, key: str, attempt: Callable[[], T]) -> T:
        """Call `attempt` until it raises something other than `StoreUnavailable`, or the deadline has passed.

        Pauses are drawn from [0, cap) with a cap that doubles up to 30 s (full jitter). For callers that repeat
        more than one request, such as a whole upload.
        """
        patience = _Patience(self, operation, key)
        while True:
            try:
                return attempt()
            except StoreUnavailable as err:
                patience.wait(err)

    def locate(self, key: str) -> str:
        """Full URL of a key, for messages."""
        return f"{self.url}/{key}"

    def _path(self, key: str) -> str:
        if not key or any(part in ("", ".", "..") for part in key.split("/")):
            raise ValueError(f"not a key: {key!r}")
        return self.backend.prefix + key

    def _put_whole(self, key: str, view: memoryview) -> None:
        obstore.put(self.backend.client(writing=True), self._path(key), view, use_multipart=False)

    def _put_parts(self, key: str, view: memoryview) -> None:
        with self.upload(key) as upload:
            upload.write(view)
            upload.complete()

    def _create(self, key: str, body: bytes) -> None:
        if self.commit == "conditional":
            self._put_if_absent(key, body)
            return
        # single-writer: nobody else writes, so look and put are one step.
        try:
            obstore.head(self.backend.client(writing=True), self._path(key))
        except FileNotFoundError:
            self._put_whole(key, memoryview(body))
        else:
            raise _KeyExists(key)

    def _put_if_absent(self, key: str, body: bytes) -> None:
        obstore.put(self.backend.client(writing=True), self._path(key), body, mode="create", use_multipart=False)

    def _get(self, key: str, purpose: Purpose) -> bytes:
        def request() -> bytes:
            return obstore.get(self.backend.client(purpose), self._path(key)).bytes().to_bytes()

        return self.attempt("get", key, request)

    def _read_json(self, key: str) -> JsonDict:
        raw = self._get(key, "small")
        try:
            record = json.loads(raw)
        except ValueError as err:
            raise StoreUnusable(f"{self.locate(key)} is not JSON ({err}): remove it or use another output.url") from err
        if not isinstance(record, dict):
            raise StoreUnusable(f"{self.locate(key)} is not a JSON object: remove it or use another output.url")
        return record

    def _head(self, key: str) -> ObjectInfo:
        try:
            meta = self.attempt("head", key, lambda: obstore.head(self.backend.client(), self._path(key)))
        except FileNotFoundError:
            # A HEAD has no body, so its 404 does not tell a missing object from a missing bucket. A LIST does.
            if not self.backend.is_local:
                self.attempt("list", key, lambda: next(obstore.list(self.backend.client(), self._path(key)), None))
            raise
        return ObjectInfo(key, meta["size"], meta["last_modified"])

    def _list_stream(self, folder: str, after: str | None) -> Iterator[Sequence[Mapping[str, Any]]]:
        def request() -> Iterator[Sequence[Mapping[str, Any]]]:
            return iter(obstore.list(self.backend.client(), folder or None, offset=after, chunk_size=1000))

        return self.attempt("list", folder, request)

    def _next_batch(self, stream: Iterator[Sequence[Mapping[str, Any]]], folder: str) -> Sequence[Mapping[str, Any]]:
        return self.attempt("list", folder, lambda: next(stream, ()))

    def _delete(self, paths: Sequence[str]) -> None:
        try:
            obstore.delete(self.backend.client(), [*paths])
        except FileNotFoundError as err:
            if _missing_bucket(str(err)):
                raise
            # Only some stores take a missing key for deleted; the others stop at the first one.
            for path in paths:
                with contextlib.suppress(FileNotFoundError):
                    obstore.delete(self.backend.client(), path)

    def _too_short(self, key: str, start: int, nbytes: int, size: int) -> str:
        return f"{self.locate(key)} ends at byte {size}, but bytes {start} to {start + nbytes} were asked for"


class Upload:
    """One object, written piece by piece. Nothing is visible under its key before the `with` block has ended well.

        with store.upload(key) as upload:
            upload.write(...)
            upload.complete()

    An exception in the block, or a block that ends without `complete()`, aborts: the multipart upload or temporary
    file is removed. At most 4 parts of 16 MB are on their way (plus one being filled), and `write` blocks while
    they are. An object of less than 16 MB is one plain put with the store's full patience; a larger one survives
    about four minutes of a store that does not answer, then raises `StoreUnavailable` from `write` or from the end
    of the block, and the caller may write it again (`Store.retrying`).

    A file object for pyarrow: `closed` is a property, `close()` only ends writing and decides nothing, and writes
    after an abort are dropped (a ParquetWriter writes its footer when it is garbage-collected). Not for use by
    several threads at once.
    """

    def __init__(self, store: Store, key: str) -> None:
        self._store = store
        self._key = key
        self._write_id = uuid.uuid4().hex
        self._head = bytearray()
        self._writer: obstore.WritableFile | None = None
        self._nbytes = 0
        self._state: Literal["new", "open", "closed", "failed", "complete", "done", "aborted"] = "new"

    @property
    def nbytes(self) -> int:
        """Bytes written so far."""
        return self._nbytes

    @property
    def closed(self) -> bool:
        return self._state not in ("open", "aborted")

    def write(self, data: Buffer) -> int:
        """Append a C-contiguous buffer; returns its size in bytes. Blocks while the store is behind."""
        if self._state == "aborted":
            return memoryview(data).nbytes
        if self.closed:
            raise ValueError(f"upload of {self._key} is {self._state}, not open for writing")
        view = _byte_view(data)
        try:
            for start in range(0, view.nbytes, PART_BYTES):
                self._append(view[start : start + PART_BYTES])
        except BaseException:
            # A caller that swallows this must not be able to publish what is left.
            self._state = "failed"
            raise
        self._nbytes += view.nbytes
        return view.nbytes

    def tell(self) -> int:
        return self._nbytes

    def flush(self) -> None:
        """Nothing to do: an object is published as a whole."""

    def readable(self) -> bool:
        return False

    def writable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return False

    def close(self) -> None:
        """No more writes. Publishes nothing; `complete()` may still follow."""
        if self._state == "open":
            self._state = "closed"

    def complete(self) -> None:
        """Everything has been written: publish when the block ends."""
        if self._state not in ("open", "closed"):
            raise ValueError(f"upload of {self._key} is {self._state}, it cannot be completed")
        self._state = "complete"

    def __enter__(self) -> Self:
        if self._state != "new":
            raise ValueError(f"upload of {self._key} is {self._state}; an upload is used once")
        self._state = "open"
        return self

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        completed = self._state == "complete" and exc_type is None
        self._state = "done" if completed else "aborted"
        if not completed:
            self._abort()
        elif self._writer is None:
            self._store.put(self._key, self._head)
        else:
            self._publish(self._writer)

    def _append(self, piece: memoryview) -> None:
        if self._writer is None:
            if len(self._head) + piece.nbytes < PART_BYTES:
                self._head += piece
                return
            self._writer = self._open_writer()
            if self._head:
                self._send(self._writer, memoryview(self._head))
            self._head = bytearray()
        self._send(self._writer, piece)

    def _open_writer(self) -> "obstore.WritableFile":
        backend = self._store.backend
        return self._store.attempt(
            "upload",
            self._key,
            lambda: obstore.open_writer(
                backend.client("upload", writing=True),
                backend.prefix + self._key,
                # Local files carry no attributes, and need none: their publishing is a rename.
                attributes=None if backend.is_local else {WRITE_ID_ATTRIBUTE: self._write_id},
                buffer_size=PART_BYTES,
                max_concurrency=PARTS_IN_FLIGHT,
            ),
        )

    def _send(self, writer: "obstore.WritableFile", piece: memoryview) -> None:
        # obstore starts as many parts as one write holds, whatever max_concurrency says: pieces are at most a part.
        try:
            self._store.attempt("upload", self._key, lambda: writer.write(piece))
        except FileNotFoundError as err:
            raise StoreUnavailable(f"upload {self._store.locate(self._key)}: the store dropped the upload") from err

    def _publish(self, writer: "obstore.WritableFile") -> None:
        try:
            self._store.attempt("upload", self._key, writer.close)
        except (StoreUnavailable, FileNotFoundError) as err:
            # The completion may have arrived and its answer been lost; a repeated completion then finds no upload.
            if self._is_published():
                return
            self._abort()
            raise StoreUnavailable(f"upload {self._store.locate(self._key)}: not completed ({err})") from err
        except BaseException:
            self._abort()
            raise

    def _is_published(self) -> bool:
        backend = self._store.backend
        if backend.is_local:
            return False
        path = backend.prefix + self._key

        def standing_write_id() -> Any:
            found = obstore.get(backend.client(), path, options={"head": True})
            return found.attributes.get(WRITE_ID_ATTRIBUTE)

        try:
            write_id = self._store.retrying(
                "head", self._key, lambda: self._store.attempt("head", self._key, standing_write_id)
            )
        except FileNotFoundError:
            return False
        return bool(write_id == self._write_id)

    def _abort(self) -> None:
        self._head = bytearray()
        if self._writer is None or self._writer.closed():
            return
        aborted = _AbortUpload(self._key)
        try:
            self._writer.__exit__(_AbortUpload, aborted, None)
        except (BaseError, OSError) as err:
            # Invisible to readers either way; the bucket's lifecycle rule for unfinished uploads gets it.
            logger.warning("unfinished upload left behind key=%s: %s", self._key, _brief(err))


class _AbortUpload(Exception):
    """What obstore's writer is told when an upload is given up."""


class _Patience:
    """The pauses of one retried operation: full jitter, a deadline, a log line at the 1st, 2nd, 4th, ... retry."""

    def __init__(self, store: Store, operation: str, key: str) -> None:
        self._store = store
        self._operation = operation
        self._key = key
        self._started = store._clock()
        self._attempts = 0

    def wait(self, err: StoreUnavailable) -> None:
        """Pause before the next attempt, or raise StoreUnavailable if the deadline would pass meanwhile."""
        store = self._store
        self._attempts += 1
        cap = min(MAX_PAUSE_SECONDS, FIRST_PAUSE_SECONDS * 2 ** min(self._attempts - 1, 30))
        pause = store._jitter(cap)
        waited = store._clock() - self._started
        if waited + pause >= store.retry_seconds:
            raise StoreUnavailable(
                f"{self._operation} {store.locate(self._key)}: given up after {self._attempts} tries in {waited:.0f} s "
                f"(output.retry_seconds={store.retry_seconds:g}): {err}"
            ) from err
        if store._on_retry is not None:
            store._on_retry(self._operation, self._attempts)
        if self._attempts & (self._attempts - 1) == 0:
            logger.log(
                logging.INFO if self._attempts < 4 else logging.WARNING,
                "store retry operation=%s key=%s attempt=%d waited_seconds=%.1f: %s",
                self._operation,
                self._key,
                self._attempts,
                waited,
                err,
            )
        store._sleep(pause)


def encode_json(record: JsonDict) -> bytes:
    """Canonical JSON: sorted keys, no spaces, UTF-8. Raises TypeError or ValueError on what JSON cannot hold."""
    return json.dumps(record, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False).encode()


def _byte_view(data: Buffer) -> memoryview:
    view = memoryview(data)
    # cast refuses a zero in the shape.
    return view.cast("B") if view.nbytes else memoryview(b"")


# -- opening


_memory_stores: dict[str, MemoryStore] = {}
_memory_lock = threading.Lock()
_SCHEME = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*)://(.*)", re.DOTALL)
_KNOWN_SCHEMES = "a path, file://, s3://bucket/prefix, gs://bucket/prefix, az://container/prefix, memory://name"


def open_store(
    url: str,
    storage_options: Mapping[str, Any] | None = None,
    *,
    commit: CommitMode = "conditional",
    retry_seconds: float = 1800.0,
    on_retry: Callable[[str, int], None] | None = None,
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> Store:
    """Open the store under a URL. Sends nothing; `Store.probe` checks that it works.

    Args:
        url: a local path or file:// URL (made on first write), s3://bucket/prefix, gs://bucket/prefix,
            az://container/prefix, or memory://name (shared by name within the process).
        storage_options: obstore's options of this store, verbatim (`endpoint`, `region`, `allow_http`,
            `virtual_hosted_style_request`, `unsigned_payload`, `timeout`, ...). Credentials are better left to the
            environment (AWS_ACCESS_KEY_ID, GOOGLE_APPLICATION_CREDENTIALS, AZURE_STORAGE_ACCOUNT_NAME, ...).
        commit: `single-writer` replaces the conditional put of `create_once` by a look and a plain put.
        retry_seconds: how long a transient error is retried.
        on_retry: called with (operation, retry number) before every pause.
        clock: seconds, monotonic.
        sleep: pauses for so many seconds.

    Raises:
        ConfigError: a URL or option that cannot work, naming output.url or output.storage_options.
    """
    normal_url, backend = _open_backend(url, dict(storage_options or {}))
    return Store(
        normal_url,
        backend,
        commit=commit,
        retry_seconds=retry_seconds,
        on_retry=on_retry,
        clock=clock,
        sleep=sleep,
    )


def _open_backend(url: str, options: dict[str, Any]) -> tuple[str, Backend]:
    if not url.strip():
        raise ConfigError(f"output.url is empty: give {_KNOWN_SCHEMES}")
    match = _SCHEME.fullmatch(url)
    scheme, rest = (match[1].lower(), match[2]) if match else ("file", url)
    if scheme == "file":
        _refuse_options(options, url)
        return _open_local(url, rest, is_path=match is None)
    container, _, prefix = rest.partition("/")
    if scheme not in ("memory", "s3", "gs", "az"):
        near = {"s3a": "s3", "s3n": "s3", "gcs": "gs", "azure": "az", "abfs": "az", "abfss": "az"}.get(scheme)
        hint = f"write {near}://{rest}" if near else f"use {_KNOWN_SCHEMES}"
        raise ConfigError(f"output.url: unknown scheme {scheme!r} in {url!r}; {hint}")
    if not container:
        raise ConfigError(f"output.url: {url!r} names no {'name' if scheme == 'memory' else 'bucket'}")
    prefix = _clean_prefix(prefix, url)
    normal_url = f"{scheme}://{container}/{prefix}".rstrip("/")
    if scheme == "memory":
        _refuse_options(options, url)
        with _memory_lock:
            memory = _memory_stores.setdefault(container, MemoryStore())
        return normal_url, RemoteBackend(dict.fromkeys(get_args(Purpose), memory), prefix)
    if scheme == "s3":
        _complete_s3_options(options)
    purposes: tuple[Purpose, ...] = get_args(Purpose)
    clients = {purpose: _open_client(scheme, container, options, purpose) for purpose in purposes}
    return normal_url, RemoteBackend(clients, prefix)


def _open_local(url: str, rest: str, *, is_path: bool) -> tuple[str, Backend]:
    if not is_path:
        if not rest.startswith("/"):
            raise ConfigError(f"output.url: {url!r} must have three slashes: file:///absolute/path")
        rest = urllib.parse.unquote(rest)
    root = Path(rest).expanduser().absolute()
    if root.exists() and not root.is_dir():
        raise ConfigError(f"output.url: {root} is a file; give a directory, which may be new")
    return str(root), LocalBackend(root)


def _clean_prefix(prefix: str, url: str) -> str:
    prefix = prefix.rstrip("/")
    if not prefix:
        return ""
    if any(part in ("", ".", "..") for part in prefix.split("/")):
        raise ConfigError(f"output.url: {url!r} has an empty, '.' or '..' segment")
    if "?" in prefix or "#" in prefix:
        raise ConfigError(f"output.url: {url!r} has a '?' or '#'; options belong in output.storage_options")
    return prefix + "/"


def _refuse_options(options: Mapping[str, Any], url: str) -> None:
    if options:
        raise ConfigError(f"output.storage_options: {url!r} takes none, got {', '.join(options)}")


_ENDPOINT_OPTIONS = ("endpoint", "endpoint_url", "aws_endpoint", "aws_endpoint_url", "aws_endpoint_url_s3")
_ENDPOINT_VARIABLES = ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL", "AWS_ENDPOINT")


def _complete_s3_options(options: dict[str, Any]) -> None:
    """Fill in what follows from the endpoint, and refuse one on which obstore would panic."""
    given = {name.lower() for name in options} | {
        name.removeprefix("AWS_").lower() for name in os.environ if name.startswith("AWS_")
    }
    endpoint, origin = None, ""
    for name, value in options.items():
        if name.lower() in _ENDPOINT_OPTIONS:
            endpoint, origin = str(value), f"output.storage_options.{name}"
    if endpoint is None:
        for variable in _ENDPOINT_VARIABLES:
            if os.environ.get(variable):
                endpoint, origin = os.environ[variable], variable
                break
    if endpoint is not None:
        parts = urllib.parse.urlsplit(endpoint)
        if parts.scheme not in ("http", "https") or not parts.hostname or any(c.isspace() for c in endpoint):
            raise ConfigError(f"{origin}: {endpoint!r} is not a URL such as https://s3.example.com")
    is_plain = endpoint is not None and endpoint.startswith("http://")
    if is_plain and not given & {"allow_http", "aws_allow_http"}:
        options["allow_http"] = True
    # TLS already protects the payload; hashing it again costs more CPU than everything else in a put.
    if not is_plain and not given & {"unsigned_payload", "aws_unsigned_payload"}:
        options["unsigned_payload"] = True


def _open_client(scheme: str, container: str, options: Mapping[str, Any], purpose: Purpose) -> Client:
    """obstore's own retry stays short, so that `retry_seconds` and full jitter rule.

    Only the parts of a streaming upload cannot be retried from outside: that client tries for longer, but less than
    the five minutes after which a repeated request carries an outdated signature.
    """
    kwargs = dict(options)
    nested = kwargs.pop("client_options", {})
    if "retry_config" in kwargs:
        raise ConfigError("output.storage_options.retry_config is hsray's own; set output.retry_seconds instead")
    client_options: Any = dict(nested)
    if "timeout" not in kwargs:
        client_options.setdefault("timeout", "60s" if purpose == "small" else "600s")
    is_patient = purpose == "upload"
    retry_config: Any = {
        "max_retries": 1000 if is_patient else 2,
        "retry_timeout": timedelta(seconds=240 if is_patient else 10),
        "backoff": {
            "init_backoff": timedelta(milliseconds=100),
            "max_backoff": timedelta(seconds=10 if is_patient else 1),
            "base": 2,
        },
    }
    maker: Any = {"s3": S3Store, "gs": GCSStore, "az": AzureStore}[scheme]
    try:
        client: Client = maker(container, client_options=client_options, retry_config=retry_config, **kwargs)
    except (BaseError, TypeError, ValueError) as err:
        raise ConfigError(f"output.storage_options for {scheme}://{container}: {_first_line(err)}") from err
    return client


# -- translating errors


_STATUS = re.compile(r"status code: (\d{3})")
_CODE = re.compile(r"<Code>(\w+)</Code>|\"(?:code|reason)\": ?\"(\w+)\"")
_TRANSPORT_KIND = re.compile(r"HttpError \{\s+kind: (\w+)")
_CAUSE = re.compile(r"(?:message|error): \"([^\"]+)\"")
# Where a client looks for credentials when the environment has none: AWS, Google, Azure.
_METADATA_SERVICE = re.compile(r"http\S+/(?:latest/(?:api/token|meta-data)|computeMetadata|metadata/identity)")
_CREDENTIALS = {
    "s3": "AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY",
    "gs": "GOOGLE_APPLICATION_CREDENTIALS",
    "az": "AZURE_STORAGE_ACCOUNT_NAME and AZURE_STORAGE_ACCOUNT_KEY",
}
_OS_ERROR = re.compile(r"\(os error (\d+)\)")
_MISSING_BUCKET = ("NoSuchBucket", "ContainerNotFound", "The specified bucket does not exist")
# Answers of the 4xx kind that only mean: not now.
_TRANSIENT_CODES = {
    "RequestTimeout",
    "SlowDown",
    "IncompleteBody",
    "BadDigest",
    "OperationAborted",
    "ConditionalRequestConflict",
    "rateLimitExceeded",
    "userRateLimitExceeded",
}
_EXPIRED_CODES = {"ExpiredToken", "ExpiredTokenException", "TokenRefreshRequired"}
_TRANSIENT_OS_ERRORS = {4, 11, 23, 24, 110, 116}  # EINTR EAGAIN ENFILE EMFILE ETIMEDOUT ESTALE
_NO_ROOM_OS_ERRORS = {27, 28, 122}  # EFBIG ENOSPC EDQUOT


def _translate(err: Exception, operation: str, where: str, url: str) -> Exception:
    """The exception to raise for what obstore raised."""
    text = str(err)
    what = f"{operation} {where}"
    brief = _brief(err)
    if isinstance(err, InvalidPathError):
        return ValueError(f"{what}: {brief}")
    status_match = _STATUS.search(text)
    status = int(status_match[1]) if status_match else None
    code = _error_code(text)
    if _missing_bucket(text):
        return StoreUnusable(f"{what}: the bucket of {url} does not exist. Create it, or correct output.url")
    if isinstance(err, FileNotFoundError):
        if operation in ("put", "create"):
            return StoreUnusable(f"{what}: refused: {brief}. Check output.url")
        return FileNotFoundError(where)
    if isinstance(err, AlreadyExistsError | PreconditionError):
        return _KeyExists(f"{what}: {brief}") if operation == "create" else StoreUnavailable(f"{what}: {brief}")
    if isinstance(err, NotImplementedError | NotSupportedError):
        hint = "; set output.commit: single-writer if only one driver ever writes here" if operation == "create" else ""
        return StoreUnusable(f"{what}: the store cannot do this ({brief}){hint}")
    if isinstance(err, OSError) and err.errno is not None:
        return _translate_local(err.errno, operation, what, brief)
    if os_error := _OS_ERROR.search(text):
        return _translate_local(int(os_error[1]), operation, what, brief)
    if text.startswith(("Generic LocalFileSystem error", "Generic InMemory error")):
        return StoreUnusable(f"{what}: {brief}")
    credentials = _CREDENTIALS.get(url.partition("://")[0], "credentials")
    if _METADATA_SERVICE.search(text):
        no_credentials = f"{what}: no credentials. Set {credentials}, or give this machine a role ({brief})"
        return (StoreUnusable if status in (401, 403, 404) else StoreUnavailable)(no_credentials)
    if status is not None:
        return _translate_status(status, code, what, brief, credentials)
    return _translate_transport(text, what, brief)


def _translate_status(status: int, code: str, what: str, brief: str, credentials: str) -> Exception:
    if code in _EXPIRED_CODES:
        if os.environ.get("AWS_SESSION_TOKEN"):
            return StoreUnusable(
                f"{what}: AWS_SESSION_TOKEN has expired. Set new credentials; the same command then resumes"
            )
        return StoreUnavailable(f"{what}: the credentials have expired and are being renewed ({code})")
    if status in (408, 409, 429) or code in _TRANSIENT_CODES or (status >= 500 and status not in (501, 505)):
        return StoreUnavailable(f"{what}: {brief}")
    if code == "RequestTimeTooSkewed":
        return StoreUnusable(f"{what}: this machine's clock is wrong ({code}). Set it, for example with NTP")
    if status in (401, 403):
        return StoreUnusable(
            f"{what}: access denied ({f'{status} {code}'.rstrip()}). Check {credentials}, or the machine's role, "
            "and that they may read, write and list under output.url"
        )
    if code in ("AuthorizationHeaderMalformed", "PermanentRedirect", "TemporaryRedirect") or 300 <= status < 400:
        return StoreUnusable(f"{what}: wrong region ({brief}). Set output.storage_options.region or AWS_REGION")
    return StoreUnusable(f"{what}: refused: {brief}")


def _translate_local(os_error: int, operation: str, what: str, brief: str) -> Exception:
    if os_error in _TRANSIENT_OS_ERRORS:
        return StoreUnavailable(f"{what}: {brief}")
    if os_error in _NO_ROOM_OS_ERRORS:
        return StoreUnusable(f"{what}: no room ({brief}). Free space or raise the quota; the same command then resumes")
    if operation == "create" and os_error in (1, 38, 95):  # EPERM ENOSYS EOPNOTSUPP of link(2)
        return StoreUnusable(
            f"{what}: this file system has no hard links ({brief}), which put-if-absent needs. Use another output.url, "
            "or set output.commit: single-writer if only one driver ever writes here"
        )
    if os_error in (1, 13, 30):  # EPERM EACCES EROFS
        return StoreUnusable(f"{what}: not permitted ({brief}). Give this user write access, or change output.url")
    return StoreUnusable(f"{what}: {brief}. Check output.url")


def _translate_transport(text: str, what: str, brief: str) -> Exception:
    """No answer with a status: the network, TLS, or the client's own configuration."""
    if "BadScheme" in text or "URL scheme is not allowed" in text:
        return StoreUnusable(
            f"{what}: the endpoint is http://. Set output.storage_options.allow_http: true, or use https://"
        )
    if "InvalidContentType" in text:
        return StoreUnusable(
            f"{what}: the endpoint does not speak TLS. Write http:// in output.storage_options.endpoint"
        )
    if "InvalidCertificate" in text or "UnknownIssuer" in text:
        return StoreUnusable(
            f"{what}: the endpoint's certificate is not trusted. Set output.storage_options.client_options."
            "root_certificate to your CA in PEM"
        )
    if "Received redirect without LOCATION" in text:
        return StoreUnusable(f"{what}: wrong region. Set output.storage_options.region or AWS_REGION")
    if "AccessDenied" in text:
        return StoreUnusable(f"{what}: access denied ({brief}). Check what the credentials may do under output.url")
    return StoreUnavailable(f"{what}: {brief}")


def _missing_bucket(text: str) -> bool:
    return any(word in text for word in _MISSING_BUCKET)


def _error_code(text: str) -> str:
    """The store's own word for what is wrong, or nothing."""
    match = _CODE.search(text)
    return (match[1] or match[2]) if match else ""


def _brief(err: BaseException) -> str:
    """What obstore says, in a few words: the status and the store's code, or why there was no answer."""
    text = str(err)
    if status := _STATUS.search(text):
        return f"answer {status[1]} {_error_code(text)}".rstrip()
    kind = _TRANSPORT_KIND.search(text)
    if kind is None:
        return _first_line(err)
    causes = [match[1] for match in _CAUSE.finditer(text)]
    return f"no answer ({kind[1].lower()}{': ' + causes[-1] if causes else ''})"


def _first_line(err: BaseException) -> str:
    """obstore's message without its debug part, on one line, at most 300 characters."""
    text = " ".join(str(err).split("Debug source:")[0].split())
    return text if len(text) <= 300 else text[:297] + "..."
