"""Whatever a template does, a row is the real render's: traced, given up, or dropped when it differs."""

from __future__ import annotations

from datetime import datetime
from typing import Any

import pytest

from raysvc.chat.render.real_render import RealRender
from raysvc.chat.render.template import ChatTemplate
from raysvc.chat.row_errors import RowFault
from raysvc.chat.trace import automaton, fast_render, self_test, trace
from raysvc.chat.trace.automaton import Tree
from raysvc.chat.trace.fast_render import FastRender
from raysvc.chat.trace.traced_value import Untraceable

NOW = datetime(2026, 1, 1)
CHATML = "{% for m in messages %}{{ '<' ~ m.role ~ '>' ~ m.content }}{% endfor %}"


def row(*texts: str) -> list[dict[str, str]]:
    return [{"role": ("user", "assistant")[n % 2], "content": text} for n, text in enumerate(texts)]


def pair(template: str, variables: Any = None) -> tuple[FastRender, RealRender]:
    real = RealRender(template, variables or {}, NOW)
    return FastRender(template, variables or {}, real.render, NOW), real


ROWS = [
    row("a", "b"),
    row("c", "d", "e", "f"),
    row("a", "b"),
    row("g", "h"),
    row("", "x" * 30, " i "),
    row("j", "k"),
]
LOOP = "{% for m in messages %}"
TRACED: dict[str, str] = {
    "undefined between steps": "{% set last = nothing %}" + LOOP + "{{ m.role ~ last }}{% endfor %}",
    "a macro of the row": "{% macro f(m) %}{{ m.content }}{% endmacro %}" + LOOP + "{{ f(m) }}{% endfor %}",
    "a call block": "{% macro f() %}[{{ caller() }}]{% endmacro %}"
    + LOOP
    + "{% call f() %}{{ m.content }}{% endcall %}{% endfor %}",
    "marks in a macro": "{% macro f(m) %}{% generation %}{{ m.content }}{% endgeneration %}{% endmacro %}"
    + LOOP
    + "{{ f(m) }}{% endfor %}",
    "an item of the loop": LOOP + "{{ loop['index'] ~ m['content'] }}{% endfor %}",
    "a list of the row": "{% set seen = [messages[0]] %}"
    + LOOP
    + "{{ seen[0].content ~ m.role }}{% endfor %}",
    "items by their number": LOOP
    + "{{ m.content[0] ~ m.content[5] ~ messages[0].role ~ messages[5] }}{% endfor %}",
    "a recursive loop": "{% for m in messages recursive %}{{ m.content }}{% endfor %}",
    "a value looked for in a list": LOOP
    + "{{ ['assistant', 'user'].index(m.role) ~ m.content }}{% endfor %}",
    "as many steps as the row says": LOOP
    + "{% for n in range(m.content | length) %}{{ n }}{% endfor %}{% endfor %}",
    "a loop inside of one over a list of the template": LOOP
    + "{% endfor %}{% for n in ['a', 'a', 'b'] %}"
    + LOOP
    + "{{ n ~ m.content }}{% endfor %}{% endfor %}",
    "one of two values": "{% set ns = namespace(a='', b='', c='') %}"
    + LOOP
    + "{{ ns.c }}{% set ns.a = m.content %}{% set ns.b = m.role %}"
    + "{% set ns.c = ns.a if m.content == 'c' else ns.b %}{% endfor %}{{ ns.c }}",
    "one of two macros": "{% macro f(t) %}({{ t }}){% endmacro %}{% macro g(t) %}[{{ t }}]{% endmacro %}"
    + "{% set shown = f if messages | length > 2 else g %}"
    + LOOP
    + "{{ shown(m.content) }}{% endfor %}",
    "a value given by name": LOOP + "{{ 'a text' | replace(old='x', new=m.content) ~ m.role }}{% endfor %}",
    "neighbours": LOOP
    + "{{ loop.previtem.role if loop.previtem }}{{ m.content }}{{ loop.nextitem.role if loop.nextitem is defined }}{% endfor %}",
    "texts and numbers that are joined": LOOP
    + "{{ 'a' ~ m.content ~ loop.index }}{{ loop.length }}{% endfor %}",
    "a value of a step before": "{% set ns = namespace(last='') %}"
    + LOOP
    + "{{ ns.last }}{% set ns.last = m.content %}{% endfor %}{{ ns.last }}",
}
METHODS: dict[str, str] = {
    "said": "{{ m.content.title }}",
    "asked": "{% if m.content.title %}!{% endif %}",
    "compared": "{% if m.content.title == 'x' %}!{% endif %}",
    "looked into": "{{ m.content.title.name ~ m.content.title['owner'] }}",
    "tested": "{% if m.content.title is defined %}!{% endif %}",
    "filtered": "{{ m.content.title | default('x') | string }}",
    "kept": "{% set kept = m.content.title %}{% for n in messages[:1] %}{{ kept is string }}{% endfor %}",
    "gone over": "{% for n in m.content.title %}!{% endfor %}",
}


