"""The ledger: one resolution per lease, and every row in exactly one place."""

import random
import uuid
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hsray.errors import FingerprintMismatch, HsrayError, StoreUnavailable, StoreUnusable
from hsray.ledger import Accounting, Ledger, account, open_leases
from hsray.records import DeadPrompt, Extent, IndexEntry, JsonDict, Lease, Resolution, ShardRecord
from hsray.schema import FORMAT_VERSION
from hsray.store import Store, encode_json, open_store
from hsray.testing import FlakyStore


@pytest.fixture
def store() -> Store:
    return open_store(f"memory://{uuid.uuid4()}", retry_seconds=5)


@pytest.fixture
def ledger(store: Store) -> Ledger:
    return Ledger(store)


def lease(lease_id: str, *rows: int) -> Lease:
    return Lease(lease_id, rows, tuple(10 + row for row in rows))


def entry(row: int, segment: int = 0, num_segments: int = 1) -> IndexEntry:
    extents = {"final_prenorm": Extent(1000 * row, 20, f"{row:016x}")}
    return IndexEntry(row, f"p{row}", segment, num_segments, 0, 10, 10, 0, extents)


def shard(*rows: int, key: str = "data/x.parquet") -> ShardRecord:
    return ShardRecord(key, 1000, "0" * 16, tuple(entry(row) for row in rows))


def dead_prompt(row: int) -> DeadPrompt:
    return DeadPrompt(row, f"p{row}", "prompt_permanent", "NaN at position 3", 1)


def commit(lease_id: str, *rows: int, dead: tuple[int, ...] = (), attempt: str = "a1") -> Resolution:
    shards = (shard(*rows, key=f"data/{lease_id}-{attempt}.parquet"),) if rows else ()
    return Resolution("commit", lease_id, attempt, "r0", shards, tuple(map(dead_prompt, dead)), {5: 2})


def split(lease_id: str) -> Resolution:
    return Resolution("split", lease_id, "a1", "r0", attempts={1: 3})


def died(lease_id: str, *rows: int) -> Resolution:
    return Resolution("dead", lease_id, "a1", "r0", dead=tuple(map(dead_prompt, rows)))


def by_id(*resolutions: Resolution) -> dict[str, Resolution]:
    return {resolution.lease_id: resolution for resolution in resolutions}


# -- the run record


def run_record(**parts: str) -> JsonDict:
    return {
        "format_version": FORMAT_VERSION,
        "fingerprint": {"hash": str(sorted(parts.items())), "parts": parts},
        "run_id": uuid.uuid4().hex,
    }


def test_a_run_begins_once(store: Store) -> None:
    first, second = Ledger(store), Ledger(store)
    assert first.read_run() is None
    begun = first.create_run(run_record(model="m"))
    joined = second.create_run(run_record(model="m"))

    assert joined == begun == second.read_run()


def test_a_run_record_that_is_no_json_is_named(store: Store) -> None:
    store.put("hsray.json", b"<html>")

    with pytest.raises(StoreUnusable, match=r"hsray\.json is not JSON"):
        Ledger(store).read_run()


def test_the_same_inputs_continue_a_run(ledger: Ledger) -> None:
    stored = ledger.create_run(run_record(model="m", prompts="p"))

    ledger.check_fingerprint(stored, run_record(prompts="p", model="m"))


def test_other_inputs_are_refused_with_every_difference_and_the_way_out(ledger: Ledger) -> None:
    stored = ledger.create_run(run_record(**{"model.weights": "old", "capture.sites": "a,b", "gone": "1", "same": "s"}))
    mine = run_record(**{"model.weights": "new", "capture.sites": "a", "added": "2", "same": "s"})

    with pytest.raises(FingerprintMismatch) as caught:
        ledger.check_fingerprint(stored, mine)
    lines = str(caught.value).splitlines()
    assert "hsray.json was begun from other inputs" in lines[0]
    assert lines[1:-1] == [
        "  added: the run has (nothing), now 2",
        "  capture.sites: the run has a,b, now a",
        "  gone: the run has 1, now (nothing)",
        "  model.weights: the run has old, now new",
    ]
    assert "new output.url" in lines[-1]
    assert "same" not in str(caught.value)


