"""Texts of many rows in columns, on their way to tokens.

Axes: N sequences, B bytes of all texts one after the other, S spans.
Always true:
- sequence n has the bytes `offsets[n]:offsets[n + 1]`;
- spans are ascending, inside their sequence, in bytes of the joined texts.
"""

from __future__ import annotations

from collections.abc import Sequence as Many
from dataclasses import dataclass, field
from itertools import chain

import numpy as np
import numpy.typing as npt

from raysvc.chat.render.shape import AnySequence
from raysvc.chat.sequence import Span

Bytes = npt.NDArray[np.uint8]
Ints64 = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]


@dataclass(frozen=True)
class Spans:
    """S stretches under loss.

    Attributes:
        rows: int64 [S], sequence of each.
        starts: int64 [S], first byte.
        ends: int64 [S], behind the last byte.
        kinds: int8 [S], FREE, OPEN_TURN or CLOSED_TURN of `sequence`.
    """

    rows: Ints64
    starts: Ints64
    ends: Ints64
    kinds: npt.NDArray[np.int8]


@dataclass(frozen=True)
class Batch:
    """N texts.

    Attributes:
        data: uint8 [B].
        offsets: int64 [N + 1].
        spans: what is under loss.
        prefix: ids before every text, without loss.
        suffixes: ids behind each text, with loss; empty when no text has any.
    """

    data: Bytes
    offsets: Ints64
    spans: Spans
    prefix: tuple[int, ...] = ()
    suffixes: Many[tuple[int, ...]] = field(default=())

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def text(self, row: int) -> str:
        """Text of one sequence."""
        return self.data[self.offsets[row] : self.offsets[row + 1]].tobytes().decode()


def batch_of(sequences: Many[AnySequence]) -> Batch:
    """Sequences of one format, in columns.

    Raises:
        UnicodeEncodeError: a text holds a lone surrogate.
    """
    texts = [s.text.encode() for s in sequences]
    places = [_byte_places(s) for s in sequences]
    offsets = np.zeros(len(sequences) + 1, np.int64)
    np.cumsum([*map(len, texts)], out=offsets[1:])
    counts = [len(spans) for spans in places]
    numbers = chain.from_iterable(chain.from_iterable(places))
    flat = np.fromiter(numbers, np.int64, 3 * sum(counts)).reshape(-1, 3)
    rows = np.repeat(np.arange(len(sequences)), counts)
    base = offsets[:-1]
    suffixes = [s.suffix for s in sequences] if any(s.suffix for s in sequences) else []
    return Batch(
        np.frombuffer(b"".join(texts), np.uint8),
        offsets,
        Spans(rows, flat[:, 0] + base[rows], flat[:, 1] + base[rows], flat[:, 2].astype(np.int8)),
        sequences[0].prefix if sequences else (),
        suffixes,
    )


def _byte_places(sequence: AnySequence) -> list[Span]:
    """Spans of a sequence in bytes of its text."""
    text = sequence.text
    if text.isascii():
        return sequence.spans
    return [(_bytes(text, a), _bytes(text, b), kind) for a, b, kind in sequence.spans]


def _bytes(text: str, chars: int) -> int:
    return len(text[:chars].encode())
