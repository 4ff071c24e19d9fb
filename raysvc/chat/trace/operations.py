"""What a template does with values of a row: each operation as a form of Python, and what its result depends on.

An expression is evaluated when a row is traced, and stands in the code that later rows run.

Dependence is told for rows whose messages have a role and a text and nothing else. Rows with the same roles take the same
way through a template when no question on it depends on the words of a text: then it fills the texts into literals.
Texts are not empty here, and no blank is at their ends: so a text is true, and `trim` takes nothing of it away.

Always true:
- an expression changes nothing, and reads only its arguments and named constants;
- what an expression raises, the template would raise too, or the row is rendered for real;
- what is not listed here depends on the words.
"""

from __future__ import annotations

from enum import IntEnum
from typing import Any

ADD, IN, JOIN, KEEP = "{} + {}", "{} in {}", "joined({})", "kept({})"
AT, SLICE, LENGTH = "{}[{}]", "{}[{}:{}:{}]", "len({})"
NEAR = "{0}[{1}] if 0 <= {1} < len({0}) else {2}"
LIST = "{0} if {0}.__class__ is list else list({0})"
TEXT = "{0} if {0}.__class__ is str else str({0})"
FIELD = "{0}.get({1}, {2}) if {0}.__class__ is dict else getattr({0}, {1})"
EQUALS = "[each for each in {1} or () if getitem(each, {2}) == {4}]"  # `selectattr` of a constant
ITEM = "{0}[{1}] if {0}.__class__ is list and len({0}) > {1} else getitem({0}, {1})"

_FIELDS = (FIELD, ITEM, "getattr({}, {})", "getitem({}, {})", "{}.get({})", "{}.get({}, {})")
_LENGTHS = (LENGTH, "filter_length({})")
_TRIMS = ("filter_trim({})", "{}.strip()")
_TYPES = frozenset(
    f"test_{name}({{}})"
    for name in ("string", "defined", "undefined", "none", "mapping", "iterable", "sequence", "number")
)


class Needs(IntEnum):
    """What has to be known of a row to know a value."""

    ROLES = 0  # the same in all rows with these roles
    MESSAGES = 1  # the messages, some of them, or one of them
    TEXT = 2  # what messages say, each whole, and fixed texts around it
    WORDS = 3  # anything


def needs_of(value: Any) -> Needs:
    """Of a traced value, a container of some, or anything else."""
    if isinstance(value, list | tuple | dict):
        inside = value.values() if isinstance(value, dict) else value
        return Needs.WORDS if any(map(needs_of, inside)) else Needs.ROLES
    return value.needs if hasattr(type(value), "needs") else Needs.ROLES


def needs_after(form: str, args: tuple[Any, ...]) -> Needs:
    """Of what an operation makes."""
    needs = [*map(needs_of, args[0] if form == JOIN else args)]
    if not any(needs) or (form == IN and needs == [Needs.ROLES, Needs.MESSAGES]):
        return Needs.ROLES
    if form in (ADD, JOIN, KEEP, TEXT):
        return Needs.TEXT if {*needs} <= {Needs.ROLES, Needs.TEXT} else Needs.WORDS
    first, *others = needs
    if any(others) or first is Needs.WORDS:
        return Needs.WORDS
    if form in _TYPES or (form in _LENGTHS and first is Needs.MESSAGES):
        return Needs.ROLES
    if first is Needs.TEXT:
        return Needs.TEXT if form in _TRIMS else Needs.WORDS
    if form in _FIELDS and type(args[1]) is str:
        return Needs.TEXT if args[1] == "content" else Needs.ROLES
    is_index = form in _FIELDS and type(getattr(args[1], "value", args[1])) is int
    return Needs.MESSAGES if is_index or form in (AT, NEAR, SLICE, LIST) else Needs.WORDS
