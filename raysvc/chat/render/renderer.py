"""A source row -> texts to encode, with the places of what is trained.

Always true:
- a row gives one sequence, a preference row two, and with `each_assistant_turn` one for each trained message;
- whatever a template or a field raises is this row's fault and comes out as `RowFault`.

Plain text is `tokenizer(text)` with the special tokens that the tokenizer adds, and its end-of-sequence token once at
the end: appended, unless the text or the tokenizer put it there. What the tokenizer puts before the text is context. A text that
was rendered before has its beginning and its end already: it gets no second ones.

A solution in steps is its prompt (text, or messages with the generation prompt) and each step with a line end behind it; what is
trained is the last token of each step.

Where rows may have media, a conversation is what the processor makes of it: with the tokens that the tokenizer puts before a
text, unless the template wrote them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from functools import cached_property
from itertools import chain
from operator import itemgetter
from typing import Any

from raysvc.chat.render.media_text import check_media, filled_with_media, plain_example
from raysvc.chat.render.rendered import Render
from raysvc.chat.render.template import ChatTemplate
from raysvc.chat.row_errors import RowDropped, RowFault
from raysvc.chat.sequence import CLOSED_TURN, ENDLESS_TURN, FREE, OPEN_TURN, Sequence
from raysvc.chat.source.examples import ChatExample, Example, StepsExample, TextExample, TokensExample
from raysvc.chat.source.formats import Format
from raysvc.chat.source.stepwise import STEP_END
from raysvc.chat.tokens.tokenizer import LoadedTokenizer
from raysvc.chat.turns.turn_check import is_empty, thoughts_of
from raysvc.chat.turns.turn_signs import control_texts
from raysvc.chat.turns.turn_spans import ALL_EMPTY, TurnFinder, TurnSpan
from raysvc.job.config import PAIRED
from raysvc.media.media_desk import MediaDesk

HAD_BEGIN = "the text began with the tokens that the tokenizer puts before it"
HAD_END = "the text ended with an end of turn or of sequence"
_ROLE = itemgetter("role")
_SHOWN = frozenset(
    {"system", "user", "assistant"}
)  # roles that a template has a word for, or means to leave out


class Renderer:
    """Renders the rows of one format.

    Args:
        tokenizer: loaded.
        desk: takes the media of rows; None where rows have none.
        appends_end: put the model's end of sequence behind a row whose last turn is trained and has no end.

    Raises:
        TokenizerError: the template does not compile.
    """

    def __init__(
        self,
        tokenizer: LoadedTokenizer,
        desk: MediaDesk | None = None,
        appends_end: bool = False,
    ) -> None:
        self._tokenizer = tokenizer
        self._desk = desk
        self._templates: dict[str, tuple[ChatTemplate, TurnFinder]] = {}
        self._of_rows: dict[bool, tuple[ChatTemplate, TurnFinder]] = {}  # with tools or without
        self._around, self._eos = _added_around(tokenizer.hf)
        self._begin = "".join(map(str, tokenizer.hf.convert_ids_to_tokens(list(self._around[0]))))
        self._end_id = tokenizer.end_id if appends_end else None
        for has_tools in (False, True) if tokenizer.chat_template else ():
            self._template(has_tools)

    @property
    def control_tokens(self) -> tuple[str, ...]:
        """Texts of the tokens that open a header or end a turn, in any of the templates."""
        found = (text for _, finder in self._templates.values() for text in finder.control_tokens)
        return tuple(dict.fromkeys(found))

    @property
    def inner_tokens(self) -> frozenset[str]:
        """Those of them that a template writes inside of turns."""
        return frozenset(text for _, finder in self._templates.values() for text in finder.inner_tokens)

    @property
    def end_tokens(self) -> frozenset[str]:
        """Texts of all control tokens: a turn may end with any of them."""
        return frozenset(text for _, finder in self._templates.values() for text in finder.all_tokens)

    def sequences(self, row: Mapping[str, Any], form: Format) -> list[Sequence]:
        """Sequences of one row.

        Raises:
            RowFault: the row cannot be read, rendered or verified.
            RowDropped: nothing of it is trained.
        """
        examples = form.normalize(row)
        if form.train_on == "each_assistant_turn" and form.name not in PAIRED:
            examples = tuple(chain.from_iterable(map(each_turn, examples)))
        return [self.sequence(example) for example in examples]

    def unverified(self, row: Mapping[str, Any], form: Format) -> list[Sequence]:
        """Renders a row as `sequences` does; a conversation whose turns cannot be verified has no span.

        Raises:
            RowFault: the row cannot be read or rendered.
            RowDropped: it has no message that could be trained.
        """
        found = []
        for example in form.normalize(row):
            try:
                found.append(self.sequence(example))
            except (RowFault, RowDropped):
                if not isinstance(example, ChatExample):
                    raise
                template, _ = self._template(example.tools is not None)
                fitted = self._fitted(example)
                text = template.render(fitted.messages, fitted.tools, prompt=fitted.prompt).text
                found.append(Sequence(text, [], example=fitted))
        return found

    def sequence(self, example: Example) -> Sequence:
        """One sequence.

        Raises:
            RowFault: it cannot be rendered or verified.
            RowDropped: nothing of it is trained.
        """
        if isinstance(example, ChatExample):
            return self._chat(example)
        if isinstance(example, TextExample):
            return self._text(example)
        if isinstance(example, StepsExample):
            return self._steps(example)
        self._check_ids(example)
        return Sequence("", [], example=example, tokens=example)

    def kept_by_turns(self, sequence: Sequence) -> int:
        """Counts the messages of a conversation that would keep the reasoning that it lost, if each of its turns were
        a row.
        """
        try:
            turns = each_turn(sequence.example) if sequence.example is not None else []
            return max(0, sequence.removed - sum(self.sequence(turn).removed for turn in turns))
        except (RowFault, RowDropped):
            return 0

    def _chat(self, example: ChatExample) -> Sequence:
        if self._desk is None:
            return self._rendered(example)[0]
        check_media(example, self._desk.processor)
        if example.media:
            return self._with_media(example, self._desk)
        made = self._rendered(example)[0]
        made.prefix = self._before(made.text)
        return made

    def _with_media(self, example: ChatExample, desk: MediaDesk) -> Sequence:
        if not self._tokenizer.fit(example.tools is not None).parts:
            raise RowFault("the chat template shows no content parts", "so it shows no media")
        plain = plain_example(example)
        made, render = self._rendered(plain)
        made = filled_with_media(made, render, example, desk)
        made.prefix = self._before(made.text)
        return made

    def _before(self, text: str) -> tuple[int, ...]:
        """Ids that the tokenizer puts before a text which does not begin with its first token."""
        bos = str(self._tokenizer.hf.special_tokens_map.get("bos_token") or "")
        return () if bos and text.startswith(bos) else self._around[0]

    def _fitted(self, example: ChatExample) -> ChatExample:
        """The example with what the template takes of parts and calls.

        Raises:
            RowFault: it takes messages of a role, and shows none of them.
        """
        has_tools = example.tools is not None
        for role in {*map(_ROLE, example.messages)} - _SHOWN:
            if self._tokenizer.hides_role(role, has_tools):
                ours = "system" if role == "developer" else "user"
                raise RowFault(
                    f"the chat template shows no message of role {role!r}",
                    f"source.roles: {{{role}: {ours}}} maps it, if it is one",
                )
        is_plain = not (example.has_parts or example.has_calls or example.tools)
        if is_plain and all("content" in message for message in example.messages):
            return example
        return self._tokenizer.fit(has_tools).fitted(example)

    def _rendered(self, example: ChatExample) -> tuple[Sequence, Render]:
        """The sequence of a conversation whose media have no place yet, and its render."""
        template, finder = self._template(example.tools is not None)
        example = self._fitted(example)
        if example.prompt:
            prompt = template.render(example.messages, example.tools, prompt=True)
            return Sequence(prompt.text, [], example=example), prompt
        render = template.render(example.messages, example.tools)
        text = render.text
        if example.all_tokens:
            return Sequence(text, [(0, len(text), FREE)], example=example), render
        spans = [(one.start, one.end, _kind(one)) for one in finder.spans(render, example)]
        trained, removed = [example.messages[place] for place in example.trained], 0
        suffix: tuple[int, ...] = ()
        start, end, kind = spans[-1]
        if self._end_id is not None and kind == ENDLESS_TURN and not text[end:].strip():
            spans[-1], suffix = (start, len(text), OPEN_TURN), (self._end_id,)
        if thoughts := thoughts_of(trained):
            said = "".join([text[start:end] for start, end, _ in spans])
            removed = sum(max(0, count - said.count(one)) for one, count in Counter(thoughts).items())
        return Sequence(text, spans, suffix=suffix, example=example, removed=removed), render

    def _text(self, example: TextExample) -> Sequence:
        whole = example.context + example.trained
        text, noted = self._without_begin(whole)
        start = max(len(example.context) - (len(whole) - len(text)), 0)
        if not text:
            raise RowFault("the text is empty")
        prefix, suffix = self._around
        adds_end = suffix[-1:] == (self._eos[0],)
        if text.rstrip().endswith(self._ends):
            suffix, noted = suffix[:-1] if adds_end else suffix, noted | {HAD_END}
        elif self._eos[0] is not None and not adds_end:
            suffix = (*suffix, self._eos[0])
        return Sequence(text, [(start, len(text), FREE)], prefix, suffix, example=example, noted=noted)

    def _without_begin(self, text: str) -> tuple[str, frozenset[str]]:
        """A text without the tokens that the tokenizer puts before it, and what was changed."""
        if not self._begin or not text.startswith(self._begin):
            return text, frozenset()
        return text.removeprefix(self._begin), frozenset({HAD_BEGIN})

    @cached_property
    def _ends(self) -> tuple[str, ...]:
        """Texts of tokens with which a text has ended: of the sequence, and of a turn of the templates."""
        turns = [text for _, finder in self._templates.values() for text in finder.turn_ends]
        return tuple(filter(None, dict.fromkeys((self._eos[1], *self._tokenizer.stop_tokens, *turns))))

    def _steps(self, example: StepsExample) -> Sequence:
        """Each step is tokenized alone, so that it ends with a token of its own whatever comes next."""
        noted: frozenset[str] = frozenset()
        if isinstance(example.prompt, ChatExample):
            ids = self._ids(self._chat(example.prompt).text)
        else:
            prompt, noted = self._without_begin(example.prompt)
            ids = [*self._around[0], *self._ids(prompt)]
        mask, end = [0] * len(ids), self._ids(STEP_END)
        for step in example.steps:
            own = [*self._ids(step), *end]
            ids += own
            mask += [0] * (len(own) - 1) + [1]
        if mask[0]:
            raise RowFault("the first step ends at the first token", "nothing is before it to be judged")
        return Sequence("", [], example=example, tokens=TokensExample(ids, mask), noted=noted)

    def _ids(self, text: str) -> list[int]:
        return list(self._tokenizer.hf(text, add_special_tokens=False)["input_ids"])

    def _check_ids(self, example: TokensExample) -> None:
        size = len(self._tokenizer.hf)
        if not example.ids:
            raise RowFault("input_ids is empty")
        if min(example.ids) < 0 or max(example.ids) >= size:
            raise RowFault("a token id is not in the vocabulary", f"{max(example.ids)} of {size}")

    def _template(self, has_tools: bool) -> tuple[ChatTemplate, TurnFinder]:
        known = self._of_rows.get(has_tools)
        if known is not None:
            return known
        name = self._tokenizer.template_name(has_tools)
        if name not in self._templates:
            hf = self._tokenizer.hf
            template = ChatTemplate(
                self._tokenizer.templates[name],
                self._tokenizer.template_variables,
                self._tokenizer.now,
                self._tokenizer.fit(has_tools).only_parts,
            )
            roles = {role: str(text) for role, text in hf.special_tokens_map.items()}
            stops = self._tokenizer.stop_tokens
            controls = control_texts(template, hf.added_tokens_decoder.values(), (*roles.values(), *stops))
            finder = TurnFinder(template, controls, roles, stops)
            self._templates[name] = (template, finder)
        found = self._of_rows[has_tools] = self._templates[name]
        return found


def _kind(span: TurnSpan) -> int:
    return CLOSED_TURN if span.closed else ENDLESS_TURN if span.endless else OPEN_TURN


def each_turn(example: Example) -> list[Example]:
    """One conversation for each trained message that says something, which it ends with.

    Raises:
        RowDropped: no trained message says anything.
    """
    if not isinstance(example, ChatExample) or not example.trained:
        return [example]
    said = [place for place in example.trained if not is_empty(example.messages[place])]
    if not said:
        raise RowDropped(ALL_EMPTY)
    return [replace(example, messages=example.messages[: place + 1], trained=(place,)) for place in said]


def _added_around(hf: Any) -> tuple[tuple[tuple[int, ...], tuple[int, ...]], tuple[int | None, str]]:
    """((ids before, ids behind) that the tokenizer adds to a text, (id, text) of the end of a sequence)."""
    bare = hf("a", add_special_tokens=False)["input_ids"]
    full = hf("a")["input_ids"]
    at = next((n for n in range(len(full) - len(bare) + 1) if full[n : n + len(bare)] == bare), 0)
    return (tuple(full[:at]), tuple(full[at + len(bare) :])), (hf.eos_token_id, hf.eos_token or "")
