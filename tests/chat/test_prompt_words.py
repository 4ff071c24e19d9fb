"""A generation prompt is asked once for all rows only where the words of a row decide nothing about it."""

from __future__ import annotations

import pytest

from raysvc.chat.render.prompt_words import words_decide

ASK = "{% if add_generation_prompt %}"
LOOP, END = "{% for m in messages %}", "{% endfor %}"
SPACE = "{% set ns = namespace(x=false, y=false) %}"
DECIDE = (
    ASK + "{{ '<a>' if 'x' in messages[0].content else '<b>' }}{% endif %}",
    "{% set s = messages[0]['content'] %}" + ASK + "{% if s == 'x' %}<a>{% endif %}{% endif %}",
    "{% if 'x' in messages[-1].content %}{% set mode = 'a' %}{% endif %}" + ASK + "{{ mode }}{% endif %}",
    SPACE + LOOP + "{% if m.content %}{% set ns.x = true %}{% endif %}" + END + ASK + "{{ ns.x }}{% endif %}",
    "{% set q %}{{ messages[0].content }}{% endset %}" + ASK + "{{ q }}{% endif %}",
    "{% macro f(m) %}{{ 'x' if m.content else 'y' }}{% endmacro %}" + ASK + "{{ f(messages[0]) }}{% endif %}",
    "{% set asks = add_generation_prompt %}{% if asks %}{{ messages[0].content | length }}{% endif %}",
    "{% if not add_generation_prompt %}a{% else %}{{ messages[0].get('name') }}{% endif %}",
    ASK + "{{ messages | map(attribute='content') | first }}{% endif %}",
    ASK + "{{ messages | selectattr('name', 'defined') | list | length }}{% endif %}",
    ASK + "{% if messages[0] == messages[1] %}x{% endif %}{% endif %}",
    ASK + "{% with c = messages[0].content %}{{ c }}{% endwith %}{% endif %}",
    ASK + "{% for m in messages if m.content %}x{% endfor %}{% endif %}",
    "{{ '<a>' if add_generation_prompt and messages[0].content }}",
    ASK + "{{ messages[0].content.split('x')[1] is defined }}{% endif %}",
    ASK + "{{ messages[0].get('content', '') }}{% endif %}",
    ASK + "{{ messages[0].get(key) }}{% endif %}",
    ASK + "{{ messages[0].get('role', messages[1].content) }}{% endif %}",
    SPACE + LOOP + "{% for c in m.content %}{% if c == '/' %}{% set ns.x = true %}{% endif %}{% endfor %}" + END + ASK + "{{ ns.x }}{% endif %}",
    SPACE + LOOP + "{% for c in m.content %}{% set ns.x = c.text %}{% endfor %}" + END + ASK + "{{ ns.x }}{% endif %}",
    "{% set c = messages[0].get('content') %}" + ASK + "{{ c }}{% endif %}",
)  # fmt: skip
DECIDE_NOT = (
    "",
    LOOP + "{{ m.role + m.content.split('x')[-1] }}" + END + ASK + "<a>{% endif %}",
    LOOP
    + "{{ m.content }}"
    + END
    + ASK
    + "{{ '<a>' if messages[-1].role == 'tool' else bos_token }}{% endif %}",
    SPACE
    + LOOP
    + "{% if m.content %}{% set ns.x = true %}{% endif %}{% set ns.y = m.role == 'tool' %}{{ ns.x }}"
    + END
    + ASK
    + "{{ ns.y }}{% endif %}",
    LOOP
    + "{% if loop.last and not add_generation_prompt %}{{ m.content }}{% endif %}"
    + END
    + ASK
    + "a{% endif %}",
    ASK + "{% if enable_thinking is defined and enable_thinking %}<think>{% endif %}{% endif %}",
    ASK + "{{ messages | selectattr('role', 'equalto', 'user') | list | length }}{% endif %}",
    ASK + "{{ messages[1:] | length }}{{ 'x' if messages[-1]['tool_calls'] }}{% endif %}",
    SPACE
    + LOOP
    + "{% if m.content is not none and m['content'] is string %}{% set ns.y = true %}{% endif %}"
    + END
    + ASK
    + "{{ ns.y }}{% endif %}",
    LOOP + "{{ m.content }}{% if loop.last and add_generation_prompt %}<a>{% endif %}" + END,
    SPACE + LOOP + "{% if m.get('tool_calls') %}{% set ns.x = true %}{% endif %}" + END + ASK + "{{ ns.x }}{% endif %}",
    SPACE + LOOP + "{% for c in m['content'] %}{% if c['type'] == 'image' %}{% set ns.x = true %}{% endif %}{% endfor %}" + END + ASK + "{{ ns.x }}{% endif %}",
    SPACE + LOOP + "{% if m.get('content') is string %}{% set ns.x = true %}{% endif %}" + END + ASK + "{{ ns.x }}{% endif %}",
)  # fmt: skip


@pytest.mark.parametrize("text", DECIDE)
def test_words_in_a_prompt_or_in_a_question_around_it_decide(text: str) -> None:
    assert words_decide(text)


@pytest.mark.parametrize("text", DECIDE_NOT)
def test_words_elsewhere_and_structure_decide_nothing(text: str) -> None:
    assert not words_decide(text)
