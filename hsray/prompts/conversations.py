"""Conversations of a row: turns, tools and what else the template is given, in the spellings that data sets use.

Promises: every turn of the row is a `Message` in the same order (the parts of one harmony answer become one
message, and a top-level system text becomes the first turn), or the row is refused with the reason. Must never
know about templates or tokens.

A new role name is an entry of `ROLES`.
"""

import json
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from hsray.config import PromptsConfig, Role
from hsray.prompts.fields import (
    FAILURE_KEYS,
    MEDIA_KEYS,
    encodable,
    from_json,
    is_void,
    refuse_failed_row,
    refuse_media,
)
from hsray.prompts.rejects import RowRejected
from hsray.prompts.rows import ChatRow, Message, ToolCall
from hsray.records import JsonDict

ROLES: Mapping[str, Role] = {
    "system": "system",
    "developer": "developer",
    "user": "user",
    "human": "user",
    "prompter": "user",
    "assistant": "assistant",
    "gpt": "assistant",
    "chatgpt": "assistant",
    "bing": "assistant",
    "bard": "assistant",
    "model": "assistant",
    "function_call": "assistant",
    "assistant_analysis": "assistant",
    "assistant_final": "assistant",
    "tool": "tool",
    "function": "tool",
    "observation": "tool",
    "function_response": "tool",
    "ipython": "tool",
}
"""Spellings of a turn's role, in any case, and what the chat template is given for it."""

CONVERSATION_KEYS = ("messages", "conversations", "conversation", "chosen", "rejected")
PROMPT_KEYS = ("prompt", "instruction", "question", "query", "input")
_ANSWER_KEYS = ("output", "response", "completion", "answer")
# Further keys of a row that change what the model sees or learns, or tell that the row is not fit for use.
CHAT_KEYS = (
    "system",
    "tools",
    "functions",
    "documents",
    "history",
    "generated_message",
    "reasoning_effort",
    "chat_template_kwargs",
    *_ANSWER_KEYS,
    *MEDIA_KEYS,
    *FAILURE_KEYS,
)

_ROLE_KEYS = ("role", "from")
_CONTENT_KEYS = ("content", "value", "text")
_REASONING_KEYS = ("reasoning_content", "reasoning", "thinking")
_TEXT_PARTS = ("text", "input_text", "output_text")


def parse_conversation(data: Mapping[str, Any], key: str, config: PromptsConfig) -> ChatRow:
    """The turns under `key`, with `system`, `tools` and `generated_message` of the row."""
    turns = _turns(data[key], key, config)
    if not is_void(data.get("generated_message")):
        turns.append(_turn(data["generated_message"], "generated_message", config))
    return _chat(data, turns, config)


def parse_pair(data: Mapping[str, Any], key: str, config: PromptsConfig) -> ChatRow:
    """One side of a preference pair: messages that hold the prompt too, or an answer to `prompt`."""
    value = data[key]
    if not isinstance(value, str):
        turns = _turns(value, key, config)
        if turns[0].role != "assistant" or len(turns) > 1:
            return _chat(data, turns, config)
    else:
        turns = [Message("assistant", encodable(value, key))]
    prompt = data.get("prompt")
    if prompt is None:
        raise RowRejected("missing_field", f"{key} is an answer alone, and the row has no prompt")
    if isinstance(prompt, str):
        before = [Message("user", encodable(prompt, "prompt"))]
    else:
        before = _turns(prompt, "prompt", config)
    return _chat(data, [*before, *turns], config)


def parse_prompt(data: Mapping[str, Any], key: str, config: PromptsConfig) -> ChatRow:
    """One user turn from `key`, with `input` on a line of its own behind an `instruction`; earlier rounds from
    `history`; the answer, if the row has one."""
    turns: list[Message] = []
    history = from_json(data.get("history"), "history") or []
    if not isinstance(history, list):
        raise RowRejected("bad_field", f"history must be a list of pairs, not {type(history).__name__}")
    for i, pair in enumerate(history):
        if not isinstance(pair, list) or len(pair) != 2 or not all(isinstance(text, str) for text in pair):
            raise RowRejected("bad_field", f"history[{i}] must be a pair of question and answer")
        turns += [
            Message("user", encodable(pair[0], f"history[{i}]")),
            Message("assistant", encodable(pair[1], f"history[{i}]")),
        ]
    question = _text(data, key)
    if key == "instruction" and not is_void(data.get("input")):
        question = f"{question}\n{_text(data, 'input')}"
    turns.append(Message("user", question))
    answer = next((name for name in _ANSWER_KEYS if data.get(name) is not None), None)
    if answer is not None:
        turns.append(Message("assistant", _text(data, answer)))
    return _chat(data, turns, config)


