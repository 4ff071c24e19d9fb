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

from raysvc.chat.render.answers import filler
from raysvc.chat.render.column_answers import ColumnAnswers, is_content
from raysvc.chat.render.shapes import SLOW, LoopShape, RowShape, Shapes, TurnShape
from raysvc.chat.render.symbols import Hole
from raysvc.chat.render.texts import Texts, sizes_of
from raysvc.chat.render.trees import Node, Tree
from raysvc.chat.source.chat_columns import ChatColumns
from raysvc.chat.source.formats import ChatExample
from raysvc.chat.text_batch import Batch

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
        for place in range(loop.loop.start):  # a message before the loop has no turn
            at = np.minimum(self._columns.starts[rows] + place, len(self._trained) - 1)
            self._slow[rows[self._trained[at]]] = True
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


def _around_loop(shape: Any) -> tuple[tuple[str | Hole, ...], LoopShape, tuple[str | Hole, ...]] | None:
    """(before, loop, behind) of a row shape with one loop, and contents only around it."""
    if not isinstance(shape, RowShape):
        return None
    loops = [n for n, part in enumerate(shape.segments) if isinstance(part, LoopShape)]
    if len(loops) != 1:
        return None
    before, behind = shape.segments[: loops[0]], shape.segments[loops[0] + 1 :]
    if not all(
        isinstance(part, str) or (isinstance(part, Hole) and is_content(part)) for part in (*before, *behind)
    ):
        return None
    return before, shape.segments[loops[0]], behind


def _fits(turn: Any) -> bool:
    """Whether a turn is literals around at most its own content, and needs no more proof."""
    if not isinstance(turn, TurnShape) or turn.said >= 0:
        return False
    holes = [part for part in turn.segments if isinstance(part, Hole)]
    return len(holes) <= 1 and all(is_content(hole) and hole.path[0] == ("rel", 0) for hole in holes)


def _blank(texts: pa.Array) -> Bools:
    """bool [M], whether a text says nothing."""
    return np.asarray(sizes_of(pc.utf8_trim_whitespace(texts)) == 0)


EMPTY = TurnShape((), filler(()))