@pytest.mark.parametrize("way", METHODS)
def test_a_name_that_is_a_method_in_one_row_and_a_field_in_another_is_never_taken_for_the_same(
    way: str,
) -> None:
    fast, real = pair(LOOP + METHODS[way] + "{{ m.role }}{% endfor %}")
    contents: list[Any] = ["a text", {"title": "x"}, {"title": ""}, None, "x", {}, {"title": {"name": "y"}}]
    for content in [*contents, *contents]:
        each: list[Any] = [{"role": "user", "content": content}, {"role": "user", "content": "b"}]
        try:
            expected = real.render(each, None, False)
        except RowFault:
            with pytest.raises(RowFault):
                fast.render(each, None, False)
        else:
            found = fast.render(each, None, False)
            assert "built-in method" in expected.text or found == expected
    assert not fast.counts["different"]


GIVEN_UP: dict[str, str] = {
    "a namespace in the place of a value": "{% set ns = namespace(last='') %}"
    + LOOP
    + "{% set ns.last = 'x' if loop.last else 'y' %}{{ (m.name | default(ns)).last }}{% endfor %}",
    "a loop in the place of a value": LOOP + "{{ (m.name | default(loop)).index }}{% endfor %}",
    "a list of values shown": LOOP + "{{ [m.content] ~ '%r' % m.role }}{% endfor %}",
    "a value joined by a text": LOOP
    + "{{ '-'.join(m.content) ~ ', '.join([m.role, m.content]) }}{% endfor %}",
    "loop.cycle": LOOP + "{{ loop.cycle('a', 'b') ~ m.content }}{% endfor %}",
    "loop.changed": LOOP + "{{ loop.changed(m.role) }}{% endfor %}",
    "a call of a value": LOOP + "{{ m.content.format(1) }}{% endfor %}",
    "a value changed": LOOP + "{% set _ = m.update(role='x') %}{{ m.role }}{% endfor %}",
    "loop.revindex": LOOP + "{{ loop.revindex ~ m.content }}{% endfor %}",
    "joiner": "{% set comma = joiner(',') %}" + LOOP + "{{ comma() ~ m.content }}{% endfor %}",
    "cycler": "{% set c = cycler('a', 'b') %}" + LOOP + "{{ c.next() ~ m.content }}{% endfor %}",
    "a value of a step before, from a block": LOOP
    + "{% set kept = m.content %}{% for n in messages %}{{ kept }}{% endfor %}{% endfor %}",
}


def same(template: str) -> FastRender:
    fast, real = pair(template)
    for each in ROWS:
        try:
            expected = real.render([dict(one) for one in each], None, False)
        except Exception as error:  # noqa: BLE001  both raise
            with pytest.raises(type(error)):
                fast.render([dict(one) for one in each], None, False)
            continue
        assert fast.render([dict(one) for one in each], None, False) == expected
    assert not fast.counts["different"]
    return fast


@pytest.mark.parametrize("name", TRACED)
def test_a_template_is_walked_and_says_what_the_real_render_says(name: str) -> None:
    fast = same(TRACED[name])
    assert fast.counts["walked"], fast.reasons


