"""The entry of what is to come: the one place that knows which class reads it."""

from __future__ import annotations

from raysvc.cache.entry import Entry
from raysvc.cache.growing.added_entry import AddedEntry
from raysvc.cache.growing.coming import AddedSpec, Coming, FollowedSpec
from raysvc.cache.growing.followed_entry import FollowedEntry
from raysvc.cache.growing.growing_entry import GrowingEntry
from raysvc.cache.store.store import Store


def entry_to_come(coming: Coming, store: Store, folder: str) -> Entry:
    """The entry, to be read while somebody builds it; the finished one where it is finished by now.

    Raises:
        EntryError: it was finished from another cut of the source.
    """
    entry = _growing(coming, store, folder)
    if not entry.is_finished():
        return entry
    finished = Entry.open(store, folder)
    entry.receipts.refuse_another_cut(finished.source_rows.tolist(), finished.uri)
    return finished


def _growing(coming: Coming, store: Store, folder: str) -> GrowingEntry:
    if isinstance(coming, AddedSpec):
        return AddedEntry(store, folder, coming, _growing(coming.base, store, coming.folder))
    if isinstance(coming, FollowedSpec):
        return FollowedEntry(store, folder, coming)
    return GrowingEntry(store, folder, coming)
