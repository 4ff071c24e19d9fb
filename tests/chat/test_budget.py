"""No template takes more of a render than its budget, and those that people use do not notice."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
import time
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest

from raysvc.chat.bounds import budget
from raysvc.chat.bounds.budget import OverBudget, within_budget
from raysvc.chat.render.real_render import RealRender
from raysvc.chat.render.template import MAX_COSTLY, ChatTemplate
from raysvc.errors import TokenizerError
from tests.chat.hostile_templates import HOSTILE, SIZE

ROW: list[Any] = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
LOOPS = "{% for a in range(90000) %}{% for b in range(90000) %}{% endfor %}{% endfor %}"


def test_each_hostile_template_ends_within_its_budget_with_what_happened() -> None:
    """In a process of its own, whose memory is looked at."""
    program = Path(__file__).with_name("hostile_templates.py")
    ran = subprocess.run([sys.executable, program], capture_output=True, text=True, timeout=300)
    assert ran.returncode == 0, ran.stderr
    outcomes = [json.loads(line) for line in ran.stdout.splitlines()]
    assert [one["name"] for one in outcomes] == list(HOSTILE)
    for one in outcomes:
        assert "more than" in one["said"] or "RecursionError" in one["said"], one
        assert one["seconds"] < 5, one
    assert sum(one["mib"] for one in outcomes) < 600


def test_a_loop_without_end_costs_its_row(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(budget, "MAX_SECONDS", 0.1)
    text = (
        "{% for m in messages %}{% if m.content == 'b' %}" + LOOPS + "{% endif %}{{ m.content }}{% endfor %}"
    )
    template = ChatTemplate(text, {})
    good = [{"role": "user", "content": "a"}]
    for _ in range(3):
        assert template.render(good, None).text == "a"
        with pytest.raises(OverBudget, match="processor time"):
            template.render(ROW, None)


@pytest.mark.parametrize(
    ("third", "what"),
    [
        (LOOPS, "processor time"),
        ("{% for a in range(9) %}{{ 'x' * n }}{% endfor %}", "8,388,608 characters"),
        ("{{ 'x'|center(n) }}", "8,388,608 characters"),
        ("{{ (n // 2 * 'x')|length }}", "8,388,608 characters"),
    ],
)
def test_a_refusal_names_the_line_of_the_template(
    third: str, what: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(budget, "MAX_SECONDS", 0.1)
    lines = [
        "{% set n = 10000000000 %}",
        "{% macro m() %}",
        third,
        "{% endmacro %}",
        "{{ m() }}",
        "{{ m() }}",
    ]
    template = ChatTemplate("\n".join(lines), {})
    with pytest.raises(OverBudget, match=f"{what}.*, in line 3 of the template$"):
        template.render(ROW, None)


def test_a_template_that_takes_too_much_of_most_rows_ends_the_build(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(budget, "MAX_SECONDS", 0.05)
    render = ChatTemplate(LOOPS, {}).render
    for _ in range(MAX_COSTLY - 1):
        with pytest.raises(OverBudget):
            render(ROW, None)
    with pytest.raises(
        TokenizerError,
        match=r"tokenizer.chat_template: .*processor time, in line 1 of the template; set tokenizer.chat_template",
    ):
        render(ROW, None)


def test_a_machine_that_stands_still_refuses_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """What sleeps takes no processor time: a render beside busy processes, or one that was stopped, is not slower."""
    monkeypatch.setattr(budget, "MAX_SECONDS", 0.05)
    assert within_budget(time.sleep, 0.5) is None


def test_nothing_is_raised_after_a_run_has_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs that end just when they are condemned: whichever comes first, the thread goes on unharmed."""
    monkeypatch.setattr(budget, "MAX_SECONDS", 0.0)
    monkeypatch.setattr(budget, "PERIOD_S", 0.0001)
    ends: dict[str, int] = {"made": 0, "refused": 0}
    own, interval_s = budget._own.run, sys.getswitchinterval()
    monkeypatch.setattr(budget, "AGAIN_S", 0.0)
    sys.setswitchinterval(1e-5)
    for turn in range(300):
        try:
            within_budget(lambda turn=turn: [None for _ in range(300 * turn)])
            ends["made"] += 1
        except OverBudget:
            ends["refused"] += 1
        assert own.count % 2 == 0
        [None for _ in range(2000)]  # where a late exception would come
    sys.setswitchinterval(interval_s)
    assert min(ends.values()) > 0, ends


def test_a_run_that_is_interrupted_ends_while_a_profiler_watches() -> None:
    """CPython 3.11 does not go on where an exception of a thread was announced and taken back, and each call is watched."""
    code = """
import cProfile, itertools
from raysvc.chat.bounds import budget
from raysvc.chat.bounds.budget import OverBudget, within_budget

def forever():
    for _ in itertools.count():
        pass

def after():
    return sum(range(10))

budget.MAX_SECONDS = 0.2
profile = cProfile.Profile()
profile.enable()
for _ in range(3):
    try:
        within_budget(forever)
    except OverBudget as error:
        print(error.detail)
    after()
profile.disable()
"""
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=110, check=True
    )
    assert done.stdout.splitlines() == ["it takes more than 0.2 s of processor time"] * 3


