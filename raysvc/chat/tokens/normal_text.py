"""Texts as a tokenizer's normalizer leaves them, with the places of spans in them.

1. A text is cut around added tokens, which no normalizer sees, and where spans begin and end.
2. Blanks that an added token swallows (`lstrip`, `rstrip`), or that the normalizer strips off a stretch, are taken out.
3. Every piece is normalized alone; blanks that the tokenizer puts before a text are left to `added_blanks`.
4. The pieces joined are the new text. Whoever uses it compares it with what the ids decode to: only if these are equal,
   the pieces are what the tokenizer made of the whole text, and the places are right.

Always true:
- rows that are not named keep their bytes.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable
from itertools import pairwise
from typing import Any

import numpy as np

from raysvc.chat.sequence import Batch, Spans
from raysvc.chat.tokens.backend_parts import parts_of
from raysvc.chat.tokens.encoder import Ints64

_Cut = dict[int, int]  # place in a text, in bytes -> the same place in the normalized text


class NormalText:
    """Normalizes rows of a batch.

    Args:
        hf: a fast tokenizer.
    """

    def __init__(self, hf: Any) -> None:
        tokens = hf.added_tokens_decoder.values()
        added = sorted((token.content for token in tokens), key=len, reverse=True)
        self._added = re.compile("(" + "|".join(map(re.escape, added)) + ")" if added else "(?!)()")
        self._swallow_after = {token.content for token in tokens if token.rstrip}
        self._swallow_before = {token.content for token in tokens if token.lstrip}
        strips = [part for part in parts_of(hf.backend_tokenizer.normalizer) if part["type"] == "Strip"]
        self._strips = [any(part[f"strip_{side}"] for part in strips) for side in ("left", "right")]
        self._normalize = _normalize(hf.backend_tokenizer)

    def batch(self, batch: Batch, rows: Iterable[int]) -> Batch:
        """The batch with some rows normalized."""
        spans, texts = batch.spans, {}
        starts, ends = spans.starts.copy(), spans.ends.copy()
        for row in rows:
            first = int(batch.offsets[row])
            own = slice(*np.searchsorted(spans.rows, [row, row + 1]))
            old = [starts[own].copy(), ends[own].copy()]
            texts[row], cut = self._text(batch.data[first : batch.offsets[row + 1]].tobytes(), old, first)
            for places, before in zip((starts, ends), old, strict=True):
                places[own] = [cut[place - first] + first for place in before.tolist()]
        sizes = np.diff(batch.offsets)
        sizes[list(texts)] = [len(text) for text in texts.values()]
        offsets = np.concatenate([[0], np.cumsum(sizes)])
        moved = (offsets - batch.offsets)[spans.rows]
        new = Spans(spans.rows, starts + moved, ends + moved, spans.kinds)
        return Batch(_joined(batch, texts), offsets, new, batch.prefix, batch.suffixes)

    def of(self, text: str) -> str:
        """One text normalized, blanks that an added token swallows taken out."""
        return self._text(text.encode(), [], 0)[0].decode()

    def _text(self, text: bytes, places: list[Ints64], first: int) -> tuple[bytes, _Cut]:
        """(normalized text, where the places went)."""
        bounds = sorted({place - first for some in places for place in some.tolist()})
        pieces = ["", *self._added.split(text.decode()), ""]
        made, size, cut, at = [], 0, {0: 0}, 0
        for number, piece in enumerate(pieces[1:-1]):
            begin, at = at, at + len(piece.encode())
            inside = [bound for bound in bounds if begin < bound < at]
            parts = [text[a:b].decode() for a, b in pairwise([begin, *inside, at])]
            if not number % 2:
                self._trim(parts, pieces[number], pieces[number + 2])
                parts = [*map(self._normalize, parts)]
            for part, bound in zip(parts, [*inside, at], strict=True):
                made.append(part.encode())
                size += len(made[-1])
                cut[bound] = size
        return b"".join(made), cut

    def _trim(self, parts: list[str], before: str, behind: str) -> None:
        """Take out what the normalizer strips of a stretch between added tokens, and the blanks that these swallow."""
        left, right = self._strips
        if left or before in self._swallow_after:
            for place, part in enumerate(parts):
                parts[place] = part.lstrip()
                if parts[place]:
                    break
        if right or behind in self._swallow_before:
            for place in reversed(range(len(parts))):
                parts[place] = parts[place].rstrip()
                if parts[place]:
                    break


def _normalize(backend: Any) -> Callable[[str], str]:
    """The normalizer, with blanks as blanks, without the one before a text, and without what it strips."""
    from tokenizers import Tokenizer, models

    own = [part for part in parts_of(backend.normalizer) if part["type"] not in ("Prepend", "Strip")]
    state = json.loads(Tokenizer(models.BPE()).to_str())
    state["normalizer"] = {"type": "Sequence", "normalizers": own}
    normalizer = Tokenizer.from_str(json.dumps(state)).normalizer
    byte_level = backend.decoder is not None and b'"ByteLevel"' in backend.decoder.__getstate__()

    def normalize(text: str) -> str:
        normal: str = normalizer.normalize_str(text) if text else ""
        return normal if byte_level else normal.replace("\u2581", " ")

    return normalize


def _joined(batch: Batch, texts: dict[int, bytes]) -> Any:
    """Bytes of all rows, some of them replaced."""
    pieces, at = [], 0
    for row in sorted(texts):
        pieces += [batch.data[at : batch.offsets[row]].tobytes(), texts[row]]
        at = int(batch.offsets[row + 1])
    return np.frombuffer(b"".join([*pieces, batch.data[at:].tobytes()]), np.uint8)
