"""Few requests for many extents, exact bytes, and no hang after a fork."""

import multiprocessing
import os
import pickle
import signal
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hsray import ranges
from hsray.errors import HsrayError, StoreError
from hsray.ranges import RANGE_BYTES, ObjectFile, Range, RangeReader
from hsray.reader import open_run
from hsray.store import Store, open_store
from tests.small_run import build_small_run


class CountingStore(Store):
    """Notes every range request as (key, start, nbytes)."""

    def get_range(self, key: str, start: int, nbytes: int) -> memoryview:
        self.requests.append((key, start, nbytes))
        return super().get_range(key, start, nbytes)

    requests: list[tuple[str, int, int]]


def counting(url: str) -> CountingStore:
    plain = open_store(url)
    store = CountingStore(plain.url, plain.backend)
    store.requests = []
    return store


def noise(nbytes: int, seed: int = 0) -> bytes:
    return np.random.default_rng(seed).bytes(nbytes)


def test_ranges_of_a_slot_are_joined_in_the_order_given() -> None:
    store = counting("memory://test-ranges-join")
    store.put("a", noise(1000))
    store.put("b", noise(1000, 1))

    got = RangeReader(store, {}).read([[Range("b", 10, 5), Range("a", 900, 100), Range("b", 0, 3)], [Range("a", 1, 1)]])

    assert got[0].tobytes() == noise(1000, 1)[10:15] + noise(1000)[900:] + noise(1000, 1)[:3]
    assert got[1].tobytes() == noise(1000)[1:2]


def test_neighbours_become_one_request_and_other_objects_their_own() -> None:
    store = counting("memory://test-ranges-coalesce")
    store.put("a", noise(5000))
    store.put("b", noise(5000))

    RangeReader(store, {}).read(
        [[Range("a", 4000, 50)], [Range("a", 100, 50)], [Range("b", 7, 1)], [Range("a", 150, 50)]]
    )

    assert sorted(store.requests) == [("a", 100, 3950), ("b", 7, 1)]


def test_distant_ranges_are_not_joined() -> None:
    store = counting("memory://test-ranges-distant")
    store.put("a", bytes(3 << 20))

    RangeReader(store, {}).read([[Range("a", 0, 10)], [Range("a", 2 << 20, 10)]])

    assert sorted(store.requests) == [("a", 0, 10), ("a", 2 << 20, 10)]


def test_a_long_range_is_fetched_in_parts_into_one_array() -> None:
    store = counting("memory://test-ranges-long")
    data = noise(2 * RANGE_BYTES + 12345)
    store.put("a", data)

    (got,) = RangeReader(store, {}).read([[Range("a", 5, len(data) - 5)]])

    assert got.tobytes() == data[5:]
    assert sorted(nbytes for _, _, nbytes in store.requests) == [12340, RANGE_BYTES, RANGE_BYTES]


def test_a_range_that_is_a_request_of_its_own_is_not_copied() -> None:
    store = counting("memory://test-ranges-zero-copy")
    store.put("a", noise(4096))

    (got,) = RangeReader(store, {}).read([[Range("a", 0, 4096)]])

    assert not got.flags.owndata
    assert got.ctypes.data % 4 == 0


@pytest.mark.parametrize("offset", range(1, 8))
def test_bytes_from_an_odd_address_are_moved_to_an_even_one(offset: int) -> None:
    store = counting("memory://test-ranges-odd")
    store.put("a", noise(4096))

    (got,) = RangeReader(store, {}).read([[Range("a", offset, 64)]])

    assert got.ctypes.data % 4 == 0
    assert got.tobytes() == noise(4096)[offset : offset + 64]


@settings(max_examples=60, deadline=None)
@given(
    slots=st.lists(
        st.lists(st.tuples(st.sampled_from("ab"), st.integers(0, 900), st.integers(0, 100)), max_size=4), max_size=8
    )
)
def test_any_ranges_give_the_bytes_of_the_object_at_an_aligned_address(slots: list[list[tuple[str, int, int]]]) -> None:
    store = counting("memory://test-ranges-any")
    objects = {"a": noise(1000), "b": noise(1000, 1)}
    for key, data in objects.items():
        store.put(key, data)

    got = RangeReader(store, {}).read([[Range(*r) for r in slot] for slot in slots])

    for value, slot in zip(got, slots, strict=True):
        assert value.tobytes() == b"".join(objects[key][start : start + n] for key, start, n in slot)
        assert len(value) == 0 or value.ctypes.data % 4 == 0


def test_a_missing_object_is_named() -> None:
    reader = RangeReader(open_store("memory://test-ranges-missing"), {})

    with pytest.raises(HsrayError, match=r"data/x\.parquet is missing from memory://test-ranges-missing"):
        reader.read([[Range("data/x.parquet", 0, 4)]])


def test_an_object_that_ends_too_early_is_an_error_not_a_short_array() -> None:
    store = open_store("memory://test-ranges-short")
    store.put("a", bytes(100))

    with pytest.raises(StoreError, match="ends at byte 100"):
        RangeReader(store, {}).read([[Range("a", 90, 20)]])


