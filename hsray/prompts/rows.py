"""The forms a row can have once it is understood: text, a conversation, token ids. Nouns only."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from hsray.config import Role
from hsray.records import IntArray, JsonDict, MaskArray


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A call that the assistant makes. `arguments` is an object, or text where it is no JSON object."""

    name: str
    arguments: JsonDict | str
    call_id: str | None = None


@dataclass(frozen=True, slots=True)
class Message:
    """One turn.

    Attributes:
        content: the text as given, unstripped. May hold reasoning in tags of its own.
        reasoning: what a key of its own says; None without one.
        call_id: of a tool's turn: the call it answers.
        name: whatever the row says.
        trained: whether the row wants this turn in the loss mask.
    """

    role: Role
    content: str
    reasoning: str | None = None
    tool_calls: tuple[ToolCall, ...] = ()
    call_id: str | None = None
    name: str | None = None
    trained: bool = True


@dataclass(frozen=True, slots=True)
class TextRow:
    """Text that is tokenized as it is. `rendered`: it holds the model's own turn markers, and a mask goes by them."""

    text: str
    rendered: bool = False


@dataclass(frozen=True, slots=True)
class ChatRow:
    """A conversation of at least one turn, the tools it may use, and further variables of the template."""

    messages: tuple[Message, ...]
    tools: tuple[JsonDict, ...] = ()
    template_args: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, eq=False)
class TokenRow:
    """Token ids int32 `[T]`, T >= 0, each inside the vocabulary; `loss_mask` uint8 `[T]`, None if the row has none.

    `padding` tokens that no attention goes to were taken off the ends.
    """

    input_ids: IntArray
    loss_mask: MaskArray | None
    padding: int = 0


ParsedRow = TextRow | ChatRow | TokenRow