def _chat(data: Mapping[str, Any], turns: list[Message], config: PromptsConfig) -> ChatRow:
    if not is_void(data.get("documents")):
        raise RowRejected("unsupported_field", "the row has documents, which change the prompt and are not supported")
    if not is_void(data.get("system")):
        system = Message("system", _text(data, "system"))
        if turns[0] != system:  # some converters write it twice
            turns.insert(0, system)
    if config.system_turns == "merge" and turns[0].role in ("system", "developer") and len(turns) > 1:
        if turns[1].role != "user":
            raise RowRejected("bad_field", "prompts.system_turns is merge, but no user turn follows the system turn")
        turns[:2] = [replace(turns[1], content=f"{turns[0].content}\n\n{turns[1].content}")]
    return ChatRow(tuple(turns), _tools(data), _template_args(data))


def _template_args(data: Mapping[str, Any]) -> JsonDict:
    extra = from_json(data.get("chat_template_kwargs"), "chat_template_kwargs") or {}
    if not isinstance(extra, dict):
        raise RowRejected("bad_field", f"chat_template_kwargs must be an object, not {type(extra).__name__}")
    if reserved := sorted(extra.keys() & {"messages", "tools", "add_generation_prompt", "strftime_now"}):
        raise RowRejected("unsupported_field", f"chat_template_kwargs sets {', '.join(reserved)}")
    effort = data.get("reasoning_effort")
    return {**extra, **({} if is_void(effort) else {"reasoning_effort": effort})}


def _tools(data: Mapping[str, Any]) -> tuple[JsonDict, ...]:
    key = next((name for name in ("tools", "functions") if not is_void(data.get(name))), None)
    if key is None:
        return ()
    tools = from_json(data[key], key)
    if not isinstance(tools, list):
        raise RowRejected("bad_field", f"{key} must be a list, not {type(tools).__name__}")
    found: list[JsonDict] = []
    for i, tool in enumerate(tools):
        tool = from_json(tool, f"{key}[{i}]")
        if not isinstance(tool, dict):
            raise RowRejected("bad_field", f"{key}[{i}] must be an object, not {type(tool).__name__}")
        # Templates expect the form that OpenAI uses; other sets leave out its outer object.
        function = tool.get("function")
        if not isinstance(function, dict):
            tool, function = {"type": "function", "function": tool}, tool
        if not isinstance(function.get("name"), str):
            raise RowRejected("bad_field", f"{key}[{i}] has no name")
        found.append(tool)
    return tuple(found)


def _turns(value: object, key: str, config: PromptsConfig) -> list[Message]:
    turns = from_json(value, key) if isinstance(value, str) and value.lstrip().startswith("[") else value
    if not isinstance(turns, list):
        raise RowRejected("bad_field", f"{key} must be a list of turns, not {type(turns).__name__}")
    if not turns:
        raise RowRejected("empty_conversation", f"{key} is empty")
    found: list[Message] = []
    analysis: str | None = None
    for i, turn in enumerate(turns):
        message = _turn(turn, f"{key}[{i}]", config)
        kind = _harmony_part(turn, config)
        if kind == "assistant_analysis":
            analysis = message.content if analysis is None else f"{analysis}\n{message.content}"
            continue
        if analysis is not None:
            if kind != "assistant_final":
                found.append(Message("assistant", "", reasoning=analysis))
            else:
                message = replace(message, reasoning=analysis)
            analysis = None
        found.append(message)
    if analysis is not None:
        found.append(Message("assistant", "", reasoning=analysis))
    return found


def _harmony_part(turn: JsonDict, config: PromptsConfig) -> str | None:
    role = str(next(turn[key] for key in _ROLE_KEYS if turn.get(key) is not None))
    return None if role in config.role_map else role.strip().lower()


def _turn(turn: object, place: str, config: PromptsConfig) -> Message:
    if not isinstance(turn, dict):
        raise RowRejected("bad_field", f"{place} must be an object, not {type(turn).__name__}")
    spelled = next((turn[key] for key in _ROLE_KEYS if turn.get(key) is not None), None)
    if spelled is None:
        raise RowRejected("unknown_role", f"{place} has no {' or '.join(_ROLE_KEYS)}")
    role = _role(spelled, place, config)
    refuse_media(turn)
    refuse_failed_row(turn, place)

    reasoning_key = next((key for key in _REASONING_KEYS if not is_void(turn.get(key))), None)
    reasoning = None if reasoning_key is None else _content_text(turn[reasoning_key], f"{place}.{reasoning_key}")
    content_key = next((key for key in _CONTENT_KEYS if turn.get(key) is not None), None)
    is_call = str(spelled).strip().lower() == "function_call" and role == "assistant"
    calls = _tool_calls(turn, place) if not is_call else ()
    if content_key is None:
        if role != "assistant" or not (calls or reasoning):
            raise RowRejected("missing_content", f"{place} ({spelled}) has no {' or '.join(_CONTENT_KEYS)}")
        content = ""
    elif is_call:
        calls, content = _spelled_calls(turn[content_key], f"{place}.{content_key}"), ""
    elif role == "tool":
        content = _result_text(turn[content_key], f"{place}.{content_key}")
    else:
        content = _content_text(turn[content_key], f"{place}.{content_key}")
    if role != "assistant" and (calls or reasoning):
        raise RowRejected("bad_field", f"{place} ({spelled}) has reasoning or tool calls, which only an assistant can")
    return Message(
        role,
        content,
        reasoning,
        calls,
        _optional_text(turn, "tool_call_id", place),
        _optional_text(turn, "name", place),
        _trained(turn, place),
    )


