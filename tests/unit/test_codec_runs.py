"""Runs with encoded sites: what readers get, what verify says, and that nobody reads garbage."""

import json
import re
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from hsray.codecs import decode_bits, find_codec
from hsray.codecs.byte_planes import BytePlanes
from hsray.codecs.on_torch import decode_torch
from hsray.config import CaptureConfig, make_config
from hsray.errors import ConfigError, HsrayError
from hsray.payloads import _AHEAD_BYTES, State, payloads_ahead
from hsray.reader import Run, open_run
from hsray.shard import ShardRow, write_shard
from hsray.site_storage import SiteStorage, Storage, fingerprint_parts, resolve_storage, summarize_codecs
from hsray.sites import resolve_sites
from hsray.store import open_store
from hsray.verify import verify_run
from tests.small_run import SITE_NAMES, SmallRun, build_small_run, make_prompt, make_states, metadata

STORAGE: Storage = {
    "resid_pre_2": SiteStorage("bf16-hl-zstd"),
    "resid_pre_5": SiteStorage("fp8-token"),
    "final_prenorm": SiteStorage("int8-block64-outlier4"),
}


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> SmallRun:
    return build_small_run(str(tmp_path_factory.mktemp("encoded")), storage=STORAGE)


@pytest.fixture(scope="module")
def run(small: SmallRun) -> Run:
    return open_run(small.url)


@pytest.fixture
def fresh(tmp_path: Path) -> SmallRun:
    return build_small_run(str(tmp_path), lengths=(5, 130, 17), storage=STORAGE)


def expected(small: SmallRun, row: int, site: str) -> "np.ndarray[Any, Any]":
    """What encoding and decoding each segment by itself gives."""
    bits = small.states[row][site].view(np.uint16)
    name = STORAGE[site].codec
    codec = find_codec(name)
    assert codec is not None
    parts = [bits[start : start + 4096] for start in range(0, len(bits), 4096)]
    decoded = [decode_bits(name, codec.encode(part), *part.shape) for part in parts]
    return np.concatenate(decoded).view(ml_dtypes.bfloat16)


def test_states_come_decoded_by_every_way_of_reading(small: SmallRun, run: Run) -> None:
    scanned = {prompt.row: prompt for prompt in run}
    for row in small.rows:
        one_by_one, together = run[f"prompt-{row}"], run[f"prompt-{row}"].load()
        for site in SITE_NAMES:
            states = expected(small, row, site)
            for prompt in (scanned[row], one_by_one, together):
                assert prompt[site].dtype == ml_dtypes.bfloat16
                assert prompt[site].tobytes() == states.tobytes()
            assert together.tensor(site).shape == states.shape
            assert np.array_equal(one_by_one.positions(site), np.arange(len(states)))
        assert scanned[row]["resid_pre_2"].tobytes() == small.states[row]["resid_pre_2"].tobytes()


@pytest.mark.parametrize("site", SITE_NAMES)
@pytest.mark.parametrize(("start", "stop"), [(0, 9000), (0, 0), (4095, 4097), (4096, 8192), (4000, 8300), (8999, 9000)])
def test_a_part_of_an_encoded_site_is_that_of_the_whole(
    small: SmallRun, run: Run, site: str, start: int, stop: int
) -> None:
    part = run["prompt-7"].read(site, start, stop)

    assert part.tobytes() == expected(small, 7, site)[start:stop].tobytes()


def test_the_stored_bytes_are_there_for_who_decodes_elsewhere(small: SmallRun, run: Run) -> None:
    for site in SITE_NAMES:
        payloads = run["prompt-7"].payloads(site)

        assert [(p.num_rows, p.codec) for p in payloads] == [(n, STORAGE[site].codec) for n in (4096, 4096, 808)]
        tensors = [decode_torch(p.data, p.codec, p.num_rows, run.hidden_size) for p in payloads]
        joined = np.concatenate([t.view(dtype=_int16()).numpy() for t in tensors])
        assert joined.tobytes() == expected(small, 7, site).tobytes()


def _int16() -> Any:
    import torch

    return torch.int16


