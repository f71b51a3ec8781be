"""Parquet by hand, for the one layout of a shard, so that the writer touches no byte of a tensor.

Promises: the file is what pyarrow writes of the same rows, byte for byte up to the footer, and the footer says the
same: every column is required, a row group is one row, a column of it one PLAIN, uncompressed version 1 data page with
a CRC32, and a `binary` value the end of its page. Knows nothing of sites, prompts or stores.

Field numbers and types are those of parquet.thrift, in Thrift's compact protocol: a field is its distance to the
previous field's number and its type in one byte, then the value.
"""

import struct
from collections.abc import Collection, Mapping, Sequence
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import xxhash
from isal import isal_zlib

Scalar = str | int
Values = Mapping[str, Scalar | npt.NDArray[np.integer] | memoryview]

_MAGIC: Final = b"PAR1"
_MAX_PAGE_BYTES: Final = 2**31 - 1
# A payload is read from memory once, by pieces that stay in the cache for the second checksum. They are no smaller than
# they have to be: each waits twice for the interpreter's lock, which the engine's own threads hold for milliseconds.
_PIECE_BYTES: Final = 4 * 1024 * 1024
# pyarrow's limit; readers load every footer whole.
_MAX_STATISTICS_BYTES: Final = 4096

_TRUE, _I8, _I32, _I64, _BINARY, _LIST, _STRUCT = 1, 3, 5, 6, 8, 9, 12
_STOP: Final = b"\0"
_INT32, _INT64, _BYTE_ARRAY = 1, 2, 6  # parquet.thrift: Type
_PLAIN, _RLE = 0, 3  # Encoding
_REQUIRED, _REPEATED = 0, 2  # FieldRepetitionType
_UTF8, _CONVERTED_LIST, _UINT_8 = 0, 3, 11  # ConvertedType


class RowGroup(NamedTuple):
    """The bytes of one row group: each of `heads` followed by the payload of the same place.

    Attributes:
        heads: everything else, one piece before each `binary` value.
        payloads: the `binary` values as they were given, in column order.
        digests: xxh3-64 of each payload.
        extents: column -> (offset in the file, bytes) of the raw values, for `binary` and list columns.
    """

    heads: list[bytes]
    payloads: list[memoryview]
    digests: list[int]
    extents: dict[str, tuple[int, int]]


class PageWriter:
    """Turns rows into the bytes of one file, in order; writing them is the caller's business.

    Takes columns of type string, int32, int64, binary and list of int32 or uint8, none of them nullable, with those of
    type binary last. Strings and integers named in `statistics` get minimum and maximum.
    """

    def __init__(self, schema: pa.Schema, statistics: Collection[str] = ()) -> None:
        """Raises ValueError on a schema that it cannot write."""
        self.nbytes = 0
        self._columns = [_Column(field, field.name in statistics) for field in schema]
        first_binary = next((i for i, column in enumerate(self._columns) if column.is_payload), len(schema))
        if first_binary == len(schema) or not all(column.is_payload for column in self._columns[first_binary:]):
            raise ValueError(f"the last columns, and only they, must be binary: {schema.names}")
        self._row_groups: list[bytes] = []

    def row_group(self, values: Values) -> RowGroup:
        """The next row. A `binary` value is a contiguous view of bytes, read from memory once,
        for its CRC and its digest.

        Raises:
            ValueError: a value of 2 GiB, more than a page can hold.
        """
        first = self.nbytes or len(_MAGIC)
        head = [] if self.nbytes else [_MAGIC]
        at = first
        group = RowGroup([], [], [], {})
        chunks = []
        for column in self._columns:
            value = values[column.name]
            start = at
            # The page's body, but for the bytes of a payload; and where in it the raw values begin.
            body, num_values, statistics = column.encode(value)
            crc, size = isal_zlib.crc32(body), len(body)
            if isinstance(value, memoryview):
                crc, digest = _checksums(value, crc)
                size += value.nbytes
                group.digests.append(digest)
            if size > _MAX_PAGE_BYTES:
                raise ValueError(f"{column.name}: {size} bytes, more than a Parquet page can hold")
            header = _page_header(size, crc, num_values, statistics)
            head += (header, body)
            at += len(header) + size
            if isinstance(value, memoryview):
                group.heads.append(b"".join(head))
                group.payloads.append(value)
                group.extents[column.name] = (at - value.nbytes, value.nbytes)
                head = []
            elif isinstance(value, np.ndarray):
                group.extents[column.name] = (at - 4 * len(value), 4 * len(value))
            chunks.append(column.chunk(num_values, at - start, start, statistics))
        nbytes = at - first
        # RowGroup: columns, total_byte_size, num_rows; 5 file_offset, total_compressed_size
        self._row_groups.append(
            _list(1, _STRUCT, chunks) + _i64(1, nbytes) + _i64(1, 1) + _i64(2, first) + _i64(1, nbytes) + _STOP
        )
        self.nbytes = at
        return group

    def footer(self, metadata: Mapping[str, str], created_by: str) -> bytes:
        """The end of the file."""
        # SchemaElement: 3 repetition_type, name, num_children
        root = _i32(3, _REQUIRED) + _binary(1, b"schema") + _i32(1, len(self._columns)) + _STOP
        elements = [root, *(element for column in self._columns for element in column.schema_elements())]
        pairs = [_binary(1, k.encode()) + _binary(1, v.encode()) + _STOP for k, v in metadata.items()]
        # ColumnOrder: TypeDefinedOrder. Without it readers do not trust minimum and maximum.
        orders = [_struct(1) + _STOP + _STOP] * len(self._columns)
        # FileMetaData: version, schema, num_rows, row_groups, key_value_metadata, created_by, column_orders
        footer = (
            _i32(1, 2)
            + _list(1, _STRUCT, elements)
            + _i64(1, len(self._row_groups))
            + _list(1, _STRUCT, self._row_groups)
            + _list(1, _STRUCT, pairs)
            + _binary(1, created_by.encode())
            + _list(1, _STRUCT, orders)
            + _STOP
        )
        tail = footer + struct.pack("<I", len(footer)) + _MAGIC
        self.nbytes += len(tail)
        return tail


class _Column:
    """One column: its type, and what its pages and footer entries have in common."""

    def __init__(self, field: pa.Field, has_statistics: bool) -> None:
        self.name: str = field.name
        self.type = field.type
        self.has_statistics = has_statistics
        self.is_list = pa.types.is_list(field.type)
        self.is_payload = field.type == pa.binary()
        value_type = field.type.value_type if self.is_list else field.type
        physical = {pa.string(): _BYTE_ARRAY, pa.binary(): _BYTE_ARRAY, pa.int32(): _INT32, pa.int64(): _INT64}
        if self.is_list:
            physical = {pa.int32(): _INT32, pa.uint8(): _INT32}
        if value_type not in physical or field.nullable or (self.is_list and field.type.value_field.nullable):
            raise ValueError(f"column {field}: no such column can be written")
        self.physical = physical[value_type]
        path = [self.name, "list", "element"] if self.is_list else [self.name]
        # ColumnChunk: 2 file_offset, meta_data; ColumnMetaData: type, encodings, path_in_schema, codec
        self._chunk_head = (
            _i64(2, 0)
            + _struct(1)
            + _i32(1, self.physical)
            + _list(1, _I32, [_zigzag(_RLE), _zigzag(_PLAIN)])
            + _list(1, _BINARY, [_varint(len(part.encode())) + part.encode() for part in path])
            + _i32(1, 0)
        )

    def encode(self, value: Scalar | npt.NDArray[np.integer] | memoryview) -> tuple[bytes, int, bytes]:
        """The body of a page (of a payload, what precedes it), how many values it holds, their Statistics."""
        if isinstance(value, memoryview):
            return struct.pack("<I", value.nbytes), 1, b""
        if isinstance(value, np.ndarray):
            # An empty list counts as one value.
            body = _list_levels(len(value)) + value.astype("<i4", copy=False).tobytes()
            return body, max(1, len(value)), b""
        if isinstance(value, str):
            text = value.encode()
            return struct.pack("<I", len(text)) + text, 1, self._statistics(text)
        plain = value.to_bytes(4 if self.physical == _INT32 else 8, "little", signed=True)
        return plain, 1, self._statistics(plain)

    def chunk(self, num_values: int, nbytes: int, offset: int, statistics: bytes) -> bytes:
        """ColumnChunk of a page that begins at `offset`."""
        # 5 num_values, total_uncompressed_size, total_compressed_size; 9 data_page_offset; 12 statistics
        return b"".join(
            (
                self._chunk_head,
                _i64(1, num_values),
                _i64(1, nbytes),
                _i64(1, nbytes),
                _i64(2, offset),
                _struct(3) + statistics if statistics else b"",
                _STOP,
                _STOP,
            )
        )

    def schema_elements(self) -> list[bytes]:
        """SchemaElement: type, 3 repetition_type, name, num_children, converted_type; 10 logicalType."""
        leaf = _i32(1, self.physical) + _i32(2, _REQUIRED)
        name = _binary(1, self.name.encode())
        if self.is_list:
            # LogicalType: 3 LIST
            logical = _i32(1, _CONVERTED_LIST) + _struct(4) + _struct(3) + _STOP + _STOP
            outer = _i32(3, _REQUIRED) + name + _i32(1, 1) + logical + _STOP
            middle = _i32(3, _REPEATED) + _binary(1, b"list") + _i32(1, 1) + _STOP
            element = leaf + _binary(1, b"element")
            if self.type.value_type == pa.uint8():
                # LogicalType: 10 INTEGER of bitWidth 8; isSigned is false, a field without a value
                integer = bytes((0x10 | _I8, 8, 0x10 | _TRUE + 1)) + _STOP
                element += _i32(2, _UINT_8) + _struct(4) + _struct(10) + integer + _STOP
            return [outer, middle, element + _STOP]
        if self.type == pa.string():
            # LogicalType: 1 STRING
            return [leaf + name + _i32(2, _UTF8) + _struct(4) + _struct(1) + _STOP + _STOP + _STOP]
        return [leaf + name + _STOP]

    def _statistics(self, plain: bytes) -> bytes:
        """Statistics of one value: max, min; null_count, 5 max_value, min_value, and that they are exact.

        The first two are for old readers, and only of numbers: of strings nobody knew the order.
        """
        if not self.has_statistics:
            return b""
        if len(plain) > _MAX_STATISTICS_BYTES:
            return _i64(3, 0) + _STOP
        start = _i64(3, 0) if self.physical == _BYTE_ARRAY else _binary(1, plain) + _binary(1, plain) + _i64(1, 0)
        return start + _binary(2, plain) + _binary(1, plain) + bytes((0x10 | _TRUE, 0x10 | _TRUE)) + _STOP


