"""Rows whose turns are known -> their texts and spans, joined in columns.

Axes: F rows, M messages.
Always true:
- spans and turns are in bytes of the joined texts.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from raysvc.chat.render.column_answers import ColumnAnswers, text_of
from raysvc.chat.render.shapes import TurnShape
from raysvc.chat.render.symbols import Hole
from raysvc.chat.sequence import CLOSED_TURN, FREE
from raysvc.chat.source.chat_columns import ChatColumns
from raysvc.chat.source.messages import SYSTEM_ROLES
from raysvc.chat.text_batch import Batch, Spans, Turns

Ints64 = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]


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
        sizes = sizes_of(leads), sizes_of(trails)
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


def sizes_of(texts: pa.Array) -> Ints64:
    """int64 [M], bytes of each text."""
    return np.asarray(pc.binary_length(texts).to_numpy(zero_copy_only=False), np.int64)


def _buffers(texts: pa.Array) -> tuple[Ints64, npt.NDArray[np.uint8]]:
    """(int64 [M + 1] bounds, bytes) of a string array that begins at its buffer's start."""
    _, bounds, data = texts.buffers()
    ends = np.frombuffer(bounds, np.int32)[texts.offset : texts.offset + len(texts) + 1].astype(np.int64)
    return ends, np.frombuffer(data, np.uint8)[: ends[-1]]