def test_the_torch_dataset_has_decoded_tensors(small: SmallRun, run: Run) -> None:
    item = run.torch_dataset(["resid_pre_5"])[0]

    assert item["resid_pre_5"].shape == (len(item["input_ids"]), 24)


def test_shards_say_how_their_sites_are_stored_and_any_reader_gets_the_bytes(small: SmallRun, run: Run) -> None:
    file = pq.ParquetFile(pa.BufferReader(small.store.get(small.shard_of(3))), page_checksum_verification=True)
    said = {key.decode(): value.decode() for key, value in file.metadata.metadata.items()}
    table = file.read()
    at = table["row"].to_pylist().index(3)

    assert said["hsray.codec"] == "by-site"
    assert [(s["name"], s["codec"], s["shape"]) for s in json.loads(said["hsray.sites"])] == [
        (site, STORAGE[site].codec, ["num_tokens", 24]) for site in SITE_NAMES
    ]
    for site in SITE_NAMES:
        assert table[site][at].as_py() == run["prompt-3"].payloads(site)[0].data.tobytes()


def test_a_sound_encoded_run_has_no_problems(small: SmallRun) -> None:
    report = verify_run(small.url, full=True)

    assert report.is_ok, str(report)
    # Of values, not of stored bytes.
    assert report.checked["values"] == sum(s.size for states in small.states.values() for s in states.values())


