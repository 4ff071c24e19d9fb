"""Heads that rows share, such as one with all the tools: encoded once a batch.

1. A head ends right before an added token at which the tokenizer cuts every text (`cutting_tokens`), so the ids of the whole are
   those of the head and of the rest.
2. The rests of all rows and each different head are encoded as texts of one batch, and joined again.

Always true:
- a rest begins with such a token, and no span begins in a head;
- a row of each head that was not tried is encoded as a whole too; a difference ends the use of heads.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np

from raysvc.chat.text_batch import Batch, Spans
from raysvc.chat.tokens.added_blanks import Rule, rule_of
from raysvc.chat.tokens.encoder import Encoder
from raysvc.chat.tokens.token_rows import TokenRows

MAX_TRIED = 1024
_FLAGS = ("normalized", "lstrip", "rstrip", "single_word")


def cutting_tokens(hf: Any) -> tuple[str, ...]:
    """Added tokens before which every text may be cut: nothing of them depends on what stands before them."""
    added = [*hf.added_tokens_decoder.values()]
    if rule_of(hf.backend_tokenizer) is not Rule.NONE or getattr(hf, "split_special_tokens", False):
        return ()
    plain = [token.content for token in added if not any(getattr(token, flag) for flag in _FLAGS)]
    inside = {char for token in added for char in token.content[1:]}
    if any(token.rstrip for token in added):
        return ()
    return tuple(text for text in plain if text and text[0] not in inside)


class SharedHeads:
    """Encodes batches whose rows share heads.

    Args:
        encoder: that makes the ids.
    """

    def __init__(self, encoder: Encoder) -> None:
        self._encoder = encoder
        self._tried: set[str] = set()
        self._works = True

    def encode(self, batch: Batch, encode: Callable[[Batch], TokenRows]) -> TokenRows | None:
        """Tokens of a batch, None when it has to be encoded as it is.

        Args:
            batch: N rows.
            encode: of the rests.
        """
        heads = batch.heads
        if heads is None or not self._works or batch.prefix or batch.suffixes:
            return None
        rows = _joined(encode(_apart(batch)), batch)
        if len(self._tried) > MAX_TRIED:
            self._tried.clear()
        for number, text in enumerate(heads.texts):
            if text not in self._tried:
                self._tried.add(text)
                row = int(np.flatnonzero(heads.numbers == number)[0])
                whole = self._encoder.encode([batch.text(row)]).ids
                self._works &= np.array_equal(whole, rows.ids[rows.offsets[row] : rows.offsets[row + 1]])
        return rows if self._works else None


def _apart(batch: Batch) -> Batch:
    """The rests of the rows, and behind them the heads."""
    heads = batch.heads
    assert heads is not None
    texts = [text.encode() for text in heads.texts]
    sizes = np.array([*map(len, texts), 0], np.int64)[heads.numbers]
    begins = (batch.offsets[:-1] + sizes).tolist()
    rests = [batch.data[a:b] for a, b in zip(begins, batch.offsets[1:].tolist(), strict=True)]
    data = np.concatenate([*rests, *(np.frombuffer(text, np.uint8) for text in texts)])
    offsets = np.zeros(len(batch) + len(texts) + 1, np.int64)
    np.cumsum([*map(len, rests), *map(len, texts)], out=offsets[1:])
    spans, before = batch.spans, np.cumsum(sizes)[batch.spans.rows]
    moved = Spans(spans.rows, spans.starts - before, spans.ends - before, spans.kinds)
    return replace(batch, data=data, offsets=offsets, spans=moved, heads=None)


def _joined(apart: TokenRows, batch: Batch) -> TokenRows:
    """Each rest behind its head."""
    heads = batch.heads
    assert heads is not None
    bounds = apart.offsets.tolist()
    places = [*pairwise(bounds)]
    own, shared = places[: len(batch)], [*places[len(batch) :], (0, 0)]
    ranges = [
        each
        for place, number in zip(own, heads.numbers.tolist(), strict=True)
        for each in (shared[number], place)
    ]
    ids = np.concatenate([apart.ids[a:b] for a, b in ranges])
    mask = np.concatenate([apart.mask[a:b] for a, b in ranges])
    sizes = np.diff(apart.offsets)
    offsets = np.zeros(len(batch) + 1, np.int64)
    np.cumsum(sizes[: len(batch)] + np.append(sizes[len(batch) :], 0)[heads.numbers], out=offsets[1:])
    return TokenRows(ids, mask, offsets, apart.faults)
