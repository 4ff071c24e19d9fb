"""Bounds how large a value of a chat template may become, before an operation that Python does in one step.

Nothing can end such a step from outside, so it is measured before it begins: `'0' * 10**10`, `text.center(10**9)`.

Always true:
- whether an operation is refused follows from its values alone, never from a clock;
- an operation on values of at most `MAX_SIZE` takes seconds at most, and memory of some hundred bytes a character.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any

MAX_SIZE = 1 << 23  # characters and items of a value, with all that it contains
MAX_WHOLE = 1 << 28  # characters of a text that nobody else counts
MAX_BITS = 1 << 12  # of a number that is multiplied
MAX_STEPS = 1 << 30  # comparisons of characters
MAX_WIDTH = 10_000  # of a field in a format, and of an indent
FEW = 16  # texts that are joined before they are measured

_WIDE = re.compile(r"\d{5}|\*|:[^}]*\{")


class RenderTooCostly(BaseException):
    """A render that takes more than it may; the argument says of what. No template and no probe of one catches it."""


def fits(size: int) -> None:
    """Refuse what would have more than `MAX_SIZE` characters and items.

    Raises:
        RenderTooCostly: it would.
    """
    if size > MAX_SIZE:
        raise RenderTooCostly(f"it makes a text or a list of more than {MAX_SIZE:,} characters")


def size_of(value: Any, most: int = MAX_SIZE) -> int:
    """Characters and items of a value with all that it contains, each as often as it is reached; counted to `most` and a little more."""
    size, left = 0, [value]
    while left and size <= most:
        one = left.pop()
        size += 1
        if isinstance(one, str | bytes):
            size += len(one)
        elif isinstance(one, Mapping):
            left += one.keys()
            left += one.values()
        elif isinstance(one, list | tuple):
            left += one
    return size


def kept(value: Any) -> Any:
    """A value that a template makes and keeps, in a variable or for a call.

    Raises:
        RenderTooCostly: it is too large.
    """
    kind = type(value)
    if kind is str:
        if len(value) > MAX_SIZE:
            fits(len(value))
    elif kind is list or kind is dict or kind is tuple or isinstance(value, str):
        fits(size_of(value))
    return value


def joined(pieces: list[str] | tuple[str, ...]) -> str:
    """The text of a block or macro, or of `~`.

    Raises:
        RenderTooCostly: it is too long.
    """
    if len(pieces) > FEW:
        fits(sum(map(len, pieces)))
    text = "".join(pieces)
    if len(text) > MAX_SIZE:
        fits(len(text))
    return text


def concat(pieces: Iterable[str]) -> str:
    """Joins the texts of a block or macro, which are a list; those of a whole template come one by one, and may be
    longer.

    Raises:
        RenderTooCostly: it is too long.
    """
    if isinstance(pieces, list):
        return joined(pieces)
    written, left = [], MAX_WHOLE
    for piece in pieces:
        written.append(piece)
        left -= len(piece)
        if left < 0:
            raise RenderTooCostly(f"it writes more than {MAX_WHOLE:,} characters")
    return "".join(written)


# Operators


def times(a: Any, b: Any) -> Any:
    """`a * b`."""
    count, other = (a, b) if isinstance(a, int) else (b, a)
    if isinstance(count, int):
        if isinstance(other, int):
            _small(count.bit_length() + other.bit_length())
        elif count > 1 and not isinstance(other, float):
            fits(count * (len(other) if isinstance(other, str | bytes) else size_of(other)))
    return a * b


def power(a: Any, b: Any) -> Any:
    """`a ** b`."""
    if isinstance(a, int) and isinstance(b, int):
        _small(a.bit_length() * abs(b))
    return a**b


def modulo(a: Any, b: Any) -> Any:
    """`a % b`: of numbers, or a format with its values."""
    if isinstance(a, str | bytes):
        _format(a, b)
    return a % b


def _small(bits: int) -> None:
    if bits > MAX_BITS:
        raise RenderTooCostly(f"it computes with numbers of more than {MAX_BITS:,} bits")


def _format(text: Any, *values: Any, **named: Any) -> None:
    """Checks `%` and `format`: no wide field, and not too much in all of them."""
    shown = text if isinstance(text, str) else text.decode("latin-1")
    if _WIDE.search(shown):
        raise RenderTooCostly("it formats with a width of five digits, or one that it computes")
    fields = shown.count("%") + shown.count("{")
    fits(len(shown) + fields * size_of([values, named]))


# Filters and methods: each looks at what it is called with


def _width(value: Any, width: Any = 0, *_: Any, **named: Any) -> None:
    widths = [one for one in (width, *named.values()) if isinstance(one, int)]
    fits(size_of(value) + max(widths, default=0))


def _tabs(value: Any, tabsize: Any = 8) -> None:
    fits(len(value) * max(int(tabsize), 1))


def _replace(value: Any, old: Any, new: Any, count: Any = -1) -> None:
    """First by what is the most, without looking for anything."""
    text, old, new = str(value), str(old), str(new)
    if len(new) > len(old) and (len(text) // max(len(old), 1) + 1) * len(new) > MAX_SIZE:
        fits(len(text) + (text.count(old)) * (len(new) - len(old)))


def _joins(separator: Any, items: Any) -> None:
    if hasattr(items, "__len__"):
        fits(size_of(items) + len(items) * len(str(separator)))


def _search(value: Any, wanted: Any = "", *_: Any, **named: Any) -> None:
    """Checks those methods that compare each character with each."""
    wanted = next((one for one in named.values() if isinstance(one, str)), wanted)
    if isinstance(wanted, str | bytes) and len(wanted) * len(value) > MAX_STEPS:
        raise RenderTooCostly("it looks for a long text in a long text")


def _translated(value: Any, table: Any) -> None:
    fits(len(value) * max(map(size_of, table.values()), default=1))


def _from_keys(_: Any, keys: Any, value: Any = None) -> None:
    fits(size_of(keys) + len(keys) * size_of(value))


def _bytes(_: Any, length: Any = 1, *__: Any, **named: Any) -> None:
    fits(max(named.get("length", length), 0))


def _indented(value: Any, width: Any = 4, *_: Any, **__: Any) -> None:
    wide = width if isinstance(width, int) else len(str(width))
    text = str(value)
    fits(len(text) + (text.count("\n") + 1) * wide)


def _parts(value: Any, *args: Any, **named: Any) -> None:
    number, fill_with, *_ = *args, *named.values(), None
    fits(size_of(value) + number * size_of(fill_with) if isinstance(number, int) else 0)


def _wrapped(
    value: Any, width: Any = 79, _: Any = True, wrapstring: Any = None, *__: Any, **named: Any
) -> None:
    wrapstring = named.get("wrapstring", wrapstring)
    fits(len(str(value)) * (1 + len(str(wrapstring or ""))))


def trimmed(value: Any, chars: Any = None) -> str:
    """The filter `trim`."""
    text = value if isinstance(value, str) else str(value)
    if chars is not None:
        _search(text, chars)
    return text.strip(chars)


def check_json(indent: Any, separators: Any = None) -> None:
    """Checks what `tojson` puts between values.

    Raises:
        RenderTooCostly: it is too wide.
    """
    wide = indent if isinstance(indent, int) else len(indent or "")
    if max(wide, *map(len, separators or ("",))) > MAX_WIDTH:
        raise RenderTooCostly(f"it writes JSON with an indent of more than {MAX_WIDTH:,}")


def _json(
    _: Any, ensure_ascii: Any = False, indent: Any = None, separators: Any = None, *__: Any, **named: Any
) -> None:
    check_json(indent, separators)


def _rounded(_: Any, precision: Any = 0, *__: Any, **___: Any) -> None:
    _small(abs(precision) if isinstance(precision, int) else 0)


def _digits(value: Any, *_: Any, **__: Any) -> None:
    if isinstance(value, str):
        _small(len(value))


def joining(value: Any, d: Any = "", attribute: Any = None) -> None:
    """Bounds the filter `join`, whose values are not a generator."""
    _joins(d, value)


def summed(environment: Any, iterable: Any, attribute: Any = None, start: Any = 0) -> Any:
    """The filter `sum`, step by step where it is of lists."""
    from jinja2.filters import make_attrgetter

    items = iterable if attribute is None else map(make_attrgetter(environment, attribute), iterable)
    if isinstance(start, int | float):
        return sum(items, start)
    for item in items:
        start = kept(start + item)
    return start


def named(names: str) -> frozenset[str]:
    """Names that stand in a text."""
    return frozenset(names.split())


Check = Callable[..., None]
FILTERS: dict[str, Check] = {
    "batch": _parts,
    "center": _width,
    "format": _format,
    "indent": _indented,
    "int": _digits,
    "join": joining,
    "replace": _replace,
    "round": _rounded,
    "slice": _parts,
    "tojson": _json,
    "wordwrap": _wrapped,
}
GROWING = named("e escape forceescape pprint striptags tojson truncate urlencode urlize xmlattr")
SEARCHES = named("strip lstrip rstrip rfind rindex rsplit rpartition")
METHODS: dict[str, Check] = {
    **dict.fromkeys(("center", "ljust", "rjust", "zfill"), _width),
    **dict.fromkeys(SEARCHES, _search),
    "expandtabs": _tabs,
    "replace": _replace,
    "join": _joins,
    "translate": _translated,
    "fromkeys": _from_keys,
    "to_bytes": _bytes,
}
FORMATS: Check = _format
FREE_METHODS = named(
    "startswith endswith lower upper title capitalize casefold swapcase find index count split partition splitlines "
    "removeprefix removesuffix isalnum isalpha isascii isdecimal isdigit isidentifier islower isnumeric isprintable "
    "isspace istitle isupper get items keys values copy is_integer bit_length bit_count as_integer_ratio conjugate hex "
    "encode decode maketrans striptags unescape escape"
)
