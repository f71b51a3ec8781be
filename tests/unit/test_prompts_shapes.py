"""What a row holds, and which rows are refused for what reason."""

import pickle
import re
from typing import Any, ClassVar

import numpy as np
import pytest

from hsray.config import PromptsConfig
from hsray.prompts.identity import content_id, explicit_id
from hsray.prompts.rejects import REASONS, RowRejected
from hsray.prompts.rows import ChatRow, Message, TextRow, TokenRow, ToolCall
from hsray.prompts.shapes import parse_row, row_columns

VOCAB = 1000
USER = {"role": "user", "content": "hi"}


def parse(data: dict[str, Any], **options: Any) -> Any:
    return parse_row(data, PromptsConfig(path="in.jsonl", **options), VOCAB)[1]


def reason(data: dict[str, Any], **options: Any) -> tuple[str, str]:
    with pytest.raises(RowRejected) as caught:
        parse(data, **options)
    assert caught.value.reason in REASONS
    return caught.value.reason, caught.value.detail


def chat(*turns: tuple[str, str]) -> ChatRow:
    return ChatRow(tuple(Message(role, content) for role, content in turns))


@pytest.mark.parametrize(
    ("data", "expected"),
    [
        ({"text": " hello\n"}, TextRow(" hello\n")),
        ({"text": ""}, TextRow("")),
        ({"text": "a", "messages": None, "conversations": None, "input_ids": None, "extra": [1]}, TextRow("a")),
        ({"messages": [USER, {"role": "assistant", "content": "yo"}]}, chat(("user", "hi"), ("assistant", "yo"))),
        ({"messages": [{"role": "developer", "content": ""}]}, chat(("developer", ""))),
        (
            {"messages": [{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}]},
            chat(("user", "ab")),
        ),
        (
            {
                "conversations": [
                    {"from": "system", "value": "s"},
                    {"from": "human", "value": "h"},
                    {"from": "gpt", "value": "g"},
                    {"from": "observation", "value": "o"},
                    {"from": "chatgpt", "value": "c"},
                ]
            },
            chat(("system", "s"), ("user", "h"), ("assistant", "g"), ("tool", "o"), ("assistant", "c")),
        ),
        ({"conversations": [USER]}, chat(("user", "hi"))),
        # As Parquet gives a column in which some rows use one spelling and some the other.
        (
            {"conversations": [{"from": None, "value": None, "role": "user", "content": "hi"}]},
            chat(("user", "hi")),
        ),
        # Keys that carry nothing, as columnar storage and converters fill them in.
        (
            {"messages": [{**USER, "tool_calls": [], "reasoning_content": " "}], "tools": "[]", "images": None},
            chat(("user", "hi")),
        ),
        ({"prompt": "hi", "messages": [{**USER, "weight": 1}]}, chat(("user", "hi"))),
        ({"messages": [{**USER, "name": "bob"}]}, ChatRow((Message("user", "hi", name="bob"),))),
        (
            {"messages": [USER, {"role": "assistant", "content": "yo", "weight": 0}]},
            ChatRow((Message("user", "hi"), Message("assistant", "yo", trained=False))),
        ),
        # Roles in any case, and other names of the list and of the text.
        (
            {"conversation": [{"role": "User", "text": "Hi"}, {"role": "Assistant", "text": "Hello"}]},
            chat(("user", "Hi"), ("assistant", "Hello")),
        ),
        (
            {"conversation": [USER], "generated_message": {"role": "assistant", "content": "yo"}},
            chat(("user", "hi"), ("assistant", "yo")),
        ),
        ({"conversations": '[{"from": "human", "value": "hi"}]'}, chat(("user", "hi"))),
        ({"messages": [USER], "system": "Be brief."}, chat(("system", "Be brief."), ("user", "hi"))),
        (
            {"messages": [{"role": "system", "content": "s"}, USER], "system": "s"},
            chat(("system", "s"), ("user", "hi")),
        ),
        # Reasoning by each of its names, and in the parts of harmony.
        *(
            (
                {"messages": [USER, {"role": "assistant", "content": "9", key: "three threes"}]},
                ChatRow((Message("user", "hi"), Message("assistant", "9", reasoning="three threes"))),
            )
            for key in ("reasoning_content", "reasoning", "thinking")
        ),
        (
            {"messages": [USER, {"role": "assistant", "content": None, "reasoning_content": "all of it"}]},
            ChatRow((Message("user", "hi"), Message("assistant", "", reasoning="all of it"))),
        ),
        (
            {
                "conversations": [
                    USER,
                    {"role": "assistant_analysis", "content": "greet"},
                    {"role": "assistant_final", "content": "Hello"},
                    USER,
                    {"role": "assistant_analysis", "content": "again"},
                ],
                "reasoning_effort": "low",
            },
            ChatRow(
                (
                    Message("user", "hi"),
                    Message("assistant", "Hello", reasoning="greet"),
                    Message("user", "hi"),
                    Message("assistant", "", reasoning="again"),
                ),
                template_args={"reasoning_effort": "low"},
            ),
        ),
        ({"messages": [USER], "chat_template_kwargs": {"a": 1}}, ChatRow((Message("user", "hi"),), (), {"a": 1})),
        # Prompts and instructions.
        ({"prompt": "hi"}, chat(("user", "hi"))),
        ({"question": "2+2?", "answer": "4"}, chat(("user", "2+2?"), ("assistant", "4"))),
        ({"input": "hi"}, chat(("user", "hi"))),
        ({"prompt": [USER]}, chat(("user", "hi"))),
        (
            {"instruction": "Translate.", "input": "Hund", "output": "dog", "text": "### Instruction: ..."},
            chat(("user", "Translate.\nHund"), ("assistant", "dog")),
        ),
        ({"instruction": "Hi", "input": "", "output": "Yo"}, chat(("user", "Hi"), ("assistant", "Yo"))),
        (
            {"instruction": "b", "output": "c", "system": "s", "history": [["a", "A"]]},
            chat(("system", "s"), ("user", "a"), ("assistant", "A"), ("user", "b"), ("assistant", "c")),
        ),
    ],
)
def test_rows_of_text_and_conversations_are_recognised(data: dict[str, Any], expected: Any) -> None:
    assert parse(data) == expected


