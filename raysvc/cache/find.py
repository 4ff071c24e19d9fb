"""Finding and opening finished entries.

Always true:
- an entry is found by listing its folder, never by probing a name;
- of several generations of a key the newest that is finished, undamaged and not being removed counts.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from raysvc.cache import names
from raysvc.cache.datasets_export import ensure_datasets_files
from raysvc.cache.entry import Entry as Entry
from raysvc.cache.gc import collect_garbage as collect_garbage
from raysvc.cache.generations import generations
from raysvc.cache.generations import next_generation as next_generation
from raysvc.cache.store.open import open_store
from raysvc.cache.store.store import Store
from raysvc.errors import StoreError


@dataclass(frozen=True)
class Listed:
    """One folder of a cache root.

    Attributes:
        folder: its name, `<key>` or `<key>.<n>`.
        key: of the recipe.
        generation: 0, or n for a rebuild.
        state: `finished`, `building` (no manifest yet), `damaged` or `doomed` (gc removes it).
        num_files, num_bytes: all that lies in it.
        modified_s: newest file, seconds since 1970 by the store's clock.
    """

    folder: str
    key: str
    generation: int
    state: str
    num_files: int
    num_bytes: int
    modified_s: float


def open_entry(uri: str, storage_options: Mapping[str, Any] | None = None) -> Entry:
    """The entry at a path or URL.

    Raises:
        EntryError: there is none, or it is damaged, or newer than this raysvc.
    """
    root, _, folder = uri.rstrip("/").rpartition("/")
    if not root:
        root = "/" if uri.startswith("/") else "."
    return Entry.open(open_store(root, storage_options), folder)


def find_entry(store: Store, key: str) -> Entry | None:
    """The newest usable entry of a key, None when it has to be built.

    The files for `datasets` are written when a builder died just before it wrote them.
    """
    for generation in reversed(generations(store, key)):
        folder = names.folder_of(key, generation)
        there = set(store.list(folder))
        if names.MANIFEST not in there or there & {names.DAMAGED, names.DOOMED}:
            continue
        entry = Entry.open(store, folder)
        if not {names.STATE, names.DATASET_INFO} <= there:
            _mend(entry)
        return entry
    return None


def list_entries(store: Store) -> list[Listed]:
    """Every folder of the root that can be an entry, finished or not, by name."""
    folders = sorted(item.name for item in store.scan() if item.is_folder and names.split_folder(item.name))
    return [_listed(store, folder) for folder in folders]


def _mend(entry: Entry) -> None:
    try:
        ensure_datasets_files(entry.store, entry.folder, entry.manifest)
    except (StoreError, OSError):
        return  # a reader without the right to write can use the entry all the same


def _listed(store: Store, folder: str) -> Listed:
    found = store.scan(folder)
    there = {item.name for item in found}
    key, generation = names.split_folder(folder) or (folder, 0)
    state = "finished" if names.MANIFEST in there else "building"
    state = "damaged" if names.DAMAGED in there else state
    state = "doomed" if names.DOOMED in there else state
    newest = max((item.modified_s for item in found), default=0.0)
    return Listed(folder, key, generation, state, len(found), sum(item.size for item in found), newest)
