"""Names an entry by the inputs that decide its bytes.

A recipe is plain JSON that says everything the bytes depend on; its hash is the name of the entry.

Always true:
- equal recipes have equal keys, whatever the order of their fields or the process that asks;
- a change of any value, of any list's order or of any field's presence changes the key;
- private entries of one recipe have different keys and one key of their rows, that of the shared entry;
- what JSON cannot say exactly (NaN, bytes, sets, keys that are not text) is refused, never coerced.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

Recipe = dict[str, Any]
MISSING = "(absent)"
ADDED = "added"  # field of a recipe: what was added to a base, oldest first; each names the key that it was added to
PRIVATE = "private"  # field of a recipe: a name that nobody else has
SHARED = "shared"  # field of a private recipe: the key that it would have if it were shared


@dataclass(frozen=True)
class Difference:
    """One field in which two recipes differ.

    Attributes:
        path: where, like `source.files[3].sha256`.
        a: value in the first recipe, `(absent)` when it has no such field.
        b: value in the second one.
    """

    path: str
    a: Any
    b: Any

    def __str__(self) -> str:
        return f"{self.path}: {_short(self.a)} -> {_short(self.b)}"


def cache_key(recipe: Recipe) -> str:
    """SHA-256 of the recipe's canonical JSON, 64 hex digits.

    Raises:
        TypeError: a value that is not plain JSON.
    """
    return hashlib.sha256(canonical_json(recipe)).hexdigest()


def rows_key(key: str, recipe: Mapping[str, Any]) -> str:
    """Returns what names the rows of an entry, for plans: its key, or the one that a private entry would have if it were shared."""
    if SHARED not in recipe:
        return key
    if ADDED not in recipe:
        return str(recipe[SHARED])  # the recipe of an entry that grows is not whole
    shared = {name: value for name, value in recipe.items() if name not in (PRIVATE, SHARED, ADDED)}
    for added in recipe[ADDED]:
        shared[ADDED] = [*shared.get(ADDED, ()), {**added, "to": cache_key(shared)}]
    return cache_key(shared)


def canonical_json(value: Any) -> bytes:
    """The one way to write a JSON value: sorted fields, no spaces, ASCII."""
    _refuse_inexact(value, "")
    return json.dumps(
        value, sort_keys=True, separators=(",", ":"), ensure_ascii=True, allow_nan=False
    ).encode()


def explain(a: Recipe, b: Recipe) -> list[Difference]:
    """Every field in which two recipes differ, in the order of their paths."""
    left, right = dict(_leaves(a, "")), dict(_leaves(b, ""))
    paths = sorted(left.keys() | right.keys())
    pairs = ((path, left.get(path, MISSING), right.get(path, MISSING)) for path in paths)
    return [Difference(path, x, y) for path, x, y in pairs if _differs(x, y)]


def nearest(recipe: Recipe, others: Mapping[str, Recipe]) -> tuple[str, list[Difference]] | None:
    """The key of the recipe in `others` with the fewest differences, and these; None when there are none."""
    distances = {key: explain(other, recipe) for key, other in others.items()}
    if not distances:
        return None
    key = min(distances, key=lambda name: (len(distances[name]), name))
    return key, distances[key]


def _refuse_inexact(value: Any, path: str) -> None:
    if isinstance(value, dict):
        for name, item in value.items():
            if type(name) is not str:
                raise TypeError(f"recipe field {path or '.'}: the key {name!r} is not text")
            _refuse_inexact(item, f"{path}.{name}")
    elif isinstance(value, list | tuple):
        for index, item in enumerate(value):
            _refuse_inexact(item, f"{path}[{index}]")
    elif isinstance(value, float) and not math.isfinite(value):
        raise TypeError(f"recipe field {path}: {value} has no JSON")
    elif value is not None and type(value) not in (bool, int, float, str):
        raise TypeError(f"recipe field {path}: {type(value).__name__} is not plain JSON")


def _leaves(value: Any, path: str) -> Iterator[tuple[str, Any]]:
    if isinstance(value, dict) and value:
        for name, item in value.items():
            yield from _leaves(item, _below(path, name))
    elif isinstance(value, list | tuple) and value:
        for index, item in enumerate(value):
            yield from _leaves(item, f"{path}[{index}]")
    else:
        yield path, value


def _below(path: str, name: str) -> str:
    """Path of a field; a name that could be taken for a path, or for none, is quoted."""
    if not name or any(sign in name for sign in ".[]"):
        return f"{path}[{json.dumps(name)}]"
    return f"{path}.{name}" if path else name


def _differs(x: Any, y: Any) -> bool:
    return canonical_json(x) != canonical_json(y)


def _short(value: Any) -> str:
    text = value if isinstance(value, str) else json.dumps(value)
    return text if len(text) <= 60 else f"{text[:40]}... ({len(text)} characters)"
