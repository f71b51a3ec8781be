"""The layout of a rendering: which of its characters are which part of which turn, found by experiment.

A conversation is rendered twice, once as it is and once with a placeholder for every part (a content, a reasoning,
the name of a called function). The second rendering shows what the template writes around the parts; the first one
has to be exactly that with the parts filled in, or the layout is refused. So a template may merge turns, drop
reasoning, treat the last answer in another way or write a system turn of its own: what counts is the rendering of
this conversation, and nothing is guessed from renderings of others. Layouts depend on the roles only, for most
conversations, and are kept for the next one of the same roles.

Must never know about tokens.
"""

import json
import re
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, NoReturn

from hsray.prompts.rejects import RowRejected
from hsray.prompts.rows import ChatRow, Message, ToolCall
from hsray.prompts.tokenizer import PromptTokenizer
from hsray.records import JsonDict

# Letters and digits only: templates cut white space off, and JSON leaves them alone.
_PLACEHOLDER = re.compile(r"hsrayPart(\d{6})End")
_THINK_TAGS = re.compile(r"</?think>|</?thinking>|\[/?THINK\]|◁/?think▷|</?seed:think>")
_THINK_ENDS = ("</think>", "</thinking>", "[/THINK]", "◁/think▷", "</seed:think>")
_KEPT_LAYOUTS = 1024


@dataclass(frozen=True, slots=True)
class Part:
    """A stretch of text of one turn, without white space at its ends."""

    turn: int
    kind: Literal["content", "reasoning", "call"]
    text: str


@dataclass(frozen=True, slots=True)
class PlacedPart:
    """A part and where it stands in the rendering: characters [start, end)."""

    part: Part
    start: int
    end: int


@dataclass(frozen=True, slots=True)
class AnswerEdges:
    """Where an assistant's turn begins and ends, in characters of the rendering.

    Attributes:
        turn: which.
        start: right behind the header of the answer.
        content_end: where its last part ends, arguments of a call included. In [content_end, end), which the
            template wrote, the end of turn is looked for.
        end: at most so far.
        closed: whether all of [content_end, end) is known to end the turn.
    """

    turn: int
    start: int
    content_end: int
    end: int
    closed: bool


@dataclass(frozen=True, slots=True)
class Layout:
    """A rendering, taken apart."""

    text: str
    parts: tuple[PlacedPart, ...]
    answers: tuple[AnswerEdges, ...]
    dropped_reasoning: int


@dataclass(frozen=True, slots=True)
class _Edges:
    """As `AnswerEdges`, before the parts are filled in: positions in the literals in front of the turn's first part
    and behind its last one."""

    turn: int
    first: int
    last: int
    start: int
    content_end: int
    end: int
    closed: bool


@dataclass(frozen=True, slots=True)
class _Skeleton:
    """What a template writes: literals, and between them the numbers of parts."""

    literals: tuple[str, ...]
    order: tuple[int, ...]
    edges: tuple[_Edges, ...]


class _Differs(RowRejected):
    """The rendering is not the skeleton with the parts filled in."""


