"""`python -m tests.loader_checks.speculators_check RUN EXPORT VOCABULARY`: speculators 0.9.0 reads what is exported.

The package's own `__init__` imports every draft model, and transformers for each, which takes half a minute and has no
part in loading: a bare package stands in for it. Everything below it is real.
"""

import importlib.metadata
import importlib.util
import json
import sys
import types
import warnings
from pathlib import Path

import torch

from hsray.reader import open_run

warnings.simplefilter("error", UserWarning)  # "token ids don't match" is only a warning there


def without_init(name: str) -> None:
    spec = importlib.util.find_spec(name)
    assert spec is not None
    package = types.ModuleType(name)
    package.__path__ = list(spec.submodule_search_locations or [])
    sys.modules[name] = package


def main(run_url: str, export: str, vocabulary: str) -> None:
    without_init("speculators")
    from speculators.data_generation.offline import check_hidden_states, find_corrupt_hidden_state_indices
    from speculators.train.data import ArrowDataset, CollateFn
    from speculators.train.vocab_mapping import build_vocab_mappings_from_distribution

    run = open_run(run_url)
    data = ArrowDataset(4096, export, on_missing="raise")
    assert len(data) == len(run)
    assert data.approx_lengths == [run.at(position).seq_len for position in range(len(run))]
    items = [data[position] for position in range(len(data))]
    for position, item in enumerate(items):
        prompt = run.at(position)
        inner = torch.cat([prompt.tensor(site) for site in run.sites[:3]], dim=1)
        assert item["input_ids"].tolist() == prompt.input_ids.tolist()
        assert item["loss_mask"].tolist() == prompt.loss_mask.tolist()
        assert torch.equal(item["hidden_states"].view(torch.int16), inner.view(torch.int16))
        last = item["verifier_last_hidden_states"].contiguous()
        assert torch.equal(last.view(torch.int16), prompt.tensor("final_prenorm").view(torch.int16))
        check_hidden_states(data.transfer.get_cached(position), prompt.input_ids.tolist())
    assert find_corrupt_hidden_state_indices(Path(export) / "hidden_states", list(range(len(run)))) == {}
    batch = CollateFn(4096, run.hidden_size)(items)
    assert batch["hidden_states"].shape == (1, 4096, 3 * run.hidden_size)

    frequencies = torch.load(Path(export) / "token_freq.pt", weights_only=True)
    mapping = torch.load(Path(vocabulary) / "vocab_mapping.pt", weights_only=True)
    d2t, t2d = build_vocab_mappings_from_distribution(frequencies, len(mapping["d2t"]), len(mapping["t2d"]))
    assert torch.equal(d2t, mapping["d2t"])
    assert torch.equal(t2d, mapping["t2d"])
    print(json.dumps({"version": importlib.metadata.version("speculators"), "items": len(items)}))


if __name__ == "__main__":
    main(*sys.argv[1:])
