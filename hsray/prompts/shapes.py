"""What a row holds: text, a conversation or token ids, in one of the shapes that data sets use.

Promises: a row becomes exactly one of `TextRow`, `ChatRow`, `TokenRow`, or it is rejected; nothing in it that
would change the prompt or the mask is left out in silence. Must never know about tokenizers or files.

A new input shape is an entry of `_PARSERS`; conversations are read in `conversations`, token ids in `tokens`.
"""

from collections.abc import Callable, Mapping
from typing import Any

from hsray.config import PromptFormat, PromptsConfig
from hsray.prompts.conversations import (
    CHAT_KEYS,
    CONVERSATION_KEYS,
    PROMPT_KEYS,
    parse_conversation,
    parse_pair,
    parse_prompt,
)
from hsray.prompts.fields import encodable, is_void, refuse_failed_row, refuse_media
from hsray.prompts.rejects import RowRejected
from hsray.prompts.rows import ParsedRow, TextRow
from hsray.prompts.tokens import MASK_KEYS, parse_tokens

TEXT_KEYS = ("text",)


def row_columns(config: PromptsConfig) -> frozenset[str]:
    """Every key of a row that `parse_row`, the identity or a filter looks at."""
    text_field = [] if config.text_field is None else [config.text_field]
    keys = (
        "input_ids",
        *MASK_KEYS,
        *CONVERSATION_KEYS,
        *CHAT_KEYS,
        *PROMPT_KEYS,
        *TEXT_KEYS,
        *text_field,
    )
    # What parsers ignore may still be a filter or an id.
    return (frozenset(keys) - frozenset(config.ignore_fields)) | {*config.id_fields, *config.where}


def parse_row(data: Mapping[str, Any], config: PromptsConfig, vocab_size: int) -> tuple[PromptFormat, ParsedRow]:
    """Recognise and check a row: the format it is in, and what it holds. docs/prompts.md lists the shapes.

    `prompts.format: auto` takes the first that fits of `input_ids`, `messages`, `conversations`, `prompt` (which
    is instruction data too) and `text`; another format looks at its keys only. Keys that nobody knows are
    ignored.

    Raises:
        RowRejected: with the reason.
    """
    if config.ignore_fields:
        data = {key: value for key, value in data.items() if key not in config.ignore_fields}
    format_ = _detect(data, config) if config.format == "auto" else config.format
    refuse_failed_row(data)
    if format_ != "input_ids":
        refuse_media(data)
    return format_, _PARSERS[format_](data, config, vocab_size)


def _detect(data: Mapping[str, Any], config: PromptsConfig) -> PromptFormat:
    def has(*keys: str) -> bool:
        return any(data.get(key) is not None for key in keys)

    if has("input_ids"):  # ids say exactly what the model saw
        return "input_ids"
    if has("messages"):
        return "messages"
    if has("conversations", "conversation"):
        return "conversations"
    if has("chosen") and has("rejected"):
        raise RowRejected(
            "ambiguous_shape",
            "the row is a pair of chosen and rejected answers; set prompts.format to one of them (for both, run twice)",
        )
    if isinstance(data.get("prompt"), list):
        return "messages"
    if config.text_field is None and has(*PROMPT_KEYS):
        return "prompt"
    if has(*TEXT_KEYS, *([] if config.text_field is None else [config.text_field])):
        return "text"
    raise RowRejected("unknown_shape", f"no key that holds a prompt; the row has the keys: {_keys(data)}")


def _parse_text(data: Mapping[str, Any], config: PromptsConfig, vocab_size: int) -> TextRow:
    return _text_row(data, config, rendered=False)


def _parse_rendered(data: Mapping[str, Any], config: PromptsConfig, vocab_size: int) -> TextRow:
    return _text_row(data, config, rendered=True)


def _text_row(data: Mapping[str, Any], config: PromptsConfig, *, rendered: bool) -> TextRow:
    key = _first(data, (config.text_field,) if config.text_field is not None else TEXT_KEYS, config)
    text = data[key]
    if not isinstance(text, str):
        raise RowRejected("bad_field", f"{key} must be a string, not {type(text).__name__}")
    return TextRow(encodable(text, key), rendered)


def _parse_prompt(data: Mapping[str, Any], config: PromptsConfig, vocab_size: int) -> ParsedRow:
    keys = (config.text_field,) if config.text_field is not None else (*PROMPT_KEYS, *TEXT_KEYS)
    return parse_prompt(data, _first(data, keys, config), config)


def _parse_messages(data: Mapping[str, Any], config: PromptsConfig, vocab_size: int) -> ParsedRow:
    # Some sets call a list of messages `prompt`.
    keys = ("messages", "prompt") if isinstance(data.get("prompt"), list) else ("messages",)
    return parse_conversation(data, _first(data, keys, config), config)


def _parse_conversations(data: Mapping[str, Any], config: PromptsConfig, vocab_size: int) -> ParsedRow:
    return parse_conversation(data, _first(data, ("conversations", "conversation"), config), config)


def _parse_chosen(data: Mapping[str, Any], config: PromptsConfig, vocab_size: int) -> ParsedRow:
    return parse_pair(data, _first(data, ("chosen",), config), config)


def _parse_rejected(data: Mapping[str, Any], config: PromptsConfig, vocab_size: int) -> ParsedRow:
    return parse_pair(data, _first(data, ("rejected",), config), config)


def _parse_input_ids(data: Mapping[str, Any], config: PromptsConfig, vocab_size: int) -> ParsedRow:
    _first(data, ("input_ids",), config)
    return parse_tokens(data, vocab_size)


def _first(data: Mapping[str, Any], keys: tuple[str, ...], config: PromptsConfig) -> str:
    """The first of `keys` that the row has; of those without content, the first at all."""
    present = [key for key in keys if data.get(key) is not None]
    if not present:
        raise RowRejected(
            "missing_field",
            f"prompts.format is {config.format}, which needs {' or '.join(keys)}; the row has the keys: {_keys(data)}",
        )
    return next((key for key in present if not is_void(data[key])), present[0])


def _keys(data: Mapping[str, Any]) -> str:
    return ", ".join(sorted(key for key, value in data.items() if value is not None)) or "none"


_PARSERS: Mapping[str, Callable[[Mapping[str, Any], PromptsConfig, int], ParsedRow]] = {
    "input_ids": _parse_input_ids,
    "messages": _parse_messages,
    "conversations": _parse_conversations,
    "chosen": _parse_chosen,
    "rejected": _parse_rejected,
    "prompt": _parse_prompt,
    "text": _parse_text,
    "rendered": _parse_rendered,
}
