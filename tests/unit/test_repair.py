"""Damaged rows are opened again and stored anew; what is whole is not touched, and readers never see both."""

import json
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hsray import gc
from hsray.checkpoint import model_fingerprint
from hsray.errors import ConfigError, ExitCode, FingerprintMismatch, HsrayError
from hsray.index import read_index
from hsray.ledger import Ledger, account
from hsray.plan import load_plan
from hsray.reader import open_run
from hsray.records import Lease, Reopened, Resolution
from hsray.repair import Damage, find_damage, main, repair
from hsray.retry_dead import retry_dead
from hsray.shard import ShardRow, write_shard
from hsray.store import open_store
from hsray.verify import verify_run
from tests.small_run import DTYPES, SITE_NAMES, SmallRun, build_small_run, metadata

# Rows 0; 1 and 3; 4, 5 and 7; 8. Row 9 of the last lease is dead.
FIRST, REST = "data/000000-a1-0.parquet", "data/000000.r-a1-0.parquet"
SECOND, THIRD = "data/000001-a1-0.parquet", "data/000002-a1-0.parquet"
BF16 = DTYPES["bfloat16"]


@pytest.fixture
def run(tmp_path: Path) -> SmallRun:
    return build_small_run(str(tmp_path / "run"))


def ledger(run: SmallRun) -> Ledger:
    return Ledger(run.store, run.record["run_id"])


def open_leases(run: SmallRun) -> list[Lease]:
    return ledger(run).account(load_plan(run.store, run.record["plan"]).leases)[1].open


def snapshot(run: SmallRun) -> dict[str, bytes]:
    return {info.key: run.store.get(info.key) for info in run.store.list()}


def hashes(run: SmallRun) -> dict[str, Any]:
    """What the index says of the states, wherever they lie."""
    table = read_index(run.store, SITE_NAMES)
    return {name: table[name].to_pylist() for name in ("prompt_id", "row", *(f"{site}_xxh3" for site in SITE_NAMES))}


def flip(run: SmallRun, row: int, site: str = "resid_pre_5") -> str:
    """One byte of a state."""
    segments = open_run(run.url).segments
    where = segments.where(segments.row.tolist().index(row), site)
    run.change_byte(where.key, where.offset + 3)
    return where.key


def extract_again(run: SmallRun) -> None:
    """What the driver does of open leases."""
    for lease in open_leases(run):
        shard = write_shard(
            run.store,
            f"data/{lease.lease_id}-a2-0.parquet",
            [ShardRow(run.prompts[row], run.states[row]) for row in lease.rows],
            sites=SITE_NAMES,
            hidden_size=24,
            dtype="bfloat16",
            metadata=metadata("bfloat16", 24),
        )
        ledger(run).resolve(Resolution("commit", lease.lease_id, "a2", "replica", (shard,)))
    run.finish()


def check_whole(run: SmallRun) -> None:
    assert verify_run(run.url, full=True).problems == []
    assert find_damage(run.url) == Damage()
    rows = {prompt.row: prompt for prompt in open_run(run.url).scan()}
    assert sorted(rows) == run.rows
    for row, prompt in rows.items():
        for site in SITE_NAMES:
            assert np.array_equal(prompt[site].view(np.uint16), run.states[row][site].view(np.uint16))


def cut(run: SmallRun, key: str) -> None:
    run.store.put(key, run.store.get(key)[:-100])


@pytest.mark.parametrize(
    ("damage", "expected"),
    [
        (lambda run: flip(run, 5), {SECOND: [5]}),
        (lambda run: (flip(run, 4), flip(run, 7, "final_prenorm"), flip(run, 8)), {SECOND: [4, 7], THIRD: [8]}),
        (lambda run: cut(run, SECOND), {SECOND: [4, 5, 7]}),
        (lambda run: run.store.delete([SECOND, FIRST]), {FIRST: [0], SECOND: [4, 5, 7]}),
        # Outside every payload: nobody can say whose it is.
        (lambda run: run.change_byte(SECOND, 20), {SECOND: [4, 5, 7]}),
    ],
    ids=["one byte", "three rows", "cut", "two shards gone", "page header"],
)
def test_damaged_rows_are_stored_anew_and_no_others(
    run: SmallRun, damage: Callable[[SmallRun], Any], expected: dict[str, list[int]]
) -> None:
    undamaged = hashes(run)
    damage(run)
    damaged = snapshot(run)

    found = find_damage(run.url)

    assert dict(found.shards) == expected
    assert found.rows == sorted(row for rows in expected.values() for row in rows)
    assert found.tokens == sum(run.prompts[row].num_tokens for row in found.rows)
    assert snapshot(run) == damaged

    ledger(run).reopen(found.leases)
    assert sorted(row for lease in open_leases(run) for row in lease.rows) == found.rows
    assert {lease.lease_id[-3:] for lease in open_leases(run)} == {".g1"}
    # Neither the bad row nor, yet, the good one.
    assert sorted(p.row for p in open_run(run.url).scan()) == [row for row in run.rows if row not in found.rows]
    assert find_damage(run.url).rows == []
    assert find_damage(run.url).open_again == len(found.rows)

    extract_again(run)

    check_whole(run)
    assert hashes(run) == undamaged
    unchanged = {key: data for key, data in snapshot(run).items() if key in damaged and key.startswith(("data", "lea"))}
    assert unchanged == {key: data for key, data in damaged.items() if key.startswith(("data", "lea"))}


