"""Other tools' files become runs that read, verify and export like any; what is wrong with one is a reject."""

import gzip
import io
import json
import os
import pickle
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
from datasets import Dataset
from safetensors.torch import save_file

from hsray.convert import convert_files
from hsray.convert.__main__ import main
from hsray.errors import ConfigError, ExitCode, FingerprintMismatch, HsrayError
from hsray.export import export_run
from hsray.reader import Run, open_run
from hsray.repair import find_damage, repair
from hsray.store import open_store
from hsray.verify import verify_run
from tests.export_runs import HIDDEN, HOSTILE, INNER, LENGTHS, VOCAB, make_export_run, make_model
from tests.runs import ROOT

POST = (*INNER, "final_postnorm")
PRE = (*INNER, "final_prenorm")


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> str:
    return make_export_run(tmp_path_factory.mktemp("run"), sites=(*PRE, "final_postnorm"))


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return make_model(tmp_path / "model")


def same_states(one: Run, other: Run, sites: tuple[str, ...]) -> None:
    assert list(one.prompt_ids) == list(other.prompt_ids)
    for a, b in zip(one.scan(sites), other.scan(sites), strict=True):
        assert a.input_ids.tolist() == b.input_ids.tolist()
        assert a.loss_mask.tolist() == b.loss_mask.tolist()
        for site in sites:
            assert np.array_equal(a[site].view(np.int16), b[site].view(np.int16))


@pytest.mark.parametrize(
    ("name", "sites"), [("specforge", POST), ("modelopt", POST), ("speculators", PRE)], ids=lambda value: value[:9]
)
def test_what_is_exported_comes_back(url: str, model: Path, tmp_path: Path, name: str, sites: tuple[str, ...]) -> None:
    export_run(url, name, str(tmp_path / "files"))

    summary = convert_files(name, tmp_path / "files", str(tmp_path / "back"), model=model, sites=sites)

    assert (summary.rows, summary.committed, summary.rejected, summary.left) == (len(LENGTHS), len(LENGTHS), 0, 0)
    assert verify_run(str(tmp_path / "back"), full=True).problems == []
    back = open_run(str(tmp_path / "back"))
    assert back.complete
    assert back.sites == sites
    same_states(open_run(url), back, sites)
    assert back.final_norm() is not None
    assert back.record["imported"] == {"format": name, "source": str(tmp_path / "files")}
    # And once more: a run like any other.
    export_run(str(tmp_path / "back"), name, str(tmp_path / "files2"))
    files = [path for path in (tmp_path / "files").rglob("*") if path.suffix in (".ckpt", ".pt", ".safetensors")]
    assert len(files) >= len(LENGTHS)
    for path in files:
        assert (tmp_path / "files2" / path.relative_to(tmp_path / "files")).read_bytes() == path.read_bytes()


def test_vllm_files_come_back(url: str, model: Path, tmp_path: Path) -> None:
    """hs-connectors' files by request, which have no mask and no order but their names'."""
    run = open_run(url)
    (tmp_path / "files").mkdir()
    for position in range(len(run)):
        prompt = run.at(position)
        stacked = torch.stack([prompt.tensor(site) for site in PRE], dim=1).contiguous()
        ids = torch.from_numpy(prompt.input_ids.astype(np.int64))
        save_file({"hidden_states": stacked, "token_ids": ids}, tmp_path / "files" / f"cmpl-{position}.safetensors")

    with pytest.raises(ConfigError, match=r"--loss-mask: .*cmpl-0.safetensors does not say which tokens"):
        convert_files("vllm", tmp_path / "files", str(tmp_path / "back"), model=model, sites=PRE)
    convert_files("vllm", tmp_path / "files", str(tmp_path / "back"), model=model, sites=PRE, mask_all=True)

    back = open_run(str(tmp_path / "back"))
    assert list(back.prompt_ids) == [f"cmpl-{position}" for position in range(len(run))]
    for position in range(len(run)):
        for site in PRE:
            assert np.array_equal(back.at(position)[site].view(np.int16), run.at(position)[site].view(np.int16))
        assert back.at(position).loss_mask.all()


