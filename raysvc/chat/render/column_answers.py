"""Answers to the questions of a template for many messages of plain chats at once.

Axes: N rows, M messages.
Always true:
- an answer is the one that `answers` gives for the row alone, or there is none.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from raysvc.chat.render.symbols import ABSENT, Hole, Place, Question
from raysvc.chat.source.chat_columns import ChatColumns

Ints64 = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]


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
        if not is_content(hole):
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


def text_of(hole: Hole, texts: pa.Array) -> pa.Array:
    """Texts after the steps of a hole that `is_content` accepts."""
    return pc.utf8_trim_whitespace(texts) if hole.steps else texts


def _beginnings(text: str) -> list[str]:
    return [text[:count] for count in range(len(text) + 1)]


def is_content(hole: Hole) -> bool:
    """Whether a hole is a content as it is, or trimmed."""
    return hole.path[1:] == ("content",) and hole.steps in ((), (("strip", ()),))


def _all(value: Any, places: Ints64) -> tuple[Ints64, list[Any]]:
    return np.zeros(len(places), np.int64), [value]


def _bools(found: Any) -> tuple[Ints64, list[Any]]:
    return np.asarray(found, np.int64), [False, True]
