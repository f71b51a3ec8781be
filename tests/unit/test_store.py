"""`Store` over memory and local files, opening URLs, and patience against a store that fails on purpose."""

import contextlib
import itertools
import logging
import multiprocessing
import os
import random
import resource
import signal
import socket
import ssl
import subprocess
import sys
import threading
import uuid
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from hsray.errors import ConfigError, StoreUnavailable, StoreUnusable
from hsray.store import Store, open_store
from hsray.testing import FlakyStore
from hsray.upload import PART_BYTES, PARTS_IN_FLIGHT
from tests.store_suite import LEASE_KEY, FailingUpload, MakeStore, StoreSuite, keys


class TestMemory(StoreSuite):
    @pytest.fixture
    def make_store(self) -> MakeStore:
        url = f"memory://{uuid.uuid4()}/some/prefix"
        return lambda: open_store(url, retry_seconds=5)


class TestLocal(StoreSuite):
    @pytest.fixture
    def make_store(self, tmp_path: Path) -> MakeStore:
        return lambda: open_store(str(tmp_path / "new folder" / "rün"), retry_seconds=5)

    def unfinished(self, store: Store) -> list[str]:
        seen = {store.url + "/" + key for key in keys(store)}
        return [str(path) for path in Path(store.url).rglob("*") if path.is_file() and str(path) not in seen]


@pytest.fixture
def memory() -> Store:
    return open_store(f"memory://{uuid.uuid4()}", retry_seconds=5)


def flaky(store: Store, seed: int = 0, **chances: float) -> FlakyStore:
    return FlakyStore(store, random.Random(seed), **chances)


# -- opening


def test_memory_stores_are_shared_by_name_within_the_process() -> None:
    name = uuid.uuid4()
    open_store(f"memory://{name}/a").put("k", b"1")

    assert open_store(f"memory://{name}").get("a/k") == b"1"
    assert keys(open_store(f"memory://{name}/b")) == []


def test_a_local_folder_is_made_by_the_first_write_only(tmp_path: Path) -> None:
    store = open_store(str(tmp_path / "run"))
    assert keys(store) == []
    store.delete(["a"])
    assert not (tmp_path / "run").exists()

    store.put("data/a", b"1")
    assert (tmp_path / "run" / "data" / "a").read_bytes() == b"1"


def test_a_local_folder_that_is_removed_is_made_again(tmp_path: Path) -> None:
    store = open_store(str(tmp_path / "run"))
    store.put("a", b"1")
    (tmp_path / "run" / "a").unlink()
    (tmp_path / "run").rmdir()
    store.put("a", b"2")

    assert store.get("a") == b"2"


