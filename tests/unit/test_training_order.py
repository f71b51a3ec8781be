"""The order of prompts: everybody works out the same one, and each prompt is in it once."""

import itertools
import random
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from hsray.training.order import (
    BatchOrder,
    Positions,
    Uneven,
    cut_blocks,
    deal,
    fitting_block_bytes,
    quotas,
    split_taken,
)

LENGTHS = st.lists(st.integers(1, 50), min_size=1, max_size=60)


def blocks_of(lengths: Sequence[int], block_bytes: int = 100) -> tuple[list[Positions], Any]:
    tokens = np.array(lengths, np.int64)
    return cut_blocks(np.arange(len(lengths)), tokens * 10, block_bytes), tokens


def batches_of(order: BatchOrder) -> list[list[int]]:
    return list(iter(order.next_batch, None))


def make_order(
    lengths: Sequence[int], *, seed: str | None, batch_tokens: int = 60, pool_bytes: int = 900
) -> BatchOrder:
    blocks, tokens = blocks_of(lengths)
    return BatchOrder(blocks, tokens, tokens * 10, batch_tokens=batch_tokens, pool_bytes=pool_bytes, seed=seed)


def turns(counts: Sequence[int]) -> Iterator[int]:
    """Workers in the order in which a DataLoader asks them, by asking them."""
    left = list(counts)
    for worker in itertools.cycle(range(len(counts))):
        if not any(left):
            return
        if left[worker]:
            left[worker] -= 1
            yield worker


@given(LENGTHS, st.integers(1, 2000))
def test_blocks_are_neighbours_within_bounds(lengths: list[int], block_bytes: int) -> None:
    blocks, tokens = blocks_of(lengths, block_bytes)

    assert [p for block in blocks for p in block.tolist()] == list(range(len(lengths)))
    for block, following in itertools.pairwise(blocks):
        assert len(block) == 1 or tokens[block].sum() * 10 <= block_bytes
        assert (tokens[block].sum() + tokens[following[0]]) * 10 > block_bytes


@given(LENGTHS, st.integers(1, 9))
def test_readers_get_every_block_once_and_about_equally_many_tokens(lengths: list[int], readers: int) -> None:
    blocks, tokens = blocks_of(lengths)

    streams = deal(blocks, tokens, readers)

    assert sorted(p for stream in streams for block in stream for p in block.tolist()) == list(range(len(lengths)))
    loads = [sum(int(tokens[block].sum()) for block in stream) for stream in streams]
    assert max(loads) - min(loads) <= max(int(tokens[block].sum()) for block in blocks)


@given(LENGTHS, st.sampled_from([None, "0 0 0", "1 0 0"]), st.integers(0, 2000))
def test_a_stream_holds_every_prompt_once_in_batches_that_fit(
    lengths: list[int], seed: str | None, pool_bytes: int
) -> None:
    batches = batches_of(make_order(lengths, seed=seed, pool_bytes=pool_bytes))

    assert sorted(p for batch in batches for p in batch) == list(range(len(lengths)))
    assert all(len(batch) * max(lengths[p] for p in batch) <= 60 for batch in batches)


@given(LENGTHS)
def test_without_a_seed_the_order_is_kept_and_batches_are_full(lengths: list[int]) -> None:
    batches = batches_of(make_order(lengths, seed=None))

    assert [p for batch in batches for p in batch] == list(range(len(lengths)))
    for batch, following in itertools.pairwise(batches):
        assert (len(batch) + 1) * max(lengths[p] for p in [*batch, following[0]]) > 60


@given(LENGTHS, st.sampled_from([None, "7"]), st.integers(0, 40))
def test_an_order_that_skips_goes_on_as_one_that_did_not(lengths: list[int], seed: str | None, count: int) -> None:
    whole = batches_of(make_order(lengths, seed=seed))
    order = make_order(lengths, seed=seed)

    assert order.skip(count) == min(count, len(whole))
    held, read = set(order.held), {p for block in order.blocks[: order.num_read] for p in block.tolist()}
    assert held == read - {p for batch in whole[:count] for p in batch}
    assert batches_of(order) == whole[count:]


def test_the_pool_never_holds_more_than_its_bytes_and_one_block() -> None:
    lengths = random.Random(0).choices(range(1, 40), k=500)
    order = make_order(lengths, seed="3", pool_bytes=2000)

    while order.next_batch() is not None:
        assert sum(lengths[p] * 10 for p in order.held) <= 2000


def test_seeds_differ_and_batches_waste_little_padding() -> None:
    lengths = random.Random(0).choices(range(10, 1000), k=2000)
    orders = {
        seed: batches_of(make_order(lengths, seed=seed, batch_tokens=8000, pool_bytes=2_000_000)) for seed in ("0", "1")
    }

    assert orders["0"] != orders["1"]
    padded = sum(len(batch) * max(lengths[p] for p in batch) for batch in orders["0"])
    assert sum(lengths) / padded > 0.9
    # Neighbours on the disk are apart, and short batches do not come first.
    firsts = [np.mean([lengths[p] for p in batch]) for batch in orders["0"]]
    assert abs(np.corrcoef(firsts[:-1], firsts[1:])[0, 1]) < 0.3


@given(st.lists(st.integers(0, 6), min_size=1, max_size=5), st.data())
def test_what_workers_have_given_follows_from_how_much_a_loader_has(counts: list[int], data: st.DataObject) -> None:
    order = list(turns(counts))
    taken = data.draw(st.integers(0, len(order)))

    given_out, turn = split_taken(counts, taken)

    assert given_out == [order[:taken].count(worker) for worker in range(len(counts))]
    if taken < len(order):
        assert turn == order[taken]


@given(st.lists(st.lists(st.integers(1, 9), min_size=2, max_size=2), min_size=1, max_size=4))
def test_uneven_ranks_are_made_even(counts: list[list[int]]) -> None:
    totals = [sum(workers) for workers in counts]
    policies: list[tuple[Uneven, set[int]]] = [
        ("keep", set(totals)),
        ("drop", {min(totals)}),
        ("repeat", {max(totals)}),
    ]
    for uneven, expected in policies:
        assert {sum(workers) for workers in quotas(counts, uneven)} == expected
    for workers, dropped in zip(counts, quotas(counts, "drop"), strict=True):
        assert dropped == [list(turns(workers))[: min(totals)].count(w) for w in range(2)]
    for workers, repeated in zip(counts, quotas(counts, "repeat"), strict=True):
        assert all(more >= count for more, count in zip(repeated, workers, strict=True))


@settings(max_examples=20)
@given(st.integers(0, 10**13), st.integers(1, 1000))
def test_small_runs_have_small_blocks(total: int, readers: int) -> None:
    assert 1 <= fitting_block_bytes(total, readers, 1 << 24) <= max(1, min(1 << 24, total // readers))
