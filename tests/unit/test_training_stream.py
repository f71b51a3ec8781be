"""Prompts through the stream, the sampler and the loader: each once, the right bytes, from any point on."""

import itertools
import pickle
import random
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader

from hsray.errors import ConfigError, HsrayError
from hsray.reader import Run, open_run
from hsray.site_storage import SiteStorage
from hsray.training import Loader, PromptStream, TokenBatchSampler, pad_batch
from hsray.training.buffers import BufferPool, size_class
from hsray.training.items import Item
from tests.small_run import SITE_NAMES, SmallRun, build_small_run

LENGTHS = (4200, *random.Random(5).choices(range(1, 60), k=61))
BUDGET = 4300


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> SmallRun:
    return build_small_run(str(tmp_path_factory.mktemp("training") / "run"), lengths=LENGTHS)


@pytest.fixture(scope="module")
def run(small: SmallRun) -> Run:
    return open_run(small.url)


@pytest.fixture(scope="module")
def short_run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """No prompt of it is long, so that a sampler's batches may be small."""
    return open_run(build_small_run(str(tmp_path_factory.mktemp("short") / "run"), lengths=LENGTHS[2:]).url)


def names(items: Sequence[Item]) -> list[str]:
    """A collate function for tests of the order."""
    return [item["prompt_id"] for item in items]


def stream(run: Run, **options: Any) -> PromptStream:
    """Small pools and batches, so that a run of 60 prompts has many."""
    defaults = {"batch_tokens": 150, "shuffle_bytes": 20_000, "prefetch_bytes": 10_000, "max_tokens": 100}
    return PromptStream(run, **{"sites": ["resid_pre_5"], "collate": names, **defaults, **options})


def read(loader: Iterable[Any]) -> list[list[str]]:
    return list(loader)


def assert_same_as_written(batch: dict[str, Any], small: SmallRun, max_tokens: int | None = None) -> None:
    longest = batch["input_ids"].shape[1]
    for number, prompt_id in enumerate(batch["prompt_id"]):
        row = int(prompt_id.removeprefix("prompt-"))
        prompt = small.prompts[row]
        n = min(prompt.num_tokens, max_tokens or prompt.num_tokens)
        assert batch["attention_mask"][number].tolist() == [True] * n + [False] * (longest - n)
        for name in ("input_ids", "loss_mask"):
            assert batch[name][number].tolist() == getattr(prompt, name)[:n].tolist() + [0] * (longest - n)
        for site in SITE_NAMES:
            got = batch[site][number].view(torch.uint16).numpy()
            assert got[:n].tobytes() == small.states[row][site][:n].tobytes()
            assert not got[n:].any()


# Bytes


@pytest.mark.parametrize("shuffle", [True, False])
def test_a_stream_gives_every_prompt_with_the_bytes_that_were_written(small: SmallRun, run: Run, shuffle: bool) -> None:
    batches = list(PromptStream(run, batch_tokens=BUDGET, shuffle=shuffle, shuffle_bytes=300_000))

    for batch in batches:
        assert_same_as_written(batch, small)
        assert batch["input_ids"].dtype == torch.int64
        assert batch["resid_pre_5"].dtype == torch.bfloat16
        assert batch["input_ids"].numel() <= BUDGET
    ids = [prompt_id for batch in batches for prompt_id in batch["prompt_id"]]
    assert sorted(ids) == sorted(run.prompt_ids)
    if not shuffle:
        assert ids == list(run.prompt_ids)


def test_prompts_are_cut_to_the_segments_that_are_needed(small: SmallRun, run: Run) -> None:
    for batch in PromptStream(run, batch_tokens=200, max_tokens=40, shuffle_bytes=50_000):
        assert_same_as_written(batch, small, max_tokens=40)

    cut = PromptStream(run, batch_tokens=4150, max_tokens=4100)
    assert cut._schedule.nbytes.max() == sum(run.segments.nbytes[c][:2].sum() for c in run.segments.nbytes)
    assert stream(run)._schedule.nbytes.max() < cut._schedule.nbytes.max() / 2
    for batch in cut:
        assert_same_as_written(batch, small, max_tokens=4100)


def test_a_collate_function_that_keeps_its_items_gets_to_keep_them(small: SmallRun, run: Run) -> None:
    kept = [item for items in PromptStream(run, batch_tokens=BUDGET, collate=list) for item in items]  # type: ignore[arg-type]

    assert len(kept) == len(run)
    for item in kept:
        assert_same_as_written(pad_batch([item]), small)


