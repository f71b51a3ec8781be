"""The tokenizer and its chat template: rendering and encoding, behind a small typed surface.

The one place of hsray.prompts that knows transformers, which is imported when a tokenizer is loaded and never
asked to reach the network. Promises: nothing is added to a text and nothing is cut from it; the same input
gives the same ids on any day. Must never know about rows, files or masks.
"""

import itertools
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import xxhash

from hsray.errors import ConfigError
from hsray.prompts.rejects import RowRejected
from hsray.records import IntArray, JsonDict

ChatMessage = Mapping[str, Any]
Spans = npt.NDArray[np.int32]

_GENERATION = re.compile(r"\{%-?\s*generation\s*-?%\}")
_MEDIA = re.compile(r"(image|img|vision|video|audio|media)(_|\b|pad|token)", re.IGNORECASE)
_FINGERPRINTED = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
    "chat_template.json",
    "additional_chat_templates/*.jinja",
    "vocab.json",
    "vocab.txt",
    "merges.txt",
    "*.model",
    "*.tiktoken",
    "tokenization_*.py",
)


@dataclass(frozen=True, slots=True, eq=False)
class Encoding:
    """One tokenized text.

    Attributes:
        ids: int32 `[T]`.
        spans: int32 `[T, 2]`, the half-open range of characters of the text that each token covers; None
            unless it was asked for. Tokens that share a character (its bytes are split) have the same span.
    """

    ids: IntArray
    spans: Spans | None


