"""Keeps what trainers say of themselves in their heartbeats, for display. No Ray.

Always true:
- a report belongs to a fence: that of a trainer that was replaced is never shown for its successor;
- of the ranks of one group the one that waited most speaks for stalls, the first one for all else.
"""

from __future__ import annotations

import threading
import time
from typing import Any

FORGET_AFTER_S = 600.0
_OF_STALLS = ("stall", "stall_s", "causes")


class TrainerReports:
    """Newest report of each seat."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._by_seat: dict[tuple[int, int], tuple[float, dict[str, Any]]] = {}  # guarded by _lock

    def note(self, fence: int, rank: int, report: dict[str, Any]) -> None:
        """Keep the report of a seat."""
        now_s = time.monotonic()
        with self._lock:
            self._by_seat[fence, rank] = (now_s, report)
            old = [seat for seat, (seen_s, _) in self._by_seat.items() if now_s - seen_s > FORGET_AFTER_S]
            for seat in old:
                del self._by_seat[seat]

    def of(self, fence: int) -> dict[str, Any] | None:
        """One report for all seats of a fence; None: none came yet."""
        with self._lock:
            seats = {rank: report for (of, rank), (_, report) in self._by_seat.items() if of == fence}
        if not seats:
            return None
        reports = [seats[rank] for rank in sorted(seats)]
        slowest = max(reports, key=lambda report: float(report.get("stall", 0.0)))
        versions = sorted({str(report["version"]) for report in reports if "version" in report})
        merged = {**reports[0], **{name: slowest[name] for name in _OF_STALLS if name in slowest}}
        return {**merged, "version": ", ".join(versions)}
