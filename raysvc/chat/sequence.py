"""Texts on their way to tokens: one, and those of many rows in columns.

Axes: N sequences, B bytes of all texts one after the other, S spans.
Always true:
- a sequence has a text, or tokens that came as tokens;
- spans are ascending and do not overlap: in characters of a text, in a batch in bytes of the joined texts, inside their sequence;
- sequence n of a batch has the bytes `offsets[n]:offsets[n + 1]`.
"""

from __future__ import annotations

from collections.abc import Sequence as Many
from dataclasses import dataclass, field
from itertools import chain
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from raysvc.chat.source.examples import ChatExample, Example, StepsExample, TokensExample
from raysvc.media.kinds import Kind
from raysvc.ragged import offsets_of

FREE = 0  # text under loss that is no turn: any token may be in it
OPEN_TURN = 1  # a turn that the template does not end with a token
CLOSED_TURN = 2  # a turn that ends with its end-of-turn token
ENDLESS_TURN = 3  # an open one behind which the template writes no end at all
Span = tuple[int, int, int]


class MediumPlace(NamedTuple):
    """A medium that a text stands for; its tokens are those of the processor's token, in the order of the media.

    Attributes:
        kind: of it.
        sha256: of its bytes.
        size: as its kind has it.
        tokens: of it in the text.
        patches: encoder work.
        num_bytes: encoded.
    """

    kind: Kind
    sha256: str
    size: tuple[int, ...]
    tokens: int
    patches: int
    num_bytes: int


@dataclass(slots=True)
class Sequence:
    """A text, and what of it is trained.

    Attributes:
        text: to encode.
        spans: (start, end, kind) characters under loss; the kind is FREE, OPEN_TURN, CLOSED_TURN or ENDLESS_TURN.
        prefix: ids before the text, without loss.
        suffix: ids behind it, with loss.
        example: what it came from.
        tokens: ids and mask that came as tokens, instead of a text.
        media: that the text stands for.
        removed: trained messages with reasoning that the template left out.
        noted: what was changed of a plain text.
    """

    text: str
    spans: list[Span]
    prefix: tuple[int, ...] = ()
    suffix: tuple[int, ...] = ()
    example: Example | None = None
    tokens: TokensExample | None = None
    media: tuple[MediumPlace, ...] = ()
    removed: int = 0
    noted: frozenset[str] = frozenset()

    @property
    def changes(self) -> frozenset[str]:
        """Returns what the normal form changed."""
        said = self.example.prompt if isinstance(self.example, StepsExample) else self.example
        return said.changes if isinstance(said, ChatExample) else self.noted

    @property
    def endless(self) -> int:
        """Trained turns that have no end."""
        return [kind for _, _, kind in self.spans].count(ENDLESS_TURN)

    @property
    def has_end(self) -> bool:
        """Returns whether a trained turn has one."""
        return any(kind == CLOSED_TURN for _, _, kind in self.spans)


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
    offsets = offsets_of([*map(len, texts)])
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
