"""`Store` against a real S3 server, and against its failures: what obstore really raises, and what we make of it."""

import itertools
import random
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from hsray.errors import StoreUnavailable, StoreUnusable
from hsray.ledger import Ledger, account
from hsray.records import DeadPrompt, Lease, Resolution
from hsray.store import Store, open_store
from hsray.upload import PART_BYTES, PARTS_IN_FLIGHT
from tests.faultproxy import Action, FaultProxy, run_fault_proxy
from tests.seaweed import READ_ONLY_KEY, Seaweed, abort_uploads, open_uploads
from tests.store_suite import LEASE_KEY, MakeStore, StoreSuite, distinct_bytes, keys

ALWAYS = 1_000_000


class TestSeaweed(StoreSuite):
    @pytest.fixture
    def make_store(self, seaweed: Seaweed) -> MakeStore:
        url = seaweed.new_url() + "/some/prefix"
        return lambda: open_store(url, seaweed.storage_options, retry_seconds=30)

    @pytest.fixture(autouse=True)
    def _server(self, seaweed: Seaweed) -> None:
        self.server = seaweed

    def unfinished(self, store: Store) -> list[str]:
        return open_uploads(self.server)


@pytest.fixture
def proxy(seaweed: Seaweed) -> Iterator[FaultProxy]:
    with run_fault_proxy(seaweed.port) as running:
        yield running


@pytest.fixture
def options(seaweed: Seaweed, proxy: FaultProxy) -> dict[str, Any]:
    return {**seaweed.storage_options, "endpoint": proxy.endpoint}


@pytest.fixture
def url(seaweed: Seaweed) -> str:
    return seaweed.new_url()


@pytest.fixture
def direct(seaweed: Seaweed, url: str) -> Store:
    """The same objects, past the proxy."""
    return open_store(url, seaweed.storage_options)


@pytest.fixture
def store(url: str, options: dict[str, Any]) -> Store:
    """Through the proxy, with real pauses of at most a few hundredths of a second."""
    return open_store(url, options, retry_seconds=1800, sleep=lambda pause: time.sleep(min(pause, 0.05)))


