"""Rows of a tar of samples, as WebDataset writes them: neighbouring members with one key are one row.

1. The key of a member is its name up to the first dot behind its last slash; the rest is its field, in lower case.
   Members without a key (`dir/`, `.hidden`, `__meta__`, names without a dot) are no part of a row.
2. Row: the keys of an object in field `json`, or a field of its own for any other JSON; `text` for `txt`; text for other fields of
   text (`cls`, `caption.txt`, ...); all images as column `images`, sounds as `audios` and videos as `videos`, in the order of
   the tar.

Always true:
- a tar that is cut off, damaged, or goes on behind its end is an error, never fewer rows;
- members may lie anywhere: a range of whole samples is read without what stands before it;
- a sample that cannot be read as a row is a row with an error.
"""

from __future__ import annotations

import io
import tarfile
from collections.abc import Callable, Iterator
from itertools import groupby
from typing import Any, NamedTuple

from raysvc.chat.source.json_rows import SourceRow, load_json

BLOCK = 512
READ_BYTES = 8 << 20
END = bytes(BLOCK)
IMAGES = ("jpg", "jpeg", "png", "webp", "gif", "bmp")
VIDEOS = ("mp4", "mov", "webm", "mkv", "avi")
SOUNDS = ("wav", "mp3", "flac", "ogg", "m4a", "opus")
_FILES = (tarfile.REGTYPE, tarfile.AREGTYPE, tarfile.CONTTYPE)
_NAMES = {tarfile.GNUTYPE_LONGNAME, tarfile.XHDTYPE, tarfile.SOLARIS_XHDTYPE}
_BESIDE = {tarfile.GNUTYPE_LONGLINK, tarfile.XGLTYPE, tarfile.DIRTYPE}
Read = Callable[[int], bytes]  # so many bytes; fewer only at the end


class Member(NamedTuple):
    """A file of a tar: its sample and field, the byte behind it, and its content where it was kept."""

    key: str
    field: str
    end: int
    data: bytes


def members(read: Read, keep: bool, whole: bool = True) -> Iterator[Member]:
    """The files of a tar that have a key, in order.

    Args:
        read: its bytes from where a member begins.
        keep: their content, which is skipped otherwise.
        whole: the bytes end with the tar, and not between two members.

    Raises:
        TarError: it is cut off or damaged, or has links or sparse files.
    """
    at, start, long_name, size_told = 0, 0, "", -1
    while (head := read(BLOCK)) != END:
        if not head and not whole and start == at:
            return
        if len(head) < BLOCK:
            raise tarfile.ReadError(f"it is cut off at byte {at + len(head)}")
        try:
            info = tarfile.TarInfo.frombuf(head, "utf-8", "surrogateescape")
        except tarfile.HeaderError as error:
            raise tarfile.ReadError(f"it is damaged at byte {at}: {error}") from None
        at += BLOCK
        size = info.size if size_told < 0 or info.type in _NAMES | _BESIDE else size_told
        data = _content(read, size, keep or info.type in _NAMES, at, info.name)
        at += -(-size // BLOCK) * BLOCK
        if info.type == tarfile.GNUTYPE_LONGNAME:
            long_name = data.rstrip(b"\0").decode(errors="surrogateescape")
            continue
        if info.type in _NAMES:
            told = _pax(data)
            long_name, size_told = told.get("path", long_name), int(told.get("size", size_told))
            continue
        if info.type not in _FILES and info.type not in _BESIDE:
            raise tarfile.ReadError(f"{info.name!r} is a link or a device, and samples are files")
        name = long_name or info.name
        if info.type in _FILES and (parts := _key_and_field(name)):
            yield Member(*parts, at, data)
        start, long_name, size_told = at, "", -1
    while block := read(READ_BYTES):
        if block.strip(b"\0"):
            raise tarfile.ReadError(f"it goes on behind its end at byte {at}: was it joined with another?")


def sample_ends(read: Read) -> Iterator[int]:
    """The byte behind each sample of a tar."""
    for _, own in groupby(members(read, keep=False), key=lambda one: one.key):
        *_, last = own
        yield last.end


def tar_rows(data: bytes, first_row: int) -> Iterator[SourceRow]:
    """The rows of whole samples.

    Args:
        data: of a tar, or a part of one that begins and ends between samples.
        first_row: number of the first.
    """
    yield from rows_of_stream(io.BytesIO(data).read, first_row, whole=False)


def rows_of_stream(read: Read, first_row: int, whole: bool) -> Iterator[SourceRow]:
    """The same of a tar that comes bit by bit."""
    found = groupby(members(read, keep=True, whole=whole), key=lambda one: one.key)
    for number, (key, own) in enumerate(found, start=first_row):
        try:
            yield SourceRow(number, _row(key, own), odd=True)
        except (ValueError, RecursionError) as error:
            yield SourceRow(number, None, f"a sample of a tar cannot be read: {key!r}: {str(error)[:200]}")


def _row(key: str, own: Iterator[Member]) -> dict[str, Any]:
    row: dict[str, Any] = {"__key__": key}
    seen: set[str] = set()
    told: dict[str, Any] = {}
    for member in own:
        if member.field in seen:
            raise ValueError(f"it has {member.field!r} twice")
        seen.add(member.field)
        ending = member.field.rpartition(".")[2]
        endings = {"images": IMAGES, "audios": SOUNDS, "videos": VIDEOS}
        media = next((column for column, known in endings.items() if ending in known), None)
        if media:
            row.setdefault(media, []).append({"bytes": member.data, "path": f"{key}.{member.field}"})
        elif ending == "json":
            value = load_json(member.data)
            told |= value if isinstance(value, dict) else {member.field.removesuffix(".json"): value}
        else:
            told["text" if member.field == "txt" else member.field] = member.data.decode()
    if both := sorted(row.keys() & told.keys()):
        raise ValueError(f"both its files and its JSON have {', '.join(both)}")
    return row | told


def _key_and_field(name: str) -> tuple[str, str] | None:
    folder, slash, base = name.rpartition("/")
    stem, dot, field = base.partition(".")
    if not (stem and dot and field) or (stem.startswith("__") and stem.endswith("__")):
        return None
    return f"{folder}{slash}{stem}", field.lower()


def _content(read: Read, size: int, keep: bool, at: int, name: str) -> bytes:
    """The bytes of a member, and past its padding."""
    left, kept = -(-size // BLOCK) * BLOCK, []
    while left:
        block = read(min(left, READ_BYTES))
        if not block:
            raise tarfile.ReadError(f"it is cut off inside of {name!r}, which begins at byte {at}")
        left -= len(block)
        if keep:
            kept.append(block)
    return b"".join(kept)[:size]


def _pax(data: bytes) -> dict[str, str]:
    """Records `<length> <name>=<value>\\n` (POSIX.1-2001)."""
    found, at = {}, 0
    while at < len(data):
        digits, _, _ = data[at : at + 20].partition(b" ")
        if not digits.isdigit() or not int(digits):
            raise tarfile.ReadError("an extended header is damaged")
        name, _, value = data[at + len(digits) + 1 : at + int(digits) - 1].partition(b"=")
        found[name.decode(errors="surrogateescape")] = value.decode(errors="surrogateescape")
        at += int(digits)
    return found