class Layouts:
    """Lays out renderings of one template, and remembers the skeletons of the conversations it saw last."""

    def __init__(self, tokenizer: PromptTokenizer) -> None:
        self._tokenizer = tokenizer
        self._skeletons: OrderedDict[str, _Skeleton] = OrderedDict()
        self._header: str | None = None

    def of(
        self, row: ChatRow, text: str, template_args: Mapping[str, Any], *, calls_as_text: bool, with_edges: bool
    ) -> Layout:
        """The layout of `text`, which is the rendering of `row`; with the edges of its answers, or the answers as
        their parts alone if the template marks them itself.

        Raises:
            RowRejected: `template_dropped_turn`, `unstable_template`; `template_error`.
        """
        problem: RowRejected | None = None
        # A template may look into what users say, too: then only the assistant's parts are left open.
        for whole in (True, False):
            marked, parts = _mark(row, whole)
            try:
                skeleton = self._skeleton(marked, parts, template_args, calls_as_text, with_edges)
                layout = _fill(skeleton, parts, text)
                if not whole:
                    _check_unplaced(layout, row.messages)
                return layout
            except RowRejected as err:
                problem = problem or err
                if not isinstance(err, _Differs) and err.reason != "template_error":
                    break
        assert problem is not None
        raise problem

    def header(self, template_args: Mapping[str, Any]) -> str:
        """What the template writes between the end of a user turn and an answer that is to come."""
        if self._header is None:
            turns = [{"role": "user", "content": _placeholder(0)}]
            without = self._tail(turns, (), template_args, header=False)
            header = self._tail(turns, (), template_args, header=True)
            known = without is not None and header is not None and header.startswith(without)
            self._header = header[len(without) :] if known and header is not None and without is not None else ""
        return self._header

    def _skeleton(
        self,
        marked: ChatRow,
        parts: Sequence[Part],
        template_args: Mapping[str, Any],
        calls_as_text: bool,
        with_edges: bool,
    ) -> _Skeleton:
        turns = template_turns(marked.messages, calls_as_text=calls_as_text)
        # Default `str`: what YAML gives as a date goes into a template as it is.
        key = json.dumps([turns, marked.tools, sorted(template_args.items()), with_edges], default=str)
        skeleton = self._skeletons.get(key)
        if skeleton is None:
            skeleton = self._make(turns, marked, parts, template_args, with_edges)
            self._skeletons[key] = skeleton
            if len(self._skeletons) > _KEPT_LAYOUTS:
                self._skeletons.popitem(last=False)
        else:
            self._skeletons.move_to_end(key)
        return skeleton

    def _make(
        self,
        turns: Sequence[JsonDict],
        marked: ChatRow,
        parts: Sequence[Part],
        template_args: Mapping[str, Any],
        with_edges: bool,
    ) -> _Skeleton:
        text = self._tokenizer.render(turns, tools=marked.tools, template_args=template_args)
        pieces = _PLACEHOLDER.split(text)
        literals, order = tuple(pieces[::2]), tuple(map(int, pieces[1::2]))
        _check_order(order, parts, marked.messages)
        edges = []
        for turn, message in enumerate(marked.messages):
            if message.role == "assistant":
                first, last = _stretch(turn, order, parts)
                if message.tool_calls and turn + 1 < len(turns):
                    # The result of a call may name it again, right behind it.
                    alone = self._order(turns[: turn + 1], marked.tools, template_args)
                    last = min(last, first + sum(parts[n].turn == turn for n in alone) - 1) if alone else last
                before, after = literals[first], literals[last + 1]
                if with_edges:
                    directly = first > 0 and parts[order[first - 1]].turn == turn - 1
                    start = self._start(turn, turns, before, marked, template_args, directly=directly)
                    called = parts[order[last]].kind == "call"
                    content_end, end, closed = self._end(turn, turns, after, marked, template_args, called=called)
                else:
                    start, content_end, end, closed = len(before), 0, 0, True
                edges.append(_Edges(turn, first, last, start, content_end, end, closed))
        return _Skeleton(literals, order, tuple(edges))

    def _order(
        self, turns: Sequence[JsonDict], tools: Sequence[JsonDict], template_args: Mapping[str, Any]
    ) -> list[int]:
        """Numbers of the parts in the rendering of `turns`, in its order; none if they cannot be rendered."""
        try:
            text = self._tokenizer.render(turns, tools=tools, template_args=template_args)
        except RowRejected:
            return []
        return [int(number) for number in _PLACEHOLDER.findall(text)]

    def _end(
        self,
        turn: int,
        turns: Sequence[JsonDict],
        after: str,
        marked: ChatRow,
        template_args: Mapping[str, Any],
        *,
        called: bool,
    ) -> tuple[int, int, bool]:
        """`content_end`, `end` and `closed` in `after`, the literal behind the last part of an answer."""
        ending = self._tail(turns[: turn + 1], marked.tools, template_args, header=False)
        if ending is None or not after.startswith(ending.rstrip()):
            # What ends the turn if another one follows may differ from what ends the last one.
            if called:
                raise RowRejected(
                    "unstable_template", f"turn {turn} (assistant): where its tool call ends is not known"
                )
            return 0, len(after), False
        end = len(_common(after, ending))
        return (self._call_end(after[:end], turns[:turn], marked, template_args) if called else 0), end, True

    def _start(
        self,
        turn: int,
        turns: Sequence[JsonDict],
        before: str,
        marked: ChatRow,
        template_args: Mapping[str, Any],
        *,
        directly: bool,
    ) -> int:
        """Position in `before`, the literal in front of the answer's first part, behind the header of the answer.

        What the header of an answer to come opens and this one does not have (a block of reasoning) is no part of
        it. What stands behind the header is the answer's: the model would write it.
        """
        if directly and turn > 0:
            headed = self._tail(turns[:turn], marked.tools, template_args, header=True)
            bare = self._tail(turns[:turn], marked.tools, template_args, header=False)
            if headed is not None:
                for begin in _beginnings(headed):
                    if begin and before.startswith(begin):
                        # Without a header of its own, all that the template writes there is one.
                        return len(begin) if headed != bare else len(before)
                if headed == bare and before.startswith(headed):
                    return len(before)
        for header in _beginnings(self.header(template_args)):
            at = before.rfind(header) if header.strip() else -1
            if at >= 0:
                return at + len(header)
        raise RowRejected(
            "unstable_template",
            f"turn {turn} (assistant): the header of an answer, {self.header(template_args)[-60:]!r}, is not in what "
            f"the chat template writes in front of it: {before[-60:]!r}",
        )

    def _call_end(
        self, after: str, earlier: Sequence[JsonDict], marked: ChatRow, template_args: Mapping[str, Any]
    ) -> int:
        """Where, behind the name of a turn's last call, the call ends: what ends an answer without calls follows."""
        plain = [*earlier, {"role": "assistant", "content": _placeholder(999_999)}]
        ending = self._tail(plain, marked.tools, template_args, header=False)
        if ending is not None and ending.strip():
            for tail in (ending, ending.rstrip()):
                if after.endswith(tail):
                    return len(after) - len(tail)
        return len(after.rstrip())

    def _tail(
        self, turns: Sequence[JsonDict], tools: Sequence[JsonDict], template_args: Mapping[str, Any], *, header: bool
    ) -> str | None:
        """What stands behind the last part of the rendering of `turns`; None if they cannot be rendered."""
        try:
            text = self._tokenizer.render(turns, tools=tools, template_args=template_args, add_generation_prompt=header)
        except RowRejected:  # a conversation that stops here may be no conversation
            return None
        found = list(_PLACEHOLDER.finditer(text))
        return text[found[-1].end() :] if found else None


