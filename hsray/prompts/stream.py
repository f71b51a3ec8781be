"""The stream of prompts: every input row, in order, as a `Prompt` or a `Reject`.

Promises: each input row comes out exactly once, under its dense row number; the same files, configuration and
tokenizer give the same stream; memory is bounded by a few batches, not by the input. Must never know what the
prompts are for.
"""

import logging
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np

from hsray.config import PromptsConfig
from hsray.errors import ConfigError
from hsray.prompts.chat import ChatRenderer, RenderedChat, assistant_mask
from hsray.prompts.files import input_files
from hsray.prompts.identity import Identities, Survey, explicit_id
from hsray.prompts.readers import read_rows
from hsray.prompts.rejects import RowRejected
from hsray.prompts.rows import ChatRow, TextRow, TokenRow
from hsray.prompts.selection import select_rows
from hsray.prompts.shapes import parse_row, row_columns
from hsray.prompts.source import BadRow, Row, SourceRow
from hsray.prompts.tally import Note, Tally
from hsray.prompts.tokenizer import Encoding, PromptTokenizer
from hsray.records import IntArray, MaskArray, Prompt, Reject

log = logging.getLogger(__name__)

# One call of the tokenizer: enough rows to keep its threads busy, and few enough bytes that the encodings of
# long prompts (about a hundred bytes a token) stay small.
_BATCH_ROWS = 256
_BATCH_BYTES = 4 << 20
# Batches in the tokenizer's thread or waiting for it, while the next one is read and rendered.
_BATCHES_AHEAD = 2
_FILES_LOGGED = 20


def read_prompts(
    config: PromptsConfig,
    tokenizer: PromptTokenizer,
    *,
    vocab_size: int,
    max_tokens: int,
    tally: Tally | None = None,
) -> Iterator[Prompt | Reject]:
    """Read, render, tokenize and mask the input.

    Conversations are rendered by the chat template and tokenized without adding special tokens, since the
    template writes them. Text is tokenized as it is; a beginning-of-sequence token is in front of it if the text
    or `prompts.add_bos` says so. The mask of text, but for that token, and of token ids that bring none, is 1.

    Args:
        vocab_size: rows of the model's embedding. A row with an id outside is rejected.
        max_tokens: longest prompt, resolved from `prompts.max_tokens` and the model's context length.
        tally: counts what becomes of the rows, as far as they were read.

    Yields:
        One record per input row, in input order, `row` counting from 0. A row that `prompts` refuses is a reject:
        more than `max_tokens`, fewer than `min_tokens` or no tokens, an id that another row has, and so on.
        `prompts.limit` counts rows, rejects included.

    Raises:
        ConfigError: a file that cannot be read, or that breaks off; rows that need a chat template, and there
            is none.
    """
    identities = Identities(config.duplicates)
    if config.duplicates == "reject":
        survey = Survey()
        for _ in _Builder(config, tokenizer, vocab_size, max_tokens, survey, Tally()).records():
            pass
        identities = Identities(config.duplicates, frozenset(survey.repeated))
    tally = tally if tally is not None else Tally()
    yield from _Builder(config, tokenizer, vocab_size, max_tokens, identities, tally).records()
    _log_formats(tally)


def _log_formats(tally: Tally) -> None:
    for number, (url, file) in enumerate(tally.files.items()):
        if number == _FILES_LOGGED:
            log.info("and %d further input files", len(tally.files) - number)
            return
        formats = ", ".join(f"{count:,} {name}" for name, count in file.formats.most_common()) or "no known format"
        log.info("%s: %s rows (%s), %s rejected", url, f"{file.rows:,}", formats, f"{file.rejects.total():,}")


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


_Encoded = Sequence[tuple[_Draft | Reject, Encoding | RowRejected | None]]


