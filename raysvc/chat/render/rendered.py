"""A rendered conversation: its text, and which message wrote which part of it.

Axes: B blocks.
Always true:
- the blocks, joined, are the text; each has one owner: a message's place, or -1 for none;
- no block is empty, and blocks side by side have different owners; a message may own several;
- a `{% generation %}` span lies inside one block, and between two of a block is text; spans are in the order of the text.
"""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass, field
from itertools import pairwise

NOBODY = -1
Extent = tuple[int, int]  # [start, end) of characters


@dataclass(slots=True)
class Render:
    """Text of one conversation in blocks.

    Attributes:
        text: of all blocks.
        bounds: B + 1 places in the text, where blocks begin and the last one ends.
        owners: for each block the place of its message, or -1.
        marks: what is inside `{% generation %}`.
    """

    text: str
    bounds: list[int]
    owners: list[int]
    marks: list[Extent] = field(default_factory=list)
    _extents: dict[int, list[Extent]] = field(default_factory=dict, repr=False, compare=False)

    def extents_of(self, place: int) -> list[Extent]:
        """[start, end) of each block that belongs to a message."""
        found = self._extents
        if not found:
            bounds = self.bounds
            for owner, start, end in zip(self.owners, bounds, bounds[1:], strict=False):
                found.setdefault(owner, []).append((start, end))
        return found.get(place, [])

    @property
    def blocks(self) -> list[str]:
        """B texts."""
        return [self.text[a:b] for a, b in pairwise(self.bounds)]


def marks_within(render: Render, extents: list[Extent]) -> list[Extent]:
    """[start, end) of each stretch inside `{% generation %}` that lies in one of some extents."""
    marks, found = render.marks, []
    for first, last in extents:
        at = bisect_left(marks, (first,))
        while at < len(marks) and marks[at][1] <= last:
            found.append(marks[at])
            at += 1
    return found
