"""Names inside a cache root, and the only shapes that are accepted from outside.

    <root>/<key>/           first build of a key
    <root>/<key>.<n>/       n-th rebuild of it (`force`, or after damage)
        part-<slice>-<uid>.arrow       receipt-<slice>-<uid>.json
        manifest.json   state.json   dataset_info.json
        parts-<uid>.bin                table of the parts where they are many, see `raysvc.cache.part_table`
        tokenizer.json  use-<uid>.json  used-<uid>.json  deleting.json  damaged.json
        media-<uid>.bin                digests of its media, see `raysvc.media.media_index`
        shared-<folder>.json           the entry in that folder adds columns to this one's rows
        followed.json                  its source has no end, so it never has a manifest
    <root>/.media/<2 digits>/<sha256>      encoded media of rows, see `raysvc.media.media_store`
    <root>/.index/          one empty file per finished entry, see `raysvc.cache.index`
    <root>/.scans/          what was found out about source files, see `raysvc.pipelines.sources.scan_memo`
    <root>/.follow/<name>/  listings of a source that is followed, see `raysvc.cache.growing.listings`

Always true:
- a name that matches holds no separator and no dot at its start, so it cannot leave its folder.
"""

from __future__ import annotations

import re
import uuid
from typing import Any

from raysvc.errors import EntryError

MANIFEST = "manifest.json"
STATE = "state.json"
DATASET_INFO = "dataset_info.json"
DELETING = "deleting.json"
DAMAGED = "damaged.json"
TOKENIZER = "tokenizer.json"
FOLLOWED = "followed.json"
FOLLOW = ".follow"
SCANS = ".scans"
INDEX = ".index"
KEY = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,127}")
FOLDER = re.compile(r"([A-Za-z0-9][A-Za-z0-9_-]{0,127})(?:\.([1-9][0-9]{0,5}))?")
PART = re.compile(r"part-([0-9]{5,9})-[0-9a-f]{16}\.arrow")
PARTS = re.compile(r"parts-[0-9a-f]{16}\.bin")
RECEIPT = re.compile(r"receipt-([0-9]{5,9})-[0-9a-f]{16}\.json")
USE = re.compile(r"use-[0-9a-f]{16}\.json")
USED = re.compile(r"used-[0-9a-f]{16}\.json")
SHARED = re.compile(rf"shared-({FOLDER.pattern})\.json")
MAY_LACK: dict[str, Any] = {
    "media": None,
    "media_tokens": 0,
    "media_patches": 0,
}  # per-row columns -> a row of an entry without
MANY = ("part-", "receipt-")  # how names begin of which a folder may have very many


def new_part(slice_index: int) -> tuple[str, str]:
    """Fresh names of a part and of its receipt."""
    uid = uuid.uuid4().hex[:16]
    return f"part-{slice_index:05d}-{uid}.arrow", f"receipt-{slice_index:05d}-{uid}.json"


def new_parts() -> str:
    """A fresh name of a table of parts."""
    return f"parts-{uuid.uuid4().hex[:16]}.bin"


def new_use() -> str:
    """A fresh name of a marker that says an entry is in use."""
    return f"use-{uuid.uuid4().hex[:16]}.json"


def new_used() -> str:
    """A fresh name of a sign that an entry was used."""
    return f"used-{uuid.uuid4().hex[:16]}.json"


def shared_with(folder: str) -> str:
    """The name of a marker that says that the entry in `folder` needs this one's parts."""
    return f"shared-{folder}.json"


def folder_of(key: str, generation: int = 0) -> str:
    """The folder of one generation of a key.

    Raises:
        EntryError: a key that is not one plain name.
    """
    if not KEY.fullmatch(key):
        raise EntryError(
            repr(key), "is not the key of an entry", "use the 64 hex digits that `raysvc cache ls` shows"
        )
    return f"{key}.{generation}" if generation else key


def split_folder(folder: str) -> tuple[str, int] | None:
    """Key and generation of a folder's name; None when it is no entry's."""
    match = FOLDER.fullmatch(folder)
    return (match[1], int(match[2] or 0)) if match else None
