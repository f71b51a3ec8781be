"""Every format holds exactly the states of the run, in the layout and with the norm that its tool reads."""

import json
import re
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
from safetensors import safe_open
from safetensors.numpy import save

from hsray.checkpoint import apply_norm
from hsray.errors import ConfigError, ExitCode, HsrayError
from hsray.export import FORMATS, export_run
from hsray.export.__main__ import main
from hsray.export.deepspec import DeepSpecFormat
from hsray.export.job import run_job
from hsray.export.source import Selection, Source, select_final
from hsray.reader import Run, open_run
from hsray.store import open_store
from tests.export_runs import HIDDEN, HOSTILE, INNER, LENGTHS, VOCAB, make_export_run, states_of
from tests.field_loaders import load_angelslim, load_deepspec, load_modelopt


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> str:
    return make_export_run(tmp_path_factory.mktemp("run"))


@pytest.fixture(scope="module")
def run(url: str) -> Run:
    return open_run(url)


def bits(tensor: torch.Tensor | np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    if isinstance(tensor, torch.Tensor):
        return tensor.contiguous().view(torch.int16).numpy()
    return np.ascontiguousarray(tensor).view(np.int16)


def inner(run: Run, position: int) -> np.ndarray[Any, Any]:
    return np.concatenate([run.at(position)[site] for site in INNER], axis=1)


def postnorm(run: Run, position: int) -> np.ndarray[Any, Any]:
    norm = run.final_norm()
    assert norm is not None
    normed = apply_norm(run.at(position)["final_prenorm"], norm.weight, norm.eps, norm.kind)  # type: ignore[arg-type]
    return normed.astype(ml_dtypes.bfloat16)


def files_of(folder: Path) -> list[str]:
    return sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())


def test_the_final_state_after_the_norm_is_what_torch_makes_of_the_one_before(run: Run) -> None:
    norm = run.final_norm()
    assert norm is not None
    for position in range(len(run)):
        x = run.at(position).tensor("final_prenorm").float()
        weight = torch.from_numpy(np.ascontiguousarray(norm.weight))
        expected = (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + norm.eps) * weight).bfloat16()
        # A sum in another order may round the other way, by one step.
        assert np.abs(bits(expected).astype(np.int32) - bits(postnorm(run, position))).max() <= 1


def test_modelopt(url: str, run: Run, tmp_path: Path) -> None:
    export_run(url, "modelopt", str(tmp_path))

    items = load_modelopt(tmp_path)

    assert [item["conversation_id"] for item in items] == list(run.prompt_ids) == list(HOSTILE)
    for position, item in enumerate(items):
        prompt = run.at(position)
        assert item["input_ids"].tolist() == prompt.input_ids.tolist()
        assert item["loss_mask"].tolist() == prompt.loss_mask.tolist()
        assert item["base_hidden_prenorm"] is False
        assert np.array_equal(bits(item["aux_hidden_states"]), bits(inner(run, position)))
        assert np.array_equal(bits(item["base_model_hidden_states"]), bits(postnorm(run, position)))


def test_angelslim(url: str, run: Run, tmp_path: Path) -> None:
    export_run(url, "angelslim", str(tmp_path))

    items = load_angelslim(tmp_path)

    assert len(items) == len(run)
    for position, item in enumerate(items):
        prompt = run.at(position)
        assert item["input_ids"].tolist() == [prompt.input_ids.tolist()]
        assert item["loss_mask"].tolist() == [prompt.loss_mask.tolist()]
        assert np.array_equal(bits(item["hidden_states"][0]), bits(inner(run, position)))
        assert np.array_equal(bits(item["target_hiddens"][0]), bits(postnorm(run, position)))


def check_deepspec(folder: Path, run: Run) -> dict[str, Any]:
    manifest, items = load_deepspec(folder)
    assert len(items) == len(run)
    for position, item in enumerate(items):
        prompt = run.at(position)
        assert item["input_ids"].tolist() == prompt.input_ids.tolist()
        assert item["loss_mask"].tolist() == prompt.loss_mask.tolist()
        assert item["attention_mask"].tolist() == [1] * prompt.seq_len
        assert np.array_equal(bits(item["target_hidden_states"]), bits(inner(run, position)))
        assert np.array_equal(bits(item["target_last_hidden_states"]), bits(postnorm(run, position)))
    return manifest


