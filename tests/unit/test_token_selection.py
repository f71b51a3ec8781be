"""Stored for some tokens only: which ones, what readers get, what verify says."""

import re
from pathlib import Path
from typing import Any

import duckdb
import ml_dtypes
import numpy as np
import polars as pl
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from hsray.codecs import decode_bits
from hsray.config import CaptureConfig, Config, make_config, redact_overrides
from hsray.errors import ConfigError, HsrayError
from hsray.reader import Run, open_run
from hsray.records import Prompt, Resolution
from hsray.shard import ShardRow, write_shard
from hsray.site_storage import SiteStorage, Storage, TokenSelection, fingerprint_parts, resolve_storage
from hsray.sites import resolve_sites
from hsray.store import open_store
from hsray.token_selection import select_positions
from hsray.verify import verify_run
from tests.small_run import SITE_NAMES, SmallRun, build_small_run, make_states, metadata

# As EAGLE-3 training would have it, and one site whole; the first is encoded, too.
STORAGE: Storage = {
    "resid_pre_2": SiteStorage("bf16-hl-zstd", "through_last_loss"),
    "resid_pre_5": SiteStorage("none", "all"),
    "final_prenorm": SiteStorage("none", "loss"),
}


def selected(selection: TokenSelection, mask: str) -> list[int]:
    return select_positions(selection, np.array([int(c) for c in mask], np.uint8)).tolist()


@pytest.mark.parametrize(
    ("mask", "loss", "through"),
    [
        ("0001100", [2, 3, 4, 5], [0, 1, 2, 3, 4, 5]),
        ("0001100000", [2, 3, 4, 5], [0, 1, 2, 3, 4, 5]),
        ("1", [0], [0]),
        ("10000", [0, 1], [0, 1]),
        ("00001", [3, 4], [0, 1, 2, 3, 4]),
        ("1100010001", [0, 1, 2, 4, 5, 6, 8, 9], list(range(10))),
        ("0100010", [0, 1, 2, 4, 5, 6], list(range(7))),
        ("000", [], []),
    ],
)
def test_selections_take_loss_tokens_with_their_neighbours(mask: str, loss: list[int], through: list[int]) -> None:
    assert selected("loss", mask) == loss
    assert selected("through_last_loss", mask) == through
    assert selected("all", mask) == list(range(len(mask)))


def test_whichever_way_a_trainer_aligns_mask_and_states_its_loss_finds_them() -> None:
    """States read for a loss token at j lie at j-1 (it predicts j), j, or j+1; input states nowhere after that."""
    rng = np.random.default_rng(0)
    for _ in range(200):
        mask = (rng.random(int(rng.integers(1, 40))) < rng.choice([0.05, 0.5])).astype(np.uint8)
        loss, through = select_positions("loss", mask), select_positions("through_last_loss", mask)
        for shift in (-1, 0, 1):
            read = np.flatnonzero(mask) + shift
            read = read[(read >= 0) & (read < len(mask))]
            assert np.isin(read, loss).all()
            assert all(np.isin(np.arange(last + 1), through).all() for last in read)
        assert loss.dtype == through.dtype == np.int32
        assert np.isin(loss, through).all()


# A run. Prompt 7 has three segments.


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> SmallRun:
    return build_small_run(str(tmp_path_factory.mktemp("selected")), storage=STORAGE)


@pytest.fixture(scope="module")
def run(small: SmallRun) -> Run:
    return open_run(small.url)


def wanted(small: SmallRun, row: int, site: str) -> "np.ndarray[Any, Any]":
    return select_positions(STORAGE[site].tokens, small.prompts[row].loss_mask)


def test_states_are_those_of_the_positions(small: SmallRun, run: Run) -> None:
    scanned = {prompt.row: prompt for prompt in run}
    for row in small.rows:
        for prompt in (scanned[row], run[f"prompt-{row}"], run[f"prompt-{row}"].load()):
            for site in SITE_NAMES:
                positions = wanted(small, row, site)
                assert np.array_equal(prompt.positions(site), positions)
                assert prompt[site].tobytes() == small.states[row][site][positions].tobytes()
            assert np.array_equal(prompt.input_ids, small.prompts[row].input_ids)
            assert np.array_equal(prompt.loss_mask, small.prompts[row].loss_mask)
            assert prompt.seq_len == len(prompt.input_ids)


def test_payloads_hold_as_many_rows_as_their_segment_has_positions(small: SmallRun, run: Run) -> None:
    places = wanted(small, 7, "final_prenorm")

    rows = [payload.num_rows for payload in run["prompt-7"].payloads("final_prenorm")]

    assert rows == [int(((places >= start) & (places < start + 4096)).sum()) for start in (0, 4096, 8192)]


