"""An entry that adds columns to another one shares its parts: read, checked, kept from gc, and never copied."""

from __future__ import annotations

import itertools
import json
import pickle
import subprocess
import sys
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

from raysvc.cache import names
from raysvc.cache.entry import Entry
from raysvc.cache.export.parquet_export import export_parquet
from raysvc.cache.find import collect_garbage, find_entry, list_entries
from raysvc.cache.key import ADDED, cache_key
from raysvc.cache.local.sealed import sealed
from raysvc.cache.manifest import Manifest
from raysvc.cache.store.open import open_store
from raysvc.cache.store.store import Store
from raysvc.cache.use_marker import Hold, share
from raysvc.cache.verify import mark_damaged
from raysvc.cache.writer import EntryWriter
from raysvc.errors import EntryError

from .helpers import KEY, build
from .servers import S3

CUTS = (0, 4, 9, 12)  # the base has parts of 5, 0 and 7 rows


def recipe_of(base: Entry, name: str) -> dict:
    added = [*base.recipe.get(ADDED, ()), {"to": base.key, "columns": {name: {"pad": 0}}}]
    return {**base.recipe, ADDED: added}


def values_of(base: Entry, first: int, stop: int) -> list[np.ndarray]:
    """Numbers that say where they belong."""
    return [
        np.arange(n, dtype=np.float32) + 100 * row for row, n in enumerate(base.lengths()[first:stop], first)
    ]


def writer_of(base: Entry, name: str = "ref") -> EntryWriter:
    return EntryWriter(base.store, cache_key(recipe_of(base, name)))


def add(base: Entry, name: str = "ref", writer: EntryWriter | None = None, pad: int = 0) -> Entry:
    """Columns `name`, [tokens], and `<name>_wide`, [tokens, 3]."""
    writer = writer or writer_of(base, name)
    receipts = []
    for index, (first, stop) in enumerate(itertools.pairwise(CUTS)):
        rows = values_of(base, first, stop)
        flat = np.concatenate([*rows, np.zeros(0, np.float32)]) + pad
        offsets = pa.array(np.cumsum([0, *map(len, rows)]).astype(np.int32))
        wide = pa.FixedSizeListArray.from_arrays(pa.array(np.repeat(flat, 3).astype(np.int32)), 3)
        table = pa.table(
            {
                name: pa.ListArray.from_arrays(offsets, pa.array(flat)),
                f"{name}_wide": pa.ListArray.from_arrays(offsets, wide),
            }
        )
        receipts.append(writer.write_part(index, table, {}, required={}))
    writer.commit(receipts, recipe_of(base, name), {"of": name}, base=base.folder)
    found = find_entry(base.store, writer.key)
    assert found is not None
    return found


@pytest.fixture
def base(tmp_path: Path) -> Entry:
    store = open_store(str(tmp_path / "cache"))
    build(store)
    found = find_entry(store, KEY)
    assert found is not None
    return found


def check(entry: Entry, base: Entry, name: str = "ref") -> None:
    order = np.array([11, 0, 3, 3, 7, 4, 8])
    mine, theirs = (one.read(one.row_ids()[order]) for one in (entry, base))
    for column in theirs.tokens:
        assert np.array_equal(mine.tokens[column], theirs.tokens[column])
    for column in theirs.rows:
        assert np.array_equal(mine.rows[column], theirs.rows[column])
    expected = [values_of(base, row, row + 1)[0] for row in order.tolist()]
    assert np.array_equal(mine.tokens[name], np.concatenate(expected))
    for piece, one in zip(mine.wide[f"{name}_wide"].pieces, expected, strict=True):
        assert np.array_equal(piece, np.repeat(one.astype(np.int32), 3).reshape(-1, 3))


def test_rows_are_those_of_the_base_with_the_columns(base: Entry) -> None:
    entry = add(base)
    check(entry, base)
    check(pickle.loads(pickle.dumps(entry)), base)
    assert np.array_equal(entry.lengths(), base.lengths())
    assert (entry.num_rows, entry.num_tokens) == (base.num_rows, base.num_tokens)
    assert list(entry.columns) == [*base.columns, "ref", "ref_wide"]
    assert np.array_equal(entry.row_values("reward"), base.row_values("reward"))
    assert entry.row(entry.row_ids()[11])["ref"] == values_of(base, 11, 12)[0].tolist()
    assert entry.table().drop_columns(["ref", "ref_wide"]) == base.table()
    tables = list(entry.part_tables())
    assert [one.num_rows for one in tables] == [5, 0, 7]
    assert pa.concat_tables(tables).combine_chunks() == entry.table().combine_chunks()