def template_turns(messages: Sequence[Message], *, calls_as_text: bool) -> list[JsonDict]:
    """The turns as templates expect them. Reasoning goes by all of its names."""
    turns: list[JsonDict] = []
    for message in messages:
        turn: JsonDict = {"role": message.role, "content": message.content}
        if message.reasoning is not None:
            turn |= dict.fromkeys(("reasoning_content", "reasoning", "thinking"), message.reasoning)
        if message.tool_calls:
            turn["tool_calls"] = [_template_call(call, calls_as_text) for call in message.tool_calls]
        if message.call_id is not None:
            turn["tool_call_id"] = message.call_id
        if message.name is not None:
            turn["name"] = message.name
        turns.append(turn)
    return turns


def think_parts(content: str) -> list[tuple[str, bool]]:
    """A content cut at its tags of reasoning: (text, whether it is reasoning). The tags are entries of their own,
    which count as reasoning."""
    ends = [match.end() for match in _THINK_TAGS.finditer(content) if match[0] in _THINK_ENDS]
    reasoned = max(ends, default=0)
    found: list[tuple[str, bool]] = []
    position = 0
    for match in _THINK_TAGS.finditer(content[:reasoned]):
        found += [(content[position : match.start()], True), (match[0], True)]
        position = match.end()
    return [*found, (content[position:], False)]


def _template_call(call: ToolCall, as_text: bool) -> JsonDict:
    arguments = call.arguments
    if as_text and not isinstance(arguments, str):
        arguments = json.dumps(arguments, ensure_ascii=False)
    function = {"name": call.name, "arguments": arguments}
    return {"type": "function", "function": function, **({} if call.call_id is None else {"id": call.call_id})}


def _mark(row: ChatRow, whole: bool) -> tuple[ChatRow, list[Part]]:
    """The row with placeholders, and the parts they stand for; of the assistant's turns alone if not `whole`."""
    parts: list[Part] = []

    def mark(turn: int, kind: Literal["content", "reasoning", "call"], text: str) -> str:
        core = text.strip()
        lead = text[: len(text) - len(text.lstrip())] if core else text
        parts.append(Part(turn, kind, core))
        return lead + _placeholder(len(parts) - 1) + (text[len(lead) + len(core) :])

    messages: list[Message] = []
    for turn, message in enumerate(row.messages):
        if message.role != "assistant":
            messages.append(replace(message, content=mark(turn, "content", message.content)) if whole else message)
            continue
        reasoning = message.reasoning
        if reasoning is not None and reasoning.strip():
            reasoning = mark(turn, "reasoning", reasoning)
        content = ""
        for text, is_reasoning in think_parts(message.content):
            if _THINK_TAGS.fullmatch(text) or (is_reasoning and not text.strip()):
                content += text
            elif text.strip() or not message.tool_calls:
                content += mark(turn, "reasoning" if is_reasoning else "content", text)
            else:
                content += text
        calls = tuple(replace(call, name=mark(turn, "call", call.name)) for call in message.tool_calls)
        messages.append(replace(message, content=content, reasoning=reasoning, tool_calls=calls))
    return replace(row, messages=tuple(messages)), parts


