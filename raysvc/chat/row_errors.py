"""Why one row did not become tokens.

Always true:
- a `RowFault` sets its row aside (quarantine), a `RowDropped` leaves it out by a declared policy;
- neither leaves the slice: both are caught at the row and counted.
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