def _checksums(data: memoryview, crc: int) -> tuple[int, int]:
    """CRC-32 continued from `crc`, and xxh3-64, of flat bytes."""
    digest = xxhash.xxh3_64()
    for start in range(0, data.nbytes, _PIECE_BYTES):
        piece = data[start : start + _PIECE_BYTES]
        crc = isal_zlib.crc32(piece, crc)
        digest.update(piece)
    return crc, digest.intdigest()


def _page_header(size: int, crc: int, num_values: int, statistics: bytes) -> bytes:
    # PageHeader: type, uncompressed_page_size, compressed_page_size, crc (as a signed number), data_page_header;
    # DataPageHeader: num_values, encoding, definition_level_encoding, repetition_level_encoding, statistics
    return b"".join(
        (
            _DATA_PAGE,
            _i32(1, size),
            _i32(1, size),
            _i32(1, crc - (crc >> 31 << 32)),
            _DATA_PAGE_HEADER,
            _i32(1, num_values),
            _PAGE_ENCODINGS,
            _struct(1) + (statistics or _STOP),
            _STOP,
            _STOP,
        )
    )


def _list_levels(length: int) -> bytes:
    """Repetition levels 0, 1, 1, ... and definition levels 1, 1, 1, ... of one list, each after its size; of an empty
    list, one 0 of both.

    Levels are one bit: runs (`length << 1`, value) or packed groups of eight (`groups << 1 | 1`, bits). pyarrow packs
    where it has seen fewer than eight equal ones.
    """
    if length == 0:
        return struct.pack("<I", 2) + b"\2\0" + struct.pack("<I", 2) + b"\2\0"
    rest = length - 8
    if length == 1:
        repetition = _varint(1 << 1) + b"\0"
    elif rest <= 0:
        repetition = bytes((1 << 1 | 1, (1 << length) - 2 & 0xFF))
    elif rest < 8:
        repetition = bytes((2 << 1 | 1, 0xFE, (1 << rest) - 1))
    else:
        repetition = bytes((1 << 1 | 1, 0xFE)) + _varint(rest << 1) + b"\1"
    definition = _varint(length << 1) + b"\1"
    return b"".join((struct.pack("<I", len(repetition)), repetition, struct.pack("<I", len(definition)), definition))


def _varint(value: int) -> bytes:
    if value < 0x80:
        return _ONE_BYTE[value]
    out = bytearray()
    while value >= 0x80:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)


def _zigzag(value: int) -> bytes:
    return _varint(value << 1 if value >= 0 else ~(value << 1))


def _i32(distance: int, value: int) -> bytes:
    return _ONE_BYTE[distance << 4 | _I32] + _zigzag(value)


def _i64(distance: int, value: int) -> bytes:
    return _ONE_BYTE[distance << 4 | _I64] + _zigzag(value)


def _binary(distance: int, value: bytes) -> bytes:
    return _ONE_BYTE[distance << 4 | _BINARY] + _varint(len(value)) + value


def _struct(distance: int) -> bytes:
    """The beginning of one; `_STOP` ends it."""
    return _ONE_BYTE[distance << 4 | _STRUCT]


def _list(distance: int, kind: int, items: Sequence[bytes]) -> bytes:
    size = bytes((len(items) << 4 | kind,)) if len(items) < 15 else bytes((0xF0 | kind,)) + _varint(len(items))
    return b"".join((_ONE_BYTE[distance << 4 | _LIST], size, *items))


_ONE_BYTE: Final = [bytes((value,)) for value in range(256)]
_DATA_PAGE: Final = _i32(1, 0)
_DATA_PAGE_HEADER: Final = _struct(1)
_PAGE_ENCODINGS: Final = _i32(1, _PLAIN) + _i32(1, _RLE) + _i32(1, _RLE)
