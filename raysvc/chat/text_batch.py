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

from raysvc.chat.sequence import Sequence

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


def batch_of(sequences: Many[Sequence]) -> Batch:
    """Sequences of one format, in columns.

    Raises:
        UnicodeEncodeError: a text holds a lone surrogate.
    """
    texts = [sequence.text for sequence in sequences]
    data = np.frombuffer("".join(texts).encode(), np.uint8)
    offsets = np.zeros(len(texts) + 1, np.int64)
    np.cumsum([*map(len, texts)], out=offsets[1:])
    spans = [sequence.spans for sequence in sequences]
    counts = [*map(len, spans)]
    numbers = chain.from_iterable(chain.from_iterable(spans))
    starts, ends, kinds = np.fromiter(numbers, np.int64, 3 * sum(counts)).reshape(-1, 3).T
    rows = np.repeat(np.arange(len(texts)), counts)
    starts, ends = starts + offsets[rows], ends + offsets[rows]
    if len(data) > offsets[-1]:
        offsets, starts, ends = _in_bytes(data, offsets, starts, ends)
    suffixes = [s.suffix for s in sequences] if any(s.suffix for s in sequences) else []
    prefix = sequences[0].prefix if sequences else ()
    spans_of_all = Spans(rows, starts, ends, kinds.astype(np.int8))
    return Batch(data, offsets, spans_of_all, prefix, suffixes)


def _in_bytes(data: Bytes, *places: Ints64) -> list[Ints64]:
    """Places among the characters of a text in UTF-8, as places among its bytes."""
    behind = np.flatnonzero((data & 0xC0) == 0x80)  # bytes that begin no character
    begun = behind - np.arange(len(behind))  # characters that have begun before each of them
    return [place + np.searchsorted(begun, place, "right") for place in places]