WEATHER = {"type": "function", "function": {"name": "w", "parameters": {"type": "object"}}}


@pytest.mark.parametrize(
    "tools", [[WEATHER], [WEATHER["function"]], '[{"name": "w", "parameters": {"type": "object"}}]', ['{"name": "w"}']]
)
def test_tools_are_taken_as_objects_or_text_and_given_in_the_form_of_openai(tools: Any) -> None:
    (tool,) = parse({"messages": [USER], "tools": tools}).tools

    assert tool["type"] == "function"
    assert tool["function"]["name"] == "w"


@pytest.mark.parametrize("tools", [None, [], "", "[]", "null"])
def test_no_tools_are_no_tools(tools: Any) -> None:
    assert parse({"messages": [USER], "tools": tools}) == chat(("user", "hi"))


def _openai_call(arguments: Any) -> dict[str, Any]:
    return {"id": "c1", "type": "function", "function": {"name": "w", "arguments": arguments}}


@pytest.mark.parametrize(
    ("turn", "call"),
    [
        (
            {"role": "assistant", "content": None, "tool_calls": [_openai_call('{"city": "Rome"}')]},
            ToolCall("w", {"city": "Rome"}, "c1"),
        ),
        ({"role": "assistant", "tool_calls": [_openai_call({"city": "Rome"})]}, ToolCall("w", {"city": "Rome"}, "c1")),
        ({"role": "assistant", "tool_calls": [_openai_call("{broken")]}, ToolCall("w", "{broken", "c1")),
        ({"role": "assistant", "tool_calls": [_openai_call(None)]}, ToolCall("w", {}, "c1")),
        ({"role": "assistant", "content": "", "function_call": {"name": "w", "arguments": "{}"}}, ToolCall("w", {})),
        ({"from": "function_call", "value": '{"name": "w", "arguments": {"a": [1]}}'}, ToolCall("w", {"a": [1]})),
        ({"from": "function_call", "value": '[{"name": "w", "arguments": "[1]"}]'}, ToolCall("w", "[1]")),
    ],
)
def test_calls_are_read_in_each_spelling(turn: dict[str, Any], call: ToolCall) -> None:
    row = parse({"conversations": [USER, turn]})

    assert row.messages[1] == Message("assistant", "", tool_calls=(call,))


