"""Defines what a finished entry says of itself: parts, counts, checksums, report and recipe.

Always true:
- a manifest that parses is safe to act on: part names stay in the folder, counts add up, types are right;
- the recipe hashes to the key, and the columns that a trainer needs are there, in its own parts or in those of its base;
- its own checksum covers every other field, so a flipped byte anywhere in it is found;
- a manifest of a newer format is refused with the version that reads it;
- parts of more than `MOST_INLINE` bytes lie in a table of their own (`raysvc.cache.part_table`), which is checked as it is read.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import TYPE_CHECKING, Any

from raysvc.cache import names
from raysvc.cache.key import ADDED, cache_key
from raysvc.cache.local.sealed import SEAL, seal_of, sealed
from raysvc.cache.part_info import PartInfo, count, damaged, part_info
from raysvc.cache.part_table import PartTable, TableInfo, write_table
from raysvc.cache.store.store import Store
from raysvc.errors import EntryError, EntryTooNew

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

FORMAT = (
    3  # of an entry with a table of parts; 2: with a base; others are written as 1, which every version reads
)
READABLE_SINCE = "0.1.0"
MAX_BYTES = 1 << 28
MOST_INLINE = 1 << 20  # bytes of parts in a manifest: some 370 of 42 MB, or 4,500 small ones
_PART_BYTES = 230  # of a part in a manifest, without the checksums of its blocks
_VERSION = re.compile(r"[0-9A-Za-z.+-]{1,40}")
_NUMBERS = ["int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"]
_NUMBERS += ["float16", "float32", "float64", "bool"]
REQUIRED = {"input_ids": "list<int32>", "loss_mask": "list<uint8>"}
_NUMBER = "|".join([*_NUMBERS, "bfloat16"])
_COLUMN_TYPE = re.compile(
    rf"string|(list<)?({_NUMBER})(\[[1-9][0-9]{{0,8}}(,[1-9][0-9]{{0,8}}){{0,3}}\])?(>)?"
)


def is_column_type(kind: str) -> bool:
    """Returns whether a part can hold a column of this type: text, numbers, or numbers of a shape; each also per token.

    >>> [is_column_type(kind) for kind in ("string", "list<uint8[94,8]>", "bfloat16[4]", "list<string>")]
    [True, True, True, False]
    """
    match = _COLUMN_TYPE.fullmatch(kind)
    return match is not None and (match[1] is None) == (match[5] is None)


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
        return sealed(asdict(self))

    @classmethod
    def from_json(cls, data: bytes, where: str) -> Receipt:
        """Parse and check; EntryError with `where` when anything is off.

        Raises:
            EntryError: it is damaged.
        """
        raw = _opened(data, where)
        receipt = cls(
            slice_index=count(raw, "slice_index", where),
            part=part_info(_mapping(raw, "part", where), where),
            columns=_columns(raw, where, {}),
            meta=_mapping(raw, "meta", where),
        )
        if not (match := names.PART.fullmatch(receipt.part.name)) or int(match[1]) != receipt.slice_index:
            raise damaged(where, f"the part {receipt.part.name!r} belongs to another slice")
        return receipt


@dataclass(frozen=True)
class Manifest:
    """The file whose presence means "finished".

    Attributes:
        key: hash of the recipe.
        parts: in row order, read as they are asked for where they are many.
        columns: column name -> type.
        recipe: what decided the bytes.
        report: what the builder tells the user.
        base: folder, in the same root, of the entry whose rows these are: then parts and columns are those that were
            added to it, and a part ends where its builder chose. Empty: the parts hold whole rows.
    """

    key: str
    parts: tuple[PartInfo, ...] | PartTable
    columns: Mapping[str, str]
    recipe: Mapping[str, Any]
    report: Mapping[str, Any] = field(default_factory=dict)
    base: str = ""

    @property
    def num_rows(self) -> int:
        """Rows of all parts."""
        return self._total("num_rows")

    @property
    def num_tokens(self) -> int:
        """Tokens of all parts."""
        return self._total("num_tokens")

    @property
    def num_bytes(self) -> int:
        """Bytes of all parts."""
        return self._total("num_bytes")

    @property
    def source_rows(self) -> Sequence[int] | npt.NDArray[np.int64] | None:
        """Rows of the source in each slice; None where the builder did not tell them."""
        if isinstance(self.parts, PartTable) and self.parts.source_rows is not None:
            return self.parts.source_rows
        told = self.report.get("source_rows")
        return told if isinstance(told, list) else None

    def with_table(self, store: Store, folder: str) -> Manifest:
        """This manifest; where its parts are many, with a table of them that is durable now.

        Args:
            store, folder: of the entry.

        Raises:
            StoreError: it cannot be written.
        """
        if sum(_PART_BYTES + len(part.blocks) for part in self.parts) <= MOST_INLINE:
            return self
        rows = self.report.get("source_rows")
        told = rows if isinstance(rows, list) and len(rows) == len(self.parts) else None
        report = {name: one for name, one in self.report.items() if told is None or name != "source_rows"}
        return replace(self, parts=write_table(store, folder, self.parts, told), report=report)

    def _total(self, name: str) -> int:
        if isinstance(self.parts, PartTable):
            return int(getattr(self.parts.info, name))
        return sum(getattr(part, name) for part in self.parts)

    def to_json(self) -> bytes:
        """Bytes of `manifest.json`.

        Raises:
            EntryError: they are more than any reader takes.
        """
        counts = {"num_rows": self.num_rows, "num_tokens": self.num_tokens, "num_bytes": self.num_bytes}
        fields = {name: getattr(self, name) for name in ("key", "columns", "recipe", "report", "base")}
        if not self.base:
            del fields["base"]
        if isinstance(self.parts, PartTable):
            fields["parts"], number = self.parts.info.to_json(), 3
        else:
            fields["parts"], number = [asdict(part) for part in self.parts], 2 if self.base else 1
        version = {"format": number, "readable_since": READABLE_SINCE}
        data = sealed(version | counts | fields)
        if len(data) > MAX_BYTES:
            what = f"a manifest of {len(self.parts)} parts would have {len(data)} bytes, and at most {MAX_BYTES} are read"
            raise EntryError(self.key, what, "give the source fewer files, or split it into several entries")
        return data

    @classmethod
    def read(cls, store: Store, folder: str) -> Manifest:
        """That of an entry; of many parts none is read.

        Raises:
            EntryError: it is damaged.
            FileNotFoundError: it is not there.
        """
        path = f"{folder}/{names.MANIFEST}"
        return cls.from_json(store.read(path), f"{store.url}/{path}", store, folder)

    @classmethod
    def from_json(cls, data: bytes, where: str, store: Store | None = None, folder: str = "") -> Manifest:
        """Parse and check; EntryError with `where` when anything is off.

        Args:
            data: the file.
            where: for messages.
            store, folder: where its parts lie; `Manifest.read` gives them.

        Raises:
            EntryError: it is damaged.
        """
        raw = _opened(data, where)
        if not isinstance(raw.get("parts"), list | dict) or not isinstance(raw.get("key"), str):
            raise damaged(where, "the fields key and parts are missing or of a wrong type")
        manifest = cls(
            key=raw["key"],
            parts=_parts(raw["parts"], where, store, folder),
            columns=_columns(raw, where, {} if raw.get("base") else REQUIRED),
            recipe=_mapping(raw, "recipe", where),
            report=_mapping(raw, "report", where),
            base=_base(raw, where),
        )
        if not names.KEY.fullmatch(manifest.key):
            raise damaged(where, f"{manifest.key[:80]!r} is not a key")
        if cache_key(dict(manifest.recipe)) != manifest.key:
            raise damaged(where, "its recipe does not hash to its key")
        if raw.get("num_rows") != manifest.num_rows or raw.get("num_tokens") != manifest.num_tokens:
            raise damaged(where, "the counts of the parts do not add up to the entry's")
        return manifest


def _opened(data: bytes, where: str) -> dict[str, Any]:
    if len(data) > MAX_BYTES:
        raise damaged(where, f"{len(data)} bytes are more than any manifest has")
    try:
        raw = json.loads(data, object_pairs_hook=_shared_names)
        seal = raw.pop(SEAL, None)
        refused = _newer(raw, where)
        intact = refused or seal == seal_of(raw)
    except (ValueError, TypeError, AttributeError, KeyError, RecursionError) as error:
        raise damaged(where, f"it is not the JSON that was written ({type(error).__name__})") from None
    if refused is not None:
        raise refused
    if not intact:
        raise damaged(where, "its checksum does not match its content")
    return dict(raw)


def _shared_names(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """An object whose names are the same strings in every file: a build holds a receipt of each slice."""
    return {sys.intern(name): value for name, value in pairs}


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


def _parts(
    raw: list[Any] | dict[str, Any], where: str, store: Store | None, folder: str
) -> tuple[PartInfo, ...] | PartTable:
    if isinstance(raw, dict):
        info = TableInfo.from_json(raw, where)
        assert store is not None, "Manifest.read knows where the parts are"
        return PartTable(info, store, folder)
    parts = tuple(part_info(part, where) for part in raw)
    if len({part.name for part in parts}) != len(parts):
        raise damaged(where, "a part is named twice")
    return parts


def _mapping(raw: Mapping[str, Any], name: str, where: str) -> dict[str, Any]:
    value = raw.get(name)
    if not isinstance(value, dict):
        raise damaged(where, f"{name} is not an object")
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
        raise damaged(where, "its base is not the entry that its recipe names")
    return str(base)


def _columns(raw: Mapping[str, Any], where: str, required: Mapping[str, str]) -> dict[str, str]:
    value = raw.get("columns")
    pairs_ok = isinstance(value, dict) and all(
        isinstance(kind, str) and is_column_type(kind) for kind in value.values()
    )
    if not pairs_ok or not isinstance(value, dict):
        raise damaged(where, "columns are not known types")
    if not any(kind.startswith("list<") for kind in value.values()):
        raise damaged(where, "no column is per token")
    for name, kind in required.items():
        if value.get(name) != kind:
            raise damaged(where, f"column {name} is {value.get(name, 'missing')}, it must be {kind}")
    return value
