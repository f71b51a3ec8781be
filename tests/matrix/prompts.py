"""The prompts of every case: the same ones, so that a family's reference is computed once."""

import numpy as np

from hsray.records import Prompt
from tests.matrix.cases import AT, BELOW, BUDGET
from tests.tiny_models import VOCAB_SIZE

COUNT = 32
# One token; one less, as many and one more than a step takes; two steps exactly.
EDGE_LENGTHS = (1, BELOW - 1, BELOW, BELOW + 1, BUDGET - 1, BUDGET, BUDGET + 1, AT - 1, AT)
_PREFIX_TOKENS = 100


def matrix_prompts(seed: int = 0) -> list[Prompt]:
    """`COUNT` prompts in random order: the edge lengths, and random ones of 2 to 180 tokens, of which those longer
    than the common prefix all begin with it, as do half of the edges."""
    rng = np.random.default_rng(seed)
    prefix = rng.integers(0, VOCAB_SIZE, _PREFIX_TOKENS)
    lengths = [*EDGE_LENGTHS, *rng.integers(2, 181, COUNT - len(EDGE_LENGTHS)).tolist()]
    prompts = []
    for row, number in enumerate(rng.permutation(COUNT).tolist()):
        ids = rng.integers(0, VOCAB_SIZE, lengths[number])
        if lengths[number] > _PREFIX_TOKENS or number % 2:
            shared = min(_PREFIX_TOKENS, lengths[number] - 1)
            ids[:shared] = prefix[:shared]
        mask = np.ones(len(ids), np.uint8)
        prompts.append(Prompt(row, f"p{row}", ids.astype(np.int32), mask, "matrix", row + 1))
    return prompts


def edge_prompts(prompts: list[Prompt]) -> list[Prompt]:
    """The first prompt of every edge length, shortest first."""
    by_length = {prompt.num_tokens: prompt for prompt in reversed(prompts)}
    return [by_length[length] for length in EDGE_LENGTHS]
