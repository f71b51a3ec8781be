#!/usr/bin/env python3
"""Trains EAGLE-3 style drafters on a run, and on what transformers computes for the same prompts, and compares them.

    python -m hsray.extract                                         # makes ./hsray-quickstart, once
    python examples/train_eagle3/train.py hsray-quickstart          # nine drafters, some six CPU minutes each
    python examples/train_eagle3/train.py URL --sources hsray --seeds 1 --epochs 10 --device cuda \\
        --max-tokens 4096 --batch-tokens 32768 --draft-vocab 32000

README.md beside this file tells what the figures mean.
"""

import argparse
import json
import statistics
import sys
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))

import torch
import torch.nn.functional as F
from drafter import Drafter
from safetensors import safe_open
from states import SOURCES, collate_of
from torch import Tensor

from hsray.reader import Run, open_run
from hsray.training import Loader, PromptStream

STEPS = 2
HELD_OUT_EVERY = 5
# Later steps count less (EAGLE's training code).
STEP_WEIGHT = 0.8


def split(run: Run) -> tuple[list[int], list[int]]:
    """Positions to train on and to hold out; those with nothing to learn are in neither."""
    usable = [p for p in range(len(run)) if run.at(p).loss_mask[2:].any()]
    return [p for n, p in enumerate(usable) if n % HELD_OUT_EVERY], usable[::HELD_OUT_EVERY]


def draft_vocabulary(run: Run, positions: list[int], size: int) -> Tensor:
    """The tokens that answers of the training split use most, ascending."""
    counts: Counter[int] = Counter()
    for position in positions:
        prompt = run.at(position)
        counts.update(prompt.input_ids[prompt.loss_mask == 1].tolist())
    return torch.tensor(sorted(token for token, _ in counts.most_common(size)))


def target_matrices(run: Run) -> tuple[Tensor, Tensor]:
    """The target's embedding and lm_head, `[vocab, hidden]` each, from its checkpoint."""
    found = {}
    for path in sorted(Path(run.record["model"]["path"]).glob("*.safetensors")):
        with safe_open(path, "pt") as file:
            for name in ("model.embed_tokens.weight", "lm_head.weight"):
                if name in file.keys():  # noqa: SIM118 - not a mapping
                    found[name] = file.get_tensor(name).float()
    embedding = found["model.embed_tokens.weight"]
    return embedding, found.get("lm_head.weight", embedding)


class Teacher:
    """What the target predicts, from `target_hidden` and the target's lm_head."""

    def __init__(self, lm_head: Tensor, draft_vocab: Tensor) -> None:
        self.lm_head = lm_head
        self.draft_vocab = draft_vocab
        self.known = torch.zeros(len(lm_head), dtype=torch.bool, device=lm_head.device)
        self.known[draft_vocab] = True

    @torch.no_grad()
    def __call__(self, batch: dict[str, Any]) -> tuple[Tensor, Tensor]:
        """At the N positions of a batch that have a loss, row by row: the most likely token, int64 `[N]`, and the
        probabilities of the tokens that can be drafted, `[N, draft vocab]`."""
        logits = batch["target_hidden"][batch["loss_mask"].bool()].float() @ self.lm_head.T
        return logits.argmax(-1), logits[:, self.draft_vocab].softmax(-1)


def scored(batch: dict[str, Any], step: int) -> tuple[Tensor, Tensor]:
    """Which positions step `step` is scored at, bool `[B, T]`: what it drafts there is what step 0 drafts `step`
    positions later. And, of the N positions that have a loss, which ones these are, bool `[N]`."""
    has_loss = batch["loss_mask"].bool()
    late_enough = torch.arange(has_loss.shape[1], device=has_loss.device) >= step
    return F.pad(has_loss[:, step:], (0, step)), late_enough.expand_as(has_loss)[has_loss]


def training_loss(drafter: Drafter, teacher: Teacher, batch: dict[str, Any]) -> Tensor:
    """Cross entropy against the target's probabilities, where the drafter can draft the most likely token."""
    best, probabilities = teacher(batch)
    logits = drafter(batch["hidden_states"], batch["input_ids"], batch["attention_mask"], STEPS)
    loss = logits[0].new_zeros(())
    for step, predicted in enumerate(logits):
        at, chosen = scored(batch, step)
        cross_entropy = -(probabilities[chosen] * predicted[at].log_softmax(-1)).sum(-1)
        loss = loss + STEP_WEIGHT**step * (cross_entropy * teacher.known[best[chosen]]).sum() / max(1, len(best))
    return loss