def test_deepspec(url: str, run: Run, tmp_path: Path) -> None:
    export_run(url, "deepspec", str(tmp_path), model_name="Qwen/Qwen3-8B")

    manifest = check_deepspec(tmp_path, run)

    assert manifest["target_layer_ids"] == [1, 3, 4]
    assert manifest["target_model_name_or_path"] == "Qwen/Qwen3-8B"


@pytest.mark.parametrize("shard_bytes", [1, 20_000])
def test_deepspec_in_many_shards(url: str, run: Run, tmp_path: Path, shard_bytes: int) -> None:
    site, norm = select_final(run, open_store(url), "final_postnorm", "deepspec")
    fmt = DeepSpecFormat(Source(run, Selection(INNER, site, norm)), "m", shard_bytes)

    run_job(open_store(str(tmp_path)), fmt, {"format": "deepspec"})

    manifest = check_deepspec(tmp_path, run)
    assert manifest["num_shards"] == (len(LENGTHS) if shard_bytes == 1 else 6)


def test_safetensors(url: str, run: Run, tmp_path: Path) -> None:
    export_run(url, "safetensors", str(tmp_path))

    paths = sorted(tmp_path.rglob("*.safetensors"))

    assert len(paths) == len(run)
    for position, path in enumerate(paths):
        prompt = run.at(position)
        with safe_open(path, "pt") as file:
            assert file.metadata() == {"prompt_id": prompt.prompt_id, "row": str(prompt.row), "run_id": "exported"}
            assert set(file.keys()) == {"input_ids", "loss_mask", *run.sites}
            assert file.get_tensor("input_ids").tolist() == prompt.input_ids.tolist()
            assert file.get_tensor("loss_mask").tolist() == prompt.loss_mask.tolist()
            for site in run.sites:
                assert np.array_equal(bits(file.get_tensor(site)), bits(prompt[site]))


def test_safetensors_with_a_derived_site(url: str, run: Run, tmp_path: Path) -> None:
    export_run(url, "safetensors", str(tmp_path), sites=["final_postnorm", "resid_post_1"])

    with safe_open(sorted(tmp_path.rglob("*.safetensors"))[2], "pt") as file:
        assert set(file.keys()) == {"input_ids", "loss_mask", "resid_pre_2", "final_postnorm"}
        assert np.array_equal(bits(file.get_tensor("final_postnorm")), bits(postnorm(run, 2)))
    sites = json.loads((tmp_path / "hsray_export.json").read_text())["sites"]
    assert [(site["name"], site["derived_from"]) for site in sites] == [
        ("resid_pre_2", None),
        ("final_postnorm", "final_prenorm"),
    ]


@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_other_dtypes_stay_what_they_are(tmp_path: Path, dtype: str) -> None:
    url = make_export_run(tmp_path, dtype=dtype)

    export_run(url, "modelopt", str(tmp_path / "out"))

    item = load_modelopt(tmp_path / "out")[2]
    assert item["aux_hidden_states"].dtype == getattr(torch, dtype)
    expected = np.concatenate([states_of(2, site, 130, dtype) for site in INNER], axis=1)
    assert np.array_equal(item["aux_hidden_states"].numpy(), expected)


def test_a_stored_postnorm_is_taken_as_it_is(tmp_path: Path) -> None:
    url = make_export_run(tmp_path, sites=(*INNER, "final_postnorm"))

    export_run(url, "angelslim", str(tmp_path / "out"))

    item = load_angelslim(tmp_path / "out")[3]
    assert np.array_equal(bits(item["target_hiddens"][0]), bits(states_of(3, "final_postnorm", 64, "bfloat16")))


@pytest.mark.parametrize(
    ("name", "layout"),
    [
        ("specforge", {"method": "eagle3", "aux_hidden_state_layer_ids": [1, 3, 4]}),
        ("speculators", {"layer_ids": [2, 4, 5, 8]}),
        ("modelopt", {"eagle_aux_hidden_state_layer_ids": [1, 3, 4]}),
        ("angelslim", {"layer_outputs": [1, 3, 4]}),
    ],
)
def test_what_files_do_not_say_stands_beside_them(url: str, tmp_path: Path, name: str, layout: dict[str, Any]) -> None:
    export_run(url, name, str(tmp_path))

    record = json.loads((tmp_path / "hsray_export.json").read_text())

    assert record["layout"] == layout
    final = "final_prenorm" if name == "speculators" else "final_postnorm"
    assert [site["name"] for site in record["sites"]] == [*INNER, final]
    assert (record["run"], record["run_id"], record["num_prompts"]) == (url, "exported", len(LENGTHS))


