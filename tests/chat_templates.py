"""Small chat templates that behave as those of released models do, one behaviour each and no more.

Special tokens are what is written in angle brackets here; `SPECIAL` lists them for the tokenizer.
"""

SPECIAL = [
    "<s>",
    "<|im_start|>",
    "<|im_end|>",
    "</s>",
    "[INST]",
    "[/INST]",
    "<|begin_of_text|>",
    "<|start_header_id|>",
    "<|end_header_id|>",
    "<|eot_id|>",
    "<start_of_turn>",
    "<end_of_turn>",
    "<|User|>",
    "<|Assistant|>",
    "<|eos|>",
    "<|call_begin|>",
    "<|call_arguments|>",
    "<|call_end|>",
    "<|start|>",
    "<|channel|>",
    "<|message|>",
    "<|end|>",
    "<|return|>",
    "<|call|>",
    "<|user|>",
    "<|assistant|>",
    "<|observation|>",
]

# Qwen3: reasoning of answers before the last question is dropped, the last answer always has a block of it, tools
# and calls are JSON in tags, results of tools are user turns.
QWEN3 = """\
{%- if tools %}{{ '<|im_start|>system\n# Tools\n<tools>' }}
{%- for tool in tools %}{{ '\n' + tool | tojson }}{% endfor %}{{ '\n</tools><|im_end|>\n' }}{% endif %}
{%- set ns = namespace(last=messages | length - 1, found=false) %}
{%- for m in messages[::-1] %}{% set index = messages | length - 1 - loop.index0 %}
{%- if not ns.found and m.role == 'user' and not m.content.startswith('<tool_response>') %}
{%- set ns.found = true %}{% set ns.last = index %}{% endif %}{% endfor %}
{%- for m in messages %}
{%- if m.role in ('user', 'system') %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}
{%- elif m.role == 'tool' %}
{{- '<|im_start|>user\n<tool_response>\n' + m.content + '\n</tool_response><|im_end|>\n' }}
{%- else %}{% set content = m.content %}{% set reasoning = m.reasoning_content or '' %}
{%- if not reasoning and '</think>' in content %}
{%- set reasoning = content.split('</think>')[0].split('<think>')[-1].strip('\n') %}
{%- set content = content.split('</think>')[-1].lstrip('\n') %}{% endif %}
{{- '<|im_start|>assistant\n' }}
{%- if loop.index0 > ns.last and (loop.last or reasoning) %}
{{- '<think>\n' + reasoning.strip('\n') + '\n</think>\n\n' }}{% endif %}
{{- content }}
{%- for call in m.tool_calls or [] %}
{{- '\n<tool_call>\n{"name": "' + call.function.name + '", "arguments": ' }}
{{- call.function.arguments if call.function.arguments is string else call.function.arguments | tojson }}
{{- '}\n</tool_call>' }}{% endfor %}
{{- '<|im_end|>\n' }}{% endif %}{% endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}
{%- if enable_thinking is defined and not enable_thinking %}{{ '<think>\n\n</think>\n\n' }}{% endif %}{% endif %}"""

# Llama 3: a beginning of sequence of its own, today's date in the system turn, contents trimmed, one call a turn
# whose content is not printed.
LLAMA3 = """\
{{- bos_token + '<|start_header_id|>system<|end_header_id|>\n\n' }}
{{- 'Today Date: ' + (date_string or strftime_now('%d %b %Y')) + '\n\n' }}
{%- if messages[0].role == 'system' %}{{ messages[0].content | trim }}{% set messages = messages[1:] %}{% endif %}
{{- '<|eot_id|>' }}
{%- if tools %}{{ '<|start_header_id|>user<|end_header_id|>\n\n' }}
{%- for tool in tools %}{{ tool | tojson(indent=4) }}{% endfor %}{{ '<|eot_id|>' }}{% endif %}
{%- for m in messages %}
{%- if 'tool_calls' in m %}
{%- if m.tool_calls | length != 1 %}{{ raise_exception('Only single tool-calls at once!') }}{% endif %}
{{- '<|start_header_id|>assistant<|end_header_id|>\n\n{"name": "' + m.tool_calls[0].function.name }}
{{- '", "parameters": ' }}{{ m.tool_calls[0].function.arguments | tojson }}{{ '}<|eot_id|>' }}
{%- else %}{% set role = 'ipython' if m.role == 'tool' else m.role %}
{{- '<|start_header_id|>' + role + '<|end_header_id|>\n\n' + m.content | trim + '<|eot_id|>' }}{% endif %}{% endfor %}
{%- if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{% endif %}"""

