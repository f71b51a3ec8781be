"""A finished run with everything an export may ask for: three inner sites, a final one, its norm, hostile names."""

import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt
from safetensors.numpy import save_file

from hsray.checkpoint import read_facts
from hsray.finish import finish_run, store_final_norm
from hsray.ledger import Ledger
from hsray.plan import build_plan, load_plan, read_lease_prompts
from hsray.records import Prompt, Resolution
from hsray.schema import ENGINE_KEY, bytes_per_token, shard_metadata
from hsray.shard import ShardRow, write_shard
from hsray.sites import resolve_sites
from hsray.store import Store, open_store

INNER = ("resid_pre_2", "resid_pre_4", "resid_pre_5")
HIDDEN, LAYERS, VOCAB = 24, 8, 500
LENGTHS = (5, 1, 130, 64, 17, 300, 33, 2, 40, 6, 9, 77)
# A path, a drive, a null, nothing to see, something long, and names that would collide in a folder.
HOSTILE = ("../../etc/passwd", "/abs", "a\0b", " ", "x" * 300, "C:\\x", "é/ü", "..", "con", "a.pt", "data_0", "a#1")
DTYPES: dict[str, Any] = {"bfloat16": ml_dtypes.bfloat16, "float16": np.float16, "float32": np.float32}


def make_model(folder: Path, *, norm: bool = True) -> Path:
    """A model directory that says what a run must know of a model, with a final norm."""
    folder.mkdir(parents=True, exist_ok=True)
    config = {
        "architectures": ["FakeModel"],
        "model_type": "fake",
        "num_hidden_layers": LAYERS,
        "hidden_size": HIDDEN,
        "vocab_size": VOCAB,
        "max_position_embeddings": 4096,
        "rms_norm_eps": 1e-5,
    }
    (folder / "config.json").write_text(json.dumps(config))
    weight = np.random.default_rng(3).uniform(0.5, 2.0, HIDDEN).astype(np.float32)
    save_file({"model.norm.weight" if norm else "other": weight}, folder / "model.safetensors")
    return folder


def make_export_run(
    folder: Path,
    *,
    sites: Sequence[str] = (*INNER, "final_prenorm"),
    lengths: Sequence[int] = LENGTHS,
    names: Sequence[str] = HOSTILE,
    dtype: str = "bfloat16",
    norm: bool = True,
    proven: bool = True,
    url: str | None = None,
    finish: bool = True,
) -> str:
    """Returns the run's URL. Its model directory is `folder/model`."""
    store = open_store(url or str(folder / "run"))
    model = make_model(folder / "model", norm=norm)
    facts = read_facts(model)
    resolved = resolve_sites(list(sites), facts.num_layers)
    rng = np.random.default_rng(1)
    prompts = [
        Prompt(
            row,
            names[row] if row < len(names) else f"p{row}",
            rng.integers(0, VOCAB, length, dtype=np.int32),
            rng.integers(0, 2, length, dtype=np.uint8),
            "prompts.jsonl",
            row + 1,
        )
        for row, length in enumerate(lengths)
    ]
    plan = build_plan(
        prompts,
        store,
        bytes_per_token=bytes_per_token(len(resolved), facts.hidden_size, dtype),
        shard_bytes=1 << 40,
        max_lease_prompts=5,
    )
    record = {
        "format_version": 1,
        "run_id": "exported",
        "created": "2026-01-01T00:00:00+00:00",
        "hsray_version": "0",
        "fingerprint": {"hash": "0", "parts": {}},
        "config": {"model": {"path": str(model), "trust_remote_code": False}, "engine": {"args": {}}},
        "model": {**asdict(facts), "path": str(model)},
        "sites": [
            {"name": s.name, "index": s.index, "norm": s.norm, "huggingface": s.huggingface, "meaning": s.meaning}
            for s in resolved
        ],
        "dtype": dtype,
        "codec": "none",
        "plan": plan,
    }
    Ledger(store).create_run(record)
    store_final_norm(store, model, facts.norm_eps, facts.norm_kind)
    if proven:
        passed = ["norm(final_prenorm) equals final_postnorm"]
        store.create_once(ENGINE_KEY, {"engine": {}, "self_test": {"passed": passed, "skipped": []}})
    _commit(store, record, load_plan(store, plan), [s.name for s in resolved], dtype)
    if finish:
        loaded = load_plan(store, plan)
        found, accounting = Ledger(store).account(loaded.leases)
        finish_run(store, Ledger(store), record, accounting, found)
    return store.url


def states_of(row: int, site: str, length: int, dtype: str) -> npt.NDArray[Any]:
    rng = np.random.default_rng((7, row, *site.encode()))
    return (rng.standard_normal((length, HIDDEN)) * 3).astype(DTYPES[dtype])


def _commit(store: Store, record: dict[str, Any], plan: Any, sites: Sequence[str], dtype: str) -> None:
    metadata = shard_metadata(
        sites=resolve_sites(list(sites), LAYERS), hidden_size=HIDDEN, dtype=dtype, run_id="exported", model="model"
    )
    for lease in plan.leases:
        prompts = read_lease_prompts(store, plan.refs[lease.lease_id], lease.rows)
        rows = [ShardRow(p, {s: states_of(p.row, s, p.num_tokens, dtype) for s in sites}) for p in prompts]
        shard = write_shard(
            store,
            f"data/{lease.lease_id}-a1-0.parquet",
            rows,
            sites=list(sites),
            hidden_size=HIDDEN,
            dtype=dtype,
            metadata=metadata,
        )
        Ledger(store).resolve(Resolution("commit", lease.lease_id, "a1", "replica", (shard,)))
