"""A finished run is damaged in every way a disk can, and `hsray.repair` makes it what it was, over real Ray."""

import os
import subprocess
import sys
from pathlib import Path

from hsray.errors import ExitCode
from hsray.reader import open_run
from hsray.verify import verify_run
from tests.runs import FAKE, ROOT, Run, ended, make_run, random_rows

PROGRAM = "import sys; from hsray.repair import main; sys.exit(main(sys.argv[2:], engine_class=sys.argv[1]))"


def repair(run: Run, *arguments: str) -> int:
    with (run.folder / "repair.log").open("w") as log:
        process = subprocess.Popen(
            [sys.executable, "-c", PROGRAM, FAKE, run.url, *arguments],
            stdout=log,
            stderr=subprocess.STDOUT,
            cwd=ROOT,
            env={**os.environ, **run.env, "PYTHONPATH": str(ROOT)},
            start_new_session=True,
            text=True,
        )
    run.started.append(process)
    return process.wait(240)


def hashes(run: Run) -> dict[str, list[int]]:
    """Of every state, by prompt, wherever it lies."""
    opened = open_run(run.url)
    return {
        prompt_id: [int(opened.segments.xxh3[site][position]) for site in opened.sites]
        for position, prompt_id in enumerate(opened.prompt_ids)
    }


def test_what_was_damaged_is_extracted_again_and_nothing_else(tmp_path: Path) -> None:
    run = make_run(tmp_path, random_rows(23), env={"HSRAY_TEST_RUN": str(tmp_path)})
    with ended(run):
        assert run.finish() == ExitCode.COMPLETE, run.log()
        undamaged = hashes(run)
        segments = open_run(run.url).segments
        store = run.store()
        flipped, cut, gone = (segments.where(position, "resid_pre_5") for position in (1, 8, 14))
        data = bytearray(store.get(flipped.key))
        data[flipped.offset] ^= 1
        store.put(flipped.key, bytes(data))
        store.put(cut.key, store.get(cut.key)[:-7])
        store.delete([gone.key])
        # Token ids are in the plan.
        (tmp_path / "prompts.jsonl").unlink()
        before = {info.key: store.get(info.key) for info in store.list("data/")}

        assert repair(run, "--dry-run") == ExitCode.INCOMPLETE
        assert "11 rows" in run.log("repair")
        assert {info.key: store.get(info.key) for info in store.list("data/")} == before

        assert repair(run, "cluster.replicas=1") == ExitCode.COMPLETE, run.log("repair")

        assert verify_run(run.url, full=True).problems == []
        assert hashes(run) == undamaged
        assert run.check_states() == 23
        assert {key: store.get(key) for key in before} == before
        # One prompt of the five beside the flipped one.
        assert len([key for key in open_run(run.url).segments.shard_keys if key not in before]) == 3
        assert repair(run) == ExitCode.COMPLETE
        assert "nothing to repair" in run.log("repair")
        run.assert_nothing_left()
