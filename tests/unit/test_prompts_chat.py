"""Chat templates and loss masks: the assistant's tokens exactly, or a refusal."""

import json
import socket
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hsray.config import PromptsConfig
from hsray.errors import ConfigError
from hsray.prompts import PromptTokenizer, load_tokenizer, tokenizer_fingerprint
from hsray.prompts.chat import ChatRenderer, RenderedChat, assistant_mask
from hsray.prompts.rejects import RowRejected
from hsray.prompts.rows import ChatRow, Message
from hsray.records import IntArray, MaskArray
from tests.tiny_tokenizers import CHATML, TEMPLATES, make_slow_tokenizer, make_tokenizer

Load = Callable[..., PromptTokenizer]

HELLO = Message("user", "hello")
WORLD = Message("assistant", "world")
AGAIN = Message("user", "how are you?")
TODAY = Message("assistant", "42 today")
TWO_TURNS = (HELLO, WORLD)
FOUR_TURNS = (HELLO, WORLD, AGAIN, TODAY)


@pytest.fixture(scope="module")
def load(tmp_path_factory: pytest.TempPathFactory) -> Load:
    """Load a tokenizer with the named template of `TEMPLATES`."""
    loaded: dict[tuple[str | None, bool], PromptTokenizer] = {}

    def make(template: str | None, *, trim_offsets: bool = False) -> PromptTokenizer:
        key = (template, trim_offsets)
        if key not in loaded:
            directory = tmp_path_factory.mktemp("tokenizer")
            source = None if template is None else TEMPLATES[template]
            make_tokenizer(directory, source, trim_offsets=trim_offsets)
            loaded[key] = load_tokenizer(str(directory), trust_remote_code=False, chat_template=None)
        return loaded[key]

    return make


def render_chat(messages: Sequence[Message] | ChatRow, tokenizer: PromptTokenizer, **options: Any) -> RenderedChat:
    row = messages if isinstance(messages, ChatRow) else ChatRow(tuple(messages))
    config = PromptsConfig(path="in.jsonl", **{"special_tokens": "keep", **options})
    return ChatRenderer(tokenizer, config).render(row)


def masked(tokenizer: PromptTokenizer, *messages: Message, **options: Any) -> tuple[IntArray, MaskArray]:
    chat = render_chat(messages, tokenizer, **options)
    [encoding] = tokenizer.encode([chat.text], with_spans=[True])
    return encoding.ids, assistant_mask(chat, encoding, tokenizer)


def runs(tokenizer: PromptTokenizer, ids: IntArray, mask: MaskArray) -> list[str]:
    """The text of each unbroken run of masked tokens."""
    edges = np.flatnonzero(np.diff(mask.astype(int), prepend=0, append=0))
    return [tokenizer.decode(ids[start:end]) for start, end in edges.reshape(-1, 2)]


def refusal(tokenizer: PromptTokenizer, *messages: Message) -> tuple[str, str]:
    with pytest.raises(RowRejected) as caught:
        masked(tokenizer, *messages)
    return caught.value.reason, caught.value.detail


# ---------------------------------------------------------------------- masks


def test_the_mask_covers_each_answer_and_its_end_of_turn_but_not_the_newline_behind_it(load: Load) -> None:
    tokenizer = load("chatml")

    ids, mask = masked(tokenizer, Message("system", "be brief"), *FOUR_TURNS)

    assert tokenizer.decode(ids) == (
        "<|im_start|>system\nbe brief<|im_end|>\n<|im_start|>user\nhello<|im_end|>\n"
        "<|im_start|>assistant\nworld<|im_end|>\n<|im_start|>user\nhow are you?<|im_end|>\n"
        "<|im_start|>assistant\n42 today<|im_end|>\n"
    )
    assert mask.dtype == np.uint8
    assert len(mask) == len(ids)
    assert runs(tokenizer, ids, mask) == ["world<|im_end|>", "42 today<|im_end|>"]


def test_the_mask_is_unshifted_one_entry_for_each_token(load: Load) -> None:
    tokenizer = load("chatml")

    ids, mask = masked(tokenizer, *TWO_TURNS)

    first = int(np.flatnonzero(mask)[0])
    assert tokenizer.decode(ids[:first]).endswith("<|im_start|>assistant\n")
    assert tokenizer.decode(ids[first:]).startswith("world")


