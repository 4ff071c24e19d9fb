"""Defines what one check of `raysvc doctor` found."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

State = Literal["ok", "warn", "fail", "skip"]


@dataclass(frozen=True)
class Finding:
    """One line.

    Attributes:
        check: its name.
        what: one clause with the figures.
        remedy: one clause; "" when there is nothing to do.
    """

    check: str
    state: State
    what: str
    remedy: str = ""
