"""Texts of many rows in columns, on their way to tokens.

Axes: N sequences, B bytes of all texts one after the other, S spans.
Always true:
- sequence n has the bytes `offsets[n]:offsets[n + 1]`;
- spans are ascending, inside their sequence, in bytes of the joined texts;
- sequences that come together are in the same columns as if each had come alone.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence as Many
from dataclasses import dataclass, field
from itertools import accumulate, chain, pairwise

import numpy as np
import numpy.typing as npt

from raysvc.chat.render.shape import JoinedRows, PieceSpans, Sequences, kinds_of
from raysvc.chat.sequence import Sequence

Bytes = npt.NDArray[np.uint8]
Ints64 = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]
ROWS_TO_SHARE = 8  # a head is encoded for, and then one row as a whole


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
class Heads:
    """Beginnings that sequences share.

    Attributes:
        texts: each once.
        numbers: int64 [N], which of them a sequence begins with, -1 for none.
    """

    texts: list[str]
    numbers: Ints64


@dataclass(frozen=True)
class Batch:
    """N texts.

    Attributes:
        data: uint8 [B].
        offsets: int64 [N + 1].
        spans: what is under loss.
        prefix: ids before every text, without loss.
        suffixes: ids behind each text, with loss; empty when no text has any.
        heads: where some sequences have one.
    """

    data: Bytes
    offsets: Ints64
    spans: Spans
    prefix: tuple[int, ...] = ()
    suffixes: Many[tuple[int, ...]] = field(default=())
    heads: Heads | None = None

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def text(self, row: int) -> str:
        """Text of one sequence."""
        return self.data[self.offsets[row] : self.offsets[row + 1]].tobytes().decode()


def batch_of(sequences: Sequences) -> Batch:
    """Sequences of one format, in columns.

    Raises:
        UnicodeEncodeError: a text holds a lone surrogate.
    """
    alone = [one for one in sequences if not isinstance(one, JoinedRows)]
    return _alone(alone) if len(alone) == len(sequences) else _mixed(sequences)


def _mixed(sequences: Sequences) -> Batch:
    """Of texts in pieces: those of rows that come together, one of any other."""
    pieces: list[bytes] = []
    sizes: list[int] = []  # pieces of each sequence
    spans: list[PieceSpans] = []
    for one in sequences:
        if isinstance(one, JoinedRows):
            pieces += one.pieces()
            sizes += [2 * len(shape.literals) for shape in one.shapes]
            spans += [shape.spans for shape in one.shapes]
        else:
            pieces.append(one.text.encode())
            sizes.append(1)
            spans.append(_spans(one))
    ends, first = np.cumsum([0, *map(len, pieces)]), np.cumsum([0, *sizes])
    counts = [*map(len, spans)]
    numbers = chain.from_iterable(chain.from_iterable(spans))
    table = np.fromiter(numbers, np.int64, 5 * sum(counts)).reshape(-1, 5)
    rows = np.repeat(np.arange(len(sizes)), counts)
    starts, stops = (ends[first[rows] + table[:, n]] + table[:, n + 1] for n in (0, 2))
    spans_of_all = Spans(rows, starts, stops, table[:, 4].astype(np.int8))
    data = np.frombuffer(b"".join(pieces), np.uint8)
    heads = _heads([kind.head for kind in kinds_of(sequences)])
    behind = [[()] * len(one) if isinstance(one, JoinedRows) else [one.suffix] for one in sequences]
    suffixes = [*chain.from_iterable(behind)]
    return Batch(data, ends[first], spans_of_all, suffixes=suffixes if any(suffixes) else [], heads=heads)


def _spans(sequence: Sequence) -> PieceSpans:
    """Spans of one piece, in bytes."""
    text, spans = sequence.text, sequence.spans
    if text.isascii():
        return [(0, start, 0, end, kind) for start, end, kind in spans]
    cuts = [0, *(place for start, end, _ in spans for place in (start, end))]
    at = [*accumulate(len(text[a:b].encode()) for a, b in pairwise(cuts))]
    return [(0, a, 0, b, kind) for a, b, (_, _, kind) in zip(at[::2], at[1::2], spans, strict=True)]


def _alone(sequences: Many[Sequence]) -> Batch:
    """Of texts as they are."""
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
    return Batch(data, offsets, spans_of_all, prefix, suffixes, _heads([s.head for s in sequences]))


def _heads(texts: list[str]) -> Heads | None:
    """Of texts, empty where there is none: those that enough rows begin with."""
    if not any(texts):
        return None
    counts = Counter(texts)
    different = [text for text, count in counts.items() if text and count >= ROWS_TO_SHARE]
    numbers = {text: number for number, text in enumerate(different)}
    if not different:
        return None
    return Heads(different, np.array([numbers.get(text, -1) for text in texts], np.int64))


def _in_bytes(data: Bytes, *places: Ints64) -> list[Ints64]:
    """Places among the characters of a text in UTF-8, as places among its bytes."""
    behind = np.flatnonzero((data & 0xC0) == 0x80)  # bytes that begin no character
    begun = behind - np.arange(len(behind))  # characters that have begun before each of them
    return [place + np.searchsorted(begun, place, "right") for place in places]