def test_file_urls_and_relative_paths_name_the_same_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    open_store("a run").put("k", b"1")

    assert open_store(f"file://{tmp_path}/a%20run").get("k") == b"1"
    assert open_store("a run").url == str(tmp_path / "a run")


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("", r"output\.url is empty"),
        ("   ", r"output\.url is empty"),
        ("ftp://host/x", r"output\.url: unknown scheme 'ftp'.*s3://bucket/prefix"),
        ("s3a://bucket/x", r"output\.url: unknown scheme 's3a'.*write s3://bucket/x"),
        ("s3://", r"output\.url: .*names no bucket"),
        ("s3:///prefix", r"output\.url: .*names no bucket"),
        ("memory://", r"output\.url: .*names no name"),
        ("s3://bucket/a//b", r"output\.url: .*segment"),
        ("s3://bucket/../b", r"output\.url: .*segment"),
        ("s3://bucket/a?region=x", r"output\.url: .*output\.storage_options"),
        ("file://relative/path", r"output\.url: .*three slashes"),
    ],
)
def test_a_url_that_cannot_work_is_a_config_error(url: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        open_store(url)


def test_a_url_of_a_file_is_a_config_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")

    with pytest.raises(ConfigError, match=r"output\.url: .*file is a file"):
        open_store(str(tmp_path / "file"))


@pytest.mark.parametrize(
    ("url", "options", "message"),
    [
        ("s3://b/x", {"regoin": "eu"}, r"output\.storage_options.*'?regoin"),
        ("s3://b/x", {"unsigned_payload": "maybe"}, r"output\.storage_options.*maybe"),
        ("s3://b/x", {"timeout": "bananas"}, r"output\.storage_options.*bananas"),
        ("s3://b/x", {"region": None}, r"output\.storage_options.*None"),
        ("s3://b/x", {"bucket": "c"}, r"output\.storage_options.*bucket"),
        ("s3://b/x", {"client_options": {"timeuot": "1s"}}, r"output\.storage_options.*timeuot"),
        ("s3://b/x", {"retry_config": {}}, r"output\.retry_seconds"),
        ("s3://b/x", {"endpoint": "127.0.0.1:9000"}, r"output\.storage_options\.endpoint.*not a URL"),
        ("s3://b/x", {"endpoint": "not a url"}, r"output\.storage_options\.endpoint.*not a URL"),
        ("gs://b/x", {"service_account_path": "/nowhere"}, r"output\.storage_options.*nowhere"),
        ("az://b/x", {"account_name": "a", "account_key": "!"}, r"output\.storage_options.*Key"),
        ("memory://b", {"region": "eu"}, r"output\.storage_options: .*takes none, got region"),
        ("/tmp/x", {"region": "eu"}, r"output\.storage_options: .*takes none, got region"),
    ],
)
def test_an_option_that_cannot_work_is_a_config_error(url: str, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        open_store(url, options)


def test_an_endpoint_in_the_environment_is_checked_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL", "localhost:9000")

    with pytest.raises(ConfigError, match="AWS_ENDPOINT_URL: 'localhost:9000' is not a URL"):
        open_store("s3://b/x")


def test_all_three_clouds_open_without_sending_anything() -> None:
    for url, options in (
        ("s3://b/x/", {"region": "eu-central-1"}),
        ("gs://b/x", {}),
        ("az://b/x", {"account_name": "a", "account_key": "c2VjcmV0"}),
    ):
        assert open_store(url, options).url == url.rstrip("/")


def test_without_credentials_the_probe_says_which_to_set(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith("AWS_")]:
        monkeypatch.delenv(name)
    # Port 1 stands for a machine without a metadata service: nothing listens there.
    store = open_store("s3://b/x", {"metadata_endpoint": "http://127.0.0.1:1"}, retry_seconds=0)

    with pytest.raises(StoreUnusable, match=r"no credentials\. Set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY"):
        store.probe()


def test_a_certificate_of_an_unknown_ca_is_unusable(tmp_path: Path) -> None:
    certificate, private_key = tmp_path / "cert.pem", tmp_path / "key.pem"
    make = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "1", "-subj", "/CN=127.0.0.1"]
    made = [*make, "-keyout", str(private_key), "-out", str(certificate)]
    subprocess.run(made, check=True, capture_output=True)
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(certificate, private_key)
    options = {"access_key_id": "a", "secret_access_key": "b"}

    with ThreadPoolExecutor(1) as pool, socket.create_server(("127.0.0.1", 0)) as listener:

        def shake_hands() -> None:
            client, _ = listener.accept()
            with contextlib.suppress(OSError), context.wrap_socket(client, server_side=True):
                pass

        for _ in range(3):  # obstore asks three times before it gives up
            pool.submit(shake_hands)
        endpoint = f"https://127.0.0.1:{listener.getsockname()[1]}"
        with pytest.raises(StoreUnusable, match=r"certificate is not trusted.*root_certificate"):
            open_store("s3://b/x", {**options, "endpoint": endpoint}).put("a", b"1")


# -- local files


def _create_many(url: str, writer: int, queue: "multiprocessing.Queue[list[int]]") -> None:
    store = open_store(url)
    won = [n for n in range(200) if store.create_once(f"leases/{n}.json", {"writer": writer}).won]
    queue.put(won)


def test_two_processes_share_the_keys_of_a_local_store_without_overlap(tmp_path: Path) -> None:
    context = multiprocessing.get_context("spawn")
    queue = context.Queue()
    processes = [context.Process(target=_create_many, args=(str(tmp_path), writer, queue)) for writer in (1, 2)]
    for process in processes:
        process.start()
    won = [queue.get(timeout=60) for _ in processes]
    for process in processes:
        process.join(60)

    assert sorted(itertools.chain(*won)) == list(range(200))
    store = open_store(str(tmp_path))
    assert len(keys(store)) == 200
    written = [store.get_json(f"leases/{n}.json")["writer"] for n in range(200)]
    assert sorted(written.count(writer) for writer in (1, 2)) == sorted(map(len, won))


def test_a_killed_process_leaves_no_visible_part_of_an_upload(tmp_path: Path) -> None:
    script = (
        "import os, signal\n"
        "from hsray.store import open_store\n"
        "from hsray.upload import PART_BYTES\n"
        f"store = open_store({str(tmp_path)!r})\n"
        "with store.upload('data/x') as upload:\n"
        "    upload.write(bytes(3 * PART_BYTES))\n"
        "    os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    ended = subprocess.run([sys.executable, "-c", script], check=False, env={**os.environ, "PYTHONPATH": os.getcwd()})  # noqa: PTH109

    assert ended.returncode == -signal.SIGKILL
    assert keys(open_store(str(tmp_path))) == []
    assert [path.name for path in (tmp_path / "data").iterdir()] == ["x#1"]  # garbage for gc, invisible to listings


def test_a_full_disk_is_unusable_and_leaves_no_part(small_tmpfs: Path) -> None:
    # A real one: a limit on this process's file sizes would also hit pytest's own output.
    store = open_store(str(small_tmpfs / "run"))
    store.put("a", b"old")

    with pytest.raises(StoreUnusable, match=r"upload .*no room.*Free space"):
        store.put("big", bytes(3 * PART_BYTES))
    assert [path.name for path in (small_tmpfs / "run").iterdir()] == ["a"]

    with (small_tmpfs / "filler").open("wb", buffering=0) as filler, contextlib.suppress(OSError):
        while True:
            filler.write(bytes(1 << 16))
    with pytest.raises(StoreUnusable, match=r"put .*no room.*Free space"):
        store.put("a", bytes(50_000))
    assert store.get("a") == b"old"
    assert [path.name for path in (small_tmpfs / "run").iterdir()] == ["a"]


def test_a_folder_that_cannot_be_made_is_unusable() -> None:
    with pytest.raises(StoreUnusable, match=r"output\.url"):
        open_store("/proc/hsray-cannot-be-here").put("a", b"1")


def test_too_many_open_files_pass(tmp_path: Path) -> None:
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    store = open_store(str(tmp_path), sleep=lambda pause: resource.setrlimit(resource.RLIMIT_NOFILE, limits))
    store.put("a", b"1")
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (3, limits[1]))
        assert store.get("a") == b"1"
        assert resource.getrlimit(resource.RLIMIT_NOFILE) == limits
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)


