"""Conversations: rendered once by the chat template, with the assistant's tokens found and proved.

Promises: a mask is right or the row is rejected. Whether the template marks the assistant's text itself or not,
every turn must be in the rendering, and the masked tokens must decode to what the assistant said. Must never
know about files, ids or lengths.
"""

import datetime
import json
import unicodedata
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from hsray.config import PromptsConfig
from hsray.errors import ConfigError
from hsray.prompts.layout import Layout, Layouts, template_turns
from hsray.prompts.rejects import RowRejected
from hsray.prompts.rows import ChatRow, Message
from hsray.prompts.tally import Note
from hsray.prompts.tokenizer import Encoding, PromptTokenizer
from hsray.records import JsonDict, MaskArray


@dataclass(frozen=True, slots=True)
class AssistantSpan:
    """Characters [start, end) of a rendering that the assistant wrote.

    Of a turn whose end the template does not mark, `content_end` is where its content ends: in [content_end, end),
    which the template wrote, only the end-of-turn token counts. `closed`: if no such token is there, all of it does.
    """

    start: int
    end: int
    content_end: int | None = None
    closed: bool = True


@dataclass(frozen=True, slots=True)
class RenderedChat:
    """A conversation as text.

    Attributes:
        spans: where the masked parts are, ascending.
        answers: what the masked tokens must decode to, among other things, in order; stripped.
        literal: ascending ranges of characters that spell special tokens and are meant as text.
        notes: what is worth counting about it.
        is_text: it came as text, not as turns.
    """

    text: str
    spans: tuple[AssistantSpan, ...]
    answers: tuple[str, ...]
    literal: tuple[tuple[int, int], ...] = ()
    notes: tuple[Note, ...] = ()
    is_text: bool = False


