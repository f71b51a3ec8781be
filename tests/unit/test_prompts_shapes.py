"""What a row holds, and which rows are refused for what reason."""

import pickle
import re
from typing import Any, ClassVar

import numpy as np
import pytest

from hsray.prompts.identity import content_id, explicit_id
from hsray.prompts.rejects import REASONS, RowRejected
from hsray.prompts.shapes import ChatRow, Format, Message, TextRow, TokenRow, parse_row, row_columns

VOCAB = 1000
USER = {"role": "user", "content": "hi"}


def parse(data: dict[str, Any], row_format: Format = "auto") -> Any:
    return parse_row(data, row_format, VOCAB)


def reason(data: dict[str, Any], row_format: Format = "auto") -> tuple[str, str]:
    with pytest.raises(RowRejected) as caught:
        parse(data, row_format)
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
        ({"prompt": "hi", "messages": [{**USER, "name": "bob", "weight": 1}]}, chat(("user", "hi"))),
    ],
)
def test_rows_of_text_and_conversations_are_recognised(data: dict[str, Any], expected: Any) -> None:
    assert parse(data) == expected


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
        ({}, "unknown_shape", "none of input_ids, messages, conversations, text; the row has the keys: none"),
        ({"prompt": "a", "text": None}, "unknown_shape", "keys: prompt"),
        ({"text": 5}, "bad_field", "text must be a string, not int"),
        ({"text": ["a"]}, "bad_field", "not list"),
        ({"text": "a\ud800"}, "bad_encoding", "text has a lone surrogate at character 1"),
        ({"messages": "hi"}, "bad_field", "messages must be a list of turns, not str"),
        ({"messages": []}, "empty_conversation", "messages is empty"),
        ({"messages": ["hi"]}, "bad_field", r"messages\[0\] must be an object, not str"),
        ({"messages": [USER, {"content": "a"}]}, "unknown_role", r"messages\[1\] has no role"),
        ({"messages": [{"from": "human", "value": "a"}]}, "unknown_role", r"messages\[0\] has no role"),
        ({"conversations": [{"value": "a"}]}, "unknown_role", r"conversations\[0\] has no from or role"),
        ({"conversations": [{"from": "laguna_s", "value": "a"}]}, "unknown_role", "'laguna_s'; known: system, "),
        ({"messages": [{"role": ["user"], "content": "a"}]}, "unknown_role", "user"),
        ({"messages": [{"role": "user"}]}, "missing_content", r"messages\[0\] \(user\) has no content"),
        ({"messages": [{"role": "user", "content": None}]}, "missing_content", "has no content"),
        ({"conversations": [{"from": "gpt", "content": "a"}]}, "missing_content", r"\(gpt\) has no value"),
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
        # Left out, these would give another prompt or mask than the row asks for.
        ({"messages": [USER], "tools": [{"type": "function"}]}, "unsupported_field", "the row has tools"),
        ({"conversations": [USER], "system": "Be brief."}, "unsupported_field", "the row has system"),
        ({"messages": [{**USER, "reasoning_content": "x"}]}, "unsupported_field", r"messages\[0\] has reasoning_c"),
        (
            {"messages": [{"role": "assistant", "content": None, "tool_calls": [{"id": "c"}]}]},
            "unsupported_field",
            r"messages\[0\] has tool_calls",
        ),
        ({"input_ids": [1], "labels": [-100]}, "unsupported_field", "labels"),
        ({"input_ids": [1, 0], "attention_mask": [1, 0]}, "unsupported_field", "strip the padding"),
        ({"input_ids": "1 2"}, "bad_input_ids", "not str"),
        ({"input_ids": [[1, 2]]}, "bad_input_ids", "a list of list"),
        ({"input_ids": np.array([[1, 2]])}, "bad_input_ids", "not ndarray"),
        ({"input_ids": [1, 2.0]}, "bad_input_ids", "a list of float, int"),
        ({"input_ids": [1, True]}, "bad_input_ids", "a list of bool, int"),
        ({"input_ids": [1, None]}, "bad_input_ids", "NoneType"),
        ({"input_ids": [1, 1000]}, "id_out_of_range", "holds 1000; the model has 1000 ids"),
        ({"input_ids": [1, -100, 1000]}, "id_out_of_range", "holds -100"),
        ({"input_ids": [2**70]}, "id_out_of_range", str(2**70)),
        ({"input_ids": [1, 2], "loss_mask": [1]}, "bad_loss_mask", "1 entries for 2 input_ids"),
        ({"input_ids": [1, 2], "loss_mask": [1, 2]}, "bad_loss_mask", "a list of 0 and 1"),
        ({"input_ids": [1, 2], "loss_mask": [1, 0.0]}, "bad_loss_mask", "float"),
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
    assert parse(row, "messages") == parse({**row, "input_ids": None}) == chat(("user", "hi"))
    assert parse(row, "conversations") == chat(("assistant", "g"))
    assert parse(row, "text") == TextRow("t")
    assert reason({"text": "t", "id": 3}, "messages") == (
        "missing_field",
        "prompts.format is messages, but the row has the keys: id, text",
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

    parse(Watched(text="a"))
    parse(Watched(messages=[USER]))
    parse(Watched(conversations=[USER]))
    parse(Watched(input_ids=[1]))
    parse(Watched(input_ids=[1], loss_mask=[1]))
    explicit_id(Watched(uid=1), "uid")

    assert Watched.seen == row_columns("uid")


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
    assert explicit_id({"id": value}, "id") == expected


@pytest.mark.parametrize("value", [[1], {"a": 1}, b"raw", "x\ud800"])
def test_an_id_of_another_type_is_refused(value: Any) -> None:
    with pytest.raises(RowRejected, match="bad_id"):
        explicit_id({"id": value}, "id")


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