@pytest.mark.parametrize("name", ["specforge", "speculators", "deepspec", "safetensors"])
def test_prompt_ids_never_become_paths(url: str, run: Run, tmp_path: Path, name: str) -> None:
    out = tmp_path / "a" / "out"
    export_run(url, name, str(out))

    files = files_of(out)

    assert all(re.fullmatch(r"[a-zA-Z0-9_.-]+(/[a-zA-Z0-9_.-]+)*", file) for file in files)
    assert files_of(tmp_path) == [f"a/out/{file}" for file in files]
    table = pq.read_table(out / "hsray_prompts.parquet").to_pydict()
    assert table["prompt_id"] == list(HOSTILE)
    assert table["position"] == table["row"] == list(range(len(LENGTHS)))
    assert table["num_tokens"] == list(LENGTHS)
    assert {*table["file"]} <= {*files}
    assert table["left_out"] == [None] * len(LENGTHS)


def test_what_specforge_cannot_read_is_left_out_and_said(url: str, tmp_path: Path) -> None:
    result, text = export_run(url, "specforge", str(tmp_path), method="dspark")

    lonely = {1, 7}  # one token, and two of which one is learned
    assert set(result.left_out) >= {1}
    assert set(result.left_out) <= lonely | {0, 9}
    assert f"left out {len(result.left_out)}: SpecForge's DFlash family needs two loss tokens in a row" in text
    files = [path.name for path in sorted(tmp_path.rglob("*.ckpt"))]
    assert files == [f"data_{p:08d}.ckpt" for p in range(len(LENGTHS)) if p not in result.left_out]
    table = pq.read_table(tmp_path / "hsray_prompts.parquet").to_pydict()
    assert [p for p, file in enumerate(table["file"]) if file is None] == sorted(result.left_out)
    assert table["left_out"][1] == "SpecForge's DFlash family needs two loss tokens in a row"
    again, text = export_run(url, "specforge", str(tmp_path), method="dspark")
    assert again.left_out == result.left_out
    assert text.startswith("complete already")


# ------------------------------------------------------------------- what cannot be right


@pytest.mark.parametrize("name", ["specforge", "modelopt"])
def test_no_postnorm_without_the_weight(tmp_path: Path, name: str) -> None:
    url = make_export_run(tmp_path, norm=False)

    with pytest.raises(ConfigError, match="lacks the weight to derive it"):
        export_run(url, name, str(tmp_path / "out"))
    assert not (tmp_path / "out").exists()


def test_no_prenorm_out_of_postnorm(tmp_path: Path) -> None:
    url = make_export_run(tmp_path, sites=(*INNER, "final_postnorm"))

    with pytest.raises(ConfigError, match=r"only after the norm\. That cannot be undone"):
        export_run(url, "speculators", str(tmp_path / "out"))


@pytest.mark.parametrize("name", ["specforge", "speculators"])
def test_no_final_state_at_all(tmp_path: Path, name: str) -> None:
    url = make_export_run(tmp_path, sites=INNER)

    with pytest.raises(ConfigError, match="this run has n"):
        export_run(url, name, str(tmp_path / "out"))


def test_a_norm_that_does_not_fit_the_run(tmp_path: Path) -> None:
    url = make_export_run(tmp_path)
    for weight in (np.ones(HIDDEN + 1, np.float32), np.full(HIDDEN, np.nan, np.float32)):
        open_store(url).put("final_norm.safetensors", save({"weight": weight}))
        with pytest.raises(HsrayError, match="does not hold a norm weight of 24 values"):
            export_run(url, "modelopt", str(tmp_path / "out"))