@pytest.mark.parametrize(
    ("content", "text"),
    [
        ("4 degrees", "4 degrees"),
        ("", ""),
        ({"t": 4, "\u00e9": None}, '{"t": 4, "\u00e9": null}'),
        ([1, 2], "[1, 2]"),
        ([{"type": "text", "text": "4"}], "4"),
    ],
)
def test_what_a_tool_answers_is_text_or_data(content: Any, text: str) -> None:
    turn = {"role": "tool", "tool_call_id": "c1", "content": content}

    assert parse({"messages": [USER, turn]}).messages[1] == Message("tool", text, call_id="c1")


def test_a_role_map_adds_roles_and_overrides_known_ones() -> None:
    turns = [USER, {"from": "laguna_s", "value": "a"}, {"from": "bing", "value": "b"}]

    row = parse({"conversations": turns}, role_map={"laguna_s": "assistant", "bing": "tool"})

    assert [message.role for message in row.messages] == ["user", "assistant", "tool"]


def test_a_system_turn_can_be_merged_into_the_first_user_turn() -> None:
    row = {"messages": [{"role": "system", "content": "s"}, USER, {"role": "assistant", "content": "a"}]}

    assert parse(row, system_turns="merge") == chat(("user", "s\n\nhi"), ("assistant", "a"))
    assert parse({"messages": row["messages"][:1]}, system_turns="merge") == chat(("system", "s"))
    assert reason({"messages": [row["messages"][0], row["messages"][2]]}, system_turns="merge")[0] == "bad_field"


def test_a_pair_is_two_prompts_of_which_one_is_asked_for() -> None:
    answer = {"role": "assistant", "content": "yes"}
    whole = {"prompt": "hi", "chosen": [USER, answer], "rejected": [USER, {**answer, "content": "no"}]}
    apart = {"prompt": "hi", "chosen": "yes", "rejected": "no"}
    listed = {"prompt": [USER], "chosen": [answer], "rejected": [answer]}

    for row in (whole, apart, listed):
        assert reason(row)[0] == "ambiguous_shape"
        assert parse(row, format="chosen") == chat(("user", "hi"), ("assistant", "yes"))
    assert (
        parse(whole, format="rejected") == parse(apart, format="rejected") == chat(("user", "hi"), ("assistant", "no"))
    )
    assert reason({"chosen": "yes", "rejected": "no"}, format="chosen")[0] == "missing_field"


@pytest.mark.parametrize(
    ("row", "detail"),
    [
        ({"messages": [USER], "status": "error"}, "the row has the status error"),
        ({"messages": [USER], "error": "timeout"}, "the row has an error: 'timeout'"),
        ({"messages": [USER], "finish_reason": "length"}, "its answer was cut"),
        ({"messages": [USER, {"role": "assistant", "content": "a", "finish_reason": "length"}]}, r"messages\[1\]"),
    ],
)
def test_rows_that_a_script_marked_as_failed_are_refused_unless_told(row: dict[str, Any], detail: str) -> None:
    code, text = reason(row)

    assert code == "source_error"
    assert re.search(detail, text)
    assert parse({"messages": [USER], "status": "success", "error": None, "finish_reason": "stop"})
    if len(row) == 2:
        assert parse(row, ignore_fields=["status", "error", "finish_reason"]) == chat(("user", "hi"))


