"""The tokenizer and its chat template: rendering and encoding, behind a small typed surface.

The one place of hsray.prompts that knows transformers, which is imported when a tokenizer is loaded and never
asked to reach the network. Promises: nothing is added to a text and nothing is cut from it; the same input
gives the same ids on any day. Must never know about rows, files or masks.
"""

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
from hsray.records import IntArray

ChatMessage = Mapping[str, str]
Spans = npt.NDArray[np.int32]

_GENERATION = re.compile(r"\{%-?\s*generation\s*-?%\}")
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
        special_ids: ids of the special tokens, ascending int32.
    """

    def __init__(self, tokenizer: Any, chat_template: str | None, path: str) -> None:
        self._tokenizer = tokenizer
        self._path = path
        self.chat_template = chat_template
        self.marks_generation = chat_template is not None and _GENERATION.search(chat_template) is not None
        self.bos_token_id: int | None = tokenizer.bos_token_id
        added = {i for i, token in tokenizer.added_tokens_decoder.items() if token.special}
        self.special_ids: IntArray = np.array(sorted(added | set(tokenizer.all_special_ids)), dtype=np.int32)

    def render(self, messages: Sequence[ChatMessage], *, add_generation_prompt: bool = False) -> str:
        """The chat template applied to turns of `role` and `content`; with the header of an answer, if asked.

        Raises:
            RowRejected: `template_error`, the template refuses the conversation.
            ConfigError: there is no template, it is no valid Jinja, or it asks for today's date.
        """
        text, _ = self._render(messages, add_generation_prompt, track=False)
        return text

    def render_marked(self, messages: Sequence[ChatMessage]) -> tuple[str, list[tuple[int, int]]]:
        """As `render`, and the half-open character ranges inside the template's generation markers."""
        return self._render(messages, add_generation_prompt=False, track=True)

    def encode(self, texts: Sequence[str], *, with_spans: Sequence[bool]) -> list[Encoding]:
        """Tokenize texts as they are: no special tokens are added, nothing is cut or padded.

        Runs on all cores; the texts of one call are held in memory together with their encodings.

        Raises:
            ConfigError: the tokenizer has no Rust implementation.
        """
        if not texts:
            return []
        if not self._tokenizer.is_fast:
            raise ConfigError(
                f"model.tokenizer_path: {type(self._tokenizer).__name__} in {self._path} is a slow tokenizer, which "
                "does not tell what text a token covers; give rows with input_ids, or a tokenizer.json"
            )
        batch = self._tokenizer(
            list(texts),
            add_special_tokens=False,
            padding=False,
            truncation=False,
            return_attention_mask=False,
            return_token_type_ids=False,
            verbose=False,
        )
        return [
            Encoding(
                np.array(encoding.ids, dtype=np.int32),
                np.array(encoding.offsets, dtype=np.int32).reshape(-1, 2) if spans else None,
            )
            for encoding, spans in zip(batch.encodings, with_spans, strict=True)
        ]

    def decode(self, ids: IntArray) -> str:
        """The text of the ids `[T]`, special tokens included."""
        text: str = self._tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)
        return text

    def _render(
        self, messages: Sequence[ChatMessage], add_generation_prompt: bool, track: bool
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
                chat_template=self.chat_template,
                return_assistant_tokens_mask=track,
                add_generation_prompt=add_generation_prompt,
                **{**self._tokenizer.special_tokens_map, "strftime_now": _refuse_date},
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
        "prompts.chat_template: the template prints today's date (strftime_now), so the prompts would be others "
        "tomorrow and the run could not be resumed. Set prompts.chat_template to a copy with a fixed date"
    )


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