@pytest.mark.parametrize("site", ["resid_pre_2", "final_prenorm"])
def test_a_range_of_tokens_is_read_where_all_of_them_are_stored(small: SmallRun, run: Run, site: str) -> None:
    places = wanted(small, 7, site)
    breaks = np.flatnonzero(np.diff(places) > 1)
    start = int(places[breaks[3] + 1]) if len(breaks) else 4000
    stop = int(places[breaks[4]]) + 1 if len(breaks) else 8300

    part = run["prompt-7"].read(site, start, stop)

    assert part.tobytes() == small.states[7][site][start:stop].tobytes()
    missing = sorted(set(range(1, 9000)) - set(places.tolist()))
    if missing:
        with pytest.raises(HsrayError, match=rf"token {missing[0]} of 'prompt-7' has no state at {site}, .* `loss`"):
            run["prompt-7"].read(site, missing[0], missing[0] + 2)


def test_the_torch_dataset_gives_the_positions_along(small: SmallRun, run: Run) -> None:
    item = run.torch_dataset()[2]

    row = small.rows[2]
    assert item["positions_loss"].tolist() == wanted(small, row, "final_prenorm").tolist()
    assert item["positions_through_last_loss"].tolist() == wanted(small, row, "resid_pre_2").tolist()
    assert len(item["final_prenorm"]) == len(item["positions_loss"])
    assert "positions_loss" not in run.torch_dataset(["resid_pre_2"])[2]


def test_an_unfinished_run_is_read_by_its_records(tmp_path: Path) -> None:
    small = build_small_run(str(tmp_path), lengths=(5, 130), storage=STORAGE, finish=False)
    run = open_run(small.url)

    assert not run.complete
    assert run["prompt-0"]["final_prenorm"].shape == (len(wanted(small, 0, "final_prenorm")), 24)


def test_a_sound_run_has_no_problems(small: SmallRun) -> None:
    report = verify_run(small.url, full=True)

    assert report.is_ok, str(report)
    assert report.checked["values"] == sum(
        len(wanted(small, row, site)) * 24 for row in small.rows for site in SITE_NAMES
    )


def test_other_readers_find_positions_and_states_in_the_file(small: SmallRun, tmp_path: Path) -> None:
    path = tmp_path / "shard.parquet"
    path.write_bytes(small.store.get(small.shard_of(3)))
    table = pq.read_table(path, page_checksum_verification=True)
    at = table["row"].to_pylist().index(3)
    places = wanted(small, 3, "final_prenorm").tolist()

    assert table["positions_loss"][at].as_py() == places
    values = np.frombuffer(table["final_prenorm"][at].as_py(), ml_dtypes.bfloat16).reshape(len(places), 24)
    assert values.tobytes() == small.states[3]["final_prenorm"][places].tobytes()
    query = f"select positions_loss, octet_length(final_prenorm) from '{path}' where row = 3"
    assert duckdb.sql(query).fetchall() == [(places, len(places) * 48)]
    frame = pl.read_parquet(path).filter(pl.col("row") == 3)
    assert frame["positions_loss"][0].to_list() == places
    assert frame["positions_through_last_loss"][0].to_list() == wanted(small, 3, "resid_pre_2").tolist()


# Segments without a position.


def write(store_url: str, mask: "np.ndarray[Any, Any]", storage: Storage) -> tuple[Any, Any, dict[str, Any]]:
    store = open_store(store_url)
    prompt = Prompt(0, "p", np.arange(len(mask), dtype=np.int32), mask, "f", 1)
    states = make_states(0, len(mask), 24, "bfloat16")
    record = write_shard(
        store,
        "data/s.parquet",
        [ShardRow(prompt, states)],
        sites=SITE_NAMES,
        hidden_size=24,
        dtype="bfloat16",
        metadata=metadata("bfloat16", 24, storage),
        storage=storage,
    )
    return store, record, states


@pytest.mark.parametrize("codec", ["none", "bf16-hl-zstd", "fp8-token", "int8-block64-outlier4"])
def test_a_segment_without_a_position_has_empty_payloads(codec: Any) -> None:
    mask = np.zeros(9000, np.uint8)
    mask[[5, 8999]] = 1
    storage = {site: SiteStorage(codec, "loss") for site in SITE_NAMES}

    store, record, states = write("memory://empty", mask, storage)

    table = pq.read_table(pa.BufferReader(store.get("data/s.parquet")), page_checksum_verification=True)
    assert table["positions_loss"].to_pylist() == [[4, 5, 6], [], [8998, 8999]]
    assert [len(value) > 0 for value in table["final_prenorm"].to_pylist()] == [True, False, True]
    assert [e.extents["positions_loss"].nbytes for e in record.entries] == [12, 0, 8]
    if codec == "bf16-hl-zstd":
        last = decode_bits(codec, table["final_prenorm"][2].as_py(), 2, 24)
        assert last.tobytes() == states["final_prenorm"][8998:].tobytes()


def test_one_stretch_of_tokens_is_handed_on_without_a_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    from hsray.payloads import State

    data = memoryview(bytes(range(200)))
    stretch = State(data, 2, 4, rows=np.arange(3, 9, dtype=np.int32)).payload()
    apart = State(data, 2, 4, rows=np.array([0, 2, 49], np.int32)).payload()

    assert stretch.obj is data.obj
    assert bytes(stretch) == bytes(range(12, 36))
    assert bytes(apart) == bytes([0, 1, 2, 3, 8, 9, 10, 11, 196, 197, 198, 199])