def test_a_conversation_without_an_answer_is_a_prompt_with_an_empty_mask(load: Load) -> None:
    for template in ("chatml", "marked"):
        ids, mask = masked(load(template), Message("system", "be brief"), HELLO)

        # Nothing is added behind the last turn.
        assert load(template).decode(ids).endswith("hello<|im_end|>\n")
        assert not mask.any()


def test_answers_in_a_row_and_at_the_start_are_masked_one_by_one(load: Load) -> None:
    tokenizer = load("chatml")

    ids, mask = masked(tokenizer, WORLD, TODAY, HELLO, WORLD)

    assert runs(tokenizer, ids, mask) == ["world<|im_end|>", "42 today<|im_end|>", "world<|im_end|>"]


def test_an_answer_that_repeats_other_turns_is_found_in_its_own_place(load: Load) -> None:
    tokenizer = load("chatml")

    ids, mask = masked(tokenizer, Message("user", "user"), Message("assistant", "user"), Message("user", "user"))

    assert runs(tokenizer, ids, mask) == ["user<|im_end|>"]
    assert tokenizer.decode(ids[: int(np.flatnonzero(mask)[0])]).endswith("assistant\n")


def test_an_empty_answer_is_its_end_of_turn(load: Load) -> None:
    tokenizer = load("chatml")

    ids, mask = masked(tokenizer, HELLO, Message("assistant", ""), AGAIN)

    assert runs(tokenizer, ids, mask) == ["<|im_end|>"]


def test_a_default_system_turn_of_the_template_is_not_masked(load: Load) -> None:
    tokenizer = load("default_system")

    ids, mask = masked(tokenizer, *FOUR_TURNS)

    assert tokenizer.decode(ids).startswith("<|im_start|>system\nYou are helpful.<|im_end|>\n")
    assert runs(tokenizer, ids, mask) == ["world<|im_end|>", "42 today<|im_end|>"]


def test_without_a_special_token_the_mask_ends_with_the_last_visible_character(load: Load) -> None:
    tokenizer = load("plain")

    ids, mask = masked(tokenizer, *FOUR_TURNS)

    assert [text.strip() for text in runs(tokenizer, ids, mask)] == ["world [END]", "42 today [END]"]


def test_spaces_that_the_offsets_leave_out_are_masked_too(load: Load) -> None:
    tokenizer = load("chatml", trim_offsets=True)

    ids, mask = masked(tokenizer, HELLO, Message("assistant", "  hello   world  "), Message("user", " how"))

    assert runs(tokenizer, ids, mask) == ["  hello   world  <|im_end|>"]


@pytest.mark.parametrize("trim_offsets", [False, True])
def test_generation_markers_decide_whether_the_end_of_turn_is_in(load: Load, trim_offsets: bool) -> None:
    tokenizer = load("marked_content", trim_offsets=trim_offsets)

    ids, mask = masked(tokenizer, HELLO, Message("assistant", "hello   "), AGAIN, TODAY)

    assert runs(tokenizer, ids, mask) == ["hello   ", "42 today"]


def test_a_special_token_inside_an_answer_does_not_end_it(load: Load) -> None:
    tokenizer = load("chatml")

    ids, mask = masked(tokenizer, HELLO, Message("assistant", "write <|im_end|> to stop"), AGAIN)

    assert runs(tokenizer, ids, mask) == ["write <|im_end|> to stop<|im_end|>"]


def test_a_token_that_reaches_over_the_edge_of_an_answer_is_in(load: Load) -> None:
    tokenizer = load("chatml")

    ids, mask = masked(tokenizer, HELLO, Message("assistant", "\n\nhello"))

    # The newline of the header and the first one of the answer are one token, which holds text of the assistant.
    first = int(np.flatnonzero(mask)[0])
    assert tokenizer.decode(ids[first : first + 1]) == "\n\n"
    assert runs(tokenizer, ids, mask) == ["\n\n\nhello<|im_end|>"]


texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=12) | st.sampled_from(
    [
        "hello world",
        "  two  spaces  ",
        "\n\nhello\n",
        "e\u0301\u00e9",
        "\U0001f642\u200d\U0001f4bb",
        "assistant\n",
        "user",
    ]
)
conversations = st.lists(
    st.builds(Message, st.sampled_from(["user", "assistant", "system", "tool"]), texts), min_size=1, max_size=6
)


@settings(deadline=None)  # the first example loads transformers
@given(conversations, st.booleans())
def test_on_any_conversation_both_methods_mask_what_the_assistant_wrote(
    load: Load, messages: list[Message], trim_offsets: bool
) -> None:
    found = load("chatml", trim_offsets=trim_offsets)
    marked = load("marked", trim_offsets=trim_offsets)

    ids, mask = masked(found, *messages)
    marked_ids, marked_mask = masked(marked, *messages)

    np.testing.assert_array_equal(ids, marked_ids)
    np.testing.assert_array_equal(mask, marked_mask)
    answers = [message.content + "<|im_end|>" for message in messages if message.role == "assistant"]
    for run, answer in zip(runs(found, ids, mask), answers, strict=True):
        # Only a newline can be merged over the edge, from the end of the header.
        assert run == answer or (run == "\n" + answer and answer.startswith("\n"))
    assert found.decode(ids) == "".join(f"<|im_start|>{m.role}\n{m.content}<|im_end|>\n" for m in messages)


