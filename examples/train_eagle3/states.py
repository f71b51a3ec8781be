"""Where a drafter's states come from: the run, the run on purpose one token off, or transformers itself.

All three are wrapped around one collate function, so batches hold the same prompts in the same order.
"""

from collections.abc import Callable, Sequence

import torch
from transformers import AutoModelForCausalLM

from hsray.reader import Run
from hsray.training import Eagle3Collate
from hsray.training.collate import Batch
from hsray.training.items import Item

SOURCES = ("hsray", "transformers", "shifted")


class ReplacedStates:
    """A collate function that puts other states into the items before `collate` sees them."""

    def __init__(self, collate: Eagle3Collate, replace: Callable[[Item], Item], *, reads: Sequence[str]) -> None:
        self.collate = collate
        self.replace = replace
        self.sites = tuple(reads)
        self.min_tokens = collate.min_tokens

    def __call__(self, items: Sequence[Item]) -> Batch:
        return self.collate([self.replace(item) for item in items])


class TransformersStates:
    """The sites of `collate`, computed by transformers in float32 from the token ids, and rounded as the run's are.

    Prompts go through the model one by one, without padding. Each is computed once.
    """

    def __init__(self, run: Run, collate: Eagle3Collate) -> None:
        self.model = AutoModelForCausalLM.from_pretrained(run.record["model"]["path"], dtype=torch.float32).eval()
        self.dtype = getattr(torch, run.dtype)
        self.collate = collate
        self.done: dict[str, Item] = {}

    @torch.no_grad()
    def __call__(self, item: Item) -> Item:
        if item["prompt_id"] not in self.done:
            before_norm: list[torch.Tensor] = []
            handle = self.model.model.norm.register_forward_pre_hook(lambda _, args: before_norm.append(args[0]))
            hidden = self.model.model(input_ids=item["input_ids"][None], output_hidden_states=True).hidden_states
            handle.remove()
            # resid_pre_i is the i-th of them; the last is after the final norm.
            states = {site: hidden[int(site.removeprefix("resid_pre_"))] for site in self.collate.aux}
            states[self.collate.final] = before_norm[0] if self.collate.final == "final_prenorm" else hidden[-1]
            self.done[item["prompt_id"]] = {name: state[0].to(self.dtype) for name, state in states.items()}
        return {**item, **self.done[item["prompt_id"]]}


def one_token_late(item: Item, sites: Sequence[str]) -> Item:
    """Every token with the states of the token before it: the error that the comparison has to see."""
    return {**item, **{site: item[site].roll(1, 0) for site in sites}}


def collate_of(source: str, run: Run) -> Eagle3Collate | ReplacedStates:
    """The collate function that takes its states from `source`."""
    collate = Eagle3Collate(run)
    if source == "hsray":
        return collate
    if source == "transformers":
        return ReplacedStates(collate, TransformersStates(run, collate), reads=())
    return ReplacedStates(collate, lambda item: one_token_late(item, collate.aux), reads=collate.sites)
