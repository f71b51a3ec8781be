import os
import random
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from hsray.errors import ConfigError, SpoolFull
from hsray.spool import ALIGNMENT, Admission, Arena, Slot, SlotAllocator, auto_arena_bytes, shared_memory_files, sweep

PAGE = ALIGNMENT


def test_slots_never_overlap_and_everything_comes_back() -> None:
    rng = random.Random(7)
    allocator = SlotAllocator(100 * PAGE)
    live: list[Slot] = []

    for _ in range(5000):
        if live and rng.random() < 0.5:
            allocator.free(live.pop(rng.randrange(len(live))))
        else:
            slot = allocator.allocate(rng.randrange(1, 12 * PAGE))
            if slot is not None:
                for other in live:
                    assert slot.offset + slot.reserved <= other.offset or other.offset + other.reserved <= slot.offset
                assert slot.offset % PAGE == 0
                assert slot.offset + slot.nbytes <= allocator.capacity
                live.append(slot)
        assert allocator.used_bytes == sum(s.reserved for s in live)

    for slot in live:
        allocator.free(slot)
    whole = allocator.allocate(100 * PAGE)
    assert whole is not None, "free ranges were not joined again"


def test_freeing_twice_is_an_error() -> None:
    allocator = SlotAllocator(4 * PAGE)
    slot = allocator.allocate(PAGE)
    assert slot is not None
    allocator.free(slot)

    with pytest.raises(ValueError, match="not allocated"):
        allocator.free(slot)


def test_admission_closes_above_the_high_watermark_and_opens_below_the_low_one() -> None:
    admission = Admission(100 * PAGE, high_watermark=0.8, low_watermark=0.5)
    slots = [admission.admit(10 * PAGE) for _ in range(8)]
    assert None not in slots

    assert admission.admit(PAGE) is None

    for held in (7, 6):
        slot = slots.pop()
        assert slot is not None
        admission.release(slot)
        assert admission.admit(PAGE) is None, f"opened at {held * 10} %, above the low watermark"
    slot = slots.pop()
    assert slot is not None
    admission.release(slot)
    assert admission.admit(PAGE) is not None


def test_a_prompt_above_the_high_watermark_is_let_into_an_empty_arena() -> None:
    admission = Admission(10 * PAGE, high_watermark=0.5, low_watermark=0.2)

    slot = admission.admit(9 * PAGE)

    assert slot is not None


def test_a_prompt_larger_than_the_arena_is_refused_with_the_key_to_raise() -> None:
    admission = Admission(10 * PAGE, 0.8, 0.6)

    with pytest.raises(SpoolFull, match=r"spool\.bytes"):
        admission.admit(11 * PAGE)


def test_an_arena_is_mapped_and_removed(tmp_path: Path) -> None:
    arena = Arena(tmp_path, 4 * PAGE)
    with arena.path.open("r+b") as other:
        other.seek(PAGE)
        other.write(b"hello")

    assert bytes(arena.view(PAGE, 5)) == b"hello"

    arena.remove()
    assert list(tmp_path.iterdir()) == []


def test_an_arena_that_does_not_fit_says_so_and_leaves_nothing(small_tmpfs: Path) -> None:
    with pytest.raises(SpoolFull, match=r"spool\.bytes.*free"):
        Arena(small_tmpfs, 1 << 30)

    assert list(small_tmpfs.iterdir()) == []


def test_a_root_that_is_no_folder_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")

    with pytest.raises(ConfigError, match=r"spool\.path"):
        Arena(tmp_path / "file", PAGE)


def test_sweep_removes_the_dead_and_spares_the_living(tmp_path: Path) -> None:
    code = textwrap.dedent(
        f"""
        import os, signal
        import hsray.spool
        hsray.spool.start_reaper = lambda directory: None  # as if it had been killed too
        hsray.spool.Arena({str(tmp_path)!r}, 4096)
        os.kill(os.getpid(), signal.SIGKILL)
        """
    )
    subprocess.run([sys.executable, "-c", code], check=False)
    mine = Arena(tmp_path, PAGE)
    assert len(list(tmp_path.iterdir())) == 2

    removed = sweep(tmp_path)

    assert len(removed) == 1
    assert list(tmp_path.iterdir()) == [mine.directory]
    mine.remove()


def test_sweep_leaves_strangers_alone(tmp_path: Path) -> None:
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "precious").write_text("x")
    (tmp_path / "file").write_text("x")

    assert sweep(tmp_path) == []
    assert (tmp_path / "other" / "precious").exists()


def test_auto_size_is_bounded_by_what_is_free(small_tmpfs: Path) -> None:
    nbytes = auto_arena_bytes(small_tmpfs, shard_bytes=10**9, largest_prompt_bytes=1, replicas_per_node=1)

    assert PAGE <= nbytes <= 16 << 20
    assert nbytes % PAGE == 0


def test_auto_size_holds_two_of_the_largest_prompts(tmp_path: Path) -> None:
    nbytes = auto_arena_bytes(tmp_path, shard_bytes=PAGE, largest_prompt_bytes=50 * PAGE, replicas_per_node=1)

    assert nbytes == 100 * PAGE


def test_what_an_arena_adopted_goes_with_it(tmp_path: Path) -> None:
    leftover, kept = tmp_path / "sem.engine", tmp_path / "sem.other"
    for file in (leftover, kept):
        file.write_text("x")
    arena = Arena(tmp_path / "spool", PAGE)
    arena.adopt([leftover])

    arena.remove()

    assert not leftover.exists()
    assert kept.exists()


def test_a_sweep_removes_what_a_dead_owner_adopted(tmp_path: Path) -> None:
    leftover = tmp_path / "sem.engine"
    leftover.write_text("x")
    code = textwrap.dedent(
        f"""
        import os, signal
        import hsray.spool
        hsray.spool.start_reaper = lambda directory: None
        hsray.spool.Arena({str(tmp_path / "spool")!r}, 4096).adopt([{str(leftover)!r}])
        os.kill(os.getpid(), signal.SIGKILL)
        """
    )
    subprocess.run([sys.executable, "-c", code], check=False)

    sweep(tmp_path / "spool")

    assert not leftover.exists()


def test_shared_memory_of_a_process_tree_is_found(tmp_path: Path) -> None:
    code = "import multiprocessing.shared_memory as s, sys; m = s.SharedMemory('x', create=True, size=9)"
    code = code.replace("'x'", "None") + "; print(m._name, flush=True); sys.stdin.read(); m.unlink()"
    child = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert child.stdout is not None
    name = child.stdout.readline().strip().lstrip("/")

    found = shared_memory_files(os.getpid())
    child.communicate("")

    assert f"/dev/shm/{name}" in found
    assert f"/dev/shm/{name}" not in shared_memory_files(os.getpid())