def test_fp8_states_are_what_hs_connectors_makes_of_them(model: Path, tmp_path: Path) -> None:
    torch.manual_seed(0)
    states = torch.randn(6, 2, HIDDEN)
    scales = states.abs().amax(dim=(1, 2), keepdim=True) / 448
    quantised = (states / scales).to(torch.float8_e4m3fn)
    content = {"hidden_states": quantised, "hidden_states_scales": scales, "token_ids": torch.arange(6)}
    (tmp_path / "files").mkdir()
    save_file(content, tmp_path / "files" / "a.safetensors")

    sites = ("resid_pre_2", "final_prenorm")
    convert_files("vllm", tmp_path / "files", str(tmp_path / "back"), model=model, sites=sites, mask_all=True)

    expected = quantised.to(torch.bfloat16) * scales.to(torch.bfloat16)
    row = open_run(str(tmp_path / "back")).at(0)
    assert torch.equal(torch.stack([row.tensor(site) for site in sites], dim=1), expected)


# ------------------------------------------------------------------- files that are wrong


def eagle3(length: int, seed: int, **changes: Any) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(seed)
    content = {
        "input_ids": torch.randint(0, VOCAB, (length,), generator=generator),
        "loss_mask": torch.ones(length, dtype=torch.int64),
        "hidden_state": torch.randn(1, length, HIDDEN, generator=generator).bfloat16(),
        "aux_hidden_state": torch.randn(1, length, 3 * HIDDEN, generator=generator).bfloat16(),
        **changes,
    }
    return {key: value for key, value in content.items() if value is not None}


class Evil:
    def __reduce__(self) -> tuple[Any, ...]:
        return os.system, ("touch /tmp/hsray-was-here",)


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-200])


def spoiled(site: str, value: float, position: int) -> dict[str, Any]:
    content = eagle3(9, 3)
    content[site][0, position] = value
    return content


BAD: dict[str, tuple[Callable[[Path], Any], str, str]] = {
    "cut": (lambda path: (torch.save(eagle3(9, 3), path), cut(path)), "unreadable", "RuntimeError"),
    "text": (lambda path: path.write_text("no checkpoint"), "unreadable", ""),
    "empty": (lambda path: path.write_bytes(b""), "unreadable", "EOFError"),
    "pickle": (lambda path: path.write_bytes(pickle.dumps({"input_ids": Evil()})), "unreadable", "UnpicklingError"),
    "list": (lambda path: torch.save([1, 2], path), "unreadable", "it holds a list"),
    "no ids": (lambda path: torch.save(eagle3(9, 3, input_ids=None), path), "missing_key", "no tensor input_ids"),
    "no aux": (
        lambda path: torch.save(eagle3(9, 3, aux_hidden_state=None), path),
        "missing_key",
        "it holds hidden_state, input_ids, loss_mask",
    ),
    "no token": (lambda path: torch.save(eagle3(0, 3), path), "empty", "no token"),
    "ids": (lambda path: torch.save(eagle3(2, 3, input_ids=torch.tensor([1, 500])), path), "bad_ids", "1 to 500"),
    "float ids": (lambda path: torch.save(eagle3(2, 3, input_ids=torch.rand(2)), path), "shape", "not integers [T]"),
    "mask": (lambda path: torch.save(eagle3(2, 3, loss_mask=torch.tensor([0, 2])), path), "bad_mask", "than 0 and 1"),
    "short mask": (
        lambda path: torch.save(eagle3(9, 3, loss_mask=torch.ones(8, dtype=torch.int64)), path),
        "length_mismatch",
        "loss_mask has 8 tokens, the ids 9",
    ),
    "short states": (
        lambda path: torch.save(eagle3(9, 3, hidden_state=torch.ones(1, 8, HIDDEN).bfloat16()), path),
        "length_mismatch",
        "hidden_state has 8 tokens, the ids 9",
    ),
    "two layers": (
        lambda path: torch.save(eagle3(9, 3, aux_hidden_state=torch.ones(1, 9, 2 * HIDDEN).bfloat16()), path),
        "shape",
        "aux_hidden_state is [1, 9, 48], not [9, 72]: 3 inner layers by --sites, 24 values each by --model",
    ),
    "dtype": (
        lambda path: torch.save(
            {k: v.float() if v.dtype == torch.bfloat16 else v for k, v in eagle3(9, 3).items()}, path
        ),
        "dtype",
        "states are float32, those of the first file are bfloat16",
    ),
    "double": (
        lambda path: torch.save(eagle3(9, 3, hidden_state=torch.ones(1, 9, HIDDEN).double()), path),
        "dtype",
        "states are float64",
    ),
    "nan": (
        lambda path: torch.save(spoiled("hidden_state", float("nan"), 4), path),
        "not_finite",
        "NaN or infinity in final_postnorm at position 4",
    ),
    "zeros": (
        lambda path: torch.save(spoiled("aux_hidden_state", 0.0, 7), path),
        "zeros",
        "all zeros in resid_pre_2 at position 7",
    ),
}


