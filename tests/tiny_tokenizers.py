"""A byte-level BPE tokenizer of some 300 entries, trained in milliseconds, and chat templates that misbehave.

Every text can be encoded and decoded without loss. `TEMPLATES` has one template for each way in which released
ones treat a conversation.
"""

import json
from collections.abc import Sequence
from pathlib import Path

CORPUS = (
    "hello world, how are you today?\n\n",
    "user\nassistant\nsystem\nWhat is the answer? The answer is 42.   ",
    "def f(x):\n    return x + 1\n",
)

_TURN = "'<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>\n'"
_LOOP = "{% for m in messages %}"
_END = "{% endfor %}"
_HEADER = "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"

CHATML = f"{_LOOP}{{{{ {_TURN} }}}}{_END}{_HEADER}"

TEMPLATES = {
    "chatml": CHATML,
    # The template says itself which text is the assistant's.
    "marked": (
        f"{_LOOP}{{% if m['role'] == 'assistant' %}}{{{{ '<|im_start|>assistant\n' }}}}"
        "{% generation %}{{ m['content'] + '<|im_end|>' }}{% endgeneration %}{{ '\n' }}"
        f"{{% else %}}{{{{ {_TURN} }}}}{{% endif %}}{_END}{_HEADER}"
    ),
    # The end of a turn is not marked.
    "marked_content": (
        f"{_LOOP}{{{{ '<|im_start|>' + m['role'] + '\n' }}}}"
        "{% if m['role'] == 'assistant' %}{% generation %}{{ m['content'] }}{% endgeneration %}"
        "{% else %}{{ m['content'] }}{% endif %}{{ '<|im_end|>\n' }}"
        f"{_END}{_HEADER}"
    ),
    # The wrong turns are marked.
    "marked_inverted": (
        f"{_LOOP}{{% if m['role'] == 'user' %}}{{{{ '<|im_start|>user\n' }}}}"
        "{% generation %}{{ m['content'] + '<|im_end|>' }}{% endgeneration %}{{ '\n' }}"
        f"{{% else %}}{{{{ {_TURN} }}}}{{% endif %}}{_END}{_HEADER}"
    ),
    # A default system turn is put in front of a conversation without one.
    "default_system": (
        "{% for m in messages %}{% if loop.first and m['role'] != 'system' %}"
        "{{ '<|im_start|>system\nYou are helpful.<|im_end|>\n' }}{% endif %}"
        f"{{{{ {_TURN} }}}}{_END}{_HEADER}"
    ),
    # Reasoning is taken out of all answers.
    "drops_thinking": (
        f"{_LOOP}{{% set c = m['content'].split('</think>')[-1] %}}"
        "{{ '<|im_start|>' + m['role'] + '\n' + c + '<|im_end|>\n' }}"
        f"{_END}{_HEADER}"
    ),
    # Only the first two turns are rendered.
    "drops_turns": f"{{% for m in messages[:2] %}}{{{{ {_TURN} }}}}{_END}{_HEADER}",
    "marked_drops_turns": (
        "{% for m in messages[:2] %}{{ '<|im_start|>' + m['role'] + '\n' }}"
        "{% generation %}{{ m['content'] + '<|im_end|>' }}{% endgeneration %}{{ '\n' }}"
        f"{_END}{_HEADER}"
    ),
    # An empty block of reasoning in the last answer only, so earlier answers change as the conversation grows.
    "rewrites": (
        f"{_LOOP}{{{{ '<|im_start|>' + m['role'] + '\n' }}}}"
        "{% if loop.last and m['role'] == 'assistant' %}{{ '<think>\n\n</think>\n\n' }}{% endif %}"
        "{{ m['content'] + '<|im_end|>\n' }}"
        f"{_END}{_HEADER}"
    ),
    # The header of an answer opens a block of reasoning that finished answers do not have.
    "header_thinks": (
        f"{_LOOP}{{{{ {_TURN} }}}}{_END}"
        "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n<think>\n' }}{% endif %}"
    ),
    # Every answer has a plan of the template's in front of it, between special tokens.
    "plans": (
        f"{_LOOP}{{{{ '<|im_start|>' + m['role'] + '\n' }}}}"
        "{% if m['role'] == 'assistant' %}{{ '<s>plan<s>' }}{% endif %}{{ m['content'] + '<|im_end|>\n' }}"
        f"{_END}{_HEADER}"
    ),
    # Users and assistants must take turns.
    "alternating": (
        "{% for m in messages %}{% if (m['role'] == 'user') != (loop.index0 % 2 == 0) %}"
        "{{ raise_exception('roles must alternate') }}{% endif %}"
        f"{{{{ {_TURN} }}}}{_END}{_HEADER}"
    ),
    # The header that is asked for is not the one that answers get.
    "other_header": (
        f"{_LOOP}{{% set role = 'model' if m['role'] == 'assistant' else m['role'] %}}"
        "{{ '<|im_start|>' + role + '\n' + m['content'] + '<|im_end|>\n' }}"
        f"{_END}{_HEADER}"
    ),
    # What is written around a turn depends on what the turn says.
    "by_content": (
        f"{_LOOP}{{{{ '<|im_start|>' + m['role'] + '\n' + m['content'] }}}}"
        "{% if m['content'].startswith('/loud') %}{{ '!!' }}{% endif %}"
        "{% if m['content'] == 'secret' %}{{ '[redacted]' }}{% endif %}{{ '<|im_end|>\n' }}"
        f"{_END}{_HEADER}"
    ),
    "twice": f"{_LOOP}{{{{ {_TURN} }}}}{_END}{{{{ messages[0]['content'] }}}}{_HEADER}",
    "backwards": f"{{% for m in messages | reverse %}}{{{{ {_TURN} }}}}{_END}{_HEADER}",
    "effort": f"{{{{ 'effort: ' + (reasoning_effort or 'none') + '\n' }}}}{CHATML}",
    "typo": f"{_LOOP}{{{{ m['role'] + 1 }}}}{_END}{_HEADER}",
    "syntax_error": "{% for m in messages %}{{ m['role'] }}",
    # No special token ends a turn.
    "plain": (
        "{% for m in messages %}{{ m['role'] + ': ' + m['content'] + ' [END]\n\n' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ 'assistant: ' }}{% endif %}"
    ),
    "bos": f"{{{{ bos_token }}}}{CHATML}",
    "double_bos": f"{{{{ bos_token + bos_token }}}}{CHATML}",
    "dated": f"{{{{ strftime_now('%d %b %Y') }}}}{CHATML}",
}