@torch.no_grad()
def accuracies(drafter: Drafter, teacher: Teacher, batches: Iterator[dict[str, Any]]) -> tuple[float, float]:
    """How often step 0 drafts the token that the target would; and step 1, where step 0 did.

    A token outside the draft vocabulary counts as missed.
    """
    hits = [0, 0]
    asked = [0, 0]
    for batch in batches:
        best, _ = teacher(batch)
        predicted = drafter(batch["hidden_states"], batch["input_ids"], batch["attention_mask"], STEPS)
        was_right = torch.ones_like(batch["attention_mask"])
        for step in range(STEPS):
            at, chosen = scored(batch, step)
            right = torch.zeros_like(was_right)
            right[at] = drafter.draft_vocab[predicted[step][at].argmax(-1)] == best[chosen]
            hits[step] += int((right & was_right).sum())
            asked[step] += int((at & was_right).sum())
            was_right &= right
    return hits[0] / max(1, asked[0]), hits[1] / max(1, asked[1])


def train(run: Run, collate: Any, seed: int, options: argparse.Namespace) -> tuple[float, float]:
    """Train one drafter and return its two accuracies on the held-out prompts."""
    torch.manual_seed(seed)
    train_on, hold_out = split(run)
    device = torch.device(options.device)
    embedding, lm_head = (matrix.to(device) for matrix in target_matrices(run))
    vocabulary = draft_vocabulary(run, train_on, options.draft_vocab).to(device)
    drafter, teacher = Drafter(embedding, vocabulary).to(device), Teacher(lm_head, vocabulary)

    def loader(positions: list[int], **more: Any) -> Loader:
        stream = PromptStream(
            run,
            positions=positions,
            collate=collate,
            batch_tokens=options.batch_tokens,
            max_tokens=options.max_tokens,
            seed=seed,
            device=None if device.type == "cpu" else device,
            **more,
        )
        return Loader(stream)

    batches = loader(train_on)
    total = options.epochs * len(batches)
    optimizer = torch.optim.AdamW(drafter.parameters(), lr=options.lr, weight_decay=0.0)
    schedule = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, options.lr, total_steps=total + total // 5 + 9, pct_start=0.1
    )
    for _ in range(options.epochs):
        for batch in batches:
            optimizer.zero_grad(set_to_none=True)
            training_loss(drafter, teacher, batch).backward()
            torch.nn.utils.clip_grad_norm_(drafter.parameters(), 1.0)
            optimizer.step()
            schedule.step()
    return accuracies(drafter.eval(), teacher, iter(loader(hold_out, shuffle=False)))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", help="URL of a run with three residual sites and a final one")
    parser.add_argument("--sources", nargs="+", choices=SOURCES, default=SOURCES, help="where states come from")
    parser.add_argument("--seeds", type=int, default=3, help="drafters per source")
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--batch-tokens", type=int, default=512)
    parser.add_argument("--max-tokens", type=int, default=128, help="tokens of a prompt that are used")
    parser.add_argument("--draft-vocab", type=int, default=1024)
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--json", action="store_true", help="one JSON object instead of a table")
    options = parser.parse_args()
    run = open_run(options.run)
    results: dict[str, list[tuple[float, float]]] = {}
    for source in options.sources:
        collate = collate_of(source, run)
        for seed in range(options.seeds):
            started = time.monotonic()
            results.setdefault(source, []).append(train(run, collate, seed, options))
            step0, step1 = results[source][-1]
            print(
                f"{source} seed {seed}: step 0 {step0:.4f}, step 1 given step 0 {step1:.4f} "
                f"({time.monotonic() - started:.0f} s)",
                file=sys.stderr,
                flush=True,
            )
    if options.json:
        print(json.dumps(results))
        return
    print(f"{'states from':14} {'step 0':>16} {'step 1 | step 0':>18}   mean ± standard deviation of the seeds")
    for source, pairs in results.items():
        cells = []
        for values in zip(*pairs, strict=True):
            deviation = statistics.stdev(values) if len(values) > 1 else 0.0
            cells.append(f"{statistics.mean(values):.4f} ± {deviation:.4f}")
        print(f"{source:14} {cells[0]:>16} {cells[1]:>18}")


if __name__ == "__main__":
    main()
