"""Templates that write a turn in a rare way: the marks of a twin say what is trained."""

from __future__ import annotations

from datetime import date
from pathlib import Path

import pytest

from raysvc.chat.slice_tokenizer import SliceTokenizer
from raysvc.job.config import TextSpec, TokenizerConfig

from .test_zoo import MODES, judged
from .zoo import ROWS, Template, tokenizer_folder

SYSTEM = "{{- '<|im_start|>system\\n' + (tools | tojson if tools else '') + '<|im_end|>\\n' }}"
CALLS = """\
{%- for call in message.tool_calls or [] %}{{- '<tool_call>' + call.function.name + '{' }}
{%- for key, value in call.function.arguments | dictsort %}{{- key + ':' ~ value + ';' }}{% endfor %}
{{- '}</tool_call>' }}{% endfor %}"""
LAST_OUTSIDE = f"""\
{SYSTEM}
{{%- set last = messages[-1] if messages[-1].role == 'assistant' else none %}}
{{%- for message in (messages[:-1] if last else messages) %}}
{{{{- '<|im_start|>' + message.role + '\\n' }}}}
{{%- if message.role == 'assistant' %}}[[{{{{ message.content | trim }}}}{CALLS}{{{{- '<|im_end|>' }}}}]]{{{{ '\\n' }}}}
{{%- else %}}{{{{ message.content + '<|im_end|>\\n' }}}}{{% endif %}}
{{%- endfor %}}
{{%- if last %}}{{% set message = last %}}{{{{- '<|im_start|>assistant\\n' }}}}[[{{{{ last.content | trim }}}}{CALLS}{{{{- '<|im_end|>' }}}}]]{{{{ '\\n' }}}}{{% endif %}}
{{%- if add_generation_prompt %}}{{{{ '<|im_start|>assistant\\n' }}}}{{% endif %}}"""
ONLY_WITH_TOOLS = (
    "{%- if not tools %}{{ raise_exception('this template is for rows with tools') }}{% endif %}"
    + LAST_OUTSIDE
)
OPEN_TURN = f"""\
{SYSTEM}
{{%- set ns = namespace(open=false) %}}
{{%- for message in messages %}}
{{%- if message.role == 'assistant' %}}
    {{%- if not ns.open %}}{{{{- '<|im_start|>assistant\\n' }}}}{{% endif %}}
    {{%- set ns.open = message.tool_calls and true %}}[[{CALLS}{{{{- message.content | trim }}}}
    {{{{- '<|return|>' if ns.open else '<|im_end|>' }}}}]]{{{{ '' if ns.open else '\\n' }}}}
{{%- elif message.role == 'tool' %}}{{{{ '<|result|>' + message.content + '<|result|>' }}}}
{{%- else %}}{{{{ '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}}}{{% endif %}}
{{%- endfor %}}
{{%- if add_generation_prompt %}}{{{{ '<|quick|>' if ns.open else '<|im_start|>assistant\\n<|quick|>' }}}}{{% endif %}}"""
RARE = {
    "the last turn is written behind the loop": LAST_OUTSIDE,
    "it refuses rows without tools": ONLY_WITH_TOOLS,
    "a turn goes on after the results of its calls": OPEN_TURN,
}


@pytest.mark.parametrize("name", RARE)
def test_a_rare_template_trains_what_its_marks_say(name: str, tmp_path: Path) -> None:
    marked = RARE[name].replace("[[", "{% generation %}").replace("]]", "{% endgeneration %}")
    plain = RARE[name].replace("[[", "").replace("]]", "")
    template = Template(name, plain, marked, ("<|endoftext|>", "<|im_end|>"))
    config = TokenizerConfig(name=tokenizer_folder(template, tmp_path), date=date.today())
    tokenizers = {mode: SliceTokenizer(TextSpec(tokenizer=config, train_on=mode)) for mode in MODES}
    marks = []
    for kind, rows in ROWS.items():
        for row in rows:
            for mode in MODES:
                mark, wrong = judged(template, tokenizers[mode], mode, row)
                assert wrong == [], (kind, mode)
                marks.append(mark if mode == MODES[0] else "")
    assert marks.count("=") == (3 if "without tools" in name else len(marks) // 2)
