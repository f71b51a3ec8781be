"""What `--codec-report` says of codecs, and parity of sites that a codec has changed."""

import json
from pathlib import Path
from typing import Any, ClassVar

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import save_file

from hsray.errors import ConfigError
from hsray.finish import store_final_norm
from hsray.reader import open_run
from hsray.site_storage import CODECS, SiteStorage, Storage
from hsray.verify import check_parity, measure_codecs, verify_run
from hsray.verify import codec_report as module
from hsray.verify import parity as parity_module
from hsray.verify.__main__ import main
from tests.small_run import SITE_NAMES, SmallRun, build_small_run

HIDDEN = 128
LENGTHS = (40, 300, 5, 64, 20)


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A directory with what the report reads of a model: lm_head and the final norm."""
    folder = tmp_path / "model"
    folder.mkdir()
    rng = np.random.default_rng(0)
    head = rng.standard_normal((500, HIDDEN)).astype(np.float32)
    save_file({"lm_head.weight": head, "model.norm.weight": np.ones(HIDDEN, np.float32)}, folder / "m.safetensors")
    return folder


def make_run(path: Path, model: Path | str, storage: Storage | None = None, **options: Any) -> SmallRun:
    config = {"model": {"path": str(model), "trust_remote_code": False}, "engine": {"args": {}}}
    small = build_small_run(str(path), lengths=LENGTHS, hidden_size=HIDDEN, config=config, storage=storage, **options)
    if isinstance(model, Path):
        store_final_norm(small.store, model, 1e-6, "rms")
    small.store.create_once("engine.json", {"engine": {"engine_dtype": "bfloat16"}})
    return small


def test_every_codec_is_measured_on_every_site(tmp_path: Path, model: Path) -> None:
    small = make_run(tmp_path / "run", model, {"resid_pre_2": SiteStorage("bf16-hl-zstd")})

    errors = {(e.site, e.codec): e for e in measure_codecs(open_run(small.url))}

    assert set(errors) == {(site, codec) for site in SITE_NAMES for codec in CODECS if codec != "none"}
    for (site, codec), error in errors.items():
        # 256 of the longest prompt, and all of the others; one prompt is dead.
        assert error.num_rows == sum(min(256, small.prompts[row].num_tokens) for row in small.rows)
        assert error.basis == "as stored"
        assert error.is_stored == ((site, codec) == ("resid_pre_2", "bf16-hl-zstd"))
        assert (error.top1 is not None) == (site == "final_prenorm")
        if codec == "bf16-hl-zstd":
            assert (error.relative, error.relative_rest, error.min_cosine) == (0, 0, pytest.approx(1, abs=1e-12))
        else:
            low, high = {"fp8-token": (0.02, 0.03), "int8-block64-outlier4": (0.002, 0.01)}[codec]
            assert low < error.relative < high
            assert error.relative == pytest.approx(error.relative_rest, rel=0.2)
            assert 0.999 < error.min_cosine < 1
    assert errors["final_prenorm", "bf16-hl-zstd"].top1 == 1
    assert 0.8 < errors["final_prenorm", "fp8-token"].top1 < 1  # type: ignore[operator]
    assert errors["resid_pre_5", "fp8-token"].size == pytest.approx((HIDDEN + 4) / (2 * HIDDEN))


def test_massive_channels_do_not_hide_the_error_of_the_rest() -> None:
    rng = np.random.default_rng(0)
    values = rng.standard_normal((200, HIDDEN)).astype(np.float32)
    values[:, [3, 70]] = 5000
    bits = values.astype(ml_dtypes.bfloat16).view(np.uint16)

    class Stored:
        storage: ClassVar = {"s": SiteStorage()}

    errors = {e.codec: e for e in module._measure(Stored(), "s", bits, "", None)}  # type: ignore[arg-type]

    assert errors["fp8-token"].relative < 1e-4
    assert 0.02 < errors["fp8-token"].relative_rest < 0.04
    assert errors["int8-block64-outlier4"].relative_rest < 0.01


def test_a_lossy_site_is_measured_on_states_that_transformers_recomputes(
    tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    small = make_run(tmp_path / "run", model, {"resid_pre_5": SiteStorage("fp8-token", "loss")})
    by_ids = {p.input_ids.tobytes(): p.row for p in small.prompts.values()}

    def reference(_directory: Path, prompts: Any, sites: Any, dtype: str, **_options: Any) -> Any:
        assert [site["name"] for site in sites] == ["resid_pre_5"]
        assert dtype == "bfloat16"
        rows = [by_ids[ids.tobytes()] for ids in prompts]
        return [{"resid_pre_5": small.states[row]["resid_pre_5"].astype(np.float32)} for row in rows]

    monkeypatch.setattr(module, "reference_states", reference)

    errors = [e for e in measure_codecs(open_run(small.url)) if e.site == "resid_pre_5"]

    assert all(e.basis.startswith("recomputed with transformers in bfloat16") for e in errors)
    assert [e.codec for e in errors if e.is_stored] == ["fp8-token"]
    assert next(e for e in errors if e.codec == "bf16-hl-zstd").relative == 0
    assert 0.02 < next(e for e in errors if e.codec == "fp8-token").relative < 0.03


def test_without_the_model_there_is_no_top_1_and_a_lossy_site_is_refused(tmp_path: Path) -> None:
    lossless = make_run(tmp_path / "one", "nowhere")
    lossy = make_run(tmp_path / "two", "nowhere", {"resid_pre_5": SiteStorage("fp8-token")})

    assert {e.top1 for e in measure_codecs(open_run(lossless.url))} == {None}
    with pytest.raises(ConfigError, match="--model: nowhere is not a directory"):
        measure_codecs(open_run(lossy.url))
    with pytest.raises(ConfigError, match="--model: elsewhere is not a directory"):
        measure_codecs(open_run(lossless.url), model_path="elsewhere")


def test_a_run_of_another_dtype_has_no_codecs(tmp_path: Path) -> None:
    small = make_run(tmp_path / "run", "nowhere", dtype="float32")

    with pytest.raises(ConfigError, match="codecs are for bfloat16 states, this run has float32"):
        verify_run(small.url, codec_report=True)


def test_the_command_prints_a_table_and_json(tmp_path: Path, model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    small = make_run(tmp_path / "run", model, {"resid_pre_2": SiteStorage("bf16-hl-zstd")})

    assert main([small.url, "--codec-report"]) == 0
    text = capsys.readouterr().out
    assert main([small.url, "--codec-report", "--json"]) == 0
    figures = json.loads(capsys.readouterr().out)

    assert "but top 4" in text
    (line,) = [line for line in text.splitlines() if "bf16-hl-zstd *" in line]
    assert line.split()[0] == "resid_pre_2"
    assert len(figures["codecs"]) == 9
    assert figures["codecs"][0]["site"] == "resid_pre_2"


@pytest.mark.parametrize(
    ("spoil", "ok"),
    [
        pytest.param(lambda states: states, True, id="right"),
        pytest.param(lambda states: np.roll(states, 1, axis=0), False, id="token-off-by-one"),
        pytest.param(lambda states: states * 1.06, False, id="six-percent-off"),
    ],
)
def test_parity_allows_a_codecs_own_error_and_no_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, spoil: Any, ok: bool
) -> None:
    storage = {"resid_pre_5": SiteStorage("fp8-token"), "final_prenorm": SiteStorage("none", "loss")}
    small = make_run(tmp_path / "run", "nowhere", storage)
    by_ids = {p.input_ids.tobytes(): p.row for p in small.prompts.values()}

    def reference(_directory: Path, prompts: Any, _sites: Any, dtype: str, **_options: Any) -> Any:
        found = []
        for ids in prompts:
            states = {s: spoil(v.astype(np.float32)) for s, v in small.states[by_ids[ids.tobytes()]].items()}
            # The engine's own error, as transformers in the engine's dtype makes it.
            found.append(states if dtype == "bfloat16" else {s: v * np.float32(1.0001) for s, v in states.items()})
        return found

    monkeypatch.setattr(parity_module, "reference_states", reference)
    monkeypatch.setattr(parity_module, "model_directory", lambda run, path: Path("m"))

    sites = {s.site: s for s in check_parity(open_run(small.url), 4)}

    if ok:
        assert all(s.is_ok for s in sites.values()), [str(s) for s in sites.values()]
        assert sites["resid_pre_5"].basis.endswith("and 1.25 x that of fp8-token")
        assert 0.02 < sites["resid_pre_5"].max_relative < sites["resid_pre_5"].max_allowed < 0.04
        assert sites["final_prenorm"].max_allowed < 0.001
    else:
        assert not any(s.is_ok for s in sites.values()), [str(s) for s in sites.values()]
