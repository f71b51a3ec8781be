"""Conversations: rendered once by the chat template, with the assistant's tokens found and proved.

Promises: a mask is right or the row is rejected. Whether the template marks the assistant's text itself or not,
every turn must be in the rendering, and the masked tokens must decode to what the assistant said. Must never
know about files, ids or lengths.
"""

import unicodedata
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from hsray.prompts.rejects import RowRejected
from hsray.prompts.shapes import Message
from hsray.prompts.tokenizer import ChatMessage, Encoding, PromptTokenizer
from hsray.records import MaskArray


@dataclass(frozen=True, slots=True)
class AssistantSpan:
    """Characters [start, end) of a rendering that the assistant wrote.

    Of a turn whose end the template does not mark, `answer` is the content, stripped, and `content_end` where it
    ends: in [content_end, end), which the template wrote, only the end-of-turn token counts.
    """

    start: int
    end: int
    answer: str = ""
    content_end: int | None = None


@dataclass(frozen=True, slots=True)
class RenderedChat:
    """A conversation as text; where the assistant's parts are; what each of its turns said, stripped."""

    text: str
    spans: tuple[AssistantSpan, ...]
    answers: tuple[str, ...]


def render_chat(messages: Sequence[Message], tokenizer: PromptTokenizer) -> RenderedChat:
    """Apply the chat template, without the header of a further answer.

    A template with `{% generation %}` markers says itself where the assistant's text is. Otherwise turn i is
    what the rendering of the turns up to and including i adds to the rendering of the turns before it plus the
    header of an answer. Both must be the beginning of the whole rendering: a template that writes earlier
    turns differently once later ones follow would give a wrong mask.

    Raises:
        RowRejected: `template_error`; `template_dropped_turn`, a content is not in the rendering, in order;
            `unstable_template`; `mask_mismatch`, the span of a turn does not hold its content.
        ConfigError: there is no usable template.
    """
    turns = [{"role": message.role, "content": message.content} for message in messages]
    answers = tuple(message.content.strip() for message in messages if message.role == "assistant")
    if tokenizer.marks_generation:
        text, ranges = tokenizer.render_marked(turns)
        _check_contents(text, messages)
        return RenderedChat(text, tuple(AssistantSpan(start, end) for start, end in ranges if start < end), answers)

    text = tokenizer.render(turns)
    _check_contents(text, messages)
    spans = (
        _assistant_span(text, turns, index, tokenizer)
        for index, turn in enumerate(turns)
        if turn["role"] == "assistant"
    )
    return RenderedChat(text, tuple(spans), answers)


def assistant_mask(chat: RenderedChat, encoding: Encoding, tokenizer: PromptTokenizer) -> MaskArray:
    """The loss mask of a rendered and encoded conversation: uint8 `[T]`, 1 on the assistant's tokens.

    A token that covers any character of a span is in. With generation markers the spans are the template's.
    Without, a span goes from behind the header of the answer to the first special token after the content, that
    token included: the drafter must learn when to stop. What the template puts behind it (a newline in ChatML)
    is out. If no special token follows, the span ends with the last character that is not white space.

    Raises:
        RowRejected: `mask_mismatch`, the end of a turn is ambiguous, or the masked tokens do not decode to a text
            that contains every answer of the conversation, in order.
    """
    if encoding.spans is None:
        raise ValueError("the encoding of a conversation needs spans")
    starts, ends = encoding.spans[:, 0].copy(), encoding.spans[:, 1]
    # Some post-processors take spaces off a token's span. A token of spaces only is left with none; it covers
    # what lies between its neighbours.
    bare = np.flatnonzero(starts == ends)
    bare = bare[bare > 0]
    starts[bare] = np.minimum(starts[bare], ends[bare - 1])

    special = np.isin(encoding.ids, tokenizer.special_ids)
    mask = np.zeros(len(encoding.ids), dtype=np.uint8)
    decoded: list[str] = []
    for span in chat.spans:
        end = span.end
        if span.content_end is not None:
            closing = np.flatnonzero(special & (starts >= span.content_end) & (starts < span.end))
            end = int(ends[closing[0]]) if len(closing) else span.start + len(chat.text[span.start : end].rstrip())
            _check_end(span, chat.text[end : span.end])
        covered = np.flatnonzero((starts < end) & (ends > span.start))
        if len(covered):
            # All tokens between the first and the last: a span is one stretch of text.
            part = slice(int(covered[0]), int(covered[-1]) + 1)
            mask[part] = 1
            decoded.append(tokenizer.decode(encoding.ids[part]))
    _check_answers("".join(decoded), chat.answers)
    return mask


def _assistant_span(text: str, turns: Sequence[ChatMessage], index: int, tokenizer: PromptTokenizer) -> AssistantSpan:
    before = tokenizer.render(turns[:index], add_generation_prompt=True)
    through = text if index + 1 == len(turns) else tokenizer.render(turns[: index + 1])
    for prefix, what in ((before, "the turns before it and the header of an answer"), (through, "the turns up to it")):
        if not text.startswith(prefix):
            at = next((i for i, (a, b) in enumerate(zip(prefix, text, strict=False)) if a != b), len(text))
            raise RowRejected(
                "unstable_template",
                f"turn {index} (assistant): the rendering of {what} is not how that of all turns begins: "
                f"{prefix[at : at + 40]!r} instead of {text[at : at + 40]!r} at character {at}. A chat template "
                "with generation markers (prompts.chat_template) needs no such comparison",
            )
    answer = turns[index]["content"].strip()
    found = text.find(answer, len(before), len(through))
    if found < 0:
        raise RowRejected(
            "mask_mismatch", f"turn {index} (assistant): its content is not between the header of an answer and its end"
        )
    return AssistantSpan(len(before), len(through), answer, found + len(answer))


def _check_end(span: AssistantSpan, rest: str) -> None:
    # What the template puts in front of a content may hold the same words and special tokens of its own. Then
    # what was taken for the content is not it, and the real one is still to come.
    if rest.strip() and span.answer in rest:
        raise RowRejected(
            "mask_mismatch",
            f"{span.answer[:60]!r} is there before and after a special token of the same turn, so its end is not known",
        )


def _check_contents(text: str, messages: Sequence[Message]) -> None:
    position = 0
    for index, message in enumerate(messages):
        content = message.content.strip()
        found = text.find(content, position)
        if found < 0:
            raise RowRejected(
                "template_dropped_turn",
                f"turn {index} ({message.role}) is not in the rendering: the chat template drops, shortens or "
                f"rewrites {content[:60]!r}",
            )
        position = found + len(content)


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
