"""`python -m tests.loader_checks.specforge_check RUN EAGLE3 DSPARK VOCABULARY`: SpecForge 0.2.0 reads exports."""

import importlib.metadata
import json
import sys
from pathlib import Path
from typing import Any

import ml_dtypes
import torch
from specforge.algorithms.common.dflash_family_data import normalize_dspark_offline_sample
from specforge.algorithms.eagle3.data import normalize_offline_sample
from specforge.core.compact_teacher import validate_vocab_mapping_consistency
from specforge.runtime.data_plane.feature_store import LocalFeatureStore, load_feature_file
from specforge.runtime.data_plane.offline_reader import OfflineManifestReader
from specforge.training.vocab_mapping import count_effective_feature_tokens

from hsray.checkpoint import apply_norm
from hsray.reader import PromptStates, open_run

MAX_LEN = 4096


def bits(tensor: torch.Tensor) -> torch.Tensor:
    assert tensor.dtype == torch.bfloat16
    return tensor.contiguous().view(torch.int16)


def expected(prompt: PromptStates) -> tuple[torch.Tensor, torch.Tensor]:
    """Inner states side by side, and the final one after the norm."""
    inner = torch.cat([prompt.tensor(site) for site in prompt.run.sites[:3]], dim=1)
    norm: Any = prompt.run.final_norm()
    last = apply_norm(prompt["final_prenorm"], norm.weight, norm.eps, norm.kind).astype(ml_dtypes.bfloat16)
    return inner, torch.from_numpy(last.view("int16")).view(torch.bfloat16)


def main(run_url: str, eagle3: str, dspark: str, vocabulary: str) -> None:
    run = open_run(run_url)
    refs = OfflineManifestReader(eagle3, run_id="check", validate_files=True, max_len=MAX_LEN).read()
    store = LocalFeatureStore()
    assert len(refs) == len(run)
    for position, ref in enumerate(refs):
        prompt = run.at(position)
        assert ref.num_tokens == prompt.seq_len
        raw = load_feature_file(ref.feature_store_uri.removeprefix("file://"))
        sample = normalize_offline_sample(raw, MAX_LEN)
        inner, last = expected(prompt)
        assert sample["input_ids"].tolist() == [prompt.input_ids.tolist()]
        mask = prompt.loss_mask.tolist()
        assert sample["loss_mask"].tolist() == [[*mask[:-1], 0]]
        assert torch.equal(bits(sample["hidden_state"]), bits(inner[None]))
        assert torch.equal(bits(sample["target"]), bits(last[None]))
        fetched, _ = store.get(ref)
        assert torch.equal(bits(fetched["aux_hidden_state"]), bits(inner[None]))

    keys = ("input_ids", "loss_mask", "hidden_states", "target_last_hidden_states")
    dspark_refs = OfflineManifestReader(dspark, strategy="dspark", feature_keys=keys, validate_files=True).read()
    positions = [int(Path(ref.feature_store_uri).stem.removeprefix("data_")) for ref in dspark_refs]
    for position, ref in zip(positions, dspark_refs, strict=True):
        sample = normalize_dspark_offline_sample(
            load_feature_file(ref.feature_store_uri.removeprefix("file://")), MAX_LEN
        )
        inner, last = expected(run.at(position))
        assert torch.equal(bits(sample["hidden_states"]), bits(inner[None]))
        assert torch.equal(bits(sample["target_last_hidden_states"]), bits(last[None]))

    mapping = torch.load(Path(vocabulary) / "vocab_mapping.pt", weights_only=True)
    validate_vocab_mapping_consistency(mapping["t2d"], mapping["d2t"])
    counts = count_effective_feature_tokens(eagle3, target_vocab_size=run.record["model"]["vocab_size"])
    assert dict(counts) == torch.load(Path(vocabulary) / "token_freq.pt", weights_only=True)
    seen = {"version": importlib.metadata.version("specforge"), "eagle3": len(refs), "dspark": len(dspark_refs)}
    print(json.dumps({**seen, "left_out": [p for p in range(len(run)) if p not in positions]}))


if __name__ == "__main__":
    main(*sys.argv[1:])
