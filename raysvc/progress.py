"""Calls by which long phases say where they are; whoever passes the callback decides what is shown. And counts as text."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Protocol


@dataclass(frozen=True)
class Tick:
    """Says how far a phase is.

    Attributes:
        phase: tokenize, enrich, start, resume, train.
        done, total: in `unit`; total is None when it is not known.
        facts: short figures to show beside, name -> value.
        final: the phase is over.
        waiting: what it waits for, like "starting Ray"; empty while it works.
    """

    phase: str
    done: float
    total: float | None
    unit: str
    facts: dict[str, Any] = field(default_factory=dict)
    final: bool = False
    waiting: str = ""


class Progress(Protocol):
    """Called often; must be cheap and must not raise."""

    def __call__(self, tick: Tick) -> None:
        """Take notice."""
        ...


def silent(tick: Tick) -> None:
    """Shows nothing."""


def how_many(count: int, one: str) -> str:
    """A count and what is counted, where its plural ends in s.

    >>> how_many(1, "row"), how_many(1200, "row")
    ('1 row', '1,200 rows')
    """
    return f"{count:,} {one}{'' if count == 1 else 's'}"
