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

from raysvc.chat.symbols import ABSENT, Hole, NotDerivable, Path, Question, Segment
from raysvc.chat.values import (
    CountedLoop,
    Inner,
    Joined,
    LoopIndex,
    LoopState,
    Messages,
    MethodOf,
    OneMessage,
    is_open,
    is_text,
)

Ask = Callable[[Question], Any]
Scope = dict[str, Any]
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


class Expressions:
    """Evaluates expressions.

    Args:
        environment: of the template.
        ask: answers questions for the conversation at hand, and remembers them.
    """

    def __init__(self, environment: Any, ask: Ask) -> None:
        self._environment, self._ask = environment, ask

    def value(self, node: nodes.Node, scope: Scope) -> Any:
        """Value of an expression.

        Raises:
            NotDerivable: it is not one of the operations here.
        """
        expression = getattr(self, f"_of_{type(node).__name__.lower()}", None)
        if expression is None:
            raise NotDerivable(type(node).__name__)
        return expression(node, scope)

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

    def at(self, path: Path) -> Any:
        """What is at a path: a hole for a text, the value itself where it is short, a list or dict to look into."""
        if path[-1] == "role" and len(path) == 2:
            return self._ask(("value", path))
        kind = self._ask(("kind", path))
        if kind == "str":
            return Hole(path)
        if kind == ABSENT:
            return self._environment.undefined(name=str(path[-1]))
        if kind == "none":
            return None
        if kind in ("bool", "int"):
            return self._ask(("value", path))
        if kind in ("list", "dict"):
            return Inner(path, kind)
        raise NotDerivable(f"value of kind {kind}")

    def _of_const(self, node: nodes.Const, scope: Scope) -> Any:
        return node.value

    def _of_templatedata(self, node: nodes.TemplateData, scope: Scope) -> Any:
        return node.data

    def _of_name(self, node: nodes.Name, scope: Scope) -> Any:
        if node.name in scope:
            return scope[node.name]
        found = self._environment.globals.get(node.name)
        return self._environment.undefined(name=node.name) if found is None else found

    def _of_list(self, node: nodes.List, scope: Scope) -> Any:
        return [self._known(item, scope) for item in node.items]

    _of_tuple = _of_list

    def _of_neg(self, node: nodes.Neg, scope: Scope) -> Any:
        return -self._known(node.node, scope)

    def _of_getattr(self, node: nodes.Getattr, scope: Scope) -> Any:
        owner = self.value(node.node, scope)
        if isinstance(owner, LoopState):
            return self._loop_field(owner, node.attr)
        if isinstance(owner, CountedLoop):
            return owner.field(node.attr)
        if isinstance(owner, Hole):
            return MethodOf(owner, node.attr)
        if isinstance(owner, OneMessage | Inner) and node.attr in dir(dict):
            raise NotDerivable(f"dict.{node.attr}")
        return self._field(owner, node.attr, self._environment.getattr)

    def _of_getitem(self, node: nodes.Getitem, scope: Scope) -> Any:
        owner = self.value(node.node, scope)
        if isinstance(node.arg, nodes.Slice):
            return self._slice(owner, node.arg, scope)
        key = self.value(node.arg, scope)
        if isinstance(owner, Messages):
            return self._message(owner, key)
        if isinstance(owner, Hole):
            if owner.steps[-1:] and owner.steps[-1][0] == "split" and key in (0, -1):
                return owner.then("item", key)
            raise NotDerivable("item of a text")
        if is_open(key):
            raise NotDerivable("open item")
        return self._field(owner, key, self._environment.getitem)

    def _field(self, owner: Any, key: Any, known: Callable[[Any, Any], Any]) -> Any:
        if isinstance(owner, OneMessage):
            return self.at((owner.place, key))
        if isinstance(owner, Inner):
            return self.at((*owner.path, key))
        if is_open(owner):
            raise NotDerivable(f"field of {type(owner).__name__}")
        return known(owner, key)

    def _slice(self, owner: Any, arg: nodes.Slice, scope: Scope) -> Any:
        parts = (arg.start, arg.stop, arg.step)
        bounds = [None if part is None else self._known(part, scope) for part in parts]
        if isinstance(owner, Messages) and not owner.backwards:
            if bounds == [None, None, -1]:
                return Messages(owner.start, backwards=True)
            if isinstance(bounds[0], int) and bounds[0] >= 0 and bounds[1:] == [None, None]:
                return Messages(owner.start + bounds[0])
        if is_open(owner):
            raise NotDerivable("slice")
        return owner[slice(*bounds)]

    def _message(self, owner: Messages, key: Any) -> OneMessage:
        if owner.backwards:
            raise NotDerivable("message of a turned list")
        if isinstance(key, LoopIndex):
            return self._neighbour(owner, key)
        if type(key) is not int:
            raise NotDerivable("message by name")
        if key not in (0, -1) or owner.start:
            count = self._ask(("count",)) - owner.start
            if not -count <= key < count:
                raise NotDerivable("message beyond an end")
        return OneMessage(("abs", key + owner.start if key >= 0 else key))

    def _neighbour(self, owner: Messages, key: LoopIndex) -> OneMessage:
        offset = key.offset + owner.start - key.start
        if offset > 1 or offset < -1:
            raise NotDerivable("message far away")
        if (offset == 1 and self._ask(("last",))) or (offset == -1 and self._ask(("first", key.start))):
            raise NotDerivable("message beyond an end")
        return OneMessage(("rel", offset))

    def _loop_field(self, loop: LoopState, name: str) -> Any:
        if name in ("index0", "index"):
            return LoopIndex(loop.start, int(name == "index"))
        if name == "first":
            return self._ask(("first", loop.start))
        if name == "last":
            return self._ask(("last",))
        raise NotDerivable(f"loop.{name}")

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

    def _number(self, value: Any) -> Any:
        """The loop index itself, where a template computes with it."""
        if isinstance(value, LoopIndex):
            return self._ask(("index0", value.start)) + value.offset
        return value

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

    def _known(self, node: nodes.Node, scope: Scope) -> Any:
        value = self._number(self.value(node, scope))
        if is_open(value):
            raise NotDerivable("open argument")
        return value


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
