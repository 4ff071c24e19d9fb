"""The entry of what is to come: the one place that knows which class reads it."""

from __future__ import annotations

from raysvc.cache.entry import Entry
from raysvc.cache.growing.coming import FollowedSpec, GrowingSpec
from raysvc.cache.growing.followed_entry import FollowedEntry
from raysvc.cache.growing.growing_entry import GrowingEntry
from raysvc.cache.store.store import Store


def entry_to_come(coming: GrowingSpec | FollowedSpec, store: Store, folder: str) -> Entry:
    """The entry, to be read while somebody builds it; the finished one where it is finished by now.

    Raises:
        EntryError: it was finished from another cut of the source.
    """
    if isinstance(coming, FollowedSpec):
        return FollowedEntry(store, folder, coming)
    entry = GrowingEntry(store, folder, coming)
    if not entry.is_finished():
        return entry
    finished = Entry.open(store, folder)
    entry.receipts.refuse_another_cut(finished.manifest, finished.uri)
    return finished
