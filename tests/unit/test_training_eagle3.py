"""The EAGLE-3 batch, against its definition written out token by token."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.numpy import save

from hsray.errors import ConfigError
from hsray.reader import Run, open_run
from hsray.schema import FINAL_NORM_KEY
from hsray.site_storage import SiteStorage
from hsray.training import Eagle3Collate, PromptStream
from tests.small_run import SmallRun, build_small_run

AUX = ["resid_pre_2", "resid_pre_5"]
WEIGHT = np.linspace(0.5, 2.0, 24, dtype=np.float32)


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> SmallRun:
    small = build_small_run(
        str(tmp_path_factory.mktemp("eagle3") / "run"), lengths=(9, 1, 2, 30, 5, 12, 7, 1), dtype="float32"
    )
    small.store.put(FINAL_NORM_KEY, save({"weight": WEIGHT}))
    return small


@pytest.fixture
def run(small: SmallRun) -> Run:
    return open_run(small.url)


def by_prompt(run: Run, collate: Eagle3Collate) -> dict[str, dict[str, Any]]:
    """Each prompt's row of its batch."""
    rows = {}
    for batch in PromptStream(run, batch_tokens=64, collate=collate):
        for number, prompt_id in enumerate(batch["prompt_id"]):
            rows[prompt_id] = {name: value[number] for name, value in batch.items()}
    return rows


def test_every_position_holds_what_the_drafter_sees_and_must_predict(small: SmallRun, run: Run) -> None:
    rows = by_prompt(run, Eagle3Collate(run, AUX))

    assert sorted(rows) == sorted(f"prompt-{row}" for row in small.rows if small.prompts[row].num_tokens > 1)
    for prompt_id, got in rows.items():
        prompt = small.prompts[int(prompt_id.removeprefix("prompt-"))]
        states, n = small.states[prompt.row], prompt.num_tokens
        length = len(got["input_ids"])
        for t in range(length):
            if t > n - 2:
                assert not any(got[name][t].any() for name in got if name != "prompt_id")
                continue
            assert got["attention_mask"][t]
            assert got["position_ids"][t] == t
            assert got["input_ids"][t] == prompt.input_ids[t + 1]
            assert got["loss_mask"][t] == (prompt.loss_mask[t + 2] if t + 2 < n else 0)
            assert np.array_equal(got["hidden_states"][t].numpy(), np.concatenate([states[site][t] for site in AUX]))
            final = states["final_prenorm"][t + 1].astype(np.float64)
            normed = final / np.sqrt((final**2).mean() + 1e-6) * WEIGHT
            assert np.allclose(got["target_hidden"][t].numpy(), normed, rtol=1e-5)


def test_the_order_of_the_sites_is_the_callers(run: Run) -> None:
    one, other = (by_prompt(run, Eagle3Collate(run, aux))["prompt-0"] for aux in (AUX, AUX[::-1]))

    assert torch.equal(one["hidden_states"], other["hidden_states"].roll(24, -1))


def test_gemmas_norm_multiplies_by_one_plus_weight(run: Run) -> None:
    plain = by_prompt(run, Eagle3Collate(run, AUX))["prompt-0"]["target_hidden"]
    run.record["model"]["norm_kind"] = "rms_one_plus"

    shifted = by_prompt(run, Eagle3Collate(run, AUX))["prompt-0"]["target_hidden"]

    assert torch.allclose(shifted, plain * torch.tensor((1 + WEIGHT) / WEIGHT))


def test_states_of_some_tokens_are_enough_where_the_loss_needs_no_more(tmp_path: Path) -> None:
    lengths = (9, 1, 2, 30, 5, 12, 7, 4)
    runs = {}
    for name, storage in {
        "whole": None,
        "some": {
            **dict.fromkeys(AUX, SiteStorage(tokens="through_last_loss")),
            "final_prenorm": SiteStorage(tokens="loss"),
        },
    }.items():
        small = build_small_run(str(tmp_path / name), lengths=lengths, dtype="float32", storage=storage)
        small.store.put(FINAL_NORM_KEY, save({"weight": WEIGHT}))
        runs[name] = open_run(small.url)
    whole, some = (by_prompt(run, Eagle3Collate(run, AUX)) for run in runs.values())

    assert set(whole) == set(some)
    cut = 0
    for prompt_id, got in some.items():
        expected, n = whole[prompt_id], int(got["attention_mask"].sum())
        # All that the loss reads, and all that it attends to.
        assert not expected["loss_mask"][n:].any()
        cut += int(expected["attention_mask"].sum()) - n
        for name in ("hidden_states", "input_ids", "loss_mask", "position_ids"):
            assert torch.equal(got[name][:n], expected[name][:n])
        scored = got["loss_mask"][:n].bool()
        assert torch.equal(got["target_hidden"][:n][scored], expected["target_hidden"][:n][scored])
    assert cut


def test_what_eagle3_cannot_have_is_refused(run: Run, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"takes 3 residual sites, .* has 2"):
        Eagle3Collate(run)
    with pytest.raises(KeyError, match="resid_pre_3: this run has"):
        Eagle3Collate(run, ["resid_pre_3"])
    with pytest.raises(ConfigError, match="prompt 'prompt-1' has one token"):
        list(PromptStream(run, batch_tokens=64, min_tokens=1, collate=Eagle3Collate(run, AUX)))
    bare = open_run(build_small_run(str(tmp_path / "bare"), lengths=(3, 4, 5, 6, 7)).url)
    with pytest.raises(ConfigError, match=r"but no final_norm\.safetensors"):
        Eagle3Collate(bare, AUX)
    loss_only = build_small_run(
        str(tmp_path / "loss"), lengths=(3, 4, 5, 6, 7), storage=dict.fromkeys(AUX, SiteStorage(tokens="loss"))
    )
    loss_only.store.put(FINAL_NORM_KEY, save({"weight": WEIGHT}))
    with pytest.raises(
        ConfigError, match=r"attends to resid_pre_2 of every token .* capture\.tokens: through_last_loss"
    ):
        Eagle3Collate(open_run(loss_only.url), AUX)
    run.sites = tuple(AUX)
    with pytest.raises(ConfigError, match=r"needs the final state, and .* has only resid_pre_2, resid_pre_5"):
        Eagle3Collate(run, AUX)
