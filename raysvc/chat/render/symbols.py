"""What a template may do with a message without us knowing its text: holes, and questions about them.

A place is ("rel", k), the k-th message after the one the loop is at, or ("abs", k), a message counted from the start or,
below zero, from the end. A path is a place and the keys that lead to a value in that message. A question is a kind and
what it is about:

    ("kind", path)             type of a value: str, list, dict, bool, int, float, none, absent, other
    ("value", path)            a role, a bool or an int
    ("length", path)           entries of a list or dict
    ("first", start)           whether the loop that begins at `start` is at its first turn
    ("last",)                  whether this is the last message
    ("index0", start)          turn of that loop
    ("count",)                 messages of the conversation
    ("silent", place)          whether a message says nothing
    ("role before",)           role of the message before, "" when there is none
    (relation, hole, text)     truth, equals, holds, among, starts, ends, meets: a hole's text, and another

Always true:
- a hole, a path and a question are hashable, and compare by content.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

Place = tuple[str, int]
Path = tuple[Any, ...]
Question = tuple[Any, ...]
ABSENT = "absent"


class NotDerivable(Exception):
    """The template does something with a message that only the real render can answer."""


@dataclass(frozen=True, slots=True)
class Hole:
    """A text that each row fills in.

    Attributes:
        path: where its value is.
        steps: (name, arguments) of what the template does to it, in order: methods of str, "tojson", or "item".
    """

    path: Path
    steps: tuple[tuple[str, tuple[Any, ...]], ...] = ()

    def then(self, name: str, *arguments: Any) -> Hole:
        """The same hole with one more step."""
        return Hole(self.path, (*self.steps, (name, arguments)))


Segment = str | Hole
