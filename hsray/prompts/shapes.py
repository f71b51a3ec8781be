"""What a row holds: text, a conversation or token ids, in one of the shapes that data sets use.

Promises: a row becomes exactly one of `TextRow`, `ChatRow`, `TokenRow`, or it is rejected; nothing in it that
would change the prompt or the mask is left out in silence. Must never know about tokenizers or files.

A new input shape is a parser in `_PARSERS`; a new role name is an entry of `ROLES`.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from hsray.prompts.rejects import RowRejected
from hsray.records import IntArray, MaskArray

Format = Literal["auto", "text", "messages", "conversations", "input_ids"]

ROLES: Mapping[str, str] = {
    "system": "system",
    "developer": "developer",
    "user": "user",
    "human": "user",
    "assistant": "assistant",
    "gpt": "assistant",
    "chatgpt": "assistant",
    "bing": "assistant",
    "bard": "assistant",
    "tool": "tool",
    "observation": "tool",
}
"""Spellings of a turn's role, and what the chat template is given for it."""

_MULTIMODAL_KEYS = ("image", "images", "video", "videos", "audio", "audios")
# Keys that change what the model sees, or what the drafter learns. Ignoring them would give another prompt or
# another mask than the row asks for.
_CHAT_KEYS = ("system", "tools", "functions", "documents")
_TURN_KEYS = ("tool_calls", "function_call", "reasoning_content", "reasoning", "thinking")
_TOKEN_KEYS = ("labels",)


@dataclass(frozen=True, slots=True)
class Message:
    """One turn. `role` is a value of `ROLES`; `content` is the text as given, unstripped."""

    role: str
    content: str


@dataclass(frozen=True, slots=True)
class TextRow:
    """Text that is tokenized as it is."""

    text: str


@dataclass(frozen=True, slots=True)
class ChatRow:
    """A conversation of at least one turn."""

    messages: tuple[Message, ...]


@dataclass(frozen=True, slots=True, eq=False)
class TokenRow:
    """Token ids `[T]`, T >= 0, each inside the vocabulary; `loss_mask` `[T]`, or None if the row has none."""

    input_ids: IntArray
    loss_mask: MaskArray | None


ParsedRow = TextRow | ChatRow | TokenRow


def row_columns(id_field: str) -> frozenset[str]:
    """Every key of a row that `parse_row` or the identity looks at."""
    extra = ("loss_mask", "attention_mask", *_MULTIMODAL_KEYS, *_CHAT_KEYS, *_TOKEN_KEYS)
    return frozenset((id_field, *_PARSERS, *extra))


def parse_row(data: Mapping[str, Any], row_format: Format, vocab_size: int) -> ParsedRow:
    """Recognise and check a row.

    `auto` takes the first key that is present (not null) of `input_ids`, `messages`, `conversations`, `text`;
    another format looks at its key only. Other keys are ignored, except those that would change the prompt.

    * `text`: a string.
    * `messages`: turns of `role` and `content`. `conversations`: the same, or `from` and `value`. A content is a
      string, or a list of `{"type": "text", "text": ...}` parts, which are joined without anything between.
      An empty content is taken as it is, a missing or null one is not.
    * `input_ids`: integers in [0, vocab_size); with `loss_mask`: as many of 0 and 1 (or false and true).

    Raises:
        RowRejected: with the reason.
    """
    for key in _PARSERS if row_format == "auto" else (row_format,):
        if data.get(key) is not None:
            return _PARSERS[key](data, vocab_size)
    keys = ", ".join(sorted(key for key, value in data.items() if value is not None)) or "none"
    if row_format == "auto":
        raise RowRejected("unknown_shape", f"none of {', '.join(_PARSERS)}; the row has the keys: {keys}")
    raise RowRejected("missing_field", f"prompts.format is {row_format}, but the row has the keys: {keys}")


def _parse_text(data: Mapping[str, Any], vocab_size: int) -> TextRow:
    text = data["text"]
    if not isinstance(text, str):
        raise RowRejected("bad_field", f"text must be a string, not {type(text).__name__}")
    _encodable(text, "text")
    return TextRow(text)


def _parse_messages(data: Mapping[str, Any], vocab_size: int) -> ChatRow:
    return _parse_chat(data, "messages", (("role", "content"),))


def _parse_conversations(data: Mapping[str, Any], vocab_size: int) -> ChatRow:
    return _parse_chat(data, "conversations", (("from", "value"), ("role", "content")))


def _parse_chat(data: Mapping[str, Any], key: str, spellings: Sequence[tuple[str, str]]) -> ChatRow:
    for name in _MULTIMODAL_KEYS:
        if not _is_void(data.get(name)):
            raise RowRejected("multimodal", f"the row has {name}; only text is supported")
    _refuse(data, _CHAT_KEYS, "the row")
    turns = data[key]
    if not isinstance(turns, list):
        raise RowRejected("bad_field", f"{key} must be a list of turns, not {type(turns).__name__}")
    if not turns:
        raise RowRejected("empty_conversation", f"{key} is empty")
    return ChatRow(tuple(_parse_turn(turn, f"{key}[{i}]", spellings) for i, turn in enumerate(turns)))


