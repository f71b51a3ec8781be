"""The example trains, and its comparison sees what it is there to see. A tiny model, seconds."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.numpy import save
from transformers import LlamaConfig, LlamaForCausalLM

from hsray.records import Prompt
from hsray.sites import resolve_sites
from tests import small_run

ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "examples/train_eagle3"
HIDDEN, LAYERS, VOCAB = 32, 8, 61
LENGTHS = (24,) * 62


def make_prompt(row: int, num_tokens: int) -> Prompt:
    """Text that can be learned by heart: 22 different prompts, held-out ones among those that are trained on."""
    start, step = row % 11, 3 + 4 * (row % 2)
    ids = (start + step * np.arange(num_tokens)) % VOCAB
    mask = (np.arange(num_tokens) >= 6).astype(np.uint8)
    return Prompt(row, f"prompt-{row}", ids.astype(np.int32), mask, "prompts.jsonl", row + 1)


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A run of what a random little model makes of such text."""
    folder = tmp_path_factory.mktemp("train")
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=HIDDEN,
        intermediate_size=48,
        num_hidden_layers=LAYERS,
        num_attention_heads=4,
        num_key_value_heads=4,
        initializer_range=0.2,
        rms_norm_eps=1e-6,
        tie_word_embeddings=False,
    )
    model = LlamaForCausalLM(config).eval()
    model.save_pretrained(folder / "model")
    sites = resolve_sites("eagle3", LAYERS)
    names = [site.name for site in sites]

    def make_states(row: int, num_tokens: int, hidden_size: int, dtype: str) -> dict[str, Any]:
        ids = torch.from_numpy(make_prompt(row, num_tokens).input_ids.astype(np.int64))
        seen = []
        handle = model.model.norm.register_forward_pre_hook(lambda _, args: seen.append(args[0]))
        with torch.no_grad():
            states = model.model(ids[None], output_hidden_states=True).hidden_states
        handle.remove()
        found = {site.name: seen[0] if site.is_final else states[site.index] for site in sites}
        return {name: state[0].numpy().astype(small_run.DTYPES[dtype]) for name, state in found.items()}

    with pytest.MonkeyPatch.context() as patch:
        for name, value in {
            "SITES": sites,
            "SITE_NAMES": names,
            "make_prompt": make_prompt,
            "make_states": make_states,
        }.items():
            patch.setattr(small_run, name, value)
        small = small_run.build_small_run(str(folder / "run"), lengths=LENGTHS, hidden_size=HIDDEN)
        weight = model.model.norm.weight.detach().numpy()
        small.store.put("final_norm.safetensors", save({"weight": weight}))
        record = {**small.record, "model": {**small.record["model"], "path": str(folder / "model")}}
        small.overwrite("hsray.json", record)
    return small.url


def test_a_drafter_learns_and_a_run_is_as_good_as_transformers(url: str) -> None:
    command = [sys.executable, str(EXAMPLE / "train.py"), url, "--json", "--seeds", "1", "--epochs", "12"]
    command += ["--batch-tokens", "192", "--draft-vocab", "60", "--lr", "1e-2", "--sources", "hsray", "transformers"]
    env = {**os.environ, "PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}

    done = subprocess.run(command, env=env, capture_output=True, text=True, check=False)

    assert done.returncode == 0, done.stderr
    results = json.loads(done.stdout)
    assert set(results) == {"hsray", "transformers"}
    # One of 61 tokens by chance.
    assert results["hsray"][0][0] > 0.3
    assert results["hsray"][0][1] > 0.3
    # The run's states are those of transformers, to a rounding of its kernels.
    assert results["hsray"][0] == pytest.approx(results["transformers"][0], abs=0.03)


def test_the_collate_functions_of_the_example_differ_in_the_states_alone(
    url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(EXAMPLE))
    from states import collate_of

    from hsray.reader import open_run
    from hsray.training import PromptStream

    run = open_run(url)
    batches = {
        source: list(PromptStream(run, batch_tokens=192, collate=collate_of(source, run)))
        for source in ("hsray", "transformers", "shifted")
    }

    for ours, theirs, late in zip(*batches.values(), strict=True):
        assert ours["prompt_id"] == theirs["prompt_id"] == late["prompt_id"]
        for name in ("input_ids", "loss_mask", "attention_mask", "position_ids"):
            assert torch.equal(ours[name], theirs[name])
        for name in ("hidden_states", "target_hidden"):
            torch.testing.assert_close(ours[name], theirs[name], rtol=0.02, atol=0.02)
        assert torch.equal(late["hidden_states"][:, 1:], ours["hidden_states"][:, :-1])
        assert torch.equal(late["target_hidden"], ours["target_hidden"])


def test_a_later_step_sees_only_what_a_drafter_would_have(monkeypatch: pytest.MonkeyPatch) -> None:
    """At step k, position t may depend on states up to t and on tokens up to t+1+k, and on nothing after."""
    monkeypatch.syspath_prepend(str(EXAMPLE))
    from drafter import Drafter

    torch.manual_seed(0)
    drafter = Drafter(torch.randn(50, 16), torch.arange(20), heads=2)
    states, ids = torch.randn(1, 10, 48), torch.randint(0, 50, (1, 10))
    mask = torch.ones(1, 10, dtype=torch.bool)
    before = drafter(states, ids, mask, 3)
    later_states, later_ids = states.clone(), ids.clone()
    later_states[:, 6:] += 1
    later_ids[:, 8:] = (later_ids[:, 8:] + 1) % 50

    after = drafter(later_states, later_ids, mask, 3)

    # Of position 5, step 2 reads token 5+1+2, which is ids[7]: the last one that is the same.
    for step in range(3):
        assert torch.allclose(before[step][:, :6], after[step][:, :6], atol=1e-6)
        assert not torch.allclose(before[step][:, 6:], after[step][:, 6:], atol=1e-6)
    earlier = states.clone()
    earlier[:, 2] += 1
    assert not torch.allclose(drafter(earlier, ids, mask, 3)[2][:, 5], before[2][:, 5], atol=1e-6)