def test_generation_markers_give_the_mask_that_transformers_gives(load: Load, tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    theirs = AutoTokenizer.from_pretrained(make_tokenizer(tmp_path, TEMPLATES["marked"]), local_files_only=True)
    messages = [Message("system", "caf\u00e9"), HELLO, Message("assistant", " hello\n\n\u4e16\u754c"), AGAIN, TODAY]

    expected = theirs.apply_chat_template(
        [{"role": m.role, "content": m.content} for m in messages], return_dict=True, return_assistant_tokens_mask=True
    )
    ids, mask = masked(load("marked"), *messages)

    assert ids.tolist() == expected["input_ids"]
    assert mask.tolist() == expected["assistant_masks"]
    assert mask.any()


# ------------------------------------------------------------------- refusals


def test_a_template_that_takes_text_out_of_an_answer_is_refused(load: Load) -> None:
    thinking = Message("assistant", "<think>two and two</think>4")

    reason, detail = refusal(load("drops_thinking"), HELLO, thinking)

    assert reason == "template_dropped_turn"
    assert "turn 1 (assistant)" in detail
    assert "'two and two'" in detail
    assert masked(load("drops_thinking"), *FOUR_TURNS)[1].any()


def test_a_template_that_drops_a_turn_is_refused_with_and_without_markers(load: Load) -> None:
    assert refusal(load("drops_turns"), *FOUR_TURNS)[0] == "template_dropped_turn"
    # The last turn's text is in the rendering once, but two turns should have it.
    assert refusal(load("drops_turns"), HELLO, WORLD, HELLO)[0] == "template_dropped_turn"
    assert refusal(load("marked_drops_turns"), HELLO, WORLD, AGAIN)[0] == "template_dropped_turn"
    assert masked(load("drops_turns"), HELLO, WORLD)[1].any()


def test_an_answer_that_is_rendered_otherwise_when_it_is_the_last_is_masked_as_it_stands(load: Load) -> None:
    tokenizer = load("rewrites")

    # What the template puts in front of the last answer, behind its header, is the assistant's to write.
    assert runs(tokenizer, *masked(tokenizer, *TWO_TURNS)) == ["<think>\n\n</think>\n\nworld<|im_end|>"]
    assert runs(tokenizer, *masked(tokenizer, *FOUR_TURNS)) == [
        "world<|im_end|>",
        "<think>\n\n</think>\n\n42 today<|im_end|>",
    ]


def test_a_block_that_the_header_opens_and_a_finished_answer_lacks_moves_no_mask(load: Load) -> None:
    tokenizer = load("header_thinks")

    assert runs(tokenizer, *masked(tokenizer, *FOUR_TURNS)) == ["world<|im_end|>", "42 today<|im_end|>"]


def test_an_answer_before_any_turn_is_found_by_its_header(load: Load) -> None:
    tokenizer = load("default_system")

    ids, mask = masked(tokenizer, WORLD, HELLO)

    assert tokenizer.decode(ids).startswith("<|im_start|>system\nYou are helpful.<|im_end|>\n<|im_start|>assistant\n")
    assert runs(tokenizer, ids, mask) == ["world<|im_end|>"]


def test_a_template_that_renames_the_header_of_an_answer_is_refused(load: Load) -> None:
    reason, detail = refusal(load("other_header"), *TWO_TURNS)

    assert reason == "unstable_template"
    assert "the header of an answer" in detail


def test_a_template_that_writes_by_what_the_assistant_says_is_refused(load: Load) -> None:
    tokenizer = load("by_content")

    reason, detail = refusal(tokenizer, HELLO, Message("assistant", "secret"))

    assert reason == "unstable_template"
    assert "[redacted]" in detail
    assert runs(tokenizer, *masked(tokenizer, *TWO_TURNS)) == ["world<|im_end|>"]


def test_a_template_may_look_into_what_the_user_says(load: Load) -> None:
    tokenizer = load("by_content")

    ids, mask = masked(tokenizer, Message("user", "/loud hello"), WORLD)

    assert tokenizer.decode(ids).startswith("<|im_start|>user\n/loud hello!!<|im_end|>")
    assert runs(tokenizer, ids, mask) == ["world<|im_end|>"]


def test_a_turn_that_is_printed_twice_or_out_of_order_is_refused(load: Load) -> None:
    assert refusal(load("twice"), *TWO_TURNS) == ("unstable_template", "turn 0 is in the rendering twice")
    assert refusal(load("backwards"), *TWO_TURNS)[0] == "unstable_template"


def test_markers_around_the_wrong_turns_are_refused(load: Load) -> None:
    reason, detail = refusal(load("marked_inverted"), *TWO_TURNS)

    assert reason == "mask_mismatch"
    assert detail == "the chat template marks turn 0 (user) as text of the assistant: 'hello<|im_end|>'"


@pytest.mark.parametrize("content", ["world", "plan", "a", ""])
def test_words_of_the_template_that_look_like_the_answer_do_not_move_the_mask(load: Load, content: str) -> None:
    tokenizer = load("plans")

    ids, mask = masked(tokenizer, HELLO, Message("assistant", content))

    assert runs(tokenizer, ids, mask) == [f"<s>plan<s>{content}<|im_end|>"]


def test_tokens_that_do_not_spell_the_answer_are_refused(load: Load) -> None:
    tokenizer = load("chatml")
    chat = render_chat(TWO_TURNS, tokenizer)
    [good, other] = tokenizer.encode([chat.text, chat.text.replace("world", "wordl")], with_spans=[True, True])

    assert assistant_mask(chat, good, tokenizer).any()
    with pytest.raises(RowRejected, match="mask_mismatch"):
        assistant_mask(chat, other, tokenizer)


def test_what_a_template_raises_becomes_the_reason(load: Load) -> None:
    assert refusal(load("alternating"), WORLD, HELLO) == ("template_error", "TemplateError: roles must alternate")
    assert refusal(load("typo"), HELLO)[0] == "template_error"
    assert "str" in refusal(load("typo"), HELLO)[1]
    assert masked(load("alternating"), *FOUR_TURNS)[1].any()


def test_a_tokenizer_that_normalises_text_is_not_mistaken_for_a_wrong_mask(tmp_path: Path) -> None:
    make_tokenizer(tmp_path)
    path = tmp_path / "tokenizer.json"
    data = json.loads(path.read_text())
    path.write_text(json.dumps({**data, "normalizer": {"type": "NFC"}}))
    tokenizer = load_tokenizer(str(tmp_path), trust_remote_code=False, chat_template=None)

    ids, mask = masked(tokenizer, HELLO, Message("assistant", "cafe\u0301 hello"), AGAIN)

    assert runs(tokenizer, ids, mask) == ["caf\u00e9 hello<|im_end|>"]


# ------------------------------------------------------- templates and loading


@pytest.mark.parametrize(
    ("template", "message"),
    [
        (None, r"prompts\.chat_template: the tokenizer in .* has no chat template.*Set it to a file"),
        ("syntax_error", r"prompts\.chat_template: not a valid Jinja template"),
        ("dated", r"prompts\.template_date: the chat template prints today's date"),
    ],
)
def test_a_template_that_no_conversation_can_use_is_a_configuration_error(
    load: Load, template: str | None, message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        render_chat(TWO_TURNS, load(template))


def test_a_template_file_replaces_the_tokenizers_own(tmp_path: Path) -> None:
    directory = make_tokenizer(tmp_path / "tokenizer", TEMPLATES["alternating"])
    (tmp_path / "chat.jinja").write_text("\ufeff" + CHATML.replace("<|im_end|>", "<|im_end|><s>"), encoding="utf-8")

    tokenizer = load_tokenizer(str(directory), trust_remote_code=False, chat_template=str(tmp_path / "chat.jinja"))

    assert render_chat([WORLD], tokenizer).text == "<|im_start|>assistant\nworld<|im_end|><s>\n"


def test_a_set_of_templates_gives_its_default(tmp_path: Path) -> None:
    templates: Any = {"default": CHATML, "tool_use": TEMPLATES["typo"]}
    both, no_default = tmp_path / "both", tmp_path / "no_default"
    make_tokenizer(both, templates)
    make_tokenizer(no_default, {"rag": CHATML, "tool_use": CHATML})  # type: ignore[arg-type]

    assert load_tokenizer(str(both), trust_remote_code=False, chat_template=None).chat_template == CHATML
    with pytest.raises(ConfigError, match=r"prompts\.chat_template: .* no default chat template"):
        load_tokenizer(str(no_default), trust_remote_code=False, chat_template=None)


def test_what_cannot_be_loaded_names_the_key(tmp_path: Path) -> None:
    make_tokenizer(tmp_path / "good")
    (tmp_path / "empty").mkdir()
    broken = make_tokenizer(tmp_path / "broken")
    (broken / "tokenizer.json").write_text("{")

    for path in ("gone", "empty", "broken"):
        with pytest.raises(ConfigError, match=r"model\.path / model\.tokenizer_path: .*" + path):
            load_tokenizer(str(tmp_path / path), trust_remote_code=False, chat_template=None)
    with pytest.raises(ConfigError, match=r"prompts\.chat_template: cannot read .*gone\.jinja"):
        load_tokenizer(str(tmp_path / "good"), trust_remote_code=False, chat_template=str(tmp_path / "gone.jinja"))


def test_loading_never_reaches_for_the_network(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    attempts: list[Any] = []

    def refuse(*address: Any) -> None:
        attempts.append(address)
        raise OSError("no network in this test")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)

    tokenizer = load_tokenizer(str(make_tokenizer(tmp_path)), trust_remote_code=False, chat_template=None)

    assert runs(tokenizer, *masked(tokenizer, *TWO_TURNS)) == ["world<|im_end|>"]
    assert attempts == []


def test_the_day_that_a_template_prints_is_the_one_that_is_set(load: Load) -> None:
    tokenizer = load("dated")

    chat = render_chat(TWO_TURNS, tokenizer, template_date="2024-07-26")

    assert chat.text.startswith("26 Jul 2024<|im_start|>user")


def test_variables_of_the_template_come_from_the_configuration_and_the_row(load: Load) -> None:
    tokenizer = load("effort")
    row = ChatRow(TWO_TURNS, template_args={"reasoning_effort": "high"})

    assert render_chat(TWO_TURNS, tokenizer).text.startswith("effort: none")
    assert render_chat(TWO_TURNS, tokenizer, template_args={"reasoning_effort": "low"}).text.startswith("effort: low")
    assert render_chat(row, tokenizer, template_args={"reasoning_effort": "low"}).text.startswith("effort: high")


def test_a_slow_tokenizer_whose_tokens_spell_bytes_gives_the_same_masks(tmp_path: Path) -> None:
    slow = load_tokenizer(str(make_slow_tokenizer(tmp_path / "slow")), trust_remote_code=True, chat_template=None)
    answer = Message("assistant", " caf\u00e9 \U0001f642\u4e16 hello  ")

    ids, mask = masked(slow, Message("user", "\u4e16\u754c"), answer, AGAIN, TODAY)

    assert slow.decode(ids[mask == 1]) == f"{answer.content}<|im_end|>42 today<|im_end|>"
    assert runs(slow, ids, mask) == [f"{answer.content}<|im_end|>", "42 today<|im_end|>"]
    [encoding] = slow.encode(["a\u4e16b"], with_spans=[True])
    assert encoding.spans is not None
    assert encoding.spans.tolist() == [[0, 1], [1, 2], [1, 2], [1, 2], [2, 3]]


def test_a_slow_tokenizer_that_hides_what_a_token_covers_takes_text_but_no_conversations(tmp_path: Path) -> None:
    from transformers import ByT5Tokenizer

    ByT5Tokenizer().save_pretrained(tmp_path)
    (tmp_path / "chat.jinja").write_text(TEMPLATES["plain"])
    tokenizer = load_tokenizer(str(tmp_path), trust_remote_code=False, chat_template=str(tmp_path / "chat.jinja"))

    assert tokenizer.encode([], with_spans=[]) == []
    [encoding] = tokenizer.encode(["hello"], with_spans=[False])
    assert tokenizer.decode(encoding.ids) == "hello"
    reason, detail = refusal(tokenizer, HELLO, Message("assistant", "caf\u00e9"))
    assert (reason, detail) == ("mask_mismatch", "the tokenizer does not tell which text a token covers")


def test_encoding_adds_nothing_and_cuts_nothing(tmp_path: Path) -> None:
    from tokenizers import Tokenizer
    from tokenizers.processors import TemplateProcessing

    directory = make_tokenizer(tmp_path)
    inner = Tokenizer.from_file(str(directory / "tokenizer.json"))
    inner.post_processor = TemplateProcessing(
        single="<s> $A <|im_end|>", special_tokens=[("<s>", 0), ("<|im_end|>", 2)]
    )
    inner.enable_truncation(4)
    inner.enable_padding(length=64)
    inner.save(str(directory / "tokenizer.json"))
    tokenizer = load_tokenizer(str(directory), trust_remote_code=False, chat_template=None)

    encodings = tokenizer.encode(["hello world" * 9, "", "<s>hello"], with_spans=[False, False, False])

    assert [tokenizer.decode(encoding.ids) for encoding in encodings] == ["hello world" * 9, "", "<s>hello"]


# ---------------------------------------------------------------- fingerprint


def test_the_fingerprint_follows_tokenizer_and_template_and_nothing_else(tmp_path: Path) -> None:
    directory = make_tokenizer(tmp_path / "a")
    same = make_tokenizer(tmp_path / "b")
    template = tmp_path / "chat.jinja"
    template.write_text(CHATML)
    base = tokenizer_fingerprint(str(directory), None)

    assert len(base) == 32
    assert tokenizer_fingerprint(str(same), None) == base

    (same / "model.safetensors").write_bytes(b"weights")
    assert tokenizer_fingerprint(str(same), None) == base

    seen = {base, tokenizer_fingerprint(str(directory), str(template))}
    for name in ("tokenization_kimi.py", "tiktoken.model", "chat_template.jinja", "special_tokens_map.json"):
        (same / name).write_text(f"{name} changed")
        seen.add(tokenizer_fingerprint(str(same), None))
    (same / "tokenization_kimi.py").rename(same / "tokenization_kimy.py")
    seen.add(tokenizer_fingerprint(str(same), None))
    template.write_text(CHATML + " ")
    seen.add(tokenizer_fingerprint(str(directory), str(template)))
    assert len(seen) == 8


def test_a_fingerprint_of_nothing_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="holds no tokenizer files"):
        tokenizer_fingerprint(str(tmp_path), None)
    with pytest.raises(ConfigError, match="is not a directory"):
        tokenizer_fingerprint(str(tmp_path / "gone"), None)
    make_tokenizer(tmp_path)
    with pytest.raises(ConfigError, match=r"prompts\.chat_template: cannot read"):
        tokenizer_fingerprint(str(tmp_path), str(tmp_path / "gone.jinja"))


def test_importing_prompts_loads_neither_torch_nor_transformers() -> None:
    heavy = "torch", "transformers", "tokenizers", "ray", "sglang"
    program = f"import sys, hsray.prompts; print([name for name in {heavy!r} if name in sys.modules])"

    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)

    assert done.stdout.strip() == "[]"
