"""Jinja's own compiler, with shorter Python for what chat templates do most.

Looking a field up in the sandbox costs about as much as all else together. Here a lookup of a constant name in
a plain dict is an inline `d[k]`, and everything else goes the sandbox's way. Loops also say which message they are at.

Always true:
- a template renders the text that `transformers` renders, and fails where it fails;
- a lookup that is not "constant public name in a dict, or a field of `loop`" is left to the sandbox;
- the first statement of every loop over a single name reports the item, the statement after an outermost loop its end.
"""

from __future__ import annotations

from typing import Any

from jinja2 import nodes
from jinja2.compiler import CodeGenerator, Frame
from jinja2.environment import Environment

LOOP_FIELDS = frozenset({"first", "last", "index", "index0", "length", "revindex", "revindex0"})
_DICT_NAMES = frozenset(dir(dict))


class MarkingCodeGenerator(CodeGenerator):
    """Jinja's code, and loops that call `environment.enter_item(item)` and `environment.leave_loop()`."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._bodies: dict[int, nodes.Node] = {}
        self._depth = 0

    def visit_For(self, node: nodes.For, frame: Frame) -> None:  # noqa: N802
        self._bodies[id(node.body)] = node.target
        self._depth += 1
        super().visit_For(node, frame)
        self._depth -= 1
        if self._depth == 0 and frame.buffer is None and not node.recursive:
            self.writeline("environment.leave_loop()")

    def blockvisit(self, nodes_: Any, frame: Frame) -> None:
        target = self._bodies.pop(id(nodes_), None)
        if isinstance(target, nodes.Name) and frame.buffer is None:
            self.writeline(f"environment.enter_item({frame.symbols.ref(target.name)})")
        super().blockvisit(nodes_, frame)


class ChatCodeGenerator(MarkingCodeGenerator):
    """The same with short lookups; needs `environment.item_at`."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._temporaries = 0

    def visit_Getattr(self, node: nodes.Getattr, frame: Frame) -> None:  # noqa: N802
        if self._plain_name(node.attr):
            self._lookup(node.node, node.attr, "getattr", frame)
        elif isinstance(node.node, nodes.Name) and node.node.name == "loop" and node.attr in LOOP_FIELDS:
            self._loop_field(node, frame)
        else:
            super().visit_Getattr(node, frame)

    def visit_Getitem(self, node: nodes.Getitem, frame: Frame) -> None:  # noqa: N802
        arg = node.arg
        if isinstance(arg, nodes.Const) and isinstance(arg.value, str) and self._plain_name(arg.value):
            self._lookup(node.node, arg.value, "getitem", frame)
        elif isinstance(arg, nodes.Slice):
            super().visit_Getitem(node, frame)
        else:
            self.write("environment.item_at(")
            self.visit(node.node, frame)
            self.write(", ")
            self.visit(arg, frame)
            self.write(")")

    def visit_Not(self, node: nodes.UnaryExpr, frame: Frame) -> None:  # noqa: N802
        """`not x.y` needs no Undefined object: a missing key is false anyway."""
        inner = node.node
        if isinstance(inner, nodes.Getattr) and self._plain_name(inner.attr):
            held = self._temporary()
            self.write(f"(not ({held}.get({inner.attr!r}) if ({held} := ")
            self.visit(inner.node, frame)
            self.write(f").__class__ is dict else environment.getattr({held}, {inner.attr!r})))")
        else:
            super().visit_Not(node, frame)

    def _lookup(self, owner: nodes.Expr, name: str, method: str, frame: Frame) -> None:
        held = self._temporary()
        self.write(f"({held}[{name!r}] if ({held} := ")
        self.visit(owner, frame)
        self.write(f").__class__ is dict and {name!r} in {held} else environment.{method}({held}, {name!r}))")

    def _loop_field(self, node: nodes.Getattr, frame: Frame) -> None:
        held = self._temporary()
        self.write(f"({held}.{node.attr} if ({held} := ")
        self.visit(node.node, frame)
        self.write(f").__class__ is LoopContext else environment.getattr({held}, {node.attr!r}))")

    def _temporary(self) -> str:
        self._temporaries += 1
        return f"held_{self._temporaries}"

    def _plain_name(self, name: str) -> bool:
        return not name.startswith("_") and name not in _DICT_NAMES and name not in LOOP_FIELDS


def item_at(environment: Environment, owner: Any, key: Any) -> Any:
    """`environment.getitem`, with the usual case first: a list and a number that it has."""
    try:
        if owner.__class__ is list:
            return owner[key]
    except (TypeError, LookupError, AttributeError):
        pass
    return environment.getitem(owner, key)
