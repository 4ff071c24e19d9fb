"""Checks what users pass, the versions of both sides, and whose server it is, before a client takes anything.

Every refusal names the argument, the value and the law.

Numpy integers are integers; `True` and 1.0 are none.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from raysvc.actors.versions import HERE, Side, check_versions_meet
from raysvc.errors import ConfigError, VersionMismatch
from raysvc.team import refuse_foreign

BEFORE = "an older version, which does not say"


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
    """Returns what `integer` does, or None for None.

    Raises:
        ConfigError: it is another type, or out of range.
    """
    return None if value is None else integer(where, value, low)


def number(where: str, value: Any, low: float = 0.0, *, or_low: bool = True) -> float:
    """A finite number from `low` on, or above it.

    Raises:
        ConfigError: it is another type, not finite, or out of range.
    """
    if isinstance(value, bool) or not isinstance(value, int | float | np.integer | np.floating):
        raise ConfigError(where, f"{value!r} is not a number", "give a number")
    if not math.isfinite(value) or value < low or (value == low and not or_low):
        law = f"at least {low:g}" if or_low else f"above {low:g}"
        raise ConfigError(where, f"{value} must be {law} and finite", "change this value")
    return float(value)


def choice(where: str, value: Any, allowed: Sequence[str]) -> str:
    """One of several words.

    Raises:
        ConfigError: it is another word.
    """
    if not isinstance(value, str) or value not in allowed:
        raise ConfigError(where, f"{value!r} is not one of {', '.join(allowed)}", "give one of them")
    return value


def mapping(where: str, value: Any) -> dict[str, Any]:
    """A mapping whose keys are strings.

    Raises:
        ConfigError: it is another type.
    """
    if not isinstance(value, Mapping):
        raise ConfigError(where, f"{value!r} is not a mapping", "give a dict")
    return {text(f"{where} key", key): each for key, each in value.items()}


def matching(where: str, value: Any, pattern: str) -> str:
    """A string of a form.

    Raises:
        ConfigError: it is another type, empty, or of another form.
    """
    if not re.fullmatch(pattern, text(where, value)):
        raise ConfigError(where, f"{value!r} does not match {pattern}", "change this value")
    return str(value)


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
    """Returns what `text` does, or None for None.

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


def meet(server: Any, name: str) -> None:
    """Exchange versions with a server; each side judges by its own rule.

    Raises:
        VersionMismatch: they do not work together.
    """
    from raysvc.actors.launch import wait_for

    if not hasattr(server, "meet"):
        raise VersionMismatch(name, HERE.version, BEFORE)
    ref = server.meet.options(concurrency_group="control").remote(*HERE)
    check_versions_meet(name, HERE, Side(*wait_for(ref, f"server {name!r}")))


def refuse_takeover_of_foreign(server: Any, name: str) -> None:
    """Refuse to fence the trainer of a server that somebody else started.

    Raises:
        ServerError: it is somebody else's.
    """
    from raysvc.actors.launch import wait_for

    facts = wait_for(server.stats.options(concurrency_group="control").remote(), f"server {name!r}")
    refuse_foreign(name, facts.get("owner", ""), 'takeover="force"')
