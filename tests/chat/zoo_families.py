"""Chat templates of families that TRL's package does not bring, written out after their models' documented formats.

Name -> (template, (bos, eos)).
"""

from __future__ import annotations

MISTRAL_V3 = """\
{%- if messages[0]['role'] == 'system' %}{% set system = messages[0]['content'] %}{% set rest = messages[1:] %}
{%- else %}{% set system = '' %}{% set rest = messages %}{% endif %}
{{- bos_token }}
{%- for message in rest %}
{%- if message['role'] == 'user' %}
    {%- if tools and loop.last %}{{ '[AVAILABLE_TOOLS] ' + tools | tojson + '[/AVAILABLE_TOOLS]' }}{% endif %}
    {%- if system and loop.last %}{{ '[INST] ' + system + '\\n\\n' + message['content'] + '[/INST]' }}
    {%- else %}{{ '[INST] ' + message['content'] + '[/INST]' }}{% endif %}
{%- elif message.tool_calls %}
    {{- '[TOOL_CALLS] [' }}
    {%- for call in message.tool_calls %}
        {{- '{"name": "' + call.function.name + '", "arguments": ' + call.function.arguments | tojson }}
        {{- ', "id": "' + call.id + '"}' }}{{ ', ' if not loop.last }}
    {%- endfor %}
    {{- ']' + eos_token }}
{%- elif message['role'] == 'assistant' %}{{ ' ' + message['content'] | trim + eos_token }}
{%- elif message['role'] == 'tool' %}
    {{- '[TOOL_RESULTS] {"content": ' + message['content'] | tojson + ', "call_id": "' + message.tool_call_id }}
    {{- '"}[/TOOL_RESULTS]' }}
{%- endif %}
{%- endfor %}"""

KIMI_K2 = """\
{%- if tools %}{{ '<|im_system|>tool_declare<|im_middle|>' + tools | tojson + '<|im_end|>' }}{% endif %}
{%- for message in messages %}
{%- if loop.first and message.role != 'system' %}
    {{- '<|im_system|>system<|im_middle|>You are a helpful assistant.<|im_end|>' }}
{%- endif %}
{%- set name = message.name or message.role %}
{%- if message.role == 'user' %}{{ '<|im_user|>' + name + '<|im_middle|>' }}
{%- elif message.role == 'assistant' %}{{ '<|im_assistant|>' + name + '<|im_middle|>' }}
{%- else %}{{ '<|im_system|>' + name + '<|im_middle|>' }}{% endif %}
{%- if message.role == 'assistant' and message.tool_calls %}
    {{- message.content or '' }}{{ '<|tool_calls_section_begin|>' }}
    {%- for call in message.tool_calls %}
        {{- '<|tool_call_begin|>functions.' + call.function.name + ':' + loop.index0 | string }}
        {{- '<|tool_call_argument_begin|>' }}
        {{- call.function.arguments if call.function.arguments is string else call.function.arguments | tojson }}
        {{- '<|tool_call_end|>' }}
    {%- endfor %}
    {{- '<|tool_calls_section_end|>' }}
{%- elif message.role == 'tool' %}{{ '## Return of ' + message.tool_call_id + '\\n' + message.content }}
{%- else %}{{ message.content }}{% endif %}
{{- '<|im_end|>' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_assistant|>assistant<|im_middle|>' }}{% endif %}"""

COMMAND_R7B = """\
{{- bos_token }}
{%- for message in messages %}
{%- if message.role == 'assistant' %}
    {{- '<|START_OF_TURN_TOKEN|><|CHATBOT_TOKEN|>' }}
    {%- if message.tool_calls %}
        {{- '<|START_THINKING|>' + (message.reasoning_content or message.content or '') + '<|END_THINKING|>' }}
        {{- '<|START_ACTION|>[' }}
        {%- for call in message.tool_calls %}
            {{- '\\n    {"tool_call_id": "' + loop.index0 | string + '", "tool_name": "' + call.function.name }}
            {{- '", "parameters": ' + call.function.arguments | tojson + '}' }}{{ ',' if not loop.last }}
        {%- endfor %}
        {{- '\\n]<|END_ACTION|>' }}
    {%- else %}
        {{- '<|START_RESPONSE|>' + message.content + '<|END_RESPONSE|>' }}
    {%- endif %}
    {{- '<|END_OF_TURN_TOKEN|>' }}
{%- elif message.role == 'tool' %}
    {{- '<|START_OF_TURN_TOKEN|><|SYSTEM_TOKEN|><|START_TOOL_RESULT|>' + message.content }}
    {{- '<|END_TOOL_RESULT|><|END_OF_TURN_TOKEN|>' }}
{%- elif message.role == 'system' %}
    {{- '<|START_OF_TURN_TOKEN|><|SYSTEM_TOKEN|>' + message.content + '<|END_OF_TURN_TOKEN|>' }}
{%- else %}{{ '<|START_OF_TURN_TOKEN|><|USER_TOKEN|>' + message.content + '<|END_OF_TURN_TOKEN|>' }}{% endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|START_OF_TURN_TOKEN|><|CHATBOT_TOKEN|>' }}{% endif %}"""

