"""Decides what is kept of rows that are too long.

Always true:
- `drop` and `error` keep nothing of them, `keep_start` a prefix of their tokens;
- `keep_end_turns` keeps the render of a shorter conversation: the system messages and as many whole last turns as fit,
  as `apply_chat_template` writes them; a turn begins where a user begins to speak, at the first
  of the messages of theirs that follow each other;
- a row of more than `MAX_TOKENS` is quarantined where the job has no `max_length`, so that somebody looks at it;
- no token becomes trained by it;
- a row without a trained token is dropped, with a reason.
"""

from __future__ import annotations

from dataclasses import replace

from raysvc.chat.row_errors import RowDropped, RowFault
from raysvc.chat.source.examples import ChatExample
from raysvc.chat.source.messages import SYSTEM_ROLES
from raysvc.chat.tokens.token_rows import TokenRows
from raysvc.errors import SourceError
from raysvc.job.config import TextSpec

MAX_TOKENS = 1 << 20  # where no max_length is given: the longest context that models are usually trained with
TOO_MANY = f"the row has more than {MAX_TOKENS:,} tokens"
TOO_LONG = "longer than max_length"
NOTHING_LEFT = "no trained token is left after truncation"
NOTHING_TRAINED = "no trained token"
LAST_TURN_TOO_LONG = "the last turn alone is longer than max_length"
Ranges = list[tuple[int, int]]


def kept_ranges(rows: TokenRows, row: int, spec: TextSpec, place: str) -> Ranges:
    """Token ranges of one row that are kept, ascending, in tokens of all rows.

    Args:
        rows: with their mask.
        row: which one.
        spec: for the policy.
        place: of the row, for the error.

    Raises:
        RowDropped: the policy leaves the row out, or nothing of it is trained.
        RowFault: it has more than `MAX_TOKENS`, and the job says nothing of rows so long.
        SourceError: the row is too long and the policy is `error`.
    """
    first, last = int(rows.offsets[row]), int(rows.offsets[row + 1])
    is_prompt = spec.format == "prompt"  # nothing of it is to be trained
    if not is_prompt and not rows.mask[first:last].any():
        raise RowDropped(NOTHING_TRAINED)
    if last - first <= (spec.max_length or MAX_TOKENS):
        return [(first, last)]
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
    ranges = [(first, first + spec.max_length)]
    if not any(rows.mask[a:b].any() for a, b in ranges):
        raise RowDropped(NOTHING_LEFT)
    return ranges


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
