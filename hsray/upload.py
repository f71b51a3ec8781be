"""One large object, written piece by piece with bounded memory and published whole or not at all.

Promises: nothing is visible before the end of a completed block; a lost answer to the completion is settled by the
write id in the object's metadata, never guessed; what is given up is removed as far as the store allows. All requests
go through the `Store` the upload belongs to, made by `Store.upload`. This module never knows what a key means.
"""

import logging
import uuid
from types import TracebackType
from typing import TYPE_CHECKING, Any, Final, Literal, Self

import obstore
from obstore.exceptions import BaseError
from typing_extensions import Buffer

from hsray.errors import StoreUnavailable
from hsray.store_errors import brief_reason

if TYPE_CHECKING:
    from hsray.store import Store

logger = logging.getLogger(__name__)

PART_BYTES: Final = 16 * 1024 * 1024
PARTS_IN_FLIGHT: Final = 4
# User metadata that proves whose multipart upload an object is. Azure allows only identifiers as names.
WRITE_ID_ATTRIBUTE: Final = "hsraywriteid"


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

    def __init__(self, store: "Store", key: str) -> None:
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
        view = byte_view(data)
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
            logger.warning("unfinished upload left behind key=%s: %s", self._key, brief_reason(err))


class _AbortUpload(Exception):
    """What obstore's writer is told when an upload is given up."""


def byte_view(data: Buffer) -> memoryview:
    """The buffer as flat bytes, without a copy. Raises TypeError if it is not C-contiguous."""
    view = memoryview(data)
    # cast refuses a zero in the shape.
    return view.cast("B") if view.nbytes else memoryview(b"")
