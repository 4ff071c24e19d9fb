"""Learn the shape of a conversation from the template's syntax tree, and check it against the real render.

Always true:
- a shape that is kept gave the text of the real render for the row it was learned from, turn by turn;
- a span is kept when it begins in the first literal of its turn and its end of turn is in the last one;
- whatever goes wrong, or is not worth it, ends in the leaf `SLOW`, never in an error.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from jinja2 import TemplateError

from raysvc.chat.derive import Tracer
from raysvc.chat.expressions import Ask
from raysvc.chat.faults import RowFault
from raysvc.chat.formats import ChatExample
from raysvc.chat.shapes import NO_SPAN, SLOW, FixedTurn, LoopShape, RowShape, TurnShape
from raysvc.chat.symbols import Hole, NotDerivable, filler
from raysvc.chat.template import ChatTemplate, Render
from raysvc.chat.trees import Tree
from raysvc.chat.turns import TurnFinder
from raysvc.chat.values import LoopState, MessageLoop, OneMessage, Segment, TurnOf

if TYPE_CHECKING:
    from raysvc.chat.shapes import Shapes

FAILURES = (NotDerivable, RowFault, TemplateError, ArithmeticError, LookupError, TypeError, ValueError)
MOST_SHAPES = 2048
THIS = ("rel", 0)


class Learner:
    """Learns the shapes of one template.

    Args:
        template: for its syntax tree, and to compare with.
        finder: finds the spans of the row a shape is learned from.
        shapes: joins a new shape, to compare it.
    """

    def __init__(self, template: ChatTemplate, finder: TurnFinder, shapes: Shapes) -> None:
        self._template, self._finder, self._shapes = template, finder, shapes
        self._loops: dict[Any, LoopShape] = {}
        self._learned = 0

    def row(self, tree: Tree, example: ChatExample, tools: list[Any] | None) -> Any:
        """Shape of a new kind of conversation, or SLOW."""
        self._learned += 1
        if self._learned > MOST_SHAPES:
            return SLOW

        def make(ask: Ask) -> Any:
            try:
                tracer = Tracer(self._template.environment, ask, in_message=False)
                tracer.run(self._template.tree.body, self._template.scope(tools))
                shape = self._row_shape(tracer.written, ask, example)
                filled = self._shapes.join(shape, example)
                same = filled is not None and "".join(filled.parts) == self._render(example).text
            except FAILURES:
                return SLOW
            return shape if same else SLOW

        return tree.learn(make, example.messages, 0)

    def turn(self, shape: LoopShape, example: ChatExample, place: int) -> Any:
        """Shape of a new kind of turn, or SLOW."""
        loop = shape.loop
        target: Any = loop.node.target

        def make(ask: Ask) -> Any:
            scope = {**self._template.scope(None), **dict(loop.scope)}
            scope |= {target.name: OneMessage(THIS), "loop": LoopState(loop.start)}
            try:
                tracer = Tracer(self._template.environment, ask, in_message=True)
                tracer.run(loop.node.body, scope)
                if ask(("value", (THIS, "role"))) == "assistant":
                    ask(("role before",))
                    ask(("last",))
                    return self._turn_shape(tracer.written, example, place, ask(("silent", THIS)))
                return self._turn_shape(tracer.written, example, place, True)
            except FAILURES:
                return SLOW

        return shape.tree.learn(make, example.messages, place)

    def _row_shape(self, written: list[Any], ask: Ask, example: ChatExample) -> RowShape:
        items: list[Any] = []
        segments: list[Any] = []
        inside: list[Any] = []
        place = NO_SPAN
        for part in written:
            if isinstance(part, TurnOf):
                if inside:
                    items.append(self._fixed(place, inside, ask, example))
                    segments.append(items[-1])
                place, inside = part.place, []
            elif place != NO_SPAN:
                inside.append(part)
            else:
                item = self._item(part, example.tools is not None)
                items.append(item)
                segments.append(item if isinstance(item, LoopShape) else part)
        return RowShape(tuple(items), tuple(segments))

    def _item(self, part: Segment | MessageLoop, has_tools: bool) -> Any:
        if isinstance(part, Hole):
            return filler(part)
        if isinstance(part, str):
            return part
        key = (id(part.node), part.start, has_tools, repr(part.scope))
        return self._loops.setdefault(key, LoopShape(part, Tree()))

    def _fixed(self, place: int, inside: list[Any], ask: Ask, example: ChatExample) -> FixedTurn:
        """A turn of a loop that is written out; its questions are about places counted from the start."""
        at = ("abs", place)
        silent = True
        if ask(("value", (at, "role"))) == "assistant":
            if place:
                ask(("value", (("abs", place - 1), "role")))
            silent = ask(("silent", at))
        return FixedTurn(place, self._turn_shape(inside, example, place, silent))

    def _turn_shape(self, written: list[Any], example: ChatExample, place: int, silent: bool) -> TurnShape:
        segments = _merged(written)
        render = self._render(example)
        text = "".join(p if isinstance(p, str) else filler(p)(example.messages, place) for p in segments)
        blocks = [block for block, owner in zip(render.blocks, render.owners, strict=True) if owner == place]
        if "".join(blocks) != text:
            raise NotDerivable("the render differs")
        start, trailer = (NO_SPAN, 0) if silent else self._span(render, example, place, segments)
        return _shaped(segments, start, trailer, silent)

    def _span(
        self, render: Render, example: ChatExample, place: int, segments: tuple[Segment, ...]
    ) -> tuple[int, int]:
        """(start, trailer) of a span that no text of such a message can move, or (NO_SPAN, 0)."""
        first = segments[0] if segments and isinstance(segments[0], str) else ""
        last = segments[-1] if segments and isinstance(segments[-1], str) else ""
        try:
            heads = self._finder.heads(render, example, place)
            span = self._finder.span(render, example, place)
        except RowFault:
            return NO_SPAN, 0
        if any(head.startswith(first) and head != first for head in heads):
            return NO_SPAN, 0  # whether the block begins with this header depends on its text
        behind = len(render.blocks[span.block]) - span.said
        if span.end == span.said or len(last) < behind or span.start > len(first):
            return NO_SPAN, 0
        return span.start, behind - (span.end - span.said)

    def _render(self, example: ChatExample) -> Render:
        return self._template.render(example.messages, example.tools)


def _merged(written: list[Any]) -> tuple[Segment, ...]:
    segments: list[Segment] = []
    for part in written:
        if not isinstance(part, str | Hole):
            raise NotDerivable("loop in a loop")
        if segments and isinstance(part, str) and isinstance(segments[-1], str):
            segments[-1] += part
        elif part != "":
            segments.append(part)
    return tuple(segments)


def _shaped(segments: tuple[Segment, ...], start: int, trailer: int, silent: bool) -> TurnShape:
    holes = [n for n, part in enumerate(segments) if isinstance(part, Hole)]
    if len(holes) > 1:
        parts = tuple(part if isinstance(part, str) else filler(part) for part in segments)
        return TurnShape(segments, "", None, "", parts, start, trailer, silent)
    if not holes:
        return TurnShape(segments, "".join(map(str, segments)), None, "", (), start, trailer, silent)
    before, after = "".join(map(str, segments[: holes[0]])), "".join(map(str, segments[holes[0] + 1 :]))
    hole = segments[holes[0]]
    assert isinstance(hole, Hole)
    return TurnShape(segments, before, filler(hole), after, (), start, trailer, silent)
