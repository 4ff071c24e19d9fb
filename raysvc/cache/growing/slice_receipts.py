"""The parts of an entry that is being built, as their receipts appear in its folder.

Always true:
- a slice has a part when a receipt of just these rows of the source names one; of several the first that is intact;
- nobody is asked but the store: builders may die, change places or come twice;
- who waits for slices looks into the folder every second or more often, and says so every few seconds;
- the wait ends with an error when no slice was finished for `GIVE_UP_S` and no builder holds the entry;
- once the entry is finished its manifest names the parts, and nothing is looked for any more.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import accumulate
from typing import Any

from raysvc.cache import names
from raysvc.cache.local.checksum import checksum_of
from raysvc.cache.manifest import REQUIRED, Manifest, Receipt
from raysvc.cache.part_info import PartInfo
from raysvc.cache.store.store import Store
from raysvc.cache.use_marker import is_being_built
from raysvc.errors import EntryError, StoreError

log = logging.getLogger(__name__)
FIRST_LOOK_S, MOST_LOOK_S = 0.05, 1.0
REPORT_EVERY_S = 5.0
GIVE_UP_S = 600.0
NOBODY = "; if none get finished, nobody builds: run raysvc tokenize"


class SliceReceipts:
    """Parts by slice.

    Args:
        store, folder: of the entry.
        source_rows: of the source, in each slice.
        contents: digest of what each slice holds, as its identity has it.
        are_added: the parts are columns of the rows of another entry.

    Attributes:
        columns: name -> type; those of every entry until a slice is finished.
    """

    def __init__(
        self,
        store: Store,
        folder: str,
        source_rows: Sequence[int],
        contents: Sequence[str],
        *,
        are_added: bool = False,
    ) -> None:
        self._store, self._folder, self._are_added = store, folder, are_added
        self._wanted: list[dict[str, Any]] = []
        self.extend(source_rows, contents)
        self.columns = {} if are_added else dict(REQUIRED)
        self._lock = threading.Lock()  # guards the lines below; held while the folder is looked at
        self._parts: dict[int, PartInfo] = {}  # by receipts
        self._finished: Sequence[PartInfo] = ()  # by the manifest, once there is one
        self._num_receipts = 0  # when the folder was looked at last
        self._is_finished = False
        self._failure = ""

    def extend(self, source_rows: Sequence[int], contents: Sequence[str]) -> None:
        """More slices, behind those that are known."""
        self._wanted += slices_of(source_rows, contents, self._wanted[-1:])

    @property
    def wanted(self) -> Sequence[Mapping[str, Any]]:
        """Returns what the receipt of each slice says that it is of."""
        return self._wanted

    @property
    def num_slices(self) -> int:
        """Slices that are known by now."""
        return len(self._wanted)

    @property
    def where(self) -> str:
        """The entry's address."""
        return f"{self._store.url}/{self._folder}"

    def num_rows(self, slices: Sequence[int]) -> list[int | None]:
        """Rows of slices; 0 of one that nobody knows, None of one that is not finished now."""
        known = [index for index in slices if 0 <= index < self.num_slices]
        left = set(self.missing(known))
        counts = {index: None if index in left else self._part(index).num_rows for index in known}
        return [counts.get(index, 0) for index in slices]

    def missing(self, slices: Sequence[int]) -> list[int]:
        """Those of these slices that have no part now."""
        self.has(slices)
        return [index for index in slices if not self._is_there(index)]

    def part(self, index: int) -> PartInfo:
        """The part of a slice, once there is one.

        Raises:
            EntryError: its build has failed.
        """
        self.wait_for([index])
        return self._part(index)

    def has(self, slices: Iterable[int]) -> bool:
        """Returns whether slices are finished now."""
        missing = [index for index in slices if not self._is_there(index)]
        if missing:
            self._look(missing)
        return all(map(self._is_there, missing))

    def any_part(self) -> tuple[int, PartInfo]:
        """A slice that has rows, and its part; waits for the first one."""
        self.wait_until(lambda: self._some_part() is not None, "a first slice")
        found = self._some_part()
        assert found is not None
        return found

    def wait_for(self, slices: Sequence[int]) -> float:
        """Wait until slices are finished; seconds.

        Raises:
            EntryError: their build has failed, or the entry was finished from another cut of the source.
        """
        begin = time.monotonic()
        self.wait_until(lambda: self.has(slices), f"slices {', '.join(map(str, slices[:8]))}")
        return time.monotonic() - begin

    def refuse_another_cut(self, source_rows: Sequence[int] | None, where: str) -> None:
        """Refuse a finished entry of other slices: its rows have other numbers.

        Args:
            source_rows: of its slices; None: it does not tell.

        Raises:
            EntryError: it has.
        """
        if source_rows is None or list(source_rows) != [slice_["num_rows"] for slice_ in self._wanted]:
            what = "was finished by a builder that cut the source into other slices"
            raise EntryError(where, what, "give both jobs the same workers.slice_mb, and run this one again")

    def fail(self, why: str) -> None:
        """Nobody builds any more: who waits is told why; "": somebody builds again."""
        with self._lock:
            self._failure = why

    def wait_until(self, there: Callable[[], bool], what: str, hint: str = NOBODY) -> None:
        """Wait until something is there, of slices or of what they are cut from.

        Args:
            hint: to whom `what` may never come.

        Raises:
            EntryError: their build has failed, or nobody builds any more.
        """
        begin = said = moved = time.monotonic()
        seen = self._num_receipts
        pause_s = FIRST_LOOK_S
        while not there():
            if self._failure:
                raise EntryError(self.where, f"its build has failed: {self._failure}", "run the job again")
            now = time.monotonic()
            if self._num_receipts != seen:
                seen, moved = self._num_receipts, now
            if hint == NOBODY and now - moved > GIVE_UP_S:
                self._refuse_without_builder(now - moved)
                moved = now
            if now - said > REPORT_EVERY_S:
                said = now
                counts = len(self._finished or self._parts), len(self._wanted)
                log.warning(
                    "waiting for=%s of=%s since=%.0fs finished=%d/%d%s",
                    what,
                    self._folder,
                    now - begin,
                    *counts,
                    hint,
                )
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, MOST_LOOK_S)

    def _refuse_without_builder(self, waited_s: float) -> None:
        with contextlib.suppress(StoreError):  # a store that cannot be asked ends no wait
            if not is_being_built(self._store, self._folder):
                what = f"no slice was finished for {waited_s:.0f} s, and no builder holds it: its builders are gone"
                raise EntryError(self.where, what, "run the job again, or raysvc tokenize")

    def _some_part(self) -> tuple[int, PartInfo] | None:
        if not any(part.num_rows for part in self._parts.values()):
            self._look(range(len(self._wanted)))
        there = range(len(self._finished)) if self._is_finished else sorted(self._parts)
        return next(((index, part) for index in there if (part := self._part(index)).num_rows), None)

    def _is_there(self, index: int) -> bool:
        return index in self._parts or 0 <= index < len(self._finished)

    def _part(self, index: int) -> PartInfo:
        """Returns what was served first stays."""
        return self._parts[index] if index in self._parts else self._finished[index]

    def _look(self, slices: Iterable[int]) -> None:
        """Take in what the folder has of these slices."""
        with self._lock:
            if self._is_finished:
                return
            there = self._store.list(self._folder)
            if names.MANIFEST in there:
                self._take_manifest()
                return
            receipts: dict[int, list[str]] = {}
            for name in sorted(there):
                if match := names.RECEIPT.fullmatch(name):
                    receipts.setdefault(int(match[1]), []).append(name)
            self._num_receipts = len(receipts)
            for index in slices:
                if index not in self._parts and index in receipts:
                    self._take(index, receipts[index])

    def _take(self, index: int, found: Sequence[str]) -> None:
        """Called under the lock."""
        fitting = [receipt for name in found if (receipt := self._receipt(name, index)) is not None]
        if len(fitting) > 1:  # an earlier builder may have left a damaged part, which was made again
            fitting = [receipt for receipt in fitting if self._is_intact(receipt.part)]
        if fitting:
            self.columns.update(fitting[0].columns)
            self._parts[index] = fitting[0].part

    def _receipt(self, name: str, index: int) -> Receipt | None:
        try:
            data = self._store.read(f"{self._folder}/{name}")
            receipt = Receipt.from_json(data, f"{self._store.url}/{self._folder}/{name}")
        except (EntryError, FileNotFoundError):
            return None  # it is damaged; its builder makes another one
        return receipt if receipt.meta.get("slice") == self._wanted[index] else None

    def _is_intact(self, part: PartInfo) -> bool:
        try:
            return checksum_of(self._store.read(f"{self._folder}/{part.name}")) == part.checksum
        except FileNotFoundError:
            return False

    def _take_manifest(self) -> None:
        """Called under the lock."""
        manifest, where = Manifest.read(self._store, self._folder), f"{self.where}/{names.MANIFEST}"
        if not self._are_added:
            rows = manifest.source_rows
            self.refuse_another_cut(None if rows is None else list(rows), where)
        elif len(manifest.parts) != len(self._wanted):
            what = "was finished by a builder that cut the rows into other slices"
            raise EntryError(where, what, "run the job again")
        self.columns.update(manifest.columns)
        self._finished = manifest.parts
        self._is_finished = True


def slices_of(
    source_rows: Sequence[int], contents: Sequence[str], last: Sequence[Mapping[str, Any]] = ()
) -> list[dict[str, Any]]:
    """Returns what a receipt says of each slice that it is of.

    Args:
        last: what it says of the slice before the first of them.
    """
    begin, number = (last[-1]["first_row"] + last[-1]["num_rows"], last[-1]["index"] + 1) if last else (0, 0)
    firsts = accumulate(source_rows, initial=begin)
    return [
        {"index": index, "first_row": first, "num_rows": rows, "bytes": content}
        for index, (first, rows, content) in enumerate(
            zip(firsts, source_rows, contents, strict=False), start=number
        )
    ]
