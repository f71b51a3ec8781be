"""The on-disk contract, format version 1: column names, types, metadata keys, keys of a run.

One Parquet row is one segment of one prompt. Tensors are `binary` columns of little-endian, row-major
`[num_tokens, hidden_size]` values: Arrow has no bfloat16, and `binary` is the one representation that
pyarrow, datasets, duckdb, polars and Ray all read with exact bytes and true size. docs/format.md is the
prose form of this file.
"""

import json
from collections.abc import Mapping, Sequence
from typing import Literal

import pyarrow as pa

from hsray.site_storage import Storage, TokenSelection, positions_column, storage_of, summarize_codecs
from hsray.sites import Site

FORMAT_VERSION = 1

StateDtype = Literal["bfloat16", "float16", "float32"]
ITEMSIZE: dict[str, int] = {"bfloat16": 2, "float16": 2, "float32": 4}

# Objects of a run, relative to its URL.
RUN_KEY = "hsray.json"
ENGINE_KEY = "engine.json"
PLAN_PREFIX = "plan/"
LEASES_PREFIX = "leases/"
ATTEMPTS_PREFIX = "attempts/"
RETRIES_PREFIX = "retries/"
DATA_PREFIX = "data/"
REJECTS_PREFIX = "rejects/"
INDEX_KEY = "index.parquet"
FINAL_NORM_KEY = "final_norm.safetensors"
CARD_KEY = "README.md"
SUCCESS_KEY = "_SUCCESS"
LAST_EXIT_KEY = "last_exit.json"
STATUS_PREFIX = "status/"
REPORT_KEY = "report.html"
PREFIXES = (PLAN_PREFIX, LEASES_PREFIX, ATTEMPTS_PREFIX, RETRIES_PREFIX, DATA_PREFIX, REJECTS_PREFIX, STATUS_PREFIX)
KEYS = (RUN_KEY, ENGINE_KEY, INDEX_KEY, FINAL_NORM_KEY, CARD_KEY, SUCCESS_KEY, LAST_EXIT_KEY, REPORT_KEY)

MAX_SEGMENT_TOKENS = 4096
# One segment is one row group; the Hugging Face viewer refuses row groups over 286 MiB, and a Parquet page
# is limited to an int32.
MAX_ROW_GROUP_BYTES = 240_000_000

_FIXED_FIELDS = [
    pa.field("prompt_id", pa.string(), nullable=False),
    pa.field("row", pa.int64(), nullable=False),
    pa.field("segment", pa.int32(), nullable=False),
    pa.field("num_segments", pa.int32(), nullable=False),
    pa.field("token_start", pa.int32(), nullable=False),
    pa.field("num_tokens", pa.int32(), nullable=False),
    pa.field("seq_len", pa.int32(), nullable=False),
    pa.field("input_ids", pa.list_(pa.field("element", pa.int32(), nullable=False)), nullable=False),
    pa.field("loss_mask", pa.list_(pa.field("element", pa.uint8(), nullable=False)), nullable=False),
]
_POSITIONS = pa.list_(pa.field("element", pa.int32(), nullable=False))
TOKEN_COLUMNS = ("input_ids", "loss_mask")


def bytes_per_token(num_sites: int, hidden_size: int, dtype: str) -> int:
    """Bytes of hidden states that one token adds to the dataset, all sites together."""
    return num_sites * hidden_size * ITEMSIZE[dtype]


