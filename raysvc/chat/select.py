"""Which tokens of encoded rows are written.

Axes: N sequences before, K after; T tokens before, W written.
Always true:
- a source row is written whole or not at all: all its sequences, or none;
- a row that is not written is counted, once;
- when nothing has to go, nothing is copied.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from raysvc.chat.row_counter import RowCounter
from raysvc.chat.row_errors import RowDropped, RowFault
from raysvc.chat.tokens.encoder import Ints32, Ints64
from raysvc.chat.tokens.token_rows import TokenRows
from raysvc.chat.truncate import MAX_TOKENS, Ranges, kept_ranges
from raysvc.job.config import TextSpec


@dataclass(frozen=True)
class Kept:
    """Sequences that are written.

    Attributes:
        ids: int32 [W].
        mask: uint8 [W].
        lengths: int64 [K].
        source_rows: int64 [K].
        rows: source rows that were written.
        rendered: their tokens before truncation.
        carried: name -> [K], the columns that go with them.
    """

    ids: Ints32
    mask: npt.NDArray[np.uint8]
    lengths: Ints64
    source_rows: Ints64
    rows: int
    rendered: int
    carried: Mapping[str, pa.Array] = field(default_factory=dict)


def keep(tokens: TokenRows, source_rows: Ints64, spec: TextSpec, counter: RowCounter) -> Kept:
    """Apply faults and the truncation policy.

    Args:
        tokens: N sequences.
        source_rows: int64 [N]; the sequences of one row lie together.
        spec: for the policy.
        counter: counts what is not written.

    Raises:
        SourceError: a row is too long and the policy is `error`.
    """
    lengths = np.diff(tokens.offsets)
    odd = _odd(tokens, lengths, spec)
    if not odd.any():
        total = int(tokens.offsets[-1])
        return Kept(tokens.ids, tokens.mask, lengths, source_rows, _count(source_rows), total)
    ranges: list[Ranges] = [[(a, b)] for a, b in zip(tokens.offsets, tokens.offsets[1:], strict=False)]
    left_out = np.zeros(len(lengths), np.bool_)
    starts = np.flatnonzero(np.append(True, np.diff(source_rows) != 0))
    ends = np.append(starts[1:], len(source_rows))
    for row in np.flatnonzero(np.logical_or.reduceat(odd, starts)).tolist():
        places = range(int(starts[row]), int(ends[row]))
        number = int(source_rows[places[0]])
        try:
            for place in places:
                ranges[place] = _ranges(tokens, place, spec, f"{counter.dataset or 'source'}:{number}")
        except (RowFault, RowDropped) as why:
            counter.leave_out(number, why)
            left_out[places.start : places.stop] = True
    kept = _gathered(tokens, ranges, left_out, source_rows)
    counter.truncate(_count(kept.source_rows[kept.lengths < lengths[~left_out]]))
    return kept


def _count(source_rows: Ints64) -> int:
    """Different numbers among some that lie together."""
    return int((np.diff(source_rows) != 0).sum()) + 1 if len(source_rows) else 0


def _odd(tokens: TokenRows, lengths: Ints64, spec: TextSpec) -> npt.NDArray[np.bool_]:
    """bool [N]: rows that cannot just be written."""
    trained = np.zeros(len(lengths), np.uint8)
    there = np.flatnonzero(lengths)
    if len(there):
        trained[there] = np.maximum.reduceat(tokens.mask, tokens.offsets[there])
    odd: npt.NDArray[np.bool_] = (trained == 0) & (spec.format != "prompt")
    odd |= lengths > (spec.max_length or MAX_TOKENS)
    odd[list(tokens.faults)] = True
    return odd


def _ranges(tokens: TokenRows, place: int, spec: TextSpec, label: str) -> Ranges:
    if place in tokens.faults:
        raise tokens.faults[place]
    return kept_ranges(tokens, place, spec, label)


def _gathered(
    tokens: TokenRows,
    ranges: list[Ranges],
    left_out: npt.NDArray[np.bool_],
    source_rows: Ints64,
) -> Kept:
    there = np.flatnonzero(~left_out)
    flat = np.array([pair for row in there.tolist() for pair in ranges[row]], np.int64).reshape(-1, 2)
    sizes = flat[:, 1] - flat[:, 0]
    ends = np.cumsum(sizes)
    index = np.arange(int(ends[-1]) if len(ends) else 0) + np.repeat(flat[:, 0] - ends + sizes, sizes)
    lengths = np.array([sum(b - a for a, b in ranges[row]) for row in there.tolist()], np.int64)
    rendered = int(np.diff(tokens.offsets)[there].sum())
    written = source_rows[there]
    return Kept(tokens.ids[index], tokens.mask[index], lengths, written, _count(written), rendered)
