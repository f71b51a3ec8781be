"""Renderings and masks under the behaviours of real chat templates, against expectations written by hand.

`masked` writes a conversation as text, with the masked tokens in double brackets.
"""

from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hsray.config import PromptsConfig
from hsray.prompts import PromptTokenizer, load_tokenizer
from hsray.prompts.chat import ChatRenderer, assistant_mask
from hsray.prompts.rejects import RowRejected
from hsray.prompts.rows import ChatRow, Message
from hsray.prompts.shapes import parse_row
from hsray.quickstart import resolve_builtin
from tests import chat_templates
from tests.tiny_tokenizers import make_tokenizer

Masked = Callable[..., str]

USER = {"role": "user", "content": "hello"}
ANSWER = {"role": "assistant", "content": "world"}
AGAIN = {"role": "user", "content": "again?"}
TODAY = {"role": "assistant", "content": "42 today"}
SYSTEM = {"role": "system", "content": "be brief"}
TOOLS = [{"type": "function", "function": {"name": "now", "parameters": {"type": "object", "properties": {}}}}]
CALL = {
    "role": "assistant",
    "content": None,
    "tool_calls": [{"id": "c1", "type": "function", "function": {"name": "now", "arguments": '{"tz": "Rome"}'}}],
}
RESULT = {"role": "tool", "tool_call_id": "c1", "content": "10:42"}


@pytest.fixture(scope="module")
def tokenizers(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], PromptTokenizer]:
    loaded: dict[str, PromptTokenizer] = {}

    def load(name: str) -> PromptTokenizer:
        if name not in loaded:
            directory = tmp_path_factory.mktemp(name)
            make_tokenizer(directory, getattr(chat_templates, name), special=chat_templates.SPECIAL)
            loaded[name] = load_tokenizer(str(directory), trust_remote_code=False, chat_template=None)
        return loaded[name]

    return load


@pytest.fixture
def masked(tokenizers: Callable[[str], PromptTokenizer]) -> Masked:
    def render(name: str, *turns: dict[str, Any], row: dict[str, Any] | None = None, **options: Any) -> str:
        return show(tokenizers(name), {"messages": list(turns), **(row or {})}, **options)

    return render


def show(tokenizer: PromptTokenizer, row: dict[str, Any], **options: Any) -> str:
    config = PromptsConfig(path="in.jsonl", **options)
    parsed = parse_row(row, config, 10**6)[1]
    assert isinstance(parsed, ChatRow)
    chat = ChatRenderer(tokenizer, config).render(parsed)
    [encoding] = tokenizer.encode([chat.text], with_spans=[True])
    mask = assistant_mask(chat, encoding, tokenizer)
    edges = [0, *np.flatnonzero(np.diff(mask)) + 1, len(mask)]
    texts = [tokenizer.decode(encoding.ids[a:b]) for a, b in pairwise(edges)]
    assert "".join(texts) == chat.text
    return "".join(f"[[{t}]]" if mask[a] else t for t, a in zip(texts, edges[:-1], strict=True))


def refusal(masked: Masked, *args: Any, **options: Any) -> tuple[str, str]:
    with pytest.raises(RowRejected) as caught:
        masked(*args, **options)
    return caught.value.reason, caught.value.detail


def test_smollm2_of_the_quickstart() -> None:
    smollm2 = load_tokenizer(
        resolve_builtin("hsray:smollm2-135m-instruct"), trust_remote_code=False, chat_template=None
    )

    assert show(smollm2, {"messages": [USER, ANSWER, AGAIN, TODAY]}) == (
        "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n"
        "<|im_start|>user\nhello<|im_end|>\n<|im_start|>assistant\n[[world<|im_end|>]]\n"
        "<|im_start|>user\nagain?<|im_end|>\n<|im_start|>assistant\n[[42 today<|im_end|>]]\n"
    )
    assert show(smollm2, {"messages": [SYSTEM, USER, ANSWER]}, mask_turns="last") == (
        "<|im_start|>system\nbe brief<|im_end|>\n<|im_start|>user\nhello<|im_end|>\n"
        "<|im_start|>assistant\n[[world<|im_end|>]]\n"
    )


# ---------------------------------------------------------------------- Qwen3


