"""What a turn of the model is in a render: the characters under loss of every trained message.

A turn is everything that the model emits until control returns. The rule:

1. The block of a message is what the template writes while it is at that message. Where it marks `{% generation %}`,
   only what lies inside the marks of the block is the model's.
2. The generation prompt is context, as far as the block repeats it, inside of a mark too: in whole tokens, tags, words
   and blanks. A `<think>` that the prompt writes is context, one that the model has to write is trained, and so is a
   `<think></think>` that the template writes and the prompt does not. Where the header is written with the message before,
   all of the block is the model's.
3. Everything after it is trained up to the last control token of the block: headers between the parts of one message
   (analysis, call, final), closing tags, and every token of the end of turn. Blanks and text after that are context.
   Where no token ends a turn, the text does that the template writes behind each.
4. A template that writes no token at the end of its turns stops the model with the token at the head of what follows:
   that token is trained too. When the tokenizer comes with a `generation_config.json`, only a token that it names.
   Of messages of the assistant that follow each other and are written as one turn, the first has no end and the next no header.
5. The end of sequence that a template writes after its last block belongs to the turn that is there, unless that has ended with it.
6. What a template writes of tool results inside the block of their call is context, but for a stop token of 4.

Always true:
- a span holds nothing of another message but the stop token of 4;
- `verify_turn` accepted it, or its row has a fault;
- a message that says nothing has no span.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from raysvc.chat.render.rendered import Extent, Render, extents_of, marks_within
from raysvc.chat.render.template import ChatTemplate
from raysvc.chat.render.token_texts import TokenTexts, behind_blanks
from raysvc.chat.render.turn_check import (
    all_said,
    is_empty,
    left_out,
    tags_of,
    texts_of,
    unescaped,
    verify_turn,
)
from raysvc.chat.render.turn_probes import PROBES, QUIET, say
from raysvc.chat.row_errors import RowDropped, RowFault
from raysvc.chat.source.examples import ChatExample
from raysvc.chat.source.messages import Message
from raysvc.chat.source.template_fit import PROBE_TOOL

_TAG = re.compile(r"<[\w:.-]{1,40}>")
ALL_EMPTY = "every trained message is empty"


class TurnSpan(NamedTuple):
    """Characters of a render under loss: [start, end); `closed` when the last of them is a control token.

    `endless`: the turn ends there, and the template writes no end of it.
    """

    start: int
    end: int
    closed: bool
    endless: bool = False


@dataclass(frozen=True)
class Frame:
    """What a template writes around an assistant's plain text: before it, its end of turn, and after that."""

    head: str
    eot: str
    trailer: str


