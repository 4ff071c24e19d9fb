"""A sign in an entry's folder that somebody reads it, for `collect_garbage`.

Always true:
- a marker is never changed: renewing writes a new one and then removes the old one;
- a marker counts for `USE_TTL_S` by the store's clock, so one left by a killed reader ends by itself;
- whoever holds an entry looked after writing the marker that no removal had begun.
"""

from __future__ import annotations

import json
import logging
import uuid
from types import TracebackType
from typing import Self

from raysvc.cache import names
from raysvc.cache.store.store import Store
from raysvc.errors import EntryError, StoreError

USE_TTL_S = 3600.0
logger = logging.getLogger(__name__)


class Hold:
    """Keeps one entry from being removed; `renew` at least twice in `USE_TTL_S`, `release` at the end."""

    def __init__(self, store: Store, folder: str, owner: str) -> None:
        """Write the first marker.

        Args:
            store: of the entry.
            folder: of the entry.
            owner: who reads, for display.

        Raises:
            EntryError: a removal has begun.
        """
        self.store, self.folder, self.owner = store, folder, owner
        self._marker: str | None = None
        self.renew()
        if names.DOOMED in store.list(folder):
            self.release()
            raise EntryError(f"{store.url}/{folder}", "it is being removed by gc", "build it again")

    def renew(self) -> None:
        """Write a new marker; a store that cannot be written leaves the entry without one, and says so."""
        fresh = names.new_use()
        try:
            self.store.write(f"{self.folder}/{fresh}", json.dumps({"owner": self.owner}).encode())
        except (StoreError, OSError) as error:
            logger.warning("entry not marked as used uri=%s/%s error=%s", self.store.url, self.folder, error)
            return
        self.release()
        self._marker = fresh

    def release(self) -> None:
        """Remove the marker."""
        if self._marker is not None:
            self.store.delete(f"{self.folder}/{self._marker}")
            self._marker = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release()


def store_now(store: Store) -> float:
    """Seconds since 1970 by the clock that the store's listings use."""
    name = f".clock-{uuid.uuid4().hex}"
    store.write(name, b"now")
    try:
        return next(item.modified_s for item in store.scan() if item.name == name)
    finally:
        store.delete(name)
