"""What we assume of Jinja as `apply_chat_template` sets it up. Limits of a render are elsewhere; here it is what a template says."""

from __future__ import annotations

from typing import Any

import jinja2
import pytest
from jinja2.exceptions import SecurityError, UndefinedError
from transformers.utils.chat_template_utils import _compile_jinja_template

from raysvc.chat.render.chat_environment import chat_environment

DATA: dict[str, Any] = {
    "messages": [
        {"role": "user", "content": "<b>a & 'b'</b>\n"},
        {"role": "assistant", "content": " é ", "items": 1},
        {"role": "user", "content": [{"type": "text", "text": "c"}]},
    ],
    "empty": {},
    "number": 7,
    "half": 1.50,
}
SAID: dict[str, str] = {  # what templates of models rely on -> what it writes
    # blanks
    "{% if true %}\na\n{% endif %}\nb": "a\nb",
    "  {% if true %}\n  a\n  {% endif %}\n": "  a\n",
    "a\n": "a",
    "a\n\n": "a\n",
    "a {{- ' b' -}} \n c": "a bc",
    # no value is text until it is written, and nothing is escaped for HTML
    "{{ messages[0].content }}": "<b>a & 'b'</b>\n",
    "{{ none }}{{ true }}{{ half }}{{ number / 2 }}{{ 7 // 2 }}{{ empty }}": "NoneTrue1.53.53{}",
    "{{ messages[2].content }}": "[{'type': 'text', 'text': 'c'}]",
    "{{ 1 ~ none ~ 'a' }}": "1Nonea",
    "{{ messages[0].content | e }}": "&lt;b&gt;a &amp; &#39;b&#39;&lt;/b&gt;\n",
    # JSON
    "{{ messages[0] | tojson }}": '{"role": "user", "content": "<b>a & \'b\'</b>\\n"}',
    "{{ messages[1].content | tojson }}": '" é "',
    "{{ {'b': none, 'a': [1, 1.0, true]} | tojson }}": '{"b": null, "a": [1, 1.0, true]}',
    "{{ {'b': 1, 'a': 2} | tojson(indent=2) }}": '{\n  "b": 1,\n  "a": 2\n}',
    "{{ {'b': 1} | tojson(separators=(',', ':')) }}": '{"b":1}',
    # what is not there is empty, false and undefined; a key goes behind a method of the same name
    "{{ messages[0].nothing }}{{ nothing }}{{ messages[0].nothing is defined }}": "False",
    "{{ 'x' if messages[0].nothing else 'y' }}{{ messages[0].nothing or 'z' }}": "yz",
    "{{ messages[1]['items'] }}{{ messages[1].items is callable }}": "1True",
    "{{ messages[9] is defined }}{{ messages[-1].role }}{{ messages[::-1][0].role }}": "Falseuseruser",
    # kinds
    "{{ 'a' is iterable }}{{ 'a' is sequence }}{{ 'a' is string }}{{ empty is mapping }}": "TrueTrueTrueTrue",
    "{{ messages is mapping }}{{ empty is iterable }}{{ none is none }}": "FalseTrueTrue",
    "{{ true is boolean }}{{ 1 is boolean }}{{ true is number }}{{ 1 == true }}": "TrueFalseTrueTrue",
    # loops and names
    "{% for m in messages %}{{ loop.index0 }}{{ loop.last }}{{ loop.previtem.role if loop.previtem is defined }};{% endfor %}":
        "0False;1Falseuser;2Trueassistant;",
    "{% for m in messages %}{% if loop.first %}{% continue %}{% endif %}{{ m.role }}{% break %}{% endfor %}": "assistant",
    "{% for m in messages if m.role == 'user' %}{{ loop.length }}{% endfor %}": "22",
    "{% set a = 1 %}{% for m in messages %}{% set a = 2 %}{% endfor %}{{ a }}": "1",
    "{% set ns = namespace(a=1) %}{% for m in messages %}{% set ns.a = ns.a + 1 %}{% endfor %}{{ ns.a }}": "4",
    "{% macro f(a, b='x') %}{{ a }}{{ b }}{% endmacro %}{{ f(1) ~ f(2, b='y') }}": "1x2y",
    "{% set a %} x {% endset %}{{ a | trim }}{{ a | length }}": "x3",
    "{% for k, v in {'b': 1, 'a': 2} | items %}{{ k }}{{ v }}{% endfor %}": "b1a2",
    "{% for k, v in {'b': 1, 'a': 2} | dictsort %}{{ k }}{{ v }}{% endfor %}": "a2b1",
    # texts
    "{{ 'a</think>b'.split('</think>')[-1].lstrip('\n') }}{{ 'x'.startswith('x') }}": "bTrue",
    "{{ '%s-%d' | format('a', 3) }}{{ '{}'.format(1) }}{{ 'a\n' | indent(2, true) }}": "a-31  a\n",
    "{{ ['a', 1] | join(', ') }}{{ messages | map(attribute='role') | list | length }}": "a, 13",
    "{{ messages | selectattr('role', 'equalto', 'user') | list | length }}{{ ' a ' | trim }}": "2a",
    "{% generation %}a{% endgeneration %}{{ 'b' | upper | replace('B', 'c') }}": "ac",
}  # fmt: skip