# Mistral: no header of an answer, roles must alternate, the system text goes in front of the last user turn.
MISTRAL = """\
{%- if messages[0].role == 'system' %}{% set system = messages[0].content %}{% set messages = messages[1:] %}{% endif %}
{{- bos_token }}
{%- for m in messages %}
{%- if (m.role == 'user') != (loop.index0 % 2 == 0) %}
{{- raise_exception('Conversation roles must alternate user/assistant/...') }}{% endif %}
{%- if m.role == 'user' %}{{ '[INST]' }}
{%- if system is defined and loop.index0 >= messages | length - 2 %}{{ system + '\n\n' }}{% endif %}
{{- m.content + '[/INST]' }}
{%- else %}{{ ' ' + m.content | trim + '</s>' }}{% endif %}{% endfor %}"""

# Gemma: system turns are refused, the assistant is called model.
GEMMA = """\
{{- bos_token }}
{%- if messages[0].role == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}
{%- for m in messages %}{% set role = 'model' if m.role == 'assistant' else m.role %}
{{- '<start_of_turn>' + role + '\n' + m.content | trim + '<end_of_turn>\n' }}{% endfor %}
{%- if add_generation_prompt %}{{ '<start_of_turn>model\n' }}{% endif %}"""

# DeepSeek: arguments have to be text, the header opens a block of reasoning that finished answers close only.
DEEPSEEK = """\
{{- bos_token }}
{%- for m in messages %}
{%- if m.role == 'system' %}{{ m.content }}
{%- elif m.role == 'user' %}{{ '<|User|>' + m.content }}
{%- elif m.role == 'tool' %}{{ '<|User|>[result] ' + m.content }}
{%- else %}{{ '<|Assistant|></think>' }}
{%- set content = m.content %}
{%- if '</think>' in content %}{% set content = content.split('</think>', 1)[1] %}{% endif %}
{{- content }}
{%- for call in m.tool_calls or [] %}
{{- '<|call_begin|>' + call.function.name + '<|call_arguments|>' + call.function.arguments + '<|call_end|>' }}
{%- endfor %}{{ '<|eos|>' }}{% endif %}{% endfor %}
{%- if add_generation_prompt %}{{ '<|Assistant|><think>' }}{% endif %}"""

# gpt-oss: channels, reasoning under a name of its own, another end for the last answer than for earlier ones, an
# effort and a date in the system turn, a call ends in a way of its own, results name the function they come from.
GPT_OSS = """\
{{- '<|start|>system<|message|>Current date: ' + strftime_now('%Y-%m-%d') }}
{{- '\nReasoning: ' + (reasoning_effort or 'medium') + '<|end|>' }}
{%- set ns = namespace(name=none) %}
{%- for m in messages %}
{%- if m.role == 'tool' %}
{{- '<|start|>functions.' + ns.name + ' to=assistant<|channel|>commentary<|message|>' + m.content + '<|end|>' }}
{%- elif m.role != 'assistant' %}{{ '<|start|>' + m.role + '<|message|>' + m.content + '<|end|>' }}
{%- elif 'tool_calls' in m %}{% set call = m.tool_calls[0].function %}{% set ns.name = call.name %}
{%- if m.thinking %}{{ '<|start|>assistant<|channel|>analysis<|message|>' + m.thinking + '<|end|>' }}{% endif %}
{{- '<|start|>assistant to=functions.' + call.name + '<|channel|>commentary json<|message|>' }}
{{- call.arguments | tojson }}{{ '<|call|>' }}
{%- else %}
{%- if m.thinking and loop.last %}
{{- '<|start|>assistant<|channel|>analysis<|message|>' + m.thinking + '<|end|>' }}{% endif %}
{{- '<|start|>assistant<|channel|>final<|message|>' + m.content + ('<|return|>' if loop.last else '<|end|>') }}
{%- endif %}{% endfor %}
{%- if add_generation_prompt %}{{ '<|start|>assistant' }}{% endif %}"""

# GLM: nothing ends an answer but the header of the next turn.
GLM = """\
{%- for m in messages %}
{%- if m.role == 'assistant' %}{{ '<|assistant|>\n' }}
{{- '<think>' + (m.reasoning_content or '') + '</think>\n' + m.content }}
{%- else %}{% set role = 'observation' if m.role == 'tool' else m.role %}
{{- '<|' + role + '|>\n' + m.content }}{% endif %}{% endfor %}
{%- if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"""

# SmolLM3 and others: the template marks what the assistant wrote, reasoning and calls included.
MARKED = """\
{%- for m in messages %}
{%- if m.role == 'assistant' %}{{ '<|im_start|>assistant\n' }}
{%- generation %}{% if m.reasoning_content %}{{ '<think>\n' + m.reasoning_content + '\n</think>\n' }}{% endif %}
{{- m.content }}
{%- for call in m.tool_calls or [] %}
{{- '<tool_call>' + call.function.name + '(' + call.function.arguments | tojson + ')</tool_call>' }}{% endfor %}
{{- '<|im_end|>' }}{% endgeneration %}{{ '\n' }}
{%- else %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}{% endif %}{% endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"""