def test_each_thread_has_a_budget_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(budget, "MAX_SECONDS", 0.2)
    ends: list[str] = []

    def run(text: str) -> None:
        try:
            ends.append(RealRender(text, {}, datetime(2000, 1, 1)).render(ROW, None, False).text)
        except OverBudget:
            ends.append("refused")

    threads = [threading.Thread(target=run, args=(text,)) for text in (LOOPS, "fine", LOOPS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(ends) == ["fine", "refused", "refused"]


def test_the_watch_goes_on_in_a_process_that_was_forked() -> None:
    code = (
        "import os, sys\nfrom raysvc.chat.bounds import budget\nbudget.MAX_SECONDS = 0.1\n"
        "budget.within_budget(int)\nchild = os.fork()\n"
        "if child: sys.exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))\n"
        "try:\n budget.within_budget(lambda: [None for _ in iter(int, 1)])\n"
        "except budget.OverBudget: os._exit(7)\n"
    )
    assert subprocess.run([sys.executable, "-c", code], timeout=110).returncode == 7


def test_a_tokenizer_whose_template_never_ends_is_refused_before_its_rows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from raysvc.chat.tokens.tokenizer import LoadedTokenizer
    from raysvc.job.config import TokenizerConfig
    from tests.media.families import qwen

    monkeypatch.setattr(budget, "MAX_SECONDS", 0.1)
    name = str(qwen(tmp_path / "qwen"))
    for text in (
        LOOPS,
        "{% if false %}{{ '0' * 10**10 }}{% endif %}",
        SIZE["doubling"].replace("t]", "'x']"),
    ):
        loaded = LoadedTokenizer(TokenizerConfig(name=name, chat_template=text))
        with pytest.raises(TokenizerError, match="more than a render may"):
            loaded.fit(False)


def test_small_uses_of_bounded_operations_are_those_of_jinja() -> None:
    """Oracle: Jinja's own sandbox."""
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    text = (
        "{{ 'a'|center(9) }}|{{ 'a\nb'|indent(4) }}|{{ 'ab' * 3 }}|{{ '%5.2f' % 1.5 }}|{{ '{:>4}'.format(7) }}|{{ 7 % 4 }}|{{ 2 ** 9 }}"
        "{{ [1, 2]|join('-') }}|{{ 'aXb'.replace('X', '--') }}|{{ ['b', 'a']|sort|join }}|{{ 3.14159|round(2) }}|{{ [1, 2]|sum }}"
        "{{ [[1], [2]]|sum(start=[]) }}{{ [{'n': [1]}, {'n': [2]}]|sum(attribute='n', start=[]) }}{{ 'xaax'|trim('x') }}{{ ' a '|trim }}"
        "{% for a in [3, 4]|map('string') %}{{ loop.last }}{{ loop.length }}{{ a }}{% endfor %}{% for a, b in {'x': 1}.items() %}{{ a }}{{ b }}{% endfor %}"
        "{% for a in nothing %}{% else %}none{% endfor %}{{ 'x'.zfill(4) }}{{ ('a' ~ 1 ~ none) }}{{ 'q'.strip('q') }}{{ (7).bit_length() }}"
        "{{ 'abcdefg'|batch(3, 'x')|list }}{{ 'abcdefg'|slice(3)|list }}{{ '12'|int + 1 }}{{ 'a-b'.rsplit('-') }}{% set a, b = 'x' ~ 1, 'y' + 'z' %}{{ a }}{{ b }}"
        "{{ ['<', [1, b]] + [a] }}{{ {'k': b, a: [b]} }}{{ (a, b)[1] }}{{ (a + b if b else b ~ a)|e }}{{ -7 // 2 }}{{ 7 / 2 }}{{ '%s' % a }}{{ '<'|safe ~ '>' }}"
        "{{ " + " ~ ".join(["a"] * 40) + " }}{{ {}.fromkeys('ab', b) }}{{ 'a'|tojson }}{{ [1]|tojson(indent=2) }}{{ [1, 2]|random is number }}"
        "{% macro m(x, y=a ~ b) %}[{{ x }}{{ y }}{{ caller() if caller }}]{% endmacro %}{{ m(a + b) }}{% call m(1) %}!{% endcall %}{% filter upper %}{{ a ~ b }}{% endfilter %}"
    )  # fmt: skip
    row: list[Any] = []
    real = RealRender(text.replace("|tojson", "|string").replace("(indent=2)", ""), {}, datetime(2000, 1, 1))
    plain = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
    shown = plain.from_string(text.replace("|tojson", "|string").replace("(indent=2)", "")).render()
    assert real.render(row, None, False).text == shown


def test_a_long_row_may_be_written_more_than_once() -> None:
    words = "word " * 100_000
    text = (
        "{% for m in messages %}{{ m.content }}{% set kept = m.content ~ m.content %}{{ kept }}{% endfor %}"
    )
    made = ChatTemplate(text, {}).render([{"role": "user", "content": words}], None)
    assert len(made.text) == 3 * len(words)
