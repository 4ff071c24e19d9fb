"""Jinja's sandbox, where no single step of a template takes more than it may (`sizes`).

1. `*`, `**` and `%` become calls of filters that look at their values first.
2. What is made by `+`, `~` or as a display of a list and then kept, in a variable or for a call, passes `kept`. What is only
   written does not: whoever renders counts that.
3. A method is called if a table has it, and measured before, where it may make much.
4. Filters that may make much are measured before they run, or after.

Always true:
- a template in which nothing is too large renders what it renders in Jinja's own sandbox;
- it has no filter that its author did not write, except those whose names begin with an underscore;
- a constant that is too large ends the compilation, also where no row would come by it.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import update_wrapper
from types import BuiltinMethodType, MethodType
from typing import Any

from jinja2 import nodes, pass_environment
from jinja2.exceptions import SecurityError, TemplateSyntaxError
from jinja2.runtime import LoopContext
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace
from jinja2.visitor import NodeTransformer

from raysvc.chat.bounds import sizes
from raysvc.chat.bounds.sizes import FEW, FILTERS, FORMATS, FREE_METHODS, GROWING, METHODS, kept

MAX_TEMPLATE = 1 << 20  # characters; the longest that we know has 20,000
KEPT = "_kept"
_OWN: dict[str, Callable[..., Any]] = {
    KEPT: kept,
    "_times": sizes.times,
    "_power": sizes.power,
    "_modulo": sizes.modulo,
}
_OPERATORS = {nodes.Mul: "_times", nodes.Pow: "_power", nodes.Mod: "_modulo"}
_SUMS = (nodes.Add, nodes.Concat)
_OF_DICTS = frozenset(dir(dict))
_DATA = (str, int, bool, list, dict)
_SAFE: dict[type, frozenset[str]] = {  # attributes that Jinja's sandbox lets every template have
    str: frozenset(name for name in dir(str) if name[0] != "_") - {"format", "format_map"},
    dict: frozenset(("get", "items", "keys", "values")),
    LoopContext: frozenset(
        ("first", "last", "index", "index0", "revindex", "length", "previtem", "nextitem")
    ),
}
_DISPLAYS = (nodes.List, nodes.Tuple, nodes.Dict)


class BoundedEnvironment(ImmutableSandboxedEnvironment):
    """See the module; the arguments are those of its base."""

    concat = staticmethod(sizes.concat)

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.filters: _Filters = _Filters(self.filters)

    def _parse(self, source: str, *args: Any) -> nodes.Template:
        if len(source) > MAX_TEMPLATE:
            raise TemplateSyntaxError(f"it has more than {MAX_TEMPLATE:,} characters", 1)
        return super()._parse(source, *args)

    def _generate(self, source: nodes.Template, *args: Any, **kwargs: Any) -> str:
        return super()._generate(_CheckInserter().visit(source), *args, **kwargs)

    def getattr(self, obj: Any, attribute: str) -> Any:
        """Does what Jinja does, without its questions where their answers are known."""
        kind = type(obj)
        if kind is dict and attribute not in _OF_DICTS:
            if attribute in obj:
                return obj[attribute]
            return self.undefined(obj=obj, name=attribute)
        if attribute in _SAFE.get(kind, ()):
            return getattr(obj, attribute)
        if isinstance(obj, Namespace) and attribute[:1] != "_":
            value = getattr(obj, attribute, None)
            if type(value) in _DATA:
                return value
        return super().getattr(obj, attribute)

    def call(__self, __context: Any, __obj: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: N805  as in Jinja
        """Any call of a template.

        Raises:
            SecurityError: of a method that no table has.
        """
        kind = type(__obj)
        if kind is BuiltinMethodType or (kind is MethodType and isinstance(__obj.__self__, str)):
            kwargs.pop("_loop_vars", None)
            kwargs.pop("_block_vars", None)
            name = __obj.__name__
            if name not in FREE_METHODS and (args or kwargs):
                if name not in METHODS:
                    raise SecurityError(f"method {name!r} is not offered to templates")
                METHODS[name](__obj.__self__, *args, **kwargs)
            return __obj(*args, **kwargs)
        made = super().call(__context, __obj, *args, **kwargs)
        return kept(made) if type(made) is dict else made

    def wrap_str_format(self, value: Any) -> Any:
        """`str.format` and `format_map`, however a template comes by them."""
        run = super().wrap_str_format(value)
        return run and _checked(run, FORMATS, value.__self__)


class _Filters(dict[str, Callable[..., Any]]):
    """Filters by name, each with its check."""

    def __init__(self, given: dict[str, Callable[..., Any]]) -> None:
        super().__init__({name: _bounded(name, run) for name, run in given.items()})
        self.measured(**_OWN, sum=pass_environment(sizes.summed), trim=sizes.trimmed)

    def measured(self, **given: Callable[..., Any]) -> None:
        """Add filters that measure for themselves."""
        self.update(given)

    def __setitem__(self, name: str, run: Callable[..., Any]) -> None:
        super().__setitem__(name, _bounded(name, run))


def _bounded(name: str, run: Callable[..., Any]) -> Callable[..., Any]:
    if name not in FILTERS and name not in GROWING:
        return run
    check = FILTERS.get(name)
    first = 1 if hasattr(run, "jinja_pass_arg") else 0
    is_linear = name not in GROWING and name != "join"  # without arguments

    def bounded(*args: Any, **kwargs: Any) -> Any:
        if len(args) == 1 + first and not kwargs and is_linear:
            return run(*args)
        if name == "join" and not hasattr(args[first], "__len__"):
            args = (*args[:first], list(args[first]), *args[first + 1 :])
        if check is not None:
            check(*args[first:], **kwargs)
        made = run(*args, **kwargs)
        return kept(made) if isinstance(made, str) else made

    return update_wrapper(bounded, run)


def _checked(run: Callable[..., Any], check: Callable[..., None], owner: Any) -> Callable[..., Any]:
    def checked(*args: Any, **kwargs: Any) -> Any:
        check(owner, *args, **kwargs)
        return run(*args, **kwargs)

    return update_wrapper(checked, run)


class _CheckInserter(NodeTransformer):
    """Puts the calls of the module's steps 1 and 2 into a template."""

    def __init__(self) -> None:
        self._free: set[int] = (
            set()
        )  # ids of nodes whose value is only written, or a part of one that is kept

    def visit_Output(self, node: nodes.Output) -> nodes.Node:  # noqa: N802  Jinja calls it so
        """Returns what is written."""
        self._leave(node.nodes)
        return self.generic_visit(node)

    def visit_Mul(self, node: nodes.BinExpr) -> nodes.Node:  # noqa: N802  Jinja calls it so
        """One of the operators of step 1."""
        self.generic_visit(node)
        return _filter(node.left, _OPERATORS[type(node)], [node.right])

    visit_Pow = visit_Mod = visit_Mul  # noqa: N815

    def visit_Add(self, node: nodes.Expr) -> nodes.Node:  # noqa: N802  Jinja calls it so
        """One of the makers of step 2."""
        if (isinstance(node, nodes.Tuple) and node.ctx != "load") or _is_constant(node):
            return self.generic_visit(node)
        is_free = id(node) in self._free
        self._leave(node.iter_child_nodes())
        self.generic_visit(node)
        if isinstance(node, nodes.Concat):
            node.nodes = _in_groups(node.nodes)
        return node if is_free else _filter(node, KEPT, [])

    visit_Concat = visit_List = visit_Tuple = visit_Dict = visit_Add  # noqa: N815

    def _leave(self, found: Any) -> None:
        """Take expressions, and those that are a part of their values, for free."""
        for each in found:
            if isinstance(each, nodes.CondExpr):
                self._leave((each.expr1, each.expr2))
            elif isinstance(each, nodes.Pair):
                self._leave((each.key, each.value))
            elif isinstance(each, (*_SUMS, *_DISPLAYS)):
                self._free.add(id(each))


def _in_groups(texts: list[nodes.Expr]) -> list[nodes.Expr]:
    """Joins the texts of a long `~` some at a time, and measures each result."""
    while len(texts) > FEW:
        groups = [texts[at : at + FEW] for at in range(0, len(texts), FEW)]
        texts = [_filter(nodes.Concat(group, lineno=group[0].lineno), KEPT, []) for group in groups]
    return texts


def _filter(node: nodes.Expr, name: str, args: list[nodes.Expr]) -> nodes.Filter:
    return nodes.Filter(node, name, args, [], None, None, lineno=node.lineno, environment=node.environment)


def _is_constant(node: nodes.Node) -> bool:
    if isinstance(node, nodes.Const | nodes.TemplateData):
        return True
    return isinstance(node, (*_DISPLAYS, nodes.Pair)) and all(map(_is_constant, node.iter_child_nodes()))