class _Builder:
    def __init__(
        self,
        config: PromptsConfig,
        tokenizer: PromptTokenizer,
        vocab_size: int,
        max_tokens: int,
        identities: Identities,
        tally: Tally,
    ) -> None:
        self._config = config
        self._tokenizer = tokenizer
        self._renderer = ChatRenderer(tokenizer, config)
        self._vocab_size = vocab_size
        self._max_tokens = max_tokens
        self._identities = identities
        self._tally = tally

    def records(self) -> Iterator[Prompt | Reject]:
        """All of the input. The tokenizer runs in a thread of its own, beside reading, rendering and masking."""
        batches = _batches(select_rows(self._source_rows(), self._config, self._tally))
        waiting: deque[Future[_Encoded]] = deque()
        error: ConfigError | None = None
        with ThreadPoolExecutor(1, thread_name_prefix="hsray-tokenizer") as pool:
            while True:
                try:
                    batch = next(batches, None)
                    drafts = [] if batch is None else [self._draft(row, source) for row, source in batch]
                except ConfigError as err:
                    # What was read before comes out first.
                    batch, error = None, err
                if batch is None:
                    break
                waiting.append(pool.submit(self._encode, drafts))
                if len(waiting) > _BATCHES_AHEAD:
                    yield from self._finished(waiting.popleft().result())
            while waiting:
                yield from self._finished(waiting.popleft().result())
        if error is not None:
            raise error

    def _source_rows(self) -> Iterator[Row]:
        columns = row_columns(self._config)
        for file in input_files(self._config):
            self._tally.file(file.url)
            yield from read_rows(file, self._config.storage_options, columns)

    def _draft(self, row: int, source: Row) -> _Draft | Reject:
        if isinstance(source, BadRow):
            return Reject(row, None, source.file, source.line, source.reason, source.detail, source.snippet)
        explicit = None
        try:
            explicit = explicit_id(source.data, self._config.id_fields)
            format_, parsed = parse_row(source.data, self._config, self._vocab_size)
            self._tally.file(source.file).formats[format_] += 1
            content: TextRow | RenderedChat | TokenRow
            if isinstance(parsed, ChatRow):
                content = self._renderer.render(parsed)
            elif isinstance(parsed, TextRow) and parsed.rendered:
                content = self._renderer.render_text(parsed.text)
            else:
                content = parsed
            if not isinstance(content, TokenRow):
                self._check_size(content.text)
        except RowRejected as err:
            return _reject(row, explicit, source, err)
        return _Draft(row, source, explicit, content)

    def _check_size(self, text: str) -> None:
        # A tokenizer can take minutes for megabytes without a space.
        least = self._tokenizer.least_tokens(text)
        if self._config.over_length == "reject" and least > self._max_tokens:
            raise RowRejected("too_long", f"{least} tokens or more, at most {self._max_tokens} fit")

    def _encode(self, drafts: Sequence[_Draft | Reject]) -> _Encoded:
        """Runs in the tokenizer's thread."""
        encoded: list[Encoding | RowRejected | None] = [None] * len(drafts)
        plain: list[tuple[int, str, bool]] = []
        for number, draft in enumerate(drafts):
            if isinstance(draft, Reject) or draft.text is None:
                continue
            if isinstance(draft.content, RenderedChat) and draft.content.literal:
                try:
                    encoded[number] = self._tokenizer.encode_literal(draft.text, draft.content.literal)
                except RowRejected as err:
                    encoded[number] = err
            else:
                plain.append((number, draft.text, isinstance(draft.content, RenderedChat)))
        made = self._tokenizer.encode([text for _, text, _ in plain], with_spans=[spans for _, _, spans in plain])
        for (number, _, _), encoding in zip(plain, made, strict=True):
            encoded[number] = encoding
        return list(zip(drafts, encoded, strict=True))

    def _finished(self, encoded: _Encoded) -> Iterator[Prompt | Reject]:
        """The records of a batch, in its order."""
        for draft, encoding in encoded:
            record = draft if isinstance(draft, Reject) else self._finish(draft, encoding)
            file = self._tally.file(record.file)
            file.rows += 1
            if isinstance(record, Reject):
                file.rejects[record.reason] += 1
            else:
                file.prompts += 1
            yield record

    def _finish(self, draft: _Draft, encoding: Encoding | RowRejected | None) -> Prompt | Reject:
        notes: list[Note] = []
        try:
            if isinstance(encoding, RowRejected):
                raise encoding
            ids, mask = self._tokens(draft.content, encoding, notes)
            full_tokens = None
            if len(ids) > self._max_tokens:  # ids and mask together
                full_tokens = len(ids)
                ids, mask = ids[: self._max_tokens].copy(), mask[: self._max_tokens].copy()
                notes.append("truncated")
            if not mask.any():
                if self._config.empty_mask == "reject":
                    detail = "no token is the assistant's" if full_tokens is None else "the answers were cut away"
                    raise RowRejected("empty_mask", detail)
                notes.append("empty_mask")
            prompt_id = self._identities.claim(draft.explicit_id, ids, mask)
        except RowRejected as err:
            return _reject(draft.row, draft.explicit_id, draft.source, err)
        if draft.explicit_id is None:
            notes.append("id_from_content")
        if prompt_id != draft.explicit_id and (draft.explicit_id is not None or "#" in prompt_id):
            notes.append("duplicate_renamed")
        self._tally.notes.update(notes)
        return Prompt(draft.row, prompt_id, ids, mask, draft.source.file, draft.source.line, full_tokens)

    def _tokens(
        self, content: TextRow | RenderedChat | TokenRow, encoding: Encoding | None, notes: list[Note]
    ) -> tuple[IntArray, MaskArray]:
        if isinstance(content, TokenRow):
            self._check_ids(content.input_ids)
            if content.padding:
                notes.append("padding_removed")
            mask = content.loss_mask
            if mask is None:
                return content.input_ids, np.ones(len(content.input_ids), np.uint8)
            return content.input_ids, _last_stretch(mask) if self._config.mask_turns == "last" else mask
        assert encoding is not None, "whatever has text was encoded"
        if isinstance(content, RenderedChat) and not content.is_text:
            self._check_ids(encoding.ids)
            notes.extend(content.notes)
            return encoding.ids, assistant_mask(content, encoding, self._tokenizer)
        ids, has_bos = self._begun(encoding.ids, notes)
        self._check_ids(ids)
        if isinstance(content, RenderedChat):
            mask = assistant_mask(content, encoding, self._tokenizer)
            mask = _last_stretch(mask) if self._config.mask_turns == "last" else mask
            return ids, np.concatenate([np.zeros(len(ids) - len(mask), np.uint8), mask])
        # The beginning of a sequence is never predicted.
        return ids, (np.arange(len(ids)) >= has_bos).astype(np.uint8)

    def _begun(self, ids: IntArray, notes: list[Note]) -> tuple[IntArray, bool]:
        """The ids of a text, with a beginning of sequence if the configuration wants one; whether there is one."""
        bos = self._tokenizer.bos_token_id
        if bos is not None and ids[:1].tolist() == [bos]:
            return ids, True
        if self._config.add_bos and len(ids):
            if bos is None:
                raise ConfigError("prompts.add_bos: the tokenizer has no beginning-of-sequence token")
            return np.concatenate([np.array([bos], np.int32), ids]), True
        if self._tokenizer.writes_bos and len(ids):
            notes.append("no_bos")
        return ids, False

    def _check_ids(self, ids: IntArray) -> None:
        num_tokens = len(ids)
        if num_tokens == 0:
            raise RowRejected("empty", "the row has no tokens")
        if num_tokens > self._max_tokens and self._config.over_length == "reject":
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
        media = self._tokenizer.media_ids
        if len(media) and (found := np.flatnonzero(np.isin(ids, media))).size:
            place = int(found[0])
            raise RowRejected("multimodal", f"token {place} ({int(ids[place])}) stands for an image, audio or video")


def _batches(rows: Iterable[Row]) -> Iterator[list[tuple[int, Row]]]:
    batch: list[tuple[int, Row]] = []
    nbytes = 0
    for row, source in enumerate(rows):
        batch.append((row, source))
        nbytes += source.nbytes if isinstance(source, SourceRow) else 0
        if len(batch) >= _BATCH_ROWS or nbytes >= _BATCH_BYTES:
            yield batch
            batch, nbytes = [], 0
    if batch:
        yield batch


def _last_stretch(mask: MaskArray) -> MaskArray:
    """The mask with its last unbroken run of ones alone."""
    edges = np.flatnonzero(np.diff(mask.astype(np.int8), prepend=0) == 1)
    kept = mask.copy()
    kept[: int(edges[-1]) if len(edges) else 0] = 0
    return kept


def _reject(row: int, prompt_id: str | None, source: SourceRow, error: RowRejected) -> Reject:
    return Reject(row, prompt_id, source.file, source.line, error.reason, error.detail, source.snippet)
