"""Decides what may be removed from a cache root, and removes it.

1. List every folder. What cannot be read is named and left alone.
2. Remove leftovers: receipts and losers' parts of finished entries, temporary files, old scans.
3. Mark (`deleting.json`) what nobody needs. From then on nobody opens it any more.
4. Wait: a finished entry is removed by a visit at least the grace period later; whoever opened it before the
   mark has that long to finish. With a grace period of 0 it is removed in the same visit.
5. List again what is due. Whoever used it meanwhile left a marker: then it stays.
6. Delete: the manifest first, the mark last.
7. Remove what lies beside the entries and none of them refers to, as the caller says (`raysvc.media.media_gc`).

A look (`dry_run`) only lists. It writes nothing, so it works on a full disk and on a root that is read-only.

Always true:
- an entry or build in use (held, or named by the caller) is not deleted, even if the use began after the first listing;
- an entry that another one adds columns to is not deleted before that one, whatever its age;
- nothing younger than the grace period is deleted, by the store's own clock, and no temporary file younger than an hour;
- an entry that is half removed is never found.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from raysvc.cache import index, names
from raysvc.cache.manifest import Manifest
from raysvc.cache.part_table import PartTable
from raysvc.cache.store.store import Found, Store
from raysvc.cache.use_marker import USE_TTL_S, store_now
from raysvc.errors import EntryError, StoreError

GRACE_S = 86400.0
SCANS_KEPT_S = 90 * 86400.0
TEMPORARY_S = 3600.0  # somebody may be writing a younger temporary file, whatever the grace period
TEMPORARY = (".tmp-", ".probe-", ".clock-")
log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Removal:
    """One thing that was removed, or marked for it.

    Attributes:
        folder: of the entry; empty for files directly in the root.
        action: `marked` (removed by a visit after the grace period), `removed`, or `skipped` (cannot be read).
        reason: one clause.
        num_bytes: that are, or will be, free.
        files: names that were removed.
    """

    folder: str
    action: str
    reason: str
    num_bytes: int
    files: tuple[str, ...] = ()


@dataclass(frozen=True)
class GcFolder:
    """One folder of an entry or build as a visit sees it."""

    name: str
    found: tuple[Found, ...]
    modified_s: float  # of the folder itself, 0.0 on object stores
    now_s: float

    @property
    def there(self) -> set[str]:
        return {item.name for item in self.found}

    @property
    def num_bytes(self) -> int:
        return sum(item.size for item in self.found)

    @property
    def is_finished(self) -> bool:
        return names.MANIFEST in self.there and names.DELETING not in self.there

    @property
    def is_followed(self) -> bool:
        """Returns whether its source has no end, so that it never has a manifest."""
        return names.FOLLOWED in self.there and names.DELETING not in self.there

    @property
    def is_held(self) -> bool:
        return any(names.USE.fullmatch(i.name) and self.now_s - i.modified_s < USE_TTL_S for i in self.found)

    @property
    def sharers(self) -> list[str]:
        """Folders of entries that add columns to its rows, or did."""
        matches = (names.SHARED.fullmatch(item.name) for item in self.found)
        return [match[1] for match in matches if match]

    @property
    def signs(self) -> list[Found]:
        """Returns what says that somebody uses or used it, newest last."""
        marks = (i for i in self.found if names.USE.fullmatch(i.name) or names.USED.fullmatch(i.name))
        return sorted(marks, key=lambda item: item.modified_s)

    @property
    def idle_s(self) -> float:
        """Seconds since it was finished or last used."""
        times = [i.modified_s for i in self.found if i.name == names.MANIFEST or self.is_followed]
        times += [item.modified_s for item in self.signs]
        return self.now_s - max(times, default=self.now_s)

    def age_s(self, name: str | None = None) -> float:
        """Seconds since one file, or the newest, was written."""
        times = [item.modified_s for item in self.found if name in (None, item.name)]
        return self.now_s - max([*times, 0.0 if name else self.modified_s])


def collect_garbage(
    store: Store,
    older_than_s: float | None = None,
    max_bytes: int | None = None,
    in_use: Collection[str] = (),
    grace_s: float = GRACE_S,
    dry_run: bool = False,
    beside: Callable[[GcVisit], list[Removal]] | None = None,
) -> list[Removal]:
    """Remove what nobody needs.

    Always: unfinished builds, losers' parts, receipts of finished entries and other leftovers after the grace
    period; damaged and superseded entries.

    Args:
        store: the root.
        older_than_s: finished entries that were not used for this long go too.
        max_bytes: least recently used entries go until the finished ones are not larger together.
        in_use: keys, folders or URIs that must stay.
        grace_s: how long a reader or a slow builder may take; 0 marks and removes in one visit.
        dry_run: tell what would happen and write nothing; ages are then by this machine's clock.
        beside: removes what lies beside the entries.
    """
    visit = GcVisit(store, grace_s, dry_run)
    kept = {item.rstrip("/").rpartition("/")[2] for item in in_use}
    free = [
        one
        for one in visit.folders
        if not (one.is_held or _names_of(one.name) & kept or visit.is_shared(one))
    ]
    due = [one for one in free if visit.is_due(one)]
    removals = [
        *visit.skipped,
        *visit.leftovers(),
        *(removal for one in due if (removal := visit.remove(one)) is not None),
        *visit.mark([one for one in free if one not in due], older_than_s, max_bytes),
        *(beside(visit) if beside else ()),
    ]
    if visit.records and not dry_run:
        store.delete(names.INDEX)  # the folder, where it is empty
    return removals


class GcVisit:
    """One run over a root.

    Attributes:
        root: what is in it.
        folders: every entry and build, as they were listed first.
        skipped: those that could not be read.
    """

    def __init__(self, store: Store, grace_s: float, dry_run: bool) -> None:
        self.store, self.grace_s, self.dry_run = store, grace_s, dry_run
        self.now_s = time.time() if dry_run else _clock(store)
        self.root = tuple(store.scan())
        self.skipped: list[Removal] = []
        listed = [self._look(item) for item in self.root if item.is_folder and names.split_folder(item.name)]
        self.folders = [one for one in listed if one is not None]
        self.records = _records(store, self.root)

    def is_due(self, folder: GcFolder) -> bool:
        """Marked long enough ago, or a build that stopped long ago."""
        if names.DELETING in folder.there:
            return folder.age_s(names.DELETING) >= self.grace_s
        return not (folder.is_finished or folder.is_followed) and folder.age_s() >= self.grace_s

    def is_shared(self, folder: GcFolder) -> bool:
        """Returns whether an entry that adds columns to its rows, or a build of one, is there now."""
        return any(self._is_there(name) for name in folder.sharers)

    def _is_there(self, name: str) -> bool:
        found = self.store.scan(name)  # fresh: it may be younger than the first listing
        now = GcFolder(name, tuple(found), 0.0, self.now_s)
        return names.MANIFEST in now.there or now.is_held or (bool(found) and now.age_s() < self.grace_s)

    def mark(
        self, free: Sequence[GcFolder], older_than_s: float | None, max_bytes: int | None
    ) -> list[Removal]:
        """Take out of service what nobody needs; with no grace period remove it too."""
        total = sum(one.num_bytes for one in self.folders if one.is_finished or one.is_followed)
        removals = []
        for folder in sorted(free, key=lambda one: one.idle_s, reverse=True):
            reason = _reason(folder, self.folders, older_than_s)
            if reason is None and max_bytes is not None and total > max_bytes:
                reason = f"the entries have {total} bytes, above {max_bytes}; it was used least recently"
            if reason is None or not (folder.is_finished or folder.is_followed):
                continue
            total -= folder.num_bytes
            mark = Removal(folder.name, "marked", reason, folder.num_bytes)
            if self.grace_s == 0:
                gone = self.remove(folder)
                removals += [] if gone is None else [mark, gone]
                continue
            if self.dry_run or self._marked(folder):
                removals.append(mark)
        return removals

    def remove(self, folder: GcFolder) -> Removal | None:
        """Mark, list again, delete; None when it is used after all."""
        reason = "it was marked before" if names.MANIFEST in folder.there else "its build did not go on"
        files = sorted(folder.there | {names.DELETING}, key=_order)
        removal = Removal(folder.name, "removed", reason, folder.num_bytes, tuple(files))
        if self.dry_run:
            return removal
        if not self._marked(folder):
            return None
        for record in self.records.get(folder.name, ()):
            self.store.delete(f"{names.INDEX}/{record}")
        for name in files:
            self.store.delete(f"{folder.name}/{name}")
        self.store.delete(folder.name)
        return removal

    def _marked(self, folder: GcFolder) -> bool:
        """Mark, and list again; False, without a new mark, when it is used after all."""
        marked = self.store.create(f"{folder.name}/{names.DELETING}", b"")
        again = GcFolder(folder.name, tuple(self.store.scan(folder.name)), 0.0, self.now_s)
        changed = again.there - folder.there - {names.DELETING}
        if not (again.is_held or changed or self.is_shared(again)):
            return True
        log.info("not removed folder=%s: used while gc looked", folder.name)
        if marked:
            self.store.delete(f"{folder.name}/{names.DELETING}")
        return False

    def listed(self) -> list[GcFolder]:
        """Every entry and build, listed now."""
        found = (
            self._look(one) for one in self.store.scan() if one.is_folder and names.split_folder(one.name)
        )
        return [one for one in found if one is not None]

    def leftovers(self) -> list[Removal]:
        """Files that nothing needs, in the root and in finished entries."""
        found = [*self._of_root(), *self._old_scans(), *self._lost_records()]
        for folder in self.folders:
            if folder.is_finished:
                found += self._of_entry(folder)
        return found

    def _look(self, item: Found) -> GcFolder | None:
        try:
            return GcFolder(item.name, tuple(self.store.scan(item.name)), item.modified_s, self.now_s)
        except (StoreError, OSError) as error:
            self.skipped.append(Removal(item.name, "skipped", f"it cannot be read ({error})", 0))
            return None

    def _of_entry(self, folder: GcFolder) -> list[Removal]:
        """Losers' parts, receipts, temporary files and dead markers; the newest sign of use stays.

        While somebody holds the entry only markers go: a second builder may still be writing there.
        """
        try:
            manifest = Manifest.read(self.store, folder.name)
            needed = {part.name for part in manifest.parts} | {item.name for item in folder.signs[-1:]}
        except (EntryError, StoreError, FileNotFoundError):
            return []  # without its list of parts nothing can be told apart
        if folder.name not in self.records and names.DAMAGED not in folder.there and not self.dry_run:
            index.note(self.store, folder.name, manifest.recipe)
        needed |= {names.MANIFEST, names.STATE, names.DATASET_INFO, names.TOKENIZER}
        if isinstance(manifest.parts, PartTable):
            needed.add(manifest.parts.info.name)
        needed |= {names.DAMAGED, names.DELETING, *_named_in(manifest.report)}
        needed |= {names.shared_with(one) for one in folder.sharers if self._is_there(one)}
        old = [i for i in folder.found if i.name not in needed and self._is_leftover(i)]
        if folder.is_held:
            old = [i for i in old if names.USE.fullmatch(i.name) or names.USED.fullmatch(i.name)]
        return self._files(
            folder.name, [i for i in old if not names.USE.fullmatch(i.name) or self._is_old(i, USE_TTL_S)]
        )

    def _of_root(self) -> list[Removal]:
        old = [i for i in self.root if i.name.startswith(TEMPORARY) and self._is_leftover(i)]
        return self._files("", [item for item in old if not item.is_folder])

    def _old_scans(self) -> list[Removal]:
        """Nobody can tell whether the file of a scan has changed; scanning it again is cheap."""
        if not any(item.is_folder and item.name == names.SCANS for item in self.root):
            return []
        old = [item for item in self.store.scan(names.SCANS) if self._is_old(item, SCANS_KEPT_S)]
        return self._files(names.SCANS, old)

    def _lost_records(self) -> list[Removal]:
        """Records of the index whose entry is gone."""
        lost = set(self.records) - {item.name for item in self.root}
        found = [Found(name, 0, 0.0, False) for folder in sorted(lost) for name in self.records[folder]]
        return self._files(names.INDEX, found)

    def _is_leftover(self, item: Found) -> bool:
        least_s = TEMPORARY_S if item.name.startswith(TEMPORARY) else 0.0
        return self._is_old(item, max(self.grace_s, least_s))

    def _is_old(self, item: Found, age_s: float) -> bool:
        return self.now_s - item.modified_s >= age_s

    def _files(self, folder: str, files: Sequence[Found]) -> list[Removal]:
        if not files:
            return []
        for item in files:
            if not self.dry_run:
                self.store.delete(f"{folder}/{item.name}" if folder else item.name)
        total = sum(item.size for item in files)
        return [Removal(folder, "removed", "nothing needs them", total, tuple(item.name for item in files))]


def _named_in(report: Mapping[str, Any]) -> set[str]:
    """Names of files that a report has, with whatever else it says in the same places."""
    return {
        text
        for told in report.values()
        if isinstance(told, dict)
        for text in told.values()
        if isinstance(text, str)
    }


def _records(store: Store, root: Sequence[Found]) -> dict[str, list[str]]:
    """Folder of an entry -> its records in the index."""
    records: dict[str, list[str]] = {}
    there = any(item.is_folder and item.name == names.INDEX for item in root)
    for name in store.list(names.INDEX) if there else ():
        if folder := index.folder_of_record(name):
            records.setdefault(folder, []).append(name)
    return records


def _clock(store: Store) -> float:
    """The store's clock; this machine's where the store is too full to be asked."""
    try:
        return store_now(store)
    except StoreError as error:
        log.warning("ages are by this machine's clock root=%s error=%s", store.url, error)
        return time.time()


def _names_of(folder: str) -> set[str]:
    split = names.split_folder(folder)
    return {folder, split[0]} if split else {folder}


def _reason(folder: GcFolder, folders: Sequence[GcFolder], older_than_s: float | None) -> str | None:
    if names.DAMAGED in folder.there:
        return "it is damaged"
    key, generation = names.split_folder(folder.name) or (folder.name, 0)
    for other in folders:
        split = names.split_folder(other.name)
        usable = other.is_finished and names.DAMAGED not in other.there
        if usable and split and split[0] == key and split[1] > generation:
            return f"{other.name} replaces it"
    if older_than_s is not None and folder.idle_s >= older_than_s:
        return f"it was not used for {folder.idle_s:.0f} s"
    return None


def _order(name: str) -> tuple[bool, bool, str]:
    """The manifest first, the mark last."""
    return name == names.DELETING, name != names.MANIFEST, name
