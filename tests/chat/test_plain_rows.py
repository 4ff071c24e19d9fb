"""Rows joined from a shape are those that the template renders and the finder verifies, whatever they say."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from raysvc.chat.render.plain_rows import MAX_TRIES, PlainRows
from raysvc.chat.render.renderer import Renderer
from raysvc.chat.row_errors import RowDropped, RowFault
from raysvc.chat.sequence import Sequence
from raysvc.chat.slice_tokenizer import SliceTokenizer
from raysvc.chat.source.formats import Format
from raysvc.chat.source.json_rows import SourceRow
from raysvc.chat.text_batch import batch_of
from raysvc.chat.tokens.tokenizer import LoadedTokenizer
from raysvc.job.config import TextSpec, TokenizerConfig

from .test_turn_memory import TEMPLATES, said

MODES = ("all_assistant_messages", "last_assistant_message", "all_tokens")
SHAPED = ("chatml_default_system", "llama3_trimming", "qwen3_like", "prompt_opens_think", "generation_marks")
SHAPED += ("must_alternate",)


def row(*texts: str, **fields: Any) -> dict[str, Any]:
    roles = ("user", "assistant") * len(texts)
    return {"messages": [{"role": r, "content": t} for r, t in zip(roles, texts, strict=False)], **fields}


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
                    outcome(fast, row(*(f"{word} words of {n}" for n in range(size))), own)
            made[name, mode] = fast, Renderer(tokenizer, fast=False), own
        return made[name, mode]

    return pair


def outcome(renderer: Renderer, given_row: dict[str, Any], own: Format) -> Any:
    try:
        (sequence,) = renderer.sequences(given_row, own)
    except (RowFault, RowDropped) as why:
        return repr(why)
    return sequence.text, sequence.spans


def known(renderer: Renderer, given_row: dict[str, Any], own: Format) -> Sequence | None:
    """The sequence that is joined from a shape and not doubted."""
    found = renderer.known(given_row, own)
    return found if found and not renderer.doubtful([found], batch_of([found])) else None


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", TEMPLATES)
@given(texts=st.tuples(said, said) | st.tuples(said, said, said, said))
@settings(deadline=None, max_examples=60, suppress_health_check=list(HealthCheck))
def test_a_row_joined_from_a_shape_is_the_rendered_and_verified_one(
    name: str, mode: str, renderers: Any, texts: tuple[str, ...]
) -> None:
    fast, real, own = renderers(name, mode)
    joined = known(fast, row(*texts), own)
    if joined is not None:
        assert (joined.text, joined.spans) == outcome(real, row(*texts), own)


@pytest.mark.parametrize("name", SHAPED)
def test_plain_rows_are_joined_from_a_shape(name: str, renderers: Any) -> None:
    fast, real, own = renderers(name, MODES[0])
    for texts in (("a < b", "é > 2\n\nso"), ("one", "two", "three", "four")):
        joined = known(fast, row(*texts), own)
        assert joined is not None
        assert (joined.text, joined.spans) == outcome(real, row(*texts), own)


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
        row("a", " "),
        row("a", ""),
        {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b", "weight": 0}]},
        {"messages": [{"role": "user", "content": "a"}, {"role": "gpt", "content": "b"}]},
        {"messages": [{"role": "user", "content": [{"type": "text", "text": "a"}]}]},
        {"messages": []},
        {},
    ],
)
def test_a_row_that_is_not_plain_goes_the_whole_way(odd: dict[str, Any], renderers: Any) -> None:
    fast, _, own = renderers(SHAPED[0], MODES[0])
    assert fast.known(odd, own) is None


def test_a_text_that_holds_a_token_is_looked_at_closely(tokenizer_folder: Any) -> None:
    spec = TextSpec(tokenizer=TokenizerConfig(name=tokenizer_folder(SHAPED[0])))
    texts = ["one", "two", "<|im_end|>", "a <", "<|im_start|>user\n", "three"]
    result = SliceTokenizer(spec).run([SourceRow(n, row("q", f"x {text}")) for n, text in enumerate(texts)])
    assert result.table["source_row"].to_pylist() == [0, 1, 3, 5]
    assert result.row_counts.quarantined == {"a trained turn holds a control token": 2}
