"""What may be removed from a cache root, and removing it.

Two visits remove a finished entry: the first marks it (`doomed.json`), after which nobody opens it any more;
the second, at least the grace period later, deletes it. Whoever opened it before the mark has that
long to finish, and a reader that holds the entry (`Entry.hold`) is waited for.

Always true:
- an entry in use (held, or named by the caller) is neither marked nor deleted;
- nothing younger than the grace period is deleted, by the store's own clock;
- manifests go first and the mark last, so an entry that is half removed is never found.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from raysvc.cache import names
from raysvc.cache.manifest import Manifest
from raysvc.cache.store.store import Found, Store
from raysvc.cache.use_marker import USE_TTL_S, store_now
from raysvc.errors import EntryError

GRACE_S = 86400.0
SCANS_KEPT_S = 90 * 86400.0


@dataclass(frozen=True)
class Removal:
    """One thing that was removed, or marked for it.

    Attributes:
        folder: of the entry; empty for files directly in the root.
        action: `marked` (removed by a visit after the grace period) or `removed`.
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
class _Folder:
    """One folder as a visit sees it."""

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
        return names.MANIFEST in self.there and names.DOOMED not in self.there

    @property
    def is_held(self) -> bool:
        return any(names.USE.fullmatch(i.name) and self.now_s - i.modified_s < USE_TTL_S for i in self.found)

    @property
    def idle_s(self) -> float:
        """Seconds since it was finished or last held."""
        signs = [i.modified_s for i in self.found if i.name == names.MANIFEST or names.USE.fullmatch(i.name)]
        return self.now_s - max(signs, default=self.now_s)

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
        dry_run: tell what would happen and do nothing.
    """
    now_s = store_now(store)
    kept = {item.rstrip("/").rpartition("/")[2] for item in in_use}
    root = tuple(store.scan())
    folders = [
        _Folder(item.name, tuple(store.scan(item.name)), item.modified_s, now_s)
        for item in root
        if item.is_folder and names.split_folder(item.name)
    ]
    free = [folder for folder in folders if not folder.is_held and not _names_of(folder.name) & kept]
    removals = [
        *_marks(store, folders, free, older_than_s, max_bytes, dry_run),
        *_leftovers_of_root(store, root, now_s, grace_s, dry_run),
        *_old_scans(store, root, now_s, dry_run),
    ]
    marked = {one.folder for one in removals}
    for folder in folders:
        if folder in free and (_is_over(folder, grace_s) or (grace_s == 0 and folder.name in marked)):
            removals.append(_remove_all(store, folder, dry_run))
        elif folder.is_finished:
            removals.extend(_leftovers_of_entry(store, folder, grace_s, dry_run))
    return removals


def _names_of(folder: str) -> set[str]:
    split = names.split_folder(folder)
    return {folder, split[0]} if split else {folder}


def _is_over(folder: _Folder, grace_s: float) -> bool:
    """Marked long enough ago, or a build that stopped long ago."""
    if names.DOOMED in folder.there:
        return folder.age_s(names.DOOMED) >= grace_s
    return not folder.is_finished and folder.age_s() >= grace_s


def _marks(
    store: Store,
    folders: Sequence[_Folder],
    free: Sequence[_Folder],
    older_than_s: float | None,
    max_bytes: int | None,
    dry_run: bool,
) -> list[Removal]:
    total = sum(folder.num_bytes for folder in folders if folder.is_finished)
    marks = []
    for folder in sorted(free, key=lambda one: one.idle_s, reverse=True):
        reason = _reason(folder, folders, older_than_s)
        if reason is None and max_bytes is not None and total > max_bytes:
            reason = f"the entries have {total} bytes, above {max_bytes}; it was used least recently"
        if reason is None or not folder.is_finished:
            continue
        total -= folder.num_bytes
        marks.append(Removal(folder.name, "marked", reason, folder.num_bytes))
        if not dry_run:
            store.create(f"{folder.name}/{names.DOOMED}", b"{}")
    return marks


def _reason(folder: _Folder, folders: Sequence[_Folder], older_than_s: float | None) -> str | None:
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


def _remove_all(store: Store, folder: _Folder, dry_run: bool) -> Removal:
    reason = "it was marked before" if names.MANIFEST in folder.there else "its build did not go on"
    files = sorted(folder.there, key=lambda name: (name == names.DOOMED, name != names.MANIFEST, name))
    if not dry_run:
        for name in files:
            store.delete(f"{folder.name}/{name}")
        store.delete(f"{folder.name}/{names.DOOMED}")
        store.delete(folder.name)
    return Removal(folder.name, "removed", reason, folder.num_bytes, tuple(files))


def _leftovers_of_entry(store: Store, folder: _Folder, grace_s: float, dry_run: bool) -> list[Removal]:
    """Losers' parts, receipts, temporary files and dead markers of a finished entry."""
    path = f"{folder.name}/{names.MANIFEST}"
    try:
        manifest = Manifest.from_json(store.read(path), f"{store.url}/{path}")
    except (EntryError, FileNotFoundError):
        return []  # without its list of parts nothing can be told apart
    needed = {part.name for part in manifest.parts}
    needed |= {names.MANIFEST, names.STATE, names.DATASET_INFO, names.DAMAGED, names.DOOMED}
    old = [i for i in folder.found if i.name not in needed and folder.now_s - i.modified_s >= grace_s]
    old = [i for i in old if not names.USE.fullmatch(i.name) or folder.now_s - i.modified_s >= USE_TTL_S]
    return _remove_files(store, folder.name, old, dry_run)


def _leftovers_of_root(
    store: Store, root: Sequence[Found], now_s: float, grace_s: float, dry_run: bool
) -> list[Removal]:
    prefixes = (".tmp-", ".probe-", ".clock-")
    old = [i for i in root if i.name.startswith(prefixes) and now_s - i.modified_s >= grace_s]
    return _remove_files(store, "", [item for item in old if not item.is_folder], dry_run)


def _old_scans(store: Store, root: Sequence[Found], now_s: float, dry_run: bool) -> list[Removal]:
    """Records of scans are of no use once their file has changed; nobody can tell, and making another is cheap."""
    if not any(item.is_folder and item.name == names.SCANS for item in root):
        return []
    old = [item for item in store.scan(names.SCANS) if now_s - item.modified_s >= SCANS_KEPT_S]
    return _remove_files(store, names.SCANS, old, dry_run)


def _remove_files(store: Store, folder: str, files: Sequence[Found], dry_run: bool) -> list[Removal]:
    if not files:
        return []
    for item in files:
        if not dry_run:
            store.delete(f"{folder}/{item.name}" if folder else item.name)
    total = sum(item.size for item in files)
    return [Removal(folder, "removed", "nothing needs them", total, tuple(item.name for item in files))]
