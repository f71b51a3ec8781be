"""The node itself is short of something: shared memory, file descriptors, a place to write."""

import os
import resource
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from hsray.errors import ExitCode
from hsray.verify import verify_run
from tests.runs import Run, ended, make_run, random_rows

PROMPTS = 30


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Run]:
    with ended(make_run(tmp_path, random_rows(PROMPTS))) as it:
        yield it


def assert_whole(run: Run) -> None:
    committed, dead, rejected = run.outcomes()
    assert (committed, dead, rejected) == (set(range(PROMPTS)), {}, 0)
    assert run.check_states() == PROMPTS
    assert verify_run(run.url, full=True).problems == []


def test_a_small_shared_memory_is_used_as_far_as_it_goes(run: Run, small_tmpfs: Path) -> None:
    """As in a container with the default 64 MB: `auto` takes what there is, and nothing gets a SIGBUS."""
    assert run.finish(f"spool.path={small_tmpfs}", "spool.bytes=auto") == ExitCode.COMPLETE, run.log()

    assert_whole(run)
    assert list(small_tmpfs.iterdir()) == []


def test_an_arena_that_does_not_fit_is_refused_by_key_before_any_prompt(run: Run, small_tmpfs: Path) -> None:
    (small_tmpfs / "others").write_bytes(bytes(10 << 20))
    patience = ["budgets.replica_deaths=2", "budgets.lease_crashes=1"]

    assert run.finish(f"spool.path={small_tmpfs}", *patience) == ExitCode.FAILED, run.log()

    assert "spool.bytes: 8,388,608 bytes do not fit" in run.log()
    assert "docker: --shm-size" in run.log()
    assert [path.name for path in small_tmpfs.iterdir()] == ["others"]
    assert run.finish("spool.bytes=1048576", f"spool.path={small_tmpfs}", name="second") == ExitCode.COMPLETE
    assert_whole(run)


def test_few_file_descriptors_are_enough_or_said_to_be_too_few(run: Run) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (256, hard))
    try:
        code = run.finish()
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))

    assert code == ExitCode.COMPLETE, run.log()
    assert_whole(run)


def test_a_place_that_cannot_be_written_is_named(run: Run, tmp_path: Path) -> None:
    folder = tmp_path / "read-only"
    folder.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "ro,size=1m", "tmpfs", str(folder)], capture_output=True, text=True, check=False
    )
    if mounted.returncode != 0:
        (pytest.fail if os.environ.get("CI") else pytest.skip)(f"cannot mount a tmpfs: {mounted.stderr.strip()}")
    try:
        assert run.finish(f"output.url={folder / 'run'}") == ExitCode.STORE, run.log()
        assert "Read-only file system" in run.log()
        assert run.finish(f"spool.path={folder / 'spool'}", name="spool") == ExitCode.CONFIG, run.log("spool")
        assert "spool.path" in run.log("spool")
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=True)
