"""Every configuration in examples/prompts plans its input as docs/prompts.md says."""

import json
from pathlib import Path

import pytest
import yaml

from hsray.config import PromptsConfig
from hsray.plan import main

ROOT = Path(__file__).parents[2]
EXPECTED = {
    "alpaca": (2, {}, "prompt"),
    "messages": (1, {"multimodal": 1}, "messages"),
    "preference": (1, {}, "chosen"),
    "rendered": (1, {}, "rendered"),
    "sharegpt": (2, {"empty_conversation": 1}, "conversations"),
    "text": (2, {}, "text"),
    "tokens": (2, {}, "input_ids"),
    "tools": (1, {}, "messages"),
    "ultrachat": (2, {}, "messages"),
}


def test_every_example_is_expected_here() -> None:
    assert {path.stem for path in (ROOT / "examples" / "prompts").glob("*.yaml")} == EXPECTED.keys()


@pytest.mark.parametrize("name", sorted(EXPECTED))
def test_an_example_plans_its_rows(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(ROOT)

    assert main([f"examples/prompts/{name}.yaml", "--json"]) == 0

    figures = json.loads(capsys.readouterr().out)
    prompts, rejects, format_ = EXPECTED[name]
    assert (figures["prompts"], figures["rejects"]) == (prompts, rejects)
    assert set(figures["formats"]) == {format_}
    # But for text, where all of it counts, answers and nothing else are masked.
    assert figures["masked_tokens"] > 0
    assert (figures["masked_tokens"] < figures["tokens"]) == (name != "text")


def test_the_page_names_every_option_and_every_reason() -> None:
    from hsray.prompts import REASONS

    page = (ROOT / "docs" / "prompts.md").read_text(encoding="utf-8")

    assert [name for name in PromptsConfig.model_fields if f"`{name}`" not in page] == []
    assert [reason for reason in REASONS if f"`{reason}`" not in page] == []
    assert [name for name in EXPECTED if f"{name}.yaml" not in page] == []
    for block in page.split("```yaml\n")[1:]:
        PromptsConfig.model_validate({"path": "x", **yaml.safe_load(block.split("```")[0])["prompts"]})
