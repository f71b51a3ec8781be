"""One large object, written piece by piece with bounded memory and published whole or not at all.

Promises: nothing is visible before the end of a completed block; a lost answer to the completion is settled by the
write id in the object's metadata, never guessed; what is given up is removed as far as the store allows; large pieces
are not copied in user space. All requests go through the `Store` the upload belongs to, made by `Store.upload`. This
module never knows what a key means.
"""

import functools
import itertools
import logging
import os
import re
import uuid
from collections.abc import Callable, Sequence
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Final, Literal, Protocol, Self

import obstore
from obstore.exceptions import BaseError
from typing_extensions import Buffer

from hsray.errors import StoreUnavailable
from hsray.store_clients import LocalBackend
from hsray.store_errors import brief_reason

if TYPE_CHECKING:
    from hsray.store import Store

logger = logging.getLogger(__name__)

PART_BYTES: Final = 16 * 1024 * 1024
PARTS_IN_FLIGHT: Final = 4
# User metadata that proves whose multipart upload an object is. Azure allows only identifiers as names.
WRITE_ID_ATTRIBUTE: Final = "hsraywriteid"
# The file under such a key has the key's own name. obstore knows what to do with any other.
PLAIN_KEY: Final = re.compile(r"[\w.+=-]+(/[\w.+=-]+)*", re.ASCII)
# Most buffers that one writev takes.
_IOV_MAX: Final = 1024


class Upload:
    """One object, written piece by piece. Nothing is visible under its key before the `with` block has ended well.

        with store.upload(key) as upload:
            upload.write(...)
            upload.complete()

    An exception in the block, or a block that ends without `complete()`, aborts: the multipart upload or temporary
    file is removed. At most 4 parts of 16 MB are on their way (plus one being filled), and `write` blocks while
    they are. A buffer must not change before the block has ended: of what is on its way there is no copy. An object
    of less than 16 MB is one plain put with the store's full patience; a larger one survives about four minutes of a
    store that does not answer, then raises `StoreUnavailable` from `write` or from the end of the block, and the
    caller may write it again (`Store.retrying`).

    A file object for pyarrow: `closed` is a property, `close()` only ends writing and decides nothing, and writes
    after an abort are dropped (a ParquetWriter writes its footer when it is garbage-collected). Not for use by
    several threads at once.
    """

    def __init__(self, store: "Store", key: str) -> None:
        self._store = store
        self._key = key
        self._write_id = uuid.uuid4().hex
        self._head = bytearray()
        self._sink: _Sink | None = None
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
        return self.writelines([data])

    def writelines(self, buffers: Sequence[Buffer]) -> int:
        """Append C-contiguous buffers as if they were one; returns their size in bytes."""
        views = [byte_view(data) for data in buffers]
        nbytes = sum(view.nbytes for view in views)
        if self._state == "aborted":
            return nbytes
        if self.closed:
            raise ValueError(f"upload of {self._key} is {self._state}, not open for writing")
        try:
            self._append(views, nbytes)
        except BaseException:
            # A caller that swallows this must not be able to publish what is left.
            self._state = "failed"
            raise
        self._nbytes += nbytes
        return nbytes

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
        elif self._sink is None:
            self._store.put(self._key, self._head)
        else:
            self._publish(self._sink)

    def _append(self, views: list[memoryview], nbytes: int) -> None:
        if self._sink is None and len(self._head) + nbytes < PART_BYTES:
            for view in views:
                self._head += view
            return
        try:
            if self._sink is None:
                self._sink = self._store.attempt("upload", self._key, self._open)
                views = [memoryview(self._head), *views]
                self._head = bytearray()
            for request in self._sink.requests(views):
                self._store.attempt("upload", self._key, request)
        except FileNotFoundError as err:
            raise StoreUnavailable(f"upload {self._store.locate(self._key)}: the store dropped the upload") from err

    def _open(self) -> "_Sink":
        backend = self._store.backend
        client = backend.client("upload", writing=True)
        if isinstance(backend, LocalBackend):
            # Local files carry no attributes, and need none: their publishing is a rename.
            attributes = None
            if PLAIN_KEY.fullmatch(self._key):
                return _FileSink(backend.root / self._key)
        else:
            attributes = {WRITE_ID_ATTRIBUTE: self._write_id}
        return _ObjectSink(
            obstore.open_writer(
                client,
                backend.prefix + self._key,
                attributes=attributes,
                buffer_size=PART_BYTES,
                max_concurrency=PARTS_IN_FLIGHT,
            )
        )

    def _publish(self, sink: "_Sink") -> None:
        try:
            self._store.attempt("upload", self._key, sink.publish)
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
        if self._sink is None:
            return
        try:
            self._sink.abort()
        except (BaseError, OSError) as err:
            # Invisible to readers either way; the bucket's lifecycle rule for unfinished uploads gets it.
            logger.warning("unfinished upload left behind key=%s: %s", self._key, brief_reason(err))


class _Sink(Protocol):
    """Where the bytes of one open upload go."""

    def requests(self, views: Sequence[memoryview]) -> Sequence[Callable[[], object]]:
        """What to call, in order, to append `views`."""

    def publish(self) -> None:
        """Make what was written visible."""

    def abort(self) -> None:
        """Remove what was written and not published."""


class _ObjectSink:
    """A multipart upload of obstore."""

    def __init__(self, writer: "obstore.WritableFile") -> None:
        self._writer = writer

    def requests(self, views: Sequence[memoryview]) -> list[Callable[[], object]]:
        # obstore starts as many parts as one write holds, whatever max_concurrency says: pieces are at most a part.
        return [
            functools.partial(self._writer.write, view[start : start + PART_BYTES])
            for view in views
            for start in range(0, view.nbytes, PART_BYTES)
        ]

    def publish(self) -> None:
        self._writer.close()

    def abort(self) -> None:
        if not self._writer.closed():
            aborted = _AbortUpload()
            self._writer.__exit__(_AbortUpload, aborted, None)


class _AbortUpload(Exception):
    """What obstore's writer is told when an upload is given up."""


class _FileSink:
    """A file beside its final name, under the name that obstore gives such files and leaves out of listings.

    Written by the calling thread in the order of the file. obstore's threads write the parts of one file side by side
    and wait for its lock, which on a disk took twice the CPU.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        path.parent.mkdir(parents=True, exist_ok=True)
        for number in itertools.count(1):
            self._unfinished = path.with_name(f"{path.name}#{number}")
            try:
                self._file = self._unfinished.open("xb", buffering=0)
                return
            except FileExistsError:
                continue  # another's, alive or dead

    def requests(self, views: Sequence[memoryview]) -> list[Callable[[], object]]:
        return [functools.partial(self._write, views)]

    def publish(self) -> None:
        # Network file systems may say only now that a write has failed.
        self._file.close()
        self._unfinished.rename(self._path)

    def abort(self) -> None:
        try:
            self._file.close()
        finally:
            self._unfinished.unlink(missing_ok=True)

    def _write(self, views: Sequence[memoryview]) -> None:
        left = [view for view in views if view.nbytes]
        while left:
            written = os.writev(self._file.fileno(), left[:_IOV_MAX])
            while left and written >= left[0].nbytes:
                written -= left.pop(0).nbytes
            if written:
                left[0] = left[0][written:]


def byte_view(data: Buffer) -> memoryview:
    """The buffer as flat bytes, without a copy. Raises TypeError if it is not C-contiguous."""
    view = memoryview(data)
    # cast refuses a zero in the shape.
    return view.cast("B") if view.nbytes else memoryview(b"")
