"""Verification finds what is wrong, says where, and finds nothing else: runs are broken one way at a time."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from hsray.errors import ConfigError, ExitCode
from hsray.index import index_table, read_index, write_index
from hsray.records import JsonDict, Resolution
from hsray.schema import INDEX_KEY, RUN_KEY, SUCCESS_KEY, rejects_schema
from hsray.shard import ShardRow, write_shard
from hsray.verify import CHECKS, Report, verify_run
from hsray.verify.__main__ import main
from tests.small_run import DTYPES, SITE_NAMES, SmallRun, build_small_run, metadata

# Leases of a small run: 000000 holds rows 0, 1, 3 (0 committed by it, 1 and 3 by 000000.r), 000001 rows 4, 5, 7,
# 000002 rows 8, 9 (9 is dead). Rows 2 and 6 are rejects.
SHARD_1 = "data/000001-a1-0.parquet"


@pytest.fixture
def small(tmp_path: Path) -> SmallRun:
    return build_small_run(str(tmp_path / "run"))


def found(report: Report) -> set[tuple[str, str | None, int | None, str | None]]:
    return {(problem.check, problem.key, problem.row, problem.prompt_id) for problem in report.problems}


def messages(report: Report, check: str) -> str:
    return "\n".join(problem.message for problem in report.problems if problem.check == check)


def edit(small: SmallRun, lease_id: str, change: Callable[[JsonDict], Any]) -> None:
    record = small.resolution(lease_id)
    change(record)
    small.overwrite(f"leases/{lease_id}.json", record)


def reindex(small: SmallRun) -> None:
    """Write the index again from records that may contradict each other."""
    write_index(small.store, small.ledger.resolutions().values(), SITE_NAMES)


def recommit(small: SmallRun, change: Callable[[ShardRow], ShardRow], **options: Any) -> None:
    """Lease 000001 with changed rows, consistently recorded, as a wrong extraction would have done it."""
    rows = [ShardRow(small.prompts[row], small.states[row]) for row in (4, 5, 7)]
    settings: dict[str, Any] = {
        "sites": SITE_NAMES,
        "hidden_size": 24,
        "dtype": small.record["dtype"],
        "metadata": metadata(small.record["dtype"], 24),
    }
    shard = write_shard(small.store, SHARD_1, [change(row) for row in rows], **(settings | options))
    record = Resolution("commit", "000001", "a1", "replica", (shard,))
    small.overwrite("leases/000001.json", record.to_json())
    reindex(small)


@pytest.mark.parametrize("dtype", list(DTYPES))
@pytest.mark.parametrize("full", [False, True])
def test_a_sound_run_has_no_problems_and_every_check_has_looked_at_something(
    tmp_path: Path, dtype: str, full: bool
) -> None:
    small = build_small_run(str(tmp_path), dtype=dtype)

    report = verify_run(small.url, full=full)

    assert report.problems == []
    assert report.is_ok
    assert report.exit_code is ExitCode.COMPLETE
    skipped = {"parity"} if full else {"parity", "hashes", "values"}
    assert set(report.checked) == set(CHECKS) - skipped
    assert report.checked["resolutions"] == 4
    assert report.checked["accounting"] == 8
    assert report.checked["rejects"] == 2
    assert report.checked["contents"] == report.checked["index"] == 9
    # Four objects, and three sites of nine segments.
    assert report.checked["hashes"] == (4 + 27 if full else 0)
    assert report.checked["values"] == (3 * 24 * sum(small.prompts[r].num_tokens for r in small.rows) if full else 0)
    counts = {k: v for k, v in report.counts.items() if k != "bytes"}
    assert counts == {
        "rows": 10,
        "rejected": 2,
        "superseded_records": 0,
        "committed": 7,
        "dead": 1,
        "open": 0,
        "shards": 4,
        "unreferenced_objects": 0,
        "unreferenced_bytes": 0,
    }


# The record and the plan


def test_a_url_without_a_run(tmp_path: Path) -> None:
    report = verify_run(str(tmp_path))

    assert found(report) == {("record", RUN_KEY, None, None)}
    assert "there is no run here" in messages(report, "record")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"{", "cannot be understood: JSONDecodeError"),
        (b"[1]", "cannot be understood: TypeError"),
        (b"{}", "cannot be understood: KeyError('format_version')"),
        (b'{"format_version": 2}', "format version 2; this hsray knows 1"),
        (b'{"format_version": 1}', "cannot be understood: KeyError('sites')"),
        (b"\xff\xfe\x00", "cannot be understood: UnicodeDecodeError"),
    ],
)
def test_a_record_that_cannot_be_used(small: SmallRun, content: bytes, message: str) -> None:
    small.store.put(RUN_KEY, content)

    report = verify_run(small.url)

    assert found(report) == {("record", RUN_KEY, None, None)}
    assert message in messages(report, "record")


def test_a_plan_that_is_missing_or_damaged(small: SmallRun) -> None:
    key = small.record["plan"]["leases"]
    small.store.put(key, b"no parquet")
    damaged = verify_run(small.url)
    small.store.delete([key])
    missing = verify_run(small.url)

    assert found(damaged) == found(missing) == {("plan", key, None, None)}


def test_planned_prompts_that_are_missing(small: SmallRun) -> None:
    table = pq.read_table(pa.BufferReader(small.store.get(small.record["plan"]["leases"])))
    (key,) = set(table["object"].to_pylist())
    small.store.delete([key])

    report = verify_run(small.url)

    assert found(report) == {("plan", key, None, None)}
    assert report.found["plan"] == 3


@pytest.mark.parametrize("name", ["num_prompts", "num_tokens"])
def test_a_plan_of_another_size_than_the_record_says(small: SmallRun, name: str) -> None:
    plan = {**small.record["plan"], name: small.record["plan"][name] + 1}
    small.overwrite(RUN_KEY, {**small.record, "plan": plan})

    report = verify_run(small.url)

    assert found(report) == {("plan", plan["leases"], None, None)}
    assert "the root leases hold" in messages(report, "plan")


def test_a_row_in_two_root_leases(small: SmallRun) -> None:
    key = small.record["plan"]["leases"]
    leases = pq.read_table(pa.BufferReader(small.store.get(key))).to_pylist()
    leases[2]["rows"][0] = 7
    sink = pa.BufferOutputStream()
    schema = pq.read_schema(pa.BufferReader(small.store.get(key)))
    pq.write_table(pa.Table.from_pylist(leases, schema=schema), sink)
    small.store.put(key, memoryview(sink.getvalue()))

    report = verify_run(small.url)

    assert ("plan", key, 7, None) in found(report)
    assert "is in more than one root lease" in messages(report, "plan")


# Rejects


def _rejects(rows: list[int]) -> memoryview:
    columns = {"row": rows, "prompt_id": [None] * len(rows), "line": [1] * len(rows)}
    columns |= {name: ["x"] * len(rows) for name in ("file", "reason", "detail", "snippet")}
    sink = pa.BufferOutputStream()
    pq.write_table(pa.table(columns, schema=rejects_schema()), sink)
    return memoryview(sink.getvalue())


def test_a_missing_rejects_file(small: SmallRun) -> None:
    (key,) = small.record["plan"]["rejects"]
    small.store.delete([key])

    report = verify_run(small.url)

    assert {("rejects", key, None, None), ("rejects", None, None, None)} <= found(report)
    assert "7 committed + 0 rejected + 1 dead + 0 open are not the 10 input rows" in messages(report, "accounting")


def test_a_reject_too_few(small: SmallRun) -> None:
    (key,) = small.record["plan"]["rejects"]
    small.store.put(key, _rejects([2]))

    report = verify_run(small.url)

    assert "says 2 rejected rows, the files hold 1" in messages(report, "rejects")
    assert not report.is_ok


def test_a_reject_that_is_also_a_prompt(small: SmallRun) -> None:
    (key,) = small.record["plan"]["rejects"]
    small.store.put(key, _rejects([2, 4]))

    report = verify_run(small.url)

    assert found(report) == {("rejects", key, 4, None)}


# Resolutions and accounting


@pytest.mark.parametrize(
    "content",
    [
        pytest.param(b"{", id="cut"),
        pytest.param(b"[]", id="no-object"),
        pytest.param(b'{"kind": "commit"}', id="fields-missing"),
        pytest.param(None, id="of-another-lease"),
    ],
)
def test_a_resolution_that_cannot_be_understood(small: SmallRun, content: bytes | None) -> None:
    key = "leases/000001.json"
    small.store.put(key, small.store.get("leases/000002.json") if content is None else content)

    report = verify_run(small.url)

    assert ("resolutions", key, None, None) in found(report)
    assert report.found["resolutions"] == 1
    assert report.counts["open"] == 3


def test_a_resolution_of_an_unknown_kind(small: SmallRun) -> None:
    edit(small, "000001", lambda record: record.update(kind="maybe"))

    report = verify_run(small.url)

    assert "it is a maybe of lease 000001" in messages(report, "resolutions")


def test_a_dropped_resolution_of_a_run_that_says_it_is_complete(small: SmallRun) -> None:
    small.store.delete(["leases/000001.json"])

    report = verify_run(small.url)

    assert found(report) == {
        ("success", SUCCESS_KEY, None, None),
        ("index", INDEX_KEY, 4, "prompt-4"),
        ("index", INDEX_KEY, 5, "prompt-5"),
        ("index", INDEX_KEY, 7, "prompt-7"),
    }
    assert messages(report, "success") == "is there, but 3 prompts are open\nsays 7 committed, there are 4"
    assert report.found["index"] == 5
    assert report.counts["unreferenced_objects"] == 1


def test_a_run_that_is_not_finished(tmp_path: Path) -> None:
    small = build_small_run(str(tmp_path), finish=False)
    small.store.delete(["leases/000001.json"])

    report = verify_run(small.url, full=True)

    assert found(report) == {("success", None, None, None)}
    assert "the run is not finished: 3 prompts are open" in messages(report, "success")
    assert report.exit_code is ExitCode.INCOMPLETE
    assert report.counts["committed"] == 4


def test_a_row_committed_by_two_leases(small: SmallRun) -> None:
    foreign = small.resolution("000000.r")["shards"][0]
    edit(small, "000001", lambda record: record["shards"].append(foreign))

    report = verify_run(small.url)

    key = "leases/000001.json"
    assert {("accounting", key, 1, None), ("accounting", key, 3, None)} <= found(report)
    assert (
        f"committed by shard {foreign['key']}, but it has an outcome in lease 000000.r, shard {foreign['key']}"
        in messages(report, "accounting")
    )
    assert "cannot be rebuilt from the resolutions" in messages(report, "index")


def test_a_row_committed_and_dead(small: SmallRun) -> None:
    dead = {"row": 8, "prompt_id": "prompt-8", "failure_class": "crash", "message": "m", "attempts": 1}
    edit(small, "000002", lambda record: record["dead"].append(dead))

    report = verify_run(small.url)

    assert found(report) == {("accounting", "leases/000002.json", 8, None)}
    assert "dead by its list of dead prompts, but it has an outcome in lease 000002" in messages(report, "accounting")


def test_an_outcome_for_a_row_of_another_lease(small: SmallRun) -> None:
    edit(small, "000002", lambda record: record["dead"][0].update(row=2))

    report = verify_run(small.url)

    assert ("accounting", "leases/000002.json", 2, None) in found(report)
    assert "it is not a row of the lease" in messages(report, "accounting")
    assert report.counts["open"] == 1


def test_a_split_of_what_cannot_be_split(small: SmallRun) -> None:
    edit(small, "000002", lambda record: record.update(kind="commit", shards=[], dead=[]))
    lone = Resolution("split", "000002.r.a", "a", "r")
    small.overwrite("leases/000002.r.json", Resolution("split", "000002.r", "a", "r").to_json())
    small.overwrite("leases/000002.r.a.json", lone.to_json())

    report = verify_run(small.url)

    assert ("accounting", "leases/000002.r.a.json", None, None) in found(report)
    assert "a split of a lease that cannot be split" in messages(report, "accounting")


def test_a_dead_prompt_under_another_name(small: SmallRun) -> None:
    edit(small, "000002", lambda record: record["dead"][0].update(prompt_id="someone"))

    report = verify_run(small.url)

    assert found(report) == {("contents", "leases/000002.json", 9, "prompt-9")}


def test_a_superseded_record_and_a_stray_object_are_counted_and_no_problem(small: SmallRun) -> None:
    small.overwrite("leases/000001.a.json", Resolution("dead", "000001.a", "a", "r").to_json())
    small.store.put("data/000001-zombie-0.parquet", bytes(77))

    report = verify_run(small.url, full=True)

    assert report.is_ok
    assert report.counts["superseded_records"] == 1
    assert report.counts["unreferenced_objects"] == 1
    assert report.counts["unreferenced_bytes"] == 77


# _SUCCESS and the index


def test_a_run_without_success(small: SmallRun) -> None:
    small.store.delete([SUCCESS_KEY])

    report = verify_run(small.url)

    assert found(report) == {("success", None, None, None)}
    assert "0 prompts are open" in messages(report, "success")


@pytest.mark.parametrize("content", [b"", b"[]", b"nonsense", b"{}"])
def test_a_success_that_cannot_be_understood(small: SmallRun, content: bytes) -> None:
    small.store.put(SUCCESS_KEY, content)

    report = verify_run(small.url)

    assert found(report) == {("success", SUCCESS_KEY, None, None)}


@pytest.mark.parametrize("name", ["rows", "committed", "rejected", "dead"])
def test_a_success_with_other_counts(small: SmallRun, name: str) -> None:
    success = small.store.get_json(SUCCESS_KEY)
    small.overwrite(SUCCESS_KEY, {**success, name: success[name] + 1})

    report = verify_run(small.url)

    assert found(report) == {("success", SUCCESS_KEY, None, None)}
    assert f"says {success[name] + 1} {name}, there are {success[name]}" in messages(report, "success")


def test_a_missing_and_a_damaged_index(small: SmallRun) -> None:
    small.store.put(INDEX_KEY, b"damaged")
    damaged = verify_run(small.url)
    small.store.delete([INDEX_KEY])
    missing = verify_run(small.url)

    assert found(damaged) == found(missing) == {("index", INDEX_KEY, None, None)}
    assert messages(missing, "index") == "is missing"


def rewrite_index(small: SmallRun, change: Callable[[list[JsonDict]], Any]) -> None:
    table = read_index(small.store, SITE_NAMES)
    rows = table.to_pylist()
    change(rows)
    sink = pa.BufferOutputStream()
    pq.write_table(pa.Table.from_pylist(rows, schema=table.schema), sink)
    small.store.put(INDEX_KEY, memoryview(sink.getvalue()))


def test_an_index_row_that_is_missing(small: SmallRun) -> None:
    rewrite_index(small, lambda rows: rows.pop(0))

    report = verify_run(small.url)

    assert found(report) == {("index", INDEX_KEY, 0, "prompt-0")}
    assert messages(report, "index") == "segment 0 is missing"


def test_an_index_row_too_many(small: SmallRun) -> None:
    rewrite_index(small, lambda rows: rows.append({**rows[-1], "row": 9, "prompt_id": "prompt-9"}))

    report = verify_run(small.url)

    assert found(report) == {("index", INDEX_KEY, 9, "prompt-9")}
    assert messages(report, "index") == "segment 0 is in no resolution"


def test_an_index_row_given_twice(small: SmallRun) -> None:
    rewrite_index(small, lambda rows: rows.append(dict(rows[-1])))

    report = verify_run(small.url)

    assert messages(report, "index") == "segment 0 is in it 2 times"


@pytest.mark.parametrize(
    ("column", "value"),
    [
        ("resid_pre_5_offset", 4),
        ("final_prenorm_xxh3", 17),
        ("shard", "data/elsewhere.parquet"),
        ("prompt_id", "other"),
        ("row_group", 5),
        ("seq_len", 3),
    ],
)
def test_an_index_row_that_differs(small: SmallRun, column: str, value: Any) -> None:
    rewrite_index(small, lambda rows: rows[2].update({column: value}))

    report = verify_run(small.url)

    assert found(report) == {("index", INDEX_KEY, 3, "prompt-3")}
    assert messages(report, "index") == f"segment 0 differs in {column}"


def test_an_index_that_numbers_its_shards_in_another_order_is_the_same_index(small: SmallRun) -> None:
    table = index_table([s for r in small.ledger.resolutions().values() for s in r.shards], SITE_NAMES)
    shard = pa.array(table["shard"].to_pylist()[::-1]).dictionary_encode()
    shuffled = pa.DictionaryArray.from_arrays(
        pa.array([shard.dictionary.to_pylist().index(k) for k in table["shard"].to_pylist()], pa.int32()),
        shard.dictionary,
    )
    at = table.schema.get_field_index("shard")
    other = table.set_column(at, table.schema.field("shard"), shuffled)
    assert not other.equals(table)
    sink = pa.BufferOutputStream()
    pq.write_table(other, sink)
    small.store.put(INDEX_KEY, memoryview(sink.getvalue()))

    assert verify_run(small.url).is_ok


# Shards


def test_a_deleted_shard(small: SmallRun) -> None:
    small.store.delete([SHARD_1])

    report = verify_run(small.url, full=True)

    assert found(report) == {("shards", SHARD_1, None, None)}
    assert messages(report, "shards") == "is missing; it holds rows 4, 5, 7"


def test_a_truncated_shard(small: SmallRun) -> None:
    data = small.store.get(SHARD_1)
    small.store.put(SHARD_1, data[:-1])

    report = verify_run(small.url, full=True)

    assert found(report) == {("shards", SHARD_1, None, None)}
    assert f"has {len(data) - 1} bytes, not the {len(data)} recorded" in messages(report, "shards")


def test_a_shard_overwritten_with_other_bytes_of_the_same_size(small: SmallRun) -> None:
    small.store.put(SHARD_1, bytes(len(small.store.get(SHARD_1))))

    report = verify_run(small.url)

    assert found(report) == {("layout", SHARD_1, None, None)}
    assert "cannot be read as Parquet" in messages(report, "layout")


def extent(small: SmallRun, row: int, column: str, segment: int = 0) -> tuple[str, int, int]:
    for record in small.ledger.resolutions().values():
        for shard in record.shards:
            for entry in shard.entries:
                if (entry.row, entry.segment) == (row, segment):
                    return shard.key, entry.extents[column].offset, entry.extents[column].nbytes
    raise AssertionError(row)


def test_a_changed_byte_of_a_state_is_found_by_reading_everything(small: SmallRun) -> None:
    key, offset, _ = extent(small, 7, "resid_pre_5", segment=1)
    small.change_byte(key, offset + 100)

    assert verify_run(small.url).is_ok
    report = verify_run(small.url, full=True)

    assert found(report) == {("hashes", key, 7, "prompt-7")}
    assert "resid_pre_5 of segment 1 does not hash" in messages(report, "hashes")


@pytest.mark.parametrize("column", ["input_ids", "loss_mask"])
def test_a_changed_byte_of_a_token_column_is_found_at_once(small: SmallRun, column: str) -> None:
    key, offset, _ = extent(small, 7, column)
    small.change_byte(key, offset)

    report = verify_run(small.url)

    assert found(report) == {("layout", key, None, None)}
    assert "CRC" in messages(report, "layout")


def test_a_changed_byte_outside_every_payload_is_found_by_the_hash_of_the_object(small: SmallRun) -> None:
    key, offset, _ = extent(small, 4, "resid_pre_2")
    # The page header of a tensor column, which the default does not read.
    small.change_byte(key, offset - 10)

    report = verify_run(small.url, full=True)

    assert found(report) == {("hashes", key, None, None)}


def _other_ids(row: ShardRow) -> ShardRow:
    ids = row.prompt.input_ids.copy()
    ids[-1] += 1
    return ShardRow(replace(row.prompt, input_ids=ids), row.states) if row.prompt.row == 7 else row


def _other_mask(row: ShardRow) -> ShardRow:
    mask = 1 - row.prompt.loss_mask
    return ShardRow(replace(row.prompt, loss_mask=mask), row.states) if row.prompt.row == 5 else row


def _other_id(row: ShardRow) -> ShardRow:
    return ShardRow(replace(row.prompt, prompt_id="someone"), row.states) if row.prompt.row == 5 else row


def _cut(row: ShardRow) -> ShardRow:
    """The last token lost, of a prompt of one segment."""
    if row.prompt.row != 4:
        return row
    prompt = replace(row.prompt, input_ids=row.prompt.input_ids[:-1], loss_mask=row.prompt.loss_mask[:-1])
    return ShardRow(prompt, {site: np.asarray(state)[:-1] for site, state in row.states.items()})


def test_tokens_that_are_not_those_of_the_plan(small: SmallRun) -> None:
    recommit(small, _other_ids)

    report = verify_run(small.url)

    assert found(report) == {("contents", SHARD_1, 7, "prompt-7")}
    assert messages(report, "contents") == "input_ids are not those of the plan"


def test_a_loss_mask_that_is_not_that_of_the_plan(small: SmallRun) -> None:
    recommit(small, _other_mask)

    report = verify_run(small.url)

    assert found(report) == {("contents", SHARD_1, 5, "prompt-5")}
    assert messages(report, "contents") == "loss_mask are not those of the plan"


def test_a_prompt_under_another_name(small: SmallRun) -> None:
    recommit(small, _other_id)

    report = verify_run(small.url)

    assert ("contents", SHARD_1, 5, "prompt-5") in found(report)
    assert "someone" in messages(report, "contents")


def test_a_prompt_that_lost_a_token(small: SmallRun) -> None:
    recommit(small, _cut)

    report = verify_run(small.url)

    assert found(report) == {("contents", SHARD_1, 4, "prompt-4")}
    assert "planned as [(0, 1, 0, 64, 64, 'prompt-4')]" in messages(report, "contents")


def test_a_long_prompt_that_lost_a_segment(small: SmallRun) -> None:
    def lose(record: JsonDict) -> None:
        (shard,) = record["shards"]
        shard["entries"] = [e for e in shard["entries"] if e["segment"] != 1]

    edit(small, "000001", lose)
    reindex(small)

    report = verify_run(small.url)

    assert ("contents", SHARD_1, 7, "prompt-7") in found(report)
    assert "5 rows, not the 4 recorded" in messages(report, "contents")


def test_a_record_that_names_a_row_otherwise_than_the_file_does(small: SmallRun) -> None:
    def swap(record: JsonDict) -> None:
        one, two = record["shards"][0]["entries"][:2]
        one["row_group"], two["row_group"] = two["row_group"], one["row_group"]

    edit(small, "000001", swap)
    reindex(small)

    report = verify_run(small.url)

    assert {("contents", SHARD_1, 4, "prompt-4"), ("contents", SHARD_1, 5, "prompt-5")} <= found(report)
    assert "row is 5, recorded as 4" in messages(report, "contents")


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("hsray.dtype", "float16"),
        ("hsray.run_id", "another run"),
        ("hsray.hidden_size", "48"),
        ("hsray.codec", "zip"),
        ("hsray.format_version", "0"),
    ],
)
def test_a_shard_whose_footer_tells_of_another_run(small: SmallRun, name: str, value: str) -> None:
    recommit(small, lambda row: row, metadata={**metadata("bfloat16", 24), name: value})

    report = verify_run(small.url)

    assert found(report) == {("layout", SHARD_1, None, None)}
    assert f"{name} is {value!r}" in messages(report, "layout")


def test_a_shard_with_other_columns(small: SmallRun) -> None:
    sites = [*SITE_NAMES[:2], "resid_pre_7"]

    def rename(row: ShardRow) -> ShardRow:
        return ShardRow(row.prompt, dict(zip(sites, row.states.values(), strict=True)))

    with pytest.raises(Exception, match="no extent of final_prenorm"):
        recommit(small, rename, sites=sites)

    report = verify_run(small.url)

    assert ("layout", SHARD_1, None, None) in found(report)
    assert "resid_pre_7" in messages(report, "layout")


def test_an_extent_that_is_recorded_wrong(small: SmallRun) -> None:
    def shift(record: JsonDict) -> None:
        record["shards"][0]["entries"][0]["extents"]["final_prenorm"]["offset"] += 1

    edit(small, "000001", shift)
    reindex(small)

    report = verify_run(small.url, full=True)

    assert ("layout", SHARD_1, 4, "prompt-4") in found(report)
    assert ("hashes", SHARD_1, 4, "prompt-4") in found(report)


def test_an_extent_that_lies_outside_its_object(small: SmallRun) -> None:
    def shift(record: JsonDict) -> None:
        record["shards"][0]["entries"][0]["extents"]["final_prenorm"]["offset"] = 1 << 40

    edit(small, "000001", shift)
    reindex(small)

    report = verify_run(small.url, full=True)

    # The digest of an object says where its payloads lie, so it cannot fit either.
    assert found(report) == {("layout", SHARD_1, 4, "prompt-4"), ("hashes", SHARD_1, None, None)}


@pytest.mark.parametrize("dtype", list(DTYPES))
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_values_that_are_not_finite(tmp_path: Path, dtype: str, value: float) -> None:
    small = build_small_run(str(tmp_path), dtype=dtype)

    def spoil(row: ShardRow) -> ShardRow:
        if row.prompt.row != 7:
            return row
        state = np.array(row.states["resid_pre_2"])
        state[5000, 3] = value
        state[8999, 23] = value
        return ShardRow(row.prompt, {**row.states, "resid_pre_2": state})

    recommit(small, spoil)

    assert verify_run(small.url).is_ok
    report = verify_run(small.url, full=True)

    assert found(report) == {("values", SHARD_1, 7, "prompt-7")}
    assert messages(report, "values").splitlines() == [
        "1 values of resid_pre_2 are NaN or infinite, the first at token 5000",
        "1 values of resid_pre_2 are NaN or infinite, the first at token 8999",
    ]


def test_many_problems_are_all_counted_and_only_some_kept(tmp_path: Path) -> None:
    small = build_small_run(str(tmp_path), lengths=(1,) * 300)
    write_index(small.store, [], SITE_NAMES)

    report = verify_run(small.url)

    assert report.found["index"] == 299
    assert len(report.problems) == 200
    assert "and 99 more" in str(report)


# The command


def test_the_command_prints_what_was_checked_and_returns_zero(
    small: SmallRun, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([small.url, "--full"]) == 0

    output = capsys.readouterr().out
    assert output.splitlines()[-1] == "ok"
    for check, meaning in CHECKS.items():
        assert (check in output and meaning in output) or check == "parity"
    assert "committed 7" in output


def test_the_command_returns_three_and_names_every_problem(small: SmallRun, capsys: pytest.CaptureFixture[str]) -> None:
    key, offset, _ = extent(small, 5, "resid_pre_2")
    small.change_byte(key, offset)

    assert main([small.url, "--full"]) == ExitCode.INCOMPLETE == 3

    output = capsys.readouterr().out
    assert (
        f"PROBLEM hashes: {key}, row 5, prompt 'prompt-5': resid_pre_2 of segment 0 does not hash to what was recorded"
        in output
    )
    assert output.splitlines()[-1] == "1 problem"


def test_the_report_is_json_on_request(small: SmallRun, capsys: pytest.CaptureFixture[str]) -> None:
    small.store.delete([SHARD_1])

    assert main([small.url, "--json"]) == 3

    report = json.loads(capsys.readouterr().out)
    assert report["ok"] is False
    assert report["found"] == {"shards": 1}
    assert report["problems"] == [
        {
            "check": "shards",
            "message": "is missing; it holds rows 4, 5, 7",
            "key": SHARD_1,
            "row": None,
            "prompt_id": None,
        }
    ]
    assert report["counts"]["committed"] == 7


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["ftp://x/y"], "unknown scheme"),
        (["/nowhere", "--storage-option", "allow_http"], "not of the form name=value"),
        (["/nowhere", "--storage-option", "endpoint=http://x"], "takes none"),
    ],
)
def test_a_wrong_argument_returns_four(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(arguments) == ExitCode.CONFIG == 4

    assert message in capsys.readouterr().err


def test_a_store_that_refuses_returns_five(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    # A link to itself: neither an object nor a missing one.
    (tmp_path / RUN_KEY).symlink_to(tmp_path / RUN_KEY)

    assert main([str(tmp_path)]) == ExitCode.STORE == 5

    assert "StoreUnusable" in capsys.readouterr().err


def test_storage_options_reach_the_store(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["s3://bucket/x", "--storage-option", "no_such_option=1"]) == ExitCode.CONFIG
    assert "no_such_option" in capsys.readouterr().err


def test_parity_is_refused_without_the_model(small: SmallRun) -> None:
    with pytest.raises(ConfigError, match=r"--model: nowhere is not a directory"):
        verify_run(small.url, parity=2)
