"""Readers that know nothing of hsray get the same rows and the same bytes out of a shard."""

import os
import subprocess
import sys
from pathlib import Path

import duckdb
import numpy as np
import polars as pl
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.small_run import SITE_NAMES, SmallRun, build_small_run

# Lease 000001: two prompts of one segment and one of three.
ROWS = [4, 5, 7, 7, 7]
SEGMENTS = [0, 0, 0, 1, 2]


@pytest.fixture(scope="module", params=["bfloat16", "float16", "float32"])
def small(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> SmallRun:
    return build_small_run(str(tmp_path_factory.mktemp("readers")), dtype=request.param)


@pytest.fixture(scope="module")
def shard(small: SmallRun) -> Path:
    return Path(small.url) / small.shard_of(7)


def expected_payloads(small: SmallRun, site: str) -> list[bytes]:
    return [
        small.states[row][site][4096 * segment : 4096 * (segment + 1)].tobytes()
        for row, segment in zip(ROWS, SEGMENTS, strict=True)
    ]


def expected_tokens(small: SmallRun, name: str) -> list[list[int]]:
    return [
        getattr(small.prompts[row], name)[4096 * segment : 4096 * (segment + 1)].tolist()
        for row, segment in zip(ROWS, SEGMENTS, strict=True)
    ]


def test_pyarrow_reads_it_with_page_checksums_verified(small: SmallRun, shard: Path) -> None:
    table = pq.ParquetFile(shard, page_checksum_verification=True).read()

    assert table["row"].to_pylist() == ROWS
    assert table["segment"].to_pylist() == SEGMENTS
    assert table["prompt_id"].to_pylist() == [f"prompt-{row}" for row in ROWS]
    assert table["input_ids"].to_pylist() == expected_tokens(small, "input_ids")
    assert table["loss_mask"].to_pylist() == expected_tokens(small, "loss_mask")
    for site in SITE_NAMES:
        assert table.schema.field(site).type == pa.binary()
        assert table[site].to_pylist() == expected_payloads(small, site)


def test_pyarrow_reads_one_site_of_one_row_group(small: SmallRun, shard: Path) -> None:
    table = pq.ParquetFile(shard, page_checksum_verification=True).read_row_group(3, columns=["final_prenorm"])

    assert table.column_names == ["final_prenorm"]
    assert table["final_prenorm"].to_pylist() == [expected_payloads(small, "final_prenorm")[3]]


def test_duckdb_reads_it_and_skips_row_groups(small: SmallRun, shard: Path) -> None:
    with duckdb.connect() as connection:
        columns = ", ".join(["row", "segment", "input_ids", "loss_mask", *SITE_NAMES])
        rows = connection.execute(f"SELECT {columns} FROM read_parquet(?)", [str(shard)]).fetchall()
        sizes = connection.execute(
            "SELECT num_tokens, octet_length(resid_pre_5) FROM read_parquet(?) WHERE row = 7 ORDER BY segment",
            [str(shard)],
        ).fetchall()
        (count,) = connection.execute(
            "SELECT count(*) FROM parquet_metadata(?) WHERE path_in_schema = 'row' AND stats_min_value IS NOT NULL",
            [str(shard)],
        ).fetchone() or (0,)

    assert [row[0] for row in rows] == ROWS
    assert [row[1] for row in rows] == SEGMENTS
    assert [row[2] for row in rows] == expected_tokens(small, "input_ids")
    assert [row[3] for row in rows] == expected_tokens(small, "loss_mask")
    for at, site in enumerate(SITE_NAMES):
        assert [bytes(row[4 + at]) for row in rows] == expected_payloads(small, site)
    itemsize = small.states[7]["resid_pre_5"].dtype.itemsize
    assert sizes == [(n, n * 24 * itemsize) for n in (4096, 4096, 808)]
    assert count == len(ROWS)


def test_polars_reads_it_whole_and_lazily(small: SmallRun, shard: Path) -> None:
    frame = pl.read_parquet(shard)

    assert frame["row"].to_list() == ROWS
    assert frame["input_ids"].to_list() == expected_tokens(small, "input_ids")
    assert frame["loss_mask"].to_list() == expected_tokens(small, "loss_mask")
    for site in SITE_NAMES:
        assert frame.schema[site] == pl.Binary
        assert frame[site].to_list() == expected_payloads(small, site)
    lazily = pl.scan_parquet(shard).filter(pl.col("prompt_id") == "prompt-5").select("final_prenorm").collect()
    assert lazily["final_prenorm"].to_list() == [expected_payloads(small, "final_prenorm")[1]]


def test_a_folder_of_shards_is_one_table_for_all_of_them(small: SmallRun) -> None:
    pattern = str(Path(small.url) / "data" / "*.parquet")
    segments = 9

    with duckdb.connect() as connection:
        by_duckdb = connection.execute("SELECT count(*), sum(num_tokens) FROM read_parquet(?)", [pattern]).fetchone()
    by_polars = pl.scan_parquet(pattern).select(pl.len(), pl.col("num_tokens").sum()).collect().row(0)
    by_pyarrow = pq.read_table(Path(small.url) / "data", columns=["num_tokens"])

    assert by_duckdb == by_polars == (segments, 9250)
    assert by_pyarrow.num_rows == segments


# datasets keeps global state and reads its environment when it is imported: a process of its own.
_DATASETS_SCRIPT = """
import sys
import numpy as np
from datasets import load_dataset

folder, shard, out = sys.argv[1:]
loaded = load_dataset("parquet", data_files=shard, split="train", cache_dir=folder)
streamed = load_dataset("parquet", data_files=shard, split="train", cache_dir=folder, streaming=True)
features = {name: str(feature) for name, feature in loaded.features.items()}
assert features["resid_pre_5"] == "Value('binary')", features
assert features["row"] == "Value('int64')", features
sites = ["resid_pre_2", "resid_pre_5", "final_prenorm"]
for number, rows in enumerate((list(loaded), list(streamed))):
    values = {site: np.frombuffer(b"".join(row[site] for row in rows), np.uint8) for site in sites}
    np.savez(
        f"{out}/{number}.npz",
        row=[row["row"] for row in rows],
        input_ids=np.concatenate([row["input_ids"] for row in rows]),
        loss_mask=np.concatenate([row["loss_mask"] for row in rows]),
        **values,
    )
"""


def test_datasets_loads_and_streams_it(small: SmallRun, shard: Path, tmp_path: Path) -> None:
    offline = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "HF_HOME": str(tmp_path / "home")}

    done = subprocess.run(
        [sys.executable, "-c", _DATASETS_SCRIPT, str(tmp_path / "cache"), str(shard), str(tmp_path)],
        env={**os.environ, **offline},
        capture_output=True,
        text=True,
        check=False,
    )

    assert done.returncode == 0, done.stderr
    for number in range(2):
        with np.load(tmp_path / f"{number}.npz") as got:
            assert got["row"].tolist() == ROWS
            assert got["input_ids"].tolist() == [i for ids in expected_tokens(small, "input_ids") for i in ids]
            assert got["loss_mask"].tolist() == [m for mask in expected_tokens(small, "loss_mask") for m in mask]
            for site in SITE_NAMES:
                assert got[site].tobytes() == b"".join(expected_payloads(small, site))