def test_credentials_and_endpoint_come_from_the_environment(seaweed: Seaweed, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in seaweed.env.items():
        monkeypatch.setenv(name, value)
    store = open_store(seaweed.new_url())
    store.probe()
    store.put("a", b"1")

    assert store.get("a") == b"1"


# -- refusals: at once, with the fix


@pytest.mark.parametrize(
    "call",
    [
        lambda store: store.get("a"),
        lambda store: store.get_range("a", 0, 1),
        lambda store: store.head("a"),
        lambda store: list(store.list()),
        lambda store: store.put("a", b"1"),
        lambda store: store.put("a", bytes(2 * PART_BYTES)),
        lambda store: store.create_once("a", {}),
        lambda store: store.delete(["a"]),
        lambda store: store.probe(),
    ],
    ids=["get", "get_range", "head", "list", "put", "put_large", "create", "delete", "probe"],
)
def test_a_missing_bucket_is_never_a_missing_object(call: Callable[[Store], Any], options: dict[str, Any]) -> None:
    store = open_store("s3://no-such-bucket/run", options)

    with pytest.raises(StoreUnusable, match=r"bucket of s3://no-such-bucket/run does not exist.*output\.url"):
        call(store)


@pytest.mark.parametrize("wrong", ["access_key_id", "secret_access_key"])
@pytest.mark.parametrize("operation", ["get", "head", "list", "put", "create", "delete", "upload"])
def test_wrong_credentials_are_unusable(url: str, options: dict[str, Any], wrong: str, operation: str) -> None:
    store = open_store(url, {**options, wrong: "wrong"})
    calls: dict[str, Callable[[], Any]] = {
        "get": lambda: store.get("a"),
        "head": lambda: store.head("a"),
        "list": lambda: list(store.list()),
        "put": lambda: store.put("a", b"1"),
        "create": lambda: store.create_once("a", {}),
        "delete": lambda: store.delete(["a"]),
        "upload": lambda: store.put("a", bytes(2 * PART_BYTES)),
    }

    with pytest.raises(
        StoreUnusable,
        match=rf"{operation} .*access denied \(403.*Check AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY.*output\.url",
    ):
        calls[operation]()


def test_read_only_credentials_fail_the_probe_and_can_read(url: str, options: dict[str, Any], direct: Store) -> None:
    direct.put("a", b"1")
    store = open_store(url, {**options, "access_key_id": READ_ONLY_KEY})

    assert store.get("a") == b"1"
    with pytest.raises(StoreUnusable, match=r"access denied \(403 AccessDenied\)"):
        store.probe()


@pytest.mark.parametrize(
    ("status", "code", "message"),
    [
        (400, "EntityTooLarge", "refused: answer 400 EntityTooLarge"),
        (403, "RequestTimeTooSkewed", "clock is wrong"),
        (400, "AuthorizationHeaderMalformed", r"wrong region.*output\.storage_options\.region"),
        (301, "PermanentRedirect", r"wrong region.*output\.storage_options\.region"),
        (501, "NotImplemented", "refused: answer 501 NotImplemented"),
        (405, "MethodNotAllowed", "refused: answer 405 MethodNotAllowed"),
        (404, "NoSuchKey", "refused: answer 404 NoSuchKey"),
    ],
)
@pytest.mark.parametrize("operation", ["put", "create"])
def test_a_permanent_answer_is_given_up_at_once(
    store: Store, proxy: FaultProxy, operation: str, status: int, code: str, message: str
) -> None:
    proxy.inject("PUT ", "answer", times=ALWAYS, status=status, code=code)

    with pytest.raises(StoreUnusable, match=rf"{operation} s3://.*{message}"):
        store.put("k", b"1") if operation == "put" else store.create_once("k", {})
    assert proxy.count("PUT ") <= 3  # obstore itself repeats a 5xx twice


def test_an_expired_session_token_of_the_environment_is_unusable(
    store: Store, proxy: FaultProxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_SESSION_TOKEN", "expired")
    proxy.inject("PUT ", "answer", times=ALWAYS, status=400, code="ExpiredToken")

    with pytest.raises(StoreUnusable, match=r"AWS_SESSION_TOKEN has expired.*resumes"):
        store.put("k", b"1")


@pytest.mark.parametrize(
    ("endpoint", "options", "message"),
    [
        ("http://127.0.0.1:1", {}, "no answer .*Connection refused.*endpoint or AWS_ENDPOINT_URL"),
        ("http://no-such-host.invalid", {}, "no answer .*lookup.*endpoint or AWS_ENDPOINT_URL"),
        (None, {"allow_http": False}, r"output\.storage_options\.allow_http"),
    ],
    ids=["refused", "no-such-host", "http-not-allowed"],
)
def test_an_endpoint_that_cannot_be_reached_fails_the_probe(
    seaweed: Seaweed, url: str, endpoint: str | None, options: dict[str, Any], message: str
) -> None:
    endpoint = endpoint or seaweed.endpoint
    store = open_store(url, {**seaweed.storage_options, "endpoint": endpoint, **options}, retry_seconds=0.5)

    with pytest.raises(StoreUnusable, match=message):
        store.probe()


def test_https_to_a_server_that_speaks_http_names_the_endpoint(seaweed: Seaweed, url: str) -> None:
    options = {**seaweed.storage_options, "endpoint": seaweed.endpoint.replace("http:", "https:")}

    with pytest.raises(StoreUnusable, match=r"does not speak TLS.*output\.storage_options\.endpoint"):
        open_store(url, options).put("a", b"1")


def test_no_secret_is_in_a_message(url: str, options: dict[str, Any]) -> None:
    secret = uuid.uuid4().hex
    with pytest.raises(StoreUnusable) as caught:
        open_store(url, {**options, "secret_access_key": secret}).put("a", b"1")

    assert secret not in str(caught.value)


# -- transient failures: retried until they pass


TRANSIENT: list[tuple[Action, int, str]] = [
    ("answer", 503, "SlowDown"),
    ("answer", 500, "InternalError"),
    ("answer", 429, "TooManyRequests"),
    ("answer", 400, "RequestTimeout"),
    ("answer", 400, "ExpiredToken"),  # of credentials that renew themselves
    ("answer", 409, "OperationAborted"),
    ("drop_request", 0, ""),
    ("drop_response", 0, ""),
]


@pytest.mark.parametrize(("action", "status", "code"), TRANSIENT)
def test_a_put_outlasts_a_transient_failure(
    store: Store, proxy: FaultProxy, action: Action, status: int, code: str
) -> None:
    proxy.inject("PUT ", action, times=8, status=status, code=code)
    store.put("k", b"1")

    assert store.get("k") == b"1"
    assert proxy.count("PUT ") == 9


@pytest.mark.parametrize(("action", "status", "code"), TRANSIENT)
def test_a_record_is_ours_after_any_transient_failure(
    store: Store, direct: Store, proxy: FaultProxy, action: Action, status: int, code: str
) -> None:
    proxy.inject("PUT ", action, times=8, status=status, code=code)
    result = store.create_once("k", {"n": 1})

    assert result.won
    assert direct.get_json("k") == result.record


@pytest.mark.parametrize(("action", "status", "code"), TRANSIENT)
def test_a_record_is_theirs_after_any_transient_failure(
    store: Store, direct: Store, proxy: FaultProxy, action: Action, status: int, code: str
) -> None:
    theirs = direct.create_once("k", {"n": "theirs"}).record
    proxy.inject("PUT ", action, times=8, status=status, code=code)
    proxy.inject("GET ", action, times=8, status=status, code=code)
    result = store.create_once("k", {"n": "ours"})

    assert not result.won
    assert result.record == theirs


@pytest.mark.parametrize("action", ["answer", "drop_request", "drop_response", "cut_response"])
def test_reads_outlast_a_transient_failure(store: Store, direct: Store, proxy: FaultProxy, action: Action) -> None:
    data = distinct_bytes(3_000_000).tobytes()
    direct.put("k", data)
    for read, expected in (
        (lambda: store.get("k"), data),
        (lambda: store.get_range("k", 1_000_000, 1_500_000).tobytes(), data[1_000_000:2_500_000]),
        (lambda: keys(store), ["k"]),
    ):
        proxy.clear()
        proxy.inject("GET ", action, times=8)
        assert read() == expected
        assert proxy.count("GET ") == 9


def test_head_and_delete_outlast_a_transient_failure(store: Store, direct: Store, proxy: FaultProxy) -> None:
    direct.put("k", b"123")
    proxy.inject("HEAD ", "drop_response", times=4).inject("HEAD ", "answer", times=4)
    proxy.inject("POST .*delete", "drop_response", times=4).inject("POST .*delete", "answer", times=4)

    assert store.head("k").nbytes == 3
    store.delete(["k"])
    assert keys(direct) == []


def test_an_outage_longer_than_the_patience_says_what_was_tried(url: str, options: dict[str, Any]) -> None:
    store = open_store(url, {**options, "endpoint": "http://127.0.0.1:1"}, retry_seconds=1)

    with pytest.raises(StoreUnavailable, match=r"put .*/k: given up after \d+ tries .*Connection refused"):
        store.put("k", b"1")


def test_a_hanging_server_is_given_up_on_and_asked_again(url: str, options: dict[str, Any], proxy: FaultProxy) -> None:
    store = open_store(url, {**options, "timeout": "500ms"}, sleep=lambda pause: None)
    proxy.inject("PUT ", "hang", times=3)

    assert store.create_once("k", {"n": 1}).won
    assert proxy.count("PUT ") == 4


def test_missing_objects_stay_missing_through_a_bad_network(store: Store, proxy: FaultProxy) -> None:
    store.put("other", b"1")
    proxy.inject("GET |HEAD ", "drop_response", times=5)

    with pytest.raises(FileNotFoundError):
        store.get("k")
    with pytest.raises(FileNotFoundError):
        store.head("k")


# -- uploads


def upload_parts(store: Store) -> bytes:
    """Two parts, the second a small one."""
    data = distinct_bytes(PART_BYTES + 12345).tobytes()
    with store.upload("data/x") as upload:
        upload.write(data)
        upload.complete()
    return data


@pytest.mark.parametrize(
    ("pattern", "action"),
    [
        *itertools.product(
            [r"POST .*\?uploads", "PUT .*partNumber=1", "PUT .*partNumber=2", "POST .*uploadId"],
            ["answer", "drop_request", "drop_response"],
        )
    ],
)
def test_an_upload_outlasts_a_transient_failure_of_any_request(
    store: Store, direct: Store, proxy: FaultProxy, seaweed: Seaweed, pattern: str, action: Action
) -> None:
    proxy.inject(pattern, action, times=2)
    data = upload_parts(store)

    assert direct.get("data/x") == data
    # An answer lost when the upload was begun leaves that one behind; S3 has no way to find it again.
    left = open_uploads(seaweed)
    begun = proxy.count(r"POST .*\?uploads")
    assert len(left) == (begun - 1 if (action, "uploads" in pattern) == ("drop_response", True) else 0)
    abort_uploads(seaweed)


@pytest.mark.parametrize(
    "pattern", [r"POST .*\?uploads", "PUT .*partNumber=1", "PUT .*partNumber=2", "POST .*uploadId"]
)
@pytest.mark.parametrize("code", ["AccessDenied", "InvalidPart"])
def test_an_upload_that_is_refused_leaves_nothing(
    store: Store, direct: Store, proxy: FaultProxy, seaweed: Seaweed, pattern: str, code: str
) -> None:
    proxy.inject(pattern, "answer", times=ALWAYS, status=403 if code == "AccessDenied" else 400, code=code)

    with pytest.raises(StoreUnusable, match=rf"upload .*{code}"):
        upload_parts(store)
    assert keys(direct) == []
    assert open_uploads(seaweed) == []


def test_an_upload_whose_parts_the_store_dropped_is_transient(
    store: Store, direct: Store, proxy: FaultProxy, seaweed: Seaweed
) -> None:
    proxy.inject("PUT .*partNumber=2", "answer", status=404, code="NoSuchUpload")

    with pytest.raises(StoreUnavailable, match=r"upload .*data/x"):
        upload_parts(store)
    assert keys(direct) == []
    assert open_uploads(seaweed) == []


def test_a_completion_that_arrived_twice_is_a_success(store: Store, direct: Store, proxy: FaultProxy) -> None:
    """The first answer is lost; to the repetition the server says that there is no such upload."""
    proxy.inject("POST .*uploadId", "drop_response")
    proxy.inject("POST .*uploadId", "answer", status=404, code="NoSuchUpload")
    data = upload_parts(store)

    assert direct.get("data/x") == data


def test_another_object_of_that_size_is_not_taken_for_a_lost_completion(
    store: Store, direct: Store, proxy: FaultProxy, seaweed: Seaweed
) -> None:
    upload_parts(direct)
    proxy.inject("POST .*uploadId", "answer", status=404, code="NoSuchUpload")

    with pytest.raises(StoreUnavailable, match="not completed"):
        upload_parts(store)
    assert open_uploads(seaweed) == []


def test_an_abort_that_fails_does_not_hide_the_error(
    store: Store, direct: Store, proxy: FaultProxy, seaweed: Seaweed, caplog: pytest.LogCaptureFixture
) -> None:
    proxy.inject("DELETE .*uploadId", "answer", times=ALWAYS, status=403, code="AccessDenied")

    def interrupted() -> None:
        with store.upload("data/x") as upload:
            upload.write(bytes(2 * PART_BYTES))
            raise KeyError("the real reason")

    with pytest.raises(KeyError, match="the real reason"):
        interrupted()
    assert "unfinished upload left behind key=data/x: answer 403 AccessDenied" in caplog.text
    assert keys(direct) == []
    abort_uploads(seaweed)


def test_a_store_that_does_not_keep_up_stops_the_writer(store: Store, proxy: FaultProxy) -> None:
    proxy.inject("PUT .*partNumber", "hang", times=ALWAYS)
    total = 10 * PART_BYTES
    most = (PARTS_IN_FLIGHT + 2) * PART_BYTES
    piece = bytes(1024 * 1024)

    with store.upload("data/x") as upload:

        def write() -> None:
            for _ in range(total // len(piece)):
                upload.write(piece)

        writer = threading.Thread(target=write)
        writer.start()
        # All parts hang; the writer goes on until its bound, and then no further.
        while proxy.count("partNumber") < PARTS_IN_FLIGHT:
            time.sleep(0.01)
        before = -1
        while upload.nbytes != before:
            before = upload.nbytes
            time.sleep(0.5)
        assert upload.nbytes <= most
        assert proxy.count("partNumber") == PARTS_IN_FLIGHT
        proxy.release()
        writer.join(120)
        upload.complete()

    assert store.head("data/x").nbytes == total


# -- the ledger on S3


def test_many_drivers_behind_a_bad_network_agree_on_every_lease(
    url: str, options: dict[str, Any], direct: Store, proxy: FaultProxy
) -> None:
    rng = random.Random(0)
    roots = [Lease(f"{n:06d}", (n,), (10,)) for n in range(40)]
    for _ in range(30):
        proxy.inject("(PUT|GET) ", rng.choice(["answer", "drop_request", "drop_response"]), times=2)

    def drive(driver: int) -> dict[str, tuple[str, bool]]:
        store = open_store(url, options, sleep=lambda pause: time.sleep(min(pause, 0.05)))
        ledger = Ledger(store)
        seen = {}
        for lease in roots:
            dead = DeadPrompt(lease.rows[0], "p", "crash", f"driver {driver}", 3)
            mine = Resolution("dead", lease.lease_id, f"attempt-{driver}", "r", dead=(dead,))
            standing, ours = ledger.resolve(mine)
            seen[lease.lease_id] = (standing.attempt, ours)
        return seen

    with ThreadPoolExecutor(4) as pool:
        outcomes = list(pool.map(drive, range(4)))

    standing = Ledger(direct).resolutions()
    assert set(standing) == {lease.lease_id for lease in roots}
    for lease_id, resolution in standing.items():
        assert {outcome[lease_id][0] for outcome in outcomes} == {resolution.attempt}
        assert [outcome[lease_id][1] for outcome in outcomes].count(True) == 1
    assert set(account(roots, standing).dead) == set(range(40))


def test_the_key_of_a_lease_is_what_the_layout_says(direct: Store) -> None:
    Ledger(direct).resolve(Resolution("dead", "000000", "a", "r"))

    assert keys(direct) == [LEASE_KEY]