def test_another_hash_with_equal_parts_is_still_refused(ledger: Ledger) -> None:
    stored, mine = run_record(model="m"), run_record(model="m")
    mine["fingerprint"]["hash"] = "other"

    with pytest.raises(FingerprintMismatch, match="now other"):
        ledger.check_fingerprint(stored, mine)


@pytest.mark.parametrize("version", [2, "2.0", 0, None, "", "one"])
def test_another_format_version_is_refused(ledger: Ledger, version: Any) -> None:
    stored = {**run_record(model="m"), "format_version": version}

    with pytest.raises(FingerprintMismatch, match=f"format version {version}, this hsray writes {FORMAT_VERSION}"):
        ledger.check_fingerprint(stored, run_record(model="m"))


@pytest.mark.parametrize("version", [FORMAT_VERSION, f"{FORMAT_VERSION}.7"])
def test_a_minor_format_version_is_accepted(ledger: Ledger, version: Any) -> None:
    ledger.check_fingerprint({**run_record(model="m"), "format_version": version}, run_record(model="m"))


@pytest.mark.parametrize("fingerprint", [None, {}, {"hash": "x"}, {"hash": "x", "parts": 7}])
def test_a_record_without_a_fingerprint_is_refused(ledger: Ledger, fingerprint: Any) -> None:
    stored = {**run_record(model="m"), "fingerprint": fingerprint}

    with pytest.raises(FingerprintMismatch, match="no readable fingerprint"):
        ledger.check_fingerprint(stored, run_record(model="m"))


# -- starts


def test_starts_are_counted_over_all_drivers(store: Store) -> None:
    one, other = Ledger(store), Ledger(store)
    assert one.starts() == {}
    for ledger, lease_id, number in (
        (one, "000000", 1),
        (other, "000000", 2),
        (one, "000001.r.a", 10),
        (other, "000001.r.a", 9),
    ):
        ledger.record_start(lease_id, number, {"replica": "r0"})

    assert one.starts() == other.starts() == {"000000": 2, "000001.r.a": 10}


def test_a_start_can_be_recorded_again(ledger: Ledger, store: Store) -> None:
    ledger.record_start("000000", 1, {"replica": "first"})
    ledger.record_start("000000", 1, {"replica": "second"})

    assert store.get_json("attempts/000000/1.json") == {"replica": "second"}


def test_a_foreign_object_among_the_attempts_is_named(ledger: Ledger, store: Store) -> None:
    store.put("attempts/000000/one.json", b"{}")

    with pytest.raises(HsrayError, match=r"attempts/000000/one\.json does not belong"):
        ledger.starts()


# -- resolutions


@pytest.mark.parametrize(
    "resolution",
    [commit("000000", 1, 2, dead=(3,)), commit("000000.r", dead=(3,)), split("000000.a"), died("000000.b", 4)],
    ids=["commit", "commit-of-dead", "split", "dead"],
)
def test_a_resolution_comes_back_as_it_was(ledger: Ledger, resolution: Resolution) -> None:
    assert ledger.resolve(resolution) == (resolution, True)
    assert ledger.resolutions() == {resolution.lease_id: resolution}


def test_the_first_resolution_stands(store: Store) -> None:
    first, second = commit("000000", 1, attempt="a1"), commit("000000", 1, attempt="a2")

    assert Ledger(store).resolve(first) == (first, True)
    assert Ledger(store).resolve(second) == (first, False)
    assert Ledger(store).resolve(first) == (first, False)  # a record, not a promise: who asks again did not write it
    assert Ledger(store).resolutions() == {"000000": first}


def test_kinds_compete_for_one_key(ledger: Ledger) -> None:
    standing = split("000000")
    ledger.resolve(standing)

    assert ledger.resolve(commit("000000", 1, 2)) == (standing, False)
    assert ledger.resolve(died("000000", 1, 2)) == (standing, False)


