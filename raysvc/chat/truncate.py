"""What is kept of rows that are too long.

Always true:
- a kept row is a subsequence of its tokens, at most `max_length` long: a prefix, or the head and whole last turns;
- no token becomes trained by it;
- a row without a trained token is dropped, with a reason.
"""

from __future__ import annotations

import numpy as np

from raysvc.chat.row_errors import RowDropped
from raysvc.chat.text_batch import Batch
from raysvc.chat.tokens.token_rows import TokenRows
from raysvc.config import TextSpec
from raysvc.errors import SourceError

TOO_LONG = "longer than max_length"
NOTHING_LEFT = "no trained token is left after truncation"
NOTHING_TRAINED = "no trained token"
LAST_TURN_TOO_LONG = "the last turn alone is longer than max_length"
NO_TURNS = "longer than max_length, and its turns are not whole tokens"
Ranges = list[tuple[int, int]]


def kept_ranges(rows: TokenRows, row: int, batch: Batch | None, spec: TextSpec, place: str) -> Ranges:
    """Token ranges of one row that are kept, ascending, in tokens of all rows.

    Args:
        rows: with their mask.
        row: which one.
        batch: for its turns, None for rows that came as tokens.
        spec: for the policy.
        place: of the row, for the error.

    Raises:
        RowDropped: the policy leaves the row out, or nothing of it is trained.
        SourceError: the row is too long and the policy is `error`.
    """
    first, last = int(rows.offsets[row]), int(rows.offsets[row + 1])
    is_prompt = spec.format == "prompt"  # nothing of it is to be trained
    if not is_prompt and not rows.mask[first:last].any():
        raise RowDropped(NOTHING_TRAINED)
    if spec.max_length is None or last - first <= spec.max_length:
        return [(first, last)]
    if spec.truncation == "drop":
        raise RowDropped(TOO_LONG)
    if spec.truncation == "error":
        raise SourceError(
            place,
            f"the row has {last - first} tokens and max_length is {spec.max_length}",
            "raise max_length, or set truncation to drop, keep_start or keep_end_turns",
        )
    if spec.truncation == "keep_start":
        ranges = [(first, first + spec.max_length)]
    else:
        ranges = _end_turns(rows, row, batch, spec.max_length)
    if not is_prompt and not any(rows.mask[a:b].any() for a, b in ranges):
        raise RowDropped(NOTHING_LEFT)
    return ranges


def _end_turns(rows: TokenRows, row: int, batch: Batch | None, limit: int) -> Ranges:
    """The head and as many whole last turns as fit; a turn begins where a user begins to speak."""
    first, last = int(rows.offsets[row]), int(rows.offsets[row + 1])
    if batch is None or rows.token_bytes is None or row in rows.odd:
        raise RowDropped(NO_TURNS)
    shift = int(rows.token_bytes[first] - batch.offsets[row])
    cuts = (
        np.concatenate([batch.turns.heads[row : row + 1], batch.turns.starts[batch.turns.rows == row]])
        + shift
    )
    tokens = np.searchsorted(rows.token_bytes, cuts, "left")
    if not np.array_equal(rows.token_bytes[tokens], cuts):
        raise RowDropped(NO_TURNS)
    head = int(tokens[0])
    for turn in tokens[1:].tolist():
        if turn >= head and head - first + last - turn <= limit:
            return [(first, head), (turn, last)] if head > first else [(turn, last)]
    raise RowDropped(LAST_TURN_TOO_LONG)