def test_loops_over_numbers_of_a_row_are_bounded_in_a_walk_as_in_a_render() -> None:
    fast, real = pair(LOOP + "{% for n in range(m.steps) %}{{ '.' if n == 1 }}{% endfor %}{% endfor %}")
    rows: list[list[Any]] = [[{"steps": 3}], [{"steps": 4}, {"steps": 2}]]
    for row_ in rows * 3:
        assert fast.render(row_, None, False) == real.render(row_, None, False)
    for _ in range(3):
        with pytest.raises(RowFault, match="OverflowError"):
            fast.render([{"steps": 100_001}], None, False)
    walked = fast.counts["walked"]
    assert fast.render([{"steps": 90_000}], None, False).text == "."
    assert fast.counts["walked"] == walked + 1


@pytest.mark.parametrize("name", GIVEN_UP)
def test_a_template_that_cannot_be_followed_is_rendered(name: str) -> None:
    same(GIVEN_UP[name])


@pytest.mark.parametrize("lists", ["messages if {} else tools", "messages[1:] if {} else tools | list"])
def test_texts_of_a_loop_over_messages_or_tools_have_the_owners_of_the_render(lists: str) -> None:
    over = lists.format("messages | length > 1")
    fast, real = pair(f"{{% for each in ({over}) %}}{{{{ each.content }}}}{{% endfor %}}")
    for texts in ("a", "ab", "cd", "e", "fgh"):
        assert fast.render(row(*texts), row("x", "y"), False) == real.render(
            row(*texts), row("x", "y"), False
        )
    assert fast.counts["walked"] >= 2


def test_a_text_that_is_searched_in_a_chain_of_comparisons_is_not_taken_for_its_letters() -> None:
    fast, real = pair(
        "{% macro f(m) %}{{ 'xx' in m.content != false }}{% endmacro %}" + LOOP + "{{ f(m) }}{% endfor %}"
    )
    for text in ("ab", "xx", "ba", "xx"):
        assert fast.render(row(text), None, False) == real.render(row(text), None, False)


def test_what_gives_another_text_than_the_real_render_is_dropped_for_good() -> None:
    """The judge changes its mind: as if the template did what a trace cannot see."""
    real, changed = RealRender(CHATML, {}, NOW), RealRender(CHATML.replace("~ '>'", "~ '|'"), {}, NOW)
    judge = [real]
    fast = FastRender(CHATML, {}, lambda *row_: judge[0].render(*row_), NOW)
    while fast.counts["walked"] < fast_render.SAMPLE_EVERY - 1:
        fast.render(row(f"a{fast.counts['walked']}", "b"), None, False)
    judge[0], rendered = changed, fast.counts["rendered"]
    for number in range(5):
        each = row(f"c{number}", "d")
        assert fast.render(each, None, False) == changed.render(each, None, False)
        assert fast.stretches(each) is None
    assert fast.counts["different"] == 1
    assert fast.counts["rendered"] == rendered + 4
    assert any(reason.startswith("different: ") for reason in fast.reasons)


def test_a_full_automaton_learns_nothing_and_rows_are_rendered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(automaton, "MAX_LEAVES", 1)
    fast, real = pair(
        "{% for m in messages %}{% if m.content == 'c' %}!{% endif %}{{ m.content }}{% endfor %}"
    )
    for each in ROWS * 2:
        assert fast.render(each, None, False) == real.render(each, None, False)
    assert not fast.counts["learned"]
    assert fast.counts["rendered"] == 2 * len(ROWS)
    assert "too many ways" in str(fast.reasons)


def test_a_way_that_is_at_odds_with_what_is_known_is_refused() -> None:
    known = automaton.Automaton({"yes": True})
    state, end = known.states["start"], ["return None, (a,)"]
    for _ in range(2):
        state.insert(Tree(["a = yes"], "a", {True: Tree(end)}))
        assert known.leaves == 1
    for way in (
        Tree(["a = no"], "a", {True: Tree(end)}),
        Tree(["a = yes"], "b", {True: Tree(end)}),
        Tree(end),
    ):
        with pytest.raises(Untraceable, match="answers alone"):
            state.insert(way)
    with pytest.raises(Untraceable, match="answers alone"):
        state.insert(Tree(["a = yes"], "a", {True: Tree(["return None, ()"])}))
    assert state.run(None, None, None, ()) == (None, (True,))
    known.names["yes"] = False
    with pytest.raises(automaton.Miss):
        state.run(None, None, None, ())
    state.insert(Tree(["a = yes"], "a", {False: Tree(end)}))
    assert state.run(None, None, None, ()) == (None, (False,))


