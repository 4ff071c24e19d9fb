"""What a value of a trace depends on, in rows whose messages have a role and a text and nothing else.

Rows with the same roles take the same way through a template when no question on it depends on the words of a text. Then the
template fills the texts into literals, and no walk is needed to know what it writes.

Texts are not empty here, and no blank is at their ends: so a text is true, and `trim` takes nothing of it away.

Always true:
- what is not listed here depends on the words.
"""

from __future__ import annotations

from enum import IntEnum
from typing import Any


class Needs(IntEnum):
    """What has to be known of a row to know a value."""

    ROLES = 0  # the same in all rows with these roles
    MESSAGES = 1  # the messages, some of them, or one of them
    TEXT = 2  # what messages say, each whole, and fixed texts around it
    WORDS = 3  # anything


_TYPES = frozenset(
    f"test {name}"
    for name in ("string", "defined", "undefined", "none", "mapping", "iterable", "sequence", "number")
)
_TRIMS = ("filter trim", "method strip")


def needs_of(value: Any) -> Needs:
    """Of a traced value, a container of some, or anything else."""
    if isinstance(value, list | tuple):
        return max(map(needs_of, value), default=Needs.ROLES)
    if isinstance(value, dict):
        return max(map(needs_of, (*value, *value.values())), default=Needs.ROLES)
    return getattr(value, "needs", Needs.ROLES)


def needs_after(op: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Needs:
    """Of what an operation makes; `op` as in `operations.expression`."""
    needs = [needs_of(arg) for arg in args]
    if not any(needs) and not needs_of(kwargs):
        return Needs.ROLES
    if kwargs or any(type(arg) in (list, tuple, dict) for arg in args) or Needs.WORDS in needs:
        return Needs.WORDS
    if op in ("+", "concat", "str") and Needs.MESSAGES not in needs:
        return Needs.TEXT
    if op == "in" and needs == [Needs.ROLES, Needs.MESSAGES]:
        return Needs.ROLES
    first, *others = needs
    if any(others):
        return Needs.WORDS
    if op in _TYPES:
        return Needs.ROLES
    if first is Needs.MESSAGES:
        return _of_messages(op, args)
    return Needs.TEXT if op in _TRIMS and len(args) == 1 else Needs.WORDS


def _of_messages(op: str, args: tuple[Any, ...]) -> Needs:
    """Of an operation on messages, or on one of them."""
    if op in ("len", "filter length"):
        return Needs.ROLES
    if op in ("at", "slice", "list"):
        return Needs.MESSAGES
    if op != "method get" and op.partition(" ")[0] not in ("attribute", "item"):
        return Needs.WORDS
    if type(args[1]) is str:
        return Needs.TEXT if args[1] == "content" else Needs.ROLES
    index = getattr(args[1], "value", args[1])
    return Needs.MESSAGES if type(index) is int else Needs.WORDS
