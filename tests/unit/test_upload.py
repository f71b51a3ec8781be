"""Uploads into local files: whole or not at all, by the calling thread, without a copy."""

import errno
import os
import tracemalloc
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from hsray.errors import StoreUnavailable, StoreUnusable
from hsray.store import Store, open_store
from hsray.upload import PART_BYTES


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return open_store(str(tmp_path / "run"))


def files(store: Store) -> list[str]:
    """Everything that lies there, listed or not."""
    root = Path(store.url)
    return sorted(str(path.relative_to(root)) for path in root.rglob("*") if path.is_file())


def distinct(nbytes: int) -> memoryview:
    return memoryview(np.random.default_rng(nbytes).integers(0, 256, nbytes, dtype=np.uint8))


def upload(store: Store, buffers: Sequence[memoryview], key: str = "data/x") -> None:
    with store.upload(key) as target:
        target.writelines(buffers)
        target.complete()


def test_many_buffers_at_once_are_written_in_order(store: Store) -> None:
    """More than one writev takes, with empty ones among them."""
    buffers = [distinct(size % 7 * 3000) for size in range(2500)]
    assert sum(view.nbytes for view in buffers) > PART_BYTES

    upload(store, buffers)

    assert store.get("data/x") == b"".join(buffers)


@pytest.mark.parametrize("most", [1, 1000, 4096, PART_BYTES // 2 + 1])
def test_a_kernel_that_takes_less_than_it_was_given(store: Store, monkeypatch: pytest.MonkeyPatch, most: int) -> None:
    writev = os.writev

    def short(file: int, buffers: Sequence[memoryview]) -> int:
        taken, room = [], most if most > 1 else len(buffers[0]) - 1 or 1
        for view in buffers:
            taken.append(view[:room])
            room -= len(taken[-1])
        return writev(file, taken)

    monkeypatch.setattr(os, "writev", short)
    buffers = [distinct(PART_BYTES), distinct(1), distinct(40), distinct(5000)]

    upload(store, buffers)

    assert store.get("data/x") == b"".join(buffers)


def test_large_buffers_are_not_copied(store: Store) -> None:
    buffers = [distinct(2 * PART_BYTES), distinct(40), distinct(PART_BYTES)]
    tracemalloc.start()
    try:
        upload(store, buffers)
        assert tracemalloc.get_traced_memory()[1] < 100_000
    finally:
        tracemalloc.stop()

    assert store.head("data/x").nbytes == sum(view.nbytes for view in buffers)


def test_what_a_killed_process_left_is_not_touched_and_not_in_the_way(store: Store) -> None:
    folder = Path(store.url) / "data"
    folder.mkdir(parents=True)
    (folder / "x#1").write_bytes(b"of a killed process, or of one that still writes")

    upload(store, [distinct(PART_BYTES)])

    assert files(store) == ["data/x", "data/x#1"]
    assert store.get("data/x") == distinct(PART_BYTES)


def test_two_uploads_of_one_key_do_not_meet(store: Store) -> None:
    with store.upload("data/x") as one, store.upload("data/x") as other:
        one.write(bytes(PART_BYTES))
        other.write(distinct(PART_BYTES))
        assert files(store) == ["data/x#1", "data/x#2"]
        one.complete()

    assert files(store) == ["data/x"]
    assert store.get("data/x") == bytes(PART_BYTES)


@pytest.mark.parametrize("key", ["a b/c", "größe", "x#y", "50%", "a+b=c.d-e_f", "deep/er/than/that"])
def test_any_key_names_the_same_object_for_small_and_large_uploads(store: Store, key: str) -> None:
    upload(store, [distinct(PART_BYTES + 1)], key)
    assert store.get(key) == distinct(PART_BYTES + 1)
    assert [info.key for info in store.list()] == [key]

    upload(store, [distinct(10)], key)
    assert store.get(key) == distinct(10)
    assert files(store) == [key]


@pytest.mark.parametrize(
    ("code", "error"),
    [
        (errno.ENOSPC, StoreUnusable),
        (errno.EDQUOT, StoreUnusable),
        (errno.EIO, StoreUnusable),
        (errno.ESTALE, StoreUnavailable),
    ],
)
@pytest.mark.parametrize("call", ["writev", "rename"])
def test_a_failing_system_call_leaves_nothing(
    store: Store, monkeypatch: pytest.MonkeyPatch, code: int, error: type[Exception], call: str
) -> None:
    def fail(*_: object) -> None:
        raise OSError(code, os.strerror(code))

    if call == "writev":
        monkeypatch.setattr(os, "writev", fail)
    else:
        monkeypatch.setattr(Path, "rename", fail)

    with pytest.raises(error, match=r"upload .*data/x"):
        upload(store, [distinct(PART_BYTES)])
    assert files(store) == []


@pytest.mark.parametrize("call", ["open", "rename"])
def test_a_folder_that_is_taken_away_is_transient(store: Store, monkeypatch: pytest.MonkeyPatch, call: str) -> None:
    def gone(*_: object, **__: object) -> None:
        raise FileNotFoundError(errno.ENOENT, "gone")

    monkeypatch.setattr(Path, call, gone)

    with pytest.raises(StoreUnavailable, match=r"upload .*data/x"):
        upload(store, [distinct(PART_BYTES)])
    assert files(store) == []


def test_a_file_in_the_place_of_a_folder_is_unusable(store: Store) -> None:
    store.put("data", b"a file")

    with pytest.raises(StoreUnusable, match=r"upload .*data/x"):
        upload(store, [distinct(PART_BYTES)])
    assert files(store) == ["data"]
