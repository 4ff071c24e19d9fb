"""Whose fault it was when a step waited for data: one line a step, totals for a run.

Pure: seconds in, words out.

Always true:
- causes are named largest first, and only those that took part in the wait;
- what nobody can be blamed for is called by its name, "unexplained", and never shared out;
- totals are of all steps, the kept lines of the last `KEEP`.
"""

from __future__ import annotations

import collections
from collections.abc import Mapping
from dataclasses import dataclass, field

KEEP = 20
WORTH_MS = 1.0  # a wait below this is the round trip of a call
_SHARE = 0.1  # a cause below this share of the wait is not named


@dataclass(frozen=True)
class StepTimes:
    """What is known of a step that may have waited.

    Attributes:
        step: its number.
        waited_s: nothing was computed because data was late.
        read_s: the server read rows from the cache.
        collate_s: the server wrote the arrays.
        copy_s: the slowest rank copied its shard to where it computes.
        read_from: scheme of the entry's address, for people: s3, file.
    """

    step: int
    waited_s: float
    read_s: float = 0.0
    collate_s: float = 0.0
    copy_s: float = 0.0
    read_from: str = "file"

    def causes(self) -> dict[str, float]:
        """Cause -> seconds, largest first; what is left of the wait is `unexplained` (a full server, the network)."""
        named = {
            f"part read from {self.read_from}": self.read_s,
            "collation on the server": self.collate_s,
            "copy to the worker": self.copy_s,
        }
        found = {cause: seconds for cause, seconds in named.items() if seconds >= _SHARE * self.waited_s}
        rest = self.waited_s - sum(found.values())
        if rest >= _SHARE * self.waited_s:
            found["unexplained (queue or network)"] = rest
        return dict(sorted(found.items(), key=lambda item: -item[1]))


def verdict(times: StepTimes) -> str | None:
    """One line for a step that waited, None when it did not.

    Example: step 812 waited 41 ms: collation on the server 38 ms, part read from s3 31 ms
    """
    if times.waited_s * 1e3 < WORTH_MS:
        return None
    causes = ", ".join(f"{cause} {_ms(seconds)}" for cause, seconds in times.causes().items())
    return f"step {times.step} waited {_ms(times.waited_s)}: {causes}"


@dataclass
class StallBook:
    """The waits of one run.

    Attributes:
        total_s: of all steps.
        num_stalled: steps with a verdict.
        by_cause: cause -> seconds, at most the wait of each step.
        lines: of the last steps that waited.
    """

    total_s: float = 0.0
    num_stalled: int = 0
    by_cause: dict[str, float] = field(default_factory=dict)
    lines: collections.deque[str] = field(default_factory=lambda: collections.deque(maxlen=KEEP))

    def add(self, times: StepTimes) -> str | None:
        """Take a step in; returns its verdict."""
        self.total_s += times.waited_s
        line = verdict(times)
        if line is not None:
            self.num_stalled += 1
            self.lines.append(line)
            for cause, seconds in times.causes().items():
                # work that overlapped the step before cost nothing: no cause took longer than the wait
                self.by_cause[cause] = self.by_cause.get(cause, 0.0) + min(seconds, times.waited_s)
        return line

    def summary(self) -> Mapping[str, object]:
        """Plain data for `summary.json` and `raysvc top`."""
        causes = sorted(self.by_cause.items(), key=lambda item: -item[1])
        return {
            "seconds": round(self.total_s, 4),
            "steps": self.num_stalled,
            "by_cause": {cause: round(seconds, 4) for cause, seconds in causes},
            "last": list(self.lines),
        }


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.0f} ms"
