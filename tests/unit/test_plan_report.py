"""`python -m hsray.plan`: figures that add up, a report that a person can check, and its exit codes."""

import io
import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
from rich.console import Console

from hsray.estimate import Costs, Estimate, LeaseLimits, LeasePacker, survey, to_json
from hsray.plan import build_plan, main
from hsray.plan_report import show_report, write_rejects
from hsray.prompts import Tally
from hsray.records import JsonDict, Prompt, Reject
from hsray.site_storage import PLAIN, SiteStorage, Storage, TokenSelection
from hsray.store import open_store
from tests.tiny_tokenizers import make_tokenizer

LIMITS = LeaseLimits(bytes_per_token=10, shard_bytes=1000, max_lease_prompts=4)


def prompt(row: int, tokens: int, masked: int = 0) -> Prompt:
    mask = np.zeros(tokens, np.uint8)
    mask[tokens - masked :] = 1
    return Prompt(row, f"p{row}", np.arange(tokens, dtype=np.int32), mask, "in.jsonl", row + 1)


def reject(row: int, reason: str = "empty") -> Reject:
    return Reject(row, None, "in.jsonl", row + 1, reason, f"detail {row}", "{}")


def surveyed(items: list[Prompt | Reject], selections: tuple[TokenSelection, ...] = ()) -> Estimate:
    estimate = Estimate(selections)
    assert list(survey(items, LIMITS, estimate)) == items
    return estimate


def figures_of(
    estimate: Estimate, tally: Tally, storage: Storage, costs: Costs, *, dtype: str = "bfloat16"
) -> JsonDict:
    return to_json(estimate, tally, storage, hidden_size=64, dtype=dtype, limits=LIMITS, costs=costs)


def test_lengths_are_counted_exactly() -> None:
    estimate = surveyed([prompt(n, length) for n, length in enumerate((1, 2, 3, 4, 7, 8, 100))])

    assert estimate.num_tokens == 125
    assert estimate.histogram() == [(1, 2, 1), (2, 4, 2), (4, 8, 2), (8, 16, 1), (16, 32, 0), (32, 64, 0), (64, 128, 1)]
    assert [estimate.percentile(p) for p in (0, 50, 99)] == [1, 4, 100]
    assert Estimate().histogram() == []
    assert Estimate().percentile(50) == 0


def test_the_leases_are_those_of_the_plan_that_is_stored(tmp_path: Path) -> None:
    items = [prompt(row, int(n)) for row, n in enumerate(np.random.default_rng(0).integers(1, 150, 200))]
    for limits in (LIMITS, LeaseLimits(10, 10**6, 7), LeaseLimits(10, 1, 100)):
        estimate = Estimate()
        for _ in survey(items, limits, estimate):
            pass
        record = build_plan(
            items,
            open_store(str(tmp_path / "run")),
            bytes_per_token=limits.bytes_per_token,
            shard_bytes=limits.shard_bytes,
            max_lease_prompts=limits.max_lease_prompts,
        )
        stored = pq.read_table(tmp_path / "run" / record["leases"])
        assert estimate.leases == stored.num_rows > 1


def test_a_lease_ends_in_front_of_the_prompt_that_does_not_fit() -> None:
    packer = LeasePacker(LIMITS)

    assert [packer.starts_new(n) for n in (50, 50, 1, 1, 1, 1, 1, 500, 1)] == [
        *(False, False, True, False, False, False, True, True, True),
    ]


def test_figures_follow_from_tokens_sites_and_what_was_asked() -> None:
    estimate = surveyed([prompt(0, 100, 60), reject(1), reject(2, "too_long"), reject(3)])
    tally = Tally()

    figures = figures_of(estimate, tally, {"a": PLAIN, "b": PLAIN}, Costs(4, 5.0, 2e6), dtype="float32")

    assert figures["tokens"] == 100
    assert figures["masked_tokens"] == 60
    assert figures["rejects"] == {"empty": 2, "too_long": 1}
    # 100 tokens of 64 values of 4 bytes.
    assert figures["bytes_per_site"] == {"a": {"none": 25_600}, "b": {"none": 25_600}}
    assert figures["bytes"] == 51_200
    assert figures["hours"] == pytest.approx(100 / 20 / 3600)
    assert figures["usd_per_month"] == pytest.approx(102.4)
    assert figures_of(estimate, tally, {"a": PLAIN}, Costs(1, None, 0))["hours"] is None


def test_bytes_are_those_of_the_chosen_codecs_and_tokens() -> None:
    estimate = surveyed([prompt(0, 100, 60), prompt(1, 50)], ("loss",))
    storage = {
        "a": SiteStorage("bf16-hl-zstd"),
        "b": SiteStorage("fp8-token", "loss"),
        "c": SiteStorage("int8-block64-outlier4"),
    }

    figures = figures_of(estimate, Tally(), storage, Costs(1, None, 0))

    # The 60 at the end of the first, and their neighbour.
    assert figures["storage"]["b"] == {"codec": "fp8-token", "tokens": "loss", "stored_tokens": 61}
    assert figures["bytes_per_site"] == {
        "a": {"none": 19_200, "bf16-hl-zstd": 13_056, "fp8-token": 10_200, "int8-block64-outlier4": 12_300},
        "b": {"none": 7_808, "bf16-hl-zstd": 5_309, "fp8-token": 4_148, "int8-block64-outlier4": 5_002},
        "c": {"none": 19_200, "bf16-hl-zstd": 13_056, "fp8-token": 10_200, "int8-block64-outlier4": 12_300},
    }
    assert figures["bytes"] == 13_056 + 4_148 + 12_300


