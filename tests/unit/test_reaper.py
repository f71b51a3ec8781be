import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

from hsray.reaper import start_reaper
from hsray.spool import Arena, sweep
from tests.runs import wait_until


def owner_of_an_arena(root: Path, leftover: Path) -> subprocess.Popen[str]:
    code = textwrap.dedent(
        f"""
        import sys
        from hsray.spool import Arena
        arena = Arena({str(root)!r}, 4096)
        arena.adopt([{str(leftover)!r}])
        print("ready", flush=True)
        sys.stdin.read()
        """
    )
    owner = subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, start_new_session=True
    )
    assert owner.stdout is not None
    assert owner.stdout.readline() == "ready\n"
    return owner


@pytest.mark.parametrize("kill_group", [False, True])
def test_a_killed_owners_arena_goes_with_all_it_adopted(tmp_path: Path, kill_group: bool) -> None:
    leftover, root = tmp_path / "sem.engine", tmp_path / "spool"
    leftover.write_text("x")
    with owner_of_an_arena(root, leftover) as owner:
        assert len(list(root.iterdir())) == 1

        if kill_group:
            os.killpg(owner.pid, signal.SIGKILL)
        else:
            owner.kill()
        owner.wait()

        wait_until(lambda: not list(root.iterdir()), 20, lambda: str(list(root.iterdir())))
        assert not leftover.exists()


def test_a_living_owners_arena_stays_and_no_reaper_outlives_it(tmp_path: Path) -> None:
    arena = Arena(tmp_path, 4096)
    time.sleep(0.3)  # as long as a reaper that does not wait would need
    assert arena.path.exists()
    reapers = processes_with(arena.directory)
    assert len(reapers) == 1
    os.kill(reapers[0], signal.SIGTERM)  # a shutdown of the node tells everyone
    assert processes_with(arena.directory) == reapers

    arena.remove()

    wait_until(lambda: not processes_with(arena.directory), 20, lambda: "the reaper lives")


def test_an_arena_without_a_reaper_works_and_is_swept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(sys, "executable", "/nowhere/python")

    arena = Arena(tmp_path, 4096)

    assert "no reaper" in caplog.text
    os.close(arena._lock)  # as at the death of its owner
    assert sweep(tmp_path) == [arena.directory]


def test_a_folder_that_is_gone_already_ends_the_reaper(tmp_path: Path) -> None:
    start_reaper(tmp_path / "gone")

    wait_until(lambda: not processes_with(tmp_path / "gone"), 20, lambda: "the reaper lives")


def processes_with(directory: Path) -> list[int]:
    found = []
    for entry in Path("/proc").iterdir():
        try:
            if entry.name.isdigit() and str(directory).encode() in (entry / "cmdline").read_bytes():
                found.append(int(entry.name))
        except OSError:
            continue
    return found
