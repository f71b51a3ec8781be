"""Object storage: one URL -> `Store`, the same on memory, local files, S3, GCS and Azure.

Promises: an object is visible whole or not at all; `create_once` has exactly one winner per key and never guesses
who it was; a transient error is retried with full jitter until `retry_seconds` have passed; every other error is a
`StoreUnusable` that names the fix, and none is obstore's own. Calls block, may come from any thread, and must not
cross a fork (obstore's threads do not survive one).

This module never knows what a key means.
"""

import contextlib
import copy
import json
import logging
import os
import random
import threading
import time
import uuid
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any, Final, Literal, TypeVar

import numpy as np
import obstore
from obstore.exceptions import BaseError
from typing_extensions import Buffer

from hsray.errors import StoreError, StoreUnavailable, StoreUnusable
from hsray.records import JsonDict
from hsray.store_clients import Backend, LocalBackend, Purpose, open_backend
from hsray.store_errors import KeyExists, is_missing_bucket, translate
from hsray.upload import PART_BYTES, PLAIN_KEY, Upload, byte_view

logger = logging.getLogger(__name__)

T = TypeVar("T")
CommitMode = Literal["conditional", "single-writer"]

PROBE_SECONDS: Final = 60.0
FIRST_PAUSE_SECONDS: Final = 0.5
MAX_PAUSE_SECONDS: Final = 30.0
# As many as one system call takes (IOV_MAX).
_MOST_BUFFERS: Final = 1024


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
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
        jitter: Callable[[float], float] = _full_jitter,
    ) -> None:
        self.url = url
        self.backend = backend
        self.commit = commit
        self.retry_seconds = retry_seconds
        self._retries: Counter[str] = Counter()
        self._retries_lock = threading.Lock()
        self._clock = clock
        self._sleep = sleep
        self._jitter = jitter

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.url!r})"

    # -- whole objects

    def put(self, key: str, data: Buffer) -> None:
        """Write a whole object, replacing what was there. `data` is any C-contiguous buffer."""
        view = byte_view(data)
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
            except (KeyExists, StoreUnavailable) as err:
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

    def read_into(self, key: str, start: int, parts: Sequence[memoryview]) -> None:
        """Fill writable buffers, one after the other, with the bytes from offset `start`: one request.

        A local file is read straight into them, without a client: also in a process that was forked.

        Raises:
            StoreError: the object ends before the last buffer is full.
        """
        nbytes = sum(part.nbytes for part in parts)
        backend = self.backend
        if not (isinstance(backend, LocalBackend) and PLAIN_KEY.fullmatch(key)):
            fetched = np.frombuffer(self.get_range(key, start, nbytes), np.uint8)
            at = 0
            for part in parts:
                # Not by memoryviews, which keep the GIL while they copy.
                np.copyto(np.frombuffer(part, np.uint8), fetched[at : at + part.nbytes])
                at += part.nbytes
            return
        path = backend.root / self._path(key)
        got = self.retrying("get", key, lambda: self.attempt("get", key, lambda: _read_file(path, start, parts)))
        if got != nbytes:
            raise StoreError(self._too_short(key, start, nbytes, start + got))

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

    def upload(self, key: str) -> Upload:
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
        """Run one request and translate its exception. Every request, an upload's too, passes here once.

        `operation` is one of put, create, get, head, list, delete, upload. Overridden by `testing.FlakyStore`.
        """
        try:
            return request()
        except (BaseError, OSError, NotImplementedError) as err:
            raise translate(err, operation, self.locate(key), self.url) from err

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

    def retries(self) -> dict[str, int]:
        """How often a request was repeated since the store was opened, by operation."""
        with self._retries_lock:
            return dict(self._retries)

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
            raise KeyExists(key)

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
            if is_missing_bucket(str(err)):
                raise
            # Only some stores take a missing key for deleted; the others stop at the first one.
            for path in paths:
                with contextlib.suppress(FileNotFoundError):
                    obstore.delete(self.backend.client(), path)

    def _too_short(self, key: str, start: int, nbytes: int, size: int) -> str:
        return f"{self.locate(key)} ends at byte {size}, but bytes {start} to {start + nbytes} were asked for"


def _read_file(path: Path, start: int, parts: Sequence[memoryview]) -> int:
    """Bytes read; fewer than asked for where the file ends."""
    left = [part for part in parts if part.nbytes]
    got = 0
    with path.open("rb", buffering=0) as file:
        while left:
            count = os.preadv(file.fileno(), left[:_MOST_BUFFERS], start + got)
            if count == 0:
                break
            got += count
            while left and count >= left[0].nbytes:
                count -= left.pop(0).nbytes
            if count:
                left[0] = left[0][count:]
    return got


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
        with store._retries_lock:
            store._retries[self._operation] += 1
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


def open_store(
    url: str,
    storage_options: Mapping[str, Any] | None = None,
    *,
    commit: CommitMode = "conditional",
    retry_seconds: float = 1800.0,
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
        clock: seconds, monotonic.
        sleep: pauses for so many seconds.

    Raises:
        ConfigError: a URL or option that cannot work, naming output.url or output.storage_options.
    """
    normal_url, backend = open_backend(url, dict(storage_options or {}))
    return Store(
        normal_url,
        backend,
        commit=commit,
        retry_seconds=retry_seconds,
        clock=clock,
        sleep=sleep,
    )
