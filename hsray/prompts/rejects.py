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
    "not_an_object",  # JSON, but not an object
    "bad_encoding",  # invalid UTF-8, or a lone surrogate
    "row_too_large",  # over the byte limit of one row
    # shape
    "unknown_shape",  # none of the known keys
    "missing_field",  # prompts.format asks for a key that the row lacks
    "bad_field",  # a key holds a value of the wrong type
    "bad_id",  # the id is a list, an object or bytes
    "unsupported_field",  # a key that changes the prompt or the mask, and is not implemented
    "multimodal",  # images, audio or video
    "unknown_role",
    "empty_conversation",
    "missing_content",  # a turn without content, or with null
    "bad_input_ids",
    "bad_loss_mask",
    "id_out_of_range",  # a token id outside the model's vocabulary
    # rendering
    "template_error",  # the chat template refused the conversation
    "template_dropped_turn",  # a turn's content is not in the rendering
    "unstable_template",  # the rendering of earlier turns depends on later ones
    "mask_mismatch",  # the masked tokens do not decode to the assistant's content
    "double_bos",
    # length
    "empty",
    "too_short",
    "too_long",
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