SMOLLM3 = """\
{{- '<|im_start|>system\\n## Metadata\\n\\nReasoning Mode: /think\\n\\n' }}
{%- if messages[0].role == 'system' %}{{ messages[0].content }}{% endif %}
{%- if tools %}{{ '\\n### Tools\\n' }}{% for tool in tools %}{{ tool | tojson + '\\n' }}{% endfor %}{% endif %}
{{- '<|im_end|>\\n' }}
{%- for message in messages %}
{%- if message.role == 'user' %}{{ '<|im_start|>user\\n' + message.content + '<|im_end|>\\n' }}
{%- elif message.role == 'assistant' %}
    {%- generation %}
    {{- '<|im_start|>assistant\\n' + (message.content or '').lstrip('\\n') }}
    {%- for call in message.tool_calls or [] %}
        {{- '<tool_call>{"name": "' + call.function.name + '", "arguments": ' }}
        {{- call.function.arguments | tojson + '}</tool_call>' }}
    {%- endfor %}
    {{- '<|im_end|>\\n' }}
    {%- endgeneration %}
{%- elif message.role == 'tool' %}{{ '<|im_start|>user\\n' + message.content + '<|im_end|>\\n' }}{% endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"""

OLMO2 = """\
{{- bos_token }}
{%- for message in messages %}
{%- if message.role == 'assistant' and loop.last %}{{ '<|assistant|>\\n' + message.content + eos_token }}
{%- elif message.role == 'assistant' %}{{ '<|assistant|>\\n' + message.content + eos_token + '\\n' }}
{%- else %}{{ '<|' + message.role + '|>\\n' + message.content + '\\n' }}{% endif %}
{%- if loop.last and add_generation_prompt %}{{ '<|assistant|>\\n' }}{% endif %}
{%- endfor %}"""

LLAMA_2 = """\
{%- if messages[0].role == 'system' %}{% set rest = messages[1:] %}{% set system = messages[0].content %}
{%- else %}{% set rest = messages %}{% set system = false %}{% endif %}
{%- for message in rest %}
{%- if (message.role == 'user') != (loop.index0 % 2 == 0) %}
    {{- raise_exception('Conversation roles must alternate user/assistant/user/assistant/...') }}
{%- endif %}
{%- if loop.index0 == 0 and system %}{% set content = '<<SYS>>\\n' + system + '\\n<</SYS>>\\n\\n' + message.content %}
{%- else %}{% set content = message.content %}{% endif %}
{%- if message.role == 'user' %}{{ bos_token + '[INST] ' + content.strip() + ' [/INST]' }}
{%- elif message.role == 'assistant' %}{{ ' ' + content.strip() + ' ' + eos_token }}{% endif %}
{%- endfor %}"""

GRANITE = """\
{%- if tools %}
    {{- '<|start_of_role|>tools<|end_of_role|>' + tools | tojson(indent=4) + '<|end_of_text|>\\n' }}
{%- endif %}
{%- for message in messages %}
{%- if message.tool_calls %}
    {{- '<|start_of_role|>assistant<|end_of_role|><|tool_call|>[' }}
    {%- for call in message.tool_calls %}
        {{- '{"name": "' + call.function.name + '", "arguments": ' + call.function.arguments | tojson + '}' }}
    {%- endfor %}
    {{- ']<|end_of_text|>\\n' }}
{%- else %}
    {{- '<|start_of_role|>' + message.role + '<|end_of_role|>' + message.content + '<|end_of_text|>\\n' }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|start_of_role|>assistant<|end_of_role|>' }}{% endif %}"""

FAMILIES: dict[str, tuple[str, tuple[str, str]]] = {
    "mistral_v3": (MISTRAL_V3, ("<s>", "</s>")),
    "kimi_k2": (KIMI_K2, ("[BOS]", "<|im_end|>")),
    "command_r7b": (COMMAND_R7B, ("<BOS_TOKEN>", "<|END_OF_TURN_TOKEN|>")),
    "smollm3": (SMOLLM3, ("", "<|im_end|>")),
    "olmo2": (OLMO2, ("<|endoftext|>", "<|endoftext|>")),
    "llama2": (LLAMA_2, ("<s>", "</s>")),
    "granite3": (GRANITE, ("<|end_of_text|>", "<|end_of_text|>")),
}
