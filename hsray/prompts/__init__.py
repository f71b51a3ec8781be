"""Prompts: from input files to tokenized rows with loss masks, and a reason for each row that is refused.

`read_prompts` is the whole of it (`stream`): files (`files`) hold rows (`readers`), some of which are wanted
(`selection`); a row holds text, a conversation or token ids (`shapes`, `conversations`, `tokens`), a conversation is
rendered, taken apart and masked (`chat`, `layout`, `tokenizer`), and a prompt gets an id (`identity`). `rejects` lists
the reasons, `tally` counts. Importing this loads neither torch nor transformers.
"""

from hsray.prompts.files import InputFile, hash_file, input_files
from hsray.prompts.rejects import REASONS, Reason
from hsray.prompts.stream import read_prompts
from hsray.prompts.tally import Tally
from hsray.prompts.tokenizer import PromptTokenizer, load_tokenizer, tokenizer_fingerprint

__all__ = [
    "REASONS",
    "InputFile",
    "PromptTokenizer",
    "Reason",
    "Tally",
    "hash_file",
    "input_files",
    "load_tokenizer",
    "read_prompts",
    "tokenizer_fingerprint",
]
