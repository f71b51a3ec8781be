"""Reading a run: exact states by id, position and in order; only what was committed; nothing before it is asked for."""

import pickle
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader

from hsray.errors import ConfigError, HsrayError, StoreError
from hsray.finish import store_final_norm
from hsray.ranges import RANGE_BYTES, RangeReader
from hsray.reader import PromptStates, Run, open_run
from hsray.records import Resolution
from hsray.schema import INDEX_KEY, RUN_KEY, SUCCESS_KEY
from hsray.shard import ShardRow, write_shard
from hsray.store import Store, open_store
from tests.small_run import SITE_NAMES, SmallRun, build_small_run, make_prompt, make_states, metadata

TORCH_DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}


class CountingStore(Store):
    """Notes every range request as (key, start, nbytes)."""

    requests: list[tuple[str, int, int]]

    def get_range(self, key: str, start: int, nbytes: int) -> memoryview:
        self.requests.append((key, start, nbytes))
        return super().get_range(key, start, nbytes)


def count_requests(run: Run) -> CountingStore:
    plain = open_store(run.url)
    store = CountingStore(plain.url, plain.backend)
    store.requests = []
    run._ranges = RangeReader(store, {})
    return store


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> SmallRun:
    """A finished run that no test changes."""
    return build_small_run(str(tmp_path_factory.mktemp("reader") / "run"))


@pytest.fixture
def run(small: SmallRun) -> Run:
    return open_run(small.url)


@pytest.fixture
def fresh(tmp_path: Path) -> SmallRun:
    """A finished run to break."""
    return build_small_run(str(tmp_path / "run"))


def assert_is(prompt: PromptStates, small: SmallRun) -> None:
    """Byte for byte what was written."""
    planned = small.prompts[prompt.row]
    assert prompt.prompt_id == planned.prompt_id
    assert prompt.seq_len == planned.num_tokens
    assert prompt.input_ids.dtype == np.int32
    assert prompt.loss_mask.dtype == np.uint8
    assert np.array_equal(prompt.input_ids, planned.input_ids)
    assert np.array_equal(prompt.loss_mask, planned.loss_mask)
    for site, expected in small.states[prompt.row].items():
        assert prompt[site].dtype == expected.dtype
        assert prompt[site].shape == expected.shape
        assert prompt[site].tobytes() == expected.tobytes()


@pytest.mark.parametrize("dtype", list(TORCH_DTYPES))
def test_every_prompt_comes_back_byte_for_byte_in_row_order(tmp_path: Path, dtype: str) -> None:
    small = build_small_run(str(tmp_path), dtype=dtype)

    run = open_run(small.url)

    prompts = list(run)
    assert [prompt.row for prompt in prompts] == small.rows
    assert small.dead not in small.rows
    for prompt in prompts:
        assert_is(prompt, small)


def test_a_prompt_is_found_by_id_and_by_position(small: SmallRun, run: Run) -> None:
    assert len(run) == len(small.rows)
    assert list(run.prompt_ids) == [f"prompt-{row}" for row in small.rows]
    for position, row in enumerate(small.rows):
        assert f"prompt-{row}" in run
        assert_is(run[f"prompt-{row}"], small)
        assert_is(run.at(position), small)


def test_what_was_not_committed_is_not_there(small: SmallRun, run: Run) -> None:
    for absent in (f"prompt-{small.dead}", "prompt-2", "nobody"):
        assert absent not in run
        with pytest.raises(KeyError, match=absent):
            run[absent]
    for position in (-1, len(run)):
        with pytest.raises(IndexError, match=f"position {position} of a run of {len(run)} prompts"):
            run.at(position)


def test_the_run_says_what_it_holds(run: Run) -> None:
    assert run.complete
    assert run.sites == tuple(SITE_NAMES)
    assert run.hidden_size == 24
    assert run.dtype == "bfloat16"
    assert run.record["run_id"] == "small"


