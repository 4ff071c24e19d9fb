"""Blanks that a tokenizer puts before a text, taken out of what its ids decode to.

Sentencepiece-like tokenizers begin a text with a blank that nobody wrote, and again behind every added token.

Axes: N rows, T tokens of all rows, C tokens that may begin with such a blank.
Always true:
- a blank is taken out only before a stretch without added tokens, and only where the tokenizer's files say so;
- a wrong guess does no harm: the row then does not decode to its text, and is aligned in another way.
"""

from __future__ import annotations

from enum import Enum
from typing import Any

import numpy as np
import numpy.typing as npt

from raysvc.chat.sequence import Batch
from raysvc.chat.tokens.backend_parts import parts_of
from raysvc.chat.tokens.encoder import Bytes, EncodedTexts, Ints64

_BLANK = 32
Bools = npt.NDArray[np.bool_]


class Rule(Enum):
    """Says which stretches between added tokens get a blank."""

    NONE = "none"
    EVERY = "every"  # the normalizer `Prepend`
    UNLESS_BLANK = "unless blank"  # `Metaspace`, scheme `always`; `ByteLevel` with `add_prefix_space`
    FIRST = "first"  # `Metaspace`, scheme `first`: at the start of the text, unless it begins with a blank


def rule_of(backend: Any) -> Rule:
    """Returns what the files of a tokenizer say about blanks; NONE where that is more than we know of."""
    if any(
        part["type"] == "Prepend" and part["prepend"] == "\u2581" for part in parts_of(backend.normalizer)
    ):
        return Rule.EVERY
    for place, part in enumerate(parts_of(backend.pre_tokenizer)):
        if part["type"] == "ByteLevel" and part["add_prefix_space"] and not place:
            return Rule.UNLESS_BLANK
        if part["type"] == "Metaspace":
            scheme = part.get("prepend_scheme", "always")
            return {"always": Rule.UNLESS_BLANK, "first": Rule.FIRST}.get(scheme, Rule.NONE)
    return Rule.NONE


class AddedBlanks:
    """Takes them out.

    Args:
        rule: of the tokenizer.
        pieces: bytes of every id.
        is_added: of every id, whether it is an added token.
    """

    def __init__(self, rule: Rule, pieces: list[bytes], is_added: Bools) -> None:
        added = np.flatnonzero(is_added).tolist()
        blank_token = any(pieces[token].isspace() for token in added)
        self._rule = Rule.NONE if blank_token else rule  # a blank could be this token's or ours
        self._is_added = is_added
        if self._rule is Rule.NONE:
            return
        self._may_begin = np.array([piece[:1] == b" " for piece in pieces], np.bool_) & ~is_added

    def removed(
        self, encoded: EncodedTexts, token_ends: Ints64, decoded: Bytes, batch: Batch
    ) -> tuple[Ints64, Bytes]:
        """(token ends int64 [T + 1], bytes) without them."""
        if self._rule is Rule.NONE or not len(encoded.ids):
            return token_ends, decoded
        at = self._places(encoded)
        if self._rule is not Rule.EVERY and len(at):
            at = self._unless_blank(at, encoded, token_ends, batch)
        if not len(at):
            return token_ends, decoded
        taken = np.zeros(len(token_ends), np.int64)
        taken[at + 1] = 1
        return token_ends - np.cumsum(taken), np.delete(decoded, token_ends[at])

    def _places(self, encoded: EncodedTexts) -> Ints64:
        """int64 [C], tokens that begin with a blank and stand at the start of a row or behind an added token."""
        starts = encoded.offsets[:-1][np.diff(encoded.offsets) > 0]
        if self._rule is Rule.FIRST:
            first = starts
        else:
            opens = np.zeros(len(encoded.ids), np.bool_)
            opens[1:] = self._is_added[encoded.ids[:-1]]
            opens[starts] = True
            first = np.flatnonzero(opens)
        return first[self._may_begin[encoded.ids[first]]]

    def _unless_blank(self, at: Ints64, encoded: EncodedTexts, token_ends: Ints64, batch: Batch) -> Ints64:
        """Those whose stretch does not begin with a blank in the text itself."""
        rows = np.searchsorted(encoded.offsets, at, "right") - 1
        nth = np.arange(len(at)) - np.searchsorted(rows, rows, "left")
        places = batch.offsets[rows] + token_ends[at] - token_ends[encoded.offsets[rows]]
        text = np.append(batch.data, np.uint8(0))
        ours = np.zeros(len(at), np.bool_)
        before = np.zeros(len(batch), np.int64)  # blanks taken out of each row so far
        order = np.argsort(nth, kind="stable")
        for same in np.split(order, np.flatnonzero(np.diff(nth[order])) + 1):
            place = np.minimum(places[same] - before[rows[same]], len(batch.data))
            ours[same] = text[place] != _BLANK
            before[rows[same]] += ours[same]
        return at[ours]