@pytest.mark.parametrize(
    ("data", "ids", "mask"),
    [
        ({"input_ids": [0, 5, 999]}, [0, 5, 999], None),
        ({"input_ids": [1, 2], "loss_mask": [0, 1]}, [1, 2], [0, 1]),
        ({"input_ids": [1, 2], "loss_mask": [False, True]}, [1, 2], [0, 1]),
        ({"input_ids": [1, 2], "loss_mask": None, "labels": None}, [1, 2], None),
        ({"input_ids": [1, 2], "attention_mask": [1, 1], "text": "ignored"}, [1, 2], None),
        ({"input_ids": [1, 2], "loss_mask": [0, 1], "labels": [-100, 2]}, [1, 2], [0, 1]),
        ({"input_ids": []}, [], None),
        ({"input_ids": [[1, 2]], "loss_mask": [[0, 1]]}, [1, 2], [0, 1]),
        ({"input_ids": [1, 2], "loss_mask": [0.0, 1.0]}, [1, 2], [0, 1]),
        ({"input_ids": [1, 2], "assistant_masks": [0, 1]}, [1, 2], [0, 1]),
        ({"input_ids": [1, 2, 3], "labels": [-100, 2, 3]}, [1, 2, 3], [0, 1, 1]),
        ({"input_ids": [1, 2], "labels": [-100, -100]}, [1, 2], [0, 0]),
        # Padding at either end is taken off, whatever its ids and labels are.
        (
            {"input_ids": [-100, 7, 8, 0], "attention_mask": [0, 1, 1, 0], "labels": [-100, -100, 8, -100]},
            [7, 8],
            [0, 1],
        ),
        ({"input_ids": [0, 0], "attention_mask": [0, 0]}, [], None),
        ({"input_ids": np.array([3, 4], np.int64), "loss_mask": np.array([1, 0], np.uint8)}, [3, 4], [1, 0]),
    ],
)
def test_token_rows_become_arrays(data: dict[str, Any], ids: list[int], mask: list[int] | None) -> None:
    row = parse(data)

    assert isinstance(row, TokenRow)
    assert row.input_ids.dtype == np.int32
    assert row.input_ids.tolist() == ids
    if mask is None:
        assert row.loss_mask is None
    else:
        assert row.loss_mask is not None
        assert row.loss_mask.dtype == np.uint8
        assert row.loss_mask.tolist() == mask


