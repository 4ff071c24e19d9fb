"""Checks whether the trained text of a turn says what its message says, and nothing else.

Always true, of a turn that was verified:
- all of the content is in it, after the template's own trimming and cutting of `<tag>` parts;
- every tool call parses back: its name is there, and after it arguments equal to the source's, as one JSON value or
  as every key followed by its value, the keys in their order or sorted;
- no text of the message holds a control token, and none stands in the turn but its end and what the template itself
  writes inside a turn.

Reasoning may be missing: templates strip it from earlier turns. `Renderer` counts it (`Sequence.removed`).
"""

from __future__ import annotations

import html
import json
import re
from collections.abc import Collection, Iterable, Iterator
from typing import Any

from raysvc.chat.render.chat_environment import json_writer
from raysvc.chat.row_errors import RowFault
from raysvc.chat.source.messages import Message

_CLOSING = re.compile(r"</([\w:.-]{1,40})>|\[/(\w{1,40})\]")
_ESCAPED = re.compile(
    r"\\(?:u([dD][89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2})|(u[0-9a-fA-F]{4}|x[0-9a-fA-F]{2}|U00(?:0[0-9a-fA-F]|10)[0-9a-fA-F]{4})|(.))",
    re.DOTALL,
)
_MAX_ESCAPED = 8  # times
_LETTERS = {"n": "\n", "r": "\r", "t": "\t", "b": "\b", "f": "\f"}
_DECODER = json.JSONDecoder()
_ESCAPED_IN_JSON = re.compile(r"[\x00-\x1f\"\\]")
_to_json = json_writer(allow_nan=False)
_REASONING_ORDER = ("reasoning_content", "reasoning", "thinking")
_REASONING = frozenset(_REASONING_ORDER)


def tags_of(template: str, special_tokens: Iterable[str] = ()) -> tuple[str, ...]:
    """Pairs like `<think>` and `</think>` that a template names: where it may cut a content apart."""
    tags: set[str] = set()
    for angle, square in _CLOSING.findall(template):
        tags |= {f"<{angle}>", f"</{angle}>"} if angle else {f"[{square}]", f"[/{square}]"}
    return tuple(sorted(tags - set(special_tokens), key=len, reverse=True))


def verify_turn(
    stretch: str,
    message: Message,
    tags: tuple[str, ...],
    controls: Iterable[str],
    inner: Collection[str] = (),
    opened: Iterable[str] = (),
) -> None:
    """Check the trained text of one turn.

    Args:
        stretch: text under loss.
        message: that it must say.
        tags: from `tags_of`.
        controls: texts of the tokens that open a header or end a turn.
        inner: of these, the ones that the template writes inside of turns.
        opened: tags of the generation prompt: a content that begins with one has it in the prompt.

    Raises:
        RowFault: with what is missing or too much.
    """
    calls = message.get("tool_calls") or ()
    written = _written(calls) if calls else ""
    for control in controls:
        at = stretch.find(control)
        if at < 0:
            continue
        if (control not in inner and at + len(control) < len(stretch)) or _said_by(message, control, written):
            raise RowFault("a trained turn holds a control token", f"{control!r} in {_short(stretch)!r}")
    for text in texts_of(message):
        if calls and _only_thinks(text):
            continue  # a template that strips reasoning shows the calls alone
        if not _says(stretch, text, tags) and not any(
            text.strip().removeprefix(tag).strip() in stretch
            for tag in opened
            if text.lstrip().startswith(tag)
        ):
            raise RowFault(
                "a trained turn does not hold its message", f"{_short(text)!r} not in {_short(stretch)!r}"
            )
    for call in calls:
        missing = _missing_of_call(stretch, call)
        if missing:
            raise RowFault("a trained turn does not hold its tool call", f"{_short(missing)} is missing")


def is_empty(message: Message) -> bool:
    """Returns whether a message says nothing: its end of turn alone teaches only to be silent."""
    content = message.get("content")
    if type(content) is str and content and not content.isspace():
        return False
    if message.get("tool_calls"):
        return False
    return not any(text.strip() for text in (*texts_of(message), reasoning_of(message)))


def texts_of(message: Message) -> list[str]:
    """Texts of the content."""
    content = message.get("content")
    if type(content) is str:
        return [content]
    return [part["text"] for part in content if "text" in part] if isinstance(content, list) else []


def reasoning_of(message: Message) -> str:
    """Returns what a message thinks before it speaks: a field of its own, or `<think>` in its content; empty without."""
    for name in () if _REASONING.isdisjoint(message) else _REASONING_ORDER:
        if isinstance(message.get(name), str) and message[name].strip():
            return str(message[name]).strip()
    content = message.get("content")
    if type(content) is not str or "</think>" not in content:
        return ""
    return content.split("</think>")[0].split("<think>")[-1].strip()


def all_said(message: Message) -> str:
    """Everything that a message says, unescaped."""
    calls = message.get("tool_calls") or ()
    leaves = (leaf for call in calls for leaf in _leaves(call))
    thoughts = (str(message[name]) for name in _REASONING_ORDER if message.get(name))
    whole = (str(calls), json.dumps(calls, ensure_ascii=False, default=str)) if calls else ()
    return "\n".join(map(unescaped, (*texts_of(message), *thoughts, *whole, *leaves)))


def thoughts_of(messages: Iterable[Message]) -> list[str]:
    """Reasoning of the messages that have some."""
    return [thought for message in messages if (thought := reasoning_of(message))]


def _said_by(message: Message, control: str, written: str | None) -> bool:
    """Returns whether a text of a message holds a control token; `written` is the JSON of its calls, None when there is none."""
    if any(control in text for text in texts_of(message)) or control in reasoning_of(message):
        return True
    if written is not None and control not in written and not _ESCAPED_IN_JSON.search(control):
        return False
    return any(control in leaf for call in message.get("tool_calls") or () for leaf in _leaves(call))


