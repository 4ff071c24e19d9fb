"""Plain chats in columns -> texts in columns, by the shapes of their template.

Axes: N rows, M messages, F rows that were filled.
Always true:
- a text is the one that `Shapes.fill` gives for the row alone;
- a row that asks something that columns cannot answer is left for the row's own way;
- a message under loss says something.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from raysvc.chat.answers import filler
from raysvc.chat.batch import Batch, Spans, Turns
from raysvc.chat.columns import ChatColumns
from raysvc.chat.formats import ChatExample
from raysvc.chat.messages import SYSTEM_ROLES
from raysvc.chat.sequence import CLOSED_TURN, FREE
from raysvc.chat.shapes import SLOW, LoopShape, RowShape, Shapes, TurnShape
from raysvc.chat.symbols import ABSENT, Hole, Place, Question
from raysvc.chat.trees import Node, Tree

Ints64 = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]


@dataclass(frozen=True)
class FilledColumns:
    """Texts of the rows that could be filled.

    Attributes:
        batch: F texts.
        rows: int64 [F], their rows in the columns, ascending.
        left: int64 [N - F], the others.
    """

    batch: Batch
    rows: Ints64
    left: Ints64


class ColumnFiller:
    """Fills the rows of one `ChatColumns`.

    Args:
        shapes: of the template that these rows have.
        columns: N rows.
        trained: bool [M], messages under loss.
        all_tokens: the whole render is under loss.
    """

    def __init__(self, shapes: Shapes, columns: ChatColumns, trained: Bools, all_tokens: bool) -> None:
        self._shapes, self._columns, self._trained, self._all_tokens = shapes, columns, trained, all_tokens
        self._answers = ColumnAnswers(columns)
        self._slow = np.zeros(len(columns), np.bool_)
        self._turns: list[TurnShape] = [EMPTY]
        self._turn_of = np.zeros(len(columns.roles), np.int64)
        self._lead: dict[int, tuple[str | Hole, ...]] = {}
        self._trail: dict[int, tuple[str | Hole, ...]] = {}

    def fill(self) -> FilledColumns:
        """Texts and spans."""
        columns, row_of = self._columns, self._answers.row_of
        silent = _blank(columns.contents) & (self._trained | self._answers.is_role("assistant"))
        self._slow[row_of[silent]] = True
        if not self._all_tokens:
            self._slow |= np.bincount(row_of[self._trained], minlength=len(columns)) == 0
        rows = np.flatnonzero(~self._slow)
        row_shapes, shape_of = self._leaves(self._shapes.row_tree, columns.starts[rows])
        for number, shape in enumerate(row_shapes):
            self._turns_of(shape, number, rows[shape_of == number])
        row_shape = np.zeros(len(columns), np.int64)
        row_shape[rows] = shape_of
        if self._slow.any():
            rows = np.flatnonzero(~self._slow)
            kept = ~self._slow[row_of]
            texts = Texts(columns.take(rows), self._turn_of[kept], self._trained[kept], row_shape[rows])
        else:
            texts = Texts(columns, self._turn_of, self._trained, row_shape)
        batch = texts.batch(self._turns, self._lead, self._trail, self._all_tokens)
        return FilledColumns(batch, rows, np.flatnonzero(self._slow))

    def _turns_of(self, shape: Any, number: int, rows: Ints64) -> None:
        """Find the turns of all rows of one row shape."""
        parts = _around_loop(shape)
        if parts is None:
            self._slow[rows] = True
            return
        self._lead[number], loop, self._trail[number] = parts
        starts, ends = self._columns.starts[rows] + loop.loop.start, self._columns.starts[rows + 1]
        sizes = np.maximum(ends - starts, 0)
        places = np.arange(int(sizes.sum())) + np.repeat(starts - np.cumsum(sizes) + sizes, sizes)
        turns, turn_of = self._leaves(lambda: loop.tree, places)
        base = len(self._turns)
        self._turns += [turn if _fits(turn) else EMPTY for turn in turns]
        self._turn_of[places] = base + turn_of
        bad = np.array([not _fits(turn) for turn in turns], np.bool_)
        unprovable = np.array([not isinstance(turn, TurnShape) or turn.start < 0 for turn in turns], np.bool_)
        wrong = bad[turn_of] | (unprovable[turn_of] & self._trained[places])
        self._slow[self._answers.row_of[places[wrong]]] = True

    def _leaves(self, tree: Callable[[], Tree], places: Ints64) -> tuple[list[Any], Ints64]:
        """(leaves, number of the leaf of each place); new ones are learned from a row that has them."""
        found: list[Any] = []
        number_of = np.zeros(len(places), np.int64)
        open_: list[tuple[Any, Ints64, bool]] = [(tree().root, np.arange(len(places)), False)]
        while open_:
            node, some, again = open_.pop()
            if not len(some):
                continue
            if node.__class__ is Node:
                open_ += self._branches(node, places, some, again)
            elif node is None and not again:
                self._learn(int(self._answers.row_of[places[some[0]]]))
                open_ += [(tree().root, some[:1], True), (tree().root, some[1:], False)]
            else:
                leaf = SLOW if node is None else node
                if not any(leaf is other for other in found):
                    found.append(leaf)
                number_of[some] = next(n for n, other in enumerate(found) if leaf is other)
        return found, number_of

    def _branches(
        self, node: Node, places: Ints64, some: Ints64, again: bool
    ) -> list[tuple[Any, Ints64, bool]]:
        answered = self._answers.answer(node.question, places[some])
        if answered is None:
            return [(SLOW, some, again)]
        codes, values = answered
        return [(node.children.get(value), some[codes == code], again) for code, value in enumerate(values)]

    def _learn(self, row: int) -> None:
        self._shapes.fill(ChatExample(self._columns.messages(row), None, ()))


class ColumnAnswers:
    """Answers questions for many messages at once.

    Args:
        columns: N rows, M messages.
    """

    def __init__(self, columns: ChatColumns) -> None:
        self._columns = columns
        self.row_of = np.repeat(np.arange(len(columns)), np.diff(columns.starts))

    def is_role(self, name: str) -> Bools:
        """bool [M]."""
        names = self._columns.role_names
        return np.asarray(self._columns.roles == (names.index(name) if name in names else -1))

    def answer(self, question: Question, places: Ints64) -> tuple[Ints64, list[Any]] | None:
        """(number of the answer of each place, the answers), or None when columns cannot tell."""
        kind, *about = question
        starts, rows = self._columns.starts, self.row_of[places]
        if kind == "kind":
            return _all("str" if about[0][1:] == ("content",) else ABSENT, places)
        if kind == "silent":
            return _all(False, places)
        if kind == "value" and about[0][1:] == ("role",):
            roles = self._columns.roles[self._at(about[0][0], places)]
            return roles.astype(np.int64), list(self._columns.role_names)
        if kind == "role before":
            codes = np.where(places > starts[rows], self._columns.roles[places - 1], -1)
            return codes + 1, ["", *self._columns.role_names]
        if kind == "first":
            return _bools(places - starts[rows] == about[0])
        if kind == "last":
            return _bools(places == starts[rows + 1] - 1)
        if kind in ("index0", "count"):
            numbers = places - starts[rows] - about[0] if kind == "index0" else np.diff(starts)[rows]
            values, codes = np.unique(numbers, return_inverse=True)
            return codes, values.tolist()
        return self._about_text(kind, about[0], about[1], places) if len(about) == 2 else None

    def _about_text(
        self, kind: str, hole: Hole, other: Any, places: Ints64
    ) -> tuple[Ints64, list[Any]] | None:
        if not _is_content(hole):
            return None
        texts = text_of(hole, self._columns.contents.take(pa.array(self._at(hole.path[0], places))))
        if kind == "truth":
            found = pc.greater(pc.binary_length(texts), 0)
        elif kind == "equals":
            found = pc.equal(texts, other)
        elif kind == "holds":
            found = pc.match_substring(texts, other)
        elif kind == "starts":
            found = pc.starts_with(texts, other)
        elif kind == "meets":
            found = pc.or_(pc.starts_with(texts, other), pc.is_in(texts, pa.array(_beginnings(other))))
        elif kind == "ends":
            found = pc.ends_with(texts, other)
        else:
            return None
        return _bools(found.to_numpy(zero_copy_only=False))

    def _at(self, place: Place, places: Ints64) -> Ints64:
        """Messages at a place, seen from each of `places`; the questions before made sure that they are there."""
        kind, offset = place
        if kind == "rel":
            return places + offset
        starts, rows = self._columns.starts, self.row_of[places]
        return np.asarray(starts[rows] + offset if offset >= 0 else starts[rows + 1] + offset)


@dataclass(frozen=True)
class Texts:
    """Rows whose turns are known.

    Attributes:
        columns: F rows, M messages.
        turn_of: int64 [M], number of each message's turn.
        trained: bool [M].
        shape_of: int64 [F], number of each row's shape.
    """

    columns: ChatColumns
    turn_of: Ints64
    trained: Bools
    shape_of: Ints64

    def batch(
        self,
        turns: list[TurnShape],
        lead: dict[int, tuple[str | Hole, ...]],
        trail: dict[int, tuple[str | Hole, ...]],
        all_tokens: bool,
    ) -> Batch:
        """Join everything and place the spans."""
        starts = self.columns.starts
        leads, trails = self._row_texts(lead), self._row_texts(trail)
        sizes = _sizes(leads), _sizes(trails)
        joined = self._joined(turns, leads, trails)
        bounds, data = _buffers(joined)
        begins, ends = bounds[:-1].copy(), bounds[1:].copy()
        begins[starts[:-1]] += sizes[0]
        ends[starts[1:] - 1] -= sizes[1]
        offsets = bounds[starts]
        if all_tokens:
            rows = np.arange(len(self.columns))
            spans = Spans(rows, offsets[:-1], offsets[1:], np.full(len(rows), FREE, np.int8))
        else:
            spans = self._spans(turns, begins, ends)
        return Batch(data, offsets, spans, self._turn_places(begins, ends))

    def _joined(self, turns: list[TurnShape], leads: pa.Array, trails: pa.Array) -> pa.Array:
        starts, which = self.columns.starts, pa.array(self.turn_of)
        first, last = np.zeros(len(self.turn_of), np.int64), np.zeros(len(self.turn_of), np.int64)
        first[starts[:-1]] = np.arange(1, len(starts))
        last[starts[1:] - 1] = np.arange(1, len(starts))
        none = pa.array([""], pa.string())
        before, after = _literals(turns)
        return pc.binary_join_element_wise(
            pa.concat_arrays([none, leads]).take(pa.array(first)),
            pa.array(before).take(which),
            self._contents(turns),
            pa.array(after).take(which),
            pa.concat_arrays([none, trails]).take(pa.array(last)),
            "",
        )

    def _contents(self, turns: list[TurnShape]) -> pa.Array:
        """The text in the middle of every turn."""
        texts = self.columns.contents
        holes = [next((part for part in turn.segments if isinstance(part, Hole)), None) for turn in turns]
        for number in np.unique(self.turn_of).tolist():
            hole = holes[number]
            if hole is None:
                texts = pc.if_else(pa.array(self.turn_of == number), "", texts)
            elif hole.steps:
                texts = pc.if_else(pa.array(self.turn_of == number), text_of(hole, texts), texts)
        return texts

    def _row_texts(self, parts: dict[int, tuple[str | Hole, ...]]) -> pa.Array:
        """string [F], what stands before or behind the loop."""
        literals = {n: "".join(p for p in some if isinstance(p, str)) for n, some in parts.items()}
        texts = pa.array([literals.get(n, "") for n in range(max(parts, default=-1) + 1)], pa.string())
        result = texts.take(pa.array(self.shape_of)) if len(self.shape_of) else pa.array([], pa.string())
        for number, some in parts.items():
            if any(isinstance(part, Hole) for part in some):
                filled = pc.binary_join_element_wise(*(self._row_part(part) for part in some), "")
                result = pc.if_else(pa.array(self.shape_of == number), filled, result)
        return result

    def _row_part(self, part: str | Hole) -> Any:
        if isinstance(part, str):
            return pa.scalar(part)
        offset = part.path[0][1]
        starts = self.columns.starts
        places = starts[:-1] + offset if offset >= 0 else starts[1:] + offset
        return text_of(part, self.columns.contents.take(pa.array(np.minimum(places, starts[-1] - 1))))

    def _spans(self, turns: list[TurnShape], begins: Ints64, ends: Ints64) -> Spans:
        places = np.flatnonzero(self.trained)
        which = self.turn_of[places]
        start = np.array([turn.start for turn in turns], np.int64)[which]
        trailer = np.array([turn.trailer for turn in turns], np.int64)[which]
        rows = np.repeat(np.arange(len(self.columns)), np.diff(self.columns.starts))[places]
        kinds = np.full(len(places), CLOSED_TURN, np.int8)
        return Spans(rows, begins[places] + start, ends[places] - trailer, kinds)

    def _turn_places(self, begins: Ints64, ends: Ints64) -> Turns:
        answers = ColumnAnswers(self.columns)
        users = np.flatnonzero(answers.is_role("user"))
        turn = ~np.logical_or.reduce([answers.is_role(role) for role in SYSTEM_ROLES]) & (ends > begins)
        heads = begins[self.columns.starts[:-1]].copy()
        places = np.flatnonzero(turn)[::-1]
        heads[answers.row_of[places]] = begins[places]  # the first of a row comes last, and stays
        return Turns(heads, answers.row_of[users], begins[users])


def text_of(hole: Hole, texts: pa.Array) -> pa.Array:
    """Texts after the steps of a hole that `_is_content` accepts."""
    return pc.utf8_trim_whitespace(texts) if hole.steps else texts


def _beginnings(text: str) -> list[str]:
    return [text[:count] for count in range(len(text) + 1)]


def _is_content(hole: Hole) -> bool:
    return hole.path[1:] == ("content",) and hole.steps in ((), (("strip", ()),))


def _around_loop(shape: Any) -> tuple[tuple[str | Hole, ...], LoopShape, tuple[str | Hole, ...]] | None:
    """(before, loop, behind) of a row shape with one loop, and contents only around it."""
    if not isinstance(shape, RowShape):
        return None
    loops = [n for n, part in enumerate(shape.segments) if isinstance(part, LoopShape)]
    if len(loops) != 1:
        return None
    before, behind = shape.segments[: loops[0]], shape.segments[loops[0] + 1 :]
    if any(isinstance(part, Hole) and not _is_content(part) for part in (*before, *behind)):
        return None
    return before, shape.segments[loops[0]], behind


def _fits(turn: Any) -> bool:
    """Whether a turn is literals around at most its own content, and needs no more proof."""
    if not isinstance(turn, TurnShape) or turn.said >= 0:
        return False
    holes = [part for part in turn.segments if isinstance(part, Hole)]
    return len(holes) <= 1 and all(_is_content(hole) and hole.path[0] == ("rel", 0) for hole in holes)


def _literals(turns: list[TurnShape]) -> tuple[list[str], list[str]]:
    """Of every turn the literal before its text, and the one behind it; without a text, all is before."""
    before, after = [], []
    for turn in turns:
        where = next(
            (n for n, part in enumerate(turn.segments) if isinstance(part, Hole)), len(turn.segments)
        )
        before.append("".join(map(str, turn.segments[:where])))
        after.append("".join(map(str, turn.segments[where + 1 :])))
    return before, after


def _blank(texts: pa.Array) -> Bools:
    """bool [M], whether a text says nothing."""
    return np.asarray(_sizes(pc.utf8_trim_whitespace(texts)) == 0)


def _sizes(texts: pa.Array) -> Ints64:
    return np.asarray(pc.binary_length(texts).to_numpy(zero_copy_only=False), np.int64)


def _buffers(texts: pa.Array) -> tuple[Ints64, npt.NDArray[np.uint8]]:
    """(int64 [M + 1] bounds, bytes) of a string array that begins at its buffer's start."""
    _, bounds, data = texts.buffers()
    ends = np.frombuffer(bounds, np.int32)[texts.offset : texts.offset + len(texts) + 1].astype(np.int64)
    return ends, np.frombuffer(data, np.uint8)[: ends[-1]]


def _all(value: Any, places: Ints64) -> tuple[Ints64, list[Any]]:
    return np.zeros(len(places), np.int64), [value]


def _bools(found: Any) -> tuple[Ints64, list[Any]]:
    return np.asarray(found, np.int64), [False, True]


EMPTY = TurnShape((), filler(()))
