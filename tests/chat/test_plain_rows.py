"""Rows joined from a shape are those that the template renders and the finder verifies, whatever they say."""

from __future__ import annotations

from contextlib import suppress
from functools import cache, lru_cache
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from raysvc.chat import row_sequences
from raysvc.chat.render import plain_rows
from raysvc.chat.render.plain_rows import MAX_TRIES, PlainRows
from raysvc.chat.render.renderer import Renderer
from raysvc.chat.render.shape import Sequences, apart, count_of, kinds_of, nth, one_by_one
from raysvc.chat.render.template import ChatTemplate
from raysvc.chat.render.turn_spans import TurnFinder
from raysvc.chat.row_errors import RowDropped, RowFault
from raysvc.chat.sequence import CLOSED_TURN, FREE, OPEN_TURN, Sequence
from raysvc.chat.slice_tokenizer import SliceTokenizer
from raysvc.chat.source.examples import ChatExample
from raysvc.chat.source.formats import Format
from raysvc.chat.source.json_rows import SourceRow
from raysvc.chat.text_batch import batch_of
from raysvc.chat.tokens.tokenizer import LoadedTokenizer
from raysvc.chat.trace import fast_render
from raysvc.chat.trace.fast_render import SAMPLE_EVERY
from raysvc.job.config import TextSpec, TokenizerConfig

from .conftest import CHATML as SPECIALS
from .conftest import byte_level, save
from .test_turn_memory import TEMPLATES, said

MODES = ("all_assistant_messages", "last_assistant_message", "all_tokens")
SHAPED = ("chatml_default_system", "llama3_trimming", "qwen3_like", "prompt_opens_think", "generation_marks")
SHAPED += ("must_alternate",)


def row(*texts: str, **fields: Any) -> dict[str, Any]:
    roles = ("user", "assistant") * len(texts)
    return {"messages": [{"role": r, "content": t} for r, t in zip(roles, texts, strict=False)], **fields}


def in_parts(given_row: dict[str, Any]) -> dict[str, Any]:
    """The same row, every text in a list of one part."""
    messages = [
        {**message, "content": [{"type": "text", "text": message["content"]}]}
        for message in given_row["messages"]
    ]
    return {**given_row, "messages": messages}


def form(mode: str = MODES[0]) -> Format:
    return Format("chat", {}, mode)


@pytest.fixture(scope="module")
def renderers(tokenizer_folder: Any) -> Any:
    """(template, mode) -> a renderer that saw a plain row of each size, and one that renders every row."""
    made: dict[tuple[str, str], tuple[Renderer, Renderer, Format]] = {}

    def pair(name: str, mode: str) -> tuple[Renderer, Renderer, Format]:
        if (name, mode) not in made:
            tokenizer = LoadedTokenizer(TokenizerConfig(name=tokenizer_folder(name)))
            fast, own = Renderer(tokenizer), form(mode)
            for size in (2, 4):
                for word in ("first", "second"):
                    texts = row(*(f"{word} words of {n}" for n in range(size)))
                    outcome(fast, texts, own)
                    outcome(fast, in_parts(texts), own)
            made[name, mode] = fast, Renderer(tokenizer, fast=False), own
        return made[name, mode]

    return pair


def outcome(renderer: Renderer, given_row: dict[str, Any], own: Format) -> Any:
    try:
        (sequence,) = renderer.sequences(given_row, own)
    except (RowFault, RowDropped) as why:
        return repr(why)
    return sequence.text, sequence.spans


def made_known(renderer: Renderer, given_row: dict[str, Any], own: Format) -> Sequence | None:
    found: list[Sequence | None] = [*one_by_one(renderer.known([given_row], own))]
    assert len(found) == 1
    return found[0]


def known(renderer: Renderer, given_row: dict[str, Any], own: Format) -> Sequence | None:
    """The sequence that is joined from a shape and not doubted."""
    found = made_known(renderer, given_row, own)
    return found if found and not renderer.doubtful([found], batch_of([found])) else None


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", [*TEMPLATES, "takes_parts"])
@given(texts=st.tuples(said, said) | st.tuples(said, said, said, said), parts=st.booleans())
@settings(max_examples=60, suppress_health_check=list(HealthCheck))
def test_a_row_joined_from_a_shape_is_the_rendered_and_verified_one(
    name: str, mode: str, renderers: Any, texts: tuple[str, ...], parts: bool
) -> None:
    fast, real, own = renderers(name, mode)
    whole = in_parts(row(*texts)) if parts else row(*texts)
    joined = known(fast, whole, own)
    if joined is not None:
        assert (joined.text, joined.spans) == outcome(real, whole, own)


