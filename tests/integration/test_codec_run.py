"""A whole run over Ray with codecs and selected tokens: captured whole, stored as configured, resumed only alike."""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from hsray.codecs import decode_bits, find_codec
from hsray.errors import ExitCode
from hsray.reader import open_run
from hsray.testing import fake_states
from hsray.token_selection import select_positions
from hsray.verify import verify_run
from tests.runs import HIDDEN, Run, ended, make_run, random_rows

STORAGE = {
    "resid_pre_2": ("bf16-hl-zstd", "through_last_loss"),
    "resid_pre_5": ("fp8-token", "all"),
    "final_prenorm": ("none", "loss"),
}


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Run]:
    rows = random_rows(12, seed=3)
    rng = np.random.default_rng(0)
    for row in rows:
        row["loss_mask"] = (rng.random(len(row["input_ids"])) < 0.2).astype(int).tolist()
    rows[4]["loss_mask"] = [0] * len(rows[4]["input_ids"])
    with ended(make_run(tmp_path, rows)) as made:
        made.overrides = [
            "prompts.empty_mask=reject",
            "capture.codec={resid_pre_2: bf16-hl-zstd, resid_post_4: fp8-token}",
            "capture.tokens={resid_pre_2: through_last_loss, final_prenorm: loss}",
        ]
        yield made


def test_a_run_stores_what_was_asked_for(run: Run) -> None:
    assert run.finish() == ExitCode.COMPLETE, run.log()

    assert "resid_pre_5 is stored as fp8-token, tokens all" in run.log()
    _, dead, rejected = run.outcomes()
    assert not dead
    assert rejected >= 1
    reader = open_run(run.url)
    assert {site: (s.codec, s.tokens) for site, s in reader.storage.items()} == STORAGE
    assert "p4" not in reader
    for prompt in reader:
        for site, (codec_name, tokens) in STORAGE.items():
            captured = fake_states(site, prompt.input_ids.tolist(), HIDDEN, "bfloat16").view(np.uint16)
            chosen = np.ascontiguousarray(captured[select_positions(tokens, prompt.loss_mask)])  # type: ignore[arg-type]
            codec = find_codec(codec_name)  # type: ignore[arg-type]
            if codec is not None:
                chosen = decode_bits(codec.name, codec.encode(chosen), *chosen.shape)
            assert prompt[site].tobytes() == chosen.tobytes()
    report = verify_run(run.url, full=True)
    assert report.is_ok, str(report)

    # Complete: the same command says so; another codec or selection would make another run.
    assert run.finish(name="again") == ExitCode.COMPLETE
    assert run.finish("capture.codec=none", name="codec") == ExitCode.CONFIG
    assert "capture.codec" in run.log("codec")
    assert run.finish("capture.tokens=loss", name="tokens") == ExitCode.CONFIG
    assert "capture.tokens" in run.log("tokens")
