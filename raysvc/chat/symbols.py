"""What a template may do with a message without us knowing its text: holes, and questions about them.

A place is ("rel", k), the k-th message after the one the loop is at, or ("abs", k), a message counted from the start or,
below zero, from the end. A path is a place and the keys that lead to a value in that message.

Always true:
- a question is hashable, and its answer is a plain value of one conversation and one message of it;
- a hole's text is its value after its steps, which are pure functions.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from raysvc.chat.messages import Message
from raysvc.chat.proof import is_empty

Place = tuple[str, int]
Path = tuple[Any, ...]
Question = tuple[Any, ...]
Answer = Callable[[list[Message], int], Any]
ABSENT = "absent"


class _Kinds(dict[type, str]):
    """Kind of a value by its type; what JSON does not have is "other"."""

    def __missing__(self, key: type) -> str:
        return "other"


KINDS = _Kinds(
    {str: "str", list: "list", dict: "dict", bool: "bool", int: "int", float: "float", type(None): ABSENT}
)
_encode = json.JSONEncoder(ensure_ascii=False).encode


class NotDerivable(Exception):
    """The template does something with a message that only the real render can answer."""


@dataclass(frozen=True, slots=True)
class Hole:
    """A text that each row fills in.

    Attributes:
        path: where its value is.
        steps: (name, arguments) of what the template does to it, in order.
    """

    path: Path
    steps: tuple[tuple[str, tuple[Any, ...]], ...] = ()

    def then(self, name: str, *arguments: Any) -> Hole:
        """The same hole with one more step."""
        return Hole(self.path, (*self.steps, (name, arguments)))


def filler(hole: Hole) -> Answer:
    """The function that gives a hole's text."""
    get = getter(hole.path)
    if not hole.steps:
        return get
    if len(hole.steps) == 1:
        step = _step(*hole.steps[0])
        return lambda messages, at: step(get(messages, at))
    steps = [_step(name, arguments) for name, arguments in hole.steps]

    def fill(messages: list[Message], at: int) -> Any:
        value = get(messages, at)
        for step in steps:
            value = step(value)
        return value

    return fill


def _step(name: str, arguments: tuple[Any, ...]) -> Callable[[Any], Any]:
    if name == "tojson":
        return _encode
    if name == "item":
        return lambda value: value[arguments[0]]
    if name in (
        "strip",
        "lstrip",
        "rstrip",
        "split",
        "replace",
        "lower",
        "upper",
        "removeprefix",
        "removesuffix",
    ):
        return lambda value: getattr(value, name)(*arguments)
    raise NotDerivable(f"step {name}")


def getter(path: Path) -> Answer:
    """The function that gives the value at a path; IndexError or KeyError when there is none."""
    (kind, where), *keys = path
    if kind == "abs":
        place: Callable[[list[Message], int], Any] = lambda messages, _: messages[where]  # noqa: E731
    elif where == 0:
        place = lambda messages, at: messages[at]  # noqa: E731
    else:
        place = lambda messages, at: messages[_inside(at + where)]  # noqa: E731
    if not keys:
        return place
    if len(keys) == 1 and kind == "rel" and where == 0:
        key = keys[0]
        return lambda messages, at: messages[at][key]

    def get(messages: list[Message], at: int) -> Any:
        value = place(messages, at)
        for key in keys:
            value = value[key]
        return value

    return get


def _inside(at: int) -> int:
    """A place before the first message is none; a list would take it from its end."""
    if at < 0:
        raise IndexError(at)
    return at


def answerer(question: Question) -> Answer:
    """The function that answers a question for one conversation and one message."""
    kind, *about = question
    if kind == "kind":
        return _kind_of(about[0])
    if kind == "value":
        return getter(about[0])
    if kind == "length":
        get = getter(about[0])
        return lambda messages, at: len(get(messages, at))
    if kind == "first":
        return lambda _, at: at == about[0]
    if kind == "last":
        return lambda messages, at: at == len(messages) - 1
    if kind == "index0":
        return lambda _, at: at - about[0]
    if kind == "count":
        return lambda messages, _: len(messages)
    if kind == "silent":
        return _silent(about[0])
    if kind == "role before":
        return lambda messages, at: messages[at - 1]["role"] if at else ""
    return _about_text(kind, about[0], about[1])


def _silent(place: Place) -> Answer:
    if place == ("rel", 0):
        return lambda messages, at: is_empty(messages[at])
    get = getter((place,))
    return lambda messages, at: is_empty(get(messages, at))


def _kind_of(path: Path) -> Answer:
    *front, key = path
    if len(front) == 1 and front[0] == ("rel", 0):
        return lambda messages, at: KINDS[type(messages[at].get(key))]
    get = getter(path)

    def kind(messages: list[Message], at: int) -> str:
        try:
            value = get(messages, at)
        except (KeyError, IndexError):
            return ABSENT
        return "none" if value is None else KINDS[type(value)]

    return kind


def _meet(text: str, other: str) -> bool:
    """Whether a text could be the beginning of what begins with the other."""
    return text.startswith(other) or other.startswith(text)


def _about_text(kind: str, hole: Hole, other: Any) -> Answer:
    fill = filler(hole)
    if kind == "truth":
        return lambda messages, at: bool(fill(messages, at))
    if kind == "equals":
        return lambda messages, at: fill(messages, at) == other
    if kind == "holds":
        return lambda messages, at: other in fill(messages, at)
    if kind == "among":
        return lambda messages, at: fill(messages, at) in other
    if kind == "meets":
        return lambda messages, at: _meet(fill(messages, at), other)
    if kind == "starts":
        return lambda messages, at: fill(messages, at).startswith(other)
    if kind == "ends":
        return lambda messages, at: fill(messages, at).endswith(other)
    raise NotDerivable(f"question {kind}")
