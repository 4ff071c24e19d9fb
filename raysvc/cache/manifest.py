"""What a finished entry says of itself: parts, counts, checksums, report and recipe.

Always true:
- a manifest that parses is safe to act on: part names stay in the folder, counts add up, types are right;
- the recipe hashes to the key, and the columns that a trainer needs are there, in its own parts or in those of its base;
- its own checksum covers every other field, so a flipped byte anywhere in it is found;
- a manifest of a newer format is refused with the version that reads it.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from raysvc.cache import names
from raysvc.cache.key import cache_key, canonical_json
from raysvc.cache.local.checksum import BLOCK, DIGITS
from raysvc.errors import EntryError, EntryTooNew

FORMAT = 2  # of an entry with a base; others are written as 1, which every version reads
READABLE_SINCE = "0.1.0"
ADDED = "added"  # field of a recipe: what was added to a base, oldest first; each names the key that it was added to
MAX_BYTES = 1 << 28
MOST_BLOCKS = MAX_BYTES // 2  # bytes that the checksums of blocks may take of it: those of 2.2 TB of parts
REBUILD = "build it again with cache.force: true"
_VERSION = re.compile(r"[0-9A-Za-z.+-]{1,40}")
_CHECKSUM = re.compile(r"[0-9a-f]{32}")
_BLOCKS = re.compile(r"[0-9a-f]*")
_NUMBERS = ["int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"]
_NUMBERS += ["float16", "float32", "float64", "bool"]
REQUIRED = {"input_ids": "list<int32>", "loss_mask": "list<uint8>"}
_NUMBER = "|".join([*_NUMBERS, "bfloat16"])
_COLUMN_TYPE = re.compile(
    rf"string|(list<)?({_NUMBER})(\[[1-9][0-9]{{0,8}}(,[1-9][0-9]{{0,8}}){{0,3}}\])?(>)?"
)


def is_column_type(kind: str) -> bool:
    """Whether a part can hold a column of this type: text, numbers, or numbers of a shape; each also per token.

    >>> [is_column_type(kind) for kind in ("string", "list<uint8[94,8]>", "bfloat16[4]", "list<string>")]
    [True, True, True, False]
    """
    match = _COLUMN_TYPE.fullmatch(kind)
    return match is not None and (match[1] is None) == (match[5] is None)


@dataclass(frozen=True)
class PartInfo:
    """One Arrow IPC stream file that holds exactly one record batch.

    Attributes:
        name: file in the entry's folder.
        num_rows, num_tokens: what it holds.
        num_bytes: size of the file.
        checksum: XXH3-128 of the whole file, 32 hex digits.
        offsets_start: where in the file the token offsets lie, int32 [num_rows + 1]; 0 without rows.
        offsets_checksum: of these bytes, so that lengths can be read alone.
        blocks: checksums of the blocks of the file, see `raysvc.cache.local.checksum`; empty: the whole
            file is compared when it is read first.
    """

    name: str
    num_rows: int
    num_tokens: int
    num_bytes: int
    checksum: str
    offsets_start: int
    offsets_checksum: str
    blocks: str = ""


@dataclass(frozen=True)
class Receipt:
    """Evidence that one slice is finished: its part is complete and durable.

    Attributes:
        slice_index: which slice.
        part: the file that holds its rows.
        columns: column name -> type.
        meta: JSON of the slice's maker (row counts, quarantined examples).
    """

    slice_index: int
    part: PartInfo
    columns: Mapping[str, str]
    meta: Mapping[str, Any] = field(default_factory=dict)

    def to_json(self) -> bytes:
        """Bytes of the receipt's file."""
        return canonical_json(_sealed(asdict(self)))

    @classmethod
    def from_json(cls, data: bytes, where: str) -> Receipt:
        """Parse and check; EntryError with `where` when anything is off.

        Raises:
            EntryError: it is damaged.
        """
        raw = _opened(data, where)
        receipt = cls(
            slice_index=_count(raw, "slice_index", where),
            part=_part(_mapping(raw, "part", where), where),
            columns=_columns(raw, where, {}),
            meta=_mapping(raw, "meta", where),
        )
        if not (match := names.PART.fullmatch(receipt.part.name)) or int(match[1]) != receipt.slice_index:
            raise _damaged(where, f"the part {receipt.part.name!r} belongs to another slice")
        return receipt


