"""The listings of a source that is followed, one after the other: what was there, and how it was cut into slices.

A listing lies in `<root>/.follow/<name>/<number>.json` and is never changed. Whoever follows a source reads all listings, looks at the
source, and makes the next one of what is new; of several who make the same number one wins, and the others read what it wrote.

Always true:
- a slice has its number, its rows and its bytes by a listing, before anybody uses it;
- every listing names the one before it by checksum, and the first one has a name that no other has;
- who reads sees listings 0 to n without a gap.
"""

from __future__ import annotations

import hashlib
import json
import threading
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from raysvc.cache import names
from raysvc.cache.store.store import Store
from raysvc.errors import EntryError
from raysvc.ragged import Int64s

REMEDY = "restore the folder, or remove it and begin a run of its own with a fresh trainer.run_dir"


@dataclass(frozen=True, eq=False)
class Listing:
    """Holds what appeared between two looks at a source.

    Attributes:
        first_slice: number of its first slice.
        slices: JSON of each, as `raysvc.pipelines.sources.slices.Slice` has it.
        contents: digest of what each slice holds.
        files: JSON by path, what of each file is counted by now.
        first_row: a row that tells the format; of the first listing.
    """

    first_slice: int
    slices: Sequence[Mapping[str, Any]]
    contents: Sequence[str]
    files: Mapping[str, Mapping[str, Any]]
    first_row: Mapping[str, Any] | None = None

    @cached_property
    def groups(self) -> Int64s:
        """int64 [S], rows of the source in each slice."""
        return np.array([one["num_rows"] for one in self.slices], np.int64)

    @property
    def num_bytes(self) -> int:
        """Bytes of the source."""
        return sum(piece["num_bytes"] for one in self.slices for piece in one["pieces"])


class Listings:
    """All listings of one source.

    Args:
        store: the cache root.
        name: of the source's folder.
    """

    def __init__(self, store: Store, name: str) -> None:
        self.name = name
        self._store, self._folder = store, f"{names.FOLLOW}/{name}"
        self._lock = threading.Lock()  # guards what is appended below
        self._last = ""  # checksum of the last listing
        self._ends: list[int] = []
        self.known: list[Listing] = []
        self.uid = ""  # of the first one

    def refresh(self) -> bool:
        """Read what was appended; whether there was anything.

        Raises:
            EntryError: a listing is gone or damaged, or follows another one than was read.
        """
        with self._lock:
            before = len(self.known)
            there = set(self._store.list(self._folder))
            if before and f"{before - 1:09d}.json" not in there:
                raise EntryError(f"{self._store.url}/{self._folder}", "its listings are gone", REMEDY)
            while f"{len(self.known):09d}.json" in there:
                self._take(self._store.read(self._path(len(self.known))))
            return len(self.known) > before

    def append(self, listing: Listing) -> bool:
        """Make the next listing; False: somebody else made it first, or a later one. Either way `known` is up to date then."""
        with self._lock:
            number = len(self.known)
            fields = {
                "version": 1,
                "uid": uuid.uuid4().hex if number == 0 else self.uid,
                "before": self._last,
                "slices": list(listing.slices),
                "contents": list(listing.contents),
                "files": dict(listing.files),
                "first_row": listing.first_row,
            }
            made = self._store.create(self._path(number), _json(fields))
        self.refresh()
        return made

    @property
    def num_slices(self) -> int:
        """Slices of all listings."""
        return self.known[-1].first_slice + len(self.known[-1].slices) if self.known else 0

    @property
    def num_groups(self) -> int:
        """Rows of the source in all listings."""
        return self._ends[-1] if self._ends else 0

    @property
    def ends(self) -> Int64s:
        """int64 [K], rows of the source in each listing and all before it."""
        return np.array(self._ends, np.int64)

    def _path(self, number: int) -> str:
        return f"{self._folder}/{number:09d}.json"

    def _take(self, data: bytes) -> None:
        """Called under the lock."""
        where = f"{self._store.url}/{self._path(len(self.known))}"
        try:
            raw = json.loads(data)
            uid, before = str(raw["uid"]), str(raw["before"])
            listing = Listing(self.num_slices, raw["slices"], raw["contents"], raw["files"], raw["first_row"])
            fits = raw["version"] == 1 and len(listing.contents) == len(listing.slices) == len(listing.groups)
            first = self.num_slices
            fits &= [one["index"] for one in listing.slices] == list(
                range(first, first + len(listing.slices))
            )
        except (ValueError, TypeError, KeyError) as error:
            raise EntryError(where, f"cannot be understood ({type(error).__name__})", REMEDY) from None
        if not fits or before != self._last or (self.known and uid != self.uid):
            raise EntryError(where, "does not go on from the listing before it", REMEDY)
        self._last, self.uid = hashlib.sha256(data).hexdigest(), uid
        self._ends.append(self.num_groups + int(listing.groups.sum()))
        self.known.append(listing)


def _json(fields: Mapping[str, Any]) -> bytes:
    return json.dumps(fields, sort_keys=True, separators=(",", ":")).encode()