def test_nothing_of_the_base_is_copied(base: Entry) -> None:
    entry = add(base)
    (folder,) = [Path(base.store.url) / entry.folder]
    ours = sum(path.stat().st_size for path in folder.glob("part-*"))
    assert ours == entry.manifest.num_bytes
    assert not {part.name for part in base.manifest.parts} & {path.name for path in folder.iterdir()}
    assert not (folder / names.STATE).exists()  # `datasets` would see columns without tokens


def test_columns_are_added_to_what_has_added_columns(base: Entry) -> None:
    first = add(base)
    second = add(first, "teacher")
    check(second, base, "ref")
    check(second, base, "teacher")
    assert second.folders == (second.folder, first.folder, base.folder)
    assert second.verify() == []


def test_a_remote_base_and_what_was_added_to_it_are_read_through_copies(s3: S3) -> None:
    store = s3.store("added-")
    build(store)
    base = find_entry(store, KEY)
    assert base is not None
    check(add(base), base)


def test_parquet_has_all_columns(base: Entry, tmp_path: Path) -> None:
    from pyarrow import parquet

    entry = add(base)
    paths = export_parquet(entry, tmp_path / "out")
    whole = pa.concat_tables([parquet.read_table(path) for path in paths])
    assert whole.column("ref").to_pylist() == entry.table().column("ref").to_pylist()
    assert whole.column("uid").to_pylist() == base.table().column("uid").to_pylist()


