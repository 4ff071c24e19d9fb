"""A template taken apart: which literals and texts a conversation gives, learned from the template itself.

The first row of a shape is traced (`derive`) and rendered; its questions and answers lead later rows of that shape to the
same literals, which are then joined with their own texts. What cannot be traced is rendered as ever.

Always true:
- every shape was compared with the real render of the row it was learned from;
- a row whose answers lead nowhere is learned, a row that cannot be learned is rendered;
- the spans of a shape lie in its literals at both ends, so they hold for any text in between.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from jinja2 import TemplateError

from raysvc.chat.derive import Ask, LoopState, MessageLoop, OneMessage, Tracer
from raysvc.chat.faults import RowFault
from raysvc.chat.formats import ChatExample
from raysvc.chat.symbols import Answer, Hole, NotDerivable, filler
from raysvc.chat.template import ChatTemplate, Render
from raysvc.chat.trees import Tree
from raysvc.chat.turns import TurnFinder

MAX_TOOL_SETS = 256


@dataclass(frozen=True, slots=True)
class TurnShape:
    """What a message gives.

    Attributes:
        before: literal before the only text; the whole literal when there is none.
        fill: gives that text; None when there is none.
        after: literal behind it.
        parts: the segments when there are several texts, else empty.
        start: first character under loss, from the start; below zero when a loss cannot be proved here.
        trailer: characters behind the end of turn.
        silent: the message says nothing, and is not trained.
        segments: the same as literals and holes.
    """

    before: str
    fill: Answer | None
    after: str
    parts: tuple[str | Answer, ...]
    start: int = -1
    trailer: int = 0
    silent: bool = False
    segments: tuple[str | Hole, ...] = ()


@dataclass(slots=True)
class LoopShape:
    """A loop over messages, with what is known of its turns."""

    loop: MessageLoop
    tree: Tree


@dataclass(frozen=True, slots=True)
class RowShape:
    """What a conversation gives: literals, texts and loops, in order."""

    items: tuple[str | Answer | LoopShape, ...]
    segments: tuple[str | Hole | LoopShape, ...] = ()


class Slow:
    """A leaf for what has to be rendered."""


SLOW = Slow()


@dataclass(slots=True)
class Filled:
    """A conversation as its shape gives it.

    Attributes:
        text: the render.
        spans: (start, end, closed) characters under loss.
        head: characters before the first turn that is not the system's.
        turns: characters where the user begins to speak.
    """

    text: str
    spans: list[tuple[int, int, bool]]
    head: int
    turns: tuple[int, ...]


class Shapes:
    """What is known of one template.

    Args:
        template: for its syntax tree, and to compare with.
        finder: finds the spans of the row a shape is learned from.
    """

    def __init__(self, template: ChatTemplate, finder: TurnFinder) -> None:
        self._template, self._finder = template, finder
        self._trees: dict[bytes, tuple[list[Any] | None, Tree]] = {}
        self._loops: dict[Any, LoopShape] = {}

    def fill(self, example: ChatExample) -> Filled | None:
        """The conversation from its shape, or None when it has to be rendered."""
        known = self._tree(example.tools)
        if known is None:
            return None
        tools, tree = known
        messages = example.messages
        shape = tree.find(messages, 0)
        if shape is None:
            shape = self._learn_row(tree, example, tools)
        return self._join(shape, example) if shape is not SLOW else None

    def row_tree(self) -> Tree:
        """What is known of rows without tools."""
        known = self._tree(None)
        assert known is not None
        return known[1]

    def _tree(self, tools: list[Any] | None) -> tuple[list[Any] | None, Tree] | None:
        import orjson

        key = b"" if tools is None else orjson.dumps(tools)
        if key not in self._trees:
            if tools is not None and len(self._trees) >= MAX_TOOL_SETS:
                return None
            self._trees[key] = (tools, Tree())
        return self._trees[key]

    def _join(self, shape: RowShape, example: ChatExample) -> Filled | None:
        messages = example.messages
        parts: list[str] = []
        filled = Filled("", [], -1, ())
        at = 0
        for item in shape.items:
            if item.__class__ is LoopShape:
                end = self._join_loop(item, example, parts, at, filled)
                if end < 0:
                    return None
                at = end
            else:
                text = item if item.__class__ is str else item(messages, 0)
                parts.append(text)
                at += len(text)
        filled.text = "".join(parts)
        filled.head = max(filled.head, 0)
        return filled

    def _join_loop(
        self, shape: LoopShape, example: ChatExample, parts: list[str], at: int, filled: Filled
    ) -> int:
        """Add the turns of a loop; the new length of the text, or -1 when a turn has to be rendered."""
        messages, trained, find = example.messages, set(example.trained), shape.tree.find
        turns = []
        for place in range(shape.loop.start, len(messages)):
            turn = find(messages, place)
            if turn is None:
                turn = self._learn_turn(shape, example, place)
            if turn is SLOW:
                return -1
            begin = at
            if turn.fill is not None:
                text = turn.fill(messages, place)
                parts += (turn.before, text, turn.after)
                at += len(turn.before) + len(text) + len(turn.after)
            elif turn.parts:
                text = "".join([p if p.__class__ is str else p(messages, place) for p in turn.parts])
                parts.append(text)
                at += len(text)
            else:
                parts.append(turn.before)
                at += len(turn.before)
            role = messages[place]["role"]
            if role == "user":
                turns.append(begin)
            if filled.head < 0 and at > begin and role not in ("system", "developer"):
                filled.head = begin
            if place in trained and not turn.silent:
                if turn.start < 0:
                    return -1
                filled.spans.append((begin + turn.start, at - turn.trailer, True))
        filled.turns += tuple(turns)
        return at

    def _learn_row(self, tree: Tree, example: ChatExample, tools: list[Any] | None) -> Any:
        def make(ask: Ask) -> Any:
            try:
                tracer = Tracer(self._template.environment, ask, in_message=False)
                tracer.run(self._template.tree.body, self._template.scope(tools))
                items = tuple(self._item(part, tools is not None) for part in tracer.written)
                segments = tuple(
                    item if isinstance(item, LoopShape) else part
                    for item, part in zip(items, tracer.written, strict=True)
                )
                shape = RowShape(items, segments)
                filled = self._join(shape, example)
                same = filled is not None and filled.text == self._render(example).text
            except UNKNOWN:
                return SLOW
            return shape if same else SLOW

        return tree.learn(make, example.messages, 0)

    def _item(self, part: str | Hole | MessageLoop, has_tools: bool) -> str | Answer | LoopShape:
        if isinstance(part, Hole):
            return filler(part)
        if isinstance(part, str):
            return part
        key = (id(part.node), part.start, has_tools, repr(part.scope))
        return self._loops.setdefault(key, LoopShape(part, Tree()))

    def _learn_turn(self, shape: LoopShape, example: ChatExample, place: int) -> Any:
        def make(ask: Ask) -> Any:
            loop = shape.loop
            scope = {**self._template.scope(None), **dict(loop.scope)}
            scope |= {loop.node.target.name: OneMessage(("rel", 0)), "loop": LoopState(loop.start)}
            try:
                tracer = Tracer(self._template.environment, ask, in_message=True)
                tracer.run(loop.node.body, scope)
                return self._turn(tracer.written, ask, example, place)
            except UNKNOWN:
                return SLOW

        return shape.tree.learn(make, example.messages, place)

    def _turn(self, written: list[Any], ask: Ask, example: ChatExample, place: int) -> TurnShape:
        segments = _merged(written)
        start, trailer, silent = -1, 0, False
        if ask(("value", (("rel", 0), "role"))) == "assistant":
            ask(("role before",))
            ask(("last",))
            silent = ask(("silent",))
        render = self._render(example)
        text = "".join(p if isinstance(p, str) else filler(p)(example.messages, place) for p in segments)
        blocks = [block for block, owner in zip(render.blocks, render.owners, strict=True) if owner == place]
        if "".join(blocks) != text:
            raise NotDerivable("the render differs")
        if example.messages[place]["role"] == "assistant" and not silent:
            start, trailer = self._span(render, example, place, segments)
        return _turn_shape(segments, start, trailer, silent)

    def _span(
        self, render: Render, example: ChatExample, place: int, segments: tuple[str | Hole, ...]
    ) -> tuple[int, int]:
        """(start, trailer) of a span that no text of such a message can move, or (-1, 0)."""
        first = segments[0] if segments and isinstance(segments[0], str) else ""
        last = segments[-1] if segments and isinstance(segments[-1], str) else ""
        try:
            if any(
                head.startswith(first) and head != first
                for head in self._finder.heads(render, example, place)
            ):
                return -1, 0
            span = self._finder.span(render, example, place)
        except RowFault:
            return -1, 0
        trailer = len(render.blocks[span.block]) - span.end
        closed = span.end > span.said and len(last) >= len(render.blocks[span.block]) - span.said
        return (span.start, trailer) if closed and span.start <= len(first) else (-1, 0)

    def _render(self, example: ChatExample) -> Render:
        return self._template.render(example.messages, example.tools)


UNKNOWN = (NotDerivable, RowFault, TemplateError, ArithmeticError, LookupError, TypeError, ValueError)


def _merged(written: list[Any]) -> tuple[str | Hole, ...]:
    segments: list[str | Hole] = []
    for part in written:
        if not isinstance(part, str | Hole):
            raise NotDerivable("loop in a loop")
        if segments and isinstance(part, str) and isinstance(segments[-1], str):
            segments[-1] += part
        else:
            segments.append(part)
    return tuple(segments)


def _turn_shape(segments: tuple[str | Hole, ...], start: int, trailer: int, silent: bool) -> TurnShape:
    holes = [part for part in segments if isinstance(part, Hole)]
    if len(holes) > 1:
        parts = tuple(part if isinstance(part, str) else filler(part) for part in segments)
        return TurnShape("", None, "", parts, start, trailer, silent, segments)
    if not holes:
        return TurnShape("".join(map(str, segments)), None, "", (), start, trailer, silent, segments)
    where = segments.index(holes[0])
    before, after = "".join(map(str, segments[:where])), "".join(map(str, segments[where + 1 :]))
    return TurnShape(before, filler(holes[0]), after, (), start, trailer, silent, segments)
