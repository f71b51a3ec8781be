"""The stream of prompts: every input row, in order, as a `Prompt` or a `Reject`.

Promises: each input row comes out exactly once, under its dense row number; the same files, configuration and
tokenizer give the same stream; memory is bounded by a batch, not by the input. Must never know what the prompts
are for.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import islice

import numpy as np

from hsray.config import PromptsConfig
from hsray.prompts.chat import RenderedChat, assistant_mask, render_chat
from hsray.prompts.files import input_files
from hsray.prompts.identity import Identities, explicit_id
from hsray.prompts.readers import BadRow, SourceRow, read_rows
from hsray.prompts.rejects import RowRejected
from hsray.prompts.shapes import ChatRow, TextRow, TokenRow, parse_row, row_columns
from hsray.prompts.tokenizer import Encoding, PromptTokenizer
from hsray.records import IntArray, MaskArray, Prompt, Reject

# One call of the tokenizer: enough rows to keep its threads busy, and few enough bytes that the encodings of
# long prompts (about a hundred bytes a token) stay small.
_BATCH_ROWS = 256
_BATCH_BYTES = 4 << 20


def read_prompts(
    config: PromptsConfig, tokenizer: PromptTokenizer, *, vocab_size: int, max_tokens: int
) -> Iterator[Prompt | Reject]:
    """Read, render, tokenize and mask the input.

    Conversations are rendered by the chat template and tokenized without adding special tokens, since the
    template writes them. Text is tokenized as it is, also without adding any: a beginning-of-sequence token must
    be in the text. The mask of text, and of token ids that bring none, is 1 everywhere.

    Args:
        vocab_size: rows of the model's embedding. A row with an id outside is rejected.
        max_tokens: longest prompt, resolved from `prompts.max_tokens` and the model's context length.

    Yields:
        One record per input row, in input order, `row` counting from 0. Nothing is cut: a row of more than
        `max_tokens`, fewer than `prompts.min_tokens` or no tokens is a reject. Of rows with the same id the
        first that is good is kept. `prompts.limit` counts rows, rejects included.

    Raises:
        ConfigError: a file that cannot be read, or that breaks off; rows that need a chat template, and there
            is none.
    """
    builder = _Builder(config, tokenizer, vocab_size, max_tokens)
    rows = islice(enumerate(_source_rows(config)), config.limit)
    for batch in _batches(rows):
        yield from builder.build(batch)


def _source_rows(config: PromptsConfig) -> Iterator[SourceRow | BadRow]:
    columns = row_columns(config.id_field)
    for file in input_files(config):
        yield from read_rows(file, config.storage_options, columns)


def _batches(
    rows: Iterable[tuple[int, SourceRow | BadRow]],
) -> Iterator[list[tuple[int, SourceRow | BadRow]]]:
    batch: list[tuple[int, SourceRow | BadRow]] = []
    nbytes = 0
    for row, source in rows:
        batch.append((row, source))
        nbytes += source.nbytes if isinstance(source, SourceRow) else 0
        if len(batch) >= _BATCH_ROWS or nbytes >= _BATCH_BYTES:
            yield batch
            batch, nbytes = [], 0
    if batch:
        yield batch


@dataclass(frozen=True, slots=True)
class _Draft:
    """A row on its way to a prompt: well-formed, not tokenized."""

    row: int
    source: SourceRow
    explicit_id: str | None
    content: TextRow | RenderedChat | TokenRow

    @property
    def text(self) -> str | None:
        """What has to be tokenized; None for token ids."""
        return None if isinstance(self.content, TokenRow) else self.content.text


class _Builder:
    def __init__(self, config: PromptsConfig, tokenizer: PromptTokenizer, vocab_size: int, max_tokens: int) -> None:
        self._config = config
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._max_tokens = max_tokens
        self._identities = Identities(config.id_field)

    def build(self, batch: Iterable[tuple[int, SourceRow | BadRow]]) -> Iterator[Prompt | Reject]:
        """The records of a batch, in its order."""
        results = [self._draft(row, source) for row, source in batch]
        waiting = [d for d in results if isinstance(d, _Draft) and d.text is not None]
        encodings = iter(
            self._tokenizer.encode(
                [d.text for d in waiting if d.text is not None],
                with_spans=[isinstance(d.content, RenderedChat) for d in waiting],
            )
        )
        for result in results:
            if isinstance(result, Reject):
                yield result
            else:
                yield self._finish(result, next(encodings) if result.text is not None else None)

    def _draft(self, row: int, source: SourceRow | BadRow) -> _Draft | Reject:
        if isinstance(source, BadRow):
            return Reject(row, None, source.file, source.line, source.reason, source.detail, source.snippet)
        explicit = None
        try:
            explicit = explicit_id(source.data, self._config.id_field)
            parsed = parse_row(source.data, self._config.format, self._vocab_size)
            content = render_chat(parsed.messages, self._tokenizer) if isinstance(parsed, ChatRow) else parsed
        except RowRejected as err:
            return _reject(row, explicit, source, err)
        return _Draft(row, source, explicit, content)

    def _finish(self, draft: _Draft, encoding: Encoding | None) -> Prompt | Reject:
        try:
            ids, mask = self._tokens(draft.content, encoding)
            prompt_id = self._identities.claim(draft.explicit_id, ids, mask)
        except RowRejected as err:
            return _reject(draft.row, draft.explicit_id, draft.source, err)
        return Prompt(draft.row, prompt_id, ids, mask, draft.source.file, draft.source.line)

    def _tokens(
        self, content: TextRow | RenderedChat | TokenRow, encoding: Encoding | None
    ) -> tuple[IntArray, MaskArray]:
        if isinstance(content, TokenRow):
            self._check_ids(content.input_ids)
            mask = content.loss_mask
            return content.input_ids, np.ones(len(content.input_ids), np.uint8) if mask is None else mask
        assert encoding is not None, "whatever has text was encoded"
        self._check_ids(encoding.ids)
        if isinstance(content, RenderedChat):
            return encoding.ids, assistant_mask(content, encoding, self._tokenizer)
        return encoding.ids, np.ones(len(encoding.ids), np.uint8)

    def _check_ids(self, ids: IntArray) -> None:
        num_tokens = len(ids)
        if num_tokens == 0:
            raise RowRejected("empty", "the row has no tokens")
        if num_tokens > self._max_tokens:
            raise RowRejected("too_long", f"{num_tokens} tokens, at most {self._max_tokens} fit")
        if num_tokens < self._config.min_tokens:
            raise RowRejected("too_short", f"{num_tokens} tokens, prompts.min_tokens is {self._config.min_tokens}")
        if int(ids.max()) >= self._vocab_size:
            raise RowRejected(
                "id_out_of_range",
                f"the tokenizer gives the id {int(ids.max())}; the model has {self._vocab_size} ids",
            )
        if num_tokens > 1 and ids[0] == ids[1] == self._tokenizer.bos_token_id:
            raise RowRejected("double_bos", f"the row starts with two beginning-of-sequence tokens ({int(ids[0])})")


def _reject(row: int, prompt_id: str | None, source: SourceRow, error: RowRejected) -> Reject:
    return Reject(row, prompt_id, source.file, source.line, error.reason, error.detail, source.snippet)
