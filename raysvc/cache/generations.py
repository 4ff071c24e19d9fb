"""Rebuilds of a key lie beside its first build: `<key>`, `<key>.1`, `<key>.2`, ...

Nothing that a reader has open is ever replaced, so a build that must not end in the finished entry, or cannot
use a damaged one, gets a folder of its own.

Always true:
- all builders of a key that start in the same state choose the same generation.
"""

from __future__ import annotations

from raysvc.cache import names
from raysvc.cache.store.store import Store


def generations(store: Store, key: str) -> list[int]:
    """Those that have a folder, finished or not, ascending.

    Raises:
        EntryError: a key that is not one plain name.
    """
    names.folder_of(key)
    split = [names.split_folder(name) for name in store.list()]
    return sorted(one[1] for one in split if one is not None and one[0] == key)


def build_generation(store: Store, key: str) -> int:
    """Returns where a build goes on, or finds that another one finished: the newest generation that is not out of
    service.
    """
    return _newest_without(store, key, {names.DAMAGED, names.DELETING})


def next_generation(store: Store, key: str) -> int:
    """Returns where a forced build goes: the newest unfinished generation, else a new one."""
    return _newest_without(store, key, {names.DAMAGED, names.DELETING, names.MANIFEST})


def _newest_without(store: Store, key: str, markers: set[str]) -> int:
    there = generations(store, key)
    if not there:
        return 0
    found = store.scan(names.folder_of(key, there[-1]), names.MANY)
    return there[-1] + 1 if markers & {item.name for item in found} else there[-1]
