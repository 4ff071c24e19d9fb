"""Checks of what users pass, made before anything is taken: every refusal names the argument, the value and the law.

Numpy integers are integers; `True` and 1.0 are none.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from raysvc.errors import ConfigError


def integer(where: str, value: Any, low: int, high: int | None = None) -> int:
    """A whole number in [low, high), or from `low` on.

    Raises:
        ConfigError: it is another type, or out of range.
    """
    if isinstance(value, bool) or not isinstance(value, int | np.integer):
        raise ConfigError(where, f"{value!r} is not an integer", "give a whole number")
    if value < low or (high is not None and value >= high):
        law = f"at least {low}" if high is None else f"in [{low}, {high})"
        raise ConfigError(where, f"{value} must be {law}", "change this value")
    return int(value)


def optional_integer(where: str, value: Any, low: int) -> int | None:
    """As `integer`, or None.

    Raises:
        ConfigError: it is another type, or out of range.
    """
    return None if value is None else integer(where, value, low)


def text(where: str, value: Any, *, empty: bool = False) -> str:
    """A string.

    Raises:
        ConfigError: it is another type, or empty where that has no meaning.
    """
    if not isinstance(value, str):
        raise ConfigError(where, f"{value!r} is not a string", "give a string")
    if not value and not empty:
        raise ConfigError(where, "is empty", "give a name")
    return value


def optional_text(where: str, value: Any) -> str | None:
    """As `text`, or None.

    Raises:
        ConfigError: it is another type, or empty.
    """
    return None if value is None else text(where, value)


def flag(where: str, value: Any) -> bool:
    """True or False.

    Raises:
        ConfigError: it is another type.
    """
    if not isinstance(value, bool):
        raise ConfigError(where, f"{value!r} is neither True nor False", "give one of them")
    return value


def texts(where: str, value: Any) -> list[str]:
    """Several strings; one string is refused, because it would count as its letters.

    Raises:
        ConfigError: it is another type, or holds one.
    """
    if isinstance(value, str) or not isinstance(value, Sequence):
        raise ConfigError(where, f"{value!r} is not a list of strings", "give a list")
    return [text(f"{where}[{number}]", each) for number, each in enumerate(value)]