def test_bad_files_are_rejected_with_the_reason_and_the_counts_add_up(model: Path, tmp_path: Path) -> None:
    folder = tmp_path / "files" / "rows_0-2000"
    folder.mkdir(parents=True)
    torch.save(eagle3(5, 0), folder / "data_0.ckpt")
    for number, (make, _, _) in enumerate(BAD.values(), start=1):
        make(folder / f"data_{number}.ckpt")
    packed = io.BytesIO()
    torch.save(eagle3(6, 1), packed)
    (folder / "data_97.ckpt.gz").write_bytes(gzip.compress(packed.getvalue()))
    (folder / "data_98.ckpt.gz").write_bytes(gzip.compress(packed.getvalue())[:-50])
    torch.save(eagle3(7, 2), folder / "data_99.ckpt", _use_new_zipfile_serialization=False)

    summary = convert_files("specforge", tmp_path / "files", str(tmp_path / "run"), model=model, sites=POST)

    total = len(BAD) + 4
    assert (summary.rows, summary.committed, summary.rejected, summary.dead) == (total, 3, total - 3, 0)
    reasons = Counter(reason for _, reason, _ in BAD.values()) + Counter(["unreadable"])
    assert Counter(summary.reject_reasons) == reasons
    store = open_store(str(tmp_path / "run"))
    (key,) = (info.key for info in store.list("rejects/"))
    rejects = pq.read_table(tmp_path / "run" / key).to_pylist()
    for number, (name, (_, reason, detail)) in enumerate(BAD.items(), start=1):
        reject = next(r for r in rejects if r["row"] == number)
        assert (reject["reason"], reject["file"]) == (reason, str(folder / f"data_{number}.ckpt")), name
        assert detail in reject["detail"], name
    assert not Path("/tmp/hsray-was-here").exists()
    assert verify_run(str(tmp_path / "run"), full=True).problems == []
    run = open_run(str(tmp_path / "run"))
    assert list(run.prompt_ids) == [f"rows_0-2000/data_{n}" for n in (0, 97, 99)]
    assert [prompt.row for prompt in run.scan([])] == [0, total - 3, total - 1]


def test_a_dataset_whose_files_are_missing_or_of_other_prompts(model: Path, tmp_path: Path) -> None:
    rows = [[1, 2, 3], [4, 5], [6, 7, 8, 9]]
    data = Dataset.from_dict({"input_ids": rows, "loss_mask": [[0, 1, 1], [1, 1], [0, 0, 1, 1]], "seq_len": [3, 2, 4]})
    data.save_to_disk(tmp_path / "files")
    (tmp_path / "files" / "hidden_states").mkdir()
    for number, ids in ((0, [1, 2, 3]), (2, [6, 7, 8, 1])):
        states = torch.ones(len(ids), 4, HIDDEN).bfloat16()
        content = {"hidden_states": states, "token_ids": torch.tensor(ids)}
        save_file(content, tmp_path / "files" / "hidden_states" / f"hs_{number}.safetensors")

    summary = convert_files("speculators", tmp_path / "files", str(tmp_path / "run"), model=model, sites=PRE)

    assert (summary.committed, summary.reject_reasons) == (1, {"missing_states": 1, "token_mismatch": 1})
    row = open_run(str(tmp_path / "run")).at(0)
    assert (row.prompt_id, row.loss_mask.tolist()) == ("hs_0", [0, 1, 1])