def test_qwen3_gives_the_last_answer_an_empty_block_of_reasoning(masked: Masked) -> None:
    assert masked("QWEN3", USER, ANSWER, AGAIN, TODAY) == (
        "<|im_start|>user\nhello<|im_end|>\n<|im_start|>assistant\n[[world<|im_end|>]]\n"
        "<|im_start|>user\nagain?<|im_end|>\n"
        "<|im_start|>assistant\n[[<think>\n\n</think>\n\n42 today<|im_end|>]]\n"
    )
    # Without thinking, the header of an answer has that block already.
    assert masked("QWEN3", USER, ANSWER, template_args={"enable_thinking": False}) == (
        "<|im_start|>user\nhello<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n[[world<|im_end|>]]\n"
    )


@pytest.mark.parametrize(
    "reasoned",
    [
        lambda text, why: {"role": "assistant", "content": text, "reasoning_content": why},
        lambda text, why: {"role": "assistant", "content": text, "thinking": why},
        lambda text, why: {"role": "assistant", "content": f"<think>\n{why}\n</think>\n\n{text}"},
        lambda text, why: {"role": "assistant", "content": f"{why}\n</think>\n\n{text}"},
    ],
    ids=["key", "other-key", "inline", "closing-tag-only"],
)
def test_qwen3_shows_reasoning_of_the_last_answer_and_drops_that_of_earlier_ones(
    masked: Masked, reasoned: Callable[[str, str], dict[str, str]]
) -> None:
    assert masked("QWEN3", USER, reasoned("world", "first"), AGAIN, reasoned("42 today", "six sevens")) == (
        "<|im_start|>user\nhello<|im_end|>\n<|im_start|>assistant\n[[world<|im_end|>]]\n"
        "<|im_start|>user\nagain?<|im_end|>\n"
        "<|im_start|>assistant\n[[<think>\nsix sevens\n</think>\n\n42 today<|im_end|>]]\n"
    )


def test_qwen3_masks_calls_whole_and_keeps_reasoning_between_them(masked: Masked) -> None:
    call = {**CALL, "reasoning_content": "need the time"}

    text = masked("QWEN3", USER, call, RESULT, TODAY, row={"tools": TOOLS})

    assert text == (
        '<|im_start|>system\n# Tools\n<tools>\n{"type": "function", "function": {"name": "now", "parameters": '
        '{"type": "object", "properties": {}}}}\n</tools><|im_end|>\n'
        "<|im_start|>user\nhello<|im_end|>\n"
        "<|im_start|>assistant\n[[<think>\nneed the time\n</think>\n\n\n<tool_call>\n"
        '{"name": "now", "arguments": {"tz": "Rome"}}\n</tool_call><|im_end|>]]\n'
        "<|im_start|>user\n<tool_response>\n10:42\n</tool_response><|im_end|>\n"
        "<|im_start|>assistant\n[[<think>\n\n</think>\n\n42 today<|im_end|>]]\n"
    )
    assert masked("QWEN3", USER, call, RESULT, TODAY, row={"tools": TOOLS}, mask_turns="last").count("[[") == 1


def test_qwen3_looks_for_results_of_tools_in_user_turns(masked: Masked) -> None:
    wrapped = {"role": "user", "content": "<tool_response>\n10:42\n</tool_response>"}

    text = masked("QWEN3", USER, CALL, wrapped, TODAY, row={"tools": TOOLS})

    assert text.endswith("[[<think>\n\n</think>\n\n42 today<|im_end|>]]\n")
    assert text.count("[[") == 2


# -------------------------------------------------------------------- Llama 3

LLAMA_HEAD = "<s><|start_header_id|>system<|end_header_id|>\n\nToday Date: 26 Jul 2024\n\n"


def test_llama3_writes_its_own_beginning_and_a_date_that_is_pinned(masked: Masked) -> None:
    expected = (
        f"{LLAMA_HEAD}be brief<|eot_id|>"
        "<|start_header_id|>user<|end_header_id|>\n\nhello<|eot_id|>"
        "<|start_header_id|>assistant<|end_header_id|>\n\n[[world<|eot_id|>]]"
    )
    padded = {"role": "assistant", "content": " world \n"}

    assert masked("LLAMA3", SYSTEM, USER, ANSWER, template_date="2024-07-26") == expected
    assert masked("LLAMA3", SYSTEM, USER, padded, template_args={"date_string": "26 Jul 2024"}) == expected