class TurnFinder:
    """Finds and verifies the trained turns of one template.

    Args:
        template: compiled.
        added_tokens: texts of the tokenizer's added tokens that are control tokens (`control_texts`).
        special_tokens: role -> text, of the tokens with a role, like the end of a sequence.
        stop_tokens: texts that the model's `generation_config.json` stops at, empty when there is none.
    """

    def __init__(
        self,
        template: ChatTemplate,
        added_tokens: Iterable[str],
        special_tokens: dict[str, str] | None = None,
        stop_tokens: Iterable[str] = (),
    ) -> None:
        roles = special_tokens or {}
        self._template = template
        self._tags = tags_of(template.text, roles.values())
        self._bos, self._eos = roles.get("bos_token", ""), roles.get("eos_token", "")
        self._stops = frozenset(stop_tokens)
        self._tokens = TokenTexts(added_tokens, self._bos, self._eos)
        self._prompts: dict[tuple[str, bool, bool], str | None] = {}
        self._middle: Frame | None = None
        self._last: Frame | None = None
        self.inner_tokens: frozenset[str] = frozenset()
        self._mixes = False  # messages of others into a turn
        with template.only_asked():
            self._middle, self._last = self._frames()
            self._frames_known = self._middle is not None or self._last is not None
            self._writes_end = any(frame.eot for frame in (self._middle, self._last) if frame)
            seen = (*self._tokens.texts, *self._tags, *self._opened)
            self.openings = frozenset(text[:2] for text in seen)
            self._at_end = re.compile(rf"(?:(?:{'|'.join(map(re.escape, seen)) or '(?!)'})\s*)+\Z")
            self.control_tokens, self.inner_tokens = self._controls()

    @property
    def ends_in_block(self) -> bool:
        """Whether a turn that is not the last ends inside its own block, and no marks say where."""
        return self._writes_end and not self._template.marks_generation

    @property
    def all_tokens(self) -> list[str]:
        """Texts of all control tokens that may stand in a render."""
        return self._tokens.texts

    @property
    def turn_ends(self) -> tuple[str, ...]:
        """Texts of the tokens that plain turns end with."""
        found = [self._tokens.one.findall(frame.eot) for frame in (self._middle, self._last) if frame]
        return tuple(tokens[-1] for tokens in found if tokens)

    def is_end(self, text: str) -> bool:
        """Whether a text is added tokens and the blanks around them, and nothing else."""
        return self._tokens.run.fullmatch(text) is not None

    def spans(self, render: Render, example: ChatExample) -> list[TurnSpan]:
        """Spans of the trained messages of one row, in order.

        Raises:
            RowFault: a turn cannot be found or verified.
            RowDropped: all trained messages are empty.
        """
        spans: list[TurnSpan] = []
        for place in example.trained:
            if not is_empty(example.messages[place]):
                spans += self.turn(render, example, place)
        if not spans:
            raise RowDropped(ALL_EMPTY)
        return spans

    def turn(self, render: Render, example: ChatExample, place: int) -> list[TurnSpan]:
        """Spans of one message that says something, verified.

        Raises:
            RowFault: they cannot be found or verified.
        """
        plain = self._plain(render, example, place)
        if plain is not None:
            return [plain]
        if self._mixes:
            raise RowFault("the template writes other messages into an assistant's turn")
        missing = self._left_out(render, example, place)
        if missing:
            raise RowFault("a trained turn does not hold its tool call", f"the template leaves out {missing}")
        found = self._found(render, example, place)
        stretch = "".join(render.text[span.start : span.end] for span in found)
        self.verify(stretch, example.messages[place])
        foreign = self._foreign(stretch, example, place) or self._taken_in(render, example, place, stretch)
        if foreign:
            raise RowFault("a trained turn holds text of another message", repr(foreign[:60]))
        return found

    @staticmethod
    def _left_out(render: Render, example: ChatExample, place: int) -> str:
        calls = example.messages[place].get("tool_calls") or ()
        block = "".join(render.text[start:end] for start, end in extents_of(render, place)) if calls else ""
        return next(filter(None, (left_out(block, call) for call in calls)), "")

    def verify(self, stretch: str, message: Message) -> None:
        """`verify_turn` with what this template needs; the stretch includes its end of turn.

        Raises:
            RowFault: the stretch is not what the message says.
        """
        verify_turn(stretch, message, self._tags, self.control_tokens, self.inner_tokens, self._opened)

    def header(self, render: Render, example: ChatExample, place: int) -> str:
        """What a message with one block is expected to begin with: the generation prompt, else a plain turn's header.

        Empty when there is neither: the turn begins where its block does.
        """
        prompt = self._prompt(render, example, place, extents_of(render, place)[0][0])
        heads = (frame.head for frame in (self._middle, self._last) if frame and frame.head)
        return prompt or next(heads, "")

    @property
    def words_decide_prompt(self) -> bool:
        """Whether turns that are written alike may have other prompts."""
        return self._template.words_decide_prompt

    def prompt_by_words(self, render: Render, example: ChatExample, place: int, begin: int) -> str | None:
        """The generation prompt of a message whose block begins there, where words decide on it; else None."""
        return self._prompt(render, example, place, begin) if self.words_decide_prompt else None

    def _plain(self, render: Render, example: ChatExample, place: int) -> TurnSpan | None:
        """The usual turn, verified by equality: prompt, content, end of turn and blanks are the block."""
        message = example.messages[place]
        last = place == len(example.messages) - 1
        frame, content = self._last if last else self._middle, message.get("content")
        if frame is None or not frame.eot or self._template.marks_generation:
            return None
        if type(content) is not str or "tool_calls" in message or render.owners.count(place) != 1:
            return None
        index = render.owners.index(place)
        if last and index != len(render.blocks) - 1:
            return None  # rule 5
        begin, block = sum(map(len, render.blocks[:index])), render.blocks[index]
        head = self._prompt(render, example, place, begin)
        if not head or not head.strip() or block != f"{head}{content}{frame.eot}{frame.trailer}":
            return None
        if any(control in content for control in self.control_tokens):
            return None
        closed = self._tokens.closes(frame.eot)
        return TurnSpan(begin + len(head), begin + len(block) - len(frame.trailer), closed)

    def _found(self, render: Render, example: ChatExample, place: int) -> list[TurnSpan]:
        text, extents = render.text, extents_of(render, place)
        said = texts_of(example.messages[place])
        if not extents and not any(words and words in text for words in map(str.strip, said)):
            raise RowFault("the template does not show a trained message")
        marked = self._template.marks_generation
        if not extents or (not marked and not self._frames_known):
            raise RowFault("the template does not show where an assistant's turn begins and ends")
        parts = marks_within(render, extents) if marked else self._own(render, example, place, extents)
        if marked and not parts:
            raise RowFault("a trained message has no generation mark")
        head = self._head(render, example, place, extents[0][0], marked)
        parts = [(max(start, head), end) for start, end in parts if end > head]
        if not parts:
            raise RowFault("a trained message has no text after its header")
        start, stop = parts[-1]
        end = self._end(text, start, stop, extents[-1][1], example, place)
        end = end if marked else self._first_end(text, start, end)
        parts = [*parts[:-1], (start, end)]
        spans = [TurnSpan(a, b, self._tokens.closes(text[a:b])) for a, b in parts if text[a:b].strip()]
        if spans and self._is_endless(text[:end], example, place):
            spans[-1] = spans[-1]._replace(endless=True)
        return spans

    def _is_endless(self, text: str, example: ChatExample, place: int) -> bool:
        """Whether a turn that ends where a text does has no end: no token, no text behind every turn, and it does not go on."""
        if self._tokens.closes(text) or self._follows_itself(example, place + 1):
            return False
        ends = [frame.eot.strip() for frame in (self._middle, self._last) if frame]
        return not any(end and text.endswith(end) for end in ends)

    def _head(self, render: Render, example: ChatExample, place: int, begin: int, marked: bool) -> int:
        """Rule 2: where the repeated part of the generation prompt ends."""
        text = render.text
        prompt = self._prompt(render, example, place, begin)
        if not place and prompt and self._has_prompt:  # text before any message may begin the first block
            begin = self._tokens.place_of(prompt, text, begin, extents_of(render, place)[0][1])
        repeated = self._tokens.repeated(prompt or "", text, begin)
        if repeated:
            return begin + repeated
        if self._is_open(text, begin):
            return begin
        heads = [frame.head for frame in (self._middle, self._last) if frame and frame.head]
        for head in heads:
            if text.startswith(head, begin):
                return begin + len(head)
        goes_on = (
            prompt is not None and self._has_prompt and not self._opens(prompt)
        )  # no header: its turn goes on
        first = self._tokens.lead.match(text, begin)
        opened = self._tokens.one.search(first.group()) if first else None
        goes_on |= (
            opened is not None and opened.group() in self.inner_tokens - self._opening
        )  # no header at all
        goes_on |= self._follows_itself(example, place) and not self._tokens.closes(text[:begin].rstrip())
        if marked or goes_on or not ((prompt or "").strip() or heads):
            return begin
        raise RowFault("a trained turn does not begin with a known header", repr(text[begin : begin + 60]))

    @staticmethod
    def _follows_itself(example: ChatExample, place: int) -> bool:
        """Whether a message and the one before it are the assistant's."""
        pair = example.messages[max(0, place - 1) : place + 1]
        return [message["role"] for message in pair] == ["assistant", "assistant"]

    def _first_end(self, text: str, start: int, end: int) -> int:
        """Where the sequence ends first, if a second end is all that the template writes behind that, or a second, empty turn."""
        first = text.find(self._eos, start, end) if self._eos else -1
        stop = first + len(self._eos)
        if first < 0 or self._eos not in text[stop:end]:
            return end
        heads = {frame.head for frame in (self._middle, self._last) if frame and frame.head.strip()}
        behind = re.sub("|".join(map(re.escape, heads)) or "(?!)", "", text[stop:end])
        return end if self._tokens.one.sub("", behind).strip() else stop

    def _ends_behind(self, text: str, block_end: int) -> bool:
        """Whether the next block begins with a token that neither opens a turn nor stands inside of one."""
        token = self._tokens.one.match(text, behind_blanks(text, block_end))
        return token is not None and token.group() not in self._opening | self.inner_tokens

    def _is_open(self, text: str, begin: int) -> bool:
        """Whether what stands before a block opens the turn: a template may write the header with the message before."""
        end = self._at_end.search(text[max(0, begin - 120) : begin])
        found = self._tokens.one.finditer(end.group()) if end else ()
        return any(token.group() in self._opening for token in found)

    def _opens(self, prompt: str) -> bool:
        """Whether a generation prompt opens a turn, and does not go on with one that is open, as after a tool's result."""
        tokens = (token.group() for token in self._tokens.one.finditer(prompt))
        return any(token in self._opening for token in tokens) if self._opening else bool(prompt)

    def _end(self, text: str, start: int, stop: int, block_end: int, example: ChatExample, place: int) -> int:
        """Rules 3 to 5: behind the last token that the model must produce."""
        frame = self._last if place == len(example.messages) - 1 else self._middle
        marked, follows = self._template.marks_generation, self._follows_itself(example, place + 1)
        end = self._end_in_block(text, start, stop, block_end, frame)
        if end is None:
            end = start + len(text[start:stop].rstrip())
            if frame is not None and frame.eot and not follows and not marked:
                raise RowFault("a trained turn has no end of turn", repr(text[max(start, stop - 60) : stop]))
        if stop < block_end and not marked:  # the results of its calls follow
            ended = frame is not None and frame.eot and text.endswith(frame.eot, start, end)
            return end if ended else self._with_next_stop(text, end, stop)
        if self._writes_end or marked:
            return self._with_end_of_sequence(text, end, example, place)
        goes_on = follows and not self._ends_behind(text, block_end)
        return end if goes_on else self._with_next_stop(text, end, block_end)

    def _end_in_block(
        self, text: str, start: int, stop: int, block_end: int, frame: Frame | None
    ) -> int | None:
        behind = frame.trailer if frame and not self._template.marks_generation else ""
        if frame and behind.strip() and text.endswith(frame.eot + behind, start, block_end):
            return block_end - len(behind)
        if frame and frame.eot and not self._tokens.one.search(frame.eot):
            end = start + len(text[start:block_end].rstrip())
            return end if text.endswith(frame.eot.strip(), start, end) else None
        run = self._tokens.run.search(text, start, block_end)
        if run is None or run.start() > stop:
            return self._tokens.last_end(text, start, stop)
        return self._tokens.last_end(text, run.start(), block_end)

    def _with_end_of_sequence(self, text: str, end: int, example: ChatExample, place: int) -> int:
        """Rule 5."""
        if place != len(example.messages) - 1 or not self._eos:
            return end
        run = self._tokens.run.fullmatch(text, end)
        last = text.rfind(self._eos, end) if run else -1
        return last + len(self._eos) if last >= 0 else end

    def _with_next_stop(self, text: str, end: int, block_end: int) -> int:
        """Rule 4."""
        if text[end:block_end].strip():
            return end
        token = self._tokens.one.match(text, behind_blanks(text, block_end))
        if token is None:
            return end
        if self._stops:
            return token.end() if token.group() in self._stops else end
        return end if token.group() == self._bos else token.end()

    def _own(self, render: Render, example: ChatExample, place: int, extents: list[Extent]) -> list[Extent]:
        """Rule 6: the block without the tool results that the template writes into it."""
        messages, text = example.messages, render.text
        after = place + 1
        while after < len(messages) and messages[after].get("role") == "tool":
            after += 1
        results = [extents_of(render, other) for other in range(place + 1, after)]
        if len(extents) > 1 or all(results):
            first = min((begin for shown in results for begin, _ in shown), default=len(text))
            self._refuse_behind_results("".join(text[a:b] for a, b in extents if a > first))
            return [(a, b) for a, b in extents if text[a:b].strip()]
        start, end = extents[0][0], extents[-1][1]
        without = self._template.render([*messages[: place + 1], *messages[after:]], example.tools)
        other = extents_of(without, place)
        if len(other) != 1:
            raise RowFault("a trained message and the results of its calls cannot be told apart")
        mine, bare = text[start:end], without.text[other[0][0] : other[0][1]]
        prefix = common_prefix(mine, bare)
        prefix = min(self._tokens.around(each, prefix)[0] for each in (mine, bare))
        suffix = common_prefix(mine[prefix:][::-1], bare[prefix:][::-1])
        suffix = len(mine) - self._tokens.around(mine, len(mine) - suffix)[1]
        self._refuse_behind_results(bare[prefix:])
        parts = [(start, start + prefix), (end - suffix, end)]
        return [(a, b) for a, b in parts if text[a:b].strip()]

    def _refuse_behind_results(self, text: str) -> None:
        if self._tokens.one.sub("", text).strip():
            raise RowFault("the template writes a text behind the results of its calls", repr(text[:60]))

    @staticmethod
    def _foreign(stretch: str, example: ChatExample, place: int) -> str:
        """What another message says and the trained text of this one holds, unless this one says it too; empty without."""
        for other, message in enumerate(example.messages):
            if abs(other - place) > 8 or other == place:
                continue
            for said in texts_of(message):
                words = said.strip()
                if len(words) < 12 or words not in stretch:
                    continue
                if unescaped(words) not in all_said(example.messages[place]):
                    return words
        return ""

    def _taken_in(self, render: Render, example: ChatExample, place: int, stretch: str) -> str:
        """A short text in the trained one, of a message that has no block: another render tells chance from the template."""
        messages = example.messages
        for other, message in enumerate(messages):
            shown = [words for words in map(str.strip, texts_of(message)) if words and words in stretch]
            if other == place or not shown or other in render.owners:
                continue
            changed = [*messages[:other], {**message, "content": QUIET}, *messages[other + 1 :]]
            instead = self._template.render(changed, example.tools)
            spans = self._found(instead, replace(example, messages=changed), place)
            if any(QUIET in instead.text[span.start : span.end] for span in spans):
                return shown[0]
        return ""

    def _prompt(self, render: Render, example: ChatExample, place: int, begin: int) -> str | None:
        """What the generation prompt adds before a message, asked once for each kind of message before it unless words decide on it.

        Where that cannot be told, what it adds behind a user's message; None: that neither.
        """
        before = example.messages[place - 1] if place else {}
        key = (str(before.get("role", "")), bool(before.get("tool_calls")), example.tools is not None)
        if key not in self._prompts or (place and self.words_decide_prompt):
            asked = self._ask_prompt(render, example, place, begin) if place else None
            self._prompts[key] = self._usual_prompt(example.tools) if asked is None else asked
        return self._prompts[key]

    def _usual_prompt(self, tools: list[Any] | None) -> str | None:
        plain = ChatExample([say("user", "a"), say("assistant", QUIET)], tools, ())
        try:
            render = self._template.render(plain.messages, tools)
        except RowFault:
            return None
        extents = extents_of(render, 1)
        return self._ask_prompt(render, plain, 1, extents[0][0]) if extents else None

    def _ask_prompt(self, render: Render, example: ChatExample, place: int, begin: int) -> str | None:
        before = example.messages[:place]
        try:
            prompted = self._template.render(before, example.tools, prompt=True).text
            written = render.text[:begin]
            if prompted.startswith(written):
                return prompted[len(written) :]
            blocks = self._template.render(before, example.tools).blocks
        except RowFault:
            return None
        if prompted.startswith("".join(blocks)):
            return prompted[len("".join(blocks)) :]
        # a template that also writes something else before its last block, when it is asked
        _, found, added = prompted.rpartition(blocks[-1])
        return added if found and added.strip() else None

    def _frames(self) -> tuple[Frame | None, Frame | None]:
        """Frames of a turn in the middle and of the last one."""
        first, second = QUIET, QUIET[::-1]
        plain = [say("user", "a"), say("assistant", first), say("user", "b"), say("assistant", second)]
        middle = last = tools = None
        for tools in (None, [PROBE_TOOL]):  # a template for rows with tools may refuse to go without
            middle, last = self._frame_at(plain, 1, first, tools), self._frame_at(plain, 3, second, tools)
            last = last or self._frame_at(plain[2:], 1, second, tools)
            if not self._template.marks_generation:
                middle, last = _ended_by_text(middle, last)
            if middle or last:
                break
        try:
            asked = self._template.render(plain[:1], tools, prompt=True).text
            bare = self._template.render(plain[:1], tools).text
        except RowFault:
            asked = bare = ""
        self._has_prompt = asked != bare
        added = asked[common_prefix(asked, bare) :]
        self._opened = tuple(dict.fromkeys(_TAG.findall(added)))
        heads = [added, *(f.head for f in (middle, last) if f)]
        first = next((token for token in self._tokens.one.findall(bare) if token != self._bos), "")
        found = [
            self._tokens.one.findall(head) for head in heads
        ]  # what ends the turn before may stand before the opening
        self._opening = {first if first in tokens else tokens[0] for tokens in found if tokens}
        return middle, last

    def _frame_at(
        self, messages: list[Message], place: int, content: str, tools: list[Any] | None
    ) -> Frame | None:
        """What stands around a message of a conversation, None when the template refuses it or shows another text."""
        try:
            render = self._template.render(messages, tools)
        except RowFault:
            return None
        if render.owners.count(place) != 1:
            return None
        head, found, tail = render.blocks[render.owners.index(place)].partition(content)
        if not found:
            return None
        head = head if head.strip() else ""  # a blank is no header: the model writes it
        end = self._tokens.last_end(tail, 0, len(tail))
        if end is None:
            token = self._tokens.one.search(tail)
            end = token.end() if token else 0
        end = self._first_end(tail, 0, end)
        return Frame(head, tail[:end], tail[end:])

    def _controls(self) -> tuple[tuple[str, ...], frozenset[str]]:
        """(tokens that open a header or end a turn, those of them that also stand inside a turn)."""
        ends: list[str] = []
        inner: set[str] = set()
        stretches: list[str] = []
        for messages, tools in PROBES:
            example = ChatExample(messages, tools, ())
            try:
                render = self._template.render(messages, tools)
            except RowFault:
                continue
            for place, message in enumerate(messages):
                if message["role"] != "assistant":
                    continue
                try:
                    spans = self._found(render, example, place)
                except RowFault:
                    continue
                stretch = "".join(render.text[s.start : s.end] for s in spans)
                self._mixes |= bool(self._foreign(stretch, example, place))
                stretches.append(stretch)
                tokens = self._tokens.one.findall(stretch)
                ends += tokens[-1:]
                inner |= set(tokens[:-1])
        heads = [
            t for frame in (self._middle, self._last) if frame for t in self._tokens.one.findall(frame.head)
        ]
        eots = [
            t
            for frame in (self._middle, self._last)
            if frame and frame.eot
            for t in self._tokens.one.findall(frame.eot) or [frame.eot.strip()]
        ]
        controls = tuple(t for t in dict.fromkeys([*heads, *eots, *ends]) if t not in self._tags)
        inner |= {t for t in eots if any(t in stretch[: -len(t)] for stretch in stretches)}
        return controls, frozenset(inner)


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
    return Frame(frame.head, frame.trailer[:end], frame.trailer[end:])


def common_prefix(left: str, right: str) -> int:
    """Characters that two texts begin with alike."""
    size = min(len(left), len(right))
    return next((n for n in range(size) if left[n] != right[n]), size)
