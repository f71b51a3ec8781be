"""Reading into memory that is already there, and parts of a run."""

import multiprocessing
import pickle
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hsray.errors import HsrayError, StoreError
from hsray.ranges import RANGE_BYTES, Range, RangeReader
from hsray.reader import open_run
from hsray.store import Store, open_store
from hsray.testing import FlakyStore
from tests.small_run import SITE_NAMES, build_small_run


def noise(nbytes: int) -> bytes:
    return np.random.default_rng(0).bytes(nbytes)


@pytest.fixture(params=["local", "memory"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Store:
    return open_store(str(tmp_path / "store") if request.param == "local" else f"memory://{tmp_path.name}")


def read_into(store: Store, slots: list[list[Range]]) -> list[bytes]:
    targets = [np.zeros(sum(r.nbytes for r in ranges), np.uint8) for ranges in slots]
    RangeReader(store, {}).read_into(slots, targets)
    return [target.tobytes() for target in targets]


def test_ranges_fill_their_targets_in_the_order_given(store: Store) -> None:
    data = noise(2 * RANGE_BYTES + 12345)
    store.put("a", data)
    store.put("b", data[:1000])
    slots = [
        [Range("b", 10, 5), Range("a", 900, 100), Range("b", 0, 3)],
        [Range("a", 1000, len(data) - 1000)],
        [Range("a", 40, 7)],
    ]

    got = read_into(store, slots)

    assert got == [data[10:15] + data[900:1000] + data[:3], data[1000:], data[40:47]]


def test_an_object_that_is_too_short_or_missing_is_named(store: Store) -> None:
    store.put("a", noise(100))

    with pytest.raises(StoreError, match="a ends at byte 100, but bytes 90 to 120 were asked for"):
        read_into(store, [[Range("a", 90, 30)]])
    with pytest.raises(HsrayError, match="b is missing from"):
        read_into(store, [[Range("b", 0, 30)]])


def test_more_buffers_than_one_system_call_takes(tmp_path: Path) -> None:
    data = noise(5000)
    store = open_store(str(tmp_path))
    store.put("a", data)
    parts = [bytearray(2) for _ in range(2500)]

    store.read_into("a", 0, [memoryview(part) for part in parts])

    assert b"".join(parts) == data


def test_a_key_that_the_file_system_spells_otherwise_is_found(tmp_path: Path) -> None:
    store = open_store(str(tmp_path))
    store.put("data/odd key%.parquet", b"0123456789")
    part = bytearray(4)

    store.read_into("data/odd key%.parquet", 3, [memoryview(part)])

    assert bytes(part) == b"3456"


def test_a_lost_answer_is_asked_for_again(tmp_path: Path) -> None:
    plain = open_store(str(tmp_path))
    plain.put("a", noise(100))
    store = FlakyStore(plain, random.Random(0))
    store.fail_next("get", "before")
    part = bytearray(100)

    store.read_into("a", 0, [memoryview(part)])

    assert bytes(part) == noise(100)
    assert store.injected["before"] == 1


def _read_in_child(reader: RangeReader, queue: Any) -> None:
    target = np.zeros(100, np.uint8)
    reader.read_into([[Range("a", 50, 100)]], [target])
    queue.put((target.tobytes(), reader._helper is None))


def test_a_forked_process_reads_local_files_itself(tmp_path: Path) -> None:
    store = open_store(str(tmp_path))
    store.put("a", noise(1000))
    reader = RangeReader(store, {})
    store.get("a")
    context = multiprocessing.get_context("fork")
    queue = context.Queue()
    child = context.Process(target=_read_in_child, args=(reader, queue))
    child.start()

    assert queue.get(timeout=60) == (noise(1000)[50:150], True)
    child.join()


def test_a_part_of_a_run_is_a_run_of_its_prompts(tmp_path: Path) -> None:
    small = build_small_run(str(tmp_path / "run"))
    run = open_run(small.url)

    part = pickle.loads(pickle.dumps(run.part(2, 5)))

    assert list(part.prompt_ids) == list(run.prompt_ids)[2:5]
    assert len(part.segments.shard_keys) <= len(run.segments.shard_keys)
    for prompt in part:
        for site in SITE_NAMES:
            assert prompt[site].tobytes() == small.states[prompt.row][site].tobytes()
    assert part.prompt_ids[1] in part
    assert run.prompt_ids[0] not in part
    assert len(run.part(3, 3)) == 0
    assert list(run.part(3, 3)) == []
    with pytest.raises(IndexError, match="positions 2 to 99 of a run of 7 prompts"):
        run.part(2, 99)
