"""A rendered conversation: its text, and which message wrote which part of it.

Always true:
- the blocks, joined, are the text; each has one owner: a message's place, or -1 for none;
- blocks side by side have different owners; a message may own several;
- a `{% generation %}` span lies inside one block, and between two of a block is text.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

NOBODY = -1
Extent = tuple[int, int]  # [start, end) of characters
Written = tuple[bool, Any, str]  # inside `{% generation %}`, for which message or None, text


@dataclass(slots=True)
class Render:
    """Text of one conversation in blocks.

    Attributes:
        blocks: text pieces, in order; none is empty.
        owners: for each block the place of its message, or -1.
        marks: (block, start, end), characters of that block inside `{% generation %}`.
    """

    blocks: list[str]
    owners: list[int]
    marks: list[tuple[int, int, int]] = field(default_factory=list)

    @property
    def text(self) -> str:
        """The whole render."""
        return "".join(self.blocks)


def render_of(written: Iterable[Written], messages: list[Any]) -> Render:
    """Blocks of what was written; every message is an object of its own."""
    place_of = {id(message): place for place, message in enumerate(messages)}
    blocks: list[str] = []
    owners: list[int] = []
    marks: list[tuple[int, int, int]] = []
    parts: list[str] = []
    owner, current = NOBODY, None
    for generated, message, text in written:
        if not text:
            continue
        if message is not current:
            current, last = message, owner
            owner = place_of.get(id(message), NOBODY)
            if owner != last and parts:
                blocks.append("".join(parts))
                owners.append(last)
                parts = []
        if generated:
            here, length = len(blocks), sum(map(len, parts))
            start = marks.pop()[1] if marks and marks[-1][::2] == (here, length) else length
            marks.append((here, start, length + len(text)))
        parts.append(text)
    if parts:
        blocks.append("".join(parts))
        owners.append(owner)
    return Render(blocks, owners, marks)


def extents_of(render: Render, place: int) -> list[Extent]:
    """[start, end) of each stretch of a render that belongs to a message; neighbours are joined."""
    made: list[Extent] = []
    at = 0
    for block, owner in zip(render.blocks, render.owners, strict=True):
        if owner == place:
            start = made.pop()[0] if made and made[-1][1] == at else at
            made.append((start, at + len(block)))
        at += len(block)
    return made


def marks_within(render: Render, extents: list[Extent]) -> list[Extent]:
    """[start, end) of each stretch inside `{% generation %}` that lies in one of some extents."""
    starts, at = [], 0
    for block in render.blocks:
        starts.append(at)
        at += len(block)
    marks = [(starts[block] + start, starts[block] + end) for block, start, end in render.marks]
    return [(a, b) for a, b in marks if any(a >= first and b <= last for first, last in extents)]