def test_a_path_through_a_file_is_unusable(tmp_path: Path) -> None:
    store = open_store(str(tmp_path))
    store.put("a", b"1")

    with pytest.raises(StoreUnusable, match=r"Not a directory.*output\.url"):
        store.put("a/b", b"1")


def test_listing_a_folder_that_others_write_to_sees_every_finished_object(tmp_path: Path) -> None:
    store = open_store(str(tmp_path))
    finished: list[str] = []
    stop = threading.Event()

    def write(writer: int) -> None:
        for n in itertools.count():
            if stop.is_set():
                return
            key = f"leases/{writer}-{n}.json"
            store.create_once(key, {})
            store.put(f"leases/{writer}.json", b"again and again")
            finished.append(key)

    with ThreadPoolExecutor(2) as pool:
        writers = [pool.submit(write, writer) for writer in range(2)]
        try:
            for _ in range(30):
                before = set(finished)
                assert before <= set(keys(store, "leases/"))
        finally:
            stop.set()
    for writer in writers:
        writer.result()


# -- patience


def test_pauses_have_full_jitter_and_a_growing_cap(memory: Store) -> None:
    pauses: list[float] = []
    store = Store(memory.url, memory.backend, retry_seconds=10_000, sleep=pauses.append, clock=lambda: sum(pauses))
    remaining = iter(range(200))

    def fails_200_times() -> str:
        if next(remaining, None) is not None:
            raise StoreUnavailable("down")
        return "up"

    assert store.retrying("test", "k", fails_200_times) == "up"
    assert len(pauses) == 200
    for attempt, pause in enumerate(pauses):
        assert 0 <= pause <= min(30.0, 0.5 * 2**attempt)
    # Uniform on [0, 30): the mean of 194 draws is within 6 standard errors of 15.
    assert abs(sum(pauses[6:]) / 194 - 15) < 6 * 30 / 12**0.5 / 194**0.5
    assert min(pauses[6:]) < 3


