"""Opens source files: their content as a stream, or any range of it, verified to be what the scan saw.

What a worker reads goes through the digests of the scan (`pins`). Uncompressed files are read by ranges. Compressed ones,
and those on a server that ignores ranges, are read from their beginning; a process keeps the last such stream open,
so that the next slice of the file goes on where it stands.

Always true:
- no byte is handed out that was not compared with the scan;
- a stream is read in blocks: what is held is one block and what was asked for, of a store up to `RANGES_AT_ONCE` blocks in all;
- whatever cannot be read is a SourceError that names the file.
"""

from __future__ import annotations

import io
import os
import threading
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any, ClassVar

import fsspec
import pyarrow as pa
from fsspec.spec import AbstractBufferedFile

from raysvc.errors import RaysvcError, SourceError
from raysvc.pipelines.reading.pins import Pins, changed
from raysvc.pipelines.sources.files import COMPRESSED, name_of
from raysvc.redact import redacted

READ_AHEAD_BYTES = 8 << 20  # of a remote file that is read in small steps
RANGE_BYTES = 8 << 20  # of one request while a file of a store streams
RANGES_AT_ONCE = 16  # of all files that stream: one connection of S3 gives some 50 to 100 MB/s
CODECS = {".gz": "gzip", ".bz2": "bz2", ".zst": "zstd"}
Options = dict[str, Any]


class NoRanges(Exception):
    """A server gave something else than the range that was asked for."""


@contextmanager
def reading(path: str) -> Iterator[None]:
    """Whatever the library of a store or a codec raises becomes an error that names the file."""
    try:
        yield
    except (RaysvcError, NoRanges, GeneratorExit):
        raise
    except Exception as error:  # noqa: BLE001 - every store and codec has errors of its own
        if type(error).__name__ == "FileExpired":  # of s3fs: another object than when it was opened
            raise changed(path) from None
        text = redacted(str(error)).strip().split("\n")[0] or type(error).__name__
        cause = error if redacted(path) == path else None  # a traceback would show the address
        raise SourceError(
            f"source file {path!r}", f"cannot be read: {text}", "check that it is complete and readable"
        ) from cause


def is_compressed(path: str) -> bool:
    """Tells by its ending whether a file is compressed."""
    return name_of(path).endswith(COMPRESSED)


def file_system(path: str, options: Options) -> tuple[Any, str]:
    """The file system of a path and the path's name there; a slow web server may take its time."""
    if path.startswith(("http://", "https://")):
        import aiohttp

        timeout = aiohttp.ClientTimeout(total=None, sock_connect=30, sock_read=120)
        options = {**options, "client_kwargs": {"timeout": timeout, **options.get("client_kwargs", {})}}
    fs, name = fsspec.core.url_to_fs(path, **options)
    return fs, str(name)


class ContentStream:
    """The content of a file from its beginning, uncompressed."""

    def __init__(self, path: str, options: Options) -> None:
        self._path = path
        with reading(path):
            self._raw = _open_raw(path, options)
            self._stream = _decompressed(self._raw, path)

    def read(self, num_bytes: int) -> bytes:
        """Reads so many bytes; returns fewer only at the end.

        Raises:
            SourceError: the file ends in the middle of its compressed data, or cannot be read.
        """
        with reading(self._path):
            data = self._stream.read(num_bytes)
            if len(data) == num_bytes:
                return bytes(data)
            parts = [data]
            missing = num_bytes - len(data)
            while missing and (data := self._stream.read(missing)):  # a socket gives what it has
                parts.append(data)
                missing -= len(data)
            return b"".join(parts)

    def read_all(self) -> bytes:
        """All that is left."""
        parts = []
        while block := self.read(READ_AHEAD_BYTES):
            parts.append(block)
        return b"".join(parts)

    @property
    def details(self) -> dict[str, Any]:
        """Returns what an object store said of the object when it was opened."""
        return dict(getattr(self._raw, "details", None) or {})

    def close(self) -> None:
        """Let the file go."""
        for one in (self._stream, self._raw):
            one.close()

    def __enter__(self) -> ContentStream:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _open_raw(path: str, options: Options) -> Any:
    if "://" not in path:
        return open(path, "rb", buffering=0)
    fs, name = file_system(path, options)
    if path.startswith(("http://", "https://")):
        return fs.open(name, "rb", block_size=0)  # one answer, so one version of the file
    raw = fs.open(name, "rb", cache_type="none")
    return _Ranges(raw) if isinstance(raw, AbstractBufferedFile) else raw