@pytest.mark.parametrize(
    ("data", "expected", "detail"),
    [
        ({}, "unknown_shape", "no key that holds a prompt; the row has the keys: none"),
        ({"body": "a", "text": None}, "unknown_shape", "keys: body"),
        ({"prompt": 5}, "bad_field", "prompt must be a string"),
        ({"instruction": "a", "history": ["a"]}, "bad_field", r"history\[0\] must be a pair"),
        ({"text": 5}, "bad_field", "text must be a string, not int"),
        ({"text": ["a"]}, "bad_field", "not list"),
        ({"text": "a\ud800"}, "bad_encoding", "text has a lone surrogate at character 1"),
        ({"messages": "hi"}, "bad_field", "messages must be a list of turns, not str"),
        ({"messages": []}, "empty_conversation", "messages is empty"),
        ({"messages": ["hi"]}, "bad_field", r"messages\[0\] must be an object, not str"),
        ({"messages": [USER, {"content": "a"}]}, "unknown_role", r"messages\[1\] has no role"),
        ({"conversations": [{"value": "a"}]}, "unknown_role", r"conversations\[0\] has no role or from"),
        ({"conversations": [{"from": "laguna_s", "value": "a"}]}, "unknown_role", "'laguna_s'; say what .* system, "),
        ({"messages": [{"role": "assistant_commentary", "content": "a"}]}, "unknown_role", "assistant_commentary"),
        ({"messages": [{"role": ["user"], "content": "a"}]}, "unknown_role", "user"),
        ({"messages": [{"role": "user"}]}, "missing_content", r"messages\[0\] \(user\) has no content"),
        ({"messages": [{"role": "user", "content": None}]}, "missing_content", "has no content"),
        ({"conversations": [{"from": "gpt"}]}, "missing_content", r"\(gpt\) has no content or value"),
        ({"messages": [{"role": "user", "content": []}]}, "missing_content", r"messages\[0\]\.content has no parts"),
        ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "missing_content", r"content\[0\] has no t"),
        ({"messages": [{"role": "user", "content": {"a": 1}}]}, "bad_field", "not dict"),
        ({"messages": [{"role": "user", "content": ["a"]}]}, "bad_field", r"content\[0\] must be an object"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]},
            "multimodal",
            r"content\[0\] is of type 'image_url'",
        ),
        ({"messages": [USER], "images": ["x.png"]}, "multimodal", "the row has images"),
        ({"messages": [{"role": "user", "content": "\udfff"}]}, "bad_encoding", r"messages\[0\]\.content"),
        ({"messages": [{"role": "user", "content": [{"type": "search", "text": "a"}]}]}, "unsupported_field", "search"),
        # Left out, these would give another prompt or mask than the row asks for.
        ({"messages": [USER], "documents": [{"text": "a"}]}, "unsupported_field", "the row has documents"),
        ({"messages": [USER], "chat_template_kwargs": {"messages": []}}, "unsupported_field", "sets messages"),
        ({"messages": [{**USER, "weight": 0.5}]}, "unsupported_field", "the weight 0.5"),
        ({"messages": [{**USER, "reasoning_content": "x"}]}, "bad_field", "only an assistant can"),
        ({"messages": [{**USER, "images": ["x.png"]}]}, "multimodal", "images"),
        ({"messages": [USER], "tools": "{"}, "bad_field", "tools is text, but no JSON"),
        ({"messages": [USER], "tools": [{"type": "function"}]}, "bad_field", r"tools\[0\] has no name"),
        ({"messages": [USER], "tools": {"name": "w"}}, "bad_field", "tools must be a list"),
        ({"messages": [{"role": "assistant", "tool_calls": [{"id": "c"}]}]}, "bad_field", "the name of a function"),
        ({"conversations": [{"from": "function_call", "value": "w()"}]}, "bad_field", "no JSON"),
        ({"input_ids": [1], "labels": [2]}, "bad_labels", r"labels\[0\] is 2, neither -100 nor the token there \(1\)"),
        ({"input_ids": [1, 2, 3], "labels": [2, 3, -100]}, "bad_labels", "aligned with input_ids, not shifted"),
        ({"input_ids": [1, 2], "labels": [1]}, "bad_labels", "1 entries for 2 input_ids"),
        ({"input_ids": [1, 0, 1], "attention_mask": [1, 0, 1]}, "unsupported_field", "zeros between ones"),
        ({"input_ids": "1 2"}, "bad_input_ids", "not str"),
        ({"input_ids": [[1, 2], [3]]}, "bad_input_ids", "a list of list"),
        ({"input_ids": np.array([[1, 2], [3, 4]])}, "bad_input_ids", "not ndarray"),
        ({"input_ids": [1, 2.0]}, "bad_input_ids", "a list of float, int"),
        ({"input_ids": [1, True]}, "bad_input_ids", "a list of bool, int"),
        ({"input_ids": [1, None]}, "bad_input_ids", "NoneType"),
        ({"input_ids": [1, 1000]}, "id_out_of_range", "holds 1000; the model has 1000 ids"),
        ({"input_ids": [1, -100, 1000]}, "id_out_of_range", "holds -100"),
        ({"input_ids": [2**70]}, "id_out_of_range", str(2**70)),
        ({"input_ids": [1, 2], "loss_mask": [1]}, "bad_loss_mask", "1 entries for 2 input_ids"),
        ({"input_ids": [1, 2], "loss_mask": [1, 2]}, "bad_loss_mask", "a list of 0 and 1"),
        ({"input_ids": [1, 2], "loss_mask": [1, 0.5]}, "bad_loss_mask", "float"),
        ({"input_ids": [1, 2], "loss_mask": [1, None]}, "bad_loss_mask", "NoneType"),
        ({"input_ids": [1], "loss_mask": 1}, "bad_loss_mask", "not int"),
    ],
)
def test_rows_that_are_refused_say_why(data: dict[str, Any], expected: str, detail: str) -> None:
    code, text = reason(data)

    assert code == expected
    assert re.search(detail, text), text