def test_the_deadline_ends_patience_before_it_passes(memory: Store) -> None:
    store = flaky(memory, before=1.0)
    store.retry_seconds = 100.0

    with pytest.raises(
        StoreUnavailable, match=r"put .*/k: given up after \d+ tries in \d+ s .*retry_seconds=100"
    ) as got:
        store.put("k", b"1")
    assert isinstance(got.value.__cause__, StoreUnavailable)
    assert 30 < store.time.now() < 100
    assert keys(memory) == []


def test_a_refusal_is_not_retried(memory: Store) -> None:
    store = flaky(memory, refused=1.0)

    with pytest.raises(StoreUnusable):
        store.put("k", b"1")
    assert store.injected == {"before": 0, "after": 0, "refused": 1}
    assert store.time.now() == 0


def test_every_retry_is_counted_and_the_log_stays_short(memory: Store, caplog: pytest.LogCaptureFixture) -> None:
    store = FlakyStore(memory, random.Random(0), retry_seconds=1800)
    store.fail_next("put", "before", times=40)

    with caplog.at_level(logging.INFO, "hsray.store"):
        store.put("k", b"1")

    assert store.retries() == {"put": 40}
    assert [record.levelname for record in caplog.records] == ["INFO", "INFO", *["WARNING"] * 4]  # 1 2 4 8 16 32


@pytest.mark.parametrize("operation", ["put", "get", "get_range", "head", "list", "delete"])
@pytest.mark.parametrize("fault", ["before", "after"])
def test_every_operation_survives_a_transient_failure(memory: Store, operation: str, fault: Any) -> None:
    memory.put("k", b"abc")
    store = FlakyStore(memory, random.Random(0), retry_seconds=60)
    calls: dict[str, tuple[str, Callable[[], Any], Any]] = {
        "put": ("put", lambda: store.put("new", b"x"), None),
        "get": ("get", lambda: store.get("k"), b"abc"),
        "get_range": ("get", lambda: bytes(store.get_range("k", 1, 1)), b"b"),
        "head": ("head", lambda: store.head("k").nbytes, 3),
        "list": ("list", lambda: keys(store), ["k"]),
        "delete": ("delete", lambda: store.delete(["k"]), None),
    }
    request, call, expected = calls[operation]
    store.fail_next(request, fault, times=3)

    assert call() == expected
    assert store.injected[fault] == 3
    assert keys(memory) == {"put": ["k", "new"], "delete": []}.get(operation, ["k"])


def test_a_listing_that_breaks_goes_on_where_it_was(memory: Store) -> None:
    expected = [f"many/{i:05d}" for i in range(2500)]
    for key in expected:
        memory.put(key, b"1")
    store = flaky(memory, before=0.3, after=0.3, operations=["list"], retry_seconds=1e6)  # type: ignore[arg-type]

    for _ in range(8):
        assert [info.key for info in store.list("many/")] == expected
    assert store.injected["before"] > 3
    assert store.injected["after"] > 3


# -- create once under failure


@pytest.mark.parametrize("times", [1, 2, 5])
def test_a_lost_acknowledgement_does_not_lose_the_record(memory: Store, times: int) -> None:
    store = FlakyStore(memory, random.Random(0), retry_seconds=1800)
    store.fail_next("create", "after", times)
    result = store.create_once(LEASE_KEY, {"n": 1})

    assert result.won
    assert memory.get_json(LEASE_KEY) == result.record