def test_gc_takes_a_shard_of_which_no_row_counts_and_no_other(run: SmallRun, monkeypatch: pytest.MonkeyPatch) -> None:
    cut(run, SECOND)
    flip(run, 3)
    ledger(run).reopen(find_damage(run.url).leases)
    extract_again(run)
    before = verify_run(run.url).counts

    class Later(datetime):
        @classmethod
        def now(cls, tz: Any = None) -> datetime:
            return datetime(2100, 1, 1, tzinfo=UTC)

    monkeypatch.setattr(gc, "datetime", Later)
    garbage = gc.find_garbage(run.store)
    gc.remove(run.store, garbage)

    assert [info.key for info in garbage.objects] == [SECOND]
    assert before["unreferenced_objects"] == 1
    assert verify_run(run.url).counts["unreferenced_objects"] == 0
    check_whole(run)


def test_figures_count_each_row_once(run: SmallRun) -> None:
    before = json.loads(run.store.get("_SUCCESS"))
    cut(run, SECOND)
    flip(run, 3)
    ledger(run).reopen(find_damage(run.url).leases)
    extract_again(run)

    after = json.loads(run.store.get("_SUCCESS"))

    assert after["generation"] == 1
    assert {k: after[k] for k in ("rows", "committed", "dead", "rejected", "left", "tokens")} == {
        k: before[k] for k in ("rows", "committed", "dead", "rejected", "left", "tokens")
    }
    # Two more, and the one that was cut is left out; that of row 3 still holds row 1.
    assert after["shards"] == before["shards"] + 1
    card = run.store.get("README.md").decode()
    assert SECOND not in card
    assert REST in card
    assert "Some rows were damaged" in card


def test_rows_can_be_damaged_again_and_again(run: SmallRun) -> None:
    for generation in (1, 2, 3):
        flip(run, 8)
        found = find_damage(run.url)
        assert found.rows == [8]
        assert ledger(run).reopen(found.leases).generation == generation
        extract_again(run)
        check_whole(run)
    assert open_run(run.url).segments.shard_keys[-1] == "data/000002.g1.g2.g3-a2-0.parquet"


def test_two_generations_may_open_rows_of_one_lease(run: SmallRun) -> None:
    flip(run, 4)
    ledger(run).reopen(find_damage(run.url).leases)
    flip(run, 7)
    ledger(run).reopen(find_damage(run.url).leases)

    assert [(lease.lease_id, lease.rows) for lease in open_leases(run)] == [
        ("000001.g1", (4,)),
        ("000001.g2", (7,)),
    ]
    extract_again(run)
    check_whole(run)


def test_two_callers_at_once_open_a_row_once(run: SmallRun) -> None:
    flip(run, 8)
    leases = find_damage(run.url).leases

    ledger(run).reopen(leases)
    ledger(run).reopen(leases)

    assert [lease.lease_id for lease in open_leases(run)] == ["000002.g1"]


def test_a_dead_prompt_and_a_damaged_one_of_the_same_lease(run: SmallRun) -> None:
    flip(run, 8)
    ledger(run).reopen(find_damage(run.url).leases)
    retry_dead(run.store)
    opened = {lease.lease_id: lease.rows for lease in open_leases(run)}
    assert opened == {"000002.g1": (8,), "000002.g2": (run.dead,)}
    run.states[run.dead] = {s: np.ones((run.prompts[run.dead].num_tokens, 24), BF16) for s in SITE_NAMES}

    extract_again(run)

    check_whole(run)


def test_a_row_that_has_no_outcome_cannot_be_opened() -> None:
    roots = [Lease("000000", (0, 1), (5, 5))]
    split = Resolution("split", "000000", "a", "r")

    with pytest.raises(HsrayError, match=r"neither dead nor committed: \[1\]"):
        account(roots, {"000000": split}, Reopened(1, {"000000": {1: 1}}))


def test_what_the_end_of_a_run_writes_is_written_anew(run: SmallRun) -> None:
    index = run.store.get("index.parquet")
    run.change_byte("index.parquet", 100)
    run.store.delete(["README.md"])
    found = find_damage(run.url)
    assert (found.rows, found.derived) == ([], True)

    assert repair(run.url, found) == ExitCode.COMPLETE

    assert run.store.get("index.parquet") == index
    assert run.store.get("README.md")
    check_whole(run)


