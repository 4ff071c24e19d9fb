"""What we assume of Jinja: all that a template can reach is in a table of `raysvc.chat.bounds.sizes`, or makes little."""

from __future__ import annotations

from typing import Any

import jinja2
import jinja2.exceptions
import pytest
from jinja2 import defaults, filters, nodes, sandbox
from markupsafe import Markup

from raysvc.chat.bounds.bounded_environment import BoundedEnvironment
from raysvc.chat.bounds.sizes import FILTERS, FREE_METHODS, GROWING, METHODS, named
from raysvc.chat.render.chat_environment import chat_environment

LINEAR = named(
    "abs attr capitalize count d default dictsort filesizeformat first float groupby items last length list lower map max "
    "min random reject rejectattr reverse safe select selectattr sort string sum title trim unique upper wordcount"
)
REFUSED = named("format format_map mro fromhex from_bytes")
VALUES: tuple[Any, ...] = ("x", Markup("x"), [1], (1,), {"a": 1}, 1, 1.5, True, b"x", None, range(3))


def test_every_filter_of_jinja_is_known() -> None:
    """A filter that a new Jinja brings has to be judged: what it can make of its values, in one step of Python."""
    assert {*filters.FILTERS} == LINEAR | FILTERS.keys() | GROWING
    assert not LINEAR & (FILTERS.keys() | GROWING)


def test_every_global_of_jinja_is_known() -> None:
    """`lipsum` is written in Python, where it can be interrupted; `range` is the sandbox's."""
    assert set(defaults.DEFAULT_NAMESPACE) == {"range", "dict", "lipsum", "cycler", "joiner", "namespace"}
    with pytest.raises(OverflowError):
        sandbox.safe_range(sandbox.MAX_RANGE + 1)
    assert chat_environment().globals["range"] is sandbox.safe_range


def reachable(value: Any) -> set[str]:
    """Names of the methods that the sandbox gives of a value."""
    environment = chat_environment()
    found = set()
    for name in dir(value):
        got = environment.getattr(value, name)
        if callable(got) and not isinstance(got, jinja2.Undefined):
            found.add(name)
    return found


@pytest.mark.parametrize("value", VALUES, ids=lambda value: type(value).__name__)
def test_every_method_that_the_sandbox_gives_is_in_a_table(value: Any) -> None:
    """One that a new Python or MarkupSafe brings is refused with arguments, and named here."""
    assert reachable(value) - FREE_METHODS - METHODS.keys() - REFUSED == set()


@pytest.mark.parametrize(
    "shown", ["v.from_bytes(b, 'big')", "v['from_bytes'](b, 'big')", "(v|attr('from_bytes'))(b, 'big')"]
)
def test_each_call_of_a_method_passes_the_environment(shown: str) -> None:
    """However a template came by the method."""
    template = chat_environment().from_string("{{ " + shown + " }}")
    with pytest.raises(jinja2.exceptions.SecurityError, match="from_bytes"):
        template.render(v=1, b=b"x")


def test_binary_operators_are_those_that_are_judged() -> None:
    """`-`, `/` and `//` of numbers that are bounded are bounded."""
    signs = {one.operator for one in nodes.BinExpr.__subclasses__() if one.operator not in ("and", "or")}
    assert signs == {"*", "/", "//", "+", "-", "%", "**"}


def test_what_holds_expressions_is_known() -> None:
    """A new kind of display would have to be measured too."""
    literals = {one.__name__ for one in nodes.Literal.__subclasses__()}
    assert literals == {"Const", "TemplateData", "Tuple", "List", "Dict"}


def test_what_a_template_is_compiled_to_asks_for_its_size() -> None:
    """Filters are looked up by the compiled code in its environment, and `concat` too."""
    source = chat_environment().compile("{% set a %}x{% endset %}{% set b = a + a %}{{ a % 2 }}", raw=True)
    for asked in (
        "concat = environment.concat",
        "environment.filters['_kept']",
        "environment.filters['_modulo']",
    ):
        assert asked in source
    assert BoundedEnvironment.concat is not jinja2.Environment.concat


def test_transformers_makes_its_environment_of_the_class_that_its_module_names() -> None:
    """So `apply_chat_template` compiles in ours, when we ask it what a template gives."""
    from transformers.utils import chat_template_utils as theirs

    from raysvc.chat.tokens.tokenizer import _bounded

    with _bounded():
        found = theirs._cached_compile_jinja_template("{{ 'a' }}").environment
    assert isinstance(found, BoundedEnvironment)
    plain = theirs._cached_compile_jinja_template("{{ 'a' }}").environment
    assert not isinstance(plain, BoundedEnvironment)
