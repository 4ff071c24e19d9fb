"""Stretches of text -> tokens under loss, verified by decoding.

Axes: N rows, T tokens of all rows, V ids, S spans.
Always true:
- a row is aligned by bytes only when the bytes of its tokens, joined, are the text itself, or differ from it only in ASCII
  characters that the normalizer changes one by one (lower case), blanks staying blanks;
- a token over the beginning of a span is context, and what it holds of the span is blank;
- a token over the end of a span is trained, and what it holds beyond the span is blank;
- a span with an end of turn ends with that token, and has no other control token.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt

from raysvc.chat.arrow_arrays import arrow_of, binary_array
from raysvc.chat.sequence import CLOSED_TURN, FREE, Batch, Bytes, Spans
from raysvc.chat.tokens.added_blanks import AddedBlanks, rule_of
from raysvc.chat.tokens.backend_parts import drops_blanks
from raysvc.chat.tokens.encoder import EncodedTexts, Ints32, Ints64
from raysvc.chat.tokens.normal_text import NormalText
from raysvc.chat.tokens.token_bytes import bytes_of_tokens
from raysvc.chat.tokens.tokenizer import LoadedTokenizer

_BLANK = np.zeros(256, np.bool_)
_BLANK[[9, 10, 11, 12, 13, 32]] = True

_NARROW = 64  # ids

OVER_START = "a token spans a header and its message"
OVER_PROMPT = "a token spans the prompt and its completion: let the completion begin with the blank, or end the prompt with a line break"
OVER_END = "a token spans a message and what follows it"
NO_EOT = "the end of turn is not one token at the end of its turn"
EXTRA_CONTROL = "a trained turn holds a control token"


@dataclass(frozen=True)
class TokenSpans:
    """The same stretches in tokens of all rows: [starts, ends), ascending."""

    starts: Ints64
    ends: Ints64
    faults: dict[int, str]

    def mask(self, tokens: int) -> npt.NDArray[np.uint8]:
        """uint8 [T], 1 for every token in one of them."""
        there = self.ends > self.starts
        cuts = np.zeros(2 * int(there.sum()) + 2, np.int64)
        cuts[1:-1:2], cuts[2:-1:2], cuts[-1] = self.starts[there], self.ends[there], tokens
        return np.repeat(np.resize(np.array([0, 1], np.uint8), len(cuts) - 1), np.diff(cuts))


class TokenTable:
    """Bytes of every id, so that the text of any ids is one gather.

    Args:
        tokenizer: any kind; for one that is not plainly bytes the decoded text differs, and `differing_rows` says so.
        control_texts: tokens that open a header or end a turn.
        inner_texts: of these, the ones that stand inside of turns too.
        end_texts: more tokens that a turn may end with.
    """

    def __init__(
        self,
        tokenizer: LoadedTokenizer,
        control_texts: tuple[str, ...] = (),
        inner_texts: Iterable[str] = (),
        end_texts: Iterable[str] = (),
    ) -> None:
        pieces = bytes_of_tokens(tokenizer.hf)
        self._pieces = binary_array(pieces)
        self.is_control = np.zeros(len(self._pieces), np.bool_)
        self.ends_turn = np.zeros(len(self._pieces), np.bool_)
        added = tokenizer.hf.added_tokens_decoder
        is_added = np.zeros(len(self._pieces), np.bool_)
        is_added[list(added)] = True
        self._blanks = AddedBlanks(rule_of(tokenizer.hf.backend_tokenizer), pieces, is_added)
        self._hf = tokenizer.hf
        self.drops_blanks = drops_blanks(tokenizer.hf.backend_tokenizer)
        controls, ends = set(control_texts) - set(inner_texts), {*control_texts, *end_texts}
        for number, token in added.items():  # a template may end turns with a text that is no token
            self.is_control[number] = token.content in controls
            self.ends_turn[number] = token.content in ends
        self._controls = np.flatnonzero(self.is_control).astype(np.int32)

    def places_of_controls(self, ids: Ints32) -> Ints64:
        """Returns where control tokens stand, ascending. Most vocabularies have them side by side: then few ids are
        looked up.
        """
        if not len(self._controls):
            return np.zeros(0, np.int64)
        first, last = self._controls[[0, -1]]
        if last - first >= _NARROW:
            return np.flatnonzero(self.is_control[ids])
        near = np.flatnonzero((ids - first).view(np.uint32) <= np.uint32(last - first))
        return near[self.is_control[ids[near]]]

    def control_fault(self, ids: Ints32, kind: int) -> str:
        """Returns what is wrong with the control tokens of one span, or nothing."""
        if kind == FREE:
            return ""
        held, closed = self.is_control[ids], kind == CLOSED_TURN
        if closed and not (len(ids) and self.ends_turn[ids[-1]]):
            return NO_EOT
        return EXTRA_CONTROL if held[: len(held) - closed].any() else ""

    @cached_property
    def normal_text(self) -> NormalText:
        """Returns the normal form for rows that do not decode to their text as it is; most data has none."""
        return NormalText(self._hf)

    @cached_property
    def folded(self) -> Bytes | None:
        """uint8 [256], what the normalizer makes of each ASCII character alone; None when it leaves all as they are."""
        made = np.arange(256, dtype=np.uint8)
        for byte in range(128) if self._hf.backend_tokenizer.normalizer is not None else ():
            normal = self.normal_text.of(chr(byte)).encode()
            if len(normal) == 1 and _BLANK[normal[0]] == _BLANK[byte]:
                made[byte] = normal[0]
        return made if (made != np.arange(256)).any() else None

    def texts_of(
        self, encoded: EncodedTexts, decoded: tuple[Ints64, Bytes], batch: Batch
    ) -> tuple[Ints64, Bytes]:
        """(int64 [T + 1] byte offsets of the tokens in their texts, these texts joined), as far as the decoded ids say."""
        return self._blanks.removed(encoded, *decoded, batch)

    def decode(self, ids: Ints32) -> tuple[Ints64, Bytes]:
        """(int64 [T + 1] byte offsets of the tokens, their bytes joined)."""
        if not len(ids):
            return np.zeros(1, np.int64), np.zeros(0, np.uint8)
        taken = self._pieces.take(arrow_of(ids))
        _, offsets, data = taken.buffers()
        ends = np.frombuffer(offsets, np.int64)[taken.offset : taken.offset + len(ids) + 1]
        return ends, np.frombuffer(data, np.uint8)[: ends[-1]] if data is not None else np.zeros(0, np.uint8)


def differing_rows(
    encoded: EncodedTexts, token_ends: Ints64, decoded: Bytes, batch: Batch, folded: Bytes | None
) -> Ints64:
    """Rows whose tokens do not decode to their text, int64, ascending.

    Args:
        encoded: N rows.
        token_ends: int64 [T + 1].
        decoded: bytes of all tokens.
        batch: the same N rows.
        folded: uint8 [256], what a byte of a text may decode to as well.
    """
    text, bounds = batch.data, token_ends[encoded.offsets]
    sizes, own = np.diff(batch.offsets), np.diff(bounds)
    there = sizes == own
    if not there.all():
        text, decoded = text[np.repeat(there, sizes)], decoded[np.repeat(there, own)]
    wrong = np.flatnonzero(decoded != text)
    if folded is not None:
        wrong = wrong[decoded[wrong] != folded[text[wrong]]]
    at = np.searchsorted(np.cumsum(sizes[there]), wrong, "right")
    there[np.flatnonzero(there)[at]] = False
    return np.flatnonzero(~there)


def align(
    encoded: EncodedTexts, token_ends: Ints64, batch: Batch, table: TokenTable, skip: set[int]
) -> TokenSpans:
    """Tokens of the spans of rows that decode to their text.

    Args:
        encoded: N rows.
        token_ends: from `TokenTable.decode`.
        batch: the same N rows.
        table: for the control tokens.
        skip: rows that are aligned in another way; their spans are left out.
    """
    spans, text, text_offsets = batch.spans, batch.data, batch.offsets
    if skip:
        there = ~np.isin(spans.rows, list(skip))
        spans = Spans(spans.rows[there], spans.starts[there], spans.ends[there], spans.kinds[there])
    shift = token_ends[encoded.offsets[spans.rows]] - text_offsets[spans.rows]
    starts_at, ends_at = spans.starts + shift, spans.ends + shift
    starts = np.searchsorted(token_ends, starts_at, "left")
    ends = np.searchsorted(token_ends, ends_at, "left")
    faults: dict[int, str] = {}
    found = TokenSpans(starts, ends, faults)
    _check_controls(encoded.ids, found, spans, table)
    for index in np.flatnonzero(token_ends[starts] != starts_at).tolist():
        lost = text[spans.starts[index] : token_ends[starts[index]] - shift[index]]
        if not _BLANK[lost].all():
            free = spans.kinds[index] == FREE
            faults.setdefault(int(spans.rows[index]), OVER_PROMPT if free else OVER_START)
    for index in np.flatnonzero(token_ends[ends] != ends_at).tolist():
        extra = text[spans.ends[index] : token_ends[ends[index]] - shift[index]]
        if not _BLANK[extra].all():
            faults.setdefault(int(spans.rows[index]), OVER_END)
    return found


def _check_controls(ids: Ints32, found: TokenSpans, spans: Spans, table: TokenTable) -> None:
    """Note the rows whose spans hold other control tokens than one at the end of a closed turn."""
    if not len(ids):
        return
    starts, ends, faults = found.starts, found.ends, found.faults
    at = table.places_of_controls(ids)
    held = np.searchsorted(at, ends) - np.searchsorted(at, starts)
    last = ids[np.maximum(ends - 1, 0)]
    ended = (ends > starts) & table.ends_turn[last]
    closed = spans.kinds == CLOSED_TURN
    too_many = (held > (closed & ended & table.is_control[last])) & (spans.kinds != FREE)
    for index in np.flatnonzero(too_many).tolist():
        faults.setdefault(int(spans.rows[index]), EXTRA_CONTROL)
    for index in np.flatnonzero(closed & ~ended).tolist():
        faults.setdefault(int(spans.rows[index]), NO_EOT)


def align_by_offsets(
    offsets: list[tuple[int, int]], text: str, start: int, end: int
) -> tuple[int, int] | str:
    """Tokens [a, b) of characters [start, end) of a row whose bytes do not add up, or what is wrong.

    Args:
        offsets: characters of each token, from the reference encoder; gaps belong to the token after them.
        text: of the row.
        start: first character of the span.
        end: behind its last.
    """
    firsts, lasts = _without_gaps(offsets)
    a = next((n for n, first in enumerate(firsts) if first >= start), len(firsts))
    b = next((n for n, last in enumerate(lasts) if last >= end), len(lasts) - 1) + 1
    while b < len(lasts) and lasts[b] <= end and firsts[b] < end:
        b += 1  # several byte tokens of one character
    if a and lasts[a - 1] > start and text[start : lasts[a - 1]].strip():
        return OVER_START
    if b and lasts[b - 1] > end and text[end : lasts[b - 1]].strip():
        return OVER_END
    return a, max(a, b)


def align_words(offsets: list[tuple[int, int]], start: int, end: int) -> tuple[int, int] | str:
    """Tokens [a, b) of characters [start, end) where no token holds a blank, or what is wrong.

    Args:
        offsets: characters of each token, from the reference encoder.
        start: first character of the span.
        end: behind its last.
    """
    a, b = (bisect_left(offsets, (place,)) for place in (start, end))
    if a and offsets[a - 1][1] > start:
        return OVER_START
    return OVER_END if b and offsets[b - 1][1] > end else (a, b)


def _without_gaps(offsets: list[tuple[int, int]]) -> tuple[list[int], list[int]]:
    firsts, lasts, at = [], [], 0
    for first, last in offsets:
        firsts.append(min(first, at) if first > at else first)
        at = max(at, last)
        lasts.append(at)
    return firsts, lasts
