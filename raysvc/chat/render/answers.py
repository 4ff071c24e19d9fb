"""Questions and holes as Python functions, compiled from their source.

Always true:
- a function takes (messages, at) and changes nothing;
- a text of a conversation never becomes source: keys and literals go in as named values.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any

from raysvc.chat.render.span_proof import is_empty
from raysvc.chat.render.symbols import ABSENT, Hole, NotDerivable, Path, Question, Segment
from raysvc.chat.source.messages import Message

Answer = Callable[[list[Message], int], Any]
METHODS = ("strip", "lstrip", "rstrip", "split", "replace", "lower", "upper", "removeprefix", "removesuffix")


class _Kinds(dict[type, str]):
    """Kind of a value by its type; what JSON does not have is "other"."""

    def __missing__(self, key: type) -> str:
        return "other"


_KINDS = _Kinds(
    {str: "str", list: "list", dict: "dict", bool: "bool", int: "int", float: "float", type(None): ABSENT}
)
_TYPES = {kind: type_ for type_, kind in _KINDS.items()}


def _json_encoder() -> Callable[[Any], str]:
    """`json.dumps(x, ensure_ascii=False)`, without making the encoder again for every value."""
    make: Any = getattr(json.encoder, "c_make_encoder", None)
    usual = json.JSONEncoder(ensure_ascii=False)
    if make is None:
        return usual.encode
    separators = usual.key_separator, usual.item_separator
    encode = make(None, usual.default, json.encoder.encode_basestring, None, *separators, False, False, True)
    return lambda value: "".join(encode(value, 0))


to_json = _json_encoder()


class Source:
    """Python source that is being written, and the values that it names."""

    def __init__(self) -> None:
        self.names: dict[str, Any] = {
            "kinds": _KINDS,
            "kind_at": _kind_at,
            "encode": to_json,
            "is_empty": is_empty,
            "meet": _meet,
        }

    def name(self, value: Any) -> str:
        """A name for a value."""
        name = f"v{len(self.names)}"
        self.names[name] = value
        return name

    def path(self, path: Path) -> str:
        """Expression for the value at a path."""
        (kind, where), *keys = path
        place = f"messages[{where}]" if kind == "abs" else f"messages[at + {where}]" if where else "message"
        return place + "".join(f"[{self.name(key)}]" for key in keys)

    def text(self, hole: Hole) -> str:
        """Expression for the text of a hole."""
        text = self.path(hole.path)
        for name, arguments in hole.steps:
            given = ", ".join(self.name(argument) for argument in arguments)
            if name == "tojson":
                text = f"encode({text})"
            elif name == "item":
                text = f"{text}[{given}]"
            elif name in METHODS:
                text = f"{text}.{name}({given})"
            else:
                raise NotDerivable(f"step {name}")
        return text

    def question(self, question: Question) -> str:
        """Expression for the answer to a question; see `symbols`."""
        kind, *about = question
        if kind in _ABOUT_LOOP:
            return _ABOUT_LOOP[kind].format(*about)
        if kind == "kind":
            return self._kind(about[0])
        if kind == "value":
            return self.path(about[0])
        if kind == "length":
            return f"len({self.path(about[0])})"
        if kind == "silent":
            return self._silent(self.path((about[0],)))
        return self._relation(kind, self.text(about[0]), self.name(about[1]))

    def asked(self, question: Question, answers: Sequence[Any]) -> tuple[str, list[str]]:
        """(expression, what to put behind it to see whether it is each of some answers)."""
        if question[0] == "kind" and len(question[1]) == 2 and _TYPES.keys() >= set(answers):
            kind = f"type({self._field(question[1])})"
            return kind, [f"is {self.name(_TYPES[answer])}" for answer in answers]
        return self.question(question), [self._test(answer) for answer in answers]

    def _test(self, answer: Any) -> str:
        return f"is {answer}" if answer is True or answer is False else f"== {self.name(answer)}"

    def _field(self, path: Path) -> str:
        return f"{self.path(path[:1])}.get({self.name(path[1])})"

    def function(self, lines: Sequence[str]) -> Answer:
        """The function with these lines as its body."""
        body = [
            "def function(messages, at):",
            "    message = messages[at]",
            *(f"    {line}" for line in lines),
        ]
        exec("\n".join(body), self.names)
        made: Answer = self.names["function"]
        return made

    def _kind(self, path: Path) -> str:
        if len(path) == 2:
            return f"kinds[type({self._field(path)})]"
        return f"kind_at({self.path(path[:-1])}, {self.name(path[-1])})"

    def _silent(self, message: str) -> str:
        usual = f"(said := {message}.get('content')).__class__ is str and said and not said.isspace()"
        return f"(False if {usual} else is_empty({message}))"

    def _relation(self, kind: str, text: str, other: str) -> str:
        forms = {
            "truth": f"bool({text})",
            "equals": f"({text} == {other})",
            "holds": f"({other} in {text})",
            "among": f"({text} in {other})",
            "starts": f"{text}.startswith({other})",
            "ends": f"{text}.endswith({other})",
            "meets": f"meet({text}, {other})",
        }
        if kind not in forms:
            raise NotDerivable(f"question {kind}")
        return forms[kind]


_ABOUT_LOOP = {
    "first": "(at == {0})",
    "last": "(at == len(messages) - 1)",
    "index0": "(at - {0})",
    "count": "len(messages)",
    "role before": "(messages[at - 1]['role'] if at else '')",
}


def answerer(question: Question) -> Answer:
    """The function that answers a question for one conversation and one message."""
    source = Source()
    return source.function([f"return {source.question(question)}"])


def filler(segments: Sequence[Segment]) -> Answer:
    """The function that gives the text of some segments."""
    source = Source()
    if len(segments) == 1 and isinstance(segments[0], Hole):
        return source.function([f"return {source.text(segments[0])}"])
    parts = [source.name(part) if isinstance(part, str) else source.text(part) for part in segments]
    return source.function([f"return ''.join(({''.join(f'{part}, ' for part in parts)}))"])


def _kind_at(owner: Any, key: Any) -> str:
    """Kind of what a list or dict inside a message holds; None is a value there."""
    try:
        value = owner[key]
    except (KeyError, IndexError):
        return ABSENT
    return "none" if value is None else _KINDS[type(value)]


def _meet(text: str, other: str) -> bool:
    """Whether a text could be the beginning of what begins with the other."""
    return text.startswith(other) or other.startswith(text)
