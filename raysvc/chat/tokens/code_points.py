"""A fast encoder, kept off the code points that it treats in another way than the reference.

An encoder's tables of Unicode may be newer or older than the reference's, and then it cuts a few characters elsewhere.

1. Before a batch is encoded, its code points are looked at in blocks of 128.
2. A block that was not seen before is tried, every code point of it: all in a row, and each beside blanks, `'s`, letters,
   digits and marks. Pre-tokenizers cut these texts in another way for letters, numbers, blanks and other characters;
   normalizers put the marks in another order around a mark.
3. Where the ids differ, the whole block counts as different: a mark may change what its neighbours do. A vocabulary shows
   a cut only where one of its tokens would lie across it, so that of a tokenizer of bytes is tried with a vocabulary that
   shows all (`ShownCuts`): the last byte of a character and the first of the next are one token unless a cut is between.
4. Rows that hold such a code point get the reference's ids.

Always true:
- no code point beyond ASCII reaches the fast encoder before it was tried in this process, whichever thread has the text;
- rows keep their order;
- of that vocabulary, normalizers and pre-tokenizers are those of the tokenizer, and nothing else of it is left.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Sequence
from itertools import pairwise, product
from threading import Lock
from typing import Any

import numpy as np

from raysvc.chat.tokens.encoder import Bytes, EncodedTexts, Encoder, Ints64
from raysvc.chat.tokens.file_tokenizer import FileTokenizer
from raysvc.chat.tokens.token_bytes import CHAR_OF_BYTE
from raysvc.ragged import offsets_of

logger = logging.getLogger(__name__)
Pair = tuple[Encoder, Encoder]
"""A fast encoder, and what is right."""
BLOCK_BITS = 7  # most scripts begin at a multiple of 128
_SURROGATES = range(0xD800, 0xE000)


class GuardedEncoder:
    """The fast encoder where it is known to be equal, else the reference.

    Args:
        fast: equal on the probe texts.
        reference: what is right.
        tried: two in their place to try code points on, with a vocabulary that shows all cuts.
        odd: regex; a text that holds one, and is not ASCII, gets the reference's ids.
    """

    def __init__(self, fast: Encoder, reference: Encoder, tried: Pair | None = None, odd: str = "") -> None:
        self._fast, self._reference = fast, reference
        self._pair = tried or (fast, reference)
        self.name = fast.name
        self._tried = {0}  # blocks; the first is in the probe texts and is tried below
        self._different: set[int] = set()
        self._odd = odd
        self._pattern = re.compile(odd) if odd else None
        self._lock = Lock()  # while a block is tried
        self._try(0)

    @property
    def different(self) -> frozenset[int]:
        """Code points that were found to differ."""
        return frozenset(self._different)

    def encode(self, texts: Sequence[str]) -> EncodedTexts:
        """Ids of the texts."""
        self._look_at("".join(texts))
        rows = self._odd_rows(texts)
        found = self._fast.encode(texts)
        return replaced(found, rows, self._reference.encode([texts[row] for row in rows])) if rows else found

    def encode_bytes(self, data: Bytes, offsets: Ints64) -> EncodedTexts:
        """Ids of N texts in UTF-8."""
        if not len(data) or int(data.max()) < 0x80:
            return self._fast.encode_bytes(data, offsets)
        self._look_at(data[data >= 0x80].tobytes().decode())
        found = self._fast.encode_bytes(data, offsets)
        if self._pattern is None:
            return found
        whole = data.tobytes()
        texts = [whole[a:b].decode() for a, b in pairwise(offsets.tolist())]
        rows = self._odd_rows(texts)
        return replaced(found, rows, self._reference.encode([texts[row] for row in rows])) if rows else found

    def _look_at(self, text: str) -> None:
        """Try every block of code points that stands in a text for the first time."""
        points = np.frombuffer(text.encode("utf-32-le"), np.uint32)
        blocks = np.flatnonzero(np.bincount(points >> BLOCK_BITS))
        if self._tried.issuperset(blocks.tolist()):
            return
        with self._lock:
            for block in blocks.tolist():
                if block not in self._tried:
                    self._try(block)
                    self._tried.add(block)  # from here on other threads encode it

    def _try(self, block: int) -> None:
        found = different_points(*self._pair, block_points(block))
        if found:
            logger.warning(
                "encoder=%s differs on %d code points from U+%04X", self.name, len(found), found[0]
            )
            self._different.update(found)
            points = re.escape("".join(map(chr, sorted(self._different))))
            self._pattern = re.compile("|".join([*filter(None, [self._odd]), f"[{points}]"]))

    def _odd_rows(self, texts: Sequence[str]) -> list[int]:
        pattern = self._pattern
        return [] if pattern is None else [row for row, text in enumerate(texts) if pattern.search(text)]


def block_points(block: int) -> list[int]:
    """The code points of a block that are characters."""
    first = block << BLOCK_BITS
    return [point for point in range(first, first + (1 << BLOCK_BITS)) if point not in _SURROGATES]


def different_points(fast: Encoder, reference: Encoder, points: Sequence[int]) -> list[int]:
    """All of a block on which two encoders differ, else none."""
    chars = [chr(point) for point in points]
    texts = [*_texts("".join(chars)), "".join(map(_unit, chars))]
    return [] if not points or _equal(fast, reference, texts) else list(points)


def _unit(char: str) -> str:
    """Shows the class of a character: by the cut, and by the order in which a normalizer puts marks."""
    return f"  {char}'s A{char}a{char}A1{char}1'{char}\n a\u0301{char}\u0323"


def _texts(text: str) -> list[str]:
    return [text, f"a{text}a", f"1{text}1", f" {text}\n\n", f"!{text}!"]


def _equal(fast: Encoder, reference: Encoder, texts: list[str]) -> bool:
    ours, theirs = fast.encode(texts), reference.encode(texts)
    return np.array_equal(ours.offsets, theirs.offsets) and np.array_equal(ours.ids, theirs.ids)


def replaced(found: EncodedTexts, rows: list[int], right: EncodedTexts) -> EncodedTexts:
    """Ids with some rows taken from another result, which holds these rows alone."""
    pieces = [found.ids[a:b] for a, b in pairwise(found.offsets.tolist())]
    for place, row in enumerate(rows):
        pieces[row] = right.ids[right.offsets[place] : right.offsets[place + 1]]
    offsets = offsets_of([*map(len, pieces)])
    return EncodedTexts(np.concatenate(pieces) if pieces else found.ids, offsets)


_ASCII = range(0x80)
_ENDS = range(0x80, 0xC0)  # the last byte of a character beyond ASCII
_BEGINS = range(0xC2, 0xF5)  # the first


def shown_cuts(backend: Any) -> ShownCuts | None:
    """That of a tokenizer; None where its pre-tokenizer does not make bytes of a text."""
    pre = backend.pre_tokenizer
    if pre is None or b'"ByteLevel"' not in pre.__getstate__():
        return None
    return ShownCuts(backend)


class ShownCuts:
    """Holds what encoders are made from, as of a loaded tokenizer.

    Args:
        backend: of the tokenizer.

    Attributes:
        hf: like a `transformers` tokenizer.
        free_id: that no token has.
    """

    def __init__(self, backend: Any) -> None:
        from tokenizers import Tokenizer, models

        pairs = [*product(_ENDS, _BEGINS), *product(_ASCII, _BEGINS), *product(_ENDS, _ASCII)]
        merges = [(CHAR_OF_BYTE[a], CHAR_OF_BYTE[b]) for a, b in pairs]
        vocab = {token: number for number, token in enumerate([*CHAR_OF_BYTE, *map("".join, merges)])}
        made = Tokenizer(models.BPE(vocab=vocab, merges=merges))
        made.pre_tokenizer = backend.pre_tokenizer
        if backend.normalizer is not None:
            made.normalizer = backend.normalizer
        if backend.decoder is not None:
            made.decoder = backend.decoder
        self.hf = FileTokenizer(made, {}, (), None)
        self.free_id = len(vocab)

    def content(self) -> bytes:
        """Returns the encoder as the bytes of a `tokenizer.json`."""
        text: str = self.hf.backend_tokenizer.to_str()
        return text.encode()