def test_a_norm_that_the_self_test_did_not_prove_is_said(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    url = make_export_run(tmp_path, proven=False)

    export_run(url, "modelopt", str(tmp_path / "out"))

    assert "the run's self-test did not see that both agree" in caplog.text


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("specforge", {"sites": ["resid_pre_2", "resid_pre_4"]}, "exactly 3 inner layers, not 2"),
        ("angelslim", {"sites": ["resid_pre_2"]}, "exactly 3 inner layers, not 1"),
        ("modelopt", {"sites": ["resid_pre_3"]}, "resid_pre_3 is not in this run, which has resid_pre_2"),
        ("modelopt", {"sites": ["resid_pre_2", "final_prenorm"]}, "decides itself which final state"),
        ("modelopt", {"sites": ["nonsense"]}, "--sites: unknown site 'nonsense'"),
        ("safetensors", {"sites": ["resid_pre_3"]}, "resid_pre_3 not in this run"),
        ("vocabulary", {"sites": ["resid_pre_2"]}, "vocabulary holds no states"),
        ("vocabulary", {"draft_vocab_size": VOCAB + 1}, "--draft-vocab-size: 501 of a vocabulary of 500"),
        ("specforge", {"method": "mtp"}, "--method: 'mtp' is none of eagle3, dflash, dspark"),
        ("modelopt", {"method": "eagle3"}, "--method belongs to specforge"),
        ("modelopt", {"model_name": "x"}, "--model-name belongs to deepspec"),
        ("modelopt", {"draft_vocab_size": 5}, "--draft-vocab-size belongs to vocabulary"),
        ("parquet", {}, "format 'parquet' is none of specforge"),
    ],
)
def test_what_a_format_does_not_take(
    url: str, tmp_path: Path, name: str, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=re.escape(message)):
        export_run(url, name, str(tmp_path / "out"), **options)
    assert not (tmp_path / "out").exists()


def test_deepspec_takes_bfloat16_alone(tmp_path: Path) -> None:
    url = make_export_run(tmp_path, dtype="float32")

    with pytest.raises(ConfigError, match="DeepSpec takes bfloat16"):
        export_run(url, "deepspec", str(tmp_path / "out"))


def test_states_of_some_tokens_are_refused(tmp_path: Path) -> None:
    url = make_export_run(tmp_path)
    store = open_store(url)
    record = store.get_json("hsray.json")
    record["sites"][1]["tokens"] = "loss"
    run = open_run(url)
    run.record["sites"][1]["tokens"] = "loss"

    from hsray.export import _open_format

    with pytest.raises(ConfigError, match=r"resid_pre_4 only for some \(capture.tokens: loss\)"):
        _open_format("modelopt", run, store, None, None, None, None)


def test_an_unfinished_run_is_exported_only_on_request(tmp_path: Path) -> None:
    url = make_export_run(tmp_path, finish=False)

    with pytest.raises(HsrayError, match="has not finished: 12 prompts are committed"):
        export_run(url, "modelopt", str(tmp_path / "out"))
    result, _ = export_run(url, "modelopt", str(tmp_path / "out"), incomplete=True)

    assert result.prompts == 12


def test_a_folder_that_holds_something_else_is_not_written_to(url: str, tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("mine")

    with pytest.raises(ConfigError, match=r"holds notes\.txt and is no export"):
        export_run(url, "modelopt", str(tmp_path))
    assert files_of(tmp_path) == ["notes.txt"]


def test_another_export_is_not_mixed_in(url: str, tmp_path: Path) -> None:
    export_run(url, "deepspec", str(tmp_path), model_name="one")
    before = files_of(tmp_path)

    with pytest.raises(ConfigError, match="target_model_name_or_path': 'one'"):
        export_run(url, "deepspec", str(tmp_path), model_name="other")
    with pytest.raises(ConfigError, match=r"format: it has 'deepspec', this would be 'modelopt'"):
        export_run(url, "modelopt", str(tmp_path))
    assert files_of(tmp_path) == before


def test_the_command(url: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = str(tmp_path / "out")
    assert main([url, "safetensors", out, "--sites", "resid_pre_2, final_prenorm"]) == 0
    assert capsys.readouterr().out.startswith("12 prompts (65.7 kB of states) in 12 files at ")
    assert main([url, "safetensors", out, "--sites", "resid_pre_2,final_prenorm", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == {"files": 12, "written": 0, "prompts": 12, "left_out": {}}
    assert main([url, "safetensors", out]) == ExitCode.CONFIG
    assert main([url, "specforge", str(tmp_path / "x"), "--method", "dflash"]) == ExitCode.INCOMPLETE
    assert main([url, "modelopt", out, "--threads", "0"]) == ExitCode.CONFIG
    assert main([str(tmp_path), "modelopt", out]) == ExitCode.FAILED
    with pytest.raises(SystemExit):
        main(["--help"])
    text = capsys.readouterr().out
    assert all(name in text for name in FORMATS)