def test_a_prompt_is_a_mapping_of_its_sites(run: Run) -> None:
    prompt = run["prompt-3"]

    assert list(prompt) == SITE_NAMES
    assert len(prompt) == 3
    assert "resid_pre_2" in prompt
    assert "resid_pre_3" not in prompt
    assert {site: state.shape for site, state in prompt.items()} == dict.fromkeys(SITE_NAMES, (130, 24))
    assert prompt == prompt
    assert prompt != run["prompt-3"]
    assert len({prompt, run["prompt-4"]}) == 2
    with pytest.raises(KeyError, match="resid_pre_3: this run has resid_pre_2, resid_pre_5, final_prenorm"):
        prompt["resid_pre_3"]


def test_nothing_is_fetched_before_it_is_asked_for_and_then_only_that(small: SmallRun, run: Run) -> None:
    store = count_requests(run)

    prompt = run["prompt-3"]
    assert "resid_pre_5" in prompt
    assert repr(prompt).startswith("PromptStates('prompt-3'")
    assert store.requests == []

    state = prompt["resid_pre_5"]
    (segment,) = prompt.segments
    assert store.requests == [run.segments.where(segment, "resid_pre_5")]

    assert prompt["resid_pre_5"] is state
    assert prompt.input_ids is prompt.input_ids
    assert prompt.loss_mask is not None
    assert len(store.requests) == 2


def test_one_site_of_a_prompt_of_one_segment_is_not_copied(run: Run) -> None:
    state = run["prompt-3"]["resid_pre_2"]

    assert not state.flags.owndata
    assert not state.flags.writeable


def test_a_whole_small_prompt_is_one_request(small: SmallRun, run: Run) -> None:
    store = count_requests(run)

    prompt = run["prompt-3"].load()

    assert len(store.requests) == 1
    assert_is(prompt, small)
    assert len(store.requests) == 1


def test_load_fetches_only_what_is_missing(run: Run) -> None:
    store = count_requests(run)
    prompt = run["prompt-3"]
    first = prompt["final_prenorm"]

    prompt.load(["resid_pre_2", "final_prenorm"])

    assert prompt["final_prenorm"] is first
    assert len(store.requests) == 2
    assert store.requests[1][2] < 130 * 24 * 2 * 2


def test_iteration_joins_the_requests_of_small_prompts(small: SmallRun, run: Run) -> None:
    store = count_requests(run)

    for prompt in run:
        assert_is(prompt, small)

    # One per shard: all of them are smaller than a request.
    assert len(store.requests) == 4


def test_scan_fetches_the_sites_that_are_asked_for(small: SmallRun, run: Run) -> None:
    store = count_requests(run)

    fetched = [p["resid_pre_5"].tobytes() for p in run.scan(["resid_pre_5"])]

    assert fetched == [small.states[row]["resid_pre_5"].tobytes() for row in small.rows]
    with pytest.raises(KeyError, match="resid_pre_4: this run has"):
        next(run.scan(["resid_pre_4"]))
    assert len(store.requests) <= 10


def test_iteration_is_bounded_and_can_be_left_early(tmp_path: Path) -> None:
    # 20 prompts of 3 sites of 2 MB: batches of two or three prompts.
    small = build_small_run(str(tmp_path), lengths=(500,) * 20, hidden_size=2048)
    run = open_run(small.url)
    store = count_requests(run)
    size = 3 * 500 * 2048 * 2

    iterator = iter(run)
    assert_is(next(iterator), small)

    # What was asked for when the first prompt is out: one batch in use, and what may be ahead of it.
    assert sum(nbytes for _, _, nbytes in store.requests) <= (16 << 20) + (64 << 20) + 2 * size
    threads = {thread.name for thread in threading.enumerate()}
    assert any(name.startswith("hsray-scan") for name in threads)
    iterator.close()  # type: ignore[attr-defined]
    assert not any(thread.name.startswith("hsray-scan") for thread in threading.enumerate())

    assert [p.row for p in run] == small.rows


def test_a_prompt_larger_than_a_request_is_read_in_parts(tmp_path: Path) -> None:
    small = build_small_run(str(tmp_path), lengths=(2100, 5), hidden_size=2048, dtype="float32")
    assert small.states[0]["resid_pre_2"].nbytes > 2 * RANGE_BYTES
    run = open_run(small.url)
    store = count_requests(run)

    state = run["prompt-0"]["resid_pre_2"]

    assert state.tobytes() == small.states[0]["resid_pre_2"].tobytes()
    assert len(store.requests) == 3
    assert_is(run["prompt-0"].load(), small)


