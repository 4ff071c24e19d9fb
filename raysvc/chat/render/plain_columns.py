"""What the plain rows of a chunk say, found for all rows at once.

A row is plain when its messages have a role and a text and nothing else, and no other column has a part in it. All the
texts may be lists of one text part.

Always true:
- every message of a plain row says something, without a lone surrogate;
- a row is plain whatever rows stand beside it.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
from itertools import accumulate, chain, compress, count, pairwise
from operator import ne
from typing import Any

from raysvc.chat.source.content_parts import text_of_part
from raysvc.chat.source.messages import Message

_LONE_SURROGATE = re.compile("[\ud800-\udfff]")
_NOTHING: tuple[Any, ...] = (None, "", [])


PlainRow = tuple[list[Message], tuple[str, ...], list[str], bool, bool, bool]
"""Messages of a plain row: those of the source, the role and text of each; whether the texts are parts, whether some text has
blanks at its ends, and whether some text ends, but for blanks, with the first character of a token or tag."""


def given_to(row: PlainRow, takes_parts: bool) -> list[Message]:
    """Messages of a row for a template that takes parts, or texts."""
    messages, _, said, in_parts, *_ = row
    if takes_parts == in_parts:
        return messages
    return [{**message, "content": text} for message, text in zip(messages, said, strict=True)]


def plain_rows_of(
    rows: Sequence[Mapping[str, Any]], column: str, others: frozenset[str], firsts: frozenset[str]
) -> list[PlainRow | None]:
    """Of each row what it says, None of one that is not plain.

    Args:
        rows: of a source.
        column: that holds the messages.
        others: columns that have a part in a row where they are not empty.
        firsts: first characters of tokens and tags.
    """
    asked = others.intersection(chain.from_iterable({*map(tuple, rows)}))
    lists = [value if type(value) is list else [] for value in (row.get(column) for row in rows)]
    if asked:
        used = (any(row.get(name) not in _NOTHING for name in asked) for row in rows)
        lists = [[] if is_used else own for own, is_used in zip(lists, used, strict=True)]
    bounds = [0, *accumulate(map(len, lists))]
    messages = [*chain.from_iterable(lists)]
    if {*map(type, messages)} - {dict}:
        messages = [message if type(message) is dict else {} for message in messages]
    roles: list[Any] = [message.get("role") for message in messages]
    said: list[Any] = [message.get("content") for message in messages]
    kinds = [*map(type, said)]
    left_out: set[int] = set()
    if list in kinds:
        said = [text_of_part(content) if type(content) is list else content for content in said]
        left_out = {row for row, (a, b) in enumerate(pairwise(bounds)) if len({*kinds[a:b]}) > 1}
    stripped = [text.strip() if type(text) is str else "" for text in said]
    if "" in stripped or {*map(type, roles)} != {str} or {*map(len, messages)} != {2}:
        fields = zip(stripped, roles, messages, strict=True)
        odd = (not text or type(role) is not str or len(message) != 2 for text, role, message in fields)
        left_out |= _rows_where(odd, bounds)
    try:
        "".join([text for text in stripped if not text.isascii()]).encode()
    except UnicodeEncodeError:
        left_out |= _rows_where(map(_LONE_SURROGATE.search, stripped), bounds)
    padded = _rows_where(map(ne, said, stripped), bounds) if said != stripped else ()
    opens = _rows_where([text[-1:] in firsts for text in stripped], bounds)
    return [
        (own, tuple(roles[a:b]), said[a:b], kinds[a] is list, row in padded, row in opens)
        if a < b and row not in left_out
        else None
        for row, (own, (a, b)) in enumerate(zip(lists, pairwise(bounds), strict=True))
    ]


def _rows_where(marks: Iterable[Any], bounds: list[int]) -> set[int]:
    """The rows of messages that are marked."""
    return {bisect_right(bounds, place) - 1 for place in compress(count(), marks)}