# Damage.


def test_positions_that_are_not_those_of_the_mask_are_found(tmp_path: Path) -> None:
    """A writer that drops the neighbours, consistently recorded."""
    small = build_small_run(str(tmp_path), lengths=(5, 130, 17), storage=STORAGE)
    lease_id = next(i for i, r in small.ledger.resolutions().items() if 1 in r.committed_rows)
    rows = list(small.ledger.resolutions()[lease_id].shards[0].rows)
    honest = {row: small.prompts[row] for row in rows}
    lying = {
        row: Prompt(row, p.prompt_id, p.input_ids, np.eye(1, p.num_tokens, 3, np.uint8)[0], p.file, p.line)
        for row, p in honest.items()
    }
    shard = write_shard(
        small.store,
        "data/other.parquet",
        [ShardRow(lying[row], small.states[row]) for row in rows],
        sites=SITE_NAMES,
        hidden_size=24,
        dtype="bfloat16",
        metadata=metadata("bfloat16", 24, STORAGE),
        storage=STORAGE,
    )
    small.overwrite(f"leases/{lease_id}.json", Resolution("commit", lease_id, "a1", "r", (shard,)).to_json())

    report = verify_run(small.url)

    text = "\n".join(p.message for p in report.problems if p.check == "contents" and p.row == 1)
    assert "positions_loss are not those of the plan" in text
    assert "positions_through_last_loss are not those of the plan" in text


def test_a_record_without_the_positions_extent_is_found(tmp_path: Path) -> None:
    small = build_small_run(str(tmp_path), lengths=(5, 130), storage=STORAGE)
    lease_id = next(i for i, r in small.ledger.resolutions().items() if 1 in r.committed_rows)
    record = small.resolution(lease_id)
    for entry in record["shards"][0]["entries"]:
        del entry["extents"]["positions_loss"]
    small.overwrite(f"leases/{lease_id}.json", record)

    report = verify_run(small.url)

    assert re.search(r"layout: .*its record has no extent of positions_loss", str(report))


# Configuration.

SITES = resolve_sites(["resid_pre_2", "resid_pre_5", "final_prenorm"], 8)


def config(tokens: Any, empty_mask: str = "reject") -> Config:
    return make_config(
        {
            "model": {"path": "m"},
            "prompts": {"path": "p", "empty_mask": empty_mask},
            "output": {"url": "u"},
            "capture": {"tokens": tokens},
        }
    )


def test_tokens_are_given_for_all_sites_or_by_site() -> None:
    def tokens(given: Any) -> list[str]:
        capture = CaptureConfig(tokens=given)
        return [s.tokens for s in resolve_storage(capture.codec, capture.tokens, SITES, 8).values()]

    assert tokens("all") == ["all"] * 3
    assert tokens("loss") == ["loss"] * 3
    assert tokens({"default": "through_last_loss", "final_prenorm": "loss"}) == ["through_last_loss"] * 2 + ["loss"]


def test_prompts_without_a_loss_token_must_be_rejected_first() -> None:
    with pytest.raises(
        ConfigError, match=r"^configuration: capture.tokens: loss stores nothing of .*prompts.empty_mask: reject"
    ):
        config("loss", empty_mask="keep")
    with pytest.raises(ConfigError, match=r"through_last_loss stores nothing"):
        config({"final_prenorm": "through_last_loss"}, empty_mask="keep")
    with pytest.raises(ConfigError, match=r"capture.tokens: 'some' is not one of all, loss, through_last"):
        config("some")
    assert config("all", empty_mask="keep").capture.tokens == {"default": "all"}


def test_tokens_are_part_of_the_fingerprint_and_no_secret() -> None:
    capture = CaptureConfig(tokens={"final_prenorm": "loss"})
    storage = resolve_storage(capture.codec, capture.tokens, SITES, 8)

    assert fingerprint_parts(storage)["capture.tokens"] == "resid_pre_2:all,resid_pre_5:all,final_prenorm:loss"
    assert config("loss").redacted()["capture"]["tokens"] == {"default": "loss"}
    assert redact_overrides(["capture.tokens=loss"]) == ["capture.tokens=loss"]
    assert "xyz" not in redact_overrides(["output.storage_options.token=xyz"])[0]


def test_the_dataset_card_tells_how_sites_are_stored(small: SmallRun) -> None:
    card = small.store.get("README.md").decode()

    assert "  - name: positions_loss\n    sequence: int32" in card
    assert "  - name: positions_through_last_loss\n    sequence: int32" in card
    assert (
        "`resid_pre_2` (codec bf16-hl-zstd, tokens through_last_loss); `final_prenorm` (codec none, tokens loss)"
        in card
    )
    assert "`resid_pre_5` (codec" not in card
