"""Parity: right states pass, states of a wrong site, position, prompt or precision do not.

The states of these runs come from `tests.tiny_models.reference_states`, which reads the tensors by hooks of its
own; the tool under test reads them from transformers' outputs.
"""

import json
import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch

from hsray.errors import ConfigError, ExitCode
from hsray.ledger import Ledger
from hsray.plan import build_plan, load_plan
from hsray.reader import open_run
from hsray.records import JsonDict, Prompt, Resolution
from hsray.schema import bytes_per_token, shard_metadata
from hsray.shard import ShardRow, write_shard
from hsray.sites import resolve_sites
from hsray.store import open_store
from hsray.verify import check_parity, parity
from hsray.verify.__main__ import main
from hsray.verify.parity import FLOAT32_TOLERANCE, ROUNDED_TOLERANCE, choose_positions, reference_states
from tests.small_run import DTYPES
from tests.tiny_models import VOCAB_SIZE, make_tiny_model
from tests.tiny_models import reference_states as hooked_states

SITES = resolve_sites(["resid_pre_1", "resid_pre_4", "resid_pre_7", "final_prenorm", "final_postnorm"], 8)
NAMES = [site.name for site in SITES]
LENGTHS = (7, 1, 40, 19, 2, 33)
States = list[dict[str, Any]]


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    """Tiny matrices in several threads wait for each other, for seconds where the cores are busy."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model("llama", tmp_path_factory.mktemp("llama"))


@pytest.fixture(scope="module")
def prompts() -> list[Prompt]:
    rng = np.random.default_rng(5)
    return [
        Prompt(row, f"p{row}", rng.integers(3, VOCAB_SIZE, n, dtype=np.int32), np.ones(n, np.uint8), "f", row + 1)
        for row, n in enumerate(LENGTHS)
    ]


@pytest.fixture(scope="module")
def states(llama: Path, prompts: list[Prompt]) -> States:
    return hooked_states(llama, [prompt.input_ids.tolist() for prompt in prompts])


def write_run(
    directory: Path,
    model: Path,
    prompts: list[Prompt],
    states: States,
    *,
    dtype: str = "float32",
    engine_dtype: str = "float32",
) -> str:
    store = open_store(str(directory))
    hidden = states[0][NAMES[0]].shape[1]
    plan = build_plan(
        prompts,
        store,
        bytes_per_token=bytes_per_token(len(NAMES), hidden, dtype),
        shard_bytes=1 << 40,
        max_lease_prompts=100,
    )
    record: JsonDict = {
        "format_version": 1,
        "run_id": "parity",
        "config": {
            "model": {"path": str(model), "trust_remote_code": False},
        },
        "model": {"name": "tiny", "hidden_size": hidden},
        "sites": [{"name": site.name, "index": site.index} for site in SITES],
        "dtype": dtype,
        "codec": "none",
        "plan": plan,
    }
    ledger = Ledger(store)
    ledger.create_run(record)
    store.create_once("engine.json", {"engine": {"engine_dtype": engine_dtype}})
    (lease,) = load_plan(store, plan).leases
    rows = [
        ShardRow(prompt, {name: np.ascontiguousarray(some[name]).astype(DTYPES[dtype]) for name in NAMES})
        for prompt, some in zip(prompts, states, strict=True)
    ]
    shard = write_shard(
        store,
        "data/s.parquet",
        rows,
        sites=NAMES,
        hidden_size=hidden,
        dtype=dtype,
        metadata=shard_metadata(sites=SITES, hidden_size=hidden, dtype=dtype, run_id="parity", model="tiny"),
    )
    ledger.resolve(Resolution("commit", lease.lease_id, "a", "r", (shard,)))
    return str(directory)


@pytest.mark.parametrize("kind", ["llama", "deepseek_v3", "kimi_k25"])
def test_right_states_of_every_kind_of_model_pass(tmp_path: Path, prompts: list[Prompt], kind: str) -> None:
    model = make_tiny_model(kind, tmp_path / "model")
    states = hooked_states(model, [prompt.input_ids.tolist() for prompt in prompts])
    run = open_run(write_run(tmp_path / "run", model, prompts, states))

    sites = check_parity(run, 4)

    assert [site.site for site in sites] == NAMES
    for site in sites:
        assert site.is_ok, str(site)
        assert site.num_prompts == 4
        assert site.max_allowed == FLOAT32_TOLERANCE
        assert site.mean_relative <= site.max_relative < 1e-6
        assert site.basis == "float32 engine, float32 states"


def _shift_layer(states: States) -> States:
    """Off by one layer: the field's favourite."""
    return [{**some, "resid_pre_4": some["resid_pre_5"]} for some in states]