def test_a_lost_acknowledgement_and_failing_reads_are_asked_about_until_they_answer(memory: Store) -> None:
    store = FlakyStore(memory, random.Random(0), retry_seconds=1800)
    store.fail_next("create", "after", times=7)
    store.fail_next("get", "before", times=6)

    assert store.create_once(LEASE_KEY, {"n": 1}).won


def test_a_lost_request_is_sent_again(memory: Store) -> None:
    store = FlakyStore(memory, random.Random(0), retry_seconds=1800)
    store.fail_next("create", "before", times=3)

    assert store.create_once(LEASE_KEY, {"n": 1}).won
    assert store.injected["before"] == 3


def test_a_lost_request_does_not_turn_another_record_into_ours(memory: Store) -> None:
    memory.create_once(LEASE_KEY, {"n": "theirs"})
    store = FlakyStore(memory, random.Random(0), retry_seconds=1800)
    store.fail_next("create", "before", times=3)
    result = store.create_once(LEASE_KEY, {"n": "ours"})

    assert not result.won
    assert result.record["n"] == "theirs"


def test_an_answer_that_never_comes_is_not_guessed(memory: Store) -> None:
    store = FlakyStore(memory, random.Random(0), retry_seconds=60)
    store.fail_next("create", "after", times=1000)
    store.fail_next("get", "before", times=1000)

    with pytest.raises(StoreUnavailable, match=r"create .*given up"):
        store.create_once(LEASE_KEY, {"n": 1})
    store.calm()
    later = store.create_once(LEASE_KEY, {"n": 2})
    assert not later.won
    assert later.record["n"] == 1


def test_racing_writers_behind_a_bad_network_have_one_winner(memory: Store) -> None:
    stores = [flaky(memory, seed, before=0.3, after=0.3, retry_seconds=1e6) for seed in range(8)]

    def race(writer: int) -> list[tuple[bool, int]]:
        results = [stores[writer].create_once(f"leases/{n}.json", {"writer": writer}) for n in range(50)]
        return [(result.won, result.record["writer"]) for result in results]

    with ThreadPoolExecutor(8) as pool:
        outcomes = list(pool.map(race, range(8)))

    assert sum(store.injected["after"] for store in stores) > 100
    for n in range(50):
        winners = [writer for writer in range(8) if outcomes[writer][n][0]]
        assert len(winners) == 1
        assert {outcome[n][1] for outcome in outcomes} == {winners[0]}


# -- a single writer


@pytest.fixture
def single_writer(tmp_path: Path) -> Store:
    return open_store(str(tmp_path), commit="single-writer", retry_seconds=5)


def test_a_single_writer_keeps_the_record_that_stands(single_writer: Store) -> None:
    first = single_writer.create_once(LEASE_KEY, {"n": 1})
    second = single_writer.create_once(LEASE_KEY, {"n": 2})

    assert (first.won, second.won) == (True, False)
    assert second.record == first.record == single_writer.get_json(LEASE_KEY)


def test_a_single_writer_knows_its_own_record_after_a_lost_acknowledgement(single_writer: Store) -> None:
    store = FlakyStore(single_writer, random.Random(0), retry_seconds=60)
    store.fail_next("create", "after", times=3)

    assert store.commit == "single-writer"
    assert store.create_once(LEASE_KEY, {"n": 1}).won


def test_a_store_without_conditional_put_passes_the_probe_of_a_single_writer_only(tmp_path: Path) -> None:
    class Overwriting(Store):
        """What a server without If-None-Match does: the condition is dropped on the way."""

        def _put_if_absent(self, key: str, body: bytes) -> None:
            self._put_whole(key, memoryview(body))

    backend = open_store(str(tmp_path)).backend
    with pytest.raises(StoreUnusable, match=r"ignores conditional puts.*output\.commit: single-writer"):
        Overwriting(str(tmp_path), backend).probe()
    Overwriting(str(tmp_path), backend, commit="single-writer").probe()


# -- probe


