"""Batches for EAGLE-3 training (arXiv 2503.01840): what the drafter sees and what it must predict, in one row.

At position t of a batch the drafter gets the fused states of token t and the embedding of token t+1, which the target
has already sampled, and predicts what the target predicts after token t+1: token t+2. So with n tokens in a prompt:

    hidden_states[t] = states of token t        (low, mid, high sites side by side)
    input_ids[t]     = token t+1
    target_hidden[t] = final state of token t+1 (after the norm: lm_head gives the distribution of token t+2)
    loss_mask[t]     = loss_mask of token t+2   (0 for t = n-2, whose token t+2 is not in the prompt)
    position_ids[t]  = t                        t = 0 .. n-2

Steps of training-time test after the first shift `input_ids`, `target_hidden` and `loss_mask` left by one more each.

Source of the shift: `dataprepare` and the end of `forward` in `eagle/traineagle3/cnets.py` of SafeAILab/EAGLE, which
SpecForge and others follow: states stay, ids and targets move left by one. Trainers differ in the mask: EAGLE's takes
that of token t, later ones that of token t+1. Ours is that of the token that is predicted, which is what a run's
`loss_mask` means. They differ in the first and last two tokens of each answer.
"""

from collections.abc import Sequence

import torch

from hsray.errors import ConfigError
from hsray.reader import Run
from hsray.site_storage import positions_column
from hsray.sites import FINAL_POSTNORM, FINAL_PRENORM
from hsray.training.collate import Batch, clear, copy_into, empty, length_mask, pad
from hsray.training.items import Item

NUM_AUX = 3


class Eagle3Collate:
    """Makes a batch of items that hold `sites`.

    Args:
        run: gives the sites and the final norm.
        aux: the sites that become `hidden_states`, in this order. Default: all residual sites of the run, which must
            be three.

    Attributes:
        aux: their names.
        final: the site that `target_hidden` comes from. Where a run has only `final_prenorm`, its stored norm is
            applied, in float32.
        sites: all sites that items must have.
        min_tokens: 2; a prompt of one token has nothing to predict.

    Raises:
        ConfigError: the run does not have what EAGLE-3 needs; the message says what.
    """

    min_tokens = 2

    def __init__(self, run: Run, aux: Sequence[str] | None = None) -> None:
        finals = [site for site in (FINAL_POSTNORM, FINAL_PRENORM) if site in run.sites]
        self.aux = tuple(s for s in run.sites if s not in finals) if aux is None else run.known(aux)
        if aux is None and len(self.aux) != NUM_AUX:
            raise ConfigError(
                f"EAGLE-3 takes {NUM_AUX} residual sites, {run.url} has {len(self.aux)} ({', '.join(run.sites)}): "
                "name them, for example Eagle3Collate(run, aux=['resid_pre_2', 'resid_pre_18', 'resid_pre_33'])"
            )
        if not finals:
            raise ConfigError(
                f"EAGLE-3 needs the final state, and {run.url} has only {', '.join(run.sites)}: extract with "
                "capture.sites: eagle3"
            )
        self.final = finals[0]
        self.sites = (*self.aux, self.final)
        for site in self.aux:
            if run.storage[site].tokens == "loss":
                raise ConfigError(
                    f"EAGLE-3 attends to {site} of every token before an answer, and {run.url} has it of the tokens of "
                    "the loss only: extract with capture.tokens: through_last_loss (or all) for residual sites"
                )
        # By site: where the positions of its rows are, if it has not all.
        self._positions = {
            site: positions_column(run.storage[site].tokens) for site in self.sites if run.storage[site].tokens != "all"
        }
        self._weight: torch.Tensor | None = None
        if self.final == FINAL_PRENORM:
            norm = run.final_norm()
            if norm is None:
                raise ConfigError(
                    f"{run.url} has final_prenorm, but no final_norm.safetensors to make final_postnorm of: the "
                    "checkpoint's norm was not found when it was extracted"
                )
            # Gemma's norm multiplies by 1 + weight.
            weight = torch.tensor(norm.weight.astype("float32"))
            self._weight = weight + 1 if norm.kind == "rms_one_plus" else weight
            self._eps = norm.eps

    def __call__(self, items: Sequence[Item]) -> Batch:
        """One batch of B prompts and T = longest prompt - 1 positions, or fewer where the last are not stored.

        Returns:
            `prompt_id`: list of B strings; `hidden_states` `[B, T, len(aux) * hidden_size]` and `target_hidden`
            `[B, T, hidden_size]` in the stored dtype; `input_ids` and `position_ids` int64, `loss_mask` uint8 and
            `attention_mask` bool `[B, T]`. Zero on padding.

        Raises:
            ConfigError: a prompt of one token, which has no position to train on.
        """
        for item in items:
            if len(item["input_ids"]) < self.min_tokens:
                raise ConfigError(
                    f"prompt {item['prompt_id']!r} has one token and nothing to predict: leave it out with min_tokens=2"
                )
        # States that are not stored come after the last position that the loss needs.
        lengths = [min(len(item["input_ids"]) - 1, *(len(item[site]) for site in self.aux)) for item in items]
        length = max(lengths)
        first = items[0][self.aux[0]]
        width = first.shape[1]
        hidden = empty((len(items), length, len(self.aux) * width), first)
        target = empty((len(items), length, width), first)
        for item, n, states, final in zip(items, lengths, hidden, target, strict=True):
            # Aux sites go straight to their place; concatenating first would copy them twice.
            for number, site in enumerate(self.aux):
                copy_into(states[:n, number * width : (number + 1) * width], item[site][:n])
            clear(states[n:])
            self._place_target(final, item, n)
        attention_mask = length_mask(lengths, hidden.device)
        tokens = list(zip(items, lengths, strict=True))
        return {
            "prompt_id": [item["prompt_id"] for item in items],
            "hidden_states": hidden,
            "target_hidden": self._postnorm(target),
            "input_ids": pad([item["input_ids"][1 : n + 1] for item, n in tokens], length),
            "loss_mask": pad([item["loss_mask"][2 : n + 2] for item, n in tokens], length),
            "attention_mask": attention_mask,
            "position_ids": torch.arange(length, device=hidden.device) * attention_mask,
        }

    def _place_target(self, target: torch.Tensor, item: Item, n: int) -> None:
        """The final state of token t+1 at position t, for t below n; zero where there is none."""
        final = item[self.final]
        if self.final not in self._positions:
            copy_into(target[:n], final[1 : n + 1])
            clear(target[n:])
            return
        clear(target)
        positions = item[self._positions[self.final]] - 1
        inside = (positions >= 0) & (positions < n)
        target[positions[inside]] = final[inside]

    def _postnorm(self, state: torch.Tensor) -> torch.Tensor:
        if self._weight is None:
            return state
        if self._weight.device != state.device:
            self._weight = self._weight.to(state.device)
        exact = state.float()
        exact = exact * torch.rsqrt(exact.square().mean(-1, keepdim=True) + self._eps)
        return (exact * self._weight).to(state.dtype)
