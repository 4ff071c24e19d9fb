"""Run a template's own syntax tree with holes for texts, asking about a conversation only where the template does.

A loop over messages that remembers nothing is not run: it stands in the result, and its body is run on its own for one
message. A loop that does remember (it sets a field of a namespace) is written out, for this many messages.

Always true:
- a literal of the result is what Jinja writes for any conversation that answers the same questions alike;
- a statement that is not listed here raises `NotDerivable`: nothing is guessed.
"""

from __future__ import annotations

from typing import Any

from jinja2 import nodes
from jinja2.utils import Namespace

from raysvc.chat.render.expressions import Expressions
from raysvc.chat.render.lookups import Ask, Scope
from raysvc.chat.render.symbols import NotDerivable, Segment
from raysvc.chat.render.values import (
    CountedLoop,
    Inner,
    MessageLoop,
    Messages,
    OneMessage,
    TurnOf,
)

MOST_WRITTEN_OUT = 64


class Tracer(Expressions):
    """One run over some statements.

    Args:
        environment: of the template.
        ask: answers questions for the conversation at hand, and remembers them.
        in_message: whether this is the body of a loop that stands in a result; it must not change anything outside.
    """

    def __init__(self, environment: Any, ask: Ask, in_message: bool) -> None:
        super().__init__(environment, ask)
        self._in_message = in_message
        self.written: list[Segment | MessageLoop | TurnOf] = []

    def run(self, body: list[nodes.Node], scope: Scope) -> None:
        """Run statements, writing to `written`.

        Raises:
            NotDerivable: a statement or expression is not one of those here.
        """
        for node in body:
            statement = getattr(self, f"_do_{type(node).__name__.lower()}", None)
            if statement is None:
                raise NotDerivable(type(node).__name__)
            statement(node, scope)

    def _do_output(self, node: nodes.Output, scope: Scope) -> None:
        for child in node.nodes:
            self.written.extend(self.parts(self.value(child, scope)))

    def _do_if(self, node: nodes.If, scope: Scope) -> None:
        for test, body in [(node.test, node.body), *((branch.test, branch.body) for branch in node.elif_)]:
            if self.true(self.value(test, scope)):
                return self.run(body, scope)
        return self.run(node.else_, scope)

    def _do_assign(self, node: nodes.Assign, scope: Scope) -> None:
        value = self.value(node.node, scope)
        if isinstance(node.target, nodes.Name):
            scope[node.target.name] = value
        elif isinstance(node.target, nodes.NSRef) and not self._in_message:
            scope[node.target.name][node.target.attr] = value
        else:
            raise NotDerivable("assignment")

    def _do_callblock(self, node: nodes.CallBlock, scope: Scope) -> None:
        """`{% generation %}` writes its body."""
        called = node.call.node
        if not isinstance(called, nodes.ExtensionAttribute) or called.name != "_generation_support":
            raise NotDerivable("call block")
        self.run(node.body, scope)

    def _do_for(self, node: nodes.For, scope: Scope) -> None:
        if node.test or node.recursive or node.else_ or not isinstance(node.target, nodes.Name):
            raise NotDerivable("loop")
        over = self.value(node.iter, scope)
        if isinstance(over, Messages):
            self._over_messages(node, over, scope)
        elif isinstance(over, Inner) and over.kind == "list":
            count = self._ask(("length", over.path))
            self._unroll(node, [self.at((*over.path, n)) for n in range(count)], scope)
        elif isinstance(over, list):
            self._unroll(node, over, scope)
        else:
            raise NotDerivable(f"loop over {type(over).__name__}")

    def _over_messages(self, node: nodes.For, over: Messages, scope: Scope) -> None:
        if self._in_message:
            raise NotDerivable("loop over messages in a loop over messages")
        if over.backwards or next(node.find_all(nodes.NSRef), None) is not None:
            self._write_out(node, over, scope)
            return
        read = {name.name for name in node.find_all(nodes.Name)} - {node.target.name, "loop"}  # type: ignore[attr-defined]
        known = [(name, _frozen(scope[name])) for name in sorted(read) if name in scope]
        self.written.append(MessageLoop(node, over.start, tuple(known)))

    def _write_out(self, node: nodes.For, over: Messages, scope: Scope) -> None:
        count = self._ask(("count",))
        if count > MOST_WRITTEN_OUT:
            raise NotDerivable("long loop")
        places = list(range(over.start, count))
        if over.backwards:
            places.reverse()
        for index, place in enumerate(places):
            loop = CountedLoop(index, len(places))
            target = node.target.name  # type: ignore[attr-defined]
            self.written.append(TurnOf(place))
            self.run(node.body, {**scope, target: OneMessage(("abs", place)), "loop": loop})
            self.written.append(TurnOf(-1))

    def _unroll(self, node: nodes.For, items: list[Any], scope: Scope) -> None:
        """A loop inside a message, or over something known."""
        for index, item in enumerate(items):
            inner = {node.target.name: item, "loop": CountedLoop(index, len(items))}  # type: ignore[attr-defined]
            self.run(node.body, {**scope, **inner})


def _frozen(value: Any) -> Any:
    """A variable as it is when a loop begins; a namespace may change later."""
    if isinstance(value, Namespace):
        return type(value)(**value._Namespace__attrs)
    return value