def _role(spelled: object, place: str, config: PromptsConfig) -> Role:
    if isinstance(spelled, str):
        for name in (spelled, spelled.strip().lower()):
            if name in config.role_map:
                return config.role_map[name]
        if spelled.strip().lower() in ROLES:
            return ROLES[spelled.strip().lower()]
    raise RowRejected(
        "unknown_role",
        f"{place} has the role {str(spelled)[:80]!r}; say what it means in prompts.role_map. Known: {', '.join(ROLES)}",
    )


def _trained(turn: Mapping[str, Any], place: str) -> bool:
    weight = turn.get("weight")
    if weight is not None and weight not in (0, 1):
        raise RowRejected("unsupported_field", f"{place} has the weight {weight!r}; a mask can hold 0 and 1")
    return weight is None or bool(weight)


def _tool_calls(turn: Mapping[str, Any], place: str) -> tuple[ToolCall, ...]:
    calls = from_json(turn.get("tool_calls"), f"{place}.tool_calls") if not is_void(turn.get("tool_calls")) else None
    if calls is None and not is_void(turn.get("function_call")):
        calls = [from_json(turn["function_call"], f"{place}.function_call")]
    if calls is None:
        return ()
    if not isinstance(calls, list):
        raise RowRejected("bad_field", f"{place}.tool_calls must be a list, not {type(calls).__name__}")
    return tuple(_tool_call(call, f"{place}.tool_calls[{i}]") for i, call in enumerate(calls))


def _spelled_calls(value: object, place: str) -> tuple[ToolCall, ...]:
    calls = from_json(value, place)
    return tuple(_tool_call(call, place) for call in (calls if isinstance(calls, list) else [calls]))


def _tool_call(call: object, place: str) -> ToolCall:
    function = call.get("function", call) if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str) or not function["name"]:
        raise RowRejected("bad_field", f"{place} must be an object with the name of a function")
    arguments = function.get("arguments", function.get("parameters"))
    if isinstance(arguments, str):
        try:
            parsed = json.loads(arguments)
        except (ValueError, RecursionError):
            parsed = arguments  # models write broken JSON too; the template prints it as it is
        arguments = parsed if isinstance(parsed, dict) else arguments
    if arguments is None:
        arguments = {}
    if not isinstance(arguments, dict | str):
        raise RowRejected("bad_field", f"{place}: arguments must be an object or text, not {type(arguments).__name__}")
    encodable(json.dumps(arguments, ensure_ascii=False), f"{place}.arguments")
    call_id = call.get("id") if isinstance(call, dict) else None
    return ToolCall(encodable(function["name"], f"{place}.name"), arguments, None if call_id is None else str(call_id))


def _result_text(content: object, place: str) -> str:
    """What a tool answered: text, parts of text, or data, which becomes JSON."""
    is_parts = isinstance(content, list) and content and all(isinstance(p, dict) and "type" in p for p in content)
    if isinstance(content, str) or is_parts:
        return _content_text(content, place)
    return encodable(json.dumps(content, ensure_ascii=False), place)


def _content_text(content: object, place: str) -> str:
    if isinstance(content, str):
        return encodable(content, place)
    if not isinstance(content, list):
        raise RowRejected("bad_field", f"{place} must be a string or a list of parts, not {type(content).__name__}")
    texts: list[str] = []
    for i, part in enumerate(content):
        kind = part.get("type") if isinstance(part, dict) else None
        if not isinstance(kind, str):
            raise RowRejected("bad_field", f"{place}[{i}] must be an object with a type")
        if kind not in _TEXT_PARTS:
            media = any(word in kind for word in ("image", "audio", "video", "file"))
            raise RowRejected(
                "multimodal" if media else "unsupported_field",
                f"{place}[{i}] is of type {kind[:80]!r}; only text is supported",
            )
        if not isinstance(part.get("text"), str):
            raise RowRejected("missing_content", f"{place}[{i}] has no text")
        texts.append(part["text"])
    if not texts:
        raise RowRejected("missing_content", f"{place} has no parts")
    return encodable("".join(texts), place)


def _text(data: Mapping[str, Any], key: str) -> str:
    if not isinstance(data[key], str):
        raise RowRejected("bad_field", f"{key} must be a string, not {type(data[key]).__name__}")
    return encodable(data[key], key)


def _optional_text(turn: Mapping[str, Any], key: str, place: str) -> str | None:
    value = turn.get(key)
    return None if is_void(value) else encodable(str(value), f"{place}.{key}")
