"""Asks a template that nobody has seen, once, what its renders of a few words show.

1. Of a conversation with two answers, the block of each is cut at its words: what stands before is the head, what stands behind
   up to its last control token the end of turn, and the rest the trailer. The last answer has a frame of its own.
2. What a conversation with one question has more when the prompt is asked shows the tags that the prompt opens.
3. A token opens a turn that stands first in a head, unless it is one that a bare conversation begins with.
4. An added token of the tokenizer is a control token where it has a role (end of sequence), or the model stops at it. So is any
   other one that looks like a mark (`<…>`, `[…]`, `|…|`) and is special, or is written by the template itself; a special one that
   looks like a word only where the template writes it; a blank never. All others are text, as a message may say them
   (Gemma adds `"\\n\\n"`, `<b>`, `<unused12>`). Whether a token is called special does not tell: `<|im_end|>` may be a plain one.
5. The turns of `PROBES`, found by the rules of `turn_spans`, show which control tokens stand inside of turns, and whether the
   template mixes messages.

Nothing is guessed: where the probes show no beginning or end, each row is quarantined ("the template does not show where an
assistant's turn begins and ends"). One that does not compile, or takes more than its budget of most rows, ends the build.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any

from jinja2 import nodes

from raysvc.chat.render.chat_environment import chat_environment
from raysvc.chat.render.template import ChatTemplate
from raysvc.chat.row_errors import RowFault
from raysvc.chat.source.examples import ChatExample
from raysvc.chat.source.messages import Message
from raysvc.chat.source.template_fit import PROBE_TOOL
from raysvc.chat.turns.token_texts import TokenTexts
from raysvc.chat.turns.turn_check import tags_of

_TAG = re.compile(r"<[\w:.-]{1,40}>")
_MARK = re.compile(r"[<\[|｜]\S.*[>\]|｜]", re.DOTALL)
_ROLES = ("system", "user", "assistant")
QUIET = "Seven quiet words that nobody ever writes"
ASKED = "Five odd words nobody asks"


def say(role: str, content: str, **fields: object) -> Message:
    """One message."""
    return {"role": role, "content": content, **fields}


_CALL = {"type": "function", "id": "callid001", "function": {"name": "f", "arguments": {"a": "b"}}}
_TEXT_CALL = {"type": "function", "id": "callid001", "function": {"name": "f", "arguments": '{"a": "b"}'}}
_RESULT = say("tool", "c", name="f", tool_call_id="callid001")
_THOUGHT = {"reasoning_content": "c d", "thinking": "c d", "reasoning": "c d"}
PROBES: list[tuple[list[Message], list[object] | None]] = [
    ([say("user", ASKED), say("assistant", "b"), say("user", ASKED[::-1]), say("assistant", "d")], None),
    ([say("user", "a"), say("assistant", "b", **_THOUGHT)], None),
    ([say("user", "a"), say("assistant", "", tool_calls=[_CALL]), _RESULT], [PROBE_TOOL]),
    ([say("user", "a"), say("assistant", "", tool_calls=[_CALL], **_THOUGHT), _RESULT], [PROBE_TOOL]),
    (
        [say("user", "a"), say("assistant", "", tool_calls=[_CALL]), _RESULT, say("assistant", "d")],
        [PROBE_TOOL],
    ),
    (
        [
            say("user", "a"),
            say("assistant", "", tool_calls=[_CALL]),
            _RESULT,
            say("assistant", "", tool_calls=[_CALL], **_THOUGHT),
            _RESULT,
        ],
        [PROBE_TOOL],
    ),
    ([say("user", "a"), say("assistant", "", tool_calls=[_TEXT_CALL]), _RESULT], [PROBE_TOOL]),
    ([say("user", "a"), say("assistant", "", tool_calls=[_CALL])], [PROBE_TOOL]),
]


def control_texts(template: ChatTemplate, added: Iterable[Any], named: Iterable[str]) -> list[str]:
    """Texts of the added tokens that are control tokens under a template.

    Args:
        template: that writes them.
        added: tokens of the tokenizer, with `content` and `special`.
        named: texts of the tokens with a role, and of those that the model stops at.
    """
    certain, written = set(named), None
    found = []
    for token in added:
        text, is_mark = token.content, _MARK.fullmatch(token.content) is not None
        if text in certain or (token.special and is_mark):
            found.append(text)
        elif not text.isspace() and (token.special or is_mark):
            written = written or "\0".join((*_literals(template.text), *_renders(template)))
            if text in written:
                found.append(text)
    return found


def _literals(text: str) -> Iterator[str]:
    """Returns what stands in a template as text, and what it may write of its strings."""
    tree = chat_environment(None).parse(text)
    yield from (node.data for node in tree.find_all(nodes.TemplateData))
    yield from (node.value for node in tree.find_all(nodes.Const) if isinstance(node.value, str))


def _renders(template: ChatTemplate) -> Iterator[str]:
    """Conversations of words without a mark, for the marks that a template joins: `'<|' + message.role + '|>'`."""
    plain = [say(role, "a") for role in _ROLES]
    for messages, tools in ((plain, None), *PROBES):
        try:
            yield template.render(messages, tools).text
        except RowFault:
            continue


@dataclass(frozen=True)
class Frame:
    """Holds what a template writes around an assistant's plain text: before it, its end of turn, and after that.

    `closed`: the end of turn ends with a control token.
    """

    head: str
    eot: str
    trailer: str
    closed: bool


class TurnSigns:
    """Knows the signs by which the turns of one template are told.

    Args:
        template: compiled.
        tokens: its control tokens.
        roles: texts of the tokens with a role.
        stops: texts that the model's `generation_config.json` stops at, empty when there is none.

    Attributes:
        middle, last: frames of a turn in the middle and of the last one; None where the template shows none.
        has_prompt: it adds something when it is asked for the prompt.
        opened: tags of the generation prompt.
        opening: tokens that open a turn.
        inner: control tokens that it writes inside of turns; empty until turns were found.
        tags: where it may cut a content apart.
    """

    def __init__(
        self, template: ChatTemplate, tokens: TokenTexts, roles: Iterable[str], stops: Iterable[str]
    ) -> None:
        self.template, self.tokens, self.stops = template, tokens, frozenset(stops)
        self.tags = tags_of(template.text, roles)
        self.inner: frozenset[str] = frozenset()
        tools: list[Any] | None = None
        for tools in (None, [PROBE_TOOL]):  # a template for rows with tools may refuse to go without
            self.middle, self.last = self._frames(tools)
            if self.frames:
                break
        asked, bare = self._question(tools)
        self.has_prompt = asked != bare
        added = asked[common_prefix(asked, bare) :]
        self.opened = tuple(dict.fromkeys(_TAG.findall(added)))
        self.opening = self._openings([added, *(frame.head for frame in self.frames)], bare)
        seen = (*tokens.texts, *self.tags, *self.opened)
        self._at_end = re.compile(rf"(?:(?:{'|'.join(map(re.escape, seen)) or '(?!)'})\s*)+\Z")

    @property
    def frames(self) -> list[Frame]:
        """Those that there are."""
        return [frame for frame in (self.middle, self.last) if frame]

    @property
    def heads(self) -> list[str]:
        """Returns what stands before an answer, where something does."""
        return [frame.head for frame in self.frames if frame.head]

    @property
    def writes_end(self) -> bool:
        """Returns whether plain turns have an end."""
        return any(frame.eot for frame in self.frames)

    def frame_of(self, example: ChatExample, place: int) -> Frame | None:
        """The frame of a message by its place alone."""
        return self.last if place == len(example.messages) - 1 else self.middle

    def opens(self, prompt: str) -> bool:
        """Returns whether a generation prompt opens a turn, and does not go on with one that is open, as after a tool's result."""
        tokens = (token.group() for token in self.tokens.one.finditer(prompt))
        return any(token in self.opening for token in tokens) if self.opening else bool(prompt)

    def is_open(self, text: str, begin: int) -> bool:
        """Returns whether what stands before a block opens the turn: a template may write the header with the message before."""
        end = self._at_end.search(text[max(0, begin - 120) : begin])
        found = self.tokens.one.finditer(end.group()) if end else ()
        return any(token.group() in self.opening for token in found)

    def _frames(self, tools: list[Any] | None) -> tuple[Frame | None, Frame | None]:
        first, second = QUIET, QUIET[::-1]
        plain = [say("user", "a"), say("assistant", first), say("user", "b"), say("assistant", second)]
        middle, last = self._frame_at(plain, 1, first, tools), self._frame_at(plain, 3, second, tools)
        last = last or self._frame_at(plain[2:], 1, second, tools)
        if self.template.marks_generation:
            return middle, last
        return _ended_by_text(middle, last)

    def _frame_at(
        self, messages: list[Message], place: int, content: str, tools: list[Any] | None
    ) -> Frame | None:
        """Returns what stands around a message of a conversation, None when the template refuses it or shows another text."""
        try:
            render = self.template.render(messages, tools)
        except RowFault:
            return None
        extents = render.extents_of(place)
        if len(extents) != 1:
            return None
        start, stop = extents[0]
        head, found, tail = render.text[start:stop].partition(content)
        if not found:
            return None
        head = head if head.strip() else ""  # a blank is no header: the model writes it
        end = self.tokens.last_end(tail, 0, len(tail))
        if end is None:
            token = self.tokens.one.search(tail)
            end = token.end() if token else 0
        end = self.tokens.first_end(tail, 0, end, ())
        return Frame(head, tail[:end], tail[end:], self.tokens.closes(tail, end))

    def _question(self, tools: list[Any] | None) -> tuple[str, str]:
        """A conversation of one question with the prompt, and without; empty where the template refuses it."""
        question = [say("user", "a")]
        try:
            asked = self.template.render(question, tools, prompt=True).text
            return asked, self.template.render(question, tools).text
        except RowFault:
            return "", ""

    def _openings(self, heads: list[str], bare: str) -> frozenset[str]:
        """Returns what ends the turn before may stand before the opening."""
        first = next((token for token in self.tokens.one.findall(bare) if token != self.tokens.begin), "")
        found = [self.tokens.one.findall(head) for head in heads]
        return frozenset(first if first in tokens else tokens[0] for tokens in found if tokens)


def follows_itself(example: ChatExample, place: int) -> bool:
    """Returns whether a message and the one before it are the assistant's."""
    pair = example.messages[max(0, place - 1) : place + 1]
    return [message["role"] for message in pair] == ["assistant", "assistant"]


def common_prefix(left: str, right: str) -> int:
    """Characters that two texts begin with alike."""
    size = min(len(left), len(right))
    return next((n for n in range(size) if left[n] != right[n]), size)


def _ended_by_text(middle: Frame | None, last: Frame | None) -> tuple[Frame | None, Frame | None]:
    """Frames whose end is a text, where no token ends a turn and the same text is behind every turn."""
    if middle is None or last is None or middle.eot or last.eot:
        return middle, last
    text = middle.trailer.strip()
    if not text or text != last.trailer.strip():
        return middle, last
    return _cut_behind(middle, text), _cut_behind(last, text)


def _cut_behind(frame: Frame, text: str) -> Frame:
    end = frame.trailer.index(text) + len(text)
    return replace(frame, eot=frame.trailer[:end], trailer=frame.trailer[end:])