def test_files_are_taken_in_the_order_of_their_numbers_and_ids_once(model: Path, tmp_path: Path) -> None:
    folder = tmp_path / "files"
    folder.mkdir()
    for number in (10, 2, 1):
        content = eagle3(4, number, hidden_states=None)
        states = {"hidden_states": content["hidden_state"][0], "aux_hidden_states": content["aux_hidden_state"][0]}
        identity = {"conversation_id": "twice" if number != 2 else "two"}
        torch.save({"input_ids": content["input_ids"], **states, **identity}, folder / f"x{number}.pt")

    summary = convert_files("modelopt", folder, str(tmp_path / "run"), model=model, sites=POST, mask_all=True)

    assert list(open_run(str(tmp_path / "run")).prompt_ids) == ["twice", "two"]
    assert summary.reject_reasons == {"duplicate_id": 1}


def test_a_table_of_names_that_is_broken_costs_the_names_alone(url: str, model: Path, tmp_path: Path) -> None:
    export_run(url, "specforge", str(tmp_path / "files"))
    (tmp_path / "files" / "hsray_prompts.parquet").write_bytes(b"broken")

    convert_files("specforge", tmp_path / "files", str(tmp_path / "run"), model=model, sites=POST)

    assert open_run(str(tmp_path / "run")).prompt_ids[2] == "rows_00000000-00002000/data_00000002"
    assert HOSTILE[2] not in open_run(str(tmp_path / "run"))


# ------------------------------------------------------------------- what has to be said


@pytest.fixture
def one_file(tmp_path: Path) -> Path:
    (tmp_path / "files").mkdir()
    torch.save(eagle3(5, 0), tmp_path / "files" / "data_0.ckpt")
    return tmp_path / "files"