def test_racing_drivers_behind_a_bad_network_agree(store: Store) -> None:
    ledgers = [Ledger(FlakyStore(store, random.Random(n), before=0.2, after=0.3, retry_seconds=1e6)) for n in range(8)]

    def resolve_all(driver: int) -> list[tuple[str, bool]]:
        outcomes = [ledgers[driver].resolve(commit(f"{n:06d}", n, attempt=f"a{driver}")) for n in range(40)]
        return [(standing.attempt, ours) for standing, ours in outcomes]

    with ThreadPoolExecutor(8) as pool:
        by_driver = list(pool.map(resolve_all, range(8)))

    for n in range(40):
        assert len({outcomes[n][0] for outcomes in by_driver}) == 1
        winners = [driver for driver in range(8) if by_driver[driver][n][1]]
        assert winners == [int(by_driver[0][n][0][1:])]


def test_an_unknown_outcome_is_raised_and_asking_again_tells(store: Store) -> None:
    flaky = FlakyStore(store, random.Random(0), retry_seconds=60)
    flaky.fail_next("create", "after", times=1000)
    flaky.fail_next("get", "before", times=1000)
    mine = commit("000000", 1)

    with pytest.raises(StoreUnavailable):
        Ledger(flaky).resolve(mine)
    flaky.calm()
    assert Ledger(flaky).resolve(replace(mine, attempt="a2")) == (mine, False)


def broken(**changes: Any) -> bytes:
    return encode_json({**commit("000000", 1).to_json(), **changes})


MALFORMED = {
    "no kind": encode_json({k: v for k, v in commit("000000", 1).to_json().items() if k != "kind"}),
    "unknown kind": broken(kind="maybe"),
    "other lease": broken(lease_id="000001"),
    "shards are a number": broken(shards=7),
    "an entry without a row": broken(shards=[{"key": "k", "nbytes": 1, "tree_xxh3": "", "entries": [{"segment": 0}]}]),
    "a shard without a size": broken(shards=[{"key": "k", "tree_xxh3": "", "entries": []}]),
    "an unknown field": broken(dead=[{**died("000000", 1).to_json()["dead"][0], "mood": "bad"}]),
    "dead are text": broken(dead="none"),
    "attempts are a list": broken(attempts=[1]),
    "empty": b"{}",
    "no json": b"not json",
    "a list": b"[]",
}


@pytest.mark.parametrize("content", MALFORMED.values(), ids=MALFORMED.keys())
def test_a_malformed_resolution_is_named_not_skipped(ledger: Ledger, store: Store, content: bytes) -> None:
    ledger.resolve(commit("000001", 2))
    store.put("leases/000000.json", content)

    with pytest.raises(HsrayError, match=r"leases/000000\.json is not"):
        ledger.resolutions()
    with pytest.raises(HsrayError, match=r"leases/000000\.json is not"):
        ledger.resolve(commit("000000", 1))


@pytest.mark.parametrize("key", ["leases/000000.json.tmp", "leases/sub/000000.json", "leases/README"])
def test_a_foreign_object_among_the_leases_is_named(ledger: Ledger, store: Store, key: str) -> None:
    store.put(key, encode_json(commit("000000", 1).to_json()))

    with pytest.raises(HsrayError, match=f"{key} is not a resolution"):
        ledger.resolutions()


def test_many_resolutions_are_read_through_a_bad_network(store: Store) -> None:
    expected = by_id(*(commit(f"{n:06d}", n) for n in range(300)))
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(Ledger(store).resolve, expected.values()))
    flaky = FlakyStore(store, random.Random(0), before=0.1, after=0.1, retry_seconds=1e6)

    assert Ledger(flaky).resolutions() == expected
    assert flaky.injected["before"] > 10


@pytest.mark.parametrize(
    "resolution",
    [commit("000000", 2, 1, dead=(3,)), commit("000000.r", dead=(3,)), split("000000.a"), died("000000.b", 4)],
    ids=["commit", "commit-of-dead", "split", "dead"],
)
def test_a_summary_is_the_same_from_the_store_as_from_the_record(ledger: Ledger, resolution: Resolution) -> None:
    ledger.resolve(resolution)

    assert ledger.summaries() == {resolution.lease_id: resolution.summary()}
    assert resolution.summary().committed_rows == resolution.committed_rows
    assert resolution.summary().dead_rows == resolution.dead_rows