def segment_tokens(num_sites: int, hidden_size: int, dtype: str) -> int:
    """Most tokens that one shard row holds: 4096, fewer (a multiple of 64) where a row would pass 240 MB."""
    fitting = MAX_ROW_GROUP_BYTES // bytes_per_token(num_sites, hidden_size, dtype)
    if fitting >= MAX_SEGMENT_TOKENS:
        return MAX_SEGMENT_TOKENS
    return max(1, fitting // 64 * 64 or fitting)


def token_columns(selections: Sequence[TokenSelection]) -> tuple[str, ...]:
    """Columns with a number for each of some tokens: ids, loss mask, and the positions of each selection."""
    return (*TOKEN_COLUMNS, *map(positions_column, selections))


def shard_schema(
    site_names: Sequence[str],
    metadata: Mapping[str, str] | None = None,
    selections: Sequence[TokenSelection] = (),
) -> pa.Schema:
    """Arrow schema of a shard: fixed columns, positions of each selection, then one `binary` column per site."""
    positions = [pa.field(positions_column(name), _POSITIONS, nullable=False) for name in selections]
    fields = [*_FIXED_FIELDS, *positions, *(pa.field(name, pa.binary(), nullable=False) for name in site_names)]
    return pa.schema(fields, metadata=dict(metadata) if metadata else None)


def shard_metadata(
    *,
    sites: Sequence[Site],
    hidden_size: int,
    dtype: str,
    run_id: str,
    model: str,
    storage: Storage | None = None,
) -> dict[str, str]:
    """Key-value metadata of a shard: everything needed to decode it without `hsray.json`.

    The `shape` of a site is that of the decoded state, one row for each token or for each of the positions in the
    column that it names.
    """
    columns = []
    for s in sites:
        codec, tokens = storage_of(storage, s.name).codec, storage_of(storage, s.name).tokens
        columns.append(
            {
                "name": s.name,
                "index": s.index,
                "norm": s.norm,
                "dtype": dtype,
                "codec": codec,
                "tokens": tokens,
                "shape": ["num_tokens" if tokens == "all" else positions_column(tokens), hidden_size],
                "huggingface": s.huggingface,
            }
        )
    return {
        "hsray.format_version": str(FORMAT_VERSION),
        "hsray.dtype": dtype,
        "hsray.byte_order": "little",
        "hsray.hidden_size": str(hidden_size),
        "hsray.codec": summarize_codecs(storage),
        "hsray.sites": json.dumps(columns),
        "hsray.model": model,
        "hsray.run_id": run_id,
    }


def index_schema(site_names: Sequence[str], selections: Sequence[TokenSelection] = ()) -> pa.Schema:
    """Arrow schema of `index.parquet`: one row per (prompt, segment), sorted by (row, segment).

    `<column>_offset` and `<column>_nbytes` give the payload, as it is stored, inside the object `shard` (a key
    relative to the run), `<site>_xxh3` its xxh3-64: a reader needs one range GET per site and no Parquet footer.
    """
    fields = [
        pa.field("prompt_id", pa.string(), nullable=False),
        pa.field("row", pa.int64(), nullable=False),
        pa.field("segment", pa.int32(), nullable=False),
        pa.field("num_segments", pa.int32(), nullable=False),
        pa.field("token_start", pa.int32(), nullable=False),
        pa.field("num_tokens", pa.int32(), nullable=False),
        pa.field("seq_len", pa.int32(), nullable=False),
        pa.field("shard", pa.dictionary(pa.int32(), pa.string()), nullable=False),
        pa.field("row_group", pa.int32(), nullable=False),
    ]
    for column in token_columns(selections):
        fields += [
            pa.field(f"{column}_offset", pa.int64(), nullable=False),
            pa.field(f"{column}_nbytes", pa.int64(), nullable=False),
        ]
    for site in site_names:
        fields += [
            pa.field(f"{site}_offset", pa.int64(), nullable=False),
            pa.field(f"{site}_nbytes", pa.int64(), nullable=False),
            pa.field(f"{site}_xxh3", pa.uint64(), nullable=False),
        ]
    return pa.schema(fields)


def plan_schema() -> pa.Schema:
    """Arrow schema of `plan/<plan_id>/prompts-*.parquet`: one row group per root lease.

    `full_tokens` is set for prompts that were cut: how many tokens the input row had.
    """
    return pa.schema(
        [
            pa.field("row", pa.int64(), nullable=False),
            pa.field("prompt_id", pa.string(), nullable=False),
            pa.field("file", pa.string(), nullable=False),
            pa.field("line", pa.int64(), nullable=False),
            pa.field("full_tokens", pa.int32()),
            pa.field("input_ids", pa.list_(pa.field("element", pa.int32(), nullable=False)), nullable=False),
            pa.field("loss_mask", pa.list_(pa.field("element", pa.uint8(), nullable=False)), nullable=False),
        ]
    )


def leases_schema() -> pa.Schema:
    """Arrow schema of `plan/<plan_id>/leases.parquet`: one row per root lease, in lease order."""
    return pa.schema(
        [
            pa.field("lease_id", pa.string(), nullable=False),
            pa.field("object", pa.string(), nullable=False),
            pa.field("row_group", pa.int32(), nullable=False),
            pa.field("rows", pa.list_(pa.field("element", pa.int64(), nullable=False)), nullable=False),
            pa.field("num_tokens", pa.list_(pa.field("element", pa.int32(), nullable=False)), nullable=False),
        ]
    )


def rejects_schema() -> pa.Schema:
    """Arrow schema of `rejects/*.parquet`: one row per rejected input row."""
    return pa.schema(
        [
            pa.field("row", pa.int64(), nullable=False),
            pa.field("prompt_id", pa.string()),
            pa.field("file", pa.string(), nullable=False),
            pa.field("line", pa.int64(), nullable=False),
            pa.field("reason", pa.string(), nullable=False),
            pa.field("detail", pa.string(), nullable=False),
            pa.field("snippet", pa.string(), nullable=False),
        ]
    )