@pytest.mark.parametrize("text", SAID)
def test_what_templates_rely_on_is_written_alike(text: str) -> None:
    """The environment of `transformers`, and ours, write what the templates of models were written for."""
    theirs = _compile_jinja_template(text).render(**DATA)
    ours = chat_environment().from_string(text).render(**DATA)
    assert (theirs, ours) == (SAID[text], SAID[text])


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("{{ 'a' + messages[0].nothing }}", UndefinedError),
        ("{{ messages[0].nothing.more }}", UndefinedError),
        ("{{ messages[0].nothing() }}", UndefinedError),
        ("{{ 'a' + 1 }}", TypeError),
        ("{{ 'a' + none }}", TypeError),
        ("{{ 'a' in none }}", TypeError),
        ("{% for m in none %}{% endfor %}", TypeError),
        ("{{ messages[0].__class__.mro() }}", SecurityError),
        ("{{ messages.append(1) }}", SecurityError),
        ("{{ raise_exception('no system') }}", jinja2.TemplateError),
        ("{{ {'a': namespace} | tojson }}", TypeError),
    ],
)
def test_what_a_template_cannot_do_raises_alike(text: str, fault: type[Exception]) -> None:
    """A row that a template refuses is refused by both, so one that we set aside could not have been served either."""
    for template in (_compile_jinja_template(text), chat_environment().from_string(text)):
        with pytest.raises(fault):
            template.render(**DATA)


def test_the_environment_of_transformers_is_the_one_that_ours_copies() -> None:
    """Blanks, escaping, undefined names, filters, tests and globals: a new one there is one that templates begin to use."""
    theirs, ours = _compile_jinja_template("").environment, chat_environment()
    for name in ("trim_blocks", "lstrip_blocks", "keep_trailing_newline", "autoescape", "undefined", "optimized",
                 "newline_sequence", "block_start_string", "variable_start_string", "comment_start_string",
                 "line_statement_prefix", "line_comment_prefix", "finalize"):  # fmt: skip
        assert getattr(theirs, name) == getattr(ours, name), name
    assert theirs.filters.keys() == {name for name in ours.filters if not name.startswith("_")}  # our checks
    assert theirs.tests.keys() == ours.tests.keys()
    assert theirs.globals.keys() == ours.globals.keys()
    tags = {tag for extension in theirs.extensions.values() for tag in extension.tags}
    assert tags == {tag for extension in ours.extensions.values() for tag in extension.tags}


def test_json_of_floats_and_large_integers_is_that_of_python() -> None:
    """`tojson` writes numbers as `json.dumps` does: shortest floats, integers of any size, and NaN as a bare word."""
    data = {"x": [0.1, 1e22, 10**30, float("nan"), -0.0]}
    for template in (
        _compile_jinja_template("{{ x | tojson }}"),
        chat_environment().from_string("{{ x | tojson }}"),
    ):
        assert template.render(**data) == f"[0.1, 1e+22, {10**30}, NaN, -0.0]"


def test_line_breaks_of_a_template_are_made_one_kind() -> None:
    """A template saved with `\\r\\n` writes `\\n`; a value keeps its own."""
    for template in (
        _compile_jinja_template("a\r\n{{ x }}\r\nb"),
        chat_environment().from_string("a\r\n{{ x }}\r\nb"),
    ):
        assert template.render(x="c\r\nd") == "a\nc\r\nd\nb"
