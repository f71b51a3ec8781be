"""Garbage is what no record names and nobody may still be about to name; nothing else goes."""

import json
import os
import time
from pathlib import Path

import pytest

from hsray.errors import ExitCode, HsrayError
from hsray.gc import find_garbage, main, remove
from hsray.store import open_store
from hsray.verify import verify_run
from tests.small_run import SmallRun, build_small_run

DAY = 24 * 3600


@pytest.fixture
def run(tmp_path: Path) -> SmallRun:
    return build_small_run(str(tmp_path / "run"))


def leave(run: SmallRun, key: str, *, days: float) -> None:
    """An object of so many days ago."""
    path = Path(run.url) / key
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(b"x" * 100)
    os.utime(path, (time.time() - days * DAY,) * 2)


def make_old(run: SmallRun) -> None:
    for path in Path(run.url).rglob("*"):
        if path.is_file():
            os.utime(path, (time.time() - 30 * DAY,) * 2)


def test_a_finished_run_has_no_garbage_however_old_it_is(run: SmallRun) -> None:
    make_old(run)

    found = find_garbage(run.store)

    assert (found.objects, found.uploads, found.young) == ([], [], 0)


GARBAGE = (
    "data/000000-lost-0.parquet",
    "plan/othersplan/leases.parquet",
    "rejects/othersplan-00000.parquet",
    ".hsray-probe-0123456789abcdef",
)


def test_what_nothing_names_goes_once_it_is_old_and_the_run_stays_whole(run: SmallRun) -> None:
    make_old(run)
    for key in GARBAGE:
        leave(run, key, days=2)
        leave(run, key.replace("0", "1", 1) if key.startswith(".") else f"{key}.young", days=0.5)
    leave(run, "data/000000-lost-0.parquet#1", days=2)
    leave(run, "my-notes.txt", days=2)
    leave(run, "report #1.txt", days=2)  # looks like an unfinished file, and is none of ours

    found = find_garbage(run.store)
    assert sorted(info.key for info in found.objects) == sorted(GARBAGE)
    assert [upload.key for upload in found.uploads] == ["data/000000-lost-0.parquet#1"]
    assert found.young == len(GARBAGE)
    remove(run.store, found)

    again = find_garbage(run.store)
    assert (again.objects, again.uploads, again.young) == ([], [], len(GARBAGE))
    assert (Path(run.url) / "my-notes.txt").exists()
    assert (Path(run.url) / "report #1.txt").exists()
    assert verify_run(run.url, full=True).problems == []


def test_nothing_is_removed_unless_told(run: SmallRun, capsys: pytest.CaptureFixture[str]) -> None:
    leave(run, GARBAGE[0], days=2)

    assert main([run.url]) == 0
    assert "would be removed" in capsys.readouterr().out
    assert (Path(run.url) / GARBAGE[0]).exists()
    assert main([run.url, "--delete", "--json"]) == 0

    assert json.loads(capsys.readouterr().out) == {
        "objects": 1, "bytes": 100, "uploads": 0, "young": 0, "deleted": True,
    }  # fmt: skip
    assert not (Path(run.url) / GARBAGE[0]).exists()


def test_a_record_that_cannot_be_read_stops_everything(run: SmallRun) -> None:
    leave(run, GARBAGE[0], days=2)
    run.store.put("leases/000000.json", b"{}")

    with pytest.raises(HsrayError, match=r"leases/000000\.json is not a resolution"):
        find_garbage(run.store)
    assert main([run.url, "--delete"]) == ExitCode.FAILED
    assert (Path(run.url) / GARBAGE[0]).exists()


def test_a_place_without_a_run_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "mine.parquet").write_bytes(b"x")

    with pytest.raises(HsrayError, match="there is no run"):
        find_garbage(open_store(str(tmp_path)))


def test_an_hour_is_the_least(run: SmallRun) -> None:
    assert main([run.url, "--hours", "0.5", "--delete"]) == ExitCode.CONFIG
