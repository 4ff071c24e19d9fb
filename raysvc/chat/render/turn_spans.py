"""Where a trained message begins and ends in the render.

A turn is trained from where the model would start to write to the end of its end-of-turn token:
- it begins after the generation prompt, as far as the render repeats it: a `<think>` that the prompt writes is context,
  one that the model has to write is trained;
- it ends after the end-of-turn token that the template writes; the newline or text after that is context.
`{% generation %}` marks are the beginning and end of what is said; the same rule then decides about the end of turn.

Always true:
- a span lies inside the block of its own message;
- it is proved by `prove_span`, or its row has a fault;
- a message that says nothing has no span.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

from raysvc.chat.render.rendered import Render
from raysvc.chat.render.span_proof import is_empty, prove_span, tags_of
from raysvc.chat.render.template import ChatTemplate
from raysvc.chat.row_errors import RowDropped, RowFault
from raysvc.chat.source.formats import ChatExample
from raysvc.chat.source.messages import Message

ALL_EMPTY = "every trained message is empty"
PROBE = "Seven quiet words that nobody ever writes"


@dataclass(frozen=True, slots=True)
class Span:
    """Characters of one block under loss: [start, end), of which [said, end) is the end of turn."""

    block: int
    start: int
    said: int
    end: int


@dataclass(frozen=True)
class Frame:
    """What a template writes around an assistant's plain text: before it, its end of turn, and after that."""

    head: str
    eot: str
    trailer: str


