"""A source row -> texts to encode, with the places of what is trained.

Always true:
- a row gives one sequence, a preference row two;
- whatever a template or a field raises is this row's fault and comes out as `RowFault`.

Plain text is `tokenizer(text)` with the special tokens that the tokenizer adds, and its end-of-sequence token once at
the end: appended, unless the text or the tokenizer put it there. What the tokenizer puts before the text is context.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from raysvc.chat.render.rendered import Render
from raysvc.chat.render.template import ChatTemplate
from raysvc.chat.render.turn_spans import TurnFinder
from raysvc.chat.row_errors import RowFault
from raysvc.chat.sequence import CLOSED_TURN, FREE, OPEN_TURN, Sequence
from raysvc.chat.source.formats import ChatExample, Example, Format, TextExample, TokensExample
from raysvc.chat.source.messages import SYSTEM_ROLES
from raysvc.chat.tokens.tokenizer import LoadedTokenizer


class Preparer:
    """Renders the rows of one format.

    Args:
        tokenizer: loaded.
        fast: render by what earlier rows showed; false runs the template for every row.
        with_turns: note where turns begin, for `keep_end_turns`.

    Raises:
        TokenizerError: the template does not compile.
    """

    def __init__(self, tokenizer: LoadedTokenizer, fast: bool = True, with_turns: bool = False) -> None:
        self._tokenizer = tokenizer
        self.fast, self._with_turns = fast, with_turns
        self._templates: dict[str, tuple[ChatTemplate, TurnFinder]] = {}
        self._around, self._eos = _added_around(tokenizer.hf)
        for has_tools in (False, True) if tokenizer.chat_template else ():
            self._template(has_tools)

    @property
    def control_tokens(self) -> tuple[str, ...]:
        """Texts of the tokens that open a header or end a turn, in any of the templates."""
        found = (text for _, finder in self._templates.values() for text in finder.control_tokens)
        return tuple(dict.fromkeys(found))

    def sequences(self, row: Mapping[str, Any], form: Format) -> list[Sequence]:
        """Sequences of one row: one, or two of a preference row.

        Raises:
            RowFault: the row cannot be read, rendered or proved.
            RowDropped: nothing of it is trained.
        """
        return [self._sequence(example) for example in form.normalize(row)]

    def _sequence(self, example: Example) -> Sequence:
        if isinstance(example, ChatExample):
            return self._chat(example)
        if isinstance(example, TextExample):
            return self._text(example)
        self._check_ids(example)
        return Sequence("", [], example=example, tokens=example)

    def _chat(self, example: ChatExample) -> Sequence:
        has_tools = example.tools is not None
        template, finder = self._template(has_tools)
        if example.has_parts or example.has_calls:
            example = self._tokenizer.fit(has_tools).fitted(example)
        if example.prompt:
            prompt = template.render(example.messages, example.tools, prompt=True)
            return Sequence(prompt.text, [], example=example)
        render = template.render(example.messages, example.tools)
        if example.all_tokens:
            text = render.text
            return Sequence(text, [(0, len(text), FREE)], example=example)
        found = finder.spans(render, example)
        starts = _starts(render)
        spans = [
            (starts[s.block] + s.start, starts[s.block] + s.end, CLOSED_TURN if s.end > s.said else OPEN_TURN)
            for s in found
        ]
        head, turns = _turns(render, starts, example) if self._with_turns else (0, ())
        return Sequence(render.text, spans, head=head, turns=turns, example=example)

    def _text(self, example: TextExample) -> Sequence:
        text = example.context + example.trained
        if not text:
            raise RowFault("the text is empty")
        prefix, suffix = self._around
        closed = (suffix and suffix[-1] == self._eos[0]) or (self._eos[1] and text.endswith(self._eos[1]))
        if self._eos[0] is not None and not closed:
            suffix = (*suffix, self._eos[0])
        return Sequence(text, [(len(example.context), len(text), FREE)], prefix, suffix, example=example)

    def _check_ids(self, example: TokensExample) -> None:
        size = len(self._tokenizer.hf)
        if not example.ids:
            raise RowFault("input_ids is empty")
        if min(example.ids) < 0 or max(example.ids) >= size:
            raise RowFault("a token id is not in the vocabulary", f"{max(example.ids)} of {size}")

    def _template(self, has_tools: bool) -> tuple[ChatTemplate, TurnFinder]:
        name = self._tokenizer.template_name(has_tools)
        if name not in self._templates:
            hf = self._tokenizer.hf
            template = ChatTemplate(
                self._tokenizer.templates[name], self._tokenizer.template_variables, self.fast
            )
            added = [token.content for token in hf.added_tokens_decoder.values()]
            finder = TurnFinder(template, added, [str(text) for text in hf.special_tokens_map.values()])
            self._templates[name] = (template, finder)
        return self._templates[name]


def _starts(render: Render) -> list[int]:
    starts, at = [], 0
    for block in render.blocks:
        starts.append(at)
        at += len(block)
    return starts


def _turns(render: Render, starts: list[int], example: ChatExample) -> tuple[int, tuple[int, ...]]:
    """(characters of the head, characters where a user's block begins)."""
    roles = [example.messages[owner]["role"] if owner >= 0 else "" for owner in render.owners]
    first = next((n for n, role in enumerate(roles) if role and role not in SYSTEM_ROLES), len(roles))
    head = starts[first] if first < len(roles) else 0
    return head, tuple(start for start, role in zip(starts, roles, strict=True) if role == "user")


def _added_around(hf: Any) -> tuple[tuple[tuple[int, ...], tuple[int, ...]], tuple[int | None, str]]:
    """((ids before, ids behind) that the tokenizer adds to a text, (id, text) of the end of a sequence)."""
    bare = hf("a", add_special_tokens=False)["input_ids"]
    full = hf("a")["input_ids"]
    at = next((n for n in range(len(full) - len(bare) + 1) if full[n : n + len(bare)] == bare), 0)
    return (tuple(full[:at]), tuple(full[at + len(bare) :])), (hf.eos_token_id, hf.eos_token or "")
