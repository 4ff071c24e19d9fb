"""Run a template's own syntax tree with holes for texts, asking about a conversation only where the template does.

Always true:
- a literal of the result is what Jinja writes for any conversation that answers the same questions alike;
- an operation that is not listed here raises `NotDerivable`: nothing is guessed;
- what is not a message is computed by the template's own environment.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from jinja2 import nodes
from jinja2.runtime import Undefined

from raysvc.chat.symbols import ABSENT, Hole, NotDerivable, Path, Place, Question

Ask = Callable[[Question], Any]
Segment = str | Hole
Scope = dict[str, Any]
_STRIPS = ("strip", "lstrip", "rstrip", "removeprefix", "removesuffix", "replace", "lower", "upper")
_COMPARE = {
    "eq": operator.eq,
    "ne": operator.ne,
    "lt": operator.lt,
    "lteq": operator.le,
    "gt": operator.gt,
    "gteq": operator.ge,
    "in": lambda a, b: a in b,
    "notin": lambda a, b: a not in b,
}


@dataclass(frozen=True)
class Joined:
    """Texts and holes in a row, from `+` and `~`."""

    parts: tuple[Segment, ...]


@dataclass(frozen=True)
class Messages:
    """The conversation from its `start`-th message on."""

    start: int = 0


@dataclass(frozen=True)
class OneMessage:
    """A message."""

    place: Place


@dataclass(frozen=True)
class Inner:
    """A list or dict inside a message."""

    path: Path
    kind: str


@dataclass(frozen=True)
class LoopState:
    """`loop`, where the loop is over messages from `start` on."""

    start: int


@dataclass(frozen=True)
class LoopIndex:
    """`loop.index0 + offset`."""

    start: int
    offset: int = 0


@dataclass(frozen=True)
class MethodOf:
    """A method of a text that is not known."""

    owner: Hole
    name: str


@dataclass(frozen=True)
class MessageLoop:
    """A loop over messages that stands in a result: its body runs for every message from `start` on.

    Attributes:
        node: the loop.
        start: first message.
        scope: variables that the body reads.
    """

    node: nodes.For
    start: int
    scope: tuple[tuple[str, Any], ...]


class Tracer:
    """One run over some statements.

    Args:
        environment: of the template.
        ask: answers questions for the conversation at hand, and remembers them.
        in_message: whether a loop over messages is being run; its body must not change anything outside.
    """

    def __init__(self, environment: Any, ask: Ask, in_message: bool) -> None:
        self._environment, self._ask, self._in_message = environment, ask, in_message
        self.written: list[Segment | MessageLoop] = []

    def run(self, body: list[nodes.Node], scope: Scope) -> None:
        """Run statements, writing to `written`."""
        for node in body:
            statement = getattr(self, f"_do_{type(node).__name__.lower()}", None)
            if statement is None:
                raise NotDerivable(type(node).__name__)
            statement(node, scope)

    def _do_output(self, node: nodes.Output, scope: Scope) -> None:
        for child in node.nodes:
            if isinstance(child, nodes.TemplateData):
                self.written.append(child.data)
            else:
                self.written.extend(self._parts(self._value(child, scope)))

    def _do_if(self, node: nodes.If, scope: Scope) -> None:
        for test, body in [(node.test, node.body), *((branch.test, branch.body) for branch in node.elif_)]:
            if self._true(self._value(test, scope)):
                return self.run(body, scope)
        return self.run(node.else_, scope)

    def _do_assign(self, node: nodes.Assign, scope: Scope) -> None:
        value = self._value(node.node, scope)
        if isinstance(node.target, nodes.Name):
            scope[node.target.name] = value
        elif isinstance(node.target, nodes.NSRef) and not self._in_message and not _is_open(value):
            scope[node.target.name][node.target.attr] = value
        else:
            raise NotDerivable("assignment")

    def _do_callblock(self, node: nodes.CallBlock, scope: Scope) -> None:
        """`{% generation %}` writes its body."""
        if (
            not isinstance(node.call.node, nodes.ExtensionAttribute)
            or node.call.node.name != "_generation_support"
        ):
            raise NotDerivable("call block")
        self.run(node.body, scope)

    def _do_for(self, node: nodes.For, scope: Scope) -> None:
        if node.test or node.recursive or node.else_ or not isinstance(node.target, nodes.Name):
            raise NotDerivable("loop")
        over = self._value(node.iter, scope)
        if isinstance(over, Messages):
            self._over_messages(node, over, scope)
        elif isinstance(over, Inner) and over.kind == "list":
            count = self._ask(("length", over.path))
            self._unroll(node, [self._at((*over.path, n)) for n in range(count)], scope)
        elif isinstance(over, list):
            self._unroll(node, over, scope)
        else:
            raise NotDerivable(f"loop over {type(over).__name__}")

    def _over_messages(self, node: nodes.For, over: Messages, scope: Scope) -> None:
        if self._in_message:
            raise NotDerivable("loop over messages in a loop over messages")
        read = {name.name for name in node.find_all(nodes.Name)} - {node.target.name, "loop"}
        known = tuple(
            sorted(((name, scope[name]) for name in read if name in scope), key=lambda item: item[0])
        )
        self.written.append(MessageLoop(node, over.start, known))

    def _unroll(self, node: nodes.For, items: list[Any], scope: Scope) -> None:
        if any(name.name == "loop" for name in node.find_all(nodes.Name)):
            raise NotDerivable("loop variable of an inner loop")
        for item in items:
            self.run(node.body, {**scope, node.target.name: item})

    def _value(self, node: nodes.Node, scope: Scope) -> Any:
        expression = getattr(self, f"_of_{type(node).__name__.lower()}", None)
        if expression is None:
            raise NotDerivable(type(node).__name__)
        return expression(node, scope)

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

    def _of_getattr(self, node: nodes.Getattr, scope: Scope) -> Any:
        owner = self._value(node.node, scope)
        if isinstance(owner, LoopState):
            return self._loop_field(owner, node.attr)
        if isinstance(owner, Hole):
            return MethodOf(owner, node.attr)
        if isinstance(owner, OneMessage | Inner) and node.attr in dir(dict):
            raise NotDerivable(f"dict.{node.attr}")
        return self._field(owner, node.attr, self._environment.getattr)

    def _of_getitem(self, node: nodes.Getitem, scope: Scope) -> Any:
        owner = self._value(node.node, scope)
        if isinstance(node.arg, nodes.Slice):
            return self._slice(owner, node.arg, scope)
        key = self._value(node.arg, scope)
        if isinstance(owner, Messages):
            return self._message(owner, key)
        if isinstance(owner, Hole) and owner.steps and owner.steps[-1][0] == "split" and isinstance(key, int):
            if key not in (0, -1):
                raise NotDerivable("part of a split")
            return owner.then("item", key)
        if _is_open(key) or isinstance(owner, Hole):
            raise NotDerivable("item")
        return self._field(owner, key, self._environment.getitem)

    def _field(self, owner: Any, key: Any, known: Callable[[Any, Any], Any]) -> Any:
        if isinstance(owner, OneMessage):
            return self._at((owner.place, key))
        if isinstance(owner, Inner):
            return self._at((*owner.path, key))
        if _is_open(owner):
            raise NotDerivable(f"field of {type(owner).__name__}")
        return known(owner, key)

    def _at(self, path: Path) -> Any:
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
        return Inner(path, kind) if kind in ("list", "dict") else self._ask(("value", path))

    def _slice(self, owner: Any, arg: nodes.Slice, scope: Scope) -> Any:
        bounds = [
            None if part is None else self._value(part, scope) for part in (arg.start, arg.stop, arg.step)
        ]
        if (
            isinstance(owner, Messages)
            and isinstance(bounds[0], int)
            and bounds[0] >= 0
            and bounds[1:] == [None, None]
        ):
            return Messages(owner.start + bounds[0])
        if _is_open(owner) or any(_is_open(bound) for bound in bounds):
            raise NotDerivable("slice")
        return owner[slice(*bounds)]

    def _message(self, owner: Messages, key: Any) -> Any:
        if isinstance(key, LoopIndex):
            return self._neighbour(owner, key)
        if not isinstance(key, int) or isinstance(key, bool):
            raise NotDerivable("messages[...]")
        count = self._ask(("count",)) if abs(key) > 1 or owner.start else None
        if count is not None and not -count <= key + (owner.start if key >= 0 else 0) < count:
            raise NotDerivable("messages beyond the end")
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
        left, right = self._value(node.left, scope), self._value(node.right, scope)
        if isinstance(left, LoopIndex) and isinstance(right, int):
            return LoopIndex(left.start, left.offset + right)
        if _is_text(left) and _is_text(right):
            return self._join(left, right)
        return self._arithmetic(operator.add, left, right)

    def _of_sub(self, node: nodes.Sub, scope: Scope) -> Any:
        left, right = self._value(node.left, scope), self._value(node.right, scope)
        if isinstance(left, LoopIndex) and isinstance(right, int):
            return LoopIndex(left.start, left.offset - right)
        return self._arithmetic(operator.sub, left, right)

    def _of_mod(self, node: nodes.Mod, scope: Scope) -> Any:
        return self._arithmetic(operator.mod, self._value(node.left, scope), self._value(node.right, scope))

    def _arithmetic(self, operation: Callable[[Any, Any], Any], left: Any, right: Any) -> Any:
        left, right = self._number(left), self._number(right)
        if _is_open(left) or _is_open(right):
            raise NotDerivable("arithmetic")
        return operation(left, right)

    def _number(self, value: Any) -> Any:
        """The loop index itself, where a template computes with it."""
        if isinstance(value, LoopIndex):
            return self._ask(("index0", value.start)) + value.offset
        return value

    def _of_concat(self, node: nodes.Concat, scope: Scope) -> Any:
        return self._join(*(Joined(tuple(self._parts(self._value(part, scope)))) for part in node.nodes))

    def _join(self, *values: Any) -> Any:
        parts: list[Segment] = []
        for value in values:
            for part in value.parts if isinstance(value, Joined) else (value,):
                if parts and isinstance(part, str) and isinstance(parts[-1], str):
                    parts[-1] += part
                else:
                    parts.append(part)
        known = "".join(part for part in parts if isinstance(part, str))
        return known if all(isinstance(part, str) for part in parts) else Joined(tuple(parts))

    def _parts(self, value: Any) -> tuple[Segment, ...]:
        if isinstance(value, Hole) and _is_text(value):
            return (value,)
        if isinstance(value, Joined):
            return value.parts
        if _is_open(value):
            raise NotDerivable(f"output of {type(value).__name__}")
        return (str(value),)

    def _of_and(self, node: nodes.And, scope: Scope) -> Any:
        left = self._value(node.left, scope)
        return self._value(node.right, scope) if self._true(left) else left

    def _of_or(self, node: nodes.Or, scope: Scope) -> Any:
        left = self._value(node.left, scope)
        return left if self._true(left) else self._value(node.right, scope)

    def _of_not(self, node: nodes.Not, scope: Scope) -> bool:
        return not self._true(self._value(node.node, scope))

    def _of_condexpr(self, node: nodes.CondExpr, scope: Scope) -> Any:
        if self._true(self._value(node.test, scope)):
            return self._value(node.expr1, scope)
        return "" if node.expr2 is None else self._value(node.expr2, scope)

    def _true(self, value: Any) -> bool:
        if isinstance(value, Hole):
            return bool(self._ask(("truth", value, None)))
        if isinstance(value, Joined):
            return any(self._true(part) for part in value.parts)
        if isinstance(value, Inner):
            return bool(self._ask(("length", value.path)))
        if isinstance(value, LoopIndex):
            return bool(self._number(value))
        if isinstance(value, Messages):
            return bool(not value.start or self._ask(("count",)) > value.start)
        return bool(value)

    def _of_compare(self, node: nodes.Compare, scope: Scope) -> bool:
        if len(node.ops) != 1:
            raise NotDerivable("chained comparison")
        name = node.ops[0].op
        left, right = self._value(node.expr, scope), self._value(node.ops[0].expr, scope)
        if isinstance(left, LoopIndex) and left.offset == 0 and name in ("eq", "ne") and right == 0:
            return bool(self._ask(("first", left.start))) is (name == "eq")
        left, right = self._number(left), self._number(right)
        if not _is_open(left) and not _is_open(right):
            return bool(_COMPARE[name](left, right))
        question = self._about(name, left, right)
        return bool(self._ask(question)) is (name in ("eq", "in"))

    def _about(self, name: str, left: Any, right: Any) -> Question:
        if name in ("eq", "ne") and isinstance(left, Hole) and isinstance(right, str):
            return ("equals", left, right)
        if name in ("in", "notin") and isinstance(right, Hole) and isinstance(left, str):
            return ("holds", right, left)
        if name in ("in", "notin") and isinstance(left, Hole) and isinstance(right, list):
            return ("among", left, tuple(right))
        raise NotDerivable("comparison")

    def _of_test(self, node: nodes.Test, scope: Scope) -> bool:
        value = self._value(node.node, scope)
        arguments = [self._known(argument, scope) for argument in node.args]
        if isinstance(value, Joined) or (isinstance(value, Hole) and _is_text(value)):
            value = "a text"
        elif isinstance(value, OneMessage):
            value = {}
        elif isinstance(value, Inner | Messages):
            value = {} if isinstance(value, Inner) and value.kind == "dict" else []
        if node.name not in (
            "defined",
            "undefined",
            "string",
            "mapping",
            "iterable",
            "sequence",
            "none",
            "boolean",
        ):
            value = self._number(value)
            if _is_open(value) or value in ("a text", {}, []):
                raise NotDerivable(f"test {node.name}")
        return bool(self._environment.call_test(node.name, value, arguments))

    def _of_filter(self, node: nodes.Filter, scope: Scope) -> Any:
        value = self._value(node.node, scope)
        arguments = [self._known(argument, scope) for argument in node.args]
        named = {pair.key: self._known(pair.value, scope) for pair in node.kwargs}
        if isinstance(value, Hole) and not named:
            if node.name == "trim" and len(arguments) <= 1:
                return value.then("strip", *arguments)
            if node.name == "string" and not arguments:
                return value
        if node.name == "tojson" and isinstance(value, Inner | Hole) and not arguments and not named:
            return _json_of(value)
        if node.name == "length" and isinstance(value, Inner):
            return self._ask(("length", value.path))
        if _is_open(value):
            raise NotDerivable(f"filter {node.name}")
        return self._environment.call_filter(node.name, value, arguments, named)

    def _of_call(self, node: nodes.Call, scope: Scope) -> Any:
        if node.dyn_args or node.dyn_kwargs:
            raise NotDerivable("call")
        called = self._value(node.node, scope)
        arguments = [self._known(argument, scope) for argument in node.args]
        named = {pair.key: self._known(pair.value, scope) for pair in node.kwargs}
        if isinstance(called, MethodOf):
            return self._method(called, arguments, named)
        if isinstance(called, Undefined) or called is not self._environment.globals.get("namespace"):
            raise NotDerivable("call")
        return called(*arguments, **named)

    def _method(self, method: MethodOf, arguments: list[Any], named: dict[str, Any]) -> Any:
        if named:
            raise NotDerivable("call")
        if method.name in ("startswith", "endswith") and len(arguments) == 1:
            kind = "starts" if method.name == "startswith" else "ends"
            return bool(self._ask((kind, method.owner, arguments[0])))
        if method.name in _STRIPS or (method.name == "split" and len(arguments) == 1):
            return method.owner.then(method.name, *arguments)
        raise NotDerivable(f"method {method.name}")

    def _known(self, node: nodes.Node, scope: Scope) -> Any:
        value = self._number(self._value(node, scope))
        if _is_open(value):
            raise NotDerivable("argument")
        return value


def _json_of(value: Inner | Hole) -> Hole:
    return Hole(value.path, (("tojson", ()),)) if isinstance(value, Inner) else value.then("tojson")


def _is_text(value: Any) -> bool:
    """A text with a part that is not known, or one that is: what `+` joins; a split is a list, not a text."""
    if isinstance(value, Hole):
        return not value.steps or value.steps[-1][0] != "split"
    return isinstance(value, str | Joined)


def _is_open(value: Any) -> bool:
    return isinstance(value, Hole | Joined | Messages | OneMessage | Inner | LoopState | LoopIndex | MethodOf)
