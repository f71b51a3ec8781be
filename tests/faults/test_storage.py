"""The store misbehaves under a whole run: what passes is waited out, what does not ends the run and names the fix."""

import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from hsray.errors import ExitCode
from hsray.gc import find_garbage, remove
from hsray.verify import verify_run
from tests.faultproxy import FaultProxy, run_fault_proxy
from tests.runs import Run, ended, make_run, random_rows, wait_until
from tests.seaweed import Seaweed, abort_uploads, begin_upload, open_uploads
from tests.small_run import build_small_run

PROMPTS = 60
FOR_EVER = 1_000_000


@pytest.fixture
def proxy(seaweed: Seaweed) -> Iterator[FaultProxy]:
    with run_fault_proxy(seaweed.port) as running:
        yield running


@pytest.fixture
def run(tmp_path: Path, seaweed: Seaweed, proxy: FaultProxy) -> Iterator[Run]:
    made = make_run(
        tmp_path,
        random_rows(PROMPTS),
        url=seaweed.new_url(),
        storage_options={"endpoint": proxy.endpoint, "client_options": {"timeout": "5s"}},
        overrides=["engine.args.seconds_per_token=0.03", "output.retry_seconds=240"],
    )
    made.env |= {k: v for k, v in seaweed.env.items() if k != "AWS_ENDPOINT_URL"}
    made.storage_options |= {k: v for k, v in seaweed.storage_options.items() if k != "endpoint"}
    with ended(made) as it:
        yield it


def assert_whole(run: Run, seaweed: Seaweed) -> None:
    committed, dead, rejected = run.outcomes()
    assert (committed, dead, rejected) == (set(range(PROMPTS)), {}, 0)
    assert run.check_states() == PROMPTS
    assert verify_run(run.url, seaweed.storage_options, full=True).problems == []


def test_what_passes_is_waited_out_and_costs_no_prompt(run: Run, proxy: FaultProxy, seaweed: Seaweed) -> None:
    driver = run.start()
    run.wait_for_resolutions(1)

    proxy.inject(r"PUT .*/leases/", "drop_response", times=2)  # committed, and the answer is lost
    proxy.inject(r"PUT .*/data/", "drop_response", times=1)
    proxy.inject(r"PUT .*/data/", "drop_request", times=1)
    proxy.inject(r"GET .*/plan/", "cut_response", times=2)
    proxy.inject(r"PUT .*/attempts/", "hang", times=1)
    proxy.inject(r"PUT .*/leases/", "answer", status=400, code="ExpiredToken", times=3)
    proxy.inject(r"(PUT|POST|GET|HEAD) ", "answer", times=40)  # 503 SlowDown

    assert driver.wait(280) == ExitCode.COMPLETE, run.log()
    assert {fault.times for fault in proxy._faults} == {0}, "a fault was never met"
    assert_whole(run, seaweed)


@pytest.mark.soak
@pytest.mark.timeout(900)
def test_a_storm_of_two_minutes_pauses_the_run(run: Run, proxy: FaultProxy, seaweed: Seaweed) -> None:
    driver = run.start()
    run.wait_for_resolutions(2)

    proxy.inject(r".", "answer", times=FOR_EVER)
    time.sleep(120)
    assert driver.poll() is None, run.log()
    proxy.clear()
    calm = time.monotonic()
    before = sum(1 for _ in run.store().list("leases/"))
    wait_until(lambda: sum(1 for _ in run.store().list("leases/")) > before, 120, run.log)
    print(f"the next lease was committed {time.monotonic() - calm:.1f} s after the storm")

    assert driver.wait(400) == ExitCode.COMPLETE, run.log()
    assert_whole(run, seaweed)


def test_a_store_that_begins_to_refuse_ends_the_run_which_then_resumes(
    run: Run, proxy: FaultProxy, seaweed: Seaweed
) -> None:
    driver = run.start()
    run.wait_for_resolutions(1)

    proxy.inject(r"PUT ", "answer", status=403, code="AccessDenied", times=FOR_EVER)

    assert driver.wait(120) == ExitCode.STORE, run.log()
    assert "access denied (403 AccessDenied). Check AWS_ACCESS_KEY_ID" in run.log()
    run.assert_nothing_left()
    proxy.clear()
    assert run.finish(name="second") == ExitCode.COMPLETE, run.log("second")
    assert_whole(run, seaweed)


@pytest.mark.parametrize(
    ("pattern", "status", "code", "says"),
    [
        (r".", 404, "NoSuchBucket", "does not exist. Create it, or correct output.url"),
        (r".", 403, "AccessDenied", "access denied"),
        (r"PUT .*hsray-probe", 200, "Ignored", "ignores conditional puts (If-None-Match)"),
    ],
    ids=["no bucket", "denied", "no conditional put"],
)
def test_a_store_that_cannot_hold_a_run_is_refused_at_once(
    run: Run, proxy: FaultProxy, pattern: str, status: int, code: str, says: str
) -> None:
    proxy.inject(pattern, "answer", status=status, code=code, times=FOR_EVER)

    assert run.finish() == ExitCode.STORE, run.log()

    assert says in run.log()
    assert "starting replica" not in run.log()


def test_credentials_are_nowhere_in_what_a_run_leaves(run: Run, proxy: FaultProxy, seaweed: Seaweed) -> None:
    """The secret is given in every way that there is; neither logs nor objects nor errors may repeat it."""
    secret = seaweed.secret_key
    given = f"output.storage_options={{endpoint: '{proxy.endpoint}', secret_access_key: {secret}}}"
    assert run.finish(given) == ExitCode.COMPLETE, run.log()
    proxy.inject(r".", "answer", status=403, code="AccessDenied", times=FOR_EVER)
    assert run.finish(given, name="denied") == ExitCode.STORE
    proxy.clear()

    places = {str(path): path.read_bytes() for path in run.folder.rglob("*") if path.is_file()}
    places |= {info.key: run.store().get(info.key) for info in run.store().list()}

    assert len(places) > 15
    assert [name for name, content in places.items() if secret.encode() in content] == []


def test_uploads_that_a_dead_replica_left_open_are_aborted(seaweed: Seaweed) -> None:
    run = build_small_run(seaweed.new_url(), storage_options=seaweed.storage_options)
    prefix = run.url.removeprefix(f"s3://{seaweed.bucket}/")
    begin_upload(seaweed, f"{prefix}/data/000000-lost-0.parquet")
    begin_upload(seaweed, "another-run/data/000000-a-0.parquet")
    try:
        young = find_garbage(run.store, seaweed.storage_options)
        assert (young.uploads, young.young) == ([], 1)
        old = find_garbage(run.store, seaweed.storage_options, hours=-1)
        remove(run.store, old, seaweed.storage_options)
        remove(run.store, old, seaweed.storage_options)  # again: nobody minds

        assert open_uploads(seaweed) == ["another-run/data/000000-a-0.parquet"]
    finally:
        abort_uploads(seaweed)
    assert verify_run(run.url, seaweed.storage_options, full=True).problems == []