def _check_unplaced(layout: Layout, messages: Sequence[Message]) -> None:
    """What `_check_order` asks, of the turns that are not the assistant's and were left as they are."""
    position = 0
    for turn, message in enumerate(messages):
        if message.role == "assistant":
            position = max([position, *(p.end for p in layout.parts if p.part.turn == turn)])
            continue
        content = message.content.strip()
        anywhere = message.role in ("system", "developer")
        found = layout.text.find(content, 0 if anywhere else position)
        if found < 0:
            raise RowRejected("template_dropped_turn", _dropped(turn, message.role, content))
        position = position if anywhere else found + len(content)


def _dropped(turn: int, role: str, text: str, what: str = "") -> str:
    return (
        f"{what}turn {turn} ({role}) is not in the rendering: the chat template drops, shortens or rewrites "
        f"{text[:60]!r}"
    )


def _check_order(order: Sequence[int], parts: Sequence[Part], messages: Sequence[Message]) -> None:
    """Every part is there, once, in the order of the turns. System turns may stand anywhere, and the reasoning of
    answers before the last question may be gone: models are not shown it."""
    last_question = max((i for i, message in enumerate(messages) if message.role == "user"), default=-1)
    seen = set(order)
    for number, part in enumerate(parts):
        if number not in seen and not (part.kind == "reasoning" and part.turn < last_question):
            what = {"content": "", "reasoning": "the reasoning of ", "call": "a tool call of "}[part.kind]
            raise RowRejected("template_dropped_turn", _dropped(part.turn, messages[part.turn].role, part.text, what))
    position = -1
    repeated: set[int] = set()
    for number in order:
        part = parts[number]
        if number in repeated:
            if part.kind != "call":
                raise RowRejected("unstable_template", f"turn {part.turn} is in the rendering twice")
            continue
        repeated.add(number)
        if messages[part.turn].role in ("system", "developer"):
            continue
        if part.turn < position:
            raise RowRejected("unstable_template", f"turn {part.turn} stands behind turn {position} in the rendering")
        position = part.turn


def _stretch(turn: int, order: Sequence[int], parts: Sequence[Part]) -> tuple[int, int]:
    """The first and the last position in `order` of the parts of an answer."""
    mine = {position for position, part in enumerate(order) if parts[part].turn == turn}
    if not mine:
        raise RowRejected("unstable_template", f"turn {turn} (assistant) leaves no trace in the rendering")
    first = last = min(mine)
    # A name that stands behind other turns again is no part of this one.
    while last + 1 in mine:
        last += 1
    return first, last


def _fill(skeleton: _Skeleton, parts: Sequence[Part], text: str) -> Layout:
    position = 0
    placed: list[PlacedPart] = []
    for literal, number in zip(skeleton.literals, [*skeleton.order, None], strict=True):
        if not text.startswith(literal, position):
            _refuse_difference(text, position, literal)
        position += len(literal)
        if number is not None:
            part = parts[number]
            if not text.startswith(part.text, position):
                _refuse_difference(text, position, part.text)
            placed.append(PlacedPart(part, position, position + len(part.text)))
            position += len(part.text)
    if position != len(text):
        _refuse_difference(text, position, "")
    answers = []
    for edges in skeleton.edges:
        begin = placed[edges.first].start - len(skeleton.literals[edges.first])
        behind = placed[edges.last].end
        answers.append(
            AnswerEdges(edges.turn, begin + edges.start, behind + edges.content_end, behind + edges.end, edges.closed)
        )
    rendered = set(skeleton.order)
    dropped = len({part.turn for number, part in enumerate(parts) if number not in rendered})
    return Layout(text, tuple(placed), tuple(answers), dropped)


def _refuse_difference(text: str, position: int, expected: str) -> NoReturn:
    same = len(_common(text[position:], expected))
    at = position + same
    raise _Differs(
        "unstable_template",
        f"the chat template writes other things around these turns than around others of the same roles: "
        f"{text[at : at + 40]!r} instead of {expected[same : same + 40]!r} at character {at}",
    )


def _beginnings(header: str) -> list[str]:
    """A header whole, then as it is without the block of reasoning that it opens at its end."""
    tag = _THINK_TAGS.search(header)
    return [header] if tag is None else [header, header[: tag.start()]]


def _common(text: str, other: str) -> str:
    length = next((i for i, (a, b) in enumerate(zip(text, other, strict=False)) if a != b), min(len(text), len(other)))
    return text[:length]


def _placeholder(number: int) -> str:
    return f"hsrayPart{number:06d}End"
