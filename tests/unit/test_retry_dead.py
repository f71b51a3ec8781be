"""Dead prompts are opened again; what is committed is not touched, and no number is counted twice."""

from pathlib import Path

import pytest

from hsray.errors import ExitCode, HsrayError
from hsray.ledger import Ledger, account
from hsray.plan import load_plan
from hsray.reader import open_run
from hsray.records import DeadPrompt, Lease, Reopened, Resolution
from hsray.retry_dead import main, retry_dead
from hsray.shard import ShardRow, write_shard
from hsray.store import open_store
from hsray.verify import verify_run
from tests.small_run import SITE_NAMES, SmallRun, build_small_run, make_states, metadata


@pytest.fixture
def run(tmp_path: Path) -> SmallRun:
    return build_small_run(str(tmp_path / "run"))


def ledger(run: SmallRun) -> Ledger:
    return Ledger(run.store, run.record["run_id"])


def open_leases(run: SmallRun) -> list[Lease]:
    return ledger(run).account(load_plan(run.store, run.record["plan"]).leases)[1].open


def snapshot(run: SmallRun) -> dict[str, bytes]:
    return {info.key: run.store.get(info.key) for info in run.store.list()}


def die_again(run: SmallRun, lease: Lease) -> None:
    dead = DeadPrompt(run.dead, run.prompts[run.dead].prompt_id, "crash", "again", 3)
    ledger(run).resolve(Resolution("dead", lease.lease_id, "a2", "replica", dead=(dead,)))


def commit(run: SmallRun, lease: Lease) -> None:
    states = make_states(run.dead, run.prompts[run.dead].num_tokens, 24, "bfloat16")
    shard = write_shard(
        run.store,
        f"data/{lease.lease_id}-a2-0.parquet",
        [ShardRow(run.prompts[run.dead], states)],
        sites=SITE_NAMES,
        hidden_size=24,
        dtype="bfloat16",
        metadata=metadata("bfloat16", 24),
    )
    ledger(run).resolve(Resolution("commit", lease.lease_id, "a2", "replica", (shard,)))


def test_a_dead_prompt_is_open_again_and_nothing_else_changed(run: SmallRun) -> None:
    before = snapshot(run)
    assert ledger(run).is_complete()

    generation, prompts = retry_dead(run.store)

    assert (generation, [p.row for p in prompts]) == (1, [run.dead])
    (lease,) = open_leases(run)
    assert lease.rows == (run.dead,)
    assert lease.lease_id.endswith(".g1")
    assert not ledger(run).is_complete()
    after = snapshot(run)
    assert {key: after[key] for key in before} == before
    assert after.keys() - before.keys() == {"retries/1.json"}
    assert [row.prompt_id for row in open_run(run.url)] == [run.prompts[r].prompt_id for r in run.rows]


def test_it_can_be_committed_then(run: SmallRun) -> None:
    retry_dead(run.store)
    commit(run, open_leases(run)[0])
    run.finish()

    assert ledger(run).is_complete()
    assert verify_run(run.url, full=True).problems == []
    assert len(open_run(run.url)) == len(run.prompts)
    assert retry_dead(run.store) == (1, [])


def test_or_die_again_and_again(run: SmallRun) -> None:
    for generation in (1, 2, 3):
        assert retry_dead(run.store)[0] == generation
        (lease,) = open_leases(run)
        assert lease.lease_id.endswith(f".g{generation}")
        die_again(run, lease)
        run.finish()
        report = verify_run(run.url, full=True)
        assert report.problems == []
        assert (report.counts["committed"], report.counts["dead"]) == (len(run.prompts) - 1, 1)


def test_asking_twice_before_anything_ran_changes_nothing(run: SmallRun) -> None:
    retry_dead(run.store)
    opened = open_leases(run)

    assert retry_dead(run.store) == (1, [])
    assert open_leases(run) == opened


def test_two_callers_at_once_open_a_prompt_once(run: SmallRun) -> None:
    retry_dead(run.store)
    lease_id = open_leases(run)[0].lease_id.removesuffix(".g1")

    assert ledger(run).reopen({lease_id: [run.dead]}).generation == 2

    assert [lease.lease_id for lease in open_leases(run)] == [f"{lease_id}.g1"]


def test_only_the_classes_asked_for(run: SmallRun) -> None:
    assert retry_dead(run.store, ["crash"]) == (0, [])
    assert len(retry_dead(run.store, ["crash", "prompt_permanent"])[1]) == 1


def test_a_driver_that_finishes_meanwhile_does_not_hide_it(run: SmallRun) -> None:
    plan = load_plan(run.store, run.record["plan"])
    _, accounting = ledger(run).account(plan.leases)
    retry_dead(run.store)

    ledger(run).write_success({"generation": accounting.generation})

    assert not ledger(run).is_complete()


def test_a_row_that_is_not_dead_cannot_be_opened() -> None:
    roots = [Lease("000000", (0, 1), (5, 5))]
    dead = Resolution("dead", "000000", "a", "r", dead=tuple(DeadPrompt(r, f"p{r}", "crash", "", 1) for r in (0, 1)))

    with pytest.raises(HsrayError, match=r"neither dead nor committed: \[7\]"):
        account(roots, {"000000": dead}, Reopened(1, {"000000": {7: 1}}))


def test_the_command_says_what_it_did(run: SmallRun, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([run.url]) == 0
    assert "1 dead prompts (1 prompt_permanent) are open again, generation 1" in capsys.readouterr().out
    assert main([run.url]) == 0
    assert "no dead prompts" in capsys.readouterr().out
    assert main([str(tmp_path)]) == ExitCode.FAILED
    with pytest.raises(HsrayError, match="there is no run"):
        retry_dead(open_store(str(tmp_path)))
