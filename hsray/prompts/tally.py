"""What became of the input: counts per file, and of what was done to rows that nobody rejected."""

from collections import Counter
from dataclasses import dataclass, field
from typing import Literal

Note = Literal[
    "empty_mask",  # no token is the assistant's
    "truncated",  # cut at max_tokens
    "padding_removed",  # tokens without attention at the ends of input_ids
    "special_tokens_kept",  # a turn spells a special token, which it became
    "special_tokens_split",  # the same, encoded as text
    "reasoning_dropped",  # the template leaves out the reasoning of earlier answers
    "no_bos",  # text without the beginning-of-sequence token that the tokenizer writes by default
    "duplicate_renamed",  # an id or a content that was there before, under another name
    "id_from_content",  # the row has no id
]


@dataclass(slots=True)
class FileTally:
    """One file: `rows` = `prompts` + the rejects. `filtered` rows are no input."""

    rows: int = 0
    prompts: int = 0
    filtered: int = 0
    formats: Counter[str] = field(default_factory=Counter)
    rejects: Counter[str] = field(default_factory=Counter)


@dataclass(slots=True)
class Tally:
    """What `read_prompts` counts while it is read."""

    files: dict[str, FileTally] = field(default_factory=dict)
    notes: Counter[str] = field(default_factory=Counter)

    def file(self, url: str) -> FileTally:
        return self.files.setdefault(url, FileTally())

    def total(self) -> FileTally:
        """All files together."""
        total = FileTally()
        for tally in self.files.values():
            total.rows += tally.rows
            total.prompts += tally.prompts
            total.filtered += tally.filtered
            total.formats += tally.formats
            total.rejects += tally.rejects
        return total
