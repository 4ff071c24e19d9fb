"""A text is filled into literals only where a trace shows that its words decide on nothing."""

from __future__ import annotations

from datetime import datetime
from functools import lru_cache
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from raysvc.chat.render.real_render import RealRender
from raysvc.chat.row_errors import RowFault
from raysvc.chat.trace.fast_render import FastRender

NOW = datetime(2026, 1, 1)
LOOP, END = "{% for m in messages %}", "{% endfor %}"
SPACE = "{% set ns = namespace(x='', n=0, l=[]) %}"
KINDS = ("defined", "undefined", "none", "mapping", "iterable", "sequence", "number")
FILLED = (
    LOOP + "{{ '<' + m.role + '>' + m.content }}" + END,
    LOOP + "{{ m['content'] | trim ~ m['role'] }}" + END,
    LOOP + "{{ m.content.strip() }}|{{ m.get('content') }}" + END,
    LOOP + "{% if m.content is string and m.content %}{{ m.content }}{% endif %}" + END,
    LOOP + "{{ loop.index }}{{ m.content if not loop.last or m.role == 'user' else '?' }}" + END,
    LOOP + "{{ loop.previtem.content if loop.previtem else messages | length }}" + END,
    LOOP + "{% if 'content' in m and m.content is not none %}{{ m.content }}{% endif %}" + END,
    "{% set first = messages[0] %}{{ first.content }}{% for m in messages[1:] %}{{ m.content }}" + END,
    SPACE
    + LOOP
    + "{{ ns.x }}{% set ns.x = m.content %}{% set ns.n = ns.n + 1 %}"
    + END
    + "{{ ns.x ~ ns.n }}",
    "{% macro f(t) %}[{{ t }}]{% endmacro %}" + LOOP + "{{ f(m.content) + f(m.role) }}" + END,
    LOOP + "{% if (m.role == 'tool') or (messages[-1].role != 'user') %}{{ m.content }}{% endif %}" + END,
    LOOP + "{% generation %}{{ m.content }}{% endgeneration %}" + END,
    LOOP + "{{ messages[loop.index0].content }}{{ (' ' ~ m.content ~ ' ;') | trim }}" + END,
    *(LOOP + "{{ m.content if m.content is " + kind + " else '-' }}" + END for kind in KINDS),
)
DECIDED = (
    LOOP + "{{ '!' if 'a' in m.content else m.content }}" + END,
    LOOP + "{{ '!' if m.content == 'a' else m.content }}" + END,
    LOOP + "{{ '!' if m.content == messages[0].content else m.content }}" + END,
    LOOP + "{{ '!' if m == messages[1] else m.content }}" + END,
    LOOP + "{{ '!' if m.content | length > 1 else m.content }}" + END,
    LOOP + "{{ m.content | length }}" + END,
    LOOP + "{{ m.content.split('a')[-1] }}" + END,
    LOOP + "{{ m.content | upper }}" + END,
    LOOP + "{{ m.content[:1] }}" + END,
    LOOP + "{{ m.content | replace('a', 'b') }}" + END,
    LOOP + "{{ m.content.strip('a') }}" + END,
    LOOP + "{{ m.content | trim('a') }}" + END,
    LOOP + "{{ m | tojson }}" + END,
    LOOP + "{{ m }}" + END,
    "{{ messages | tojson }}",
    "{{ messages }}",
    LOOP + "{% for key, value in m.items() %}{{ value }}{% endfor %}" + END,
    LOOP + "{% for letter in m.content %}{{ letter }}-{% endfor %}" + END,
    LOOP + "{% set t = '[' ~ m.content %}{{ '!' if 'a' in t else t }}" + END,
    LOOP + "{% set t = '[' + m.content %}{{ t | length }}" + END,
    LOOP + "{{ {'a': 'found'}[m.content] or m.content }}" + END,
    LOOP + "{{ {'user': m.content, 'assistant': 'x'} | tojson }}" + END,
    LOOP + "{{ [m.content, 'b'] | join('a') }}" + END,
    LOOP + "{{ '!' if [m.content] == ['a'] else '?' }}" + END,
    SPACE + LOOP + "{{ ns.x }}{% set ns.x = 'a' in m.content %}" + END + "{{ ns.x }}",
    SPACE + LOOP + "{% if 'a' in m.content %}{% set ns.n = ns.n + 1 %}{% endif %}" + END + "{{ ns.n }}",
    "{% macro f(t) %}{{ '!' if 'a' in t else t }}{% endmacro %}" + LOOP + "{{ f(m.content) }}" + END,
    LOOP + "{{ messages | map(attribute='content') | join('') }}" + END,
    LOOP + "{{ messages | selectattr('content', 'equalto', 'a') | list | length }}" + END,
    LOOP + "{{ m[m.role] | length if m[m.role] else m.content }}" + END,
    LOOP + "{{ '%s' | format(m.content) }}" + END,
    LOOP + "{{ m.content * 2 }}" + END,
    LOOP + "{{ m.role | replace(old='user', new=m.content) | upper }}" + END,
    LOOP + "{{ m.content | trim(chars='a') }}" + END,
    LOOP + "{{ [m.content] + ['b'] }}" + END,
    LOOP + "{{ m | default('x') }}" + END,
    LOOP + "{{ '!' if m.content.split('a')[1] is defined else '?' }}" + END,
    "{% for m in messages[:messages[0].content | length - 1] %}{{ m.role }}" + END,
    LOOP + "{{ (m.content | length) ~ m.content }}" + END,
)


