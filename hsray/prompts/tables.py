"""Rows of Parquet and Arrow files, streamed with bounded memory."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, TypeVar

import pyarrow as pa
import pyarrow.parquet as pq

from hsray.prompts.files import InputFile, ReadError, open_file
from hsray.prompts.source import BadRow, Row, SourceRow

_T = TypeVar("_T")

_ARROW_FILE = b"ARROW1"
_ARROW_END = b"\xff\xff\xff\xff\0\0\0\0"
_BATCH_BYTES = 8 << 20
_BATCH_ROWS = 256


def read_parquet(file: InputFile, storage_options: Mapping[str, Any], columns: Iterable[str]) -> Iterator[Row]:
    with open_file(file, storage_options) as handle:
        # Both are needed for pyarrow to stream the pages; else it loads the column chunks of a row group whole.
        parquet = _translated(lambda: pq.ParquetFile(handle, buffer_size=_BATCH_BYTES, pre_buffer=False))
        wanted = set(columns)
        names = [name for name in parquet.schema_arrow.names if name in wanted] or parquet.schema_arrow.names
        batch_rows, row_bytes = _parquet_batch(parquet.metadata, names)
        batches = parquet.iter_batches(batch_size=batch_rows, columns=names)
        line = 0
        for row in _table_rows(file.url, batches, lambda batch: row_bytes):
            line = row.line
            yield row
        if line != parquet.metadata.num_rows:
            raise ReadError(f"the footer promises {parquet.metadata.num_rows} rows")


def _parquet_batch(metadata: pq.FileMetaData, names: list[str]) -> tuple[int, int]:
    """Rows of one batch, and the average bytes of a row over the columns `names`."""
    wanted = set(names)
    total = sum(
        column.total_uncompressed_size
        for group in range(metadata.num_row_groups)
        for column in map(metadata.row_group(group).column, range(metadata.num_columns))
        if column.path_in_schema.split(".", 1)[0] in wanted
    )
    row_bytes = max(1, total // max(1, metadata.num_rows))
    return max(1, min(_BATCH_ROWS, _BATCH_BYTES // row_bytes)), row_bytes


def read_arrow(file: InputFile, storage_options: Mapping[str, Any], columns: Iterable[str]) -> Iterator[Row]:
    with open_file(file, storage_options) as handle:
        head = _translated(lambda: handle.read(len(_ARROW_FILE)))
        if head == _ARROW_FILE:
            reader = _translated(lambda: pa.ipc.open_file(handle))
            batches = (reader.get_batch(i) for i in range(reader.num_record_batches))
        else:
            # What `datasets` saves. A stream that was cut between two batches looks like a shorter one.
            _translated(lambda: handle.seek(-len(_ARROW_END), 2))
            if _translated(lambda: handle.read()) != _ARROW_END:
                raise ReadError("the Arrow stream has no end marker: the file was cut")
            handle.seek(0)
            reader = _translated(lambda: pa.ipc.open_stream(handle))
            batches = iter(reader)
        wanted = set(columns)
        names = [name for name in reader.schema.names if name in wanted] or reader.schema.names
        chosen = (batch.select(names) for batch in batches)
        yield from _table_rows(file.url, chosen, lambda batch: max(1, batch.nbytes // max(1, batch.num_rows)))


def _table_rows(
    url: str, batches: Iterator[pa.RecordBatch], row_bytes: Callable[[pa.RecordBatch], int]
) -> Iterator[Row]:
    line = 0
    while (batch := _translated(lambda: next(batches, None))) is not None:
        nested = [name for name in batch.schema.names if _holds_struct(batch.schema.field(name).type)]
        nbytes = row_bytes(batch)
        for position in range(batch.num_rows):
            line += 1
            try:
                data = batch.slice(position, 1).to_pylist()[0]
            except UnicodeDecodeError as err:
                yield BadRow(url, line, "bad_encoding", f"not UTF-8: {err.reason} at byte {err.start}", "")
                continue
            for name in nested:
                data[name] = _without_nulls(data[name])
            yield SourceRow(url, line, data, nbytes)


def _holds_struct(kind: pa.DataType) -> bool:
    if pa.types.is_struct(kind):
        return True
    return any(_holds_struct(kind.field(i).type) for i in range(kind.num_fields))


def _without_nulls(value: Any) -> Any:
    """The value without the nulls that a table puts where an object lacks a key. Chat templates print them."""
    if isinstance(value, dict):
        return {key: _without_nulls(item) for key, item in value.items() if item is not None}
    if isinstance(value, list):
        return [_without_nulls(item) for item in value]
    return value


def _translated(call: Callable[[], _T]) -> _T:
    try:
        return call()
    except Exception as err:  # pyarrow's, or the file system's underneath
        raise ReadError(f"not readable as a table: {type(err).__name__}: {err}") from err