def test_one_failing_request_among_many_fails_the_read() -> None:
    store = open_store("memory://test-ranges-one-fails")
    store.put("a", bytes(3 * RANGE_BYTES))

    with pytest.raises(HsrayError, match="b is missing"):
        RangeReader(store, {}).read([[Range("a", 0, 3 * RANGE_BYTES)], [Range("b", 0, 1)]])


def test_many_threads_may_read_at_once(tmp_path: Any) -> None:
    store = open_store(str(tmp_path))
    data = noise(1 << 20)
    store.put("a", data)
    reader = RangeReader(store, {})
    wrong: list[int] = []

    def read(seed: int) -> None:
        rng = np.random.default_rng(seed)
        for _ in range(20):
            start = int(rng.integers(0, 1 << 19))
            (got,) = reader.read([[Range("a", start, 1000), Range("a", start + 300_000, 1000)]])
            if got.tobytes() != data[start : start + 1000] + data[start + 300_000 : start + 301_000]:
                wrong.append(seed)

    threads = [threading.Thread(target=read, args=(seed,)) for seed in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    assert wrong == []


def test_a_pickled_reader_reads_the_same(tmp_path: Any) -> None:
    store = open_store(str(tmp_path))
    store.put("a", noise(100))

    copy = pickle.loads(pickle.dumps(RangeReader(store, {})))

    assert copy.read([[Range("a", 0, 100)]])[0].tobytes() == noise(100)


def test_an_object_file_reads_like_a_file() -> None:
    store = open_store("memory://test-ranges-file")
    store.put("a", bytes(range(100)))
    file = ObjectFile(store, "a", 100)

    assert file.read(3) == b"\x00\x01\x02"
    assert file.tell() == 3
    assert file.seek(-2, os.SEEK_END) == 98
    assert file.read() == b"\x62\x63"
    assert file.read(5) == b""
    assert file.seek(10) == 10
    assert file.seek(5, os.SEEK_CUR) == 15
    assert file.read(1) == b"\x0f"


def in_forked_process(action: Callable[[], Any]) -> Any:
    """What `action` returns, or the exception it raises, in a forked process; fails if that hangs."""
    context = multiprocessing.get_context("fork")
    answers = context.Queue()

    def run() -> None:
        try:
            answers.put(action())
        except HsrayError as err:
            answers.put(err)

    process = context.Process(target=run)
    process.start()
    try:
        return answers.get(timeout=120)
    finally:
        process.kill()
        process.join()


def test_a_forked_process_reads_through_a_process_of_its_own(tmp_path: Any) -> None:
    store = open_store(str(tmp_path))
    data = noise(RANGE_BYTES + 1000)
    store.put("a", data)
    reader = RangeReader(store, {})
    expected = [data[:100], data[7:], b""]
    slots = [[Range("a", 0, 100)], [Range("a", 7, len(data) - 7)], []]
    assert [value.tobytes() for value in reader.read(slots)] == expected

    assert in_forked_process(lambda: [value.tobytes() for value in reader.read(slots)]) == expected
    # Also one that was handed over, and twice over the same pipes.
    twice = in_forked_process(
        lambda: (lambda r: [[v.tobytes() for v in r.read(slots)] for _ in range(2)])(pickle.loads(pickle.dumps(reader)))
    )
    assert twice == [expected, expected]


def test_a_forked_process_gets_the_same_errors_and_can_go_on(tmp_path: Any) -> None:
    store = open_store(str(tmp_path))
    store.put("a", noise(10))
    reader = RangeReader(store, {})

    def action() -> tuple[str, bytes]:
        with pytest.raises(HsrayError) as caught:
            reader.read([[Range("b", 0, 10)]])
        return str(caught.value), reader.read([[Range("a", 0, 10)]])[0].tobytes()

    message, after = in_forked_process(action)

    assert message.startswith("b is missing from")
    assert after == noise(10)


def test_a_forked_process_whose_reading_process_dies_is_told(tmp_path: Any) -> None:
    store = open_store(str(tmp_path))
    store.put("a", noise(10))
    reader = RangeReader(store, {})

    def action() -> Any:
        reader.read([[Range("a", 0, 10)]])
        assert reader._helper is not None
        os.kill(reader._helper._process.pid, signal.SIGKILL)
        reader._helper._process.wait()
        return reader.read([[Range("a", 0, 10)]])

    error = in_forked_process(action)

    assert isinstance(error, HsrayError)
    assert "has ended" in str(error)


def test_a_store_in_memory_is_read_directly_after_a_fork() -> None:
    store = open_store("memory://test-ranges-fork")
    store.put("a", noise(10))
    reader = RangeReader(store, {})

    got = in_forked_process(lambda: (reader.read([[Range("a", 0, 10)]])[0].tobytes(), reader._helper is None))

    assert got == (noise(10), True)


def test_opening_a_run_after_a_fork_is_refused_instead_of_hanging(tmp_path: Any) -> None:
    url = build_small_run(str(tmp_path / "run")).url
    open_run(url)

    error = in_forked_process(lambda: open_run(url))

    assert isinstance(error, HsrayError)
    assert "does not survive a fork" in str(error)
    # Here nothing was forked.
    ranges.refuse_after_fork()