def test_a_way_that_is_too_long_is_not_kept() -> None:
    count = trace.MAX_LINES + 1
    fast, real = pair(
        f"{{% macro f(m) %}}{{% for n in range({count}) %}}{{{{ m[n ~ 'x'] }}}}{{% endfor %}}{{% endmacro %}}"
        "{% for m in messages %}{{ f(m) ~ m.content }}{% endfor %}"
    )
    for _ in range(2):
        assert fast.render(row("a"), None, False) == real.render(row("a"), None, False)
    assert fast.counts["refused"] == 2
    assert "too much happens" in str(fast.reasons)


def test_a_stretch_that_python_cannot_hold_is_rendered() -> None:
    count = trace.MAX_LINES // 2 - 20
    fast, real = pair(
        f"{{% macro f(m) %}}{{% for n in range({count}) %}}{{{{ '!' if m[n ~ 'x'] }}}}{{% endfor %}}{{% endmacro %}}"
        "{% for m in messages %}{{ f(m) ~ m.content }}{% endfor %}"
    )
    for number in range(3):
        each = row(f"{number}")
        assert fast.render(each, None, False) == real.render(each, None, False)
    assert "too branched" in str(fast.reasons)
    assert fast.counts["walked"] == 0


def test_templates_that_are_refused_again_and_again_are_given_up() -> None:
    fast, real = pair(GIVEN_UP["loop.changed"])
    for number in range(fast_render.MAX_REFUSED + 5):
        assert fast.render(row(f"{number}"), None, False) == real.render(row(f"{number}"), None, False)
    assert fast.counts["refused"] == fast_render.MAX_REFUSED
    assert fast.counts["rendered"] == fast_render.MAX_REFUSED + 5
    assert "loop.changed" in str(fast.reasons)


def test_tools_that_are_equal_in_python_and_not_in_json_stay_apart() -> None:
    fast, real = pair("{{ tools | tojson }}{{ tools | tojson(indent=2) }}" + CHATML)
    for number in (1, 2, 1.0, True, 3, 1, 2):
        tools = [{"name": "é<", "value": number}]
        assert fast.render(row("a"), tools, False) == real.render(row("a"), tools, False)


def test_a_jinja_that_is_read_wrongly_is_noticed_once_and_logged(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(self_test.FastRender, "render", lambda self, *_: None)
    self_test.tracing_works.cache_clear()
    try:
        assert not self_test.tracing_works()
        assert "each row is rendered" in caplog.text
    finally:
        monkeypatch.undo()
        self_test.tracing_works.cache_clear()
    assert self_test.tracing_works()


@pytest.mark.parametrize("fast", [True, False])
@pytest.mark.parametrize("way", TRACED)
def test_a_text_alone_is_that_of_the_render(way: str, fast: bool) -> None:
    text = (
        "{{ (tools or ['none'])[0] }}" + TRACED[way] + "{{ raise_exception('!') if messages | length == 5 }}"
    )
    template, real = ChatTemplate(text, {}, fast, NOW), RealRender(text, {}, NOW)
    for number, each in enumerate(ROWS * 3):
        tools = ["a tool"] if number % 2 else None
        assert template.rendered_text(each, tools) == real.render(each, tools, False).text
    with pytest.raises(RowFault):
        template.rendered_text(row(*"abcde"), None)


def test_a_text_alone_is_rendered_for_real_when_it_is_due() -> None:
    template = ChatTemplate(CHATML, {})
    assert template.fast is not None
    for _ in range(3 * fast_render.SAMPLE_EVERY):
        template.rendered_text(row("a", "b"), None)
    assert template.fast.counts["walked"] == 3 * fast_render.SAMPLE_EVERY - 1
    template.fast._judge = None  # type: ignore[assignment, method-assign]
    with pytest.raises(TypeError):
        template.rendered_text(row("a", "b"), None)