class _Ranges(io.RawIOBase):
    """A file of a store from front to back; once the first range was read to its end, others are asked for ahead."""

    _requests: ClassVar[ThreadPoolExecutor]
    _open: ClassVar[set[int]]  # files that share the requests

    @classmethod
    def begin(cls) -> None:
        """Makes the pool of this process: a fork takes the pool along, and none of its threads."""
        cls._requests = ThreadPoolExecutor(RANGES_AT_ONCE, thread_name_prefix="raysvc-ranges")
        cls._open = set()

    def __init__(self, raw: AbstractBufferedFile) -> None:
        super().__init__()
        self.details = getattr(raw, "details", None)
        self._raw = raw
        self._coming: deque[Future[bytes]] = deque()
        self._asked = 0  # bytes
        self._block = memoryview(b"")
        self._open.add(id(self))

    def readable(self) -> bool:
        return True

    def read(self, size: int | None = -1) -> bytes:
        """Returns what is left of a range, at most `size` bytes; nothing at the end."""
        if not self._block:
            ahead = max(2, RANGES_AT_ONCE // len(self._open)) if self._asked else 1
            while len(self._coming) < ahead and self._asked < self._raw.size:
                end = min(self._asked + RANGE_BYTES, self._raw.size)
                self._coming.append(self._requests.submit(self._raw._fetch_range, self._asked, end))
                self._asked = end
            if self._coming:
                self._block = memoryview(self._coming.popleft().result())
        wanted = len(self._block) if size is None or size < 0 else size
        part, self._block = self._block[:wanted], self._block[wanted:]
        return bytes(part)

    def close(self) -> None:
        self._open.discard(id(self))
        for one in self._coming:
            one.cancel()
        self._raw.close()
        super().close()


_Ranges.begin()
os.register_at_fork(after_in_child=_Ranges.begin)


def _decompressed(raw: Any, path: str) -> Any:
    ending = os.path.splitext(name_of(path))[1]
    if ending == ".xz":
        import lzma

        return lzma.LZMAFile(raw)
    if ending in CODECS:
        return pa.CompressedInputStream(pa.PythonFile(raw, mode="r"), CODECS[ending])
    return raw


class _Cursor:
    """Stands somewhere in a stream of whole blocks and goes forward."""

    def __init__(self, path: str, options: Options, block_bytes: int) -> None:
        self.path, self.options, self.block_bytes = path, options, block_bytes
        self._stream = ContentStream(path, options)
        self._next = 0  # index of the block that is read next
        self._last = b""  # the block before it

    def can_reach(self, start: int) -> bool:
        return start // self.block_bytes >= self._next - 1

    def read(self, start: int, end: int, pins: Pins) -> bytearray:
        """Whole blocks around the range, compared.

        Raises:
            SourceError: the bytes are not those that the scan saw.
        """
        first = start // self.block_bytes
        while self._next <= first:
            self._step()
        low, high = pins.aligned(start, end)
        data = bytearray(self._last)
        while low + len(data) < high:
            data += self._step()
        if low + len(data) != high:
            raise changed(self.path)
        pins.check(low, memoryview(data), self.path)
        return data

    def _step(self) -> bytes:
        self._last = self._stream.read(self.block_bytes)
        if not self._last:
            raise changed(self.path)
        self._next += 1
        return self._last

    def close(self) -> None:
        self._stream.close()


class _KeptStream:
    """Keeps at most one open stream of this process."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._cursor: _Cursor | None = None  # taken out while it is used

    def read(self, path: str, options: Options, start: int, end: int, pins: Pins) -> bytes:
        """The range, from the stream that is open, or from a new one if that one is past it or broke."""
        kept = self._take(path, options, pins, start)
        if kept is not None:
            try:
                return self._read(kept, start, end, pins)
            except SourceError:
                kept.close()  # it may have been open for long: the file decides, read again
        return self._read(_Cursor(path, options, pins.block_bytes), start, end, pins)

    def _read(self, cursor: _Cursor, start: int, end: int, pins: Pins) -> bytes:
        try:
            data = cursor.read(start, end, pins)
        except BaseException:
            cursor.close()
            raise
        if end < pins.size:
            self._put(cursor)
        else:
            cursor.close()
        low, _ = pins.aligned(start, end)
        return bytes(memoryview(data)[start - low : end - low])

    def _take(self, path: str, options: Options, pins: Pins, start: int) -> _Cursor | None:
        with self._lock:
            kept, self._cursor = self._cursor, None
        if kept is None:
            return None
        same = (kept.path, kept.options, kept.block_bytes) == (path, options, pins.block_bytes)
        if same and kept.can_reach(start):
            return kept
        kept.close()
        return None

    def _put(self, cursor: _Cursor) -> None:
        with self._lock:
            other, self._cursor = self._cursor, cursor
        if other is not None:
            other.close()


_kept = _KeptStream()


def read_content(path: str, options: Options, start: int, end: int, pins: Pins) -> bytes:
    """Bytes [start, end) of a file's content.

    Raises:
        SourceError: it is not what was scanned any more, or cannot be read.
    """
    with reading(path):
        if not is_compressed(path):
            try:
                return _proved_range(path, options, start, end, pins)
            except NoRanges:
                pass
        return _kept.read(path, options, start, end, pins)


def _proved_range(path: str, options: Options, start: int, end: int, pins: Pins) -> bytes:
    low, high = pins.aligned(start, end)
    data = _range(path, options, low, high, pins.size)
    if len(data) > high - low:
        raise NoRanges(path)
    if len(data) < high - low:
        raise changed(path)
    pins.check(low, memoryview(data), path)
    return data if (low, high) == (start, end) else data[start - low : end - low]


def _range(path: str, options: Options, start: int, end: int, size: int) -> bytes:
    if "://" not in path:
        with open(path, "rb", buffering=0) as file:
            file.seek(start)
            return file.read(end - start)
    fs, name = file_system(path, options)
    if not path.startswith(("http://", "https://")):
        return bytes(fs.cat_file(name, start=start, end=end))
    with fs.open(name, "rb", size=size, cache_type="none") as file:
        try:
            file.seek(start)
            return bytes(file.read(end - start))
        except ValueError as error:  # how fsspec says that the server ignores ranges
            raise NoRanges(path) from error


class PinnedFile(io.RawIOBase):
    """A file that can be read anywhere, for formats that need that; holds the last range it read.

    Attributes:
        stop: nothing is read ahead behind this byte.
    """

    def __init__(self, path: str, options: Options, pins: Pins) -> None:
        super().__init__()
        self._path, self._options, self._pins = path, options, pins
        self._ahead = READ_AHEAD_BYTES if "://" in path else pins.block_bytes
        self.stop = pins.end
        self._pos = 0
        self._start, self._held = 0, b""
        if is_compressed(path):
            self._held = read_content(path, options, 0, pins.size, pins)

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._pos

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self._pos, io.SEEK_END: self._pins.size}[whence]
        self._pos = max(0, base + offset)
        return self._pos

    def read(self, size: int | None = -1) -> bytes:
        wanted = self._pins.size if size is None or size < 0 else self._pos + size
        end = min(wanted, self._pins.size)
        if end <= self._pos:
            return b""
        if not (self._start <= self._pos and end <= self._start + len(self._held)):
            wanted = max(end, min(self._pos + self._ahead, self.stop))
            self._start, high = self._pins.aligned(self._pos, wanted)
            self._held = read_content(self._path, self._options, self._start, high, self._pins)
        data = self._held[self._pos - self._start : end - self._start]
        self._pos = end
        return data

    def readall(self) -> bytes:
        return self.read()

    def readinto(self, buffer: Any) -> int:
        view = memoryview(buffer).cast("B")
        data = self.read(len(view))
        view[: len(data)] = data
        return len(data)
