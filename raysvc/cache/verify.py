"""Checks whether an entry is still what its builder wrote.

Always true:
- every byte that a reader can be given is read and compared;
- a problem names the file;
- checking changes nothing; `mark_damaged` makes sure that the entry is not served any more.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace

from raysvc.cache import names
from raysvc.cache.export.datasets_export import datasets_files
from raysvc.cache.local.checksum import checksum_of
from raysvc.cache.manifest import Manifest
from raysvc.cache.part_info import PartInfo
from raysvc.cache.part_table import PartTable, table_problems
from raysvc.cache.store.store import Found, Store
from raysvc.errors import EntryError, EntryTooNew

THREADS = 4
More = Callable[[Store, str, Manifest], "list[Problem]"]


@dataclass(frozen=True)
class Problem:
    """One thing that is wrong with an entry.

    Attributes:
        name: file in the entry's folder; of a file of its base `<folder>/<file>`; of a medium its path in the root.
        kind: `missing`, `size` (truncated or longer) or `content` (a flipped byte).
        detail: one clause.
    """

    name: str
    kind: str
    detail: str

    @property
    def can_be_repaired(self) -> bool:
        """The files for `datasets` follow from the manifest; nothing that is trained on depends on them."""
        return self.name in (names.STATE, names.DATASET_INFO)

    def __str__(self) -> str:
        return f"{self.name}: {self.detail}"


def nothing_more(store: Store, folder: str, manifest: Manifest) -> list[Problem]:
    """No problem."""
    return []


def verify_folder(store: Store, folder: str, more: More = nothing_more) -> list[Problem]:
    """Every problem of an entry, by file name.

    Args:
        more: checks what its rows refer to in the root, see `raysvc.media.media_index.media_problems`.

    Raises:
        EntryError: there is no complete entry, or it is from a newer version.
    """
    found = {item.name: item for item in store.scan(folder)}
    if names.MANIFEST not in found:
        raise EntryError(
            f"{store.url}/{folder}", "there is no complete entry", "run raysvc cache ls to see what is there"
        )
    try:
        manifest = Manifest.read(store, folder)
    except EntryTooNew:
        raise
    except EntryError as error:
        return [Problem(names.MANIFEST, "content", error.what)]
    if isinstance(manifest.parts, PartTable):
        name = manifest.parts.info.name
        there = found[name].size if name in found else None
        if problems := [Problem(name, *what) for what in table_problems(manifest.parts, there)]:
            return problems  # the parts are not known without it
    with ThreadPoolExecutor(THREADS) as pool:
        parts = list(pool.map(lambda part: _check(store, folder, part, found.get(part.name)), manifest.parts))
    own = [one for one in [*parts, *_small_files(store, folder, manifest, found)] if one is not None]
    of_base = _of_base(store, manifest.base, more) if manifest.base else []
    return [*own, *more(store, folder, manifest), *of_base]


def _of_base(store: Store, base: str, more: More) -> list[Problem]:
    try:
        problems = verify_folder(store, base, more)
    except EntryTooNew:
        raise
    except EntryError as error:
        return [Problem(f"{base}/{names.MANIFEST}", "missing", error.what)]
    return [
        replace(one, name=one.name if "/" in one.name else f"{base}/{one.name}")
        for one in problems
        if not one.can_be_repaired
    ]


def repair(store: Store, folder: str, problems: Sequence[Problem]) -> None:
    """Write again what follows from the manifest."""
    broken = {problem.name for problem in problems if problem.can_be_repaired}
    if not broken:
        return
    manifest = Manifest.read(store, folder)
    for name, data in datasets_files(manifest).items():
        if name in broken:
            store.delete(f"{folder}/{name}")
            store.create(f"{folder}/{name}", data)


def mark_damaged(store: Store, folder: str, problems: Sequence[Problem]) -> None:
    """Take an entry out of service, and its base where that has the problem: the next build replaces them.

    A file outside of entries, a medium that is not its digest any more, is removed: nobody can read it, and a build that needs it
    writes it again.
    """
    report = json.dumps([asdict(problem) for problem in problems], indent=2)
    folders = {one.name: one.name.rpartition("/")[0] for one in problems if "/" in one.name}
    for name in sorted(name for name, its in folders.items() if names.split_folder(its) is None):
        store.delete(name)
    bases = {its for its in folders.values() if names.split_folder(its) is not None}
    for each in sorted({folder, *bases}):
        if store.list(each):
            store.create(f"{each}/{names.DAMAGED}", report.encode())


def _check(store: Store, folder: str, part: PartInfo, found: Found | None) -> Problem | None:
    if found is None:
        return Problem(part.name, "missing", "it is not in the folder")
    if found.size != part.num_bytes:
        return Problem(part.name, "size", f"it has {found.size} bytes instead of {part.num_bytes}")
    try:
        data = store.read(f"{folder}/{part.name}")
    except FileNotFoundError:
        return Problem(part.name, "missing", "it was removed while it was checked")
    if len(data) != part.num_bytes:
        return Problem(part.name, "size", f"it has {len(data)} bytes instead of {part.num_bytes}")
    if checksum_of(data) != part.checksum:
        return Problem(part.name, "content", "its bytes are not those that were written (checksum)")
    return None


def _small_files(
    store: Store, folder: str, manifest: Manifest, found: Mapping[str, Found]
) -> list[Problem | None]:
    problems: list[Problem | None] = []
    for name, data in datasets_files(manifest).items():
        if name not in found:
            problems.append(Problem(name, "missing", "it is not in the folder"))
        elif store.read(f"{folder}/{name}") != data:
            problems.append(Problem(name, "content", "it does not follow from the manifest"))
    return problems