def test_a_finished_batch_is_not_written_over(small: SmallRun, run: Run) -> None:
    for batch in list(PromptStream(run, batch_tokens=BUDGET, shuffle_bytes=0, prefetch_bytes=0)):
        assert_same_as_written(batch, small)


def test_memory_in_use_is_bounded_and_given_back(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    pools: list[BufferPool] = []
    taken: list[int] = []

    class Watched(BufferPool):
        def __init__(self, *, pinned: bool = False) -> None:
            super().__init__(pinned=pinned)
            pools.append(self)

        def take(self, nbytes: int) -> torch.Tensor:
            buffer = super().take(nbytes)
            taken.append(self.used_bytes)
            return buffer

    monkeypatch.setattr("hsray.training.stream.BufferPool", Watched)
    small_prompts = stream(run, shuffle_bytes=40_000, prefetch_bytes=20_000)

    read(small_prompts)

    # A block of one long prompt may be beyond either; buffers are at most twice as large as asked for.
    assert max(taken) <= 2 * (40_000 + 20_000) + 2 * int(small_prompts._schedule.nbytes.max())
    assert pools[0].used_bytes == 0


def test_memory_comes_back_when_no_tensor_looks_at_it() -> None:
    pool = BufferPool()
    one = pool.take(50_000)
    address = one.data_ptr()
    row = one.view(torch.bfloat16)[7:]
    del one
    other = pool.take(49_500)
    assert other.data_ptr() != address
    assert pool.used_bytes == 2 * size_class(50_000)
    del row

    assert pool.used_bytes == size_class(50_000)
    assert pool.take(49_500).data_ptr() == address
    del other
    most = 2 * size_class(50_000)
    for nbytes in (5000, 10_000, 90_000, 5000, 50_000):
        pool.take(nbytes)
        assert pool.used_bytes == 0
        assert 0 < pool._idle_bytes <= most


def test_size_classes_waste_little() -> None:
    assert all(n <= size_class(n) <= max(512, n * 1.13) for n in range(1, 100_000, 777))
    assert size_class(5000, powers_of_two=True) == 8192


# Codecs and selected tokens

STORAGE = {
    "resid_pre_2": SiteStorage("bf16-hl-zstd", "through_last_loss"),
    "resid_pre_5": SiteStorage("fp8-token"),
    "final_prenorm": SiteStorage("int8-block64-outlier4", "loss"),
}


@pytest.fixture(scope="module")
def encoded(tmp_path_factory: pytest.TempPathFactory) -> Run:
    folder = tmp_path_factory.mktemp("encoded")
    return open_run(build_small_run(str(folder / "run"), lengths=LENGTHS, storage=STORAGE).url)


@pytest.mark.parametrize("device", [None, "cpu"], ids=["decoded-by-readers", "decoded-on-the-device"])
def test_encoded_sites_are_those_that_the_reader_decodes(
    encoded: Run, device: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Stands for a GPU: only the memory and the events are CUDA's.
    monkeypatch.setattr("hsray.training.stream.torch.cuda.Event", FakeEvent)
    monkeypatch.setattr("hsray.training.stream.torch.cuda.current_stream", lambda device: None)
    monkeypatch.setattr("hsray.training.stream.BufferPool", lambda pinned: BufferPool())
    seen = 0
    for max_tokens in (None, 4100, 20):
        for items in PromptStream(encoded, batch_tokens=BUDGET, max_tokens=max_tokens, collate=list, device=device):  # type: ignore[arg-type]
            for item in items:
                prompt = encoded[item["prompt_id"]]
                n = min(prompt.seq_len, max_tokens or prompt.seq_len)
                assert item["input_ids"].tolist() == prompt.input_ids[:n].tolist()
                for site, storage in STORAGE.items():
                    rows = prompt[site]
                    if storage.tokens != "all":
                        positions = prompt.positions(site)
                        rows = rows[positions < n]
                        assert item[f"positions_{storage.tokens}"].tolist() == positions[positions < n].tolist()
                    assert item[site].view(torch.uint16).numpy().tobytes() == rows[:n].tobytes()
                seen += 1
    assert seen == 3 * len(encoded)


class FakeEvent:
    def record(self, stream: object) -> None: ...

    def query(self) -> bool:
        return False

    def synchronize(self) -> None: ...


def test_a_batch_says_which_tokens_have_a_state(encoded: Run) -> None:
    for batch in PromptStream(encoded, ["final_prenorm", "resid_pre_5"], batch_tokens=BUDGET, max_tokens=200):
        assert batch["resid_pre_5"].shape == (*batch["input_ids"].shape, 24)
        for number, prompt_id in enumerate(batch["prompt_id"]):
            prompt = encoded[prompt_id]
            positions = [p for p in prompt.positions("final_prenorm").tolist() if p < 200]
            rows = batch["positions_loss"].shape[1]
            assert batch["positions_loss"][number].tolist() == positions + [-1] * (rows - len(positions))
            assert batch["final_prenorm"].shape[1] == rows
            assert not batch["final_prenorm"][number, len(positions) :].any()


# Order


@pytest.mark.parametrize(("world", "workers"), [(1, 0), (3, 0), (2, 2)])
def test_ranks_and_workers_share_a_run_without_overlap(run: Run, world: int, workers: int) -> None:
    seen = []
    for rank in range(world):
        loader = Loader(stream(run, rank=rank, world_size=world), num_workers=workers)
        batches = read(loader)
        seen += [prompt_id for batch in batches for prompt_id in batch]
        assert loader.epoch == 1

    assert sorted(seen) == sorted(run.prompt_ids)


def test_epochs_and_seeds_mix_anew_and_repeat_exactly(run: Run) -> None:
    mine = stream(run)
    first = read(mine)
    assert read(mine) == first
    mine.set_epoch(1)

    assert read(mine) != first
    assert read(stream(run, seed=1)) != first
    assert read(stream(run)) == first


@pytest.mark.parametrize("uneven", ["drop", "repeat"])
def test_ranks_end_together_where_they_must(run: Run, uneven: Any) -> None:
    for workers in (0, 2):
        ranks = [stream(run, rank=rank, world_size=3, uneven=uneven, batch_tokens=100) for rank in range(3)]
        counts = {len(read(Loader(one, num_workers=workers))) for one in ranks}
        assert len(counts) == 1
        ranks[0].set_epoch(0)
        assert counts == {ranks[0].num_batches(workers)}


def test_repeated_batches_are_ones_that_the_rank_had(run: Run) -> None:
    kept = [read(stream(run, rank=rank, world_size=4)) for rank in range(4)]
    repeated = [read(stream(run, rank=rank, world_size=4, uneven="repeat")) for rank in range(4)]

    longest = max(map(len, kept))
    assert any(len(mine) < longest for mine in kept)
    for mine, more in zip(kept, repeated, strict=True):
        assert more == [*mine, *mine[: longest - len(mine)]]


# Going on


@pytest.mark.parametrize("uneven", ["keep", "drop", "repeat"])
def test_an_epoch_goes_on_at_any_batch(run: Run, uneven: Any) -> None:
    def fresh() -> PromptStream:
        return stream(run, rank=1, world_size=3, uneven=uneven)

    whole = read(Loader(fresh()))
    for taken in range(len(whole) + 1):
        loader = Loader(fresh())
        assert list(itertools.islice(loader, taken)) == whole[:taken]
        state = pickle.loads(pickle.dumps(loader.state_dict()))
        again = Loader(fresh())
        again.load_state_dict(state)
        assert again.state_dict() == state
        assert read(again) == whole[taken:]
        assert again.epoch == 1


@pytest.mark.parametrize("taken", [1, 6])
def test_it_goes_on_with_data_loader_workers(run: Run, taken: int) -> None:
    whole = read(Loader(stream(run), num_workers=2, multiprocessing_context="fork"))
    loader = Loader(stream(run), num_workers=2, multiprocessing_context="fork")
    batches = iter(loader)
    assert [next(batches) for _ in range(taken)] == whole[:taken]
    state = loader.state_dict()
    del batches

    again = Loader(stream(run), num_workers=2, multiprocessing_context="fork")
    again.load_state_dict(state)

    assert read(again) == whole[taken:]
    assert read(again) != whole
    other = stream(run)
    other.load_state_dict(state)
    with pytest.raises(ConfigError, match="saved with 2 DataLoader workers, and there are 1"):
        iter(other)


def test_a_loop_that_was_left_starts_its_epoch_again(run: Run) -> None:
    loader = Loader(stream(run))
    whole = read(loader)
    loader.load_state_dict(stream(run).state_after(0, 0))
    next(iter(loader))

    assert loader.epoch == 0
    assert read(loader) == whole
    assert len(loader) == len(read(loader))


def test_spawned_workers_read_too(small: SmallRun, run: Run) -> None:
    loader = Loader(PromptStream(run, batch_tokens=BUDGET), num_workers=1, multiprocessing_context="spawn")

    batches = list(loader)

    assert sorted(i for batch in batches for i in batch["prompt_id"]) == sorted(run.prompt_ids)
    for batch in batches:
        assert_same_as_written(batch, small)


def test_stateful_data_loader_of_torchdata_resumes(run: Run, short_run: Run) -> None:
    from torchdata.stateful_dataloader import StatefulDataLoader as stateful

    def streamed(workers: int) -> Any:
        return stateful(stream(run), batch_size=None, num_workers=workers)

    def sampled_positions(workers: int) -> Any:
        # What is at them does not matter here.
        numbers = range(len(short_run))
        return stateful(numbers, batch_sampler=sampled(short_run), collate_fn=list, num_workers=workers)

    for make, workers in itertools.product((streamed, sampled_positions), (0, 2)):
        whole = list(make(workers))
        first = make(workers)
        batches = iter(first)
        assert [next(batches) for _ in range(3)] == whole[:3]
        again = make(workers)
        again.load_state_dict(first.state_dict())
        assert list(again) == whole[3:]


# The sampler


def sampled(run: Run, **options: Any) -> TokenBatchSampler:
    return TokenBatchSampler(run, **{"batch_tokens": 120, **options})


def test_the_sampler_gives_every_position_once_over_all_ranks(short_run: Run) -> None:
    for shuffle in (True, False):
        batches = [list(sampled(short_run, rank=r, world_size=3, shuffle=shuffle)) for r in range(3)]
        assert sorted(p for rank in batches for batch in rank for p in batch) == list(range(len(short_run)))
        assert max(map(len, batches)) - min(map(len, batches)) <= 1
    flat = [p for batch in sampled(short_run, shuffle=False) for p in batch]
    assert flat == list(range(len(short_run)))


def test_the_sampler_makes_a_data_loader_of_batches(small: SmallRun, run: Run) -> None:
    loader: DataLoader[Any] = DataLoader(
        run.torch_dataset(), batch_sampler=sampled(run, batch_tokens=BUDGET), collate_fn=pad_batch, num_workers=1
    )

    batches = list(loader)

    assert sorted(i for batch in batches for i in batch["prompt_id"]) == sorted(run.prompt_ids)
    for batch in batches:
        assert_same_as_written(batch, small)


def test_a_sampler_goes_on_with_another_number_of_ranks(short_run: Run) -> None:
    everything = list(sampled(short_run))
    begun = sampled(short_run, rank=1, world_size=2)
    assert list(itertools.islice(begun, 3)) == everything[1:6:2]
    state = begun.state_dict()
    assert state == begun.state_after(3)

    rest = []
    for rank in range(3):
        again = sampled(short_run, rank=rank, world_size=3)
        again.load_state_dict(state)
        assert again.state_dict() == state
        expected = len(again)
        mine = list(again)
        assert len(mine) == expected
        rest += mine
    assert len(everything) > 12
    assert sorted(rest) == sorted(everything[6:])


def test_a_samplers_last_round_is_kept_dropped_or_repeated(short_run: Run) -> None:
    total = len(sampled(short_run))
    world = next(n for n in range(3, 9) if total % n)
    counts = {
        uneven: {len(list(sampled(short_run, rank=r, world_size=world, uneven=uneven))) for r in range(world)}
        for uneven in ("keep", "drop", "repeat")
    }

    few, more = total // world, total // world + 1
    assert counts == {"keep": {few, more}, "drop": {few}, "repeat": {more}}
    mine = sampled(short_run)
    first = list(mine)
    assert list(mine) == first
    mine.set_epoch(1)
    assert list(mine) != first


def test_a_split_reads_only_its_prompts(run: Run, short_run: Run) -> None:
    held_out = list(range(0, len(run), 5))

    assert sorted(i for b in stream(run, positions=held_out) for i in b) == sorted(run.prompt_ids[p] for p in held_out)
    assert sorted(p for b in sampled(short_run, positions=[7, 3, 9]) for p in b) == [3, 7, 9]
    with pytest.raises(ConfigError, match=r"prompts was '13 \(.*\)' and is '61 \("):
        stream(run).load_state_dict(stream(run, positions=held_out).state_dict())
    with pytest.raises(ConfigError, match=r"positions 0 to 61: .* has 0 to 60"):
        stream(run, positions=[0, 61])
    with pytest.raises(ConfigError, match="one is there twice"):
        stream(run, positions=[4, 4])


# What cannot be


def test_wrong_settings_say_what_to_do(small: SmallRun, run: Run) -> None:
    with pytest.raises(ConfigError, match=r"prompt 'prompt-0' has 4200 tokens and fits no batch of 512: raise batch_t"):
        PromptStream(run, batch_tokens=512)
    with pytest.raises(ConfigError, match=r"none of 61 prompts of .* has at least 9999 tokens"):
        PromptStream(run, batch_tokens=BUDGET, min_tokens=9999)
    with pytest.raises(ConfigError, match="batch_tokens must be at least 1, got 0"):
        PromptStream(run, batch_tokens=0)
    with pytest.raises(ConfigError, match="rank=3 of 3"):
        PromptStream(run, batch_tokens=BUDGET, rank=3, world_size=3)
    with pytest.raises(ConfigError, match="give rank and world_size together"):
        TokenBatchSampler(run, batch_tokens=BUDGET, rank=0)
    with pytest.raises(KeyError, match="final_postnorm: this run has resid_pre_2"):
        PromptStream(run, ["final_postnorm"], batch_tokens=BUDGET)
    with pytest.raises(ConfigError, match=r"too few for 90 ranks of 1 readers: \d+ get none"):
        next(iter(stream(run, rank=0, world_size=90, uneven="drop")))
    with pytest.raises(ConfigError, match="persistent_workers"):
        Loader(stream(run), num_workers=1, persistent_workers=True)
    with pytest.raises(HsrayError, match="there is no run at"):
        PromptStream(f"{small.url}-nowhere", batch_tokens=BUDGET)


def test_a_state_of_another_order_is_refused_by_what_differs(run: Run) -> None:
    state = stream(run).state_dict()

    with pytest.raises(ConfigError, match=r"seed was 0 and is 1; world_size was 1 and is 2"):
        stream(run, seed=1, rank=0, world_size=2).load_state_dict(state)
    with pytest.raises(ConfigError, match="batch_tokens was 4300 and is 4400"):
        sampled(run, batch_tokens=4400).load_state_dict(sampled(run, batch_tokens=4300).state_dict())


def test_short_prompts_are_left_out_and_counted(run: Run, caplog: pytest.LogCaptureFixture) -> None:
    short = [prompt.prompt_id for prompt in run if prompt.seq_len < 10]
    assert short

    mine = stream(run, min_tokens=10)

    assert mine.left_out == len(short)
    assert f"{len(short)} prompts of fewer than 10 tokens are left out" in caplog.text
    assert sorted(i for batch in mine for i in batch) == sorted(set(run.prompt_ids) - set(short))
    assert sampled(run, batch_tokens=BUDGET, min_tokens=10).left_out == len(short)


def test_damage_names_the_shard_and_the_row(tmp_path: Path) -> None:
    damaged = build_small_run(str(tmp_path / "run"), lengths=(30, 40, 50, 60, 70))
    run = open_run(damaged.url)
    where = run.segments.where(1, "resid_pre_5")
    damaged.change_byte(where.key, where.offset + 7)

    with pytest.raises(
        HsrayError, match=rf"{where.key}: resid_pre_5 of prompt 'prompt-1' \(row 1, .*while reading row"
    ):
        list(PromptStream(run, batch_tokens=100))

    (tmp_path / "run" / where.key).unlink()
    with pytest.raises(HsrayError, match=rf"{where.key} is missing .*while reading row 1 of "):
        list(PromptStream(run, batch_tokens=100, shuffle=False))


def test_an_epoch_that_is_left_ends_its_threads(run: Run) -> None:
    import threading

    batches = iter(stream(run))
    next(batches)
    assert any(thread.name.startswith("hsray-block") for thread in threading.enumerate())
    batches.close()  # type: ignore[attr-defined]

    assert not any(thread.name.startswith("hsray-block") for thread in threading.enumerate())


def test_the_mean_state_of_an_epoch_is_that_of_the_run(small: SmallRun, run: Run) -> None:
    """An independent sum over what a trainer sees, weights by token."""
    total = torch.zeros(24, dtype=torch.float64)
    for batch in PromptStream(run, ["final_prenorm"], batch_tokens=BUDGET):
        total += batch["final_prenorm"].double().sum((0, 1))

    expected = sum(small.states[row]["final_prenorm"].astype(np.float64).sum(0) for row in small.rows)
    assert np.allclose(total.numpy(), expected)
