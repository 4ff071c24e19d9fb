"""A template taken apart: the literals and texts that a conversation gives, joined without running the template.

The first row of a shape is traced and rendered (`learn`); its questions and answers lead later rows of that shape to the
same literals, which are then joined with their own texts. What cannot be traced is rendered as ever.

Always true:
- every shape was compared with the real render of the row it was learned from;
- a row whose answers lead nowhere is learned, a row that cannot be learned is rendered;
- a conversation with a trained message that has no turn is rendered;
- the spans of a shape lie in its literals at both ends, so they hold for any text in between.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from raysvc.chat.render.answers import Answer, to_json
from raysvc.chat.render.loops import Loop, compile_loop
from raysvc.chat.render.symbols import Segment
from raysvc.chat.render.template import ChatTemplate
from raysvc.chat.render.trees import Tree
from raysvc.chat.render.turn_spans import TurnFinder
from raysvc.chat.render.values import MessageLoop
from raysvc.chat.row_errors import RowFault
from raysvc.chat.sequence import CLOSED_TURN, Span
from raysvc.chat.source.formats import ChatExample
from raysvc.chat.source.messages import SYSTEM_ROLES

MAX_TOOL_SETS = 256
NO_SPAN = -1
Known = tuple[list[Any] | None, Tree]  # tools, and what is known of rows that have them


@dataclass(frozen=True, slots=True)
class TurnShape:
    """What a message gives.

    Attributes:
        segments: literals and holes.
        fill: gives the text.
        start: first character under loss, counted from the start; `NO_SPAN` when no loss can be proved here.
        trailer: characters behind the end of turn.
        silent: the message says nothing, and is not trained.
        said: characters behind what is said, when each row has to prove that its message is in it; else `NO_SPAN`.
    """

    segments: tuple[Segment, ...]
    fill: Answer
    start: int = NO_SPAN
    trailer: int = 0
    silent: bool = False
    said: int = NO_SPAN


@dataclass(slots=True)
class LoopShape:
    """A loop over messages, with what is known of its turns."""

    loop: MessageLoop
    tree: Tree
    compiled: Loop | None = None


@dataclass(frozen=True, slots=True)
class FixedTurn:
    """The turn of one message in a loop that is written out."""

    place: int
    turn: TurnShape


@dataclass(frozen=True, slots=True)
class RowShape:
    """What a conversation gives.

    Attributes:
        items: literals, functions for texts, loops and turns, in order.
        segments: the same with holes for the functions.
        first: the message that loops begin with, beyond all messages when there is no loop.
        fixed: messages whose turns are written out.
    """

    items: tuple[Any, ...]
    segments: tuple[Any, ...]

    first: int = 0
    fixed: frozenset[int] = frozenset()

    def covers(self, trained: tuple[int, ...]) -> bool:
        """Whether each of some messages, in order, has a turn; a template may show one elsewhere, or nowhere."""
        if not trained or trained[0] >= self.first:
            return True
        return all(place >= self.first or place in self.fixed for place in trained)


class Slow:
    """The leaf of what has to be rendered."""


SLOW = Slow()


@dataclass(slots=True)
class Filled:
    """A conversation as its shape gives it.

    Attributes:
        parts: texts that make the render.
        spans: (start, end, kind) characters under loss.
        length: characters so far.
        head: characters before the first turn that is not the system's, below zero until it comes.
        turns: characters where the user begins to speak.
    """

    parts: list[str]
    spans: list[Span]
    length: int = 0
    head: int = -1
    turns: tuple[int, ...] = ()


class Shapes:
    """What is known of one template.

    Args:
        template: for its syntax tree, and to compare with.
        finder: finds the spans of the row a shape is learned from.
        with_turns: note where turns begin, for `keep_end_turns`.
    """

    def __init__(self, template: ChatTemplate, finder: TurnFinder, with_turns: bool) -> None:
        from raysvc.chat.render.learn import Learner

        self._learner = Learner(template, finder, self)
        self._prove = finder.prove
        self._with_turns = with_turns
        self._trees: dict[str, Known] = {}  # by the JSON of the tools
        self._by_object: dict[int, Known] = {}  # by id: the value keeps its object alive

    def fill(self, example: ChatExample) -> Filled | None:
        """The conversation from its shape, or None when it has to be rendered."""
        known = self._known(example.tools)
        if known is None:
            return None
        tools, tree = known
        shape = tree.find(example.messages, 0)
        if shape is None:
            shape = self._learner.row(tree, example, tools)
        if shape is SLOW or not shape.covers(example.trained):
            return None
        try:
            return self.join(shape, example)
        except RowFault:
            return None  # the real render says what is wrong

    def row_tree(self) -> Tree:
        """What is known of rows without tools."""
        known = self._known(None)
        assert known is not None
        return known[1]

    def join(self, shape: RowShape, example: ChatExample) -> Filled | None:
        """A conversation of a known shape, None when one of its turns has to be rendered."""
        filled = Filled([], [])
        for item in shape.items:
            kind = item.__class__
            if kind is LoopShape:
                if not self._join_loop(item, example, filled):
                    return None
            elif kind is FixedTurn:
                if not self._add(item.turn, item.place, example, filled):
                    return None
            else:
                text = item if kind is str else item(example.messages, 0)
                filled.parts.append(text)
                filled.length += len(text)
        return filled

    def _known(self, tools: list[Any] | None) -> Known | None:
        """One object for all tools that are written alike, and what is known of rows that have them."""
        known = self._by_object.get(id(tools))
        if known is not None:
            return known
        key = "" if tools is None else to_json(tools)
        known = self._trees.get(key)
        if known is None and (tools is None or len(self._trees) < MAX_TOOL_SETS):
            known = self._trees[key] = self._by_object[id(tools)] = (tools, Tree())
        return known

    def _join_loop(self, shape: LoopShape, example: ChatExample, filled: Filled) -> bool:
        """Add the turns of a loop; false when one of them has to be rendered."""
        if self._with_turns:
            return self._join_slowly(shape, example, filled)
        if self._run_loop(shape, example, filled):
            return True
        messages, trained, find = example.messages, frozenset(example.trained), shape.tree.find
        add, spans, at = filled.parts.append, filled.spans, filled.length
        for place in range(shape.loop.start, len(messages)):
            turn = find(messages, place)
            if turn.__class__ is not TurnShape:
                turn = self._learner.turn(shape, example, place) if turn is None else turn
                if turn is SLOW:
                    return False
            text = turn.fill(messages, place)
            if place in trained and not turn.silent:
                if turn.start < 0:
                    return False
                if turn.said >= 0:
                    self._prove_again(turn, place, example)
                spans.append((at + turn.start, at + len(text) - turn.trailer, CLOSED_TURN))
            add(text)
            at += len(text)
        filled.length = at
        return True

    def _run_loop(self, shape: LoopShape, example: ChatExample, filled: Filled) -> bool:
        """Run the compiled loop, once its tree has settled; false when there is something new or slow in this row."""
        if not shape.tree.settled:
            shape.compiled = None
            return False
        if shape.compiled is None:
            shape.compiled = compile_loop(shape.tree.root, shape.loop.start, self._prove)
        texts, spans = len(filled.parts), len(filled.spans)
        length = shape.compiled(
            example.messages, frozenset(example.trained), filled.length, filled.parts, filled.spans
        )
        if length < 0:
            del filled.parts[texts:], filled.spans[spans:]
            return False
        filled.length = length
        return True

    def _prove_again(self, turn: TurnShape, place: int, example: ChatExample) -> None:
        """Where a template cuts a text apart, the proof of one row says nothing about another.

        Raises:
            RowFault: the turn does not hold its message.
        """
        text = turn.fill(example.messages, place)
        self._prove(text[turn.start : len(text) - turn.said], example.messages[place])

    def _join_slowly(self, shape: LoopShape, example: ChatExample, filled: Filled) -> bool:
        for place in range(shape.loop.start, len(example.messages)):
            turn = shape.tree.find(example.messages, place)
            if turn is None:
                turn = self._learner.turn(shape, example, place)
            if turn is SLOW or not self._add(turn, place, example, filled):
                return False
        return True

    def _add(self, turn: TurnShape, place: int, example: ChatExample, filled: Filled) -> bool:
        """Add one turn, and note where it begins."""
        begin, text = filled.length, turn.fill(example.messages, place)
        filled.parts.append(text)
        filled.length += len(text)
        role = example.messages[place]["role"]
        if text and role == "user":
            filled.turns += (begin,)
        if text and filled.head < 0 and role not in SYSTEM_ROLES:
            filled.head = begin
        if place in example.trained and not turn.silent:
            if turn.start >= 0 and turn.said >= 0:
                self._prove_again(turn, place, example)
            filled.spans.append((begin + turn.start, filled.length - turn.trailer, CLOSED_TURN))
            return turn.start >= 0
        return True