@pytest.mark.parametrize("content", MALFORMED.values(), ids=MALFORMED.keys())
def test_a_malformed_resolution_has_no_summary(ledger: Ledger, store: Store, content: bytes) -> None:
    store.put("leases/000000.json", content)

    with pytest.raises(HsrayError, match=r"leases/000000\.json is not"):
        ledger.summaries()


def test_a_stream_of_chosen_resolutions_reads_those_alone(ledger: Ledger) -> None:
    expected = [commit(f"{n:06d}", n) for n in range(5)]
    for resolution in expected:
        ledger.resolve(resolution)

    assert list(ledger.stream(["000003", "000001"])) == [expected[3], expected[1]]
    assert sorted(r.lease_id for r in ledger.stream()) == [r.lease_id for r in expected]


# -- a run that was removed while its driver worked


def replaced(store: Store) -> tuple[Ledger, Ledger]:
    """The ledger of a driver whose run is gone, and that of the run which was begun in its place."""
    first, second = {**run_record(), "run_id": "first"}, {**run_record(), "run_id": "second"}
    Ledger(store).create_run(first)
    store.delete(["hsray.json"])
    Ledger(store).create_run(second)
    return Ledger(store, "first"), Ledger(store, "second")


def test_a_driver_does_not_commit_into_the_run_that_replaced_its_own(store: Store) -> None:
    old, new = replaced(store)

    with pytest.raises(FingerprintMismatch, match="that of run second: somebody removed run first"):
        old.resolve(commit("000000", 1))
    with pytest.raises(FingerprintMismatch, match="that of run second"):
        old.write_success({})
    assert new.resolve(commit("000000", 1)) == (commit("000000", 1), True)
    assert not new.is_complete()


def test_a_driver_whose_run_was_removed_stops(store: Store) -> None:
    record = Ledger(store).create_run(run_record())
    store.delete(["hsray.json"])

    with pytest.raises(FingerprintMismatch, match="is gone: somebody removed run"):
        Ledger(store, record["run_id"]).resolve(commit("000000", 1))
    assert Ledger(store).resolutions() == {}


def test_a_record_that_slipped_in_is_refused_by_name_and_never_followed(store: Store) -> None:
    old, new = replaced(store)
    store.create_once("leases/000000.json", {**commit("000000", 1).to_json(), "run_id": "first"})
    store.put("_SUCCESS", encode_json({"run_id": "first"}))

    for read in (new.resolutions, new.summaries, lambda: new.resolve(commit("000000", 1, attempt="a2"))):
        with pytest.raises(
            FingerprintMismatch, match=r"leases/000000\.json was written by a driver of another run, first"
        ):
            read()
    assert not new.is_complete()
    assert old.summaries().keys() == {"000000"}


def test_records_of_before_there_was_a_stamp_still_count(store: Store) -> None:
    store.create_once("leases/000000.json", commit("000000", 1).to_json())
    store.put("_SUCCESS", b"{}")

    assert Ledger(store, "mine").resolutions() == {"000000": commit("000000", 1)}
    assert Ledger(store, "mine").is_complete()


# -- the end


def test_a_run_is_complete_when_it_says_so(ledger: Ledger, store: Store) -> None:
    assert not ledger.is_complete()
    ledger.write_success({"committed": 3})
    ledger.write_success({"committed": 4})

    assert ledger.is_complete()
    assert store.get_json("_SUCCESS")["committed"] == 4


def test_completeness_is_not_guessed_when_the_store_is_away(store: Store) -> None:
    flaky = FlakyStore(store, random.Random(0), before=1.0)

    with pytest.raises(StoreUnavailable):
        Ledger(flaky).is_complete()


