"""What every `Store` must do, whatever is behind it. Run over memory, local files and a real S3 server."""

import io
import itertools
import json
import random
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime, timedelta
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from obstore.exceptions import BaseError

from hsray.errors import StoreError, StoreUnavailable, StoreUnusable
from hsray.store import Store
from hsray.testing import FlakyStore, StoreFault
from hsray.upload import PART_BYTES

MB = 1024 * 1024
MakeStore = Callable[[], Store]
LEASE_KEY = "leases/000000.json"


def distinct_bytes(nbytes: int) -> np.ndarray:
    """Bytes that differ at every offset a part could be mistaken for another."""
    return np.arange(nbytes // 4 + 1, dtype="<u4").view(np.uint8)[:nbytes]


def keys(store: Store, prefix: str = "") -> list[str]:
    return sorted(info.key for info in store.list(prefix))


class FailingUpload(FlakyStore):
    """Fails one request of an upload: the 0th opens it, the last completes it, those between are its parts."""

    def __init__(self, inner: Store, nth: int, fault: StoreFault) -> None:
        super().__init__(inner, random.Random(0))
        self.nth, self.fault = nth, fault
        self.requests = itertools.count()

    def attempt(self, operation: str, key: str, request: Callable[[], Any]) -> Any:
        if operation == "upload" and next(self.requests) == self.nth:
            self.fail_next("upload", self.fault)
        return super().attempt(operation, key, request)


class StoreSuite:
    """Subclasses give the fixture `make_store`: every call opens the same, at first empty, URL anew."""

    @pytest.fixture
    def store(self, make_store: MakeStore) -> Store:
        return make_store()

    def unfinished(self, store: Store) -> list[str]:
        """What unfinished uploads have left behind; subclasses look where their store would keep it."""
        return []

    @pytest.fixture(autouse=True)
    def _nothing_unfinished_is_left(self, store: Store) -> Iterator[None]:
        yield
        assert self.unfinished(store) == []

    # -- whole objects

    def test_an_object_comes_back_as_it_was_put(self, store: Store) -> None:
        store.put("data/a.bin", b"\x00\xff" * 50)

        assert store.get("data/a.bin") == b"\x00\xff" * 50

    def test_put_replaces_what_was_there(self, store: Store) -> None:
        store.put("a", b"a longer first version")
        store.put("a", b"second")

        assert store.get("a") == b"second"

    @pytest.mark.parametrize(
        "data",
        [
            bytearray(b"abcd"),
            memoryview(b"xabcdx")[1:5],
            np.frombuffer(b"abcd", np.uint16).reshape(1, 2),
            pa.py_buffer(b"abcd"),
        ],
        ids=["bytearray", "memoryview", "numpy", "arrow"],
    )
    def test_any_contiguous_buffer_can_be_put(self, store: Store, data: bytes) -> None:
        store.put("a", data)

        assert store.get("a") == b"abcd"

    @pytest.mark.parametrize("data", [b"", np.zeros((0, 4), np.float32)], ids=["bytes", "numpy"])
    def test_an_empty_object_is_an_object(self, store: Store, data: bytes) -> None:
        store.put("empty", data)

        assert store.get("empty") == b""
        assert store.head("empty").nbytes == 0

    def test_a_buffer_that_is_not_contiguous_is_refused(self, store: Store) -> None:
        with pytest.raises((TypeError, BufferError)):
            store.put("a", np.zeros((4, 4), np.uint8)[:, ::2])

        assert keys(store) == []

    def test_an_object_of_several_parts_comes_back_as_it_was_put(self, store: Store) -> None:
        data = distinct_bytes(2 * PART_BYTES + 12345)
        store.put("big", data)

        assert store.head("big").nbytes == data.nbytes
        assert store.get("big") == data.tobytes()

    def test_a_missing_object_is_a_file_not_found_error(self, store: Store) -> None:
        store.put("there", b"1")
        for read in (store.get, store.head, store.get_json, lambda key: store.get_range(key, 0, 1)):
            with pytest.raises(FileNotFoundError, match="not-there"):
                read("not-there")

    def test_an_empty_store_can_be_read(self, store: Store) -> None:
        assert keys(store) == []
        store.delete(["a"])
        with pytest.raises(FileNotFoundError):
            store.get("a")
        with pytest.raises(FileNotFoundError):
            store.head("a")

    @pytest.mark.parametrize("key", ["", "/a", "a/", "a//b", "../a", "a/./b"])
    def test_a_key_that_is_none_is_refused(self, store: Store, key: str) -> None:
        for call in (lambda: store.put(key, b"1"), lambda: store.get(key), lambda: store.upload(key)):
            with pytest.raises(ValueError, match="not a key"):
                call()

    def test_two_stores_of_one_url_see_the_same_objects(self, make_store: MakeStore) -> None:
        one, other = make_store(), make_store()
        one.put("data/a", b"1")

        assert other.get("data/a") == b"1"
        assert other.url == one.url

    # -- ranges

    def test_a_range_is_read_without_its_surroundings(self, store: Store) -> None:
        store.put("a", bytes(range(100)))

        assert store.get_range("a", 10, 5).tobytes() == bytes(range(10, 15))
        assert store.get_range("a", 0, 100).tobytes() == bytes(range(100))
        assert store.get_range("a", 99, 1).tobytes() == b"\x63"
        assert store.get_range("a", 50, 0).tobytes() == b""

    def test_a_range_is_a_read_only_byte_view(self, store: Store) -> None:
        store.put("a", np.arange(8, dtype="<u2"))
        view = store.get_range("a", 2, 4)

        assert view.readonly
        assert view.format == "B"
        assert np.frombuffer(view, "<u2").tolist() == [1, 2]

    @pytest.mark.parametrize(("start", "nbytes"), [(98, 5), (100, 1), (500, 10)])
    def test_a_range_past_the_end_is_an_error_not_a_short_answer(self, store: Store, start: int, nbytes: int) -> None:
        store.put("a", bytes(100))

        with pytest.raises(StoreError, match=rf"/a ends at byte 100, but bytes {start} to {start + nbytes}") as caught:
            store.get_range("a", start, nbytes)
        assert not caught.value.transient

    def test_a_negative_range_is_refused(self, store: Store) -> None:
        store.put("a", bytes(100))
        for start, nbytes in ((-1, 5), (5, -1)):
            with pytest.raises(ValueError, match="negative"):
                store.get_range("a", start, nbytes)

    # -- listing and deleting

    def test_list_gives_keys_relative_to_the_url_with_sizes_and_times(self, store: Store) -> None:
        store.put("leases/0.json", b"12")
        store.put("data/x/y.parquet", b"123")
        store.put("top", b"")
        infos = {info.key: info for info in store.list()}

        assert {key: info.nbytes for key, info in infos.items()} == {
            "leases/0.json": 2,
            "data/x/y.parquet": 3,
            "top": 0,
        }
        assert all(abs(info.modified - datetime.now(UTC)) < timedelta(hours=1) for info in infos.values())
        assert store.head("top") == infos["top"]

    def test_list_of_a_folder_gives_only_what_is_in_it(self, store: Store) -> None:
        for key in ("leases/0.json", "leases/1/2.json", "leases-old/0.json", "lease"):
            store.put(key, b"1")

        assert keys(store, "leases/") == ["leases/0.json", "leases/1/2.json"]
        assert keys(store, "nothing/") == []

    def test_list_refuses_a_prefix_that_is_not_a_folder(self, store: Store) -> None:
        with pytest.raises(ValueError, match="folder"):
            next(store.list("lea"))

    def test_list_streams_past_one_page(self, store: Store) -> None:
        expected = [f"many/{i:05d}" for i in range(1203)]
        with ThreadPoolExecutor(16) as pool:
            list(pool.map(lambda key: store.put(key, b"1"), expected))

        assert keys(store, "many/") == expected

    def test_delete_removes_and_forgives_missing_keys(self, store: Store) -> None:
        for key in ("a", "b", "c/d"):
            store.put(key, b"1")
        store.delete(["a", "never-was", "c/d"])
        store.delete([])
        store.delete(iter(["never-was"]))

        assert keys(store) == ["b"]

    # -- create once

    def test_the_first_record_stands_and_the_second_learns_of_it(self, store: Store) -> None:
        first = store.create_once(LEASE_KEY, {"kind": "commit", "n": 1})
        second = store.create_once(LEASE_KEY, {"kind": "dead", "n": 2})

        assert first.won
        assert not second.won
        assert second.record == first.record == store.get_json(LEASE_KEY)
        assert first.record["n"] == 1

    def test_records_are_canonical_json_with_a_write_id(self, store: Store) -> None:
        record = store.create_once(LEASE_KEY, {"b": "ä", "a": [1, None]}).record

        raw = store.get(LEASE_KEY)
        assert raw == json.dumps(record, sort_keys=True, separators=(",", ":"), ensure_ascii=False).encode()
        assert raw.startswith('{"a":[1,null],"b":"ä","write_id":"'.encode())

    def test_equal_records_of_two_writers_have_one_winner(self, store: Store) -> None:
        results = [store.create_once(LEASE_KEY, {"same": True}) for _ in range(2)]

        assert [result.won for result in results] == [True, False]

    def test_one_of_sixteen_threads_wins_each_key(self, make_store: MakeStore) -> None:
        stores = [make_store() for _ in range(16)]
        rounds = 25

        def race(writer: int) -> list[tuple[bool, int]]:
            results = [stores[writer].create_once(f"leases/{n}.json", {"writer": writer}) for n in range(rounds)]
            return [(result.won, result.record["writer"]) for result in results]

        with ThreadPoolExecutor(16) as pool:
            outcomes = list(pool.map(race, range(16)))

        for n in range(rounds):
            winners = [writer for writer in range(16) if outcomes[writer][n][0]]
            assert len(winners) == 1
            assert Counter(outcome[n][1] for outcome in outcomes) == {winners[0]: 16}
            assert stores[0].get_json(f"leases/{n}.json")["writer"] == winners[0]

    @pytest.mark.parametrize("content", [b"", b"{", b"[1]", b"\xff"], ids=["empty", "cut", "list", "not-utf8"])
    def test_something_else_under_the_key_is_named_not_overwritten(self, store: Store, content: bytes) -> None:
        store.put(LEASE_KEY, content)

        for call in (lambda: store.create_once(LEASE_KEY, {}), lambda: store.get_json(LEASE_KEY)):
            with pytest.raises(StoreUnusable, match=r"leases/000000\.json is not .*JSON"):
                call()
        assert store.get(LEASE_KEY) == content

    def test_a_record_that_json_cannot_hold_is_refused(self, store: Store) -> None:
        with pytest.raises(ValueError, match="JSON"):
            store.create_once(LEASE_KEY, {"x": float("nan")})

        assert keys(store) == []

    def test_probe_leaves_nothing_behind(self, store: Store) -> None:
        store.probe()

        assert keys(store) == []

    # -- uploads

    @pytest.mark.parametrize("nbytes", [0, 10, PART_BYTES - 1, PART_BYTES, PART_BYTES + 1, 2 * PART_BYTES + 7])
    def test_an_upload_of_any_size_holds_what_was_written(self, store: Store, nbytes: int) -> None:
        data = distinct_bytes(nbytes)
        with store.upload("data/x") as upload:
            for start in range(0, nbytes, 5 * MB):
                assert upload.write(data[start : start + 5 * MB]) == len(data[start : start + 5 * MB])
            assert upload.tell() == upload.nbytes == nbytes
            upload.complete()

        assert store.get("data/x") == data.tobytes()

    def test_writes_of_odd_sizes_keep_their_order(self, store: Store) -> None:
        rng = random.Random(0)
        sizes = [1000, 1, PART_BYTES - 1, 3 * MB, 2 * PART_BYTES, 1, MB]
        pieces = [rng.randbytes(size) for size in sizes]
        with store.upload("data/x") as upload:
            for piece in pieces:
                upload.write(piece)
            upload.complete()

        assert store.get("data/x") == b"".join(pieces)

    @pytest.mark.parametrize("nbytes", [10, 2 * PART_BYTES], ids=["small", "large"])
    def test_an_upload_is_invisible_until_its_block_ends(self, store: Store, nbytes: int) -> None:
        with store.upload("data/x") as upload:
            upload.write(bytes(nbytes))
            upload.complete()
            assert keys(store) == []
            with pytest.raises(FileNotFoundError):
                store.head("data/x")

        assert keys(store) == ["data/x"]

    @pytest.mark.parametrize("nbytes", [10, 2 * PART_BYTES], ids=["small", "large"])
    @pytest.mark.parametrize("completed", [True, False])
    def test_an_exception_in_the_block_publishes_nothing(self, store: Store, nbytes: int, completed: bool) -> None:
        def interrupted() -> None:
            with store.upload("data/x") as upload:
                upload.write(bytes(nbytes))
                if completed:
                    upload.complete()
                raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt):
            interrupted()
        assert keys(store) == []

    @pytest.mark.parametrize("nbytes", [10, 2 * PART_BYTES], ids=["small", "large"])
    def test_a_block_without_complete_publishes_nothing(self, store: Store, nbytes: int) -> None:
        with store.upload("data/x") as upload:
            upload.write(bytes(nbytes))
            upload.close()

        assert keys(store) == []

    def test_an_aborted_upload_leaves_the_old_object(self, store: Store) -> None:
        store.put("data/x", b"old")
        with store.upload("data/x") as upload:
            upload.write(bytes(2 * PART_BYTES))

        assert store.get("data/x") == b"old"

    def test_an_upload_replaces_the_old_object(self, store: Store) -> None:
        store.put("data/x", b"old")
        with store.upload("data/x") as upload:
            upload.write(bytes(2 * PART_BYTES))
            upload.complete()

        assert store.head("data/x").nbytes == 2 * PART_BYTES

    @pytest.mark.parametrize("fault", ["before", "refused"])
    @pytest.mark.parametrize("nth", [0, 1, 2, 3], ids=["open", "part1", "part2", "completion"])
    def test_an_upload_that_fails_anywhere_leaves_nothing(self, store: Store, nth: int, fault: StoreFault) -> None:
        def upload() -> None:
            with FailingUpload(store, nth, fault).upload("data/x") as upload:
                upload.write(bytes(PART_BYTES))
                upload.write(b"the second part")
                upload.complete()

        with pytest.raises(StoreUnavailable if fault == "before" else StoreUnusable, match="injected"):
            upload()
        assert keys(store) == []

    def test_an_upload_refuses_use_out_of_order(self, store: Store) -> None:
        upload = store.upload("data/x")
        with pytest.raises(ValueError, match="new"):
            upload.write(b"1")
        with pytest.raises(ValueError, match="new"):
            upload.complete()
        with upload:
            upload.write(b"1")
            upload.complete()
            with pytest.raises(ValueError, match="complete"):
                upload.write(b"2")
        for call in (lambda: upload.write(b"3"), upload.complete, upload.__enter__):
            with pytest.raises(ValueError, match="done"):
                call()

        assert store.get("data/x") == b"1"

    def test_an_aborted_upload_cannot_be_completed(self, store: Store) -> None:
        with store.upload("data/x") as upload:
            upload.write(b"1")
        upload.write(b"a footer that comes too late")

        with pytest.raises(ValueError, match="aborted"):
            upload.complete()
        assert keys(store) == []

    def test_pyarrow_writes_parquet_into_an_upload(self, store: Store) -> None:
        table = pa.table({"x": np.random.default_rng(0).integers(0, 2**60, 3_000_000)})
        with store.upload("data/x.parquet") as upload:
            with pq.ParquetWriter(upload, table.schema, compression="none", use_dictionary=False) as writer:
                writer.write_table(table)
            upload.complete()

        assert store.head("data/x.parquet").nbytes > PART_BYTES
        assert pq.read_table(io.BytesIO(store.get("data/x.parquet"))) == table

    def test_pyarrow_writes_an_ipc_file_into_an_upload_and_closes_it(self, store: Store) -> None:
        table = pa.table({"x": [1, 2, 3]})
        with store.upload("x.arrow") as upload:
            with pa.output_stream(upload) as sink, pa.ipc.new_file(sink, table.schema) as writer:
                writer.write_table(table)
            assert upload.closed
            upload.complete()

        assert pa.ipc.open_file(io.BytesIO(store.get("x.arrow"))).read_all() == table

    def test_a_parquet_writer_that_dies_in_an_upload_publishes_nothing(self, store: Store) -> None:
        table = pa.table({"x": np.arange(3_000_000)})

        def dies() -> None:
            with store.upload("data/x.parquet") as upload:
                writer = pq.ParquetWriter(upload, table.schema, compression="none", use_dictionary=False)
                writer.write_table(table)
                raise RuntimeError("the replica died")

        # The writer is closed by the garbage collector when the block is gone, footer and all.
        with pytest.raises(RuntimeError, match="the replica died"):
            dies()
        assert keys(store) == []

    def test_no_exception_of_obstore_gets_out(self, store: Store) -> None:
        with pytest.raises(Exception) as caught:  # noqa: PT011 - the point is what it is not
            store.get("missing")
        assert not isinstance(caught.value, BaseError)
