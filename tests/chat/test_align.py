"""Where a span lies among tokens is what the library's offsets say, or there is a fault."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from raysvc.chat.sequence import CLOSED_TURN, FREE, OPEN_TURN, Batch, Spans
from raysvc.chat.tokens.align import (
    EXTRA_CONTROL,
    NO_EOT,
    OVER_END,
    OVER_PROMPT,
    OVER_START,
    TokenTable,
    align,
    align_by_offsets,
    align_words,
)
from raysvc.chat.tokens.encoder import EncodedTexts
from raysvc.chat.tokens.tokenizer import LoadedTokenizer
from raysvc.job.config import TokenizerConfig

QUICK = settings(max_examples=200, suppress_health_check=list(HealthCheck))
Offsets = list[tuple[int, int]]


def cut(text: str, offsets: Offsets, start: int, end: int) -> str | None:
    """The fault of a span, by looking at each token: one that lies over an end, and not with blanks alone."""
    for place, fault in ((start, OVER_START), (end, OVER_END)):
        if any(first < place < last and text[place:last].strip() for first, last in offsets):
            return fault
    return None


@given(words=st.lists(st.sampled_from(["a", "bc", "d e", " ", " f", "g ", "\n"]), max_size=8), ends=st.data())
@QUICK
def test_tokens_of_a_span_are_those_inside_it_or_one_lies_over_its_end(words: list[str], ends: Any) -> None:
    text, offsets, at = "".join(words), [], 0
    for word in words:
        offsets += [(at, at + len(word))] * ends.draw(
            st.sampled_from([1, 1, 2]) if len(word) == 1 else st.just(1)
        )
        at += len(word)
    start = ends.draw(st.integers(0, len(text)))
    end = ends.draw(st.integers(start, len(text)))
    assume(text[start:end].strip())
    found = align_by_offsets(offsets, text, start, end)
    fault = cut(text, offsets, start, end)
    if fault is not None:
        assert found == fault
        return
    a, b = found
    assert a <= b
    covered = {place for first, last in offsets[a:b] for place in range(first, last)}
    said = {place for place in range(start, end) if not text[place].isspace()}
    assert {place for place in covered if not text[place].isspace()} == said


@given(words=st.lists(st.sampled_from(["a", "bc", " ", "def"]), max_size=8), ends=st.data())
@QUICK
def test_tokens_without_blanks_are_those_inside_or_one_lies_over_an_end(words: list[str], ends: Any) -> None:
    text, offsets, at = "".join(words), [], 0
    for word in words:
        offsets += [(at, at + len(word))] if word.strip() else []
        at += len(word)
    start = ends.draw(st.integers(0, len(text)))
    end = ends.draw(st.integers(start, len(text)))
    fault = cut(text, offsets, start, end)
    inside = [n for n, (first, last) in enumerate(offsets) if start <= first and last <= end]
    found = align_words(offsets, start, end)
    assert found == fault if fault else list(range(*found)) == inside


@pytest.fixture(scope="module")
def table(tokenizer_folder: Any) -> tuple[LoadedTokenizer, TokenTable]:
    """Of chatml, whose header may stand in no turn."""
    tokenizer = LoadedTokenizer(TokenizerConfig(name=tokenizer_folder("chatml_bare")))
    return tokenizer, TokenTable(tokenizer, ("<|im_start|>", "<|im_end|>"))


PIECES = ["The answer", " is", " ", "\n\n", "x", "<|im_end|>", "<|im_start|>"]


@given(pieces=st.lists(st.sampled_from(PIECES), min_size=1, max_size=6), spans=st.data())
@QUICK
def test_spans_of_bytes_are_those_of_the_library_and_have_its_tokens_alone(
    table: Any, pieces: list[str], spans: Any
) -> None:
    tokenizer, known = table
    text = "".join(pieces)
    made = tokenizer.hf(text, add_special_tokens=False, return_offsets_mapping=True)
    ids, offsets = np.array(made["input_ids"], np.int32), made["offset_mapping"]
    start = spans.draw(st.integers(0, len(text)))
    end = spans.draw(st.integers(start, len(text)))
    kind = spans.draw(st.sampled_from([FREE, OPEN_TURN, CLOSED_TURN]))
    span = Spans(*(np.array([value], np.int64) for value in (0, start, end, kind)))
    row = np.array([0, len(text)], np.int64)
    batch = Batch(np.frombuffer(text.encode(), np.uint8), row, span, (), [()])
    encoded = EncodedTexts(ids, np.array([0, len(ids)], np.int64))
    found = align(encoded, known.decode(ids)[0], batch, known, set())
    a, b = int(found.starts[0]), int(found.ends[0])
    inside = [n for n, (first, last) in enumerate(offsets) if start <= first and first < end]
    assert list(range(a, b)) == inside
    over = cut(text, offsets, start, end)
    if over == OVER_START and kind == FREE:
        over = OVER_PROMPT
    tokens = [tokenizer.hf.convert_ids_to_tokens(int(token)) for token in ids[a:b]]
    closed = kind == CLOSED_TURN
    held = any(token.startswith("<|im_") for token in (tokens[:-1] if closed else tokens))
    expected = {over, EXTRA_CONTROL if held and kind != FREE else None}
    if closed and not (tokens and tokens[-1].startswith("<|im_")):
        expected.add(NO_EOT)
    assert found.faults.get(0) in expected
    assert (0 in found.faults) == (expected != {None})
    assert known.control_fault(ids[a:b], kind) in {each or "" for each in expected}
