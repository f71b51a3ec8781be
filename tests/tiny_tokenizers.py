"""A byte-level BPE tokenizer of some 300 entries, trained in milliseconds, and chat templates that misbehave.

Every text can be encoded and decoded without loss. `TEMPLATES` has one template for each way in which released
ones treat a conversation.
"""

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


def make_tokenizer(directory: Path, template: str | None = CHATML, *, trim_offsets: bool = False) -> Path:
    """Write the tokenizer into `directory`, with a chat template (Jinja source) or none.

    Special ids are 0 `<s>` (beginning of sequence), 1 `<|im_start|>`, 2 `<|im_end|>`. With `trim_offsets` the
    spans of tokens leave out spaces, as in Llama 3.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.post_processor = processors.ByteLevel(trim_offsets=trim_offsets)
    trainer = trainers.BpeTrainer(
        vocab_size=320,
        special_tokens=["<s>", "<|im_start|>", "<|im_end|>"],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(CORPUS * 4, trainer)
    wrapped = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<s>", eos_token="<|im_end|>", chat_template=template
    )
    wrapped.save_pretrained(directory)
    return directory
