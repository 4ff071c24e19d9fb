"""Learn the shape of a conversation from the template's syntax tree, and check it against the real render.

First the tree is traced and everything is asked; what is asked depends only on what was answered before. Then the
result is held against the real render of this row, and the spans are found in it.

Always true:
- a shape that is kept gave the text of the real render for the row it was learned from, turn by turn;
- a span is kept when it begins in the first literal of its turn and its end of turn is in the last one;
- whatever goes wrong, or is not worth it, ends in the leaf `SLOW`, never in an error.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from jinja2 import TemplateError

from raysvc.chat.render.answers import filler
from raysvc.chat.render.derive import Tracer
from raysvc.chat.render.shapes import NO_SPAN, SLOW, FixedTurn, LoopShape, RowShape, TurnShape
from raysvc.chat.render.symbols import ABSENT, Hole, NotDerivable, Path, Place, Segment
from raysvc.chat.render.template import ChatTemplate, Render
from raysvc.chat.render.trees import Asked, Tree
from raysvc.chat.render.turn_spans import TurnFinder
from raysvc.chat.render.values import LoopState, MessageLoop, OneMessage, TurnOf
from raysvc.chat.row_errors import RowFault
from raysvc.chat.source.formats import ChatExample

if TYPE_CHECKING:
    from raysvc.chat.render.shapes import Shapes

FAILURES = (NotDerivable, RowFault, TemplateError, ArithmeticError, LookupError, TypeError, ValueError)
MOST_SHAPES = 2048
MOST_UNPROVED = 64  # rows that may be bad examples of their shape, before the shape is given up
THIS: Place = ("rel", 0)
TRIMS = {"strip", "lstrip", "rstrip"}


@dataclass(frozen=True)
class Traced:
    """A turn as the template writes it, before it is compared.

    Attributes:
        place: of its message.
        segments: literals and holes.
        silent: the message says nothing.
        sure: the segments hold the message for any text.
        fixed_head: whether its header is the same for any text.
    """

    place: int
    segments: tuple[Segment, ...]
    silent: bool = True
    sure: bool = False
    fixed_head: bool = False


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
        self._learned = self._unproved = 0

    def row(self, tree: Tree, example: ChatExample, tools: list[Any] | None) -> Any:
        """Shape of a new kind of conversation, or SLOW."""
        self._learned += 1
        render = self._render(example)
        if render is None or self._learned > MOST_SHAPES:
            return SLOW
        asked = Asked(example.messages, 0)
        try:
            tracer = Tracer(self._template.environment, asked, in_message=False)
            tracer.run(self._template.tree.body, self._template.scope(tools))
            items = self._items(tracer.written, asked, example, render)
            shape = self._row_shape(items, example, render)
            filled = self._shapes.join(shape, replace(example, trained=()))
        except FAILURES:
            tree.insert(asked.path, SLOW)
            return SLOW
        if filled is not None and "".join(filled.parts) != render.text:
            tree.insert(asked.path, SLOW)
            return SLOW
        turns = [part.turn for part in shape.items if isinstance(part, FixedTurn)]
        return self._kept(tree, asked, shape, turns)

    def turn(self, shape: LoopShape, example: ChatExample, place: int) -> Any:
        """Shape of a new kind of turn, or SLOW."""
        loop, render = shape.loop, self._render(example)
        if render is None:
            return SLOW
        target: Any = loop.node.target
        asked = Asked(example.messages, place)
        scope = {**self._template.scope(None), **dict(loop.scope)}
        scope |= {target.name: OneMessage(THIS), "loop": LoopState(loop.start)}
        try:
            tracer = Tracer(self._template.environment, asked, in_message=True)
            tracer.run(loop.node.body, scope)
            traced = self._traced(tracer.written, asked, example, (THIS, place), render)
            turn = self._compared(traced, example, render)
        except FAILURES:
            shape.tree.insert(asked.path, SLOW)
            return SLOW
        return self._kept(shape.tree, asked, turn, [turn])

    def _render(self, example: ChatExample) -> Render | None:
        """The real render, None when the template refuses this row."""
        try:
            return self._template.render(example.messages, example.tools)
        except RowFault:
            return None

    def _kept(self, tree: Tree, asked: Asked, leaf: Any, turns: list[TurnShape]) -> Any:
        """Keep a leaf, unless its row may be a bad example: one whose turn could not be proved."""
        unproved = any(turn.start < 0 and not turn.silent for turn in turns)
        self._unproved += unproved
        if not unproved or self._unproved > MOST_UNPROVED:
            tree.insert(asked.path, leaf)
        return leaf

    def _items(self, written: list[Any], asked: Asked, example: ChatExample, render: Render) -> list[Any]:
        """Literals, holes, loops, and the turns of loops that are written out."""
        items: list[Any] = []
        inside: list[Any] = []
        place = NO_SPAN
        for part in written:
            if isinstance(part, TurnOf):
                if inside:
                    items.append(self._traced(inside, asked, example, (("abs", place), place), render))
                place, inside = part.place, []
            elif place != NO_SPAN:
                inside.append(part)
            else:
                items.append(self._loop(part, example) if isinstance(part, MessageLoop) else part)
        return items

    def _row_shape(self, items: list[Any], example: ChatExample, render: Render) -> RowShape:
        segments = tuple(
            FixedTurn(item.place, self._compared(item, example, render)) if isinstance(item, Traced) else item
            for item in items
        )
        filled = tuple(filler([s]) if isinstance(s, Hole) else s for s in segments)
        first = min((s.loop.start for s in segments if isinstance(s, LoopShape)), default=sys.maxsize)
        fixed = frozenset(s.place for s in segments if isinstance(s, FixedTurn))
        return RowShape(filled, segments, first, fixed)

    def _loop(self, part: MessageLoop, example: ChatExample) -> LoopShape:
        key = (id(part.node), part.start, example.tools is not None, repr(part.scope))
        return self._loops.setdefault(key, LoopShape(part, Tree()))

    def _traced(
        self, written: list[Any], asked: Asked, example: ChatExample, where: tuple[Place, int], render: Render
    ) -> Traced:
        """Ask what the proof of a turn needs to know."""
        segments, (at, place) = _merged(written), where
        if asked(("value", (at, "role"))) != "assistant":
            return Traced(place, segments)
        if at == THIS:
            asked(("role before",))
            asked(("last",))
        elif place:
            asked(("value", (("abs", place - 1), "role")))
        silent = asked(("silent", at))
        sure = _holds_message(segments, at, asked)
        fixed_head = self._fixed_head(render, example, place, segments, asked)
        return Traced(place, segments, silent, sure, fixed_head)

    def _fixed_head(
        self, render: Render, example: ChatExample, place: int, segments: tuple[Segment, ...], asked: Asked
    ) -> bool:
        """Whether the header that `TurnFinder` picks is the same for any text."""
        first = segments[0] if segments and isinstance(segments[0], str) else ""
        for head in self._finder.heads(render, example, place):
            if first.startswith(head):
                return True
            if head.startswith(first):
                following = segments[1 if first else 0 :][:1]
                if not following or not isinstance(following[0], Hole):
                    return False
                if asked(("meets", following[0], head[len(first) :])):
                    return False
        return True

    def _compared(self, traced: Traced, example: ChatExample, render: Render) -> TurnShape:
        """The shape of a turn, when it gives this row's text.

        Raises:
            NotDerivable: it gives another text.
        """
        segments, place = traced.segments, traced.place
        shape = TurnShape(segments, filler(segments), silent=traced.silent)
        blocks = [text for text, owner in zip(render.blocks, render.owners, strict=True) if owner == place]
        if "".join(blocks) != shape.fill(example.messages, place):
            raise NotDerivable("the render differs")
        provable = traced.fixed_head and not traced.silent
        found = self._span(render, example, place, segments) if provable else None
        if found is None:
            return shape
        start, behind, trailer = found
        return replace(shape, start=start, trailer=trailer, said=NO_SPAN if traced.sure else behind)

    def _span(
        self, render: Render, example: ChatExample, place: int, segments: tuple[Segment, ...]
    ) -> tuple[int, int, int] | None:
        """(start, characters behind what is said, trailer) of a span that no text of such a message can move."""
        first = segments[0] if segments and isinstance(segments[0], str) else ""
        last = segments[-1] if segments and isinstance(segments[-1], str) else ""
        try:
            span = self._finder.span(render, example, place)
        except RowFault:
            return None
        behind = len(render.blocks[span.block]) - span.said
        if span.end == span.said or len(last) < behind or span.start > len(first):
            return None
        return span.start, behind, behind - (span.end - span.said)


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


def _holds_message(segments: tuple[Segment, ...], at: Place, asked: Asked) -> bool:
    """Whether segments hold the message for any text: its content as it is or trimmed, every call by name and JSON."""
    content = Hole((at, "content"))
    holes = {(hole.path, hole.steps) for hole in segments if isinstance(hole, Hole)}
    trimmed = any(path == content.path and {name for name, _ in steps} <= TRIMS for path, steps in holes)
    calls = (at, "tool_calls")
    count = asked(("length", calls)) if asked(("kind", calls)) == "list" else 0
    held = [_holds_call((*calls, n), holes, asked) for n in range(count)]  # a list: each of them has to ask
    return all(held) and (trimmed or asked.known(("truth", content, None)) is False)


def _holds_call(call: Path, holes: set[tuple[Path, Any]], asked: Asked) -> bool:
    inner = asked(("kind", (*call, "function")))
    function = (*call, "function") if inner == "dict" else call
    is_dict = asked(("kind", (*function, "arguments"))) == "dict"
    name, arguments = ((*function, "name"), ()), ((*function, "arguments"), (("tojson", ()),))
    return inner in ("dict", ABSENT) and is_dict and name in holes and arguments in holes