class TurnFinder:
    """Finds and proves the trained turns of one template.

    Args:
        template: compiled.
        added_tokens: texts of the tokenizer's added tokens.
        special_tokens: of these, the ones with a role, like the end of a sequence.
    """

    def __init__(
        self, template: ChatTemplate, added_tokens: Iterable[str], special_tokens: Iterable[str] = ()
    ) -> None:
        self._template = template
        self._tags = tags_of(template.text, special_tokens)
        texts = sorted((t for t in added_tokens if t), key=len, reverse=True)
        self._added = re.compile("|".join(map(re.escape, texts)) or r"(?!)")
        self._middle, self._last, called = self._probe()
        self._prompts: dict[tuple[str, bool], str] = {}
        frames = [frame for frame in (self._middle, self._last) if frame]
        self._eots = frozenset({frame.eot for frame in frames if frame.eot} | ({called} if called else set()))
        heads = [token for frame in frames for token in self._added.findall(frame.head)]
        self.control_tokens = tuple(
            t for t in dict.fromkeys([*heads, *self._eot_tokens()]) if t not in self._tags
        )

    def spans(self, render: Render, example: ChatExample) -> list[Span]:
        """Spans of the trained messages of one row, in order.

        Raises:
            RowFault: a turn cannot be found or proved.
            RowDropped: all trained messages are empty.
        """
        spans = []
        for place in example.trained:
            if not is_empty(example.messages[place]):
                spans.append(self.span(render, example, place))
        if not spans:
            raise RowDropped(ALL_EMPTY)
        return spans

    def span(self, render: Render, example: ChatExample, place: int) -> Span:
        """Span of one message that says something.

        Raises:
            RowFault: it cannot be found or proved.
        """
        block = _block_of(render, place)
        plain = self._plain(render, example, place, block)
        return plain or self._general(render, example, place, block)

    def prove(self, stretch: str, message: Message) -> None:
        """`prove_span` with what this template needs."""
        prove_span(stretch, message, self._tags, self.control_tokens)

    def heads(self, render: Render, example: ChatExample, place: int) -> list[str]:
        """Headers that the block of a message may begin with."""
        prompt = self._prompt(render, example, place, _block_of(render, place))
        return [head for head in (prompt, *(f.head for f in (self._middle, self._last) if f)) if head]

    def _plain(self, render: Render, example: ChatExample, place: int, block: int) -> Span | None:
        """The usual case, proved by equality: head + content + end of turn + trailer is the block."""
        frame, message = self._frame(example, place), example.messages[place]
        content = message.get("content")
        if frame is None or not frame.eot or self._template.marks_generation or type(content) is not str:
            return None
        if message.get("tool_calls"):
            return None
        head = self._prompt(render, example, place, block) or frame.head
        if render.blocks[block] != f"{head}{content}{frame.eot}{frame.trailer}":
            return None
        if any(control in content for control in self.control_tokens):
            return None
        said = len(head) + len(content)
        return Span(block, len(head), said, said + len(frame.eot))

    def _general(self, render: Render, example: ChatExample, place: int, block: int) -> Span:
        """Header and end of turn are found one by one, and what lies between is held against the message."""
        text, frame = render.blocks[block], self._frame(example, place)
        if self._template.marks_generation:
            start, stop = _marked(render, block)
        elif frame is None:
            raise RowFault("the template does not show where an assistant's turn begins and ends")
        else:
            start, stop = self._start(render, example, place, block), len(text)
        said, end = self._close(text, start, stop, frame)
        self.prove(text[start:said], example.messages[place])
        return Span(block, start, said, end)

    def _start(self, render: Render, example: ChatExample, place: int, block: int) -> int:
        """End of the first header that the block repeats, the generation prompt before others."""
        prompt = self._prompt(render, example, place, block)
        heads = [frame.head for frame in (self._middle, self._last) if frame]
        for head in (prompt, *heads):
            if head and render.blocks[block].startswith(head):
                return len(head)
        if not prompt and not any(heads):
            return 0
        raise RowFault("a trained turn does not begin with a known header", repr(render.blocks[block][:60]))

    def _close(self, text: str, start: int, stop: int, frame: Frame | None) -> tuple[int, int]:
        """(end of what is said, end of the end-of-turn token); the turn was marked up to `stop`."""
        if frame and frame.eot and text.endswith(frame.eot + frame.trailer):
            end = len(text) - len(frame.trailer)
            said = end - len(frame.eot)
        else:
            said, end = self._last_token(text, start, frame)
        if text[stop:said].strip() or said < start:
            raise RowFault("a trained turn goes on after its generation mark", repr(text[stop:said][:60]))
        return (min(stop, said), end) if end > said else (len(text[:stop].rstrip()),) * 2

    def _last_token(self, text: str, start: int, frame: Frame | None) -> tuple[int, int]:
        """Place of the last added token, when nothing but blanks follows it and it can end a turn."""
        found = list(self._added.finditer(text, start))
        if found and not text[found[-1].end() :].strip():
            token = found[-1]
            if frame is None or not frame.eot or token.group() in self._eots:
                return token.start(), token.end()
        if frame is not None and frame.eot:
            raise RowFault("a trained turn has no end of turn", repr(text[-60:]))
        return len(text), len(text)

    def _frame(self, example: ChatExample, place: int) -> Frame | None:
        return self._last if place == len(example.messages) - 1 else self._middle

    def _prompt(self, render: Render, example: ChatExample, place: int, block: int) -> str:
        """What the generation prompt adds before message `place`, asked once for each role before it."""
        key = (example.messages[place - 1]["role"] if place else "", example.tools is not None)
        if key not in self._prompts:
            self._prompts[key] = self._ask_prompt(render, example, place, block)
        return self._prompts[key]

    def _ask_prompt(self, render: Render, example: ChatExample, place: int, block: int) -> str:
        if not place:
            return self._middle.head if self._middle else ""
        before = example.messages[:place]
        try:
            prompted = self._template.render(before, example.tools, prompt=True).text
            written = "".join(render.blocks[:block])
            if prompted.startswith(written):
                return prompted[len(written) :]
            written = self._template.render(before, example.tools).text
        except RowFault:
            return ""
        return prompted[len(written) :] if prompted.startswith(written) else ""

    def _probe(self) -> tuple[Frame | None, Frame | None, str]:
        """Frames of a turn in the middle and of the last one, and the end of turn after a tool call."""
        first, second = PROBE, PROBE[::-1]
        plain = [_say("user", "a"), _say("assistant", first), _say("user", "b"), _say("assistant", second)]
        call = {"type": "function", "function": {"name": "f", "arguments": {"a": "b"}}}
        calling = [_say("user", "a"), {**_say("assistant", ""), "tool_calls": [call]}, _say("tool", "c")]
        middle, last = self._frame_at(plain, 1, first), self._frame_at(plain, 3, second)
        last = last or self._frame_at(plain[2:], 1, second)
        if middle is None and last is None:
            return None, None, ""
        try:
            render = self._template.render(calling, None)
        except RowFault:
            return middle, last, ""
        tokens = self._added.findall(
            "".join(t for t, o in zip(render.blocks, render.owners, strict=True) if o == 1)
        )
        return middle, last, tokens[-1] if tokens else ""

    def _frame_at(self, messages: list[Message], place: int, content: str) -> Frame | None:
        """What stands around a message of a conversation, None when the template refuses it or shows another text."""
        try:
            render = self._template.render(messages, None)
        except RowFault:
            return None
        if render.owners.count(place) != 1:
            return None
        head, found, tail = render.blocks[render.owners.index(place)].partition(content)
        if not found:
            return None
        head = head if head.strip() else ""  # a blank is no header: the model writes it
        token = self._added.search(tail)
        return Frame(head, tail[: token.end()], tail[token.end() :]) if token else Frame(head, "", tail)

    def _eot_tokens(self) -> list[str]:
        return [token for eot in sorted(self._eots) for token in self._added.findall(eot)]


def _say(role: str, content: str) -> Message:
    return {"role": role, "content": content}


def _block_of(render: Render, place: int) -> int:
    found = [index for index, owner in enumerate(render.owners) if owner == place]
    if len(found) != 1:
        raise RowFault("a trained message is not one stretch of the render", f"it is {len(found)}")
    return found[0]


def _marked(render: Render, block: int) -> tuple[int, int]:
    inside = [(start, end) for owner, start, end in render.marks if owner == block]
    if len(inside) != 1:
        raise RowFault("a trained message does not have one generation mark", f"it has {len(inside)}")
    return inside[0]
