"""`python -m tests.drive ENGINE_CLASS CONFIG [key=value ...]`: hsray.extract with another engine.

With the made-up engine the tokenizer comes without transformers, whose import takes longer than such a run. Everything
else is as a user's driver has it.
"""

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from tokenizers import Tokenizer

import hsray.prompts
from hsray.extract import main
from hsray.prompts.tokenizer import PromptTokenizer
from tests.runs import FAKE


def load_without_transformers(model_path: str, **_: Any) -> PromptTokenizer:
    """The tokenizer.json of a directory, with no chat template."""
    backend = Tokenizer.from_file(str(Path(model_path) / "tokenizer.json"))
    special = {i: token for i, token in backend.get_added_tokens_decoder().items() if token.special}
    made = SimpleNamespace(
        is_fast=True,
        backend_tokenizer=backend,
        bos_token_id=None,
        added_tokens_decoder=special,
        all_special_ids=list(special),
        all_special_tokens=[token.content for token in special.values()],
    )
    return PromptTokenizer(made, None, model_path)


if __name__ == "__main__":
    if sys.argv[1] == FAKE:
        hsray.prompts.load_tokenizer = load_without_transformers
    sys.exit(main(sys.argv[2:], engine_class=sys.argv[1]))