@pytest.mark.parametrize("made", [lambda texts: texts, in_parts])
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", [*SHAPED, "takes_parts"])
def test_plain_rows_are_joined_from_a_shape(name: str, mode: str, made: Any, renderers: Any) -> None:
    fast, real, own = renderers(name, mode)
    for texts in (("a < b", "é > 2\n\nso"), ("one", "two", "three", "four")):
        joined = known(fast, whole := made(row(*texts)), own)
        assert joined is not None
        assert (joined.text, joined.spans) == outcome(real, whole, own)
        assert joined.example == real.sequences(whole, own)[0].example


@pytest.mark.parametrize(
    "content",
    [
        [],
        ["b"],
        [{"type": "text", "text": "b"}, {"type": "text", "text": "c"}],
        [{"text": "b", "type": "text"}],
        [{"type": "text", "value": "b"}],
        [{"type": "text", "text": 1}],
        [{"type": "text", "text": "b", "cache": 1}],
        [{"type": "reasoning", "text": "b"}],
        {"type": "text", "text": "b"},
        [[]],
    ],
)
def test_other_parts_than_one_text_go_the_whole_way(content: Any, renderers: Any) -> None:
    for name in ("takes_parts", SHAPED[0]):
        fast, real, own = renderers(name, MODES[0])
        odd = in_parts(row("a", "b"))
        odd["messages"][1]["content"] = content
        for _ in range(3):
            assert made_known(fast, odd, own) is None
            assert outcome(fast, odd, own) == outcome(real, odd, own)
        mixed = in_parts(row("a", "b"))
        mixed["messages"][1]["content"] = "b"
        assert made_known(fast, mixed, own) is None


