"""Prompts: from input files to tokenized rows with loss masks, and a reason for each row that is refused.

`read_prompts` is the whole of it: files (`files`) hold rows (`readers`), a row holds text, a conversation or
token ids (`shapes`), a conversation is rendered and masked (`chat`, `tokenizer`), and a prompt gets an id
(`identity`). `rejects` lists the reasons. Importing this loads neither torch nor transformers.
"""

from hsray.prompts.files import InputFile, hash_file, input_files
from hsray.prompts.rejects import REASONS, Reason
from hsray.prompts.stream import read_prompts
from hsray.prompts.tokenizer import PromptTokenizer, load_tokenizer, tokenizer_fingerprint

__all__ = [
    "REASONS",
    "InputFile",
    "PromptTokenizer",
    "Reason",
    "hash_file",
    "input_files",
    "load_tokenizer",
    "read_prompts",
    "tokenizer_fingerprint",
]
