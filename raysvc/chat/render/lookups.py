"""What names, fields and items of a template's expressions stand for; see `derive`.

Always true:
- what is in a message is a hole, or a value that was asked for;
- what is not in a message is looked up by the template's own environment.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from jinja2 import nodes

from raysvc.chat.render.symbols import ABSENT, Hole, NotDerivable, Path, Question
from raysvc.chat.render.values import (
    CountedLoop,
    Inner,
    LoopIndex,
    LoopState,
    Messages,
    MethodOf,
    OneMessage,
    is_open,
)

Ask = Callable[[Question], Any]
Scope = dict[str, Any]


class Lookups:
    """Evaluates the expressions that look something up.

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

    def _of_name(self, node: nodes.Name, scope: Scope) -> Any:
        if node.name in scope:
            return scope[node.name]
        found = self._environment.globals.get(node.name)
        return self._environment.undefined(name=node.name) if found is None else found

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

    def _number(self, value: Any) -> Any:
        """The loop index itself, where a template computes with it."""
        if isinstance(value, LoopIndex):
            return self._ask(("index0", value.start)) + value.offset
        return value

    def _known(self, node: nodes.Node, scope: Scope) -> Any:
        value = self._number(self.value(node, scope))
        if is_open(value):
            raise NotDerivable("open argument")
        return value