@pytest.mark.parametrize(
    ("sites", "message"),
    [
        ((), "--sites: the files do not say which states they hold.*SpecForge's layer id n is resid_post_n"),
        (("resid_pre_9",), "--sites: 'resid_pre_9' is out of range for a model of 8 layers"),
        (("final_postnorm", *INNER), "a file has one final state, the last"),
        (("final_postnorm",), "name the states of inner layers too"),
        ((*INNER, "resid_post_4"), "names resid_pre_5 a second time"),
        (INNER, r"the files hold a final state \(hidden_state\) as well"),
        ((*INNER[:2], "final_postnorm"), "no file below .* can be converted. The first: .*2 inner layers by --sites"),
    ],
)
def test_sites_are_asked_for(model: Path, one_file: Path, tmp_path: Path, sites: tuple[str, ...], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        convert_files("specforge", one_file, str(tmp_path / "run"), model=model, sites=sites)
    assert not (tmp_path / "run").exists()


def test_a_norm_that_the_file_contradicts(model: Path, tmp_path: Path) -> None:
    (tmp_path / "files").mkdir()
    content = eagle3(4, 1)
    states = {"hidden_states": content["hidden_state"][0], "aux_hidden_states": content["aux_hidden_state"][0]}
    torch.save({**content, **states, "hidden_states_prenorm": True}, tmp_path / "files" / "a.pt")

    with pytest.raises(ConfigError, match="says that its final state is before the norm: name final_prenorm"):
        convert_files("modelopt", tmp_path / "files", str(tmp_path / "run"), model=model, sites=POST)
    convert_files("modelopt", tmp_path / "files", str(tmp_path / "run"), model=model, sites=PRE)


def test_what_is_not_there_is_named(model: Path, one_file: Path, tmp_path: Path) -> None:
    url = str(tmp_path / "run")
    with pytest.raises(ConfigError, match="there are no modelopt files below"):
        convert_files("modelopt", one_file, url, model=model, sites=POST)
    with pytest.raises(ConfigError, match="is no folder"):
        convert_files("modelopt", tmp_path / "nowhere", url, model=model, sites=POST)
    with pytest.raises(ConfigError, match="is no dataset that `datasets` saved"):
        convert_files("speculators", one_file, url, model=model, sites=PRE)
    with pytest.raises(ConfigError, match=r"has no config\.json"):
        convert_files("specforge", one_file, url, model=tmp_path, sites=POST)
    with pytest.raises(ConfigError, match="format 'eagle' is none of specforge"):
        convert_files("eagle", one_file, url, model=model, sites=POST)


# ------------------------------------------------------------------- again

KILLED = """
import os, signal, sys
from hsray.convert import job
from tests.export_runs import INNER
resolve, seen = job.Ledger.resolve, []
def dying(self, resolution):
    seen.append(resolution)
    if len(seen) == 2:
        os.kill(os.getpid(), signal.SIGKILL)
    return resolve(self, resolution)
job.Ledger.resolve, job._LEASE_PROMPTS, job._THREADS = dying, 3, 1
job.convert_files(*sys.argv[1:4], model=sys.argv[4], sites=(*INNER, "final_postnorm"))
"""


def test_killed_and_started_again(url: str, model: Path, tmp_path: Path) -> None:
    export_run(url, "modelopt", str(tmp_path / "files"))
    arguments = ["modelopt", str(tmp_path / "files"), str(tmp_path / "run")]

    died = subprocess.run([sys.executable, "-c", KILLED, *arguments, str(model)], cwd=ROOT, check=False)

    assert died.returncode == -signal.SIGKILL
    first = open_run(str(tmp_path / "run"))
    assert (first.complete, len(first)) == (False, 3)
    convert_files(*arguments, model=model, sites=POST)
    same_states(open_run(url), open_run(str(tmp_path / "run")), POST)
    report = verify_run(str(tmp_path / "run"), full=True)
    assert report.problems == []
    assert report.counts["unreferenced_objects"] == 1  # the shard whose record never came


def test_another_conversion_to_the_same_place_is_refused(url: str, model: Path, one_file: Path, tmp_path: Path) -> None:
    run = str(tmp_path / "run")
    convert_files("specforge", one_file, run, model=model, sites=POST)
    before = open_store(run).get("hsray.json")

    torch.save(eagle3(5, 8), one_file / "data_1.ckpt")
    with pytest.raises(FingerprintMismatch, match=r"convert\.files"):
        convert_files("specforge", one_file, run, model=model, sites=POST)
    (one_file / "data_1.ckpt").unlink()
    with pytest.raises(FingerprintMismatch, match=r"convert\.sites"):
        convert_files("specforge", one_file, run, model=model, sites=PRE)
    assert open_store(run).get("hsray.json") == before


def test_a_file_that_changes_meanwhile_ends_the_conversion(
    model: Path, one_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from hsray.convert import job

    commit = job._commit_leases

    def changed(*arguments: Any) -> None:
        torch.save(eagle3(5, 8), one_file / "data_0.ckpt")
        commit(*arguments)

    monkeypatch.setattr(job, "_commit_leases", changed)
    with pytest.raises(HsrayError, match=r"data_0\.ckpt changed while it was converted: it holds another prompt"):
        convert_files("specforge", one_file, str(tmp_path / "run"), model=model, sites=POST)
    assert not open_run(str(tmp_path / "run")).complete


def test_a_converted_run_is_not_repaired_by_an_engine(model: Path, one_file: Path, tmp_path: Path) -> None:
    run = str(tmp_path / "run")
    convert_files("specforge", one_file, run, model=model, sites=POST)
    where = open_run(run).segments.where(0, "resid_pre_4")
    store = open_store(run)
    data = bytearray(store.get(where.key))
    data[where.offset] ^= 1
    store.put(where.key, bytes(data))

    with pytest.raises(ConfigError, match=r"was converted from .*Convert the files again"):
        repair(run, find_damage(run))


def test_the_command(model: Path, one_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = str(tmp_path / "run")
    assert main(["specforge", str(one_file), run, "--sites", ",".join(POST)]) == ExitCode.CONFIG
    assert main(["specforge", str(one_file), run, "--model", str(model)]) == ExitCode.CONFIG
    (one_file / "data_1.ckpt").write_bytes(b"")
    arguments = ["specforge", str(one_file), run, "--model", str(model), "--sites", ", ".join(POST)]
    assert main(arguments) == ExitCode.INCOMPLETE
    text = capsys.readouterr().out
    assert text.startswith("2 files = 1 committed + 1 rejected; 5 tokens, ")
    assert "  rejected 1: unreadable (rejects/ lists them)" in text
    assert main([*arguments, "--json"]) == ExitCode.INCOMPLETE
    assert json.loads(capsys.readouterr().out)["committed"] == 1