def test_roles_without_a_shape_are_soon_given_up(renderers: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    fast, _, own = renderers("no_last_eot", MODES[0])  # what ends a turn stands in the next message's block
    tried: list[Any] = []
    monkeypatch.setattr(PlainRows, "_shape", lambda *given: tried.append(given))
    for number in range(2 * MAX_TRIES):
        fast.sequences(row(*(f"words {number} of {n}" for n in range(6))), own)
    assert len(tried) == MAX_TRIES


@pytest.mark.parametrize(
    "odd",
    [
        row("a", "b", tools=[{"type": "function"}]),
        row("a", "b", system="be short"),
        row("a", "b", label=True),
        row("a", "b", label=False),
        row("a", "b", weight=0),
        row("a", "b", pixel_values=[1]),
        row("a", " "),
        row("a", ""),
        {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b", "weight": 0}]},
        {"messages": [{"role": "user", "content": "a"}, {"role": "gpt", "content": "b"}]},
        {"messages": [{"role": "user", "content": [{"type": "text", "text": "a"}]}]},
        {"messages": [{"role": ["user"], "content": "a"}, {"role": "assistant", "content": "b"}]},
        {"messages": []},
        {},
    ],
)
def test_a_row_that_is_not_plain_goes_the_whole_way(odd: dict[str, Any], renderers: Any) -> None:
    fast, real, own = renderers(SHAPED[0], MODES[0])
    for _ in range(3):  # nor does it teach anything
        assert made_known(fast, odd, own) is None
        assert outcome(fast, odd, own) == outcome(real, odd, own)


CHATML = """\
{%- for message in messages %}{{ '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}{% endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"""
ONLY_PARTS = CHATML.replace(
    "+ message.content +", "}}{% for part in message.content %}{{ part['text'] }}{% endfor %}{{"
)
OWN_END = CHATML.replace("'<|im_end|>", "(' END' if message.role == 'assistant' else '') + '<|im_end|>")
LAST_END = OWN_END.replace("message.role == 'assistant'", "loop.last")
TOKENS = ("<|im_start|>", "<|im_end|>")
SHOUTS = "'!' in message.content and message.role == 'assistant'"
MARK, UNMARK = "{% generation %}", "{% endgeneration %}"


def marked(one: str, other: str) -> str:
    """Answers that shout are written as `one`, others as `other`."""
    answer = f"{{% if {SHOUTS} %}}{one}{{% else %}}{other}{{% endif %}}"
    question = "{{ '<|im_start|>user\\n' + message.content + '<|im_end|>\\n' }}"
    return (
        "{%- for message in messages %}{% if message.role == 'user' %}"
        f"{question}{{% else %}}{answer}{{% endif %}}{{% endfor %}}"
    )


HEAD, SAYS, LINE = "{{ '<|im_start|>assistant\\n' }}", "{{ message.content + '<|im_end|>' }}", "{{ '\\n' }}"
USUAL = HEAD + MARK + SAYS + UNMARK + LINE
SPLIT = HEAD + MARK + "{{ message.content }}" + UNMARK + "{{ '<|im_end|>\\n' }}"
INVERTED = MARK + HEAD + UNMARK + SAYS + MARK + LINE + UNMARK
OUTSIDE = (
    "{% if '!' in messages[1].content %}{% for other in messages[:1] %}{% endfor %}"
    + CHATML.replace("messages %}", "messages[:1] %}", 1).split("{%- if add")[0]
    + "{{ '<|im_start|>assistant\\n' + messages[1].content + '<|im_end|>\\n' }}{% else %}"
    + CHATML.split("{%- if add")[0]
    + "{% endif %}"
)


class Alone:
    """`PlainRows` of a template, without a tokenizer; rows go the whole way by a render and a search of their own."""

    def __init__(
        self, template: str, mode: str = MODES[0], added: tuple[str, ...] = TOKENS, fast: bool = True
    ) -> None:
        self.template, self.form = ChatTemplate(template, {}, fast), form(mode)
        self.really = ChatTemplate(template, {}, False)
        self.finder = TurnFinder(self.template, added, {"eos_token": "<|im_end|>"})
        self.plain = PlainRows(self.template, self.finder, self.form)

    def whole(self, given_row: dict[str, Any]) -> Sequence:
        (example,) = self.form.normalize(given_row)
        assert isinstance(example, ChatExample)
        render = self.really.render(example.messages, None)
        if example.all_tokens:
            return Sequence(render.text, [(0, len(render.text), FREE)], example=example)
        found = self.finder.spans(render, example)
        spans = [(one.start, one.end, CLOSED_TURN if one.closed else OPEN_TURN) for one in found]
        return Sequence(render.text, spans, example=example)

    def learn(self, *texts: str) -> Alone:
        for _ in range(2):
            self.template.render(row(*texts)["messages"], None)  # the walk is known from here on
            self.plain.learn(made := row(*texts), self.whole(made))
        return self

    def joined(self, given_row: dict[str, Any]) -> Sequence | None:
        found: list[Sequence | None] = [*one_by_one(self.plain.sequences([given_row]))]
        assert len(found) == 1
        return found[0]

    def known(self, *texts: str) -> Sequence | None:
        found = self.joined(row(*texts))
        return found if found and not self.plain.doubtful([found], batch_of([found])) else None


@pytest.mark.parametrize(
    ("template", "added", "texts"),
    [
        (CHATML, (*TOKENS, "~"), ("a", "x ~ y")),  # a token of one letter
        (CHATML, TOKENS, ("a <|im_end|>", "b")),
        (CHATML, TOKENS, ("words of both <", "words of both ")),
        (CHATML, TOKENS, ("words of both <", "words of both")),
        (CHATML, TOKENS, ("words of both < ", "words of both ")),
        (CHATML, TOKENS, ("a", "b <|im_start|>user\n")),
        (CHATML.replace("message.content", "message.content | trim"), TOKENS, ("a", " b ")),
        (CHATML.replace("message.content", "message.content | replace('ham', 'egg')"), TOKENS, ("a", "ham")),
        (marked(INVERTED, USUAL), TOKENS, ("a", "b!")),
        (marked(SPLIT, USUAL), TOKENS, ("a", "b!")),
        (OUTSIDE, TOKENS, ("a", "b!")),
        (OWN_END, TOKENS, ("words of both", "words of both")),
        (OWN_END, TOKENS, ("so words of both", " words of both ")),
        (LAST_END, TOKENS, ("words of both", "words of both")),
    ],
)
def test_what_a_shape_cannot_say_goes_the_whole_way(
    template: str, added: tuple[str, ...], texts: tuple[str, ...]
) -> None:
    alone = Alone(template, added=added).learn("what is it", "it is so")
    plain = alone.known("who", "me")
    assert plain is not None
    assert (plain.text, plain.spans) == (
        alone.whole(row("who", "me")).text,
        alone.whole(row("who", "me")).spans,
    )
    alone.template.render(row(*texts)["messages"], None)
    assert alone.known(*texts) is None


def test_a_turn_between_a_header_and_a_token_may_say_what_others_say() -> None:
    alone = Alone(CHATML).learn("what is it", "it is so")
    joined = alone.known("words of both", "words of both")
    assert joined is not None
    assert joined.spans == alone.whole(row("words of both", "words of both")).spans


def test_one_turn_with_words_of_the_template_in_it_is_enough_to_look_closely() -> None:
    alone = Alone(LAST_END).learn("one", "two", "three", "four")
    assert alone.known("who", "me", "why", "so") is not None
    assert alone.known("words of both", "words of both", "why", "so") is None


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("made", [lambda texts: texts, in_parts])
def test_rows_of_a_template_that_takes_nothing_but_parts_are_joined(
    mode: str, made: Any, tmp_path: Any
) -> None:
    added, special = SPECIALS
    folder = save(tmp_path, byte_level(added), ONLY_PARTS, **special)
    tokenizer = LoadedTokenizer(TokenizerConfig(name=folder))
    fast, real, own = Renderer(tokenizer), Renderer(tokenizer, fast=False), form(mode)
    for texts in (("what is it", "it is so"), ("why not", "so it is")):
        outcome(fast, made(row(*texts)), own)
    joined = known(fast, whole := made(row("a < b", "\u00e9 > 2")), own)
    assert joined is not None
    assert (joined.text, joined.spans) == outcome(real, whole, own)
    assert joined.example == real.sequences(whole, own)[0].example


def test_only_doubtful_rows_of_known_shapes_are_made_again() -> None:
    alone = Alone(CHATML).learn("what is it", "it is so")
    texts = [("a", "b"), ("a <|im_end|>", "b"), ("c", "<| d")]
    known_ones = [alone.joined(row(*each)) for each in texts]
    other = alone.whole(row("x", "y"))
    sequences = [other, *(each for each in known_ones if each)]
    assert alone.plain.doubtful(sequences, batch_of(sequences)) == [2, 3]
    assert alone.plain.doubtful([other], batch_of([other])) == []


def test_rows_of_which_all_is_trained_are_joined_too() -> None:
    joined = Alone(CHATML, "all_tokens").learn("what is it", "it is so").known("who", "me")
    assert joined is not None
    assert joined.spans == [(0, len(joined.text), FREE)]


def test_nothing_is_joined_where_the_template_is_not_walked() -> None:
    alone = Alone(CHATML, fast=False).learn("what is it", "it is so")
    assert alone.known("a", "b") is None


def test_a_row_that_is_due_for_the_real_render_is_not_joined() -> None:
    alone = Alone(CHATML).learn("what is it", "it is so")
    assert alone.template.fast is not None
    alone.template.fast.counts["walked"] = SAMPLE_EVERY - 1
    assert alone.known("a", "b") is None
    alone.plain.learn(made := row("a", "b", "c"), alone.whole(made))  # nor does it leave a shape
    alone.template.fast.counts["walked"] = 0
    assert alone.known("a", "b") is not None
    assert alone.known("a", "b", "c") is None


@pytest.mark.parametrize("mode", MODES)
def test_a_shape_of_which_a_row_goes_the_whole_way_again_is_filled_in_without_a_walk(
    mode: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    template = CHATML.replace("message.content", "message.content | trim")
    asks = CHATML.replace("message.content", "(message.content if 'you' not in message.content else '')")
    once = Alone(template, mode)
    once.template.render(row("a", "b")["messages"], None)
    once.plain.learn(made := row("what is it", "it is so"), once.whole(made))
    twice, walked = (Alone(each, mode).learn("what is it", "it is so") for each in (template, asks))
    for alone in (once, twice, walked):
        assert alone.known("who", "me") is not None
        fast = alone.template.fast
        assert fast is not None
        monkeypatch.setattr(fast, "stretches", lambda _: None)
    assert once.known("who", "me") is None
    assert walked.known("who", "me") is None
    assert twice.known("who", " me") is None
    joined, whole = twice.known("who", "me\nand you"), twice.whole(row("who", "me\nand you"))
    assert joined is not None
    assert (joined.text, joined.spans, joined.example) == (whole.text, whole.spans, whole.example)
    counts = twice.template.fast.counts  # type: ignore[union-attr]
    before = counts["walked"]
    found = [twice.known("who", "me") is not None for _ in range(SAMPLE_EVERY)]
    assert sum(found) == SAMPLE_EVERY - 1 - before  # the next row is due


def test_a_template_that_writes_a_text_twice_or_elsewhere_is_not_filled_in() -> None:
    first = "{{ messages[-1].content + ';' }}" + CHATML
    silent = CHATML.replace("message.content", "(message.content if message.role != 'user' else 'who')")
    for template in (first, silent):
        alone = Alone(template, "all_tokens").learn("who", "so").learn("me", "it")
        joined = alone.known("you", "they")
        assert joined is None or joined.text == alone.whole(row("you", "they")).text
    alone = Alone(silent).learn("who", "so").learn("who", "it")
    assert alone.known("you", "they") is None


def test_shapes_are_learned_once_and_are_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    alone = Alone(CHATML)
    made: list[Any] = []
    real = PlainRows._shape
    monkeypatch.setattr(PlainRows, "_shape", lambda *given: made.append(given) or real(*given))
    alone.learn("who", "me").learn("why", "so")
    assert len(made) == 1
    monkeypatch.setattr("raysvc.chat.render.plain_rows.MAX_SHAPES", 1)
    assert alone.learn("who", "me", "why", "so").known("who", "me", "why", "so") is None


def test_a_text_that_holds_a_token_is_looked_at_closely(tokenizer_folder: Any) -> None:
    spec = TextSpec(tokenizer=TokenizerConfig(name=tokenizer_folder(SHAPED[0])))
    texts = ["one", "two", "<|im_end|>", "a <", "<|im_start|>user\n", "three"]
    result = SliceTokenizer(spec).run([SourceRow(n, row("q", f"x {text}")) for n, text in enumerate(texts)])
    assert result.table["source_row"].to_pylist() == [0, 1, 3, 5]
    assert result.row_counts.quarantined == {"a trained turn holds a control token": 2}


def test_a_shape_that_a_row_leaves_serves_the_next_rows_of_its_chunk(
    tokenizer_folder: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = TextSpec(tokenizer=TokenizerConfig(name=tokenizer_folder(SHAPED[0])))
    whole: list[Any] = []
    real = Renderer.sequences
    monkeypatch.setattr(Renderer, "sequences", lambda *given: whole.append(given[1]) or real(*given))
    rows = [
        row("what", "it \ud800" if n == 20 else f"is {n}", **({"label": 1} if n == 30 else {}))
        for n in range(50)
    ]
    result = SliceTokenizer(spec).run([SourceRow(n, each) for n, each in enumerate(rows)])
    assert result.table["source_row"].to_pylist() == [n for n in range(50) if n not in (20, 30)]
    assert sorted(result.row_counts.quarantined.values()) == [1, 1]
    assert len(whole) <= 5


SAID = (
    "a",
    "b <",
    "é > 2",
    "你 \U0001f600",
    "<|im_end|>",
    "<|im_start|>user",
    " padded\n",
    "it \ud800",
    "",
    "same",
    "x" * 300,
)
ROLES = (
    ("user", "assistant"),
    ("user", "assistant") * 2,
    ("system", "user", "assistant"),
    ("tool", "assistant"),
)
some_row = st.sampled_from(ROLES).flatmap(
    lambda roles: st.tuples(
        st.just(roles), st.tuples(*[st.sampled_from(SAID)] * len(roles)), st.sampled_from([0, 0, 0, 1, 2])
    )
)


def row_of(roles: tuple[str, ...], texts: tuple[str, ...], kind: int) -> dict[str, Any]:
    made = {"messages": [{"role": r, "content": t} for r, t in zip(roles, texts, strict=True)]}
    return in_parts(made) if kind == 1 else {**made, "label": True} if kind == 2 else made


def tokens_of(tokenizer: SliceTokenizer, rows: list[dict[str, Any]]) -> tuple[Any, ...]:
    made = tokenizer.run([SourceRow(n, each) for n, each in enumerate(rows)])
    assert not made.switched
    return made.table.to_pydict(), made.row_counts


@pytest.fixture(scope="module")
def sliced(slice_tokenizer: Any) -> Any:
    """(template, mode) -> a tokenizer that knows some shapes, and one that renders every row."""

    @cache
    def pair(name: str, mode: str) -> tuple[SliceTokenizer, SliceTokenizer]:
        fast, real = slice_tokenizer(name, train_on=mode), slice_tokenizer(name, train_on=mode)
        real._rows.renderer = real._new_renderer(fast=False)
        for word in ("first", "next", "last"):
            said = [tuple(f"{word} words of {n}" for n in range(len(roles))) for roles in ROLES]
            for kind in (0, 1):
                tokens_of(fast, [row_of(*each, kind) for each in zip(ROLES, said, strict=True)])
        return fast, real

    return pair


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", [*SHAPED, "takes_parts"])
@given(rows=st.lists(some_row, min_size=1, max_size=24), at_once=st.sampled_from([3, 128]))
@settings(max_examples=8, suppress_health_check=list(HealthCheck))
def test_rows_of_any_shapes_side_by_side_have_the_tokens_that_real_renders_give(
    name: str, mode: str, sliced: Any, rows: list[Any], at_once: int
) -> None:
    fast, real = sliced(name, mode)
    given_rows = [row_of(*each) for each in rows]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(row_sequences, "ROWS_AT_ONCE", at_once)
        patch.setattr(fast_render, "SAMPLE_EVERY", 7)  # rows amid others are rendered for real
        assert tokens_of(fast, given_rows) == tokens_of(real, given_rows)


@pytest.mark.parametrize("mode", MODES)
def test_rows_that_come_together_are_in_a_batch_as_each_alone(mode: str) -> None:
    alone = Alone(CHATML, mode).learn("what is it", "it is so").learn("who", "me", "why", "so")
    texts = [
        ("a", "é 你"),
        ("b", "c", "d", "e"),
        ("\U0001f600", " padded"),
        ("f", "g"),
        ("h", "i", "j"),
        ("k", "l"),
    ]
    (first, nothing, second) = alone.plain.sequences([row(*each) for each in texts])
    assert nothing is None
    assert (len(first), len(second)) == (4, 1)
    between = [alone.whole(row("é", "x", "y")), alone.whole(row("m", "n", "o"))]
    between[1].head = head = "<|im_start|>"
    mixed: Sequences = [first, *[between[1]] * 8, between[0], second]
    together, each = batch_of(mixed), batch_of([*one_by_one(mixed)])
    assert (together.heads.texts, each.heads.texts) == ([head], [head])  # type: ignore[union-attr]
    columns = [
        (one.data, one.offsets, *vars(one.spans).values(), one.heads.numbers)  # type: ignore[union-attr]
        for one in (together, each)
    ]
    assert all(a.dtype == b.dtype and a.tolist() == b.tolist() for a, b in zip(*columns, strict=True))
    assert [kind.openings for kind in kinds_of(mixed)] == [one.openings for one in one_by_one(mixed)]
    assert [nth(mixed, n) for n in range(14)] == [*one_by_one(mixed)]
    cut = apart(mixed, {3, 8, 10, 13})
    assert [count_of(one) for one in cut] == [3] + [1] * 11
    assert [*one_by_one(cut)] == [*one_by_one(mixed)]
    assert [count_of(one) for one in apart(mixed, {1})] == [1, 1, 2] + [1] * 10


def test_a_row_amid_many_is_due_for_a_real_render_when_it_would_be_alone() -> None:
    alone = Alone(CHATML).learn("what is it", "it is so")
    before = alone.template.fast.counts["walked"]  # type: ignore[union-attr]
    found = [*alone.plain.sequences([row("a", f"b {n}") for n in range(SAMPLE_EVERY)])]
    due = SAMPLE_EVERY - 1 - before
    assert [one and len(one) for one in found[:2]] == [due, None]
    assert found[2:] == [None] * (SAMPLE_EVERY - due - 1)  # nobody has rendered it
    assert alone.template.fast.counts["walked"] == SAMPLE_EVERY - 1  # type: ignore[union-attr]


@pytest.mark.parametrize("mode", MODES)
def test_a_lone_surrogate_in_the_first_row_of_some_roles_stops_no_other_row(
    mode: str, tokenizer_folder: Any
) -> None:
    tokenizer = TokenizerConfig(name=tokenizer_folder(SHAPED[0]))
    rows = [row("what", "it \ud800"), row("what", "is", "what", "\ud800 is"), *[row("what", "it is")] * 3]
    result = SliceTokenizer(TextSpec(tokenizer=tokenizer, train_on=mode)).run(
        [SourceRow(n, each) for n, each in enumerate(rows)]
    )
    assert result.table["source_row"].to_pylist() == [2, 3, 4]
    assert result.row_counts.quarantined == {"a text holds a lone surrogate": 2}


def test_rows_with_tools_are_not_looked_through_for_a_shape(monkeypatch: pytest.MonkeyPatch) -> None:
    alone, looked_at = Alone(CHATML), []
    monkeypatch.setattr(PlainRows, "_plain", lambda self, rows: looked_at.append(rows) or [None])
    plain, called = row("a", "b"), row("a", "b", tools=[{"type": "function"}])
    for given_row in (plain, called):
        alone.plain.learn(given_row, alone.whole(given_row))
    assert looked_at == [[plain]]


HEADS = ("<|im_start|>assistant\n", "### Answer:\n", "\n", "", "A: <think>\n")
ADDS = ("", "Sure", "<think>\n", " ", "<|")  # to the head: the generation prompt
ENDS = ("<|im_end|>", "<|im_end|>\n", " END<|im_end|>\n", "\n", "<|eot|><|im_end|>")
MARKS = ("{head}{says}{end}", "{head}[[{says}{end}]]", "[[{head}{says}]]{end}", "[[{head}]][[{says}{end}]]")
BEHIND = (
    "",
    "{% for message in messages %}{% if message.role != 'user' %}{{ 'done\n' }}{% endif %}{% endfor %}",
)
WORDS = (
    "it is so",
    "Sure it is",
    "x",
    "END",
    "Answer",
    " padded\n",
    "a ~ b",
    "words of both",
    "a <",
    "so\n",
    "é 你",
)
words = st.sampled_from(WORDS)


@lru_cache(maxsize=64)
def composed(head: str, add: str, end: str, mark: str, behind: str, user: str) -> Alone:
    """`PlainRows` of a template put together from what templates write around an answer."""
    pieces = {"head": f"{{{{ {head!r} }}}}", "end": f"{{{{ {end!r} }}}}", "says": "{{ message.content }}"}
    answer = mark.format(**pieces).replace("[[", MARK).replace("]]", UNMARK)
    prompt = f"{{% if add_generation_prompt %}}{{{{ {head + add!r} }}}}{{% endif %}}"
    asked = f"{{{{ {user!r} + message.content + '<|im_end|>\\n' }}}}"
    loop = (
        "{% for message in messages %}{% if message.role == 'user' %}"
        f"{asked}{{% else %}}{answer}{{% endif %}}{{% endfor %}}"
    )
    return Alone(loop + behind + prompt, added=(*TOKENS, "<|eot|>", "~"))


@given(
    built=st.tuples(*map(st.sampled_from, (HEADS, ADDS, ENDS, MARKS, BEHIND, ("<|im_start|>user\n", "")))),
    taught=st.lists(st.tuples(words, words) | st.tuples(words, words, words, words), min_size=1, max_size=3),
    asked=st.lists(st.tuples(words, words) | st.tuples(words, words, words, words), min_size=4, max_size=4),
)
@settings(max_examples=150, suppress_health_check=list(HealthCheck))
def test_whatever_a_template_writes_around_turns_a_joined_row_has_the_spans_that_are_found(
    built: tuple[str, ...], taught: list[tuple[str, ...]], asked: list[tuple[str, ...]]
) -> None:
    alone = composed(*built)
    for texts in taught:
        with suppress(RowFault):
            alone.learn(*texts)
    for texts in [*asked, ("who", "me"), ("who", "Sure me"), ("me", "me")]:
        joined = alone.known(*texts)
        if joined is not None:
            whole = alone.whole(row(*texts))
            assert (joined.text, joined.spans) == (whole.text, whole.spans)


@pytest.mark.parametrize("head", HEADS[:2])
@pytest.mark.parametrize("end", [each for each in ENDS if "|" in each])
@pytest.mark.parametrize("mark", MARKS[:2])
def test_turns_between_a_header_and_a_token_are_joined(head: str, end: str, mark: str) -> None:
    alone = composed(head, "", end, mark, "", "<|im_start|>user\n").learn("what is it", "it is so")
    assert alone.known("who", "me") is not None
    assert alone.known(*WORDS[:2]) is not None


def test_texts_that_stand_twice_and_results_of_tools_leave_no_shape() -> None:
    for texts in (("same", "same"), ("am", "I am")):
        assert Alone(CHATML).learn(*texts).known("who", "me") is None
    alone, roles = Alone(CHATML), ("user", "assistant", "tool", "assistant")
    whole = {"messages": [{"role": role, "content": f"says {role} {n}"} for n, role in enumerate(roles)]}
    alone.template.render(whole["messages"], None)
    alone.plain.learn(whole, alone.whole(whole))
    assert alone.joined(whole) is None


def test_all_tokens_of_a_tokenizer_without_added_ones_are_joined() -> None:
    alone = Alone(CHATML, "all_tokens", added=()).learn("what is it", "it is so")
    assert alone.known("who", "me <|im_end|>") is not None
    sequences = [alone.whole(row("who", "me"))]
    sequences[0].openings = 0
    assert alone.plain.doubtful(sequences, batch_of(sequences)) == []


@lru_cache(maxsize=1)
def tokens_of_odd_kinds() -> Alone:
    return Alone(CHATML, added=("<|a|>", "</a", "~"))


@given(st.lists(st.text("<|/~aé", max_size=6), min_size=1, max_size=4))
def test_beginnings_of_tokens_and_tags_are_counted_in_each_row(texts: list[str]) -> None:
    plain = tokens_of_odd_kinds().plain
    sequences = [Sequence(text, [], openings=0) for text in texts]
    joined, expected, begin = "".join(texts), set(), 0
    for n, text in enumerate(texts):
        for at in range(begin, begin + len(text)):  # what goes on in the next text is looked at closely too
            if joined[at : at + 2] in ("<|", "</") or joined[at] == "~":
                expected.add(n)
        begin += len(text)
    if any(texts):
        assert plain.doubtful(sequences, batch_of(sequences)) == sorted(expected)


@given(literals=st.lists(st.text("ab", max_size=3), min_size=2, max_size=4), data=st.data())
def test_literals_are_what_stands_around_texts_that_stand_nowhere_else(
    literals: list[str], data: Any
) -> None:
    said = [data.draw(st.text("abc", min_size=1, max_size=2)) for _ in literals[1:]]
    text = "".join(one + other for one, other in zip(literals, [*said, ""], strict=True))
    found, rest, ways = plain_rows._literals(text, said), text, []
    for part in said:
        places = [at for at in range(len(rest)) if rest.startswith(part, at)]
        ways.append(rest.count(part))
        rest = rest[places[0] + len(part) :] if places else rest
    if set(ways) == {1}:
        assert found is not None
        assert "".join(one + other for one, other in zip(found, [*said, ""], strict=True)) == text
    else:
        assert found is None


def test_no_shape_is_learned_of_a_row_that_says_how_tokens_begin() -> None:
    alone = Alone(CHATML).learn("what <| is it", "it is so")
    assert alone.known("who", "me <|im_end|>") is None
    assert alone.known("who", "me") is None
    assert alone.learn("what is it", "it is so").known("who", "me") is not None
