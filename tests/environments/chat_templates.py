"""Chat templates in the manner of well-known families: short ones of our own that keep how each writes turns, tools and
what follows. Each ends a turn with the first of its marks.
"""

QWEN_MARKS = ("<|im_end|>", "<|im_start|>")
_QWEN_TOOLS = (
    "<|im_start|>system\n{% if tools %}Call these: {% for t in tools %}{{ '\n' }}{{ t | tojson }}{% endfor %}"
    "{% else %}You are helpful.{% endif %}<|im_end|>\n"
)
_QWEN_CALLS = (
    "{% for c in m.tool_calls or [] %}{{ '\n' }}<tool_call>\n"
    '{"name": "{{ c.function.name }}", "arguments": {{ c.function.arguments | tojson }}}\n</tool_call>{% endfor %}'
)
_QWEN_RESULT = (
    "{% if messages[loop.index0 - 1].role != 'tool' %}<|im_start|>user{% endif %}{{ '\n' }}<tool_response>\n"
    "{{ m.content }}\n</tool_response>"
    "{% if loop.last or messages[loop.index0 + 1].role != 'tool' %}<|im_end|>\n{% endif %}"
)
QWEN_2_5 = (
    f"{_QWEN_TOOLS}{{% for m in messages %}}{{% if m.role == 'tool' %}}{_QWEN_RESULT}{{% else %}}"
    f"<|im_start|>{{{{ m.role }}}}\n{{{{ m.content }}}}{_QWEN_CALLS}<|im_end|>\n"
    "{% endif %}{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
# Thoughts stay from the last question of a user on; the last message always has one.
_QWEN_3 = (
    f"{_QWEN_TOOLS}{{% set ns = namespace(last=0) %}}"
    "{% for m in messages %}{% if m.role == 'user' %}{% set ns.last = loop.index0 %}{% endif %}{% endfor %}"
    f"{{% for m in messages %}}{{% if m.role == 'tool' %}}{_QWEN_RESULT}{{% elif m.role == 'user' %}}"
    "<|im_start|>user\n{{ m.content }}<|im_end|>\n{% else %}<|im_start|>assistant\n"
    "{% set parts = m.content.split('</think>') %}"
    "{% set thought = parts[0].split('<think>')[-1].strip('\n') if parts | length > 1 else '' %}"
    "{% if loop.index0 > ns.last and (loop.last or thought) %}<think>\n{{ thought }}\n</think>\n\n{% endif %}"
    f"{{{{ parts[-1].lstrip('\n') }}}}{_QWEN_CALLS}<|im_end|>\n{{% endif %}}{{% endfor %}}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n"
)
QWEN_3 = (
    _QWEN_3 + "{% if enable_thinking is defined and not enable_thinking %}<think>\n\n</think>\n\n{% endif %}{% endif %}"
)
QWEN_3_THINKING = _QWEN_3 + "<think>\n{% endif %}"
# Every answer has its thought, or an empty one.
QWEN_3_FOR_TRAINING = QWEN_3.replace("loop.index0 > ns.last and (loop.last or thought)", "true")

LLAMA_MARKS = ("<|eot_id|>", "<|start_header_id|>", "<|end_header_id|>")
_LLAMA_HEADER = "<|start_header_id|>{}<|end_header_id|>\n\n"
# One call a turn, without the turn's text; the tools are in the first question.
LLAMA_3_1 = (
    f"<bos>{_LLAMA_HEADER.format('system')}Today Date: {{{{ strftime_now('%d %b %Y') }}}}<|eot_id|>"
    "{% for m in messages %}{% if m.tool_calls %}"
    "{% if m.tool_calls | length != 1 %}{{ raise_exception('one call at once') }}{% endif %}"
    f"{_LLAMA_HEADER.format('assistant')}"
    '{"name": "{{ m.tool_calls[0].function.name }}", "parameters": {{ m.tool_calls[0].function.arguments | tojson }}}'
    "<|eot_id|>{% elif m.role == 'tool' %}"
    f"{_LLAMA_HEADER.format('ipython')}{{{{ m.content | tojson }}}}<|eot_id|>{{% else %}}"
    f"{_LLAMA_HEADER.format('{{ m.role }}')}{{% if loop.first and tools %}}{{{{ tools | tojson }}}}\n\n{{% endif %}}"
    "{{ m.content | trim }}<|eot_id|>{% endif %}{% endfor %}"
    f"{{% if add_generation_prompt %}}{_LLAMA_HEADER.format('assistant')}{{% endif %}}"
)

MISTRAL_MARKS = ("<eos>", "[INST]", "[/INST]")
# The tools precede the last question.
MISTRAL_3 = (
    "{% set ns = namespace(last=0, turn=0) %}{% for m in messages %}"
    "{% if m.role == 'user' %}{% set ns.last = loop.index0 %}{% endif %}"
    "{% if m.role == 'user' or (m.role == 'assistant' and not m.tool_calls) %}"
    "{% if (m.role == 'user') != (ns.turn % 2 == 0) %}{{ raise_exception('roles must alternate') }}{% endif %}"
    "{% set ns.turn = ns.turn + 1 %}{% endif %}{% endfor %}<bos>"
    "{% for m in messages %}{% if m.role == 'user' %}"
    "{% if tools and loop.index0 == ns.last %}[AVAILABLE_TOOLS] {{ tools | tojson }}[/AVAILABLE_TOOLS]{% endif %}"
    "[INST] {{ m.content }}[/INST]"
    "{% elif m.tool_calls %}[TOOL_CALLS] [{% for c in m.tool_calls %}"
    "{% if c.id | length != 9 %}{{ raise_exception('an id has nine characters') }}{% endif %}"
    '{{ c.function | tojson }}, "id": "{{ c.id }}"{% if not loop.last %}, {% endif %}{% endfor %}]<eos>'
    "{% elif m.role == 'tool' %}[TOOL_RESULTS] "
    '{"content": {{ m.content }}, "call_id": "{{ m.tool_call_id }}"}[/TOOL_RESULTS]'
    "{% else %} {{ m.content | trim }}<eos>{% endif %}{% endfor %}"
)

GEMMA_MARKS = ("<end_of_turn>", "<start_of_turn>")
GEMMA_2 = (
    "<bos>{% for m in messages %}"
    "{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('roles must alternate') }}{% endif %}"
    "<start_of_turn>{{ 'model' if m.role == 'assistant' else m.role }}\n{{ m.content | trim }}<end_of_turn>\n"
    "{% endfor %}"
    "{% if add_generation_prompt %}<start_of_turn>model\n{% endif %}"
)

DEEPSEEK_MARKS = ("<eos>", "<|User|>", "<|Assistant|>")
# Arguments are JSON text; the marks around calls and results are written at the first one after a question.
DEEPSEEK_V3 = (
    "{% set ns = namespace(first=true, results=true, tool=false) %}<bos>{{ tools | tojson if tools }}"
    "{% for m in messages %}{% if m.role == 'user' %}{% set ns.first = true %}{% set ns.tool = false %}"
    "<|User|>{{ m.content }}<|Assistant|>"
    "{% elif m.tool_calls %}{{ '<|outputs_end|>' if ns.tool }}{% set ns.tool = false %}"
    "{% for c in m.tool_calls %}{{ m.content + '<|calls_begin|>' if ns.first else '\n' }}"
    "{{ '<|call|>' + c.function.name + '<|sep|>' + c.function.arguments + '<|call_end|>' }}"
    "{% set ns.first = false %}{% endfor %}<|calls_end|><eos>"
    "{% elif m.role == 'tool' %}{% set ns.tool = true %}{{ '<|outputs_begin|>' if ns.results else '\n' }}"
    "{% set ns.results = false %}<|output|>{{ m.content }}<|output_end|>"
    "{% else %}{{ '<|outputs_end|>' if ns.tool }}{% set ns.tool = false %}{{ m.content }}<eos>{% endif %}{% endfor %}"
    "{{ '<|outputs_end|>' if ns.tool }}"
)