class ChatRenderer:
    """Renders conversations with one tokenizer under one configuration."""

    def __init__(self, tokenizer: PromptTokenizer, config: PromptsConfig) -> None:
        self._tokenizer = tokenizer
        self._config = config
        self._layouts = Layouts(tokenizer)
        self._args: JsonDict = dict(config.template_args)
        if config.template_date is not None:
            day = datetime.datetime.combine(config.template_date, datetime.time())
            self._args["strftime_now"] = day.strftime

    def render(self, row: ChatRow) -> RenderedChat:
        """Apply the chat template, without the header of a further answer, and find the assistant's parts.

        A template with `{% generation %}` markers says itself where the assistant's text is. Otherwise an answer
        reaches from behind the header of an answer to the first special token after its content.

        Raises:
            RowRejected: `template_error`; `template_dropped_turn`, `template_dropped_tools`; `unstable_template`;
                `special_token`; `mask_mismatch`.
            ConfigError: there is no usable template.
        """
        args = {**self._args, **row.template_args}
        text, ranges, layout = self._laid_out(row, args)
        if row.tools:
            _check_tools(text, self._without_tools(row, args), row)
        literal, notes = self._special_tokens(row.messages, layout)
        if layout.dropped_reasoning:
            notes = (*notes, "reasoning_dropped")
        trained = self._trained(row.messages)
        answers = tuple(p.part.text for p in layout.parts if p.part.turn in trained and p.part.kind != "call")
        if ranges is not None:
            spans = _marked_spans(ranges, layout, row.messages, trained)
        else:
            spans = tuple(
                AssistantSpan(a.start, a.end, a.content_end, a.closed) for a in layout.answers if a.turn in trained
            )
        return RenderedChat(text, spans, answers, literal, notes)

    def render_text(self, text: str) -> RenderedChat:
        """A text that was rendered with this model's template before: its answers, found by the template's markers.

        Raises:
            RowRejected: `mask_mismatch`, no header of an answer is in it.
            ConfigError: the template's markers cannot be told.
        """
        header, closing = self._markers()
        spans = []
        position = text.find(header)
        while position >= 0:
            start = position + len(header)
            end = text.find(closing, start)
            end = len(text) if end < 0 else end + len(closing)
            spans.append(AssistantSpan(start, end))
            position = text.find(header, end)
        if not spans:
            raise RowRejected(
                "mask_mismatch",
                f"the header of an answer, {header!r}, is not in the text: it was rendered for another model",
            )
        return RenderedChat(text, tuple(spans), (), is_text=True)

    def _markers(self) -> tuple[str, str]:
        user, answer = Message("user", "Hello."), Message("assistant", "Good morning.")
        row = ChatRow((user, answer, user))
        text = self._tokenizer.render(template_turns(row.messages, calls_as_text=False), template_args=self._args)
        edges = self._layouts.of(row, text, self._args, calls_as_text=False, with_edges=True).answers[0]
        special = self._tokenizer.special_text
        closing = None if special is None else special.search(text, edges.content_end, edges.end)
        header = self._layouts.header(self._args)
        if closing is None or not header.strip():
            raise ConfigError(
                "prompts.format: `rendered` needs a chat template with a header of answers and a special token that "
                "ends them, and this model's has none; use `text`, or conversations"
            )
        return header, closing[0]

    def _laid_out(self, row: ChatRow, args: Mapping[str, Any]) -> tuple[str, list[tuple[int, int]] | None, Layout]:
        """The rendering, its marked ranges, and its layout. Arguments of calls are objects for the templates that
        want objects, and JSON text for the others."""
        has_objects = any(isinstance(c.arguments, dict) for m in row.messages for c in m.tool_calls)
        problem: RowRejected | None = None
        for as_text in (False, True) if has_objects else (False,):
            turns = template_turns(row.messages, calls_as_text=as_text)
            try:
                ranges = None
                if self._tokenizer.marks_generation:
                    text, ranges = self._tokenizer.render_marked(turns, tools=row.tools, template_args=args)
                else:
                    text = self._tokenizer.render(turns, tools=row.tools, template_args=args)
                if not as_text and _shows_python(text, row.messages):
                    continue
                layout = self._layouts.of(row, text, args, calls_as_text=as_text, with_edges=ranges is None)
                _check_arguments(layout, row.messages)
                return text, ranges, layout
            except RowRejected as err:
                problem = problem or err
        assert problem is not None, "text is never what Python prints for an object"
        raise problem

    def _without_tools(self, row: ChatRow, args: Mapping[str, Any]) -> str | None:
        turns = template_turns(row.messages, calls_as_text=False)
        try:
            return self._tokenizer.render(turns, template_args=args)
        except RowRejected:
            return None

    def _trained(self, messages: Sequence[Message]) -> set[int]:
        answers = [i for i, message in enumerate(messages) if message.role == "assistant"]
        kept = answers[-1:] if self._config.mask_turns == "last" else answers
        return {i for i in kept if messages[i].trained}

    def _special_tokens(
        self, messages: Sequence[Message], layout: Layout
    ) -> tuple[tuple[tuple[int, int], ...], tuple[Note, ...]]:
        special = self._tokenizer.special_text
        if special is None:
            return (), ()
        found = [(p.part.turn, match) for p in layout.parts for match in special.finditer(layout.text, p.start, p.end)]
        placed = {p.part.turn for p in layout.parts}
        for turn, message in enumerate(messages):
            # What has no place of its own in the layout.
            unplaced = [json.dumps(call.arguments, ensure_ascii=False) for call in message.tool_calls]
            unplaced += [] if turn in placed else [message.content]
            hidden = next((match for text in unplaced if (match := special.search(text))), None)
            if hidden is not None and self._config.special_tokens == "split":
                raise RowRejected("special_token", f"{hidden[0]!r} in turn {turn} cannot be split")
            if hidden is not None:
                found.append((turn, hidden))
        if not found:
            return (), ()
        if self._config.special_tokens == "reject":
            turn, match = found[0]
            raise RowRejected(
                "special_token",
                f"the text of turn {turn} ({messages[turn].role}) spells the special token {match[0]!r}; "
                "prompts.special_tokens can split it, or keep it as the token",
            )
        if self._config.special_tokens == "keep":
            return (), ("special_tokens_kept",)
        return tuple(sorted(match.span() for _, match in found)), ("special_tokens_split",)


