"""Values of a template's expressions, with holes for texts; see `derive`.

Always true:
- an operation that is not listed here raises `NotDerivable`;
- a question is asked only where the template's own control flow needs the answer;
- what does not depend on the conversation is computed by the template's own environment.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

from jinja2 import nodes
from jinja2.runtime import Undefined

from raysvc.chat.render.lookups import Lookups, Scope
from raysvc.chat.render.symbols import Hole, NotDerivable, Question, Segment
from raysvc.chat.render.values import (
    Inner,
    Joined,
    LoopIndex,
    Messages,
    MethodOf,
    OneMessage,
    is_open,
    is_text,
)

STEPS = ("strip", "lstrip", "rstrip", "removeprefix", "removesuffix", "replace", "lower", "upper")
SHAPE_TESTS = ("defined", "undefined", "string", "mapping", "iterable", "sequence", "none", "boolean")
_COMPARE: dict[str, Callable[[Any, Any], Any]] = {
    "eq": operator.eq,
    "ne": operator.ne,
    "lt": operator.lt,
    "lteq": operator.le,
    "gt": operator.gt,
    "gteq": operator.ge,
    "in": lambda a, b: a in b,
    "notin": lambda a, b: a not in b,
}


class Expressions(Lookups):
    """Evaluates expressions; see `Lookups`."""

    def parts(self, value: Any) -> tuple[Segment, ...]:
        """A value as it is written."""
        if isinstance(value, Hole) and is_text(value):
            return (value,)
        if isinstance(value, Joined):
            return value.parts
        if is_open(value):
            raise NotDerivable(f"output of {type(value).__name__}")
        return (str(value),)

    def true(self, value: Any) -> bool:
        """Truth of a value."""
        if isinstance(value, Hole):
            return bool(self._ask(("truth", value, None)))
        if isinstance(value, Joined):
            return any(self.true(part) for part in value.parts)
        if isinstance(value, Inner):
            return bool(self._ask(("length", value.path)))
        if isinstance(value, Messages):
            return bool(not value.start or self._ask(("count",)) > value.start)
        return bool(self._number(value))

    def _of_const(self, node: nodes.Const, scope: Scope) -> Any:
        return node.value

    def _of_templatedata(self, node: nodes.TemplateData, scope: Scope) -> Any:
        return node.data

    def _of_list(self, node: nodes.List, scope: Scope) -> Any:
        return [self._known(item, scope) for item in node.items]

    _of_tuple = _of_list

    def _of_neg(self, node: nodes.Neg, scope: Scope) -> Any:
        return -self._known(node.node, scope)

    def _of_add(self, node: nodes.Add, scope: Scope) -> Any:
        left, right = self.value(node.left, scope), self.value(node.right, scope)
        if isinstance(left, LoopIndex) and type(right) is int:
            return LoopIndex(left.start, left.offset + right)
        if is_text(left) and is_text(right):
            return self._join(left, right)
        return self._arithmetic(operator.add, left, right)

    def _of_sub(self, node: nodes.Sub, scope: Scope) -> Any:
        left, right = self.value(node.left, scope), self.value(node.right, scope)
        if isinstance(left, LoopIndex) and type(right) is int:
            return LoopIndex(left.start, left.offset - right)
        return self._arithmetic(operator.sub, left, right)

    def _of_mod(self, node: nodes.Mod, scope: Scope) -> Any:
        return self._arithmetic(operator.mod, self.value(node.left, scope), self.value(node.right, scope))

    def _arithmetic(self, operation: Callable[[Any, Any], Any], left: Any, right: Any) -> Any:
        left, right = self._number(left), self._number(right)
        if is_open(left) or is_open(right):
            raise NotDerivable("arithmetic")
        return operation(left, right)

    def _of_concat(self, node: nodes.Concat, scope: Scope) -> Any:
        return self._join(*(Joined(self.parts(self.value(part, scope))) for part in node.nodes))

    def _join(self, *values: Any) -> Any:
        parts: list[Segment] = []
        for value in values:
            for part in value.parts if isinstance(value, Joined) else (value,):
                if parts and isinstance(part, str) and isinstance(parts[-1], str):
                    parts[-1] += part
                else:
                    parts.append(part)
        if any(isinstance(part, Hole) for part in parts):
            return Joined(tuple(parts))
        return "".join(map(str, parts))

    def _of_and(self, node: nodes.And, scope: Scope) -> Any:
        left = self.value(node.left, scope)
        return self.value(node.right, scope) if self.true(left) else left

    def _of_or(self, node: nodes.Or, scope: Scope) -> Any:
        left = self.value(node.left, scope)
        return left if self.true(left) else self.value(node.right, scope)

    def _of_not(self, node: nodes.Not, scope: Scope) -> bool:
        return not self.true(self.value(node.node, scope))

    def _of_condexpr(self, node: nodes.CondExpr, scope: Scope) -> Any:
        if self.true(self.value(node.test, scope)):
            return self.value(node.expr1, scope)
        if node.expr2 is not None:
            return self.value(node.expr2, scope)
        return self._environment.undefined()

    def _of_compare(self, node: nodes.Compare, scope: Scope) -> bool:
        if len(node.ops) != 1:
            raise NotDerivable("chained comparison")
        name = node.ops[0].op
        left, right = self.value(node.expr, scope), self.value(node.ops[0].expr, scope)
        if isinstance(left, LoopIndex) and left.offset == 0 and name in ("eq", "ne") and right == 0:
            return bool(self._ask(("first", left.start))) is (name == "eq")
        left, right = self._number(left), self._number(right)
        if not is_open(left) and not is_open(right):
            return bool(_COMPARE[name](left, right))
        return bool(self._ask(_about(name, left, right))) is (name in ("eq", "in"))

    def _of_test(self, node: nodes.Test, scope: Scope) -> bool:
        value = self._number(self.value(node.node, scope))
        arguments = [self._known(argument, scope) for argument in node.args]
        if is_open(value):
            if node.name not in SHAPE_TESTS:
                raise NotDerivable(f"test {node.name}")
            value = _stand_in(value)
        return bool(self._environment.call_test(node.name, value, arguments))

    def _of_filter(self, node: nodes.Filter, scope: Scope) -> Any:
        if node.node is None:
            raise NotDerivable("filter block")
        value = self.value(node.node, scope)
        arguments = [self._known(argument, scope) for argument in node.args]
        named = {pair.key: self._known(pair.value, scope) for pair in node.kwargs}
        if is_open(value):
            if named:
                raise NotDerivable("filter with names")
            return self._open_filter(node.name, value, arguments)
        return self._environment.call_filter(node.name, value, arguments, named)

    def _open_filter(self, name: str, value: Any, arguments: list[Any]) -> Any:
        if name == "trim" and isinstance(value, Hole) and is_text(value):
            return value.then("strip", *arguments)
        if name == "tojson" and isinstance(value, Inner | Hole) and not arguments:
            return Hole(value.path, (*getattr(value, "steps", ()), ("tojson", ())))
        if name in ("length", "count") and isinstance(value, Inner):
            return self._ask(("length", value.path))
        if name in ("length", "count") and isinstance(value, Messages):
            return self._ask(("count",)) - value.start
        if name == "string" and is_text(value):
            return value
        raise NotDerivable(f"filter {name}")

    def _of_call(self, node: nodes.Call, scope: Scope) -> Any:
        if node.dyn_args or node.dyn_kwargs:
            raise NotDerivable("call")
        called = self.value(node.node, scope)
        arguments = [self._known(argument, scope) for argument in node.args]
        named = {pair.key: self._known(pair.value, scope) for pair in node.kwargs}
        if isinstance(called, MethodOf):
            return self._method(called, arguments, named)
        if isinstance(called, Undefined):
            raise NotDerivable("call of nothing")
        of_text = type(getattr(called, "__self__", None)) is str
        if of_text or called is self._environment.globals.get("namespace"):
            return called(*arguments, **named)
        raise NotDerivable("call")

    def _method(self, method: MethodOf, arguments: list[Any], named: dict[str, Any]) -> Any:
        if named or not is_text(method.owner):
            raise NotDerivable("call with names")
        if method.name in ("startswith", "endswith") and len(arguments) == 1:
            kind = "starts" if method.name == "startswith" else "ends"
            return bool(self._ask((kind, method.owner, arguments[0])))
        if method.name in STEPS or (method.name == "split" and len(arguments) == 1):
            return method.owner.then(method.name, *arguments)
        raise NotDerivable(f"method {method.name}")


def _about(name: str, left: Any, right: Any) -> Question:
    """The question of a comparison."""
    if name in ("eq", "ne") and isinstance(left, Hole) and isinstance(right, str) and is_text(left):
        return ("equals", left, right)
    if name in ("in", "notin") and isinstance(right, Hole) and isinstance(left, str) and is_text(right):
        return ("holds", right, left)
    if name in ("in", "notin") and isinstance(left, Hole) and isinstance(right, list) and is_text(left):
        return ("among", left, tuple(right))
    raise NotDerivable("comparison")


def _stand_in(value: Any) -> Any:
    """A known value of the same type, for tests that ask for no more."""
    if is_text(value):
        return "text"
    if isinstance(value, OneMessage):
        return {}
    if isinstance(value, Messages):
        return []
    if isinstance(value, Inner):
        return {} if value.kind == "dict" else []
    raise NotDerivable("test")