@pytest.mark.parametrize(
    ("start", "stop"),
    [(0, 9000), (0, 0), (9000, 9000), (0, 1), (4095, 4097), (4096, 8192), (4000, 8300), (8999, 9000), (17, 18)],
)
def test_read_gives_exactly_the_tokens_across_segments(small: SmallRun, run: Run, start: int, stop: int) -> None:
    store = count_requests(run)
    prompt = run["prompt-7"]
    assert prompt.segments == range(prompt.segments.start, prompt.segments.start + 3)

    part = prompt.read("final_prenorm", start, stop)

    assert part.shape == (stop - start, 24)
    assert part.tobytes() == small.states[7]["final_prenorm"][start:stop].tobytes()
    whole = sum(int(run.segments.nbytes["final_prenorm"][s]) for s in prompt.segments)
    asked = sum(nbytes for _, _, nbytes in store.requests)
    # Requests of neighbours span what lies between them, here the other columns of the next segment.
    assert asked <= (stop - start) * 24 * 2 + 2 * (whole + 100_000) * ((stop - start) > 1)
    if stop - start <= 1:
        assert asked == (stop - start) * 24 * 2


def test_read_uses_what_is_there_already(run: Run) -> None:
    prompt = run["prompt-3"].load()
    store = count_requests(run)

    assert np.shares_memory(prompt.read("resid_pre_2", 5, 9), prompt["resid_pre_2"])

    assert store.requests == []


@pytest.mark.parametrize(("start", "stop"), [(-1, 5), (6, 5), (0, 131), (131, 131)])
def test_read_outside_the_prompt_is_refused(run: Run, start: int, stop: int) -> None:
    with pytest.raises(IndexError, match=f"tokens {start} to {stop} of 'prompt-3', which has 130"):
        run["prompt-3"].read("resid_pre_2", start, stop)


@pytest.mark.parametrize("dtype", list(TORCH_DTYPES))
@pytest.mark.filterwarnings("error")
def test_a_tensor_has_the_values_and_shares_the_memory(tmp_path: Path, dtype: str) -> None:
    small = build_small_run(str(tmp_path), dtype=dtype)
    run = open_run(small.url)

    for row in small.rows:
        prompt = run[f"prompt-{row}"]
        tensor = prompt.tensor("resid_pre_5")

        assert tensor.dtype == TORCH_DTYPES[dtype]
        assert tensor.shape == small.states[row]["resid_pre_5"].shape
        assert tensor.data_ptr() == prompt["resid_pre_5"].ctypes.data
        expected = torch.from_numpy(small.states[row]["resid_pre_5"].astype(np.float32))
        assert torch.equal(tensor.float(), expected)


# Damage


def damage(small: SmallRun, run: Run, row: int, site: str, segment: int = 0) -> str:
    prompt = run[f"prompt-{row}"]
    where = run.segments.where(prompt.segments[segment], site)
    small.change_byte(where.key, where.offset + where.nbytes - 1)
    return where.key


def test_a_changed_byte_is_found_and_named(fresh: SmallRun) -> None:
    run = open_run(fresh.url)
    key = damage(fresh, run, 3, "resid_pre_5")

    with pytest.raises(HsrayError, match=rf"{key}: resid_pre_5 of prompt 'prompt-3' \(row 3, token 0 on"):
        run["prompt-3"]["resid_pre_5"]

    assert run["prompt-3"]["resid_pre_2"].shape == (130, 24)


def test_a_changed_byte_in_a_later_segment_is_found(fresh: SmallRun) -> None:
    run = open_run(fresh.url)
    damage(fresh, run, 7, "final_prenorm", segment=1)

    with pytest.raises(HsrayError, match=r"final_prenorm of prompt 'prompt-7' \(row 7, token 4096 on"):
        list(run)
    with pytest.raises(HsrayError, match=r"token 4096 on"):
        run["prompt-7"].read("final_prenorm", 4000, 8200)


def test_without_verify_a_changed_byte_goes_through(fresh: SmallRun) -> None:
    run = open_run(fresh.url, verify=False)
    damage(fresh, run, 3, "resid_pre_5")

    assert run["prompt-3"]["resid_pre_5"].tobytes() != fresh.states[3]["resid_pre_5"].tobytes()