def _parse_turn(turn: object, place: str, spellings: Sequence[tuple[str, str]]) -> Message:
    if not isinstance(turn, dict):
        raise RowRejected("bad_field", f"{place} must be an object, not {type(turn).__name__}")
    role_key, content_key = next((s for s in spellings if turn.get(s[0]) is not None), spellings[0])
    role = turn.get(role_key)
    if role is None:
        raise RowRejected("unknown_role", f"{place} has no {' or '.join(s[0] for s in spellings)}")
    if not isinstance(role, str) or role not in ROLES:
        raise RowRejected("unknown_role", f"{place} has the role {str(role)[:80]!r}; known: {', '.join(ROLES)}")
    _refuse(turn, _TURN_KEYS, place)
    if turn.get(content_key) is None:
        raise RowRejected("missing_content", f"{place} ({role}) has no {content_key}")
    content = _content_text(turn[content_key], f"{place}.{content_key}")
    _encodable(content, f"{place}.{content_key}")
    return Message(ROLES[role], content)


def _content_text(content: object, place: str) -> str:
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise RowRejected("bad_field", f"{place} must be a string or a list of parts, not {type(content).__name__}")
    texts: list[str] = []
    for i, part in enumerate(content):
        kind = part.get("type") if isinstance(part, dict) else None
        if kind is None:
            raise RowRejected("bad_field", f"{place}[{i}] must be an object with a type")
        if kind != "text":
            raise RowRejected("multimodal", f"{place}[{i}] is of type {str(kind)[:80]!r}; only text is supported")
        if not isinstance(part.get("text"), str):
            raise RowRejected("missing_content", f"{place}[{i}] has no text")
        texts.append(part["text"])
    if not texts:
        raise RowRejected("missing_content", f"{place} has no parts")
    return "".join(texts)


def _parse_tokens(data: Mapping[str, Any], vocab_size: int) -> TokenRow:
    ids = _plain_list(data["input_ids"])
    if ids is None or not set(map(type, ids)) <= {int}:
        raise RowRejected("bad_input_ids", f"input_ids must be a list of integers, not {_described(data['input_ids'])}")
    if ids and not (min(ids) >= 0 and max(ids) < vocab_size):
        wrong = next(i for i in ids if not 0 <= i < vocab_size)
        raise RowRejected("id_out_of_range", f"input_ids holds {wrong}; the model has {vocab_size} ids")
    _check_attention(data.get("attention_mask"))

    mask: MaskArray | None = None
    if data.get("loss_mask") is None:
        _refuse(data, _TOKEN_KEYS, "the row")
    else:
        mask = _parse_mask(data["loss_mask"], len(ids))
    return TokenRow(np.array(ids, dtype=np.int32), mask)


def _parse_mask(value: object, num_tokens: int) -> MaskArray:
    mask = _plain_list(value)
    if mask is None or not set(map(type, mask)) <= {int, bool} or not set(mask) <= {0, 1}:
        raise RowRejected("bad_loss_mask", f"loss_mask must be a list of 0 and 1, not {_described(value)}")
    if len(mask) != num_tokens:
        raise RowRejected("bad_loss_mask", f"loss_mask has {len(mask)} entries for {num_tokens} input_ids")
    return np.array(mask, dtype=np.uint8)


def _check_attention(value: object) -> None:
    # Padded data sets carry pads inside input_ids; the engine would prefill them as tokens.
    attention = _plain_list(value)
    if value is not None and (attention is None or not all(entry == 1 for entry in attention)):
        raise RowRejected("unsupported_field", "attention_mask is not all 1: strip the padding from input_ids")


def _plain_list(value: object) -> list[Any] | None:
    if isinstance(value, np.ndarray):
        return value.tolist() if value.ndim == 1 else None
    return value if isinstance(value, list) else None


def _described(value: object) -> str:
    items = _plain_list(value)
    if items is None:
        return type(value).__name__
    return f"a list of {', '.join(sorted({type(item).__name__ for item in items}))} such as {items[:3]!r:.80}"


def _refuse(data: Mapping[str, Any], keys: Sequence[str], place: str) -> None:
    for key in keys:
        if not _is_void(data.get(key)):
            detail = f"{place} has {key}, which changes the prompt or its mask and is not supported"
            raise RowRejected("unsupported_field", detail)


def _is_void(value: object) -> bool:
    """Whether a key carries nothing: files that mix rows fill it with one of these."""
    if isinstance(value, str):
        return value.strip() in ("", "[]", "{}", "null")
    return value is None or value is False or value == [] or value == {}


def _encodable(text: str, place: str) -> None:
    # JSON escapes can spell half of a surrogate pair, which no tokenizer takes.
    if text.isascii():
        return
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as err:
        raise RowRejected("bad_encoding", f"{place} has a lone surrogate at character {err.start}") from err


# In the order in which `auto` looks for them: ids say exactly what the model saw, so they go first.
_PARSERS: Mapping[str, Callable[[Mapping[str, Any], int], ParsedRow]] = {
    "input_ids": _parse_tokens,
    "messages": _parse_messages,
    "conversations": _parse_conversations,
    "text": _parse_text,
}
