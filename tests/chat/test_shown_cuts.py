"""A vocabulary that shows all cuts: code points that a fast encoder cuts otherwise are found by it, whatever the tokenizer's own shows."""

from __future__ import annotations

from itertools import product
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

from raysvc.chat.tokens.code_points import ShownCuts, shown_cuts
from raysvc.chat.tokens.encoder import GigatokenEncoder, ReferenceEncoder
from raysvc.chat.tokens.probe import encoders_of
from raysvc.chat.tokens.token_bytes import CHAR_OF_BYTE
from raysvc.chat.tokens.tokenizer import LoadedTokenizer
from raysvc.job.config import TokenizerConfig

from .sentencepiece_like import KINDS, MARKED, save, small_model

LLAMA_3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
NEW = ["\u088f", "\u0c5c", "\U00011de3", "\U000323b0"]  # letters and a digit of Unicode 16 and 17


def of_bytes(pre: Any, merges: list[tuple[str, str]]) -> Tokenizer:
    vocab = {token: number for number, token in enumerate([*CHAR_OF_BYTE, *map("".join, merges)])}
    made = Tokenizer(models.BPE(vocab=vocab, merges=merges))
    made.pre_tokenizer, made.decoder = pre, decoders.ByteLevel()
    return made


def llama_3(merges: list[tuple[str, str]]) -> Tokenizer:
    level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    split = pre_tokenizers.Split(Regex(LLAMA_3), "isolated")
    return of_bytes(pre_tokenizers.Sequence([split, level]), merges)


def test_code_points_whose_cut_one_token_alone_shows_get_the_ids_of_the_library(tmp_path: Path) -> None:
    pytest.importorskip("gigatoken")
    last_bytes = sorted({char.encode()[-1] for char in NEW})
    folder = save(tmp_path, llama_3([(CHAR_OF_BYTE[byte], '"') for byte in last_bytes]), MARKED)
    tokenizer = LoadedTokenizer(TokenizerConfig(name=folder))
    found = encoders_of(tokenizer)
    assert found.best.name == "gigatoken"
    texts = [f'{char}"' for char in NEW]
    wanted = found.reference.encode(texts).ids.tolist()
    assert found.best.encode(texts).ids.tolist() == wanted
    if GigatokenEncoder(tokenizer.content(), tokenizer.free_id).encode(texts).ids.tolist() == wanted:
        pytest.skip("this gigatoken and this tokenizers have the same tables")


@pytest.mark.parametrize(
    "pre",
    [llama_3([]).pre_tokenizer, pre_tokenizers.ByteLevel(add_prefix_space=False)],
    ids=["Llama 3", "GPT-2"],
)
def test_a_token_lies_across_two_characters_where_no_cut_is(pre: Any) -> None:
    shown = shown_cuts(of_bytes(pre, []))
    assert shown is not None
    reference = ReferenceEncoder(shown)
    chars = ["a", "'", "1", " ", "\n", "\u00e9", "\u0661", "\u3000", "\u2026", "\u4f60", "\U0001f600"]
    for a, b in product(chars, chars):
        if (a + b).isascii():
            continue
        pieces = [place for _, place in pre.pre_tokenize_str(a + b)]
        _, offsets = reference.encode_with_offsets(a + b)
        assert ((0, 2) in offsets) == (pieces == [(0, 2)]), (a, b)


def test_a_tokenizer_without_bytes_has_none() -> None:
    assert shown_cuts(KINDS["llama2"](small_model())) is None
    assert shown_cuts(KINDS["mistral"](small_model())) is None


def test_it_has_the_normalizer_and_no_added_tokens() -> None:
    backend = llama_3([])
    backend.add_special_tokens(["<s>"])
    backend.normalizer = normalizers.Lowercase()
    made = ShownCuts(backend)
    assert made.hf.added_tokens_decoder == {}
    assert made.hf.backend_tokenizer.encode("\u00c9").ids == made.hf.backend_tokenizer.encode("\u00e9").ids
    assert made.hf.backend_tokenizer.id_to_token(made.free_id) is None
    assert made.content() == made.hf.backend_tokenizer.to_str().encode()
