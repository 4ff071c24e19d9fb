"""Removing media that no entry refers to.

1. Mark: `.media/deleting.json`. A build looks for it, after it has marked itself as running and before it keeps its first
   medium, and waits until it is gone.
2. List again. Where a build is running, or may have gone on since, nothing is removed: it may refer to what it found here.
3. Collect the digests that finished entries and the receipts of unfinished ones name. What cannot be read ends the visit.
4. Delete media that nobody names and that are older than the grace period, then empty folders, the mark last.

Always true:
- of a removal and a build that begin together at least one sees the other, so no medium that an entry or build refers to is removed;
- without a build, every medium that nobody refers to is removed by a visit after the grace period;
- a mark that a killed gc left is taken over after `STALE_S`, and ends the wait of a build with an error that says so.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable, Mapping, Sequence

from raysvc.cache import names
from raysvc.cache.gc import GcFolder, GcVisit, Removal
from raysvc.cache.manifest import Manifest, Receipt
from raysvc.cache.store.store import Found, Store
from raysvc.errors import EntryError, StoreError
from raysvc.media.media_index import read_digests
from raysvc.media.media_store import FOLDER
from raysvc.media.medium import DIGEST

MARK = f"{FOLDER}/{names.DELETING}"
STALE_S = 3600.0
POLL_S = 0.5
log = logging.getLogger(__name__)
Folders = Mapping[str, tuple[Found, ...]]  # folder of an entry or build -> its listing


class _Unreadable(Exception):
    """Something that may name media cannot be read."""


def wait_for_removal(store: Store, timeout_s: float = STALE_S) -> None:
    """Wait while gc removes media; called by a build that holds its folder.

    Raises:
        StoreError: it takes longer than a removal may.
    """
    end, told = time.monotonic() + timeout_s, False
    while names.DELETING in store.list(FOLDER):
        if not told:
            log.warning("waiting for raysvc cache gc to remove media root=%s", store.url)
            told = True
        if time.monotonic() > end:
            what = "a removal of media has begun and does not end"
            raise StoreError(store.url, what, f"run raysvc cache gc, or delete {MARK} if none runs")
        time.sleep(POLL_S)


def has_media(root: Iterable[Found]) -> bool:
    """Returns whether a root holds any."""
    return any(item.is_folder and item.name == FOLDER for item in root)


def remove_media(visit: GcVisit) -> list[Removal]:
    """Remove media that nobody refers to; for `raysvc.cache.gc.collect_garbage`."""
    if not has_media(visit.root):
        return []
    if visit.dry_run:
        return _removed(visit, visit.folders, remove_them=False)
    if not begin_removal(visit.store, visit.now_s):
        return []
    try:
        return _removed(visit, visit.listed(), remove_them=True)
    finally:
        end_removal(visit.store)


def _removed(visit: GcVisit, folders: Sequence[GcFolder], remove_them: bool) -> list[Removal]:
    builds = [one.name for one in folders if one.is_held and _may_take_more(visit.store, one)]
    if builds:
        return [Removal(FOLDER, "skipped", f"{builds[0]} is being built, and may refer to any", 0)]
    there = {one.name: one.found for one in folders}
    found = None if visit.skipped else unneeded_media(visit.store, there, visit.now_s, visit.grace_s)
    if found is None:
        return [Removal(FOLDER, "skipped", "an entry cannot be read, and may refer to any", 0)]
    if remove_them:
        remove(visit.store, found)
    total, files = sum(item.size for _, item in found), tuple(item.name for _, item in found)
    return [Removal(FOLDER, "removed", "no entry refers to them", total, files)] if found else []


def _may_take_more(store: Store, folder: GcFolder) -> bool:
    """Returns whether it is of a build that may refer to more media; the mark of a source that is followed tells whether its rows have any."""
    if names.MANIFEST in folder.there:
        return False
    return not folder.is_followed or store.read(f"{folder.name}/{names.FOLLOWED}") != b"{}"


def unneeded_media(
    store: Store, folders: Folders, now_s: float, grace_s: float
) -> list[tuple[str, Found]] | None:
    """(folder, medium) of what nobody refers to and is old enough; None where that cannot be told.

    Args:
        store: the root.
        folders: every entry and build, listed now.
        now_s: by the store's clock.
        grace_s: least age.
    """
    try:
        needed = {digest for folder, found in folders.items() for digest in _named_by(store, folder, found)}
    except _Unreadable as error:
        log.warning("media are not removed: %s", error)
        return None
    return [
        (f"{FOLDER}/{inner.name}", item)
        for inner in store.scan(FOLDER)
        if inner.is_folder
        for item in store.scan(f"{FOLDER}/{inner.name}")
        if not (DIGEST.fullmatch(item.name) and item.name in needed) and now_s - item.modified_s >= grace_s
    ]


def begin_removal(store: Store, now_s: float) -> bool:
    """Write the mark; False while another removal runs."""
    if store.create(MARK, b"{}"):
        return True
    there = next((item for item in store.scan(FOLDER) if item.name == names.DELETING), None)
    return there is not None and now_s - there.modified_s >= STALE_S


def remove(store: Store, media: Iterable[tuple[str, Found]]) -> None:
    """Delete media, and folders that are empty then; what is left when the mark gets old stays for another visit."""
    end, emptied = time.monotonic() + STALE_S / 2, set()
    for folder, item in media:
        if time.monotonic() > end:
            return
        store.delete(f"{folder}/{item.name}")
        emptied.add(folder)
    for folder in emptied:
        store.delete(folder)


def end_removal(store: Store) -> None:
    """Remove the mark."""
    store.delete(MARK)


def _named_by(store: Store, folder: str, found: Iterable[Found]) -> list[str]:
    there = {item.name for item in found}
    try:
        if names.MANIFEST not in there:
            receipts = (f"{folder}/{name}" for name in there if names.RECEIPT.fullmatch(name))
            return [digest for path in receipts for digest in _of_receipt(store, path)]
        if names.DAMAGED in there:
            return []  # nobody can open it, and a build makes it again with its media
        return read_digests(store, folder, Manifest.read(store, folder).report)
    except (EntryError, StoreError, FileNotFoundError) as error:
        raise _Unreadable(f"{folder}: {error}") from None


def _of_receipt(store: Store, path: str) -> list[str]:
    """Returns the media of one slice; none where its receipt is damaged: the slice is made again, with its media."""
    try:
        meta = Receipt.from_json(store.read(path), path).meta
    except EntryError:
        return []
    return [str(digest) for digest in meta.get("media", ())]
