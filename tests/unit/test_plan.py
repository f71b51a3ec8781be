import dataclasses
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest

from hsray.config import Config, PromptsConfig, make_config
from hsray.errors import ConfigError, HsrayError
from hsray.plan import build_plan, check_has_work, delete_plan, fingerprint, load_plan, read_lease_prompts
from hsray.records import Prompt, Reject
from hsray.sites import resolve_sites
from hsray.store import Store, open_store


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return open_store(str(tmp_path / "run"))


def prompt(row: int, tokens: int) -> Prompt:
    ids = np.arange(row, row + tokens, dtype=np.int32)
    return Prompt(row, f"p{row}", ids, (ids % 2).astype(np.uint8), "in.jsonl", row + 1)


def reject(row: int) -> Reject:
    return Reject(row, None, "in.jsonl", row + 1, "empty", "nothing in it", "{}")


def build(store: Store, items: list[Prompt | Reject], **options: int) -> dict[str, object]:
    sizes = {"bytes_per_token": 10, "shard_bytes": 1000, "max_lease_prompts": 100, **options}
    return build_plan(items, store, **sizes)  # type: ignore[arg-type]


def test_leases_are_packed_by_bytes_in_input_order(store: Store) -> None:
    record = build(store, [prompt(row, 40) for row in range(5)])

    plan = load_plan(store, record)

    assert [lease.rows for lease in plan.leases] == [(0, 1), (2, 3), (4,)]
    assert [lease.lease_id for lease in plan.leases] == ["000000", "000001", "000002"]
    assert plan.num_tokens == 200


def test_a_lease_holds_no_more_prompts_than_told(store: Store) -> None:
    record = build(store, [prompt(row, 1) for row in range(7)], max_lease_prompts=3)

    assert [len(lease.rows) for lease in load_plan(store, record).leases] == [3, 3, 1]


def test_a_prompt_larger_than_a_shard_is_a_lease_of_its_own(store: Store) -> None:
    record = build(store, [prompt(0, 10), prompt(1, 500), prompt(2, 10)])

    assert [lease.rows for lease in load_plan(store, record).leases] == [(0,), (1,), (2,)]


def test_rejects_keep_their_rows_and_are_stored(store: Store) -> None:
    record = build(store, [reject(0), prompt(1, 5), reject(2), prompt(3, 5)])

    plan = load_plan(store, record)

    assert plan.leases[0].rows == (1, 3)
    assert (plan.num_rows, plan.num_prompts, plan.num_rejects) == (4, 2, 2)
    (key,) = record["rejects"]  # type: ignore[misc]
    table = pq.read_table(store.locate(key))
    assert table.column("row").to_pylist() == [0, 2]
    assert table.column("reason").to_pylist() == ["empty", "empty"]
    assert record["reject_reasons"] == {"empty": 2}


def test_a_replica_reads_exactly_the_prompts_it_asks_for(store: Store) -> None:
    items = [prompt(row, 7 + row) for row in range(30)]
    plan = load_plan(store, build(store, items, max_lease_prompts=8, shard_bytes=1 << 20))
    lease = plan.leases[2]

    prompts = read_lease_prompts(store, plan.refs[lease.lease_id], [17, 20])

    assert [p.row for p in prompts] == [17, 20]
    for got in prompts:
        want = items[got.row]
        assert (got.prompt_id, got.file, got.line) == (want.prompt_id, want.file, want.line)
        assert np.array_equal(got.input_ids, want.input_ids)
        assert got.input_ids.dtype == np.int32
        assert np.array_equal(got.loss_mask, want.loss_mask)
        assert got.loss_mask.dtype == np.uint8


def test_a_row_that_the_lease_does_not_hold_is_an_error(store: Store) -> None:
    plan = load_plan(store, build(store, [prompt(row, 5) for row in range(4)]))

    with pytest.raises(HsrayError, match="1 of the 2 prompts"):
        read_lease_prompts(store, plan.refs["000000"], [1, 99])


def test_a_reader_that_loses_a_row_is_caught(store: Store) -> None:
    with pytest.raises(HsrayError, match="lost or repeated"):
        build(store, [prompt(0, 5), prompt(2, 5)])


def test_a_plan_that_fails_half_way_publishes_nothing(store: Store) -> None:
    def items() -> Iterator[Prompt | Reject]:
        yield from (prompt(row, 50) for row in range(10))
        raise OSError("the input went away")

    with pytest.raises(OSError, match="went away"):
        build_plan(items(), store, bytes_per_token=10, shard_bytes=1000, max_lease_prompts=100)

    assert list(store.list()) == []


