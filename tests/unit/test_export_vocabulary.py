"""Token frequencies and the draft's vocabulary, against the definitions of the tools that read them."""

import json
from collections import Counter
from pathlib import Path

import datasets
import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from hsray.errors import HsrayError
from hsray.export import export_run
from hsray.export import speculators as speculators_format
from hsray.export.vocabulary import map_vocabulary
from hsray.reader import Run, open_run
from hsray.store import open_store
from tests.export_runs import LENGTHS, VOCAB, make_export_run


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> str:
    return make_export_run(tmp_path_factory.mktemp("run"))


def counted(run: Run) -> Counter[int]:
    counts: Counter[int] = Counter()
    for prompt in run.scan([]):
        counts.update(int(i) for i, m in zip(prompt.input_ids, prompt.loss_mask, strict=True) if m)
    return counts


def test_only_loss_tokens_are_counted(url: str, tmp_path: Path) -> None:
    export_run(url, "vocabulary", str(tmp_path))

    assert torch.load(tmp_path / "token_freq.pt", weights_only=True) == dict(counted(open_run(url)))


@pytest.mark.parametrize("size", [1, 60, 400, VOCAB])
def test_the_draft_has_the_most_frequent_tokens(url: str, tmp_path: Path, size: int) -> None:
    export_run(url, "vocabulary", str(tmp_path), draft_vocab_size=size)

    counts = counted(open_run(url))
    expected = sorted(sorted(range(VOCAB), key=lambda token: (-counts[token], token))[:size])
    for mapping in (
        torch.load(tmp_path / "vocab_mapping.pt", weights_only=True),
        {name: torch.from_numpy(np.load(tmp_path / f"{name}-{size}.npy")) for name in ("d2t", "t2d")},
    ):
        d2t, t2d = mapping["d2t"], mapping["t2d"]
        assert (d2t.dtype, t2d.dtype) == (torch.int64, torch.bool)
        assert (d2t + torch.arange(size)).tolist() == expected
        assert torch.nonzero(t2d).flatten().tolist() == expected
        assert len(t2d) == VOCAB
    assert torch.equal(torch.load(tmp_path / "d2t.pt", weights_only=True), d2t)


def test_equally_frequent_tokens_go_by_their_ids() -> None:
    counts = np.array([0, 3, 5, 3, 0, 3])

    found = map_vocabulary(counts, 3)

    assert np.flatnonzero(found.t2d).tolist() == [1, 2, 3]
    assert found.coverage == pytest.approx(11 / 14)
    assert np.flatnonzero(map_vocabulary(counts, 5).t2d).tolist() == [0, 1, 2, 3, 5]
    assert map_vocabulary(np.zeros(4, np.int64), 2).coverage == 0.0


def test_a_token_beyond_the_vocabulary_is_named(tmp_path: Path) -> None:
    url = make_export_run(tmp_path)
    store = open_store(url)
    record = store.get_json("hsray.json")
    record["model"]["vocab_size"] = 400
    store.put("hsray.json", json.dumps(record).encode())

    with pytest.raises(
        HsrayError, match=r"prompt '.*' \(row \d+\) has token 4\d\d, and the model's vocabulary ends at 400"
    ):
        export_run(url, "vocabulary", str(tmp_path / "out"))


@pytest.mark.parametrize("tokens_per_file", [1 << 25, 150])
def test_datasets_reads_what_speculators_gets(
    url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tokens_per_file: int
) -> None:
    monkeypatch.setattr(speculators_format, "_TOKENS_PER_FILE", tokens_per_file)
    monkeypatch.setattr(speculators_format, "_TOKENS_PER_BATCH", 100)
    export_run(url, "speculators", str(tmp_path))
    run = open_run(url)

    data = datasets.load_from_disk(str(tmp_path))

    assert len(list(tmp_path.glob("data-*.arrow"))) == (1 if tokens_per_file > 150 else 5)
    assert len(data) == len(LENGTHS)
    assert data.features["input_ids"] == datasets.List(datasets.Value("int64"))
    for position in range(len(data)):
        prompt, row = run.at(position), data[position]
        assert isinstance(row["input_ids"], torch.Tensor)
        states = load_file(tmp_path / "hidden_states" / f"hs_{position}.safetensors")
        assert torch.equal(row["input_ids"], states["token_ids"])
        assert row["input_ids"].tolist() == prompt.input_ids.tolist()
        assert row["loss_mask"].tolist() == prompt.loss_mask.tolist()
        assert int(row["seq_len"]) == prompt.seq_len
        for number, site in enumerate(run.sites):
            assert torch.equal(states["hidden_states"][:, number], prompt.tensor(site))
    assert torch.load(tmp_path / "token_freq.pt", weights_only=True) == dict(counted(run))
