"""The stock way to write a shard: pyarrow's own writer. What the hand-made pages are compared with."""

import io
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

Row = Mapping[str, Any]


def write_reference(
    sink: Any, schema: pa.Schema, rows: Iterable[Row], *, statistics: list[str], metadata: Mapping[str, str]
) -> None:
    """One row group per row, one page per value, with CRCs; `sink` is a path or what pyarrow writes to."""
    with pq.ParquetWriter(
        sink,
        schema,
        compression="none",
        use_dictionary=False,
        write_statistics=statistics,
        write_page_checksum=True,
        # How full a page is gets looked at once per batch of values; with the default of 1024 a page could
        # grow past an int32.
        write_batch_size=1,
        store_schema=False,
    ) as writer:
        # With store_schema=False pyarrow leaves the metadata of the schema out.
        writer.add_key_value_metadata(dict(metadata))
        for row in rows:
            writer.write_table(_table(row, schema))


def reference_bytes(
    schema: pa.Schema, rows: Iterable[Row], statistics: list[str], metadata: Mapping[str, str]
) -> bytes:
    sink = io.BytesIO()
    write_reference(sink, schema, rows, statistics=statistics, metadata=metadata)
    return sink.getvalue()


def _table(row: Row, schema: pa.Schema) -> pa.Table:
    """One row; views are not copied."""
    columns = []
    for field in schema:
        value = row[field.name]
        if isinstance(value, memoryview):
            buffers = [None, pa.py_buffer(np.array([0, value.nbytes], np.int32)), pa.py_buffer(value)]
            columns.append(pa.Array.from_buffers(field.type, 1, buffers))
        elif isinstance(value, np.ndarray):
            offsets = pa.array(np.array([0, len(value)], np.int32))
            columns.append(pa.ListArray.from_arrays(offsets, pa.array(value), type=field.type))
        else:
            columns.append(pa.array([value], field.type))
    return pa.Table.from_arrays(columns, schema=schema)
