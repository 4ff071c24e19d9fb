"""Finds what a turn of the model is in a render: the characters under loss of every trained message.

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

For example, a template of Qwen3 asked for the prompt adds `<|im_start|>assistant\\n`, and writes for the last of two messages

    <|im_start|>user\\n2 + 2?<|im_end|>\\n<|im_start|>assistant\\n<think>\\n\\n</think>\\n\\n4.<|im_end|>\\n
                                         ~~~~~~~~~~~~~~~~~~~~~~^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^
Its block (1) begins at the second `<|im_start|>`. What the prompt repeats (2, `~`) is context; everything behind it up to the
last control token (3, `^`) is trained, and the line end is not.

Where it is: 1 `owner_notes`, 2 `turn_begin`, 3 to 5 `turn_end`, 6 `turn_text`; what a template writes around
turns `turn_signs`; whether a turn says what its message says `turn_check`.

Always true:
- a span holds nothing of another message but the stop token of 4;
- `verify_turn` accepted it, or its row has a fault;
- a message that says nothing has no span.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from raysvc.chat.render.rendered import Render, marks_within
from raysvc.chat.render.template import ChatTemplate
from raysvc.chat.row_errors import RowDropped, RowFault
from raysvc.chat.source.examples import ChatExample
from raysvc.chat.source.messages import Message
from raysvc.chat.turns.token_texts import TokenTexts
from raysvc.chat.turns.turn_begin import Prompts, TurnBegin
from raysvc.chat.turns.turn_check import is_empty, left_out, texts_of, verify_turn
from raysvc.chat.turns.turn_end import TurnEnd
from raysvc.chat.turns.turn_signs import PROBES, QUIET, Frame, TurnSigns, common_prefix
from raysvc.chat.turns.turn_text import SaidTexts, own_parts, with_content

ALL_EMPTY = "every trained message is empty"


class TurnSpan(NamedTuple):
    """Characters of a render under loss: [start, end); `closed` when the last of them is a control token.

    `endless`: the turn ends there, and the template writes no end of it.
    """

    start: int
    end: int
    closed: bool
    endless: bool = False


class TurnFinder:
    """Finds and verifies the trained turns of one template.

    Args:
        template: compiled.
        added_tokens: texts of the tokenizer's added tokens that are control tokens (`control_texts`).
        special_tokens: role -> text, of the tokens with a role, like the end of a sequence.
        stop_tokens: texts that the model's `generation_config.json` stops at, empty when there is none.

    Attributes:
        control_tokens: tokens that open a header or end a turn.
        inner_tokens: of these, the ones that also stand inside a turn.
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
        self._tokens = TokenTexts(added_tokens, roles.get("bos_token", ""), roles.get("eos_token", ""))
        self._signs = TurnSigns(template, self._tokens, roles.values(), stop_tokens)
        self._prompts = Prompts(template)
        self._begin, self._end = TurnBegin(self._signs, self._prompts), TurnEnd(self._signs)
        self._mixes = False  # messages of others into a turn
        trained = self._trained_probes()
        self.control_tokens = self._controls(trained)
        self.inner_tokens = self._signs.inner = self._inner(trained)
        least, most = min(self.control_tokens, default=""), max(self.control_tokens, default="")
        self._first_letters = least[: common_prefix(least, most)]
        self._ending = tuple(filter(None, (*self.control_tokens, self._tokens.end)))

    @property
    def all_tokens(self) -> list[str]:
        """Texts of all control tokens that may stand in a render."""
        return self._tokens.texts

    @property
    def turn_ends(self) -> tuple[str, ...]:
        """Texts of the tokens that plain turns end with."""
        found = [self._tokens.one.findall(frame.eot) for frame in self._signs.frames]
        return tuple(tokens[-1] for tokens in found if tokens)

    def spans(self, render: Render, example: ChatExample) -> list[TurnSpan]:
        """Spans of the trained messages of one row, in order.

        Raises:
            RowFault: a turn cannot be found or verified.
            RowDropped: all trained messages are empty.
        """
        spans: list[TurnSpan] = []
        said = SaidTexts(render, example)
        for place in example.trained:
            if is_empty(example.messages[place]):
                continue
            usual = self._usual(render, example, place, said)
            spans += [usual] if usual else self._verified(render, example, place, said)
        if not spans:
            raise RowDropped(ALL_EMPTY)
        return spans

    def _usual(self, render: Render, example: ChatExample, place: int, said: SaidTexts) -> TurnSpan | None:
        """The turn of a text, verified by equality: its block is prompt, content, end of turn and blanks; None of any other.

        A template may write between prompt and content what it writes in each turn, such as an empty thought.
        """
        message, frame = example.messages[place], self._signs.frame_of(example, place)
        content, extents = message.get("content"), render.extents_of(place)
        if frame is None or not frame.eot or self._template.marks_generation:
            return None
        if type(content) is not str or "tool_calls" in message or len(extents) != 1:
            return None
        text, (begin, end) = render.text, extents[0]
        if place == len(example.messages) - 1 and end != len(text):
            return None  # rule 5
        prompt = self._prompts.before(render, example, place, begin)
        if (
            not prompt
            or prompt.isspace()
            or (self._first_letters in content and self._holds_control(content))
        ):
            return None
        found = TurnSpan(begin + len(prompt), end - len(frame.trailer), frame.closed)
        block, behind = text[begin:end], f"{content}{frame.eot}{frame.trailer}"
        if block == prompt + behind:
            return found
        if not frame.head.startswith(prompt) or block != frame.head + behind or len(message) != 2:
            return None
        return found if self._decides_alone(text, found, place, frame, said) else None

    def _decides_alone(self, text: str, found: TurnSpan, place: int, frame: Frame, said: SaidTexts) -> bool:
        """Returns whether no other rule decides on a turn with a header: it holds no control token inside, nor what others say."""
        if not place or not frame.closed or frame.trailer.strip() or self._mixes:
            return False
        stretch = text[found.start : found.end]
        if "</think>" in said.example.messages[place]["content"]:
            return False
        if any(0 <= stretch.find(token) != len(stretch) - len(token) for token in self._ending):
            return False
        return not said.meets_others(stretch, place)

    def _holds_control(self, content: str) -> bool:
        return any(control in content for control in self.control_tokens)

    def _verified(self, render: Render, example: ChatExample, place: int, said: SaidTexts) -> list[TurnSpan]:
        """Any other turn."""
        if self._mixes:
            raise RowFault("the template writes other messages into an assistant's turn")
        missing = self._left_out(render, example, place)
        if missing:
            raise RowFault("a trained turn does not hold its tool call", f"the template leaves out {missing}")
        found = self._found(render, example, place)
        stretch = _trained_text(render, found)
        self._verify(stretch, example.messages[place])
        foreign = said.foreign(stretch, place) or self._taken_in(example, place, stretch, said)
        if foreign:
            raise RowFault("a trained turn holds text of another message", repr(foreign[:60]))
        return found

    @staticmethod
    def _left_out(render: Render, example: ChatExample, place: int) -> str:
        calls = example.messages[place].get("tool_calls") or ()
        block = "".join([render.text[start:end] for start, end in render.extents_of(place)]) if calls else ""
        return next(filter(None, (left_out(block, call) for call in calls)), "")

    def _verify(self, stretch: str, message: Message) -> None:
        verify_turn(
            stretch, message, self._signs.tags, self.control_tokens, self.inner_tokens, self._signs.opened
        )

    def _found(self, render: Render, example: ChatExample, place: int) -> list[TurnSpan]:
        """Rules 1 to 6."""
        text, extents = render.text, render.extents_of(place)
        if not extents and not any(
            words and words in text for words in map(str.strip, texts_of(example.messages[place]))
        ):
            raise RowFault("the template does not show a trained message")
        marked = self._template.marks_generation
        if not extents or (not marked and not self._signs.frames):
            raise RowFault("the template does not show where an assistant's turn begins and ends")
        parts = marks_within(render, extents) if marked else own_parts(self._signs, render, example, place)
        if marked and not parts:
            raise RowFault("a trained message has no generation mark")
        begin = self._begin.of(render, example, place)
        parts = [(max(start, begin), end) for start, end in parts if end > begin]
        if not parts:
            raise RowFault("a trained message has no text after its header")
        end = self._end.of(text, parts[-1], extents[-1][1], example, place)
        parts[-1] = (parts[-1][0], end)
        spans = [TurnSpan(a, b, self._tokens.closes(text, b, a)) for a, b in parts if text[a:b].strip()]
        if spans and self._end.is_endless(text, end, example, place):
            spans[-1] = spans[-1]._replace(endless=True)
        return spans

    def _taken_in(self, example: ChatExample, place: int, stretch: str, said: SaidTexts) -> str:
        """A short text in the trained one, of a message that has no block: another render tells chance from the template."""
        for other, words in said.unowned(stretch, place):
            changed = with_content(example, other, QUIET)
            instead = self._template.render(changed.messages, example.tools)
            spans = self._found(instead, changed, place)
            if any(QUIET in instead.text[span.start : span.end] for span in spans):
                return words
        return ""

    def _trained_probes(self) -> list[str]:
        """The trained text of turns in probes; whether the template mixes messages shows there too."""
        trained: list[str] = []
        for messages, tools in PROBES:
            example = ChatExample(messages, tools, ())
            try:
                render = self._template.render(messages, tools)
            except RowFault:
                continue
            said = SaidTexts(render, example)
            for place in [n for n, message in enumerate(messages) if message["role"] == "assistant"]:
                try:
                    stretch = _trained_text(render, self._found(render, example, place))
                except RowFault:
                    continue
                self._mixes |= bool(said.foreign(stretch, place))
                trained.append(stretch)
        return trained

    def _controls(self, trained: list[str]) -> tuple[str, ...]:
        one, frames = self._tokens.one, self._signs.frames
        heads = [token for frame in frames for token in one.findall(frame.head)]
        ends = [token for stretch in trained for token in one.findall(stretch)[-1:]]
        found = dict.fromkeys([*heads, *self._turn_ends(), *ends])
        return tuple(token for token in found if token not in self._signs.tags)

    def _inner(self, trained: list[str]) -> frozenset[str]:
        inside = {token for stretch in trained for token in self._tokens.one.findall(stretch)[:-1]}
        ends = {t for t in self._turn_ends() if any(t in stretch[: -len(t)] for stretch in trained)}
        return frozenset(inside | ends)

    def _turn_ends(self) -> list[str]:
        """Tokens of the ends of plain turns; their text where they have none."""
        eots = [frame.eot for frame in self._signs.frames if frame.eot]
        return [token for eot in eots for token in self._tokens.one.findall(eot) or [eot.strip()]]


def _trained_text(render: Render, spans: list[TurnSpan]) -> str:
    return "".join([render.text[span.start : span.end] for span in spans])