def assistant_mask(chat: RenderedChat, encoding: Encoding, tokenizer: PromptTokenizer) -> MaskArray:
    """The loss mask of a rendered and encoded conversation: uint8 `[T]`, 1 on the assistant's tokens.

    A token that covers any character of a span is in. With generation markers the spans are the template's.
    Without, a span goes from behind the header of the answer to the first special token after the content, that
    token included: the drafter must learn when to stop. What the template puts behind it (a newline in ChatML)
    is out. If no special token follows, the span ends with the last character that is not white space.

    Raises:
        RowRejected: `mask_mismatch`, the tokenizer does not tell what text a token covers, the end of a turn is
            not known, or the masked tokens do not decode to a text that contains every answer of the
            conversation, in order.
    """
    if encoding.spans is None:
        raise RowRejected("mask_mismatch", "the tokenizer does not tell which text a token covers")
    starts, ends = encoding.spans[:, 0].copy(), encoding.spans[:, 1]
    # Some post-processors take spaces off a token's span. A token of spaces only is left with none; it covers
    # what lies between its neighbours.
    bare = np.flatnonzero(starts == ends)
    bare = bare[bare > 0]
    starts[bare] = np.minimum(starts[bare], ends[bare - 1])

    special = np.flatnonzero(np.isin(encoding.ids, tokenizer.special_ids))
    mask = np.zeros(len(encoding.ids), dtype=np.uint8)
    decoded: list[str] = []
    for span in chat.spans:
        end = span.end
        if span.content_end is not None:
            closing = special[(starts[special] >= span.content_end) & (starts[special] < span.end)]
            if len(closing):
                end = int(ends[closing[0]])
            elif span.closed:
                end = max(span.content_end, span.start + len(chat.text[span.start : end].rstrip()))
            else:
                raise RowRejected("mask_mismatch", f"what ends the answer at character {span.start} is not known")
        covered = np.flatnonzero((starts < end) & (ends > span.start))
        if len(covered):
            # All tokens between the first and the last: a span is one stretch of text.
            part = slice(int(covered[0]), int(covered[-1]) + 1)
            mask[part] = 1
            decoded.append(tokenizer.decode(encoding.ids[part]))
    _check_answers("".join(decoded), chat.answers)
    return mask


def _marked_spans(
    ranges: Sequence[tuple[int, int]], layout: Layout, messages: Sequence[Message], trained: set[int]
) -> tuple[AssistantSpan, ...]:
    spans = []
    for start, end in ranges:
        if start == end:
            continue
        turns = {p.part.turn for p in layout.parts if p.start < end and p.end > start}
        turns |= {a.turn for a in layout.answers if a.start < end and a.end >= start}
        wrong = [turn for turn in sorted(turns) if messages[turn].role != "assistant"]
        if wrong or len(turns) != 1:
            what = f"turn {wrong[0]} ({messages[wrong[0]].role})" if wrong else f"{len(turns)} answers together"
            raise RowRejected(
                "mask_mismatch",
                f"the chat template marks {what} as text of the assistant: {layout.text[start:end][:60]!r}",
            )
        if turns <= trained:
            spans.append(AssistantSpan(start, end))
    return tuple(spans)


def _check_tools(text: str, without: str | None, row: ChatRow) -> None:
    names = [str(tool["function"]["name"]) for tool in row.tools]
    missing = next((name for name in names if name not in text), None)
    if missing is not None or without == text:
        raise RowRejected(
            "template_dropped_tools",
            f"the chat template does not print the tool {(missing or names[0])[:60]!r}; set prompts.chat_template to "
            "one that does, or leave tools out (prompts.ignore_fields)",
        )


def _check_arguments(layout: Layout, messages: Sequence[Message]) -> None:
    for turn, message in enumerate(messages):
        places = [p for p in layout.parts if p.part.turn == turn and p.part.kind == "call"]
        for call, place in zip(message.tool_calls, places, strict=False):
            arguments = call.arguments
            wanted = [arguments] if isinstance(arguments, str) else [str(key) for key in arguments]
            for text in wanted:
                quoted = json.dumps(text, ensure_ascii=False)[1:-1]
                if layout.text.find(text, place.end) < 0 and layout.text.find(quoted, place.end) < 0:
                    raise RowRejected(
                        "template_dropped_turn",
                        f"turn {turn} (assistant): the argument {text[:60]!r} of the call of {call.name[:60]!r} is not "
                        "in the rendering",
                    )


def _shows_python(text: str, messages: Sequence[Message]) -> bool:
    """Whether a template prints arguments as Python spells objects, because it expects text."""
    objects = [c.arguments for m in messages for c in m.tool_calls if isinstance(c.arguments, dict) and c.arguments]
    return any(str(arguments) in text for arguments in objects)


def _check_answers(decoded: str, answers: Sequence[str]) -> None:
    # Tokenizers may normalise what they read (NFC, NFKC), so the comparison does too.
    decoded = unicodedata.normalize("NFKC", decoded)
    position = 0
    for answer in answers:
        wanted = unicodedata.normalize("NFKC", answer)
        found = decoded.find(wanted, position)
        if found < 0:
            raise RowRejected(
                "mask_mismatch", f"the masked tokens decode to {decoded[:60]!r}, which lacks the answer {answer[:60]!r}"
            )
        position = found + len(wanted)
