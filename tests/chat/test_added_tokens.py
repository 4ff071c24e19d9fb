"""Added tokens that touch each other, the blanks around them or what a normalizer makes: ids are those of the library."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from tokenizers import AddedToken, Tokenizer, normalizers

from raysvc.chat.tokens.probe import Encoders, encoders_of
from raysvc.chat.tokens.tokenizer import LoadedTokenizer
from raysvc.job.config import TokenizerConfig

from .sentencepiece_like import KINDS, MARKED, save, small_model
from .test_odd_tokenizers import on_bytes

Token = tuple[str, str]  # content, and its flags by their first letters
CASES: dict[str, tuple[Callable[[], Tokenizer], list[Token], list[str]]] = {
    "a word": (on_bytes, [("-", "s")], ["  -x", "a - b", "a--b"]),
    "over another": (on_bytes, [("A__", ""), ("-A", "n")], ["-A__", "-A", "A__-A"]),
    "over another that is also normalized": (on_bytes, [("a><", "n"), ("<b>", "n"), (">c", "")], ["a><b>c"]),
    "blanks that one swallows and another has": (on_bytes, [(" |", ""), ("A", "r")], ["A |", "A  |"]),
    "the blank before a text": (
        lambda: KINDS["mistral"](small_model()),
        [(" \uff41", "")],
        ["\uff41", " \uff41", "b\uff41"],
    ),
}
COMPOSED: dict[str, tuple[list[Token], list[str]]] = {
    "a mark behind a token": ([("<img>", "n")], ["<img>\u0338", "a <img> b"]),
    "another letter in a token": ([("<K>", "n")], ["<\u212a>", "<K>"]),
    "another letter in a word": ([("OK", "")], ["O\u212a", "OK"]),
    "a letter with a mark": ([("\u00e9\u00e9", "")], ["e\u0301\u00e9", "\u00e9\u00e9"]),
}


def encoders(folder: Path, backend: Tokenizer, tokens: list[Token]) -> Encoders:
    names = ("lstrip", "rstrip", "single_word", "normalized")
    for content, flags in tokens:
        backend.add_tokens([AddedToken(content, **{name: name[0] in flags for name in names})])  # type: ignore[arg-type]
    return encoders_of(LoadedTokenizer(TokenizerConfig(name=save(folder, backend, MARKED))))


@pytest.mark.parametrize("case", list(CASES))
def test_tokens_that_touch_have_the_ids_of_the_library(case: str, tmp_path: Path) -> None:
    make, tokens, texts = CASES[case]
    found = encoders(tmp_path, make(), tokens)
    assert found.best.encode(texts).ids.tolist() == found.reference.encode(texts).ids.tolist()


@pytest.mark.parametrize("case", list(COMPOSED))
def test_tokens_that_composing_makes_or_ends_have_the_ids_of_the_library(case: str, tmp_path: Path) -> None:
    pytest.importorskip("gigatoken")
    tokens, texts = COMPOSED[case]
    found = encoders(tmp_path, on_bytes(normalizers.NFC()), tokens)
    assert found.best.name == "gigatoken"
    assert found.best.encode(texts).ids.tolist() == found.reference.encode(texts).ids.tolist()


def test_tokens_that_do_not_touch_are_gigatokens(tmp_path: Path) -> None:
    pytest.importorskip("gigatoken")
    for number, tokens in enumerate(
        [
            [("<|a|>", "r"), ("<|b|>", "lr"), ("<|c|>", "n")],
            [("<|a|>", "l"), ("  ", "n"), ("\n\n", "")],
            [("<|a|>", "r"), ("  ", "l")],
        ]
    ):
        assert encoders(tmp_path / str(number), on_bytes(), tokens).best.name == "gigatoken"