def _written(value: Any) -> str | None:
    """JSON of a value, None when it has none."""
    try:
        return _to_json(value)
    except (ValueError, TypeError, RecursionError):
        return None


def _only_thinks(text: str) -> bool:
    """Returns whether a text is one thought, whose beginning a generation prompt may have written."""
    thought = text.strip().removeprefix("<think>").removesuffix("</think>")
    return text.rstrip().endswith("</think>") and "think>" not in thought


def _says(stretch: str, text: str, tags: tuple[str, ...]) -> bool:
    if text.strip() in stretch:
        return True
    cut = [text]
    for tag in tags:
        cut = [piece for whole in cut for piece in whole.split(tag)]
    kept = [piece.strip() for piece in cut if piece.strip()]
    return bool(kept) and kept[-1] in stretch


def _missing_of_call(stretch: str, call: dict[str, Any]) -> str:
    """Returns what of a call does not parse back, empty when all of it does."""
    name, arguments = str(call["function"].get("name") or ""), call["function"].get("arguments")
    if isinstance(arguments, str):
        arguments = _parsed(arguments)
    if name and name not in stretch:
        return repr(name)
    plain = _written(arguments) if arguments else None
    if plain and stretch.find(plain, stretch.find(name) + len(name)) >= 0:
        return ""  # as most templates write it
    places = [found.end() for found in re.finditer(re.escape(name), stretch)] if name else [0]
    if not arguments or any(_holds(stretch[place:], arguments) for place in places):
        return ""
    if name and any(value == arguments for value in _json_values(stretch)):
        return ""  # a template that writes the arguments before the name
    return f"the call of {name!r} with {json.dumps(arguments, ensure_ascii=False, default=str)}"


def left_out(block: str, call: dict[str, Any]) -> str:
    """Returns what a template leaves out of a call whose name is nowhere in the block, which may show its arguments with an id; else empty."""
    name, arguments = str(call["function"].get("name") or ""), call["function"].get("arguments")
    if name in block:
        return ""
    arguments = _parsed(arguments) if isinstance(arguments, str) else arguments
    is_there = not arguments or _holds(block, arguments)
    return f"the name {name!r} of a call" if is_there else f"the call of {name!r}"


def _parsed(text: str) -> Any:
    """Arguments that are JSON in a string, parsed; any other text as it is."""
    try:
        return json.loads(text)
    except ValueError:
        return text


def _holds(text: str, value: Any) -> bool:
    """Returns whether a value is in a text: as one JSON value, or as its parts in order, that of its keys or as a template sorts them.

    A template may leave out keys whose value is null.
    """
    values = [value, bare] if (bare := _without_nulls(value)) != value else [value]
    if isinstance(value, dict | list) and any(found in values for found in _json_values(text)):
        return True
    text = unescaped(text)
    return any(_has_parts(text, form) for each in values for form in (each, _sorted(each)))


def _without_nulls(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _without_nulls(item) for key, item in value.items() if item is not None}
    return [*map(_without_nulls, value)] if isinstance(value, list) else value


def _has_parts(text: str, value: Any) -> bool:
    at = 0
    for part in _parts(value):
        ends = [place + len(form) for form in _forms(part) if (place := text.find(form, at)) >= 0]
        if not ends:
            return False
        at = min(ends)
    return True


def _sorted(value: Any) -> Any:
    """With the keys of every object in the order of Jinja's `dictsort`."""
    if isinstance(value, dict):
        return {key: _sorted(value[key]) for key in sorted(value, key=str.lower)}
    return [_sorted(item) for item in value] if isinstance(value, list) else value


def _json_values(text: str) -> Iterator[Any]:
    """JSON objects and lists that begin anywhere in a text, as far as none is nested too deep."""
    for found in re.finditer(r"[{\[]", text):
        try:
            yield _DECODER.raw_decode(text, found.start())[0]
        except ValueError:
            continue
        except RecursionError:
            return  # deeper than a call's arguments may be, and so would the next thousand beginnings be


def _parts(value: Any) -> Iterator[Any]:
    """Keys and scalars of a value."""
    if isinstance(value, dict):
        for key, item in value.items():
            yield key
            yield from _parts(item)
    elif isinstance(value, list):
        for item in value:
            yield from _parts(item)
    else:
        yield value


def _forms(value: Any) -> set[str]:
    """How templates write a scalar, unescaped."""
    if isinstance(value, str):
        plain = unescaped(value)
        return {plain.strip() or plain}
    if value is None:
        return {"None", "null", ""}  # templates of tags write nothing between them
    return {str(value), json.dumps(value, default=str)}


def unescaped(text: str) -> str:
    """A text without escapes, however often and in whatever language: the same of a value and of its escaped forms."""
    for _ in range(_MAX_ESCAPED):
        if "\\" not in text and "&" not in text:
            break
        text = html.unescape(_ESCAPED.sub(_character, text))
    return text.replace("\\", "")  # one at the end of a value would take what the template writes behind it


def _character(found: re.Match[str]) -> str:
    high, code, letter = found.groups()
    if high:
        return chr(0x10000 + (int(high[:4], 16) - 0xD800 << 10) + int(high[-4:], 16) - 0xDC00)
    return chr(int(code[1:], 16)) if code else _LETTERS.get(letter, letter)


def _leaves(value: Any) -> Iterator[str]:
    return (part for part in _parts(value) if isinstance(part, str))


def _short(text: str, limit: int = 60) -> str:
    return text if len(text) <= limit else f"{text[: limit // 2]}…{text[-limit // 2 :]}"
