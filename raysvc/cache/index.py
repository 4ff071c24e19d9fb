"""One empty file per finished entry in `<root>/.index`, so that a miss is explained by one listing.

The name of a record is the entry's folder and a short hash of each field of its recipe:
`<folder>=<8 hex digits><8 hex digits>...`. The entry that is nearest to a recipe is the one that shares most fields.

Always true:
- a record explains and decides nothing: an entry without one is found and opened all the same;
- gc writes the records that are missing, and removes those of entries that are gone.
"""

from __future__ import annotations

import hashlib
import logging
import re
from collections.abc import Mapping, Sequence
from typing import Any

from raysvc.cache import names
from raysvc.cache.key import canonical_json
from raysvc.cache.store.store import Found, Store
from raysvc.errors import StoreError

MAX_FIELDS = 14  # a file name has at most 255 bytes
RECORD = re.compile(r"([^=/]{1,135})=((?:[0-9a-f]{8}){0,14})")
logger = logging.getLogger(__name__)


def note(store: Store, folder: str, recipe: Mapping[str, Any]) -> None:
    """Write the record of a finished entry, where the root can be written."""
    try:
        store.create(f"{names.INDEX}/{folder}={''.join(sorted(_hashes(recipe)))}", b"")
    except (StoreError, OSError) as error:
        logger.info("entry not indexed uri=%s/%s error=%s", store.url, folder, error)


def folder_of_record(name: str) -> str | None:
    """The entry's folder; None when the name is no record's."""
    match = RECORD.fullmatch(name)
    return match[1] if match and names.split_folder(match[1]) else None


def nearest_folders(store: Store, recipe: Mapping[str, Any], limit: int) -> list[str]:
    """Entries that share most fields with a recipe, the newest first among equals; one listing."""
    wanted = _hashes(recipe)

    def distance(item: Found) -> tuple[int, float, str]:
        digits = item.name.partition("=")[2]
        shared = wanted & {digits[at : at + 8] for at in range(0, len(digits), 8)}
        return -len(shared), -item.modified_s, item.name

    records: Sequence[Found] = [item for item in store.scan(names.INDEX) if folder_of_record(item.name)]
    return [item.name.partition("=")[0] for item in sorted(records, key=distance)[:limit]]


def _hashes(recipe: Mapping[str, Any]) -> set[str]:
    fields = sorted(recipe)[:MAX_FIELDS]
    return {hashlib.sha256(canonical_json([name, recipe[name]])).hexdigest()[:8] for name in fields}