class PromptTokenizer:
    """A tokenizer of transformers with one chat template.

    Attributes:
        chat_template: Jinja source, or None if there is none.
        marks_generation: whether the template says itself which text is the assistant's.
        bos_token_id: or None.
        writes_bos: whether the tokenizer puts it in front of a text by default.
        special_ids: ids of the special tokens, ascending int32.
        special_text: matches any special token in a text; None if there are none.
        media_ids: ids of special tokens that stand for images, audio or video, ascending int32.
    """

    def __init__(self, tokenizer: Any, chat_template: str | None, path: str) -> None:
        self._tokenizer = tokenizer
        self._path = path
        self.chat_template = chat_template
        self.marks_generation = chat_template is not None and _GENERATION.search(chat_template) is not None
        self.bos_token_id: int | None = tokenizer.bos_token_id
        tokens = {i: str(token) for i, token in tokenizer.added_tokens_decoder.items() if token.special}
        tokens |= dict(zip(tokenizer.all_special_ids, map(str, tokenizer.all_special_tokens), strict=True))
        self.special_ids: IntArray = np.array(sorted(tokens), dtype=np.int32)
        self.media_ids: IntArray = np.array(sorted(i for i, t in tokens.items() if _MEDIA.search(t)), dtype=np.int32)
        # The longest first: one may begin with another.
        spelled = sorted(filter(None, tokens.values()), key=lambda text: (-len(text), text))
        self.special_text = re.compile("|".join(map(re.escape, spelled))) if spelled else None
        self._byte_tokens: list[bytes | None] = []
        self._backend: Any = None
        self._literal: Any = None
        self._longest_token = 0
        self.writes_bos = bool(getattr(tokenizer, "add_bos_token", False))
        if tokenizer.is_fast:
            # Not the call of transformers: it may set truncation on the shared Rust object, while another thread
            # reads it.
            self._backend = tokenizer.backend_tokenizer
            self._longest_token = _longest_text(self._backend)
            self._backend.no_truncation()
            self._backend.no_padding()
            first = self._backend.encode("a").ids[:1]
            self.writes_bos = self.bos_token_id is not None and first == [self.bos_token_id]

    def render(
        self,
        messages: Sequence[ChatMessage],
        *,
        tools: Sequence[JsonDict] = (),
        template_args: Mapping[str, Any] | None = None,
        add_generation_prompt: bool = False,
    ) -> str:
        """The chat template applied to turns, tools and further variables; with the header of an answer, if asked.

        Raises:
            RowRejected: `template_error`, the template refuses the conversation.
            ConfigError: there is no template, it is no valid Jinja, or it asks for today's date.
        """
        text, _ = self._render(messages, tools, template_args, add_generation_prompt, track=False)
        return text

    def render_marked(
        self,
        messages: Sequence[ChatMessage],
        *,
        tools: Sequence[JsonDict] = (),
        template_args: Mapping[str, Any] | None = None,
    ) -> tuple[str, list[tuple[int, int]]]:
        """As `render`, and the half-open character ranges inside the template's generation markers."""
        return self._render(messages, tools, template_args, add_generation_prompt=False, track=True)

    def encode(
        self,
        texts: Sequence[str],
        *,
        with_spans: Sequence[bool],
    ) -> list[Encoding]:
        """Tokenize texts as they are: no special tokens are added, nothing is cut or padded.

        Runs on all cores without holding up other threads; the texts of one call are held in memory together with
        their encodings. A tokenizer without a Rust implementation runs on one, and has spans if its tokens spell
        the bytes of the text.
        """
        if not texts:
            return []
        if self._backend is None:
            return [self._encode_slow(text, spans) for text, spans in zip(texts, with_spans, strict=True)]
        batch = self._backend.encode_batch(list(texts), add_special_tokens=False)
        return [_encoding(made, spans) for made, spans in zip(batch, with_spans, strict=True)]

    def least_tokens(self, text: str) -> int:
        """A bound that costs nothing: no encoding of the text has fewer tokens. 0 if none is known."""
        return -(-len(text.encode("utf-8")) // self._longest_token) if self._longest_token else 0

    def encode_literal(self, text: str, literal: Sequence[tuple[int, int]]) -> Encoding:
        """Tokenize a text in which special tokens at the ascending character ranges `literal` are ordinary text.

        Raises:
            RowRejected: `special_token`, a range cannot be spelled with ordinary tokens.
        """
        if self._backend is None:
            raise RowRejected("special_token", "a tokenizer without tokenizer.json cannot split special tokens")
        if self._literal is None:
            from tokenizers import Tokenizer

            self._literal = Tokenizer.from_str(self._backend.to_str())
            self._literal.encode_special_tokens = True
        ids: list[IntArray] = []
        spans: list[Spans] = []
        edges = [0, *(edge for pair in literal for edge in pair), len(text)]
        for number, (start, end) in enumerate(itertools.pairwise(edges)):
            tokenizer = self._literal if number % 2 else self._backend
            made = _encoding(tokenizer.encode(text[start:end], add_special_tokens=False), with_spans=True)
            assert made.spans is not None
            special = bool(np.isin(made.ids, self.special_ids).any())
            if number % 2 and (special or self.decode(made.ids) != text[start:end]):
                raise RowRejected("special_token", f"{text[start:end]!r} cannot be spelled with ordinary tokens")
            ids.append(made.ids)
            spans.append(made.spans + np.int32(start))
        return Encoding(np.concatenate(ids), np.concatenate(spans))

    def decode(self, ids: IntArray) -> str:
        """The text of the ids `[T]`, special tokens included."""
        if self._backend is not None:
            # As transformers does, without its conversions: this is called for every conversation.
            decoded: str = self._backend.decode(ids.tolist(), skip_special_tokens=False)
            return decoded
        text: str = self._tokenizer.decode(ids.tolist(), skip_special_tokens=False, clean_up_tokenization_spaces=False)
        return text

    def _encode_slow(self, text: str, with_spans: bool) -> Encoding:
        ids = np.array(self._tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"], dtype=np.int32)
        return Encoding(ids, self._byte_spans(text, ids) if with_spans else None)

    def _byte_spans(self, text: str, ids: IntArray) -> Spans | None:
        """Spans by the bytes that each token spells; None unless those of all tokens together are the text."""
        if not self._byte_tokens:
            self._byte_tokens = _spelled_bytes(self._tokenizer)
        pieces = [self._byte_tokens[i] if i < len(self._byte_tokens) else None for i in ids.tolist()]
        known = [piece for piece in pieces if piece is not None]
        data = text.encode("utf-8")
        if len(known) != len(pieces) or b"".join(known) != data:
            return None
        ends = np.cumsum([len(piece) for piece in known], dtype=np.int64)
        starts = np.concatenate([np.zeros(min(1, len(ends)), np.int64), ends[:-1]])
        # Of the bytes up to each position, those that begin a character.
        begun = np.concatenate([[0], np.cumsum((np.frombuffer(data, np.uint8) & 0xC0) != 0x80)])
        first = begun[np.minimum(starts + 1, len(data))] - 1
        return np.stack([first, begun[ends]], axis=1).astype(np.int32) if len(ends) else np.empty((0, 2), np.int32)

    def _render(
        self,
        messages: Sequence[ChatMessage],
        tools: Sequence[JsonDict],
        template_args: Mapping[str, Any] | None,
        add_generation_prompt: bool,
        track: bool,
    ) -> tuple[str, list[tuple[int, int]]]:
        from jinja2 import TemplateSyntaxError
        from transformers.utils.chat_template_utils import render_jinja_template

        if self.chat_template is None:
            raise ConfigError(
                f"prompts.chat_template: the tokenizer in {self._path} has no chat template, but there are rows with "
                "conversations. Set it to a file with a Jinja template, or give rows with text or input_ids"
            )
        try:
            # Not tokenizer.apply_chat_template: it gives the marked ranges as tokens of one conversation at a
            # time only, and fails on an empty list of turns.
            rendered: Any = render_jinja_template(
                conversations=[[dict(message) for message in messages]],
                tools=list(tools) or None,
                chat_template=self.chat_template,
                return_assistant_tokens_mask=track,
                add_generation_prompt=add_generation_prompt,
                **{**self._tokenizer.special_tokens_map, "strftime_now": _refuse_date, **(template_args or {})},
            )
        except ConfigError:
            raise
        except TemplateSyntaxError as err:
            raise ConfigError(f"prompts.chat_template: not a valid Jinja template: {err}") from err
        except Exception as err:  # templates raise on purpose, and by mistake whatever Python raises
            raise RowRejected("template_error", f"{type(err).__name__}: {err}") from err
        texts, ranges = rendered  # annotated upstream as one string
        return texts[0], ranges[0] if track else []


def _refuse_date(_format: str) -> str:
    raise ConfigError(
        "prompts.template_date: the chat template prints today's date (strftime_now), so the prompts would be others "
        "tomorrow and the run could not be resumed. Set it to the day to print, as in 2025-01-31"
    )


def _encoding(made: Any, with_spans: bool) -> Encoding:
    ids = np.array(made.ids, dtype=np.int32)
    if not with_spans:
        return Encoding(ids, None)
    # A flat list converts much faster than a list of pairs.
    flat = np.fromiter(itertools.chain.from_iterable(made.offsets), dtype=np.int32, count=2 * len(ids))
    return Encoding(ids, flat.reshape(-1, 2))


def _longest_text(backend: Any) -> int:
    """The most bytes of text that one token can stand for; 0 if a normalizer may take any amount away."""
    normalizer = backend.normalizer
    kind = None if normalizer is None else type(normalizer).__name__
    if kind not in (None, "NFC"):
        return 0
    # Composing makes nothing shorter than a third (Hangul).
    return max(len(token.encode("utf-8")) for token in backend.get_vocab()) * (1 if kind is None else 3)


def _spelled_bytes(tokenizer: Any) -> list[bytes | None]:
    """What each id spells, in a vocabulary that writes bytes as GPT-2 does; None for ids that spell nothing so."""
    printable = [*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    table = {chr(byte): byte for byte in printable}
    table |= {chr(256 + n): byte for n, byte in enumerate(b for b in range(256) if b not in set(printable))}
    special = {i: str(token) for i, token in tokenizer.added_tokens_decoder.items()}
    spelled: list[bytes | None] = []
    for i, token in enumerate(tokenizer.convert_ids_to_tokens(list(range(len(tokenizer))))):
        if i in special:
            spelled.append(special[i].encode("utf-8"))
        elif isinstance(token, str) and all(char in table for char in token):
            spelled.append(bytes(table[char] for char in token))
        else:
            spelled.append(None)
    return spelled


def load_tokenizer(model_path: str, *, trust_remote_code: bool, chat_template: str | None) -> PromptTokenizer:
    """Load the tokenizer of a local directory.

    Args:
        model_path: directory of the tokenizer.
        trust_remote_code: run Python that comes with the tokenizer.
        chat_template: file with a Jinja template that replaces the tokenizer's own.

    Raises:
        ConfigError: no such directory, a tokenizer that cannot be loaded, an unreadable template file.
    """
    template = _template_text(chat_template)
    directory = _tokenizer_directory(model_path)
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(directory, trust_remote_code=trust_remote_code, local_files_only=True)
    except Exception as err:  # OSError, ValueError, ImportError, and whatever remote code raises
        raise ConfigError(
            f"model.path / model.tokenizer_path: no tokenizer can be loaded from {model_path}: {err}"
        ) from err
    if template is None and tokenizer.chat_template is not None:
        try:
            template = tokenizer.get_chat_template()
        except ValueError as err:  # several named templates, and none is the default
            raise ConfigError(f"prompts.chat_template: {model_path} has no default chat template: {err}") from err
    return PromptTokenizer(tokenizer, template, model_path)


def tokenizer_fingerprint(model_path: str, chat_template: str | None) -> str:
    """xxh3-128, 32 hex digits, over the tokenizer files in `model_path` and the template file, if one is given.

    Raises:
        ConfigError: no such directory, no tokenizer file in it, an unreadable template file.
    """
    directory = _tokenizer_directory(model_path)
    files = sorted({file for pattern in _FINGERPRINTED for file in directory.glob(pattern)})
    if not files:
        raise ConfigError(f"model.path / model.tokenizer_path: {model_path} holds no tokenizer files")
    digest = xxhash.xxh3_128()
    template = _template_text(chat_template)
    parts = [(file.relative_to(directory).as_posix(), file.read_bytes()) for file in files]
    if template is not None:
        parts.append(("", template.encode("utf-8")))
    for name, content in parts:
        # The lengths keep two different lists of files from being the same bytes.
        digest.update(f"{len(name)} {len(content)} {name} ".encode())
        digest.update(content)
    return digest.hexdigest()


def _tokenizer_directory(model_path: str) -> Path:
    directory = Path(model_path)
    if not directory.is_dir():
        raise ConfigError(
            f"model.path / model.tokenizer_path: {model_path} is not a directory. Download the model and give its "
            "folder: nothing is fetched from the network"
        )
    return directory


def _template_text(path: str | None) -> str | None:
    if path is None:
        return None
    try:
        return Path(path).read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as err:
        raise ConfigError(f"prompts.chat_template: cannot read {path}: {err}") from err
