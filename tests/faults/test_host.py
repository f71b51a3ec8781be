"""The node itself is short of something: shared memory, file descriptors, a place to write."""

import os
import resource
import subprocess
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

from hsray.errors import ExitCode
from hsray.verify import verify_run
from tests.runs import Run, ended, make_run, random_rows

PROMPTS = 30
IS_CGROUP_2 = Path("/sys/fs/cgroup/cgroup.controllers").exists()
CGROUPS = Path("/sys/fs/cgroup") if IS_CGROUP_2 else Path("/sys/fs/cgroup/memory")


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Run]:
    with ended(make_run(tmp_path, random_rows(PROMPTS))) as it:
        yield it


def may_mount(prefix: list[str]) -> None:
    tried = subprocess.run([*prefix, "true"], capture_output=True, text=True, check=False)
    if tried.returncode != 0:
        (pytest.fail if os.environ.get("CI") else pytest.skip)(f"cannot mount a tmpfs: {tried.stderr.strip()}")


def make_memory_group() -> Path:
    """A cgroup with no limit yet. Making one needs root and a writable hierarchy: without, the test is skipped."""
    group = CGROUPS / f"hsray-test-{uuid.uuid4().hex[:8]}"
    try:
        group.mkdir()
    except OSError as err:
        pytest.skip(f"cannot make a memory cgroup: {err}")
    if not (group / ("memory.max" if IS_CGROUP_2 else "memory.limit_in_bytes")).exists():
        group.rmdir()
        pytest.skip("this cgroup hierarchy has no memory controller")
    return group


def remove_memory_group(group: Path) -> None:
    for pid in (group / "cgroup.procs").read_text().split():  # only after a failure
        (group.parent / "cgroup.procs").write_text(pid)
    group.rmdir()


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


def test_a_container_with_the_default_shared_memory_is_enough(run: Run) -> None:
    """64 MB of /dev/shm for everything on the node: Ray, SGLang and two arenas."""
    run.prefix = ["unshare", "--mount", "sh", "-c", 'mount -t tmpfs -o size=64m tmpfs /dev/shm && exec "$@"', "sh"]
    may_mount(run.prefix)

    assert run.finish("spool.path=/dev/shm/hsray", "spool.bytes=auto") == ExitCode.COMPLETE, run.log()

    assert_whole(run)


def test_a_replica_that_the_kernel_kills_for_its_memory_costs_nothing(run: Run) -> None:
    group = make_memory_group()
    try:
        driver = run.start("cluster.replicas=1", "engine.args.seconds_per_token=0.01")
        run.wait_for_resolutions(1)
        (victim,) = run.processes("ReplicaActor")

        # As a cgroup that turns out to be too small: the kernel ends who asks for the next page.
        (group / "cgroup.procs").write_text(str(victim))
        (group / ("memory.max" if IS_CGROUP_2 else "memory.limit_in_bytes")).write_text(str(4096))

        assert driver.wait(240) == ExitCode.COMPLETE, run.log()
    finally:
        remove_memory_group(group)
    assert run.log().count("starting replica") == 2
    assert_whole(run)
    run.assert_nothing_left()


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