def test_the_last_exit_is_kept(ledger: Ledger) -> None:
    assert ledger.read_last_exit() is None
    ledger.write_last_exit({"exit_code": 75})
    ledger.write_last_exit({"exit_code": 0})

    assert ledger.read_last_exit() == {"exit_code": 0}


# -- accounting


ROOTS = [lease("000000", 0, 1, 2, 3), lease("000001", 5, 6), lease("000002", 7)]


def test_without_resolutions_every_root_is_open() -> None:
    assert account(ROOTS, {}) == Accounting(open=ROOTS)
    assert open_leases(ROOTS, {}) == ROOTS


def test_a_whole_commit_closes_its_lease() -> None:
    found = account(ROOTS, by_id(commit("000001", 5, 6)))

    assert found.committed == {5: "000001", 6: "000001"}
    assert found.open == [ROOTS[0], ROOTS[2]]


def test_a_partial_commit_leaves_the_remainder_open() -> None:
    found = account(ROOTS, by_id(commit("000000", 0, 2, dead=(3,))))

    assert found.committed == {0: "000000", 2: "000000"}
    assert found.dead == {3: dead_prompt(3)}
    assert found.open == [lease("000000.r", 1), *ROOTS[1:]]


def test_a_split_opens_both_halves_in_order() -> None:
    assert open_leases(ROOTS, by_id(split("000000"))) == [lease("000000.a", 0, 1), lease("000000.b", 2, 3), *ROOTS[1:]]


def test_a_deep_tree_is_followed_to_its_leaves() -> None:
    records = by_id(
        split("000000"),
        commit("000000.a", 0),
        died("000000.a.r", 1),
        split("000000.b"),
        commit("000000.b.b", 3),
        died("000002", 7),
    )
    found = account(ROOTS, records)

    assert found.committed == {0: "000000.a", 3: "000000.b.b"}
    assert set(found.dead) == {1, 7}
    assert found.open == [lease("000000.b.a", 2), ROOTS[1]]
    assert found.superseded == frozenset()


def test_a_tree_may_be_deeper_than_the_recursion_limit() -> None:
    rows = tuple(range(1500))
    records = {}
    lease_id = "000000"
    for row in rows:
        records[lease_id] = commit(lease_id, row)
        lease_id += ".r"

    assert len(account([lease("000000", *rows)], records).committed) == 1500


def test_resolutions_that_no_root_leads_to_are_superseded() -> None:
    records = by_id(commit("000001", 5, 6), commit("000001.r", 6), commit("000009", 99))
    found = account(ROOTS, records)

    assert found.superseded == {"000001.r", "000009"}
    assert found.committed == {5: "000001", 6: "000001"}


CONTRADICTIONS = {
    "committed and dead": (commit("000000", 0, 1, dead=(1,)), "both committed and dead: .1."),
    "row of another lease": (commit("000000", 0, 5), "not in that lease: .5."),
    "dead row of another lease": (died("000002", 7, 8), "not in that lease: .8."),
    "row committed twice": (
        Resolution("commit", "000000", "a", "r", (shard(0, 1, key="data/1"), shard(1, key="data/2"))),
        "commits row 1 with segments .0, 0. of 1",
    ),
    "a segment is missing": (
        Resolution("commit", "000000", "a", "r", (ShardRecord("k", 1, "", (entry(0, 0, 3), entry(0, 2, 3))),)),
        "commits row 0 with segments .0, 2. of 3",
    ),
    "dead twice": (died("000002", 7, 7), "dead twice"),
    "dead without a reason": (died("000000", 0, 1), "no reason: .2, 3."),
    "split of one": (split("000002"), "at least two rows"),
    "split with an outcome": (replace(commit("000000", 0), kind="split"), "no outcomes"),
}


@pytest.mark.parametrize(("resolution", "message"), CONTRADICTIONS.values(), ids=CONTRADICTIONS.keys())
def test_a_contradiction_stops_everything(resolution: Resolution, message: str) -> None:
    with pytest.raises(HsrayError, match=rf"lease {resolution.lease_id} .*{message}"):
        account(ROOTS, by_id(resolution))