@dataclass(frozen=True)
class Manifest:
    """The file whose presence means "finished".

    Attributes:
        key: hash of the recipe.
        parts: in row order.
        columns: column name -> type.
        recipe: what decided the bytes.
        report: what the builder tells the user.
        base: folder, in the same root, of the entry whose rows these are: then parts and columns are those that were
            added to it, and a part ends where its builder chose. Empty: the parts hold whole rows.
    """

    key: str
    parts: tuple[PartInfo, ...]
    columns: Mapping[str, str]
    recipe: Mapping[str, Any]
    report: Mapping[str, Any] = field(default_factory=dict)
    base: str = ""

    @property
    def num_rows(self) -> int:
        """Rows of all parts."""
        return sum(part.num_rows for part in self.parts)

    @property
    def num_tokens(self) -> int:
        """Tokens of all parts."""
        return sum(part.num_tokens for part in self.parts)

    @property
    def num_bytes(self) -> int:
        """Bytes of all parts."""
        return sum(part.num_bytes for part in self.parts)

    def that_fits(self) -> Manifest:
        """This manifest; where the checksums of blocks would be more than `MOST_BLOCKS`, without them: whole parts are compared then."""
        if sum(len(part.blocks) for part in self.parts) <= MOST_BLOCKS:
            return self
        return replace(self, parts=tuple(replace(part, blocks="") for part in self.parts))

    def to_json(self) -> bytes:
        """Bytes of `manifest.json`.

        Raises:
            EntryError: they are more than any reader takes.
        """
        counts = {"num_rows": self.num_rows, "num_tokens": self.num_tokens, "num_bytes": self.num_bytes}
        version = {"format": FORMAT if self.base else 1, "readable_since": READABLE_SINCE}
        fields = asdict(self)
        if not self.base:
            del fields["base"]
        data = canonical_json(_sealed(version | counts | fields))
        if len(data) > MAX_BYTES:
            what = f"a manifest of {len(self.parts)} parts would have {len(data)} bytes, and at most {MAX_BYTES} are read"
            raise EntryError(
                self.key, what, "raise workers.slice_mb, or split the source into several entries"
            )
        return data

    @classmethod
    def from_json(cls, data: bytes, where: str) -> Manifest:
        """Parse and check; EntryError with `where` when anything is off.

        Raises:
            EntryError: it is damaged.
        """
        raw = _opened(data, where)
        parts = raw.get("parts")
        if not isinstance(parts, list) or not isinstance(raw.get("key"), str):
            raise _damaged(where, "the fields key and parts are missing or of a wrong type")
        manifest = cls(
            key=raw["key"],
            parts=tuple(_part(part, where) for part in parts),
            columns=_columns(raw, where, {} if raw.get("base") else REQUIRED),
            recipe=_mapping(raw, "recipe", where),
            report=_mapping(raw, "report", where),
            base=_base(raw, where),
        )
        if not names.KEY.fullmatch(manifest.key):
            raise _damaged(where, f"{manifest.key[:80]!r} is not a key")
        if cache_key(dict(manifest.recipe)) != manifest.key:
            raise _damaged(where, "its recipe does not hash to its key")
        if len({part.name for part in manifest.parts}) != len(manifest.parts):
            raise _damaged(where, "a part is named twice")
        if raw.get("num_rows") != manifest.num_rows or raw.get("num_tokens") != manifest.num_tokens:
            raise _damaged(where, "the counts of the parts do not add up to the entry's")
        return manifest


def _sealed(fields: dict[str, Any]) -> dict[str, Any]:
    return fields | {"sha256": hashlib.sha256(canonical_json(fields)).hexdigest()}


