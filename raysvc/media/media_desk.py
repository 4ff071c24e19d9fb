"""Takes a medium as a row names it: reads its bytes, measures them, and keeps them by their digest.

| a row says | bytes |
|---|---|
| `data:image/png;base64,...`, or `{"bytes": ..., "path": ...}` with bytes | those |
| a path | of that file, relative to the folder of the row's own file, where `reference` allows it |
| a URL | what lies there, where `reference` allows it |
| bare base64 of at least 64 characters, where a part says `base64` | those |

Always true:
- what cannot be read or measured is a `RowFault` with a reason of its own;
- a file is read up to `MAX_BYTES`, and measured before anything is kept;
- media are written while further rows are read, at most `WRITES` at a time, for a disk or store takes longer than all the rest;
- after `settle` every medium that was taken is written, and a write that failed has raised there.
"""

from __future__ import annotations

import base64
import binascii
from collections import OrderedDict
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any
from urllib.parse import unquote_to_bytes

from raysvc.cache.store.store import Store
from raysvc.chat.row_errors import RowFault
from raysvc.media.kinds import WORDS, Kind, size_of
from raysvc.media.media_processor import MediaProcessor
from raysvc.media.media_store import digest_of, read_medium, write_medium
from raysvc.media.pixels import MAX_PIXELS
from raysvc.media.reference import NotAllowed

UNREADABLE = "cannot be read"
REFUSED = "may not be named by a row"
REMEDY = "source.media: {allow: [...]} names hosts, buckets and folders of media"
MAX_BYTES = 1 << 28
PATHS_KEPT = 4096
WRITES = 16
Fetch = Callable[[str, str, int], bytes]  # (path or URL, folder of the row's file, most bytes) -> bytes


@dataclass(frozen=True)
class StoredMedium:
    """A medium that was read.

    Attributes:
        sha256: of its bytes.
        size: as its kind has it.
        num_bytes: encoded.
    """

    sha256: str
    size: tuple[int, ...]
    num_bytes: int


class MediaDesk:
    """Takes the media of one build.

    Args:
        processor: that counts tokens.
        store: where bytes are kept; None keeps them in memory, for a look at a row.
        fetch: reads a file; raises FileNotFoundError or OSError.
        max_pixels: of an image.
    """

    def __init__(
        self, processor: MediaProcessor, store: Store | None, fetch: Fetch, max_pixels: int = MAX_PIXELS
    ) -> None:
        self.processor = processor
        self.folder_of: Callable[[int], str] = lambda source_row: ""  # folder of the file of a row
        self._folder = ""  # of the row that is read now
        self._store, self._fetch, self._max_pixels = store, fetch, max_pixels
        self._memory: dict[str, bytes] = {}
        self._paths: OrderedDict[tuple[Kind, str, str], StoredMedium] = OrderedDict()
        self._writer: ThreadPoolExecutor | None = None  # begun with the first medium
        self._writing: OrderedDict[str, Future[str]] = OrderedDict()  # digest -> its write, oldest first

    def go_to(self, source_row: int) -> None:
        """Say which row is read now: its paths are relative to the folder of its file."""
        self._folder = self.folder_of(source_row)

    def take(self, kind: Kind, source: Any) -> StoredMedium:
        """Read, measure and keep a medium.

        Args:
            kind: that it should be of.
            source: as the row names it.

        Raises:
            RowFault: it is missing, broken, too large, or of a kind that is not read.
        """
        if isinstance(source, Mapping):
            named = (source.get(name) for name in ("bytes", "url", "path"))
            source = next((one for one in named if one is not None), None)
        if isinstance(source, bytes | bytearray | memoryview):
            return self._keep(kind, bytes(source))
        if not isinstance(source, str) or not source:
            why = "is missing" if not source else "is named in no way that is read"
            raise _fault(kind, why, f"it is a {type(source).__name__}")
        if source.startswith("data:"):
            return self._keep(kind, _of_data_url(source))
        where = (kind, self._folder, source)
        if where in self._paths:
            self._paths.move_to_end(where)
            return self._paths[where]
        taken = self._paths[where] = self._keep(kind, self._read(kind, source))
        if len(self._paths) > PATHS_KEPT:
            self._paths.popitem(last=False)
        return taken

    def bytes_of(self, sha256: str) -> bytes:
        """Returns the bytes of a medium that was taken."""
        if self._store is None:
            return self._memory[sha256]
        if sha256 in self._writing:
            self._writing[sha256].result()
        return read_medium(self._store, sha256)

    def settle(self) -> None:
        """Wait until all media that were taken are written; before anything is written that refers to them.

        Raises:
            StoreError: one was not.
        """
        writes, self._writing = self._writing, OrderedDict()
        for write in writes.values():
            write.result()

    def _read(self, kind: Kind, source: str) -> bytes:
        try:
            data = self._fetch(source, self._folder, MAX_BYTES)
        except (FileNotFoundError, IsADirectoryError, NotADirectoryError):
            if len(source) >= 64 and (found := _base64(source)):
                return found
            raise _fault(kind, "is missing", _short(source)) from None
        except (OSError, ValueError, ImportError) as error:
            if len(source) >= 64 and (found := _base64(source)):
                return found
            if isinstance(error, NotAllowed):
                raise _fault(kind, REFUSED, f"{_short(source)}: {error}; {REMEDY}") from None
            raise _fault(kind, UNREADABLE, f"{_short(source)}: {_short(str(error))}") from None
        if len(data) > MAX_BYTES:
            raise _fault(kind, UNREADABLE, f"{_short(source)} has more than {MAX_BYTES} bytes")
        return data

    def _keep(self, kind: Kind, data: bytes) -> StoredMedium:
        size, digest = size_of(kind, data, self._max_pixels), digest_of(data)
        if self._store is None:
            self._memory[digest] = data
        elif digest not in self._writing:
            self._writer = self._writer or ThreadPoolExecutor(WRITES, "raysvc-media")
            if len(self._writing) >= 2 * WRITES:
                self._writing.popitem(last=False)[1].result()
            self._writing[digest] = self._writer.submit(write_medium, self._store, data)
        return StoredMedium(digest, size, len(data))


def _fault(kind: Kind, why: str, detail: str) -> RowFault:
    return RowFault(f"{WORDS[kind].one} {why}", detail)


def _of_data_url(text: str) -> bytes:
    head, comma, body = text.partition(",")
    if not comma:
        raise RowFault("a data URL is broken", _short(text))
    if not head.endswith(";base64"):
        return unquote_to_bytes(body)
    found = _base64(body)
    if not found:
        raise RowFault("a data URL is broken", _short(text))
    return found


def _base64(text: str) -> bytes:
    """Decoded; nothing where it is not base64."""
    try:
        return base64.b64decode("".join(text.split()), validate=True)
    except (binascii.Error, ValueError):
        return b""


def _short(text: str) -> str:
    return text if len(text) <= 120 else f"{text[:100]}... ({len(text)} characters)"