def test_a_dry_run_says_what_would_be_done(run: SmallRun, capsys: pytest.CaptureFixture[str]) -> None:
    flip(run, 8)
    before = snapshot(run)

    assert main([run.url, "--dry-run"]) == ExitCode.INCOMPLETE
    text = capsys.readouterr().out
    assert main([run.url, "--dry-run", "--json"]) == ExitCode.INCOMPLETE
    figures = json.loads(capsys.readouterr().out)

    assert "resid_pre_5 of segment 0 does not hash to what was recorded" in text
    assert f"  {THIRD}: rows 8\n1 row ({run.prompts[8].num_tokens} tokens) of 1 shard to store anew" in text
    assert (figures["rows"], figures["shards"]) == (1, {THIRD: [8]})
    assert snapshot(run) == before


def test_a_whole_run_is_left_alone(run: SmallRun, capsys: pytest.CaptureFixture[str]) -> None:
    before = snapshot(run)

    assert main([run.url]) == ExitCode.COMPLETE

    assert capsys.readouterr().out == "nothing to repair\n"
    assert snapshot(run) == before


def test_an_unfinished_run_is_not_called_damaged(tmp_path: Path) -> None:
    run = build_small_run(str(tmp_path / "unfinished"), finish=False)

    assert find_damage(run.url) == Damage()


def test_damaged_records_cannot_be_repaired(run: SmallRun) -> None:
    run.store.put("leases/000001.json", b"{}")

    with pytest.raises(HsrayError, match=r"its own records are damaged: resolutions: leases/000001\.json"):
        find_damage(run.url)


def config(tmp_path: Path, **model: Any) -> dict[str, Any]:
    return {
        "model": {"path": str(tmp_path / "model"), **model},
        "prompts": {"path": "gone.jsonl"},
        "output": {"url": "elsewhere"},
    }


def test_a_run_of_a_model_that_is_not_here_says_so_before_anything_is_opened(tmp_path: Path) -> None:
    run = build_small_run(str(tmp_path / "run"), config=config(tmp_path))
    flip(run, 8)
    found = find_damage(run.url)

    with pytest.raises(ConfigError, match=r"has no config\.json"):
        repair(run.url, found)
    folder = tmp_path / "model"
    folder.mkdir()
    facts = {"num_hidden_layers": 8, "hidden_size": 24, "vocab_size": 9, "max_position_embeddings": 9}
    (folder / "config.json").write_text(json.dumps({**facts, "rms_norm_eps": 1e-6}))
    with pytest.raises(FingerprintMismatch, match=r"is not the model of the run \(model.config, model.weights differ"):
        repair(run.url, found)

    assert not [info for info in run.store.list("retries/")]


def test_secrets_are_asked_for_before_anything_is_opened(tmp_path: Path) -> None:
    stored = config(tmp_path)
    stored["output"]["storage_options"] = {"secret_access_key": "***"}
    run = build_small_run(str(tmp_path / "run"), config=stored)
    flip(run, 8)

    with pytest.raises(ConfigError, match=r"output\.storage_options\.secret_access_key: a secret"):
        repair(run.url, find_damage(run.url))
    assert not [info for info in run.store.list("retries/")]


def test_the_run_is_gone_on_with_by_its_own_configuration(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run = build_small_run(str(tmp_path / "run"), config=config(tmp_path))
    folder = tmp_path / "model"
    folder.mkdir()
    facts = {"num_hidden_layers": 8, "hidden_size": 24, "vocab_size": 9, "max_position_embeddings": 9}
    (folder / "config.json").write_text(json.dumps({**facts, "rms_norm_eps": 1e-6}))
    run.overwrite("hsray.json", {**run.record, "fingerprint": {"hash": "0", "parts": model_fingerprint(folder)}})
    flip(run, 8)
    jobs: list[Any] = []

    def resume(job: Any, engine_class: str) -> ExitCode:
        jobs.append(job)
        extract_again(run)
        return ExitCode.COMPLETE

    monkeypatch.setattr("hsray.extract.resume", resume)

    assert main([run.url, "cluster.replicas=3"]) == ExitCode.COMPLETE

    (job,) = jobs
    assert (job.config.output.url, job.config.cluster.replicas) == (run.url, 3)
    assert (job.model_path, [site.name for site in job.sites]) == (str(folder), SITE_NAMES)
    assert "open again, as generation 1: 1 row" in capsys.readouterr().out
    check_whole(run)


def test_an_interrupted_repair_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = build_small_run(str(tmp_path / "run"), config=config(tmp_path))
    flip(run, 8)
    ledger(run).reopen(find_damage(run.url).leases)
    monkeypatch.setattr("hsray.repair._job", lambda *_: None)
    monkeypatch.setattr("hsray.extract.resume", lambda job, engine_class: extract_again(run) or ExitCode.COMPLETE)

    assert main([run.url]) == ExitCode.COMPLETE

    check_whole(run)
    assert ledger(run).reopened().generation == 1


def test_the_command_says_what_is_wrong_with_its_arguments(tmp_path: Path) -> None:
    assert main([str(tmp_path / "nothing")]) == ExitCode.FAILED
    with pytest.raises(HsrayError, match="there is no run"):
        repair(str(tmp_path / "nothing"), Damage())
    assert open_store(str(tmp_path)).url