def test_the_report_says_how_each_site_is_stored() -> None:
    text = report(surveyed([prompt(0, 100, 60)], ("loss",)), SiteStorage("fp8-token", "loss"))

    assert "resid_pre_1: 61 tokens (loss), 4.1 kB as fp8-token (with none 7.8 kB, bf16-hl-zstd 5.3 kB" in text


def test_examples_are_the_first_ones_and_no_more_than_three() -> None:
    items: list[Prompt | Reject] = [reject(n) for n in range(5)]
    items += [prompt(5, 4, 4), prompt(6, 4), *(prompt(n, 4, 2) for n in range(7, 12))]

    estimate = surveyed(items)

    assert [r.row for r in estimate.reject_examples["empty"]] == [0, 1, 2]
    assert [p.row for p in estimate.mask_examples] == [7, 8, 9]


def report(estimate: Estimate, storage: SiteStorage = PLAIN, *, terminal: bool = False) -> str:
    out = io.StringIO()
    figures = figures_of(estimate, Tally(), {"resid_pre_1": storage}, Costs(2, None, 0))
    console = Console(file=out, force_terminal=terminal, width=60)
    show_report(console, figures, estimate, Tally(), lambda ids: "".join(chr(97 + i) for i in ids) + "[b]")
    return out.getvalue()


def test_masks_are_in_colour_on_a_terminal_and_in_brackets_everywhere() -> None:
    estimate = surveyed([prompt(0, 6, 2)])

    plain, coloured = report(estimate), report(estimate, terminal=True)

    assert "abcd[b][[ef[b]]]" in plain
    assert "\x1b" not in plain
    assert "\x1b[1;30;42m[[ef[b]]]" in coloured


def test_nothing_to_plan_is_still_a_report() -> None:
    text = report(surveyed([reject(0)]))

    assert "Rejects:" in text
    assert "in.jsonl:1: detail 0" in text


@pytest.mark.parametrize("suffix", ["parquet", "jsonl"])
def test_rejects_are_written_as_they_pass(tmp_path: Path, suffix: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hsray.plan_report._REJECTS_PER_BATCH", 2)
    path = tmp_path / f"rejects.{suffix}"
    items = [reject(0), prompt(1, 2), reject(2), reject(3)]

    passed = write_rejects(items, path)
    assert next(passed) == items[0]
    assert not path.exists()
    assert list(passed) == items[1:]

    rows = pq.read_table(path).to_pylist() if suffix == "parquet" else list(map(json.loads, path.open()))
    assert [row["row"] for row in rows] == [0, 2, 3]
    assert rows[0] == {
        "row": 0,
        "prompt_id": None,
        "file": "in.jsonl",
        "line": 1,
        "reason": "empty",
        "detail": "detail 0",
        "snippet": "{}",
    }
    assert list(tmp_path.iterdir()) == [path]


def test_a_plan_that_breaks_off_leaves_no_file_of_rejects(tmp_path: Path) -> None:
    def items() -> Any:
        yield reject(0)
        raise OSError("gone")

    with pytest.raises(OSError, match="gone"):
        list(write_rejects(items(), tmp_path / "r.jsonl"))

    assert list(tmp_path.iterdir()) == []


# ---------------------------------------------------------------- the command


@pytest.fixture
def config(tmp_path: Path) -> Path:
    model = tmp_path / "model"
    make_tokenizer(model)
    (model / "config.json").write_text(
        json.dumps(
            {
                "architectures": ["LlamaForCausalLM"],
                "model_type": "llama",
                "num_hidden_layers": 8,
                "hidden_size": 16,
                "vocab_size": 320,
                "max_position_embeddings": 128,
                "rms_norm_eps": 1e-6,
                "num_attention_heads": 2,
            }
        )
    )
    rows = [
        {"messages": [{"role": "user", "content": f"{n}"}, {"role": "assistant", "content": "yes"}]} for n in range(5)
    ]
    (tmp_path / "in.jsonl").write_text("".join(json.dumps(row) + "\n" for row in [*rows, {"text": "long " * 99}, {}]))
    path = tmp_path / "config.yaml"
    path.write_text(
        json.dumps(
            {
                "model": {"path": str(model)},
                "prompts": {"path": str(tmp_path / "in.jsonl")},
                "output": {"url": str(tmp_path / "run")},
            }
        )
    )
    return path


def test_the_command_prints_the_plan_and_touches_nothing(config: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = sorted(config.parent.iterdir())

    assert main([str(config), "--tokens-per-second", "1", "--replicas", "2"]) == 0

    text = capsys.readouterr().out
    assert "7 rows = 5 prompts + 2 rejects" in text
    assert "1 too_long" in text
    assert "[[yes<|im_end|>]]" in text
    assert "4 sites, 128 bytes per token, 1 leases" in text
    assert "2 replicas" in text
    assert sorted(config.parent.iterdir()) == before


def test_the_command_gives_figures_to_programs(config: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(config), "prompts.limit=6", "--json", "--rejects", str(config.parent / "r.jsonl")]) == 0

    figures = json.loads(capsys.readouterr().out)
    assert (figures["rows"], figures["prompts"], figures["rejects"]) == (6, 5, {"too_long": 1})
    [file] = figures["files"].values()
    assert file["rows"] == file["prompts"] + sum(file["rejects"].values())
    assert figures["hours"] is None
    assert len((config.parent / "r.jsonl").read_text().splitlines()) == 1


@pytest.mark.parametrize(
    "arguments",
    [["prompts.max_tokens=2"], ["prompts.path=gone.jsonl"], ["prompts.fromat=text"], ["--rejects", "r.csv"]],
)
def test_nothing_to_do_and_mistakes_end_with_code_4(
    config: Path, arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([str(config), *arguments]) == 4