def _swap_norm(states: States) -> States:
    return [
        {**some, "final_prenorm": some["final_postnorm"], "final_postnorm": some["final_prenorm"]} for some in states
    ]


def _shift_token(states: States) -> States:
    return [{**some, "resid_pre_7": np.roll(some["resid_pre_7"], 1, axis=0)} for some in states]


def _one_bad_row(states: States) -> States:
    """One token of the longest prompt, 0.1 % off."""
    longest = max(range(len(states)), key=lambda i: len(states[i]["resid_pre_1"]))
    changed = states[longest]["resid_pre_1"].copy()
    changed[17] *= 1.001
    return [{**some, "resid_pre_1": changed} if i == longest else some for i, some in enumerate(states)]


def _not_a_number(states: States) -> States:
    changed = states[1]["final_postnorm"].copy()
    changed[0, 0] = np.nan
    return [{**some, "final_postnorm": changed} if i == 1 else some for i, some in enumerate(states)]


@pytest.mark.parametrize(
    ("spoil", "wrong"),
    [
        pytest.param(_shift_layer, {"resid_pre_4"}, id="layer-off-by-one"),
        pytest.param(_swap_norm, {"final_prenorm", "final_postnorm"}, id="norms-swapped"),
        pytest.param(_shift_token, {"resid_pre_7"}, id="token-off-by-one"),
        pytest.param(_one_bad_row, {"resid_pre_1"}, id="one-token-off-by-a-thousandth"),
        pytest.param(_not_a_number, {"final_postnorm"}, id="nan"),
    ],
)
def test_wrong_states_are_found_at_exactly_their_site(
    tmp_path: Path,
    llama: Path,
    prompts: list[Prompt],
    states: States,
    spoil: Callable[[States], States],
    wrong: set[str],
) -> None:
    run = open_run(write_run(tmp_path, llama, prompts, spoil(states)))

    sites = check_parity(run, len(prompts))

    assert {site.site for site in sites if not site.is_ok} == wrong
    assert all("TOO FAR" in str(site) for site in sites if site.site in wrong)


def test_states_of_another_prompt_are_found(tmp_path: Path, llama: Path, prompts: list[Prompt], states: States) -> None:
    swapped = prompts[0]
    other = hooked_states(llama, [swapped.input_ids[::-1].tolist()])
    run = open_run(write_run(tmp_path, llama, prompts, [*other, *states[1:]]))

    assert not any(site.is_ok for site in check_parity(run, len(prompts)))


def test_a_float32_engine_rounded_to_bfloat16_may_be_off_by_the_rounding(
    tmp_path: Path, llama: Path, prompts: list[Prompt], states: States
) -> None:
    run = open_run(write_run(tmp_path / "a", llama, prompts, states, dtype="bfloat16"))
    wrong = open_run(write_run(tmp_path / "b", llama, prompts, _shift_layer(states), dtype="bfloat16"))

    for site in check_parity(run, 3):
        assert site.is_ok, str(site)
        assert site.max_allowed == ROUNDED_TOLERANCE
        # Rounded, so not exact, and by less than half a unit in the last of eight places.
        assert 1e-4 < site.max_relative < 2.0**-9
    assert [site.site for site in check_parity(wrong, 3) if not site.is_ok] == ["resid_pre_4"]


def test_a_half_precision_engine_is_measured_by_transformers_in_half_precision(
    tmp_path: Path, llama: Path, prompts: list[Prompt], states: States
) -> None:
    sites = [{"name": site.name, "index": site.index} for site in SITES]
    half = reference_states(llama, [prompt.input_ids for prompt in prompts], sites, "bfloat16")
    right = open_run(write_run(tmp_path / "a", llama, prompts, half, dtype="bfloat16", engine_dtype="bfloat16"))

    # Twice as far from float32 as transformers' own bfloat16 is.
    doubled = [{name: 2 * h[name] - s[name] for name in NAMES} for h, s in zip(half, states, strict=True)]
    wrong = open_run(write_run(tmp_path / "b", llama, prompts, doubled, dtype="bfloat16", engine_dtype="bfloat16"))

    for site in check_parity(right, 6):
        assert site.is_ok, str(site)
        assert site.basis == "1.25 x transformers' own error in bfloat16"
        assert math.isclose(site.max_allowed, 1.25 * site.max_relative, rel_tol=1e-3)
    assert not any(site.is_ok for site in check_parity(wrong, 6))


