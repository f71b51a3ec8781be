from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
import yaml
from safetensors.numpy import save_file

from hsray.checkpoint import apply_norm
from hsray.finish import dataset_card, store_final_norm, summarize
from hsray.ledger import Ledger, account
from hsray.plan import load_plan
from hsray.reader import open_run
from hsray.store import open_store
from tests.small_run import build_small_run


def test_the_final_norm_kept_with_the_run_derives_postnorm(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    weight = rng.uniform(0.5, 2, 16).astype(ml_dtypes.bfloat16)
    (tmp_path / "model").mkdir()
    save_file({"model.norm.weight": weight}, tmp_path / "model" / "model.safetensors")
    run = build_small_run(str(tmp_path / "run"))
    store = open_store(run.store.url)

    assert store_final_norm(store, tmp_path / "model", 1e-5, "rms")

    norm = open_run(run.store.url).final_norm()
    assert norm is not None
    assert np.array_equal(norm.weight, weight)
    states = rng.standard_normal((3, 16)).astype(np.float32)
    assert np.isfinite(apply_norm(states, norm.weight, 1e-5, "rms")).all()


def test_a_checkpoint_without_a_norm_is_said_to_have_none(tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()

    assert not store_final_norm(open_store(str(tmp_path / "run")), tmp_path / "model", 1e-5, "rms")


def test_the_summary_adds_up_and_the_card_is_valid(tmp_path: Path) -> None:
    run = build_small_run(str(tmp_path / "run"))
    ledger = Ledger(run.store)
    record = ledger.read_run()
    assert record is not None
    resolutions = ledger.summaries()
    plan = load_plan(run.store, record["plan"])

    summary = summarize(record, account(plan.leases, resolutions), resolutions)
    card = dataset_card(record, summary, run.store.url, ["data/a.parquet", "data/b.parquet"])

    assert summary.committed + summary.rejected + summary.dead + summary.left == summary.rows
    assert summary.left == 0
    front = yaml.safe_load(card.split("---")[1])
    assert {f["name"] for f in front["dataset_info"]["features"]} > {"prompt_id", "input_ids", "resid_pre_2"}
    assert front["configs"][0]["data_files"][0]["path"] == ["data/a.parquet", "data/b.parquet"]


def test_a_run_with_prompts_left_is_not_called_finished(tmp_path: Path) -> None:
    from hsray.finish import finish_run

    run = build_small_run(str(tmp_path / "run"))
    ledger = Ledger(run.store)
    record = ledger.read_run()
    assert record is not None
    plan = load_plan(run.store, record["plan"])
    resolutions = dict(list(ledger.summaries().items())[1:])
    found = account(plan.leases, {})

    with pytest.raises(RuntimeError, match="no outcome"):
        finish_run(run.store, ledger, record, found, resolutions)