def _opened(data: bytes, where: str) -> dict[str, Any]:
    if len(data) > MAX_BYTES:
        raise _damaged(where, f"{len(data)} bytes are more than any manifest has")
    try:
        raw = json.loads(data)
        seal = raw.pop("sha256", None)
        refused = _newer(raw, where)
        intact = refused or seal == hashlib.sha256(canonical_json(raw)).hexdigest()
    except (ValueError, TypeError, AttributeError, KeyError, RecursionError) as error:
        raise _damaged(where, f"it is not the JSON that was written ({type(error).__name__})") from None
    if refused is not None:
        raise refused
    if not intact:
        raise _damaged(where, "its checksum does not match its content")
    return dict(raw)


def _newer(raw: Mapping[str, Any], where: str) -> EntryTooNew | None:
    version, reader = raw.get("format", FORMAT), str(raw.get("readable_since"))
    if type(version) is int and version <= FORMAT:
        return None
    reader = reader if _VERSION.fullmatch(reader) else "a newer version"
    return EntryTooNew(
        where,
        f"it has format {str(version)[:20]}, this raysvc reads up to {FORMAT}",
        f"install raysvc {reader} or newer, or use another cache.root",
    )


def _part(raw: Any, where: str) -> PartInfo:
    if not isinstance(raw, dict):
        raise _damaged(where, "a part is not an object")
    part = PartInfo(
        name=str(raw.get("name")),
        num_rows=_count(raw, "num_rows", where),
        num_tokens=_count(raw, "num_tokens", where),
        num_bytes=_count(raw, "num_bytes", where),
        checksum=str(raw.get("checksum")),
        offsets_start=_count(raw, "offsets_start", where),
        offsets_checksum=str(raw.get("offsets_checksum")),
        blocks=str(raw.get("blocks", "")),
    )
    if not names.PART.fullmatch(part.name):
        raise _damaged(where, f"{part.name[:80]!r} is not the name of a part")
    if not (_CHECKSUM.fullmatch(part.checksum) and _CHECKSUM.fullmatch(part.offsets_checksum)):
        raise _damaged(where, f"a checksum of {part.name} is not one")
    num_blocks = -(-part.num_bytes // BLOCK)
    if part.blocks and (not _BLOCKS.fullmatch(part.blocks) or len(part.blocks) != DIGITS * num_blocks):
        raise _damaged(where, f"the checksums of the blocks of {part.name} are not {num_blocks}")
    if part.offsets_start + 4 * (part.num_rows + 1) > part.num_bytes:
        raise _damaged(where, f"the offsets of {part.name} lie outside the file")
    return part


def _count(raw: Mapping[str, Any], name: str, where: str) -> int:
    value = raw.get(name)
    if type(value) is not int or not 0 <= value < 1 << 62:
        raise _damaged(where, f"{name} is {str(value)[:40]!r}, not a count")
    return value


def _mapping(raw: Mapping[str, Any], name: str, where: str) -> dict[str, Any]:
    value = raw.get(name)
    if not isinstance(value, dict):
        raise _damaged(where, f"{name} is not an object")
    return value


def _base(raw: Mapping[str, Any], where: str) -> str:
    """The folder of the base; by its recipe an entry names its base's key, so no chain of bases has a circle."""
    base = raw.get("base", "")
    if base == "":
        return ""
    split = names.split_folder(base) if isinstance(base, str) else None
    added = _mapping(raw, "recipe", where).get(ADDED)
    last = added[-1] if isinstance(added, list) and added else None
    if split is None or not isinstance(last, dict) or last.get("to") != split[0]:
        raise _damaged(where, "its base is not the entry that its recipe names")
    return str(base)


def _columns(raw: Mapping[str, Any], where: str, required: Mapping[str, str]) -> dict[str, str]:
    value = raw.get("columns")
    pairs_ok = isinstance(value, dict) and all(
        isinstance(kind, str) and is_column_type(kind) for kind in value.values()
    )
    if not pairs_ok or not isinstance(value, dict):
        raise _damaged(where, "columns are not known types")
    if not any(kind.startswith("list<") for kind in value.values()):
        raise _damaged(where, "no column is per token")
    for name, kind in required.items():
        if value.get(name) != kind:
            raise _damaged(where, f"column {name} is {value.get(name, 'missing')}, it must be {kind}")
    return value


def _damaged(where: str, what: str) -> EntryError:
    return EntryError(where, what, REBUILD)