def test_a_tolerance_of_ones_own_is_used(tmp_path: Path, llama: Path, prompts: list[Prompt], states: States) -> None:
    coarse = [{name: s.astype(ml_dtypes.bfloat16).astype(np.float32) for name, s in some.items()} for some in states]
    run = open_run(write_run(tmp_path, llama, prompts, coarse))

    assert not any(site.is_ok for site in check_parity(run, 2))
    assert all(site.is_ok for site in check_parity(run, 2, tolerance=0.01))


@pytest.mark.parametrize("kind", ["llama", "deepseek_v3", "gemma3"])
def test_a_long_prompt_goes_through_transformers_in_pieces(
    tmp_path: Path, prompts: list[Prompt], kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = make_tiny_model(kind, tmp_path / kind)
    ids = [prompt.input_ids for prompt in prompts]
    sites = [{"name": site.name, "index": site.index} for site in SITES]
    whole = reference_states(model, ids, sites, "float32")
    monkeypatch.setattr(parity, "_ATTENTION_BYTES", 4 * 4 * 40 * 16)  # 16 of 40 tokens, with four heads

    pieces = reference_states(model, ids, sites, "float32")

    for one, other in zip(whole, pieces, strict=True):
        for name in NAMES:
            assert one[name].shape == other[name].shape
            assert np.linalg.norm(one[name] - other[name]) <= 1e-5 * np.linalg.norm(one[name])


def test_the_shortest_and_the_longest_are_always_chosen_and_the_rest_is_spread() -> None:
    lengths = np.array([50, 3, 900, 20, 7, 400, 120, 1000, 1, 60], np.int32)

    for seed in range(20):
        for count in range(2, 10):
            chosen = choose_positions(lengths, count, seed)
            assert len(set(chosen)) == count
            assert chosen[0] == 8
            assert chosen[-1] == 7
            assert sorted(lengths[chosen]) == lengths[chosen].tolist()
    assert choose_positions(lengths, 1, 0) == [7]
    assert sorted(choose_positions(lengths, 99, 0)) == list(range(10))
    assert choose_positions(lengths, 5, 3) == choose_positions(lengths, 5, 3)
    assert choose_positions(np.array([], np.int32), 3, 0) == []


def test_a_model_with_missing_weights_is_refused_not_filled_with_random_ones(
    tmp_path: Path, llama: Path, prompts: list[Prompt], states: States
) -> None:
    from safetensors.torch import load_file, save_file

    broken = tmp_path / "model"
    broken.mkdir()
    weights = load_file(llama / "model.safetensors")
    del weights["model.layers.3.mlp.up_proj.weight"]
    save_file(weights, broken / "model.safetensors", metadata={"format": "pt"})
    (broken / "config.json").write_bytes((llama / "config.json").read_bytes())
    run = open_run(write_run(tmp_path / "run", llama, prompts, states))

    with pytest.raises(ConfigError, match=r"no weights for model\.layers\.3\.mlp\.up_proj\.weight"):
        check_parity(run, 2, model_path=str(broken))


def test_a_directory_that_is_no_model_is_refused(
    tmp_path: Path, llama: Path, prompts: list[Prompt], states: States
) -> None:
    (tmp_path / "empty").mkdir()
    run = open_run(write_run(tmp_path / "run", llama, prompts, states))

    with pytest.raises(ConfigError, match="transformers cannot load"):
        check_parity(run, 2, model_path=str(tmp_path / "empty"))


def test_the_command_reports_parity_and_fails_on_it(
    tmp_path: Path, llama: Path, prompts: list[Prompt], states: States, capsys: pytest.CaptureFixture[str]
) -> None:
    def finished(directory: Path, some: States) -> str:
        from hsray.index import write_index

        url = write_run(directory, tmp_path / "gone", prompts, some)
        store = open_store(url)
        ledger = Ledger(store)
        write_index(store, ledger.resolutions().values(), NAMES)
        ledger.write_success({"rows": 6, "committed": 6, "rejected": 0, "dead": 0})
        return url

    options = ["--parity", "2", "--json"]
    assert main([finished(tmp_path / "a", states), *options, "--model", str(llama)]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["checked"]["parity"] == 2 * len(NAMES)
    assert [site["site"] for site in report["parity"]] == NAMES

    wrong = finished(tmp_path / "b", _shift_layer(states))
    assert main([wrong, *options, "--model", str(llama)]) == ExitCode.INCOMPLETE
    report = json.loads(capsys.readouterr().out)
    assert report["found"] == {"parity": 1}
    assert report["problems"][0]["message"].startswith("resid_pre_4: TOO FAR")

    assert main([wrong, *options]) == ExitCode.CONFIG
    assert "gone is not a directory" in capsys.readouterr().err