SPECIAL = ("<s>", "<|im_start|>", "<|im_end|>")


def make_tokenizer(
    directory: Path,
    template: str | None = CHATML,
    *,
    trim_offsets: bool = False,
    special: Sequence[str] = SPECIAL,
    writes_bos: bool = False,
) -> Path:
    """Write the tokenizer into `directory`, with a chat template (Jinja source) or none.

    Special tokens have the ids 0 `<s>` (beginning of sequence), 1, 2, ... With `trim_offsets` the spans of tokens
    leave out spaces, with `writes_bos` texts begin with `<s>` unless asked otherwise, both as in Llama 3.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.post_processor = processors.ByteLevel(trim_offsets=trim_offsets)
    if writes_bos:
        tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    trainer = trainers.BpeTrainer(
        vocab_size=317 + len(special),
        special_tokens=list(special),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(CORPUS * 4, trainer)
    wrapped = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<s>", eos_token="<|im_end|>", chat_template=template
    )
    wrapped.save_pretrained(directory)
    return directory


def make_slow_tokenizer(directory: Path, template: str | None = CHATML) -> Path:
    """Write a tokenizer that is Python code over tiktoken, as some models come with, with the tokens of single bytes
    and of a few words. `trust_remote_code` loads it."""
    directory.mkdir(parents=True)
    (directory / "tokenization_tiny.py").write_text(_SLOW_CODE)
    config = {
        "tokenizer_class": "TinyTokenizer",
        "auto_map": {"AutoTokenizer": ["tokenization_tiny.TinyTokenizer", None]},
        "chat_template": template,
        "added_tokens_decoder": {
            str(260 + i): {"content": token, "special": True, "normalized": False, "lstrip": False, "rstrip": False}
            for i, token in enumerate(("<|im_start|>", "<|im_end|>"))
        },
        "eos_token": "<|im_end|>",
    }
    (directory / "tokenizer_config.json").write_text(json.dumps(config))
    return directory


_SLOW_CODE = """
import tiktoken
from transformers import PreTrainedTokenizer
from transformers.convert_slow_tokenizer import bytes_to_unicode

RANKS = {bytes([b]): b for b in range(256)} | {b"he": 256, b"ll": 257, b" t": 258, b"or": 259}


class TinyTokenizer(PreTrainedTokenizer):
    vocab_files_names = {}

    def __init__(self, **kwargs):
        self.model = tiktoken.Encoding("tiny", pat_str=r"\\s?\\S+|\\s+", mergeable_ranks=RANKS, special_tokens={})
        table = bytes_to_unicode()
        self.decoder = {i: "".join(table[b] for b in token) for token, i in RANKS.items()}
        self.encoder = {token: i for i, token in self.decoder.items()}
        self.byte_decoder = {char: byte for byte, char in table.items()}
        super().__init__(**kwargs)

    @property
    def vocab_size(self):
        return len(RANKS)

    def get_vocab(self):
        return {**self.encoder, **self.added_tokens_encoder}

    def _tokenize(self, text, **kwargs):
        return [self.decoder[i] for i in self.model.encode(text)]

    def _convert_token_to_id(self, token):
        return self.encoder[token]

    def _convert_id_to_token(self, index):
        return self.decoder[index]

    def convert_tokens_to_string(self, tokens):
        return bytes(self.byte_decoder[c] for c in "".join(tokens)).decode("utf-8", errors="replace")

    def save_vocabulary(self, save_directory, filename_prefix=None):
        return ()
"""