def test_llama3_prints_arguments_as_objects_and_one_call_a_turn(masked: Masked) -> None:
    text = masked("LLAMA3", USER, CALL, RESULT, TODAY, row={"tools": TOOLS}, template_date="2024-07-26")
    two = {**CALL, "tool_calls": CALL["tool_calls"] * 2}

    assert text.endswith(
        "<|start_header_id|>assistant<|end_header_id|>\n\n"
        '[[{"name": "now", "parameters": {"tz": "Rome"}}<|eot_id|>]]'
        "<|start_header_id|>ipython<|end_header_id|>\n\n10:42<|eot_id|>"
        "<|start_header_id|>assistant<|end_header_id|>\n\n[[42 today<|eot_id|>]]"
    )
    options: dict[str, Any] = {"row": {"tools": TOOLS}, "template_date": "2024-07-26"}
    assert refusal(masked, "LLAMA3", USER, two, **options)[0] == "template_error"
    # Such a template prints the call and leaves out what was said beside it.
    assert refusal(masked, "LLAMA3", USER, {**CALL, "content": "Let me look."}, **options) == (
        "template_dropped_turn",
        "turn 1 (assistant) is not in the rendering: the chat template drops, shortens or rewrites 'Let me look.'",
    )


# -------------------------------------------------------------------- Mistral


def test_mistral_has_no_header_and_moves_the_system_text(masked: Masked) -> None:
    assert masked("MISTRAL", SYSTEM, USER, ANSWER, AGAIN, TODAY) == (
        "<s>[INST]hello[/INST][[ world</s>]][INST]be brief\n\nagain?[/INST][[ 42 today</s>]]"
    )


def test_mistral_refuses_turns_that_do_not_alternate(masked: Masked) -> None:
    for turns in ((ANSWER, USER), (USER, USER, ANSWER), (USER, ANSWER, ANSWER)):
        reason, detail = refusal(masked, "MISTRAL", *turns)
        assert reason == "template_error"
        assert "must alternate" in detail


# ---------------------------------------------------------------------- Gemma


def test_gemma_refuses_a_system_turn_that_can_be_merged(masked: Masked) -> None:
    assert refusal(masked, "GEMMA", SYSTEM, USER, ANSWER) == (
        "template_error",
        "TemplateError: System role not supported",
    )
    assert masked("GEMMA", SYSTEM, USER, ANSWER, system_turns="merge") == (
        "<s><start_of_turn>user\nbe brief\n\nhello<end_of_turn>\n<start_of_turn>model\n[[world<end_of_turn>]]\n"
    )


# ------------------------------------------------------------------- DeepSeek


def test_deepseek_header_opens_what_a_finished_answer_closes_only(masked: Masked) -> None:
    inline = {"role": "assistant", "content": "<think>first</think>world"}

    assert masked("DEEPSEEK", USER, inline, AGAIN, TODAY) == (
        "<s><|User|>hello<|Assistant|>[[</think>world<|eos|>]]<|User|>again?<|Assistant|>[[</think>42 today<|eos|>]]"
    )
    assert refusal(masked, "DEEPSEEK", USER, inline)[0] == "template_dropped_turn"


def test_deepseek_wants_arguments_as_text(masked: Masked) -> None:
    assert masked("DEEPSEEK", USER, CALL, RESULT, TODAY) == (
        "<s><|User|>hello<|Assistant|>"
        '[[</think><|call_begin|>now<|call_arguments|>{"tz": "Rome"}<|call_end|><|eos|>]]'
        "<|User|>[result] 10:42<|Assistant|>[[</think>42 today<|eos|>]]"
    )
    assert refusal(masked, "DEEPSEEK", USER, ANSWER, row={"tools": TOOLS})[0] == "template_dropped_tools"


# -------------------------------------------------------------------- gpt-oss

OSS_HEAD = "<|start|>system<|message|>Current date: 2025-08-05\nReasoning: medium<|end|>"


def test_gpt_oss_ends_the_last_answer_in_another_way(masked: Masked) -> None:
    reasoned = {**TODAY, "reasoning_content": "six sevens"}

    assert masked("GPT_OSS", USER, ANSWER, AGAIN, reasoned, template_date="2025-08-05") == (
        f"{OSS_HEAD}<|start|>user<|message|>hello<|end|>"
        "<|start|>assistant[[<|channel|>final<|message|>world<|end|>]]"
        "<|start|>user<|message|>again?<|end|>"
        "<|start|>assistant[[<|channel|>analysis<|message|>six sevens<|end|>"
        "<|start|>assistant<|channel|>final<|message|>42 today<|return|>]]"
    )