def test_auto_takes_the_most_exact_key_and_a_format_takes_its_own() -> None:
    row = {"input_ids": [1], "messages": [USER], "conversations": [{"from": "gpt", "value": "g"}], "text": "t"}

    assert isinstance(parse(row), TokenRow)
    assert parse(row, format="messages") == parse({**row, "input_ids": None}) == chat(("user", "hi"))
    assert parse(row, format="conversations") == chat(("assistant", "g"))
    assert parse(row, format="text") == TextRow("t")
    assert parse(row, format="rendered") == TextRow("t", rendered=True)
    assert parse({"text": "t"}, format="prompt") == chat(("user", "t"))
    assert parse({"body": "b", "text": "t"}, text_field="body") == TextRow("b")
    assert parse({"body": "b"}, text_field="body", format="prompt") == chat(("user", "b"))
    assert reason({"text": "t", "id": 3}, format="messages") == (
        "missing_field",
        "prompts.format is messages, which needs messages; the row has the keys: id, text",
    )


def test_the_columns_that_are_read_are_all_that_a_parser_looks_at() -> None:
    class Watched(dict[str, Any]):
        seen: ClassVar[set[str]] = set()

        def get(self, key: str, default: Any = None) -> Any:
            self.seen.add(key)
            return super().get(key, default)

        def __getitem__(self, key: str) -> Any:
            self.seen.add(key)
            return super().__getitem__(key)

    for row, options in (
        ({"text": "a"}, {}),
        ({"body": "a"}, {"text_field": "body"}),
        ({"messages": [USER]}, {}),
        ({"conversations": [USER]}, {}),
        ({"conversation": [USER]}, {}),
        ({"prompt": "a"}, {}),
        ({"instruction": "a", "input": "b"}, {}),
        ({"prompt": "a", "chosen": "b", "rejected": "c"}, {"format": "chosen"}),
        ({"prompt": "a", "chosen": "b", "rejected": "c"}, {"format": "rejected"}),
        ({"input_ids": [1]}, {}),
        ({"input_ids": [1], "loss_mask": [1]}, {}),
    ):
        parse(Watched(row), **options)
    explicit_id(Watched(uid=1), ["uid"])

    config = PromptsConfig(path="in.jsonl", id_field="uid", text_field="body", where={"source": "code"})
    assert row_columns(config) - {"source"} == Watched.seen
    assert "source" in row_columns(config)
    ignoring = row_columns(PromptsConfig(path="in.jsonl", ignore_fields=["prompt", "status"], where={"status": "ok"}))
    assert "prompt" not in ignoring
    assert "status" in ignoring


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ("a b", "a b"),
        (0, "0"),
        (12, "12"),
        (1.5, "1.5"),
        ("", None),
        (" ", None),
        (None, None),
        (float("nan"), None),
    ],
)
def test_an_id_is_text_a_number_or_absent(value: Any, expected: str | None) -> None:
    assert explicit_id({"id": value}, ["id"]) == expected


def test_the_first_id_that_says_something_is_taken() -> None:
    assert explicit_id({"id": " ", "uuid": "u", "prompt_id": None}, ["id", "prompt_id", "uuid"]) == "u"


@pytest.mark.parametrize("value", [[1], {"a": 1}, b"raw", "x\ud800"])
def test_an_id_of_another_type_is_refused(value: Any) -> None:
    with pytest.raises(RowRejected, match="bad_id"):
        explicit_id({"id": value}, ["id"])


def test_a_content_id_depends_on_tokens_and_mask_and_never_changes() -> None:
    ids = np.array([1, 2, 3], np.int32)
    ones, zeros = np.ones(3, np.uint8), np.zeros(3, np.uint8)

    # Written down: an id that changed between releases would break every resumed run.
    assert content_id(ids, ones) == "h-6e5db1606cfafe09ecd7bd665d3939a0"
    assert content_id(np.repeat(ids, 2)[::2], ones) == content_id(ids, ones)
    assert len({content_id(ids, ones), content_id(ids, zeros), content_id(ids[::-1], ones)}) == 3


def test_a_refusal_survives_pickling() -> None:
    copy = pickle.loads(pickle.dumps(RowRejected("too_long", "9 tokens, at most 8 fit")))

    assert (copy.reason, copy.detail, str(copy)) == (
        "too_long",
        "9 tokens, at most 8 fit",
        "too_long: 9 tokens, at most 8 fit",
    )