@lru_cache(maxsize=256)
def pair(template: str) -> tuple[FastRender, RealRender]:
    real = RealRender(template, {}, NOW)
    return FastRender(template, {}, real.render, NOW), real


def messages(texts: tuple[str, ...], roles: tuple[str, ...] = ("user", "assistant")) -> list[dict[str, Any]]:
    return [{"role": roles[n % len(roles)], "content": text} for n, text in enumerate(texts)]


def placeholders(count: int) -> tuple[str, ...]:
    return tuple(f"\ue000{n}\ue001" for n in range(count))


def filled(template: str, texts: tuple[str, ...], roles: tuple[str, ...]) -> str | None:
    """The template's literals with the texts between them."""
    made = pair(template)[0].filled_in(messages(placeholders(len(texts)), roles))
    for place, text in zip(placeholders(len(texts)), texts, strict=True):
        made = made.replace(place, text) if made is not None else None
    return made


@pytest.mark.parametrize("template", FILLED)
def test_texts_whose_words_decide_nothing_are_filled_in(template: str) -> None:
    fast, real = pair(template)
    for count in (1, 2, 5):
        row = messages(placeholders(count))
        assert fast.filled_in(row) == real.render(row, None, False).text


@pytest.mark.parametrize("template", DECIDED)
def test_a_template_that_looks_at_the_words_is_walked(template: str) -> None:
    assert pair(template)[0].filled_in(messages(placeholders(2))) is None


texts = st.text("ab!'\n 9\u00e9", min_size=1, max_size=5).filter(lambda text: text == text.strip())


@given(
    template=st.sampled_from((*FILLED, *DECIDED)),
    said=st.lists(texts, min_size=1, max_size=4).map(tuple),
    roles=st.sampled_from([("user", "assistant"), ("system", "user", "assistant"), ("content", "tool")]),
)
@settings(max_examples=300)
def test_what_is_filled_in_is_what_the_template_writes(
    template: str, said: tuple[str, ...], roles: tuple[str, ...]
) -> None:
    made = filled(template, said, roles)
    if made is None:
        return
    try:
        assert made == pair(template)[1].render(messages(said, roles), None, False).text
    except RowFault as fault:
        raise AssertionError(f"filled in, but the template raises: {made!r}") from fault


def test_a_template_that_raises_or_cannot_be_traced_fills_in_nothing() -> None:
    for template in ("{{ raise_exception('no') }}", LOOP + "{{ loop.changed(m.role) }}" + END):
        assert pair(template)[0].filled_in(messages(placeholders(2))) is None