def test_gpt_oss_calls_effort_and_harmony_roles(masked: Masked) -> None:
    row = {
        "conversations": [
            USER,
            {**CALL, "thinking": "clock"},
            RESULT,
            {"role": "assistant_analysis", "content": "got it"},
            {"role": "assistant_final", "content": "42 today"},
        ],
        "messages": None,
        "reasoning_effort": "low",
    }

    assert masked("GPT_OSS", row=row, template_date="2025-08-05") == (
        f"{OSS_HEAD.replace('medium', 'low')}<|start|>user<|message|>hello<|end|>"
        "<|start|>assistant[[<|channel|>analysis<|message|>clock<|end|>"
        '<|start|>assistant to=functions.now<|channel|>commentary json<|message|>{"tz": "Rome"}<|call|>]]'
        "<|start|>functions.now to=assistant<|channel|>commentary<|message|>10:42<|end|>"
        "<|start|>assistant[[<|channel|>analysis<|message|>got it<|end|>"
        "<|start|>assistant<|channel|>final<|message|>42 today<|return|>]]"
    )


# ------------------------------------------------------------------------ GLM


def test_glm_ends_an_answer_where_its_text_ends(masked: Masked) -> None:
    reasoned = {**TODAY, "reasoning": "six sevens"}

    assert masked("GLM", USER, ANSWER, AGAIN, reasoned) == (
        "<|user|>\nhello<|assistant|>[[\n<think></think>\nworld]]"
        "<|user|>\nagain?<|assistant|>[[\n<think>six sevens</think>\n42 today]]"
    )


# ---------------------------------------------------------- generation markers


def test_marked_templates_decide_and_options_still_count(masked: Masked) -> None:
    reasoned = {**TODAY, "reasoning_content": "six sevens"}
    turns = (USER, ANSWER, AGAIN, CALL, RESULT, reasoned)
    tools = {"tools": []}

    assert masked("MARKED", *turns, row=tools) == (
        "<|im_start|>user\nhello<|im_end|>\n<|im_start|>assistant\n[[world<|im_end|>]]\n"
        "<|im_start|>user\nagain?<|im_end|>\n"
        '<|im_start|>assistant\n[[<tool_call>now({"tz": "Rome"})</tool_call><|im_end|>]]\n'
        "<|im_start|>tool\n10:42<|im_end|>\n"
        "<|im_start|>assistant\n[[<think>\nsix sevens\n</think>\n42 today<|im_end|>]]\n"
    )
    last = masked("MARKED", *turns, mask_turns="last")
    assert last.count("[[") == 1
    assert last.endswith("[[<think>\nsix sevens\n</think>\n42 today<|im_end|>]]\n")
    unwanted = masked("MARKED", USER, {**ANSWER, "weight": 0}, AGAIN, TODAY)
    assert unwanted.count("[[") == 1
    assert "[[42 today" in unwanted


@pytest.mark.parametrize("name", ["QWEN3", "LLAMA3", "MISTRAL", "GEMMA", "DEEPSEEK", "GPT_OSS", "GLM", "MARKED"])
def test_last_turn_only_is_the_last_of_all_turns_under_every_template(masked: Masked, name: str) -> None:
    turns = (USER, ANSWER, AGAIN, TODAY)

    every = masked(name, *turns, template_date="2025-08-05")
    last = masked(name, *turns, template_date="2025-08-05", mask_turns="last")

    first, second = every.split("[[")[1:]
    assert "world" in first.split("]]")[0]
    assert last.split("[[")[1:] == [second]


@pytest.mark.parametrize("name", ["QWEN3", "LLAMA3", "MISTRAL", "GEMMA", "DEEPSEEK", "GPT_OSS", "GLM", "MARKED"])
def test_masks_do_not_depend_on_the_conversations_that_were_rendered_before(
    tokenizers: Callable[[str], PromptTokenizer], name: str
) -> None:
    config = PromptsConfig(path="in.jsonl", template_date="2025-08-05")
    renderer = ChatRenderer(tokenizers(name), config)
    rows = [
        ChatRow(tuple(Message(("user", "assistant")[i % 2], f"text {n} {i}") for i in range(length)))  # type: ignore[arg-type]
        for n, length in enumerate((2, 4, 2, 1, 3, 4, 2))
    ]

    together = [renderer.render(row) for row in rows]

    assert together == [ChatRenderer(tokenizers(name), config).render(row) for row in rows]


def test_a_row_with_tools_for_a_template_without_any_is_refused(tmp_path: Path) -> None:
    chatml = load_tokenizer(str(make_tokenizer(tmp_path)), trust_remote_code=False, chat_template=None)

    with pytest.raises(RowRejected, match=r"template_dropped_tools: the chat template does not print the tool 'now'"):
        show(chatml, {"messages": [{**USER, "content": "what is it now?"}], "tools": TOOLS})
    with pytest.raises(RowRejected, match=r"template_dropped_turn: a tool call of turn 1 \(assistant\)"):
        show(chatml, {"messages": [USER, CALL, RESULT]})