def test_a_missing_shard_is_named(fresh: SmallRun) -> None:
    key = fresh.shard_of(3)
    fresh.store.delete([key])
    run = open_run(fresh.url)

    with pytest.raises(HsrayError, match=f"{key} is missing"):
        run["prompt-3"].load()


def test_a_truncated_shard_is_an_error(fresh: SmallRun) -> None:
    key = fresh.shard_of(7)
    fresh.store.put(key, fresh.store.get(key)[:10_000])
    run = open_run(fresh.url)

    with pytest.raises(StoreError, match="ends at byte 10000"):
        list(run)


# Runs that are not finished


def test_a_run_in_progress_shows_exactly_the_committed_prompts(tmp_path: Path) -> None:
    small = build_small_run(str(tmp_path), finish=False)
    small.store.delete(["leases/000001.json"])

    run = open_run(small.url)

    assert not run.complete
    assert [prompt.row for prompt in run] == [0, 1, 3, 8]
    for prompt in run:
        assert_is(prompt, small)


def test_a_remainder_without_its_parent_record_is_not_seen(tmp_path: Path) -> None:
    """Nothing leads to `000000.r` when the record of `000000` is not there."""
    small = build_small_run(str(tmp_path), finish=False)
    small.store.delete(["leases/000000.json"])

    assert [prompt.row for prompt in open_run(small.url)] == [4, 5, 7, 8]


def test_a_shard_that_no_resolution_names_is_not_seen(tmp_path: Path) -> None:
    small = build_small_run(str(tmp_path), finish=False)
    stray = make_prompt(small.dead, small.prompts[small.dead].num_tokens)
    states = make_states(small.dead, stray.num_tokens, 24, "bfloat16")
    write_shard(
        small.store,
        "data/000002-a2-0.parquet",
        [ShardRow(stray, states)],
        sites=SITE_NAMES,
        hidden_size=24,
        dtype="bfloat16",
        metadata=metadata("bfloat16", 24),
    )

    assert [prompt.row for prompt in open_run(small.url)] == small.rows
    small.finish()
    assert [prompt.row for prompt in open_run(small.url)] == small.rows


def test_an_open_run_does_not_change_when_more_is_committed(tmp_path: Path) -> None:
    small = build_small_run(str(tmp_path), finish=False)
    later: Resolution = small.ledger.resolutions()["000001"]
    small.store.delete(["leases/000001.json"])
    run = open_run(small.url)

    small.ledger.resolve(later)

    assert len(list(run)) == 4
    assert len(list(pickle.loads(pickle.dumps(run)))) == 4
    assert len(open_run(small.url)) == 7


def test_a_run_with_nothing_committed_is_empty(tmp_path: Path) -> None:
    small = build_small_run(str(tmp_path), finish=False)
    small.store.delete([info.key for info in small.store.list("leases/")])

    run = open_run(small.url)

    assert len(run) == 0
    assert list(run) == []
    assert "prompt-0" not in run


def test_a_url_without_a_run_says_so(tmp_path: Path) -> None:
    with pytest.raises(HsrayError, match=r"there is no run at .*: it has no hsray\.json"):
        open_run(str(tmp_path / "nothing"))


def test_a_malformed_url_is_a_configuration_error() -> None:
    with pytest.raises(ConfigError, match="unknown scheme"):
        open_run("ftp://somewhere/run")


def test_a_run_of_another_format_is_refused(fresh: SmallRun) -> None:
    fresh.overwrite(RUN_KEY, {**fresh.record, "format_version": 2})

    with pytest.raises(HsrayError, match="has format version 2; this hsray reads 1"):
        open_run(fresh.url)


def test_a_complete_run_without_its_index_points_to_verify(fresh: SmallRun) -> None:
    fresh.store.delete([INDEX_KEY])

    with pytest.raises(HsrayError, match=r"marked complete but has no index\.parquet.*hsray\.verify"):
        open_run(fresh.url)

    fresh.store.delete([SUCCESS_KEY])
    assert len(open_run(fresh.url)) == 7


# torch


