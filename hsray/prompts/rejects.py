"""Why an input row cannot become a prompt: the stable reason codes and the exception that carries one.

Promises: a code never changes its meaning, so reports of different runs can be compared. Everything in
hsray.prompts that refuses a row raises `RowRejected`; `stream` turns it into a `Reject`. Must never know where
a row came from.
"""

from typing import Literal, get_args

from hsray.errors import PromptError

Reason = Literal[
    # reading
    "malformed_json",  # not JSON: a broken or cut line
    "malformed_csv",  # quotes that do not close, or another number of fields than the header
    "not_an_object",  # JSON, but not an object
    "bad_encoding",  # invalid UTF-8, or a lone surrogate
    "row_too_large",  # over the byte limit of one row
    # shape
    "unknown_shape",  # none of the known keys
    "ambiguous_shape",  # one row that is several prompts, and prompts.format does not say which
    "missing_field",  # prompts.format asks for a key that the row lacks
    "bad_field",  # a key holds a value of the wrong type
    "bad_id",  # the id is a list, an object or bytes
    "unsupported_field",  # a key that changes the prompt or the mask, and is not implemented
    "source_error",  # the row says itself that making it failed, or that its answer was cut
    "multimodal",  # images, audio or video
    "unknown_role",
    "empty_conversation",
    "missing_content",  # a turn without content, or with null
    "bad_input_ids",
    "bad_loss_mask",
    "bad_labels",  # not -100 and not the token either: shifted, or of another tokenizer
    "id_out_of_range",  # a token id outside the model's vocabulary
    # rendering
    "template_error",  # the chat template refused the conversation
    "template_dropped_turn",  # a turn's content, reasoning or tool call is not in the rendering
    "template_dropped_tools",  # the tools of the row are not in the rendering
    "unstable_template",  # the rendering depends on more than the turns, so the parts cannot be told apart
    "special_token",  # the text of a conversation spells a special token
    "mask_mismatch",  # the masked tokens do not decode to the assistant's content
    "double_bos",
    # length
    "empty",
    "too_short",
    "too_long",
    "empty_mask",  # no token is the assistant's, and prompts.empty_mask is reject
    # identity
    "duplicate_id",
    "duplicate",  # no id, and the same content as an earlier row
]

REASONS: frozenset[str] = frozenset(get_args(Reason))


class RowRejected(PromptError):
    """An input row is refused: `args` are the reason code and what is wrong with this row."""

    def __init__(self, reason: Reason, detail: str) -> None:
        super().__init__(reason, detail)
        self.reason = reason
        self.detail = detail

    def __str__(self) -> str:
        return f"{self.reason}: {self.detail}"
