"""Builds an entry: parts, a receipt for each, and one manifest at the end.

Order of what becomes visible: part file, its receipt, ... , table of the parts where they are many, tokenizer, manifest, the files for `datasets`.

Always true:
- a receipt names a part that is complete and durable, so a build goes on from the receipts a listing shows;
- the manifest names only parts that a listing shows with their right sizes;
- of all builders exactly one manifest wins, and every `commit` returns that one;
- what an entry adds its columns to is marked as shared before its manifest is written;
- a builder never renames over, changes or deletes what another one wrote.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pyarrow as pa

from raysvc.cache import index, names
from raysvc.cache.export.datasets_export import ensure_datasets_files
from raysvc.cache.generations import build_generation
from raysvc.cache.key import Recipe
from raysvc.cache.local.checksum import checksum_of
from raysvc.cache.manifest import REQUIRED, Manifest, Receipt
from raysvc.cache.store.store import Found, Store
from raysvc.cache.use_marker import share
from raysvc.errors import EntryError

THREADS = 16
log = logging.getLogger(__name__)


class EntryWriter:
    """Writes one entry; picklable, for the driver and for tasks on many nodes."""

    def __init__(self, store: Store, key: str, generation: int | None = None) -> None:
        """Only the listing is read.

        Args:
            store: where.
            key: of the recipe.
            generation: `next_generation(store, key)` builds again beside a finished entry; None: the first
                one, or the one after those that are damaged.
        """
        self.store = store
        self.key = key
        self._intact: set[str] = set()  # parts of earlier builds whose bytes were compared here
        self.folder = names.folder_of(key, build_generation(store, key) if generation is None else generation)

    @property
    def uri(self) -> str:
        """The address where the entry lies, or will lie."""
        return f"{self.store.url}/{self.folder}"

    def receipts(self, fits: Callable[[Receipt], bool] = lambda receipt: True) -> dict[int, Receipt]:
        """Slice index -> receipt of every finished slice, by listing; damaged receipts and parts count as none.

        The bytes of every part are compared with its checksum, once per writer.

        Args:
            fits: which of them are wanted, when builders may have cut the source in different ways.
        """
        found = {item.name: item for item in self.store.scan(self.folder)}
        wanted = [name for name in found if names.RECEIPT.fullmatch(name)]
        with ThreadPoolExecutor(THREADS) as pool:
            read = list(pool.map(self._read_receipt, wanted))
            fitting = [receipt for receipt in read if receipt and _has_part(receipt, found) and fits(receipt)]
            intact = list(pool.map(self._is_intact, fitting))
        usable = [receipt for receipt, good in zip(fitting, intact, strict=True) if good]
        return {one.slice_index: one for one in sorted(usable, key=lambda one: one.part.name, reverse=True)}

    def write_part(
        self,
        slice_index: int,
        table: pa.Table,
        meta: Mapping[str, Any],
        required: Mapping[str, str] = REQUIRED,
    ) -> Receipt:
        """Make the rows of a slice durable.

        Args:
            slice_index: position of the slice in the source, from 0.
            table: `input_ids` list<int32>, `loss_mask` list<uint8>, more per-token lists, per-row columns; or
                the columns that are added to another entry.
            meta: JSON that comes back with the receipt.
            required: columns that must be there.

        Raises:
            EntryError: a column that cannot be cached.
            StoreError: the store cannot be written.
        """
        from raysvc.cache.parts import encode_part

        part_name, receipt_name = names.new_part(slice_index)
        part = encode_part(part_name, table, required)
        receipt = Receipt(slice_index, part.info, part.columns, dict(meta))
        self._intact.add(part_name)
        self.store.write(f"{self.folder}/{part_name}", part.data)
        self.store.write(f"{self.folder}/{receipt_name}", receipt.to_json())
        return receipt

    def commit(
        self,
        receipts: Sequence[Receipt],
        recipe: Recipe,
        report: Mapping[str, Any],
        tokenizer: bytes | None = None,
        base: str = "",
    ) -> Manifest:
        """Finish the entry, or take over what another builder finished first.

        Args:
            receipts: one per slice, in slice order.
            recipe: stored in clear.
            report: JSON for the user.
            tokenizer: `tokenizer.json`, so that the rows can be decoded wherever the entry is copied to.
            base: folder of the entry that the columns are added to.

        Raises:
            EntryError: a slice is missing or twice, columns differ between slices, a part or the base is gone.
        """
        self._check(receipts)
        columns = receipts[0].columns if receipts else {}
        parts = tuple(one.part for one in receipts)
        mine = Manifest(self.key, parts, columns, recipe, report, base).with_table(self.store, self.folder)
        data = mine.to_json()
        if tokenizer is not None:
            self.store.create(f"{self.folder}/{names.TOKENIZER}", tokenizer)
        if base:
            share(self.store, base, self.folder)
        path = f"{self.folder}/{names.MANIFEST}"
        winner = mine if self.store.create(path, data) else Manifest.read(self.store, self.folder)
        ensure_datasets_files(self.store, self.folder, winner)
        index.note(self.store, self.folder, winner.recipe)
        return winner

    def _read_receipt(self, name: str) -> Receipt | None:
        try:
            return Receipt.from_json(self.store.read(f"{self.folder}/{name}"), f"{self.uri}/{name}")
        except (EntryError, FileNotFoundError):
            return None

    def _is_intact(self, receipt: Receipt) -> bool:
        name = receipt.part.name
        if name in self._intact:
            return True
        try:
            good = checksum_of(self.store.read(f"{self.folder}/{name}")) == receipt.part.checksum
        except FileNotFoundError:
            return False
        if not good:
            log.warning("part of an earlier build is damaged and made again uri=%s/%s", self.uri, name)
            return False
        self._intact.add(name)
        return True

    def _check(self, receipts: Sequence[Receipt]) -> None:
        if [one.slice_index for one in receipts] != list(range(len(receipts))) or not receipts:
            raise EntryError(
                self.uri, "the slices are not 0, 1, 2, ... without a gap", "build the missing ones"
            )
        for one in receipts:
            if one.columns != receipts[0].columns:
                raise EntryError(
                    self.uri,
                    f"slice {one.slice_index} has {dict(one.columns)}, slice 0 {dict(receipts[0].columns)}",
                    "give every slice the same columns and types",
                )
        found = {item.name: item for item in self.store.scan(self.folder)}
        gone = [one.part.name for one in receipts if not _has_part(one, found)]
        if gone:
            raise EntryError(
                self.uri, f"{len(gone)} finished parts are gone, first {gone[0]}", "run the build again"
            )


def _has_part(receipt: Receipt, found: Mapping[str, Found]) -> bool:
    part = found.get(receipt.part.name)
    return part is not None and part.size == receipt.part.num_bytes
