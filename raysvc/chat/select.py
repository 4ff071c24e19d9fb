"""Selects the tokens of encoded rows that are written, and what is kept of rows that are too long.

Axes: N sequences before, K after; T tokens before, W written.
Always true:
- a source row is written whole or not at all: all its sequences, or none; one that is not written is counted, once;
- when nothing has to go, nothing is copied;
- `drop` and `error` keep nothing of rows that are too long, `keep_start` a prefix of their tokens;
- `keep_end_turns` keeps the render of a shorter conversation: the system messages and as many whole last turns as fit,
  as `apply_chat_template` writes them; a turn begins where a user begins to speak, at the first
  of the messages of theirs that follow each other;
- a row of more than `MAX_TOKENS` is quarantined where the job has no `max_length`, so that somebody looks at it;
- no token becomes trained by it, and a row without a trained token is dropped, with a reason.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from raysvc.chat.row_counter import RowCounter
from raysvc.chat.row_errors import RowDropped, RowFault
from raysvc.chat.source.examples import ChatExample
from raysvc.chat.source.messages import SYSTEM_ROLES
from raysvc.chat.tokens.encoder import Ints32, Ints64
from raysvc.chat.tokens.token_rows import TokenRows
from raysvc.errors import SourceError
from raysvc.job.config import TextSpec
from raysvc.ragged import cells_of_runs


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
    kept_to = tokens.offsets[1:].copy()
    left_out = np.zeros(len(lengths), np.bool_)
    starts = np.flatnonzero(np.append(True, np.diff(source_rows) != 0))
    ends = np.append(starts[1:], len(source_rows))
    for row in np.flatnonzero(np.logical_or.reduceat(odd, starts)).tolist():
        places = range(int(starts[row]), int(ends[row]))
        number = int(source_rows[places[0]])
        try:
            for place in places:
                kept_to[place] = kept_end(tokens, place, spec, f"{counter.dataset or 'source'}:{number}")
        except (RowFault, RowDropped) as why:
            counter.leave_out(number, why)
            left_out[places.start : places.stop] = True
    kept = _gathered(tokens, kept_to, left_out, source_rows)
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


def _gathered(
    tokens: TokenRows, kept_to: Ints64, left_out: npt.NDArray[np.bool_], source_rows: Ints64
) -> Kept:
    there = ~left_out
    starts, written = tokens.offsets[:-1][there], source_rows[there]
    lengths = kept_to[there] - starts
    cells = cells_of_runs(starts, lengths)
    rendered = int(np.diff(tokens.offsets)[there].sum())
    return Kept(tokens.ids[cells], tokens.mask[cells], lengths, written, _count(written), rendered)


MAX_TOKENS = 1 << 20  # where no max_length is given: the longest context that models are usually trained with
TOO_MANY = f"the row has more than {MAX_TOKENS:,} tokens"
TOO_LONG = "longer than max_length"
NOTHING_LEFT = "no trained token is left after truncation"
NOTHING_TRAINED = "no trained token"
LAST_TURN_TOO_LONG = "the last turn alone is longer than max_length"


def kept_end(rows: TokenRows, row: int, spec: TextSpec, place: str) -> int:
    """Returns where the tokens of one row end that are kept, among those of all rows: a row keeps its beginning.

    Args:
        rows: with their mask.
        row: which one.
        spec: for the policy.
        place: of the row, for the error.

    Raises:
        RowDropped: the policy leaves the row out, or nothing of it is trained.
        RowFault: as it was found, or it has more than `MAX_TOKENS`, and the job says nothing of rows so long.
        SourceError: the row is too long and the policy is `error`.
    """
    if row in rows.faults:
        raise rows.faults[row]
    first, last = int(rows.offsets[row]), int(rows.offsets[row + 1])
    is_prompt = spec.format == "prompt"  # nothing of it is to be trained
    if not is_prompt and not rows.mask[first:last].any():
        raise RowDropped(NOTHING_TRAINED)
    if last - first <= (spec.max_length or MAX_TOKENS):
        return last
    if spec.max_length is None:
        raise RowFault(TOO_MANY, f"it has {last - first:,}; max_length and truncation say what to do with it")
    if spec.truncation == "drop":
        raise RowDropped(TOO_LONG)
    if spec.truncation == "error":
        raise SourceError(
            place,
            f"the row has {last - first} tokens and max_length is {spec.max_length}",
            "raise max_length, or set truncation to drop, keep_start or keep_end_turns",
        )
    if spec.truncation == "keep_end_turns":
        raise RowDropped(LAST_TURN_TOO_LONG)  # what could be made shorter was
    end = first + spec.max_length
    if not rows.mask[first:end].any():
        raise RowDropped(NOTHING_LEFT)
    return end


def fewer_turns(example: ChatExample) -> list[ChatExample]:
    """The conversation without its first turn, without its first two, and so on: the shortest has one turn."""
    messages = example.messages
    roles = [message.get("role") for message in messages]
    head = next((n for n, role in enumerate(roles) if role not in SYSTEM_ROLES), len(roles))
    users = [n for n in range(head + 1, len(roles)) if roles[n] == "user" != roles[n - 1]]
    return [
        replace(
            example,
            messages=[*messages[:head], *messages[start:]],
            trained=tuple(place - start + head for place in example.trained if place >= start),
        )
        for start in users
    ]