def test_a_row_of_two_roots_is_a_contradiction() -> None:
    with pytest.raises(HsrayError, match="row 6 is in two root leases, 000001 and 000003"):
        account([*ROOTS, lease("000003", 6)], {})


def test_the_same_root_twice_is_a_contradiction() -> None:
    with pytest.raises(HsrayError, match="000001"):
        account([*ROOTS, ROOTS[1]], by_id(commit("000001", 5, 6)))


def test_segments_of_one_row_may_lie_in_several_shards() -> None:
    shards = (
        ShardRecord("data/1", 1, "", (entry(7, 1, 2),)),
        ShardRecord("data/2", 1, "", (entry(7, 0, 2),)),
    )
    found = account(ROOTS, by_id(Resolution("commit", "000002", "a", "r", shards)))

    assert found.committed == {7: "000002"}


@st.composite
def histories(draw: st.DrawFn) -> tuple[list[Lease], dict[str, Resolution], dict[int, str]]:
    """Random roots, a random tree of resolutions over them, and what became of every row by construction."""
    sizes = draw(st.lists(st.integers(1, 9), min_size=1, max_size=5))
    fate: dict[int, str] = {}
    roots: list[Lease] = []
    row = 0
    for n, size in enumerate(sizes):
        rows = range(row, row + size)
        row += size + draw(st.integers(0, 2))
        roots.append(lease(f"{n:06d}", *rows))
    records: dict[str, Resolution] = {}
    queue = list(roots)
    while queue:
        current = queue.pop()
        kinds = ["open", "commit", "dead"] + (["split"] if len(current.rows) > 1 else [])
        kind = draw(st.sampled_from(kinds))
        if kind == "open":
            fate |= dict.fromkeys(current.rows, "open")
            continue
        if kind == "split":
            records[current.lease_id] = split(current.lease_id)
            queue += current.halves()
            continue
        if kind == "dead":
            records[current.lease_id] = died(current.lease_id, *current.rows)
            fate |= dict.fromkeys(current.rows, "dead")
            continue
        what = {r: draw(st.sampled_from(["committed", "dead", "left"])) for r in current.rows}
        done = [r for r in current.rows if what[r] == "committed"]
        given_up = tuple(r for r in current.rows if what[r] == "dead")
        if not done and not given_up:
            done = [current.rows[0]]
            what[current.rows[0]] = "committed"
        records[current.lease_id] = commit(current.lease_id, *done, dead=given_up)
        fate |= {r: w for r, w in what.items() if w != "left"}
        left = {r for r, w in what.items() if w == "left"}
        if left:
            queue.append(current.child("r", left))
    return roots, records, fate


@given(histories())
@settings(max_examples=300, deadline=None)
def test_every_row_is_in_exactly_one_place(history: tuple[list[Lease], dict[str, Resolution], dict[int, str]]) -> None:
    roots, records, fate = history
    found = account(roots, records)

    open_rows = [row for open_lease in found.open for row in open_lease.rows]
    places = {row: "committed" for row in found.committed}
    places |= {row: "dead" for row in found.dead}
    places |= {row: "open" for row in open_rows}
    assert places == fate
    assert len(found.committed) + len(found.dead) + len(open_rows) == sum(len(root.rows) for root in roots)
    assert found.superseded == frozenset()
    for row, lease_id in found.committed.items():
        assert row in records[lease_id].committed_rows
    assert open_leases(roots, records) == found.open


@given(histories(), st.randoms(use_true_random=False))
@settings(max_examples=100, deadline=None)
def test_a_lost_record_reopens_its_lease_and_loses_nothing_else(
    history: tuple[list[Lease], dict[str, Resolution], dict[int, str]], rng: random.Random
) -> None:
    roots, records, _ = history
    if not records:
        return
    lost = rng.choice(sorted(records))
    found = account(roots, {key: record for key, record in records.items() if key != lost})

    below = {key for key in records if key.startswith(lost + ".")}
    assert lost in {open_lease.lease_id for open_lease in found.open}
    assert found.superseded == below
    assert not set(found.committed.values()) & (below | {lost})
