"""For whom a template writes, whatever its loops look like."""

from __future__ import annotations

from datetime import datetime
from typing import Any

import pytest

from raysvc.chat.render.real_render import RealRender
from raysvc.chat.render.rendered import NOBODY

from .zoo import A, U, say

ROW = [say(U, "q"), say(A, "r"), say(U, "s")]
LOOP = "{% for m in messages %}"
RANGE = "{% for n in range(messages | length) %}"
SAYS = "{{ m.content }}"
CASES: dict[str, tuple[str, str, list[int]]] = {  # template, its text, owners of the blocks
    "a loop": (f"<{LOOP}{SAYS}{{% endfor %}}>", "<qrs>", [NOBODY, 0, 1, 2, NOBODY]),
    "a loop in a question": (f"{{% if true %}}{LOOP}{SAYS}{{% endfor %}}{{% endif %}}", "qrs", [0, 1, 2]),
    "a part of the list": ("{% for m in messages[1:] %}" + SAYS + "{% endfor %}", "rs", [1, 2]),
    "a copy of the list": ("{% for m in messages | list | reverse %}" + SAYS + "{% endfor %}", "srq", [2, 1, 0]),
    "a loop over letters inside": (
        LOOP + "{% for c in m.role %}{% if loop.first %}{{ c }}{% endif %}{% endfor %}" + SAYS + "{% endfor %}",
        "uqarus",
        [0, 1, 2],
    ),
    "a loop over other messages inside": (
        LOOP + "{% for o in messages[loop.index:] %}{{ o.content }}{% endfor %}-{% endfor %}",
        "rs-s--",
        [1, 2, 0, 2, 1, 2],
    ),
    "a step that is left": (
        LOOP + SAYS + "{% if loop.first %}{% continue %}{% endif %}{% break %}{% endfor %}.",
        "qr.",
        [0, 1, NOBODY],
    ),
    "no step at all": ("{% for m in [] %}{% else %}none{% endfor %}", "none", [NOBODY]),
    "else inside of a loop": (LOOP + "{% for o in [] %}{% else %}.{% endfor %}{% endfor %}", "...", [0, 1, 2]),
    "numbers": (RANGE + "<{% set m = messages[n] %}" + SAYS + "{% endfor %}", "<q<r<s", [NOBODY, 0, NOBODY, 1, NOBODY, 2]),
    "numbers, set in a question": (
        RANGE + "{% if n %}{% set m = messages[n] %}{% else %}{% set m = messages[0] %}{% endif %}" + SAYS + "{% endfor %}",
        "qrs",
        [0, 1, 2],
    ),
    "numbers, two of them": (
        RANGE + "{% set m = messages[n] %}{% set o = messages[0] %}" + SAYS + "{% endfor %}",
        "qrs",
        [NOBODY],
    ),
    "numbers, the variable set again": (
        RANGE + "{% set m = messages[0] %}{% set m = messages[n] %}" + SAYS + "{% endfor %}",
        "qrs",
        [0, 1, 2],
    ),
    "numbers, set in a scope of its own": (
        RANGE + "{% with %}{% set m = messages[n] %}" + SAYS + "{% endwith %}{% endfor %}",
        "qrs",
        [NOBODY],
    ),
    "pairs": ("{% for n, m in [(1, messages[0]), (2, messages[2])] %}" + SAYS + "{% endfor %}", "qs", [0, 2]),
    "a macro": ("{% macro say(m) %}" + LOOP + "." + "{% endfor %}" + SAYS + "{% endmacro %}" + LOOP + "{{ say(m) }}{% endfor %}", "...q...r...s", [0, 1, 2]),
    "a text that is kept": ("{% set all %}" + LOOP + SAYS + "{% endfor %}{% endset %}{{ all }}", "qrs", [NOBODY]),
    "a recursive loop": ("{% for m in messages recursive %}" + SAYS + "{% endfor %}", "qrs", [NOBODY]),
    "a namespace": (
        "{% set ns = namespace(m=none) %}" + LOOP + "{% set ns.m = m %}{{ ns.m.content }}{% endfor %}{{ ns.m.content }}",
        "qrss",
        [0, 1, 2, NOBODY],
    ),
}  # fmt: skip


def render(text: str, messages: list[Any]) -> Any:
    return RealRender(text, {}, datetime(2000, 1, 1)).render(messages, None, False)


@pytest.mark.parametrize("name", CASES)
def test_a_text_belongs_to_the_message_of_its_loop(name: str) -> None:
    text, written, owners = CASES[name]
    made = render(text, ROW)
    assert (made.text, made.owners) == (written, owners)
    assert "".join(made.blocks) == written
    assert all(made.blocks)


def test_no_template_takes_a_note_of_its_own() -> None:
    for name in ("_ step", "'_ step'", "_step"):
        with pytest.raises(Exception, match="compile"):
            render("{{ messages[1] | " + name + "(1) }}", ROW)


def test_marks_of_generation_are_one_where_nothing_stands_between_them() -> None:
    two = "{% generation %}a{% endgeneration %}{% generation %}{{ m.content }}{% endgeneration %}"
    made = render(LOOP + two + "{% endfor %}", ROW)
    assert made.text == "aqaras"
    assert made.marks == [(0, 2), (2, 4), (4, 6)]
