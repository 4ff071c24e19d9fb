"""Bytes of ids: what bits per byte are counted in."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from raysvc.chat.tokens.token_bytes import bytes_of_tokens, count_bytes
from raysvc.chat.tokens.tokenizer import LoadedTokenizer
from raysvc.job.config import TokenizerConfig

TEXTS = ["plain words, twice  spaced", "naïve Übung — 北京 🙂👩‍🚀", "\tx = {1: 'ä'}\n\n", ""]
ROOT = Path(__file__).parents[2]


def check(hf: Any) -> None:
    counts, pieces = count_bytes(hf), bytes_of_tokens(hf)
    assert counts is not None
    for text in TEXTS:
        ids = hf(text, add_special_tokens=False)["input_ids"]
        assert b"".join(pieces[token] for token in ids) == text.encode()
        assert counts[ids].sum() == len(text.encode())
    assert hf.all_special_ids
    assert not counts[hf.all_special_ids].any()


def test_bytes_of_ids_are_those_of_the_text_and_control_tokens_have_none(sample: dict[str, str]) -> None:
    check(LoadedTokenizer(TokenizerConfig(name=sample["tokenizer"])).hf)


def test_so_are_those_of_a_published_tokenizer() -> None:
    shared = Path(os.environ.get("RAYSVC_SHARED", ROOT.parent / "shared"))
    path = shared / "tokenizers" / "qwen2_5"
    if not path.exists():
        pytest.skip(f"no tokenizer at {path}")
    check(LoadedTokenizer(TokenizerConfig(name=str(path))).hf)