def test_a_store_that_does_not_answer_fails_the_probe_in_a_minute(memory: Store) -> None:
    store = FlakyStore(memory, random.Random(0), before=1.0, retry_seconds=1800)

    with pytest.raises(StoreUnusable, match=r"of no use for 60 s.*output\.url"):
        store.probe()
    assert store.time.now() < 60
    assert store.retry_seconds == 1800


def test_a_store_that_refuses_fails_the_probe_at_once(memory: Store) -> None:
    with pytest.raises(StoreUnusable, match="the store refuses"):
        flaky(memory, refused=1.0).probe()


def test_a_store_that_forbids_deleting_passes_the_probe(memory: Store, caplog: pytest.LogCaptureFixture) -> None:
    store = flaky(memory)
    store.fail_next("delete", "refused")

    store.probe()
    assert "scratch object not deleted" in caplog.text


# -- uploads under failure


def upload_parts(store: Store, parts: int = 3) -> None:
    with store.upload("data/x") as upload:
        for _ in range(parts):
            upload.write(bytes(PART_BYTES))
        upload.complete()


def test_a_lost_acknowledgement_of_a_completion_is_found_out(memory: Store) -> None:
    store = FailingUpload(memory, 4, "after")
    upload_parts(store)

    assert store.injected["after"] == 1
    assert memory.head("data/x").nbytes == 3 * PART_BYTES


def test_another_object_under_the_key_is_not_taken_for_the_lost_completion(memory: Store) -> None:
    upload_parts(memory)  # same key, same size, same bytes

    with pytest.raises(StoreUnavailable, match="not completed"):
        upload_parts(FailingUpload(memory, 4, "before"))


def test_a_failed_write_cannot_be_swallowed_and_published(memory: Store) -> None:
    store = flaky(memory)
    with store.upload("data/x") as upload:
        upload.write(bytes(2 * PART_BYTES))
        store.fail_next("upload", "before")
        with pytest.raises(StoreUnavailable):
            upload.write(b"lost")
        with pytest.raises(ValueError, match="failed"):
            upload.complete()
        with pytest.raises(ValueError, match="failed"):
            upload.write(b"more")

    assert keys(memory) == []


def test_a_small_upload_has_the_full_patience_of_a_put(memory: Store) -> None:
    store = FlakyStore(memory, random.Random(0), retry_seconds=1800)
    store.fail_next("put", "before", times=10)
    with store.upload("data/x") as upload:
        upload.write(b"abc")
        upload.complete()

    assert memory.get("data/x") == b"abc"


def test_a_caller_can_repeat_a_whole_upload_with_the_patience_of_the_store(memory: Store) -> None:
    store = FlakyStore(memory, random.Random(0), retry_seconds=1800)
    store.fail_next("upload", "before", times=6)
    store.retrying("upload", "data/x", lambda: upload_parts(store))

    assert memory.head("data/x").nbytes == 3 * PART_BYTES


def test_parts_are_of_the_documented_size() -> None:
    assert (PART_BYTES, PARTS_IN_FLIGHT) == (16 * 1024 * 1024, 4)


# -- the flaky store itself


def test_the_faults_of_a_flaky_store_depend_on_its_seed_alone() -> None:
    def faults(seed: int, threads: int) -> dict[str, int]:
        store = flaky(
            open_store(f"memory://{uuid.uuid4()}"), seed, before=0.2, after=0.1, refused=0.1, retry_seconds=1e6
        )

        def put(n: int) -> bool:
            try:
                store.put(f"k{n}", b"1")
            except StoreUnusable:
                return False
            return True

        with ThreadPoolExecutor(threads) as pool:
            assert list(pool.map(put, range(300))).count(False) == store.injected["refused"]
        return dict(store.injected)

    assert faults(1, threads=1) == faults(1, threads=8)
    assert faults(1, threads=1) != faults(2, threads=1)
    assert all(10 < count < 120 for count in faults(1, threads=1).values())


def test_a_flaky_store_can_spare_some_operations(memory: Store) -> None:
    store = FlakyStore(memory, random.Random(0), before=1.0, operations={"get"}, retry_seconds=0)
    store.put("k", b"1")

    with pytest.raises(StoreUnavailable):
        store.get("k")
    store.calm()
    assert store.get("k") == b"1"
