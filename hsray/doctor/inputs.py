"""The driver's own side: tokenizer, chat template, the first input rows, and the way to Ray."""

import os
import socket
import time
from collections import Counter
from collections.abc import Mapping
from typing import Any

from hsray.checkpoint import ModelFacts, model_fingerprint
from hsray.config import Config
from hsray.doctor.facts import InputFacts, RunFacts
from hsray.doctor.subject import Subject
from hsray.errors import HsrayError
from hsray.plan import fingerprint
from hsray.prompts import input_files, load_tokenizer, read_prompts, tokenizer_fingerprint
from hsray.prompts.tokenizer import PromptTokenizer
from hsray.records import Reject
from hsray.site_storage import TOKEN_SELECTIONS, TokenSelection
from hsray.token_selection import select_positions

# One call of the tokenizer; a few seconds even with the slowest one.
SAMPLE_ROWS = 256
_SAMPLE_SECONDS = 60.0
_CONNECT_SECONDS = 5.0


def examine_run(subject: Subject) -> RunFacts:
    """Load the tokenizer, read some rows, knock at Ray's door."""
    config = subject.config
    tokenizer, error = _load(config)
    inputs = InputFacts(error="not read: there is no tokenizer or no model for it")
    if tokenizer is not None and subject.model is not None and subject.longest:
        inputs = read_sample(config, tokenizer, subject.model, subject.longest)
    address = config.cluster.address or os.environ.get("RAY_ADDRESS", "")
    address = "" if address == "local" else address
    return RunFacts(error, inputs, address, knock(address), _fingerprint(subject) if not error else {})


def _load(config: Config) -> tuple[PromptTokenizer | None, str]:
    try:
        tokenizer = load_tokenizer(
            config.model.tokenizer_path or config.model.path,
            trust_remote_code=config.model.trust_remote_code,
            chat_template=config.prompts.chat_template,
        )
    except HsrayError as err:
        return None, str(err)
    return tokenizer, ""


def read_sample(config: Config, tokenizer: PromptTokenizer, model: ModelFacts, longest: int) -> InputFacts:
    """The first rows in file order. What needs the whole input (shuffling, all duplicates) is left out."""
    limit = min(SAMPLE_ROWS, config.prompts.limit or SAMPLE_ROWS)
    changes: dict[str, Any] = {"limit": limit, "shuffle_seed": None}
    if config.prompts.duplicates == "reject":
        changes["duplicates"] = "keep-first"
    rows, lengths, rejects = 0, list[int](), dict[str, tuple[int, str]]()
    kept: Counter[TokenSelection] = Counter()
    has_template = tokenizer.chat_template is not None
    deadline = time.monotonic() + _SAMPLE_SECONDS
    is_cut = False
    try:
        files = input_files(config.prompts)
        stream = read_prompts(
            config.prompts.model_copy(update=changes), tokenizer, vocab_size=model.vocab_size, max_tokens=longest
        )
        for item in stream:
            rows += 1
            if isinstance(item, Reject):
                count, first = rejects.get(item.reason, (0, f"{item.file}:{item.line}: {item.detail}"))
                rejects[item.reason] = (count + 1, first)
            else:
                lengths.append(item.num_tokens)
                for selection in TOKEN_SELECTIONS:
                    kept[selection] += len(select_positions(selection, item.loss_mask))
            if time.monotonic() > deadline:
                is_cut = True
                break
    except HsrayError as err:
        return InputFacts(error=str(err), has_template=has_template)
    return InputFacts(
        files=len(files),
        nbytes=sum(file.nbytes or 0 for file in files),
        has_template=has_template,
        rows=rows,
        lengths=tuple(lengths),
        shares={selection: count / sum(lengths) for selection, count in kept.items()},
        is_all=not is_cut and bool(rows < limit or rows == config.prompts.limit),
        rejects=rejects,
    )


def knock(address: str) -> str:
    """Why nothing can be reached at a Ray address; empty if something listens, or there is nothing to try."""
    target = address.rpartition("://")[2]
    host, colon, port = target.rpartition(":")
    if not address or address == "auto" or not colon:
        return ""
    if not port.isdigit():
        return f"{address!r} has no port"
    try:
        socket.create_connection((host.strip("[]"), int(port)), _CONNECT_SECONDS).close()
    except (OSError, OverflowError) as err:
        return getattr(err, "strerror", None) or str(err)
    return ""


def _fingerprint(subject: Subject) -> Mapping[str, str]:
    """The parts of the run's fingerprint that need no reading of the input."""
    config = subject.config
    try:
        parts = fingerprint(
            config,
            sites=subject.sites,
            model=model_fingerprint(config.model.path),
            tokenizer=tokenizer_fingerprint(
                config.model.tokenizer_path or config.model.path, config.prompts.chat_template
            ),
            inputs=(),
            storage=subject.storage,
        )["parts"]
    except (HsrayError, OSError, ValueError):  # another check says so
        return {}
    return dict(parts)