def test_a_plan_that_lost_the_race_is_removed(store: Store) -> None:
    record = build(store, [prompt(0, 5), reject(1)])
    winner = build(store, [prompt(0, 5), reject(1)])

    delete_plan(store, record)

    assert load_plan(store, winner).num_rows == 2
    assert all(str(record["plan_id"]) not in info.key for info in store.list())


def test_no_accepted_row_is_an_error_that_says_why(store: Store) -> None:
    with pytest.raises(ConfigError, match=r"none of 2 rows.*empty 2"):
        check_has_work(build(store, [reject(0), reject(1)]))
    with pytest.raises(ConfigError, match="the input is empty"):
        check_has_work(build(store, []))


def config(**prompts: object) -> Config:
    return make_config({"model": {"path": "m"}, "prompts": {"path": "a.jsonl", **prompts}, "output": {"url": "o"}})


def parts(config: Config, inputs: list[tuple[str, str]], sites: str = "eagle3", tokenizer: str = "t") -> dict[str, str]:
    resolved = resolve_sites(sites, 8)
    made = fingerprint(config, sites=resolved, model={"model.weights": "w"}, tokenizer=tokenizer, inputs=inputs)
    assert len(made["hash"]) == 32
    found: dict[str, str] = made["parts"]
    return found


CHANGED = {
    "format": "text",
    "text_field": "body",
    "ignore_fields": ["error"],
    "id_field": "uuid",
    "duplicates": "keep-all",
    "where": {"source": "code"},
    "shuffle_seed": 1,
    "limit": 5,
    "role_map": {"robot": "assistant"},
    "system_turns": "merge",
    "special_tokens": "keep",
    "add_bos": True,
    "template_args": {"enable_thinking": False},
    "template_date": "2025-01-31",
    "mask_turns": "last",
    "empty_mask": "reject",
    "max_tokens": 9,
    "over_length": "truncate",
    "min_tokens": 2,
}
# Inputs and template count by their content, and where bytes come from does not count.
BY_CONTENT = {"path", "chat_template", "storage_options"}


def test_every_option_of_prompts_is_in_the_fingerprint_under_its_own_name() -> None:
    inputs = [("/x/a.jsonl", "h1")]
    base = parts(config(), inputs)

    assert CHANGED.keys() | BY_CONTENT == PromptsConfig.model_fields.keys()
    for key, value in CHANGED.items():
        other = parts(config(**{key: value}), inputs)
        assert {k for k in base.keys() | other.keys() if base.get(k) != other.get(k)} == {f"prompts.{key}"}
    assert parts(config(role_map={"a": "user", "b": "tool"}), inputs) == parts(
        config(role_map={"b": "tool", "a": "user"}), inputs
    )


def test_options_that_are_no_secrets_stay_readable_in_the_run() -> None:
    stored = config(special_tokens="split", max_tokens=9, storage_options={"token": "s3cret"}).redacted()["prompts"]

    assert (stored["special_tokens"], stored["max_tokens"]) == ("split", 9)
    assert stored["storage_options"] == {"token": "***"}


def test_a_cut_prompt_keeps_its_full_length_in_the_plan(store: Store) -> None:
    whole, cut = prompt(0, 5), dataclasses.replace(prompt(1, 5), full_tokens=12)
    plan = load_plan(store, build(store, [whole, cut]))

    assert [p.full_tokens for p in read_lease_prompts(store, plan.refs["000000"], [0, 1])] == [None, 12]

    # A run that was planned before there was such a column.
    key = plan.refs["000000"].object
    old = pq.read_table(store.locate(key)).drop_columns(["full_tokens"])
    pq.write_table(old, store.locate(key))
    assert [p.full_tokens for p in read_lease_prompts(store, plan.refs["000000"], [0, 1])] == [None, None]


def test_the_fingerprint_follows_everything_that_changes_ids_or_tensors() -> None:
    base = parts(config(), [("/x/a.jsonl", "h1")])

    def changed(other: dict[str, str]) -> set[str]:
        return {key for key in base.keys() | other.keys() if base.get(key) != other.get(key)}

    assert changed(parts(config(), [("/elsewhere/a.jsonl", "h1")])) == set()
    assert changed(parts(config(), [("/x/a.jsonl", "h2")])) == {"prompts.path[0]"}
    assert changed(parts(config(), [("/x/a.jsonl", "h1"), ("/x/b.jsonl", "h")])) == {"prompts.path[1]"}
    assert changed(parts(config(max_tokens=9), [("/x/a.jsonl", "h1")])) == {"prompts.max_tokens"}
    assert changed(parts(config(), [("/x/a.jsonl", "h1")], tokenizer="u")) == {"model.tokenizer"}
    assert changed(parts(config(), [("/x/a.jsonl", "h1")], sites="all")) == {"capture.sites"}
    assert changed(parts(config(storage_options={"anon": True}), [("/x/a.jsonl", "h1")])) == set()
