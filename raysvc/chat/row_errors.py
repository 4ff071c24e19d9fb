"""Errors of a row that does not become tokens: a `RowFault` puts it into quarantine, a `RowDropped` leaves it out by a declared policy.

Rooms raise them in the order in which a row passes:

1. `source` raises a fault where a row cannot be read: broken JSON, a missing column, an unknown role, calls that are not JSON;
   where no message would be trained it is dropped;
2. `render` and `bounds` where the template raises, writes nothing of a role, or takes more than a render may;
3. `turns` where the text of a turn cannot be told, or does not say what its message says: `turn_check` has the rules;
4. `tokens` where a token lies over the edge of a turn, or decodes to another text;
5. `select` drops what is too long; `carry` and `raysvc.media` raise faults of further columns and of media.

Always true:
- neither leaves the slice: `row_sequences` catches those of texts and `select` those of tokens, each at its row, and
  `RowCounter.leave_out` counts them.
"""

from __future__ import annotations


class RowFault(Exception):
    """A row that cannot be read or verified.

    Args:
        reason: short and the same for all rows with this fault, a key of `RowCounts.quarantined`.
        detail: what is special about this row.
    """

    def __init__(self, reason: str, detail: str = "") -> None:
        super().__init__(reason, detail)
        self.reason, self.detail = reason, detail

    def __str__(self) -> str:
        return f"{self.reason}: {self.detail}" if self.detail else self.reason


class RowDropped(Exception):
    """A row that a declared policy leaves out.

    Args:
        reason: a key of `RowCounts.dropped`.
    """

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason
