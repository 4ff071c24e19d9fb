"""Reads the logs of runs that are going on, for whoever watches them on a machine that sees their folders.

Always true:
- a line is read once; a log that is another file by now (a run was resumed) is read from its beginning;
- a run whose folder is not here has no lines, and a line that is not whole yet is read later.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

Line = dict[str, Any]


class GrowingLog:
    """The lines of one log."""

    def __init__(self, path: Path) -> None:
        self._path, self._inode, self._at = path, -1, 0
        self._lines: list[Line] = []

    def read(self) -> list[Line]:
        """Returns all whole lines."""
        try:
            with self._path.open("rb") as file:
                facts = os.fstat(file.fileno())
                if facts.st_ino != self._inode or facts.st_size < self._at:
                    self._inode, self._at, self._lines = facts.st_ino, 0, []
                file.seek(self._at)
                for data in file:
                    if not data.endswith(b"\n"):
                        break
                    self._at += len(data)
                    with suppress(ValueError):  # a damaged line: whoever resumes the run is told
                        self._lines.append(json.loads(data))
        except OSError:
            return []
        return self._lines


class RunLines(NamedTuple):
    """Lines of metrics.jsonl and of evals.jsonl."""

    steps: list[Line]
    evals: list[Line]


class RunLogs:
    """The logs of the runs of some servers."""

    def __init__(self) -> None:
        self._logs: dict[str, tuple[GrowingLog, GrowingLog]] = {}

    def of(self, facts: Mapping[str, Any]) -> RunLines:
        """Returns the lines of the run of a server.

        Args:
            facts: of `BatchServer.stats`.
        """
        journal = str(facts.get("journal") or "")
        if not journal.startswith("/"):
            return RunLines([], [])
        folder = Path(journal).parent
        logs = self._logs.setdefault(
            journal, (GrowingLog(folder / "metrics.jsonl"), GrowingLog(folder / "evals.jsonl"))
        )
        return RunLines(logs[0].read(), logs[1].read())