def collect(loader: "DataLoader[Any]", small: SmallRun, run: Run) -> None:
    items = list(loader)
    assert sorted(item["prompt_id"] for item in items) == sorted(run.prompt_ids)
    for item in items:
        row = int(item["prompt_id"].removeprefix("prompt-"))
        assert item["input_ids"].dtype == torch.int64
        assert item["input_ids"].tolist() == small.prompts[row].input_ids.tolist()
        assert item["loss_mask"].dtype == torch.uint8
        assert item["loss_mask"].tolist() == small.prompts[row].loss_mask.tolist()
        for site in SITE_NAMES:
            assert item[site].dtype == torch.bfloat16
            assert item[site].view(torch.uint8).numpy().tobytes() == small.states[row][site].tobytes()


def first(batch: list[dict[str, Any]]) -> dict[str, Any]:
    (item,) = batch
    return item


@pytest.mark.parametrize("context", [None, "fork", "spawn"], ids=["same-process", "fork", "spawn"])
def test_a_data_loader_gets_every_prompt(small: SmallRun, run: Run, context: str | None) -> None:
    # Read before, so that the object-store client's threads are there when processes fork.
    assert_is(run.at(0), small)
    workers = {} if context is None else {"num_workers": 2, "multiprocessing_context": context, "timeout": 120}

    collect(DataLoader(run.torch_dataset(), batch_size=1, collate_fn=first, **workers), small, run)


def test_a_batch_is_fetched_in_one_go(small: SmallRun, run: Run) -> None:
    store = count_requests(run)
    loader: DataLoader[Any] = DataLoader(run.torch_dataset(["resid_pre_2"]), batch_size=3, collate_fn=list)

    batches = list(loader)

    assert [len(batch) for batch in batches] == [3, 3, 1]
    assert set(batches[0][0]) == {"prompt_id", "input_ids", "loss_mask", "resid_pre_2"}
    # Rows 0, 1 and 3 are in two shards.
    assert len({key for key, _, _ in store.requests}) == 4
    assert len(store.requests) <= 10


def test_the_dataset_is_torchs_and_refuses_unknown_sites(run: Run) -> None:
    dataset = run.torch_dataset()

    assert isinstance(dataset, torch.utils.data.Dataset)
    assert len(dataset) == 7  # type: ignore[arg-type]
    assert dataset[6]["prompt_id"] == "prompt-8"
    with pytest.raises(IndexError):
        dataset[7]
    with pytest.raises(KeyError, match="this run has"):
        run.torch_dataset(["final_postnorm"])


def test_a_pickled_run_reads_the_same(small: SmallRun, run: Run) -> None:
    copy = pickle.loads(pickle.dumps(run))

    for row in small.rows:
        assert_is(copy[f"prompt-{row}"], small)


# The final norm


@pytest.fixture
def checkpoint(tmp_path: Path) -> tuple[Path, np.ndarray[Any, Any]]:
    from safetensors.torch import save_file

    weight = torch.randn(24, dtype=torch.bfloat16)
    directory = tmp_path / "model"
    directory.mkdir()
    save_file({"model.norm.weight": weight}, directory / "model.safetensors")
    return directory, weight.view(torch.int16).numpy().view(ml_dtypes.bfloat16)


def test_the_final_norm_comes_with_the_run(fresh: SmallRun, checkpoint: tuple[Path, np.ndarray[Any, Any]]) -> None:
    directory, weight = checkpoint
    assert store_final_norm(fresh.store, directory, 1e-6, "rms")

    norm = open_run(fresh.url).final_norm()

    assert norm is not None
    assert norm.weight.dtype == ml_dtypes.bfloat16
    assert norm.weight.tobytes() == weight.tobytes()
    assert (norm.eps, norm.kind) == (1e-6, "rms")


def test_a_run_without_a_stored_norm_has_none(run: Run) -> None:
    assert run.final_norm() is None


def test_reading_needs_neither_torch_nor_ray_nor_sglang(small: SmallRun) -> None:
    script = (
        "import sys; from hsray.reader import open_run\n"
        f"run = open_run({small.url!r})\n"
        "assert sum(p['final_prenorm'].shape[0] for p in run) == 9250\n"
        "loaded = [m for m in ('torch', 'ray', 'sglang', 'transformers') if m in sys.modules]\n"
        "assert not loaded, loaded\n"
    )
    subprocess.run([sys.executable, "-c", script], check=True, cwd=Path(__file__).parents[2])
