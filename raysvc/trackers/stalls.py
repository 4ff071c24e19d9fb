"""Says whose fault it was when a step waited for data: one line a step, totals for a run.

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
from typing import Literal

KEEP = 20
Part = Literal["read", "collate", "copy", "groups", "build", "other"]
PARTS: tuple[Part, ...] = ("read", "collate", "copy", "groups", "build", "other")
WORTH_MS = 1.0  # a wait below this is the round trip of a call
_SHARE = 0.1  # a cause below this share of the wait is not named


@dataclass(frozen=True)
class StepTimes:
    """Holds what is known of a step that may have waited.

    Attributes:
        step: its number.
        waited_s: nothing was computed because data was late.
        read_s: the server read rows from the cache.
        collate_s: the server wrote the arrays.
        copy_s: the slowest rank copied its shard to where it computes.
        read_from: scheme of the entry's address, for display: s3, file.
        groups_s: the server waited for producers of rollouts.
        build_s: the server waited for rows to be tokenized.
    """

    step: int
    waited_s: float
    read_s: float = 0.0
    collate_s: float = 0.0
    copy_s: float = 0.0
    read_from: str = "file"
    groups_s: float = 0.0
    build_s: float = 0.0

    def parts(self) -> dict[Part, float]:
        """Part -> seconds, largest first; what is left of the wait is `other` (a full server, the network)."""
        named: dict[Part, float] = {
            "read": self.read_s,
            "collate": self.collate_s,
            "copy": self.copy_s,
            "groups": self.groups_s,
            "build": self.build_s,
        }
        found = {part: seconds for part, seconds in named.items() if seconds >= _SHARE * self.waited_s}
        rest = self.waited_s - sum(found.values())
        if rest >= _SHARE * self.waited_s:
            found["other"] = rest
        return dict(sorted(found.items(), key=lambda item: -item[1]))

    def charged(self) -> dict[Part, float]:
        """The parts of a wait worth a line, none longer than the wait: what overlapped the step before cost nothing."""
        if self.waited_s * 1e3 < WORTH_MS:
            return {}
        return {part: min(seconds, self.waited_s) for part, seconds in self.parts().items()}

    def causes(self) -> dict[str, float]:
        """`parts` in words."""
        return {self.name_of(part): seconds for part, seconds in self.parts().items()}

    def name_of(self, part: Part) -> str:
        """A part in words."""
        return {
            "read": f"part read from {self.read_from}",
            "collate": "collation on the server",
            "copy": "copy to the worker",
            "groups": "too few groups of rollouts",
            "build": "rows not tokenized yet",
            "other": "unexplained (queue or network)",
        }[part]


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
            for part, seconds in times.charged().items():
                cause = times.name_of(part)
                self.by_cause[cause] = self.by_cause.get(cause, 0.0) + seconds
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