class TestGc:
    """The base stays as long as what shares it."""

    def test_a_base_that_nobody_used_for_long_stays_and_goes_after_what_shares_it(self, base: Entry) -> None:
        store, entry = base.store, add(base)
        del_hold(base, entry)
        first = collect_garbage(store, older_than_s=0, grace_s=0)
        assert [
            one.folder for one in first if one.action == "removed" and one.reason != "nothing needs them"
        ] == [entry.folder]
        assert find_entry(store, KEY) is not None
        collect_garbage(store, older_than_s=0, grace_s=0)
        assert list_entries(store) == []

    def test_a_look_does_not_name_it(self, base: Entry) -> None:
        entry = add(base)
        found = collect_garbage(base.store, older_than_s=0, grace_s=3600, dry_run=True)
        assert {one.folder for one in found if one.action == "marked"} == {entry.folder}

    def test_it_stays_however_full_the_root_is(self, base: Entry) -> None:
        entry = add(base)
        hold = Hold(base.store, entry.folder, "a reader")
        for _ in range(3):
            collect_garbage(base.store, max_bytes=0, grace_s=0)
        check(Entry.open(base.store, entry.folder), Entry.open(base.store, base.folder))
        hold.release()

    def test_a_rebuilt_base_stays_while_the_first_build_is_shared(self, base: Entry) -> None:
        entry = add(base)
        build(base.store, generation=1)
        collect_garbage(base.store, grace_s=0)
        check(Entry.open(base.store, entry.folder), base)

    def test_a_build_that_begins_to_share_while_gc_looks_keeps_its_base(
        self, base: Entry, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """The mark comes between the first listing and the deletion; the two protocols see each other."""
        store, writer = base.store, writer_of(base)
        raw = type(store).create
        hold = Hold(store, writer.folder, "a builder")

        def create(self: Store, name: str, data: bytes) -> bool:
            if name == f"{base.folder}/{names.DELETING}":
                monkeypatch.setattr(type(store), "create", raw)
                store.create(f"{base.folder}/{names.shared_with(writer.folder)}", b"")
            return raw(self, name, data)

        monkeypatch.setattr(type(store), "create", create)
        collect_garbage(store, older_than_s=0, grace_s=0)
        assert names.DELETING not in store.list(base.folder)
        check(add(base, writer=writer), base)
        hold.release()

    def test_whoever_shares_what_gc_has_marked_is_refused(self, base: Entry) -> None:
        base.store.create(f"{base.folder}/{names.DELETING}", b"")
        with pytest.raises(EntryError, match="being removed by gc"):
            share(base.store, base.folder, "ab" * 32)
        assert not any(names.SHARED.fullmatch(name) for name in base.store.list(base.folder))

    def test_a_dead_build_shares_nothing_in_the_end(self, base: Entry) -> None:
        writer = writer_of(base)
        share(base.store, base.folder, writer.folder)
        collect_garbage(base.store, older_than_s=0, grace_s=0)
        assert list_entries(base.store) == []

    def test_a_marker_of_what_is_gone_is_a_leftover(self, base: Entry) -> None:
        share(base.store, base.folder, "ab" * 32)
        collect_garbage(base.store, grace_s=0)
        assert not any(names.SHARED.fullmatch(name) for name in base.store.list(base.folder))


def del_hold(*entries: Entry) -> None:
    for entry in entries:
        if entry._held is not None:
            entry._held.result().release()


class TestDamage:
    """A damaged base is a damaged entry, and is told as that."""

    def test_a_flipped_byte_of_the_base_is_found_from_either(self, base: Entry) -> None:
        entry = add(base)
        part = base.manifest.parts[2].name
        path = Path(base.store.url) / base.folder / part
        data = bytearray(path.read_bytes())
        data[-40] ^= 1
        path.chmod(0o644)
        path.write_bytes(data)
        assert [one.name for one in entry.verify()] == [f"{base.folder}/{part}"]
        mark_damaged(entry.store, entry.folder, entry.verify())
        assert find_entry(entry.store, entry.key) is None
        assert find_entry(entry.store, KEY) is None

    @pytest.mark.parametrize("gone", ["manifest", "part", "all"])
    def test_an_entry_without_its_base_is_not_found(self, base: Entry, gone: str) -> None:
        entry = add(base)
        wanted = {
            "manifest": [names.MANIFEST],
            "part": [base.manifest.parts[0].name],
            "all": base.store.list(KEY),
        }
        for name in wanted[gone]:
            base.store.delete(f"{KEY}/{name}")
        assert find_entry(entry.store, entry.key) is None

    def test_lengths_that_differ_from_the_base_are_refused(self, base: Entry) -> None:
        """Parts of other rows, with as many rows and tokens in all."""
        writer = writer_of(base)
        lengths = base.lengths()[::-1]
        assert not np.array_equal(lengths, base.lengths())
        offsets = pa.array(np.cumsum([0, *lengths]).astype(np.int32))
        column = pa.ListArray.from_arrays(offsets, pa.array(np.zeros(offsets[-1].as_py(), np.float32)))
        receipt = writer.write_part(0, pa.table({"ref": column}), {}, required={})
        writer.commit([receipt], recipe_of(base, "ref"), {}, base=base.folder)
        entry = find_entry(base.store, writer.key)
        assert entry is not None
        with pytest.raises(EntryError, match="other lengths than in its base"):
            entry.read(entry.row_ids())

    @pytest.mark.parametrize("base_name", ["../etc", "a/b", "", 3, "f" * 64, f"{KEY}/", ".", "..", ["x"]])
    def test_a_base_is_a_folder_that_the_recipe_names_or_the_manifest_is_refused(
        self, base: Entry, base_name: object
    ) -> None:
        raw = json.loads(add(base).manifest.to_json())
        del raw["sha256"]
        with pytest.raises(EntryError):
            Manifest.from_json(sealed(raw | {"base": base_name}), "x")

    def test_an_entry_cannot_be_its_own_base(self, base: Entry) -> None:
        entry = add(base)
        raw = json.loads(entry.manifest.to_json())
        del raw["sha256"]
        with pytest.raises(EntryError, match="not the entry that its recipe names"):
            Manifest.from_json(sealed(raw | {"base": entry.folder}), "x")


def test_an_entry_without_a_base_is_written_as_before(base: Entry) -> None:
    raw = json.loads(base.manifest.to_json())
    assert raw["format"] == 1
    assert "base" not in raw
    assert json.loads(add(base).manifest.to_json())["format"] == 2


def test_the_list_says_who_shares_an_entry(base: Entry) -> None:
    entry = add(base)
    found = {one.folder: one.shared_by for one in list_entries(base.store)}
    assert found == {base.folder: (entry.folder,), entry.folder: ()}


def test_a_process_that_only_opens_holds_neither_for_ever(base: Entry) -> None:
    """Opening marks nothing; reading holds the entry, whose marker in the base is enough."""
    entry = add(base)
    del_hold(base)
    code = f"from raysvc.cache.find import open_finished; entry = open_finished({entry.uri!r}); entry.row(0); import os; os._exit(0)"
    subprocess.run([sys.executable, "-c", code], check=True)
    assert any(names.USE.fullmatch(name) for name in base.store.list(entry.folder))
    assert not any(names.USE.fullmatch(name) for name in base.store.list(base.folder))
