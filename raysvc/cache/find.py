"""Finding and opening finished entries.

Always true:
- an entry is found by listing its folder, never by probing a name;
- of several generations of a key the newest that is finished, undamaged and not being removed counts;
- an entry that cannot be used is named in the log and taken out of service; the others are found all the same.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from raysvc.cache import names
from raysvc.cache.export.datasets_export import ensure_datasets_files
from raysvc.cache.gc import collect_garbage as collect_garbage
from raysvc.cache.generations import generations
from raysvc.cache.generations import next_generation as next_generation
from raysvc.cache.store.open import open_store
from raysvc.cache.store.store import Found, Store
from raysvc.cache.use_marker import mark_used, this_process
from raysvc.cache.verify import Problem, mark_damaged
from raysvc.errors import EntryError, EntryTooNew, StoreError

if TYPE_CHECKING:
    from raysvc.cache.entry import Entry  # imports numpy, which a listing does not need

THREADS = 16
log = logging.getLogger(__name__)


@dataclass(frozen=True)
class ListedFolder:
    """One folder of a cache root.

    Attributes:
        folder: its name, `<key>` or `<key>.<n>`.
        key: of the recipe.
        generation: 0, or n for a rebuild.
        state: `finished`, `building` (no manifest yet), `damaged`, `deleting` (gc removes it) or `unreadable`.
        num_files, num_bytes: all that lies in it.
        modified_s: newest file, seconds since 1970 by the store's clock.
        shared_by: folders of entries that add columns to its rows.
    """

    folder: str
    key: str
    generation: int
    state: str
    num_files: int
    num_bytes: int
    modified_s: float
    shared_by: tuple[str, ...] = ()


def open_finished(uri: str, storage_options: Mapping[str, Any] | None = None) -> Entry:
    """The entry at a path or URL.

    Raises:
        EntryError: there is none, or it is damaged, or newer than this raysvc.
    """
    from raysvc.cache.entry import Entry

    root, _, folder = uri.rstrip("/").rpartition("/")
    if not root:
        root = "/" if uri.startswith("/") else "."
    return Entry.open(open_store(root, storage_options), folder)


def find_entry(store: Store, key: str) -> Entry | None:
    """The newest usable entry of a key, None when it has to be built. Being found is a use.

    The files for `datasets` are written when a builder died just before it wrote them.

    Raises:
        EntryTooNew: a newer version built it.
    """
    for generation in reversed(generations(store, key)):
        folder = names.folder_of(key, generation)
        found = store.scan(folder, names.MANY)
        there = {item.name for item in found}
        if names.MANIFEST not in there or there & {names.DAMAGED, names.DELETING}:
            continue
        entry = _usable(store, folder, found)
        if entry is None:
            continue
        if entry.base is None and not {names.STATE, names.DATASET_INFO} <= there:
            _write_datasets_files(entry)
        mark_used(store, folder, found, this_process())
        return entry
    return None


def list_entries(store: Store) -> list[ListedFolder]:
    """Every folder of the root that can be an entry, finished or not, by name."""
    folders = entry_folders(store)
    with ThreadPoolExecutor(THREADS) as pool:
        return list(pool.map(lambda folder: _listed(store, folder), folders))


def entry_folders(store: Store) -> list[str]:
    """Names of the folders that can be entries, sorted; one listing."""
    return sorted(name for name in store.list() if names.split_folder(name))


def _usable(store: Store, folder: str, found: Sequence[Found]) -> Entry | None:
    from raysvc.cache.entry import Entry

    try:
        return Entry.open(store, folder, found)
    except EntryTooNew:
        raise
    except EntryError as error:
        log.warning("entry skipped and marked as damaged: %s", error)
        try:
            mark_damaged(store, folder, [Problem(names.MANIFEST, "content", error.what)])
        except (StoreError, OSError) as reason:
            log.warning("entry not marked uri=%s/%s error=%s", store.url, folder, reason)
        return None


def _write_datasets_files(entry: Entry) -> None:
    try:
        ensure_datasets_files(entry.store, entry.folder, entry.manifest)
    except (StoreError, OSError):
        return  # a reader without the right to write can use the entry all the same


def _listed(store: Store, folder: str) -> ListedFolder:
    key, generation = names.split_folder(folder) or (folder, 0)
    try:
        found = store.scan(folder)
    except (StoreError, OSError) as error:
        log.warning("entry cannot be listed uri=%s/%s error=%s", store.url, folder, error)
        return ListedFolder(folder, key, generation, "unreadable", 0, 0, 0.0)
    there = {item.name for item in found}
    state = "finished" if names.MANIFEST in there else "building"
    state = "followed" if names.FOLLOWED in there else state
    state = "damaged" if names.DAMAGED in there else state
    state = "deleting" if names.DELETING in there else state
    newest = max((item.modified_s for item in found), default=0.0)
    shared_by = tuple(sorted(match[1] for name in there if (match := names.SHARED.fullmatch(name))))
    num_bytes = sum(item.size for item in found)
    return ListedFolder(folder, key, generation, state, len(found), num_bytes, newest, shared_by)
