"""Whole runs over real Ray with a made-up engine: outcomes, resume, refusals."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from hsray import retry_dead
from hsray.errors import ExitCode
from hsray.reader import open_run
from hsray.store import open_store
from hsray.verify import verify_run
from tests.runs import Run, ended, make_run, random_rows

CRASH, NAN, REFUSE = 1, 2, 3


@pytest.fixture
def new_run(tmp_path: Path) -> Iterator[Any]:
    made: list[Run] = []

    def make(rows: list[Any], **options: Any) -> Run:
        run = make_run(tmp_path, rows, **options)
        # Marks every process of the run, so that leftovers can be told from strangers.
        run.env["HSRAY_TEST_RUN"] = str(tmp_path)
        made.append(run)
        return run

    yield make
    for run in made:
        with ended(run):
            pass


def test_every_row_has_one_outcome_and_reads_back_exactly(new_run: Any) -> None:
    rows = random_rows(33)
    rows[7:7] = ["{broken", {"id": "p1", "text": "a second p1"}, {"messages": []}]
    run = new_run(rows)

    assert run.finish() == ExitCode.COMPLETE, run.log()

    committed, dead, rejected = run.outcomes()
    assert (len(committed), len(dead), rejected) == (33, 0, 3)
    assert run.check_states() == 33
    assert verify_run(run.url, full=True).problems == []
    assert [row.prompt_id for row in open_run(run.url)] == [f"p{i}" for i in range(33)]
    run.assert_nothing_left()

    assert run.finish(name="second") == ExitCode.COMPLETE
    assert "Complete already" in run.log("second")
    assert "starting replica" not in run.log("second")


def test_bad_prompts_die_alone_and_say_why(new_run: Any) -> None:
    rows = random_rows(30)
    rows[4]["input_ids"][1] = NAN
    rows[11]["input_ids"][0] = REFUSE
    run = new_run(rows, overrides=[f"engine.args.nan_token={NAN}", f"engine.args.refuse_token={REFUSE}"])

    assert run.finish() == ExitCode.INCOMPLETE, run.log()

    committed, dead, _ = run.outcomes()
    assert set(dead) == {4, 11}
    assert committed == set(range(30)) - {4, 11}
    assert dead[4].message == "NaN or infinity in resid_pre_2 at position 1 (0-based)"
    assert dead[4].attempts == 3
    assert "refused by FakeEngine" in dead[11].message
    assert dead[11].attempts == 3
    assert run.check_states() == 28
    assert "p4" in run.log()
    assert run.finish("budgets.max_dead_fraction=0.5", name="second") == ExitCode.COMPLETE

    # Another chance for both, on an engine that has learned one of them: three new tries each.
    assert retry_dead.main([run.url]) == ExitCode.COMPLETE
    assert run.finish("engine.args.nan_token=-1", "budgets.max_dead_fraction=0.5", name="again") == ExitCode.COMPLETE
    committed, dead, _ = run.outcomes()
    assert set(dead) == {11}
    assert committed == set(range(30)) - {11}
    assert dead[11].attempts == 3
    assert run.check_states() == 29
    assert verify_run(run.url, full=True).problems == []


def test_a_prompt_that_kills_the_engine_is_found_and_the_rest_delivered(new_run: Any) -> None:
    rows = random_rows(20)
    rows[8]["input_ids"][0] = CRASH
    overrides = [f"engine.args.crash_token={CRASH}", "budgets.lease_crashes=1", "budgets.max_dead_fraction=0.1"]
    run = new_run(rows, overrides=overrides)

    assert run.finish() == ExitCode.COMPLETE, run.log()

    committed, dead, _ = run.outcomes()
    assert set(dead) == {8}
    assert dead[8].failure_class == "crash"
    assert dead[8].prompt_id == "p8"
    assert committed == set(range(20)) - {8}
    assert run.check_states() == 19
    run.assert_nothing_left()


def test_another_input_is_refused_with_the_keys_that_differ(new_run: Any) -> None:
    run = new_run(random_rows(6))
    assert run.finish() == ExitCode.COMPLETE, run.log()

    (run.folder / "prompts.jsonl").write_text('{"id": "x", "input_ids": [200]}\n')
    assert run.finish(name="other-prompts") == ExitCode.CONFIG
    assert "prompts.path[0]" in run.log("other-prompts")

    assert run.finish("capture.sites=[resid_pre_3]", name="other-sites") == ExitCode.CONFIG
    assert "capture.sites" in run.log("other-sites")
    assert "resid_pre_3" in run.log("other-sites")


def test_another_engine_is_refused_unless_allowed(new_run: Any) -> None:
    run = new_run(random_rows(40), overrides=["engine.args.seconds_per_token=0.01", "cluster.replicas=1"])
    driver = run.start()
    run.wait_for_resolutions(1)
    driver.terminate()
    assert driver.wait(60) == ExitCode.INTERRUPTED
    store = run.store()
    engine = store.get_json("engine.json")
    engine["engine"]["sglang_version"] = "0.0.1"
    store.delete(["engine.json"])
    store.create_once("engine.json", engine)

    assert run.finish(name="refused") == ExitCode.FAILED
    assert "sglang_version: 0.0.1 then, fake now" in run.log("refused")

    assert run.finish("engine.allow_change=[sglang_version]", name="allowed") == ExitCode.COMPLETE, run.log("allowed")
    assert run.check_states() == 40


def test_leases_larger_than_the_arena_are_written_in_several_shards(new_run: Any) -> None:
    run = new_run(random_rows(40, longest=200), overrides=["spool.bytes=40960", "output.max_lease_prompts=40"])

    assert run.finish() == ExitCode.COMPLETE, run.log()

    assert run.check_states() == 40
    assert sum(1 for _ in open_store(run.url).list("data/")) > 1
    assert verify_run(run.url, full=True).problems == []


def test_a_second_replica_on_one_gpu_is_refused_and_the_first_does_the_run(new_run: Any) -> None:
    run = new_run(random_rows(20), overrides=["engine.args.gpu=GPU-7"])

    assert run.finish() == ExitCode.COMPLETE, run.log()

    assert len(run.outcomes()[0]) == 20
    assert run.log().count("is ready on") == 1
    assert "computes on GPU GPU-7" in run.log()
    assert "base_gpu_id" in run.log()
    run.assert_nothing_left()


@pytest.mark.parametrize(
    ("override", "code", "says"),
    [
        ("capture.sites=[resid_pre_9]", ExitCode.CONFIG, "resid_pre_1 .. resid_pre_7"),
        ("prompts.path=/nowhere/*.jsonl", ExitCode.CONFIG, "prompts.path"),
        ("model.path=/nowhere", ExitCode.CONFIG, "model.path"),
        ("engine.args.disable_radix_cache=false", ExitCode.CONFIG, "shared prefix"),
        ("output.url=memory://x", ExitCode.CONFIG, "output.url"),
        ("output.url=/proc/hsray", ExitCode.STORE, "/proc/hsray"),
        ("prompts.max_tokens=9999", ExitCode.CONFIG, "prompts.max_tokens"),
        ("prompts.min_tokens=4000", ExitCode.CONFIG, "too_short 6"),
        ("spool.path=/proc/spool", ExitCode.CONFIG, "spool.path"),
        ("spool.bytes=4096", ExitCode.CONFIG, "spool.bytes: the largest prompt needs"),
        ("engine.args.no_such_argument=1", ExitCode.FAILED, "no_such_argument"),
        ("engine.args.kv_cache_dtype=fp8_e4m3", ExitCode.CONFIG, "quantises keys and values"),
        ("engine.args.chosen_kv_cache=torch.float8_e4m3fn", ExitCode.CONFIG, "quantises keys and values"),
    ],
)
def test_what_cannot_work_ends_early_with_the_key_to_change(
    new_run: Any, override: str, code: ExitCode, says: str
) -> None:
    run = new_run(random_rows(6))

    impatient = ("budgets.replica_deaths=2", "budgets.lease_crashes=1")
    assert run.finish(override, *impatient) == code, run.log()

    assert says in run.log()
    assert "Traceback" not in run.log()
