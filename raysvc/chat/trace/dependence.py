"""What a value of a trace depends on, in rows whose messages have a role and a text and nothing else.

Rows with the same roles take the same way through a template when no question on it depends on the words of a text. Then the
template fills the texts into literals, and no walk is needed to know what it writes.

Texts are not empty here, and no blank is at their ends: so a text is true, and `trim` leaves it as it is.

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
    TEXT = 2  # what one message says
    JOINED = 3  # a text of such texts and others
    WORDS = 4  # anything


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
    if kwargs or any(type(arg) in (list, tuple, dict) for arg in args):
        return Needs.WORDS
    if op in ("+", "concat", "str") and Needs.MESSAGES not in needs:
        return Needs.WORDS if Needs.WORDS in needs else Needs.JOINED
    first, *others = needs
    if op == "in" and type(args[0]) is str and others == [Needs.MESSAGES]:
        return Needs.ROLES
    if any(others) or first is Needs.WORDS:
        return Needs.WORDS
    if op in _TYPES:
        return Needs.ROLES
    if first is Needs.MESSAGES:
        return _of_messages(op, args)
    return Needs.TEXT if first is Needs.TEXT and op in _TRIMS and len(args) == 1 else Needs.WORDS


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
    return Needs.MESSAGES if type(index) is int and op == "item" else Needs.WORDS