@pytest.mark.parametrize("site", SITE_NAMES)
def test_a_changed_byte_is_found_before_it_is_decoded(fresh: SmallRun, site: str) -> None:
    run = open_run(fresh.url)
    where = run.segments.where(run["prompt-1"].segments[0], site)
    fresh.change_byte(where.key, where.offset + where.nbytes // 2)

    with pytest.raises(HsrayError, match=rf"{where.key}: {site} of prompt 'prompt-1' \(row 1, .* hash"):
        run["prompt-1"][site]
    with pytest.raises(HsrayError, match="hash"):
        run["prompt-1"].read(site, 3, 4)
    with pytest.raises(HsrayError, match="hash"):
        run["prompt-1"].payloads(site)
    report = verify_run(fresh.url, full=True)
    assert {(p.check, p.row) for p in report.problems} == {("hashes", 1)}


def rehash(small: SmallRun, key: str) -> None:
    """The records say of the shard `key` what is in it now."""
    from hsray.index import write_index
    from hsray.shard import hex_digest, payload_digest

    data = small.store.get(key)
    for lease_id in small.ledger.resolutions():
        record = small.resolution(lease_id)
        for shard in record["shards"]:
            for entry in shard["entries"] if shard["key"] == key else ():
                for site in SITE_NAMES:
                    extent = entry["extents"][site]
                    payload = data[extent["offset"] : extent["offset"] + extent["nbytes"]]
                    extent["xxh3"] = hex_digest(payload_digest(memoryview(payload)))
        small.overwrite(f"leases/{lease_id}.json", record)
    write_index(small.store, small.ledger.resolutions().values(), SITE_NAMES)


@pytest.mark.parametrize(
    ("site", "at", "message"),
    [
        ("resid_pre_2", 130 * 24, "no table of 1 frames"),
        ("resid_pre_2", 130 * 24 + 12, "the high plane is damaged"),
        ("resid_pre_5", 3, "a scale is not a positive number"),
        ("final_prenorm", 1, "channel 65.* of 24"),
    ],
)
def test_a_payload_that_is_no_encoding_is_an_error_with_its_place_although_its_hash_is_right(
    fresh: SmallRun, site: str, at: int, message: str
) -> None:
    run = open_run(fresh.url)
    where = run.segments.where(run["prompt-1"].segments[0], site)
    fresh.change_byte(where.key, where.offset + at)
    rehash(fresh, where.key)
    run = open_run(fresh.url)

    codec = STORAGE[site].codec
    place = f"{where.key}: {site} of prompt 'prompt-1'"
    with pytest.raises(HsrayError, match=f"{place} .*is not {codec} of 130 .*{message}"):
        run["prompt-1"][site]
    with pytest.raises(HsrayError, match=message):
        next(p for p in run if p.row == 1)
    report = verify_run(fresh.url, full=True)
    problems = [p for p in report.problems if p.check == "values"]
    assert [(p.key, p.row) for p in problems] == [(where.key, 1)]
    assert re.search(f"{site} of segment 0 cannot be decoded: .*{message}", problems[0].message)


def test_values_that_decode_to_nan_are_found(fresh: SmallRun) -> None:
    run = open_run(fresh.url)
    where = run.segments.where(run["prompt-1"].segments[0], "resid_pre_5")
    data = bytearray(fresh.store.get(where.key))
    data[where.offset + 4 * 130 + 7 * 24] = 0x7F  # e4m3fn's NaN, at token 7
    fresh.store.put(where.key, bytes(data))
    rehash(fresh, where.key)

    report = verify_run(fresh.url, full=True)

    assert "1 values of resid_pre_5 are NaN or infinite, the first at token 7" in str(report)


def test_a_size_that_the_codec_cannot_have_is_found_without_reading_payloads(fresh: SmallRun) -> None:
    plain = {**STORAGE, "resid_pre_5": SiteStorage()}
    lease_id = next(i for i, r in fresh.ledger.resolutions().items() if 1 in r.committed_rows)
    rows = [row for row in fresh.ledger.resolutions()[lease_id].shards[0].rows]
    shard = write_shard(
        fresh.store,
        "data/other.parquet",
        [ShardRow(fresh.prompts[row], fresh.states[row]) for row in rows],
        sites=SITE_NAMES,
        hidden_size=24,
        dtype="bfloat16",
        metadata=metadata("bfloat16", 24, STORAGE),
        storage=plain,
    )
    record = fresh.ledger.resolutions()[lease_id].to_json()
    fresh.overwrite(f"leases/{lease_id}.json", {**record, "shards": [_shard_json(shard)]})

    report = verify_run(fresh.url)

    assert re.search(r"layout: data/other.*resid_pre_5: 6240 bytes recorded, where fp8-token of 130 rows", str(report))


def _shard_json(shard: Any) -> Any:
    from hsray.records import Resolution

    return Resolution("commit", "x", "a", "r", (shard,)).to_json()["shards"][0]


def test_a_shard_that_says_another_codec_than_the_run_is_found(fresh: SmallRun) -> None:
    lease_id = next(i for i, r in fresh.ledger.resolutions().items() if 1 in r.committed_rows)
    rows = list(fresh.ledger.resolutions()[lease_id].shards[0].rows)
    other = {**STORAGE, "resid_pre_5": SiteStorage("int8-block64-outlier4")}
    shard = write_shard(
        fresh.store,
        "data/other.parquet",
        [ShardRow(fresh.prompts[row], fresh.states[row]) for row in rows],
        sites=SITE_NAMES,
        hidden_size=24,
        dtype="bfloat16",
        metadata=metadata("bfloat16", 24, other),
        storage=STORAGE,
    )
    record = fresh.ledger.resolutions()[lease_id].to_json()
    fresh.overwrite(f"leases/{lease_id}.json", {**record, "shards": [_shard_json(shard)]})

    assert "hsray.sites has (name, codec, tokens)" in str(verify_run(fresh.url))


def test_a_run_with_a_codec_of_a_later_version_is_not_read(fresh: SmallRun) -> None:
    fresh.record["sites"][1]["codec"] = "future-1"
    fresh.overwrite("hsray.json", fresh.record)

    with pytest.raises(HsrayError, match=r"resid_pre_5 is stored with codec 'future-1'.*Use the hsray that wrote it"):
        open_run(fresh.url)
    assert [p.check for p in verify_run(fresh.url, full=True).problems] == ["record"]


# The way into a shard.


def test_payloads_are_made_in_order_and_a_bounded_way_ahead(monkeypatch: pytest.MonkeyPatch) -> None:
    size = 1 << 20
    made: list[int] = []
    encode = BytePlanes.encode

    def counting(self: BytePlanes, states: Any) -> memoryview:
        made.append(int(states[0, 0]))
        return encode(self, states)

    monkeypatch.setattr(BytePlanes, "encode", counting)
    count = 2 * _AHEAD_BYTES // size
    states = [np.full((8, size // 16), number, np.uint16) for number in range(count)]
    views = [memoryview(s.reshape(-1).view(np.uint8)) for s in states]
    segments = [{"a": State(view, size // 16, size // 8, "bf16-hl-zstd")} for view in views]

    with payloads_ahead(segments) as payloads:
        for number, segment in enumerate(payloads):
            decoded = decode_bits("bf16-hl-zstd", segment["a"], 8, size // 16)
            assert (decoded == number).all()
            assert len(made) <= number + 1 + _AHEAD_BYTES // size

    assert sorted(made) == list(range(count))


def test_plain_states_are_handed_on_as_they_lie() -> None:
    data = memoryview(bytearray(64))

    with payloads_ahead([{"a": State(data, 4, 8)}]) as payloads:
        (segment,) = payloads

    assert segment["a"] is data


def test_an_error_of_a_codec_ends_the_shard_and_leaves_nothing() -> None:
    store = open_store("memory://codecs")
    states = make_states(0, 9, 24, "bfloat16")
    states["resid_pre_5"][4, 4] = np.nan
    settings: Any = {"sites": SITE_NAMES, "hidden_size": 24, "metadata": metadata("bfloat16", 24, STORAGE)}
    settings["storage"] = STORAGE

    with pytest.raises(ValueError, match="NaN or infinity cannot be stored"):
        write_shard(store, "data/x.parquet", [ShardRow(make_prompt(0, 9), states)], dtype="bfloat16", **settings)
    assert list(store.list("data/")) == []

    halves = ShardRow(make_prompt(0, 9), make_states(0, 9, 24, "float16"))
    with pytest.raises(ValueError, match="codecs are for bfloat16, not for float16"):
        write_shard(store, "data/x.parquet", [halves], dtype="float16", **settings)


# Configuration.

SITES = resolve_sites(["resid_pre_2", "resid_pre_5", "final_prenorm"], 8)


def test_codecs_are_given_for_all_sites_or_by_site_in_any_spelling() -> None:
    def storage(codec: Any) -> list[str]:
        config = CaptureConfig(codec=codec)
        return [s.codec for s in resolve_storage(config.codec, config.tokens, SITES, 8).values()]

    assert storage("none") == ["none"] * 3
    assert storage("bf16-hl-zstd") == ["bf16-hl-zstd"] * 3
    assert storage({"final_prenorm": "fp8-token"}) == ["none", "none", "fp8-token"]
    assert storage({"default": "fp8-token", "resid_post_1": "none"}) == ["none", "fp8-token", "fp8-token"]


@pytest.mark.parametrize(
    ("capture", "message"),
    [
        ({"codec": "zip"}, r"capture.codec: 'zip' is not one of none, bf16-hl-zstd"),
        ({"codec": {"final_prenorm": "fp8"}}, r"capture.codec: final_prenorm: 'fp8' is not one of"),
        ({"codec": ["none"]}, r"capture.codec: must be one of none, .*, or a mapping"),
        ({"codec": "fp8-token", "dtype": "float32"}, r"codec: fp8-token is for bfloat16 .* capture.dtype is float32"),
    ],
)
def test_a_wrong_codec_is_refused_by_its_key(capture: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make_config({"model": {"path": "m"}, "prompts": {"path": "p"}, "output": {"url": "u"}, "capture": capture})


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("resid_pre_3", r"capture.codec.resid_pre_3: not a site of this run, which has resid_pre_2, .*default"),
        ("final", r"capture.codec.final: unknown site 'final'"),
    ],
)
def test_a_codec_for_a_site_that_is_not_there_is_refused(name: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        resolve_storage({name: "fp8-token"}, {}, SITES, 8)


def test_the_fingerprint_has_the_codecs_and_a_plain_run_the_parts_it_always_had() -> None:
    def parts(**codecs: Any) -> dict[str, str]:
        return fingerprint_parts(resolve_storage(codecs, {}, SITES, 8))

    assert parts() == {"capture.codec": "none"}
    assert parts(default="fp8-token") == {"capture.codec": "fp8-token"}
    assert parts(final_prenorm="fp8-token") == {
        "capture.codec": "resid_pre_2:none,resid_pre_5:none,final_prenorm:fp8-token"
    }
    assert summarize_codecs({"a": SiteStorage("fp8-token"), "b": SiteStorage()}) == "by-site"
    assert summarize_codecs(None) == "none"
