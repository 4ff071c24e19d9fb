"""Entries of many parts: their parts lie in a table beside the manifest, which is read piece by piece."""

from __future__ import annotations

import pickle
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from raysvc.cache import manifest, names, part_table
from raysvc.cache.entry import Entry
from raysvc.cache.find import collect_garbage, find_entry, open_finished
from raysvc.cache.growing.coming import GrowingSpec
from raysvc.cache.growing.growing_entry import GrowingEntry
from raysvc.cache.key import ADDED, cache_key
from raysvc.cache.local.checksum import checksum_of
from raysvc.cache.manifest import Manifest
from raysvc.cache.part_info import PartInfo
from raysvc.cache.part_table import PartTable, TableInfo, write_table
from raysvc.cache.store import posix
from raysvc.cache.store.open import open_store
from raysvc.cache.store.posix import PosixStore
from raysvc.cache.verify import verify_folder
from raysvc.cache.writer import EntryWriter
from raysvc.errors import EntryError

from .helpers import KEY, RECIPE, build, make_slices

SIZES = (5, 0, 7, 3, 1, 4, 0, 9)
ROWS = sum(SIZES)


@pytest.fixture(autouse=True)
def small_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every entry has a table, of three parts a piece."""
    monkeypatch.setattr(manifest, "MOST_INLINE", 0)
    monkeypatch.setattr(part_table, "PAGE", 3)


class Counting(PosixStore):
    """Notes what is read."""

    reads: list[tuple[str, int | None, int | None]]

    def read(self, name: str, start: int | None = None, end: int | None = None) -> bytes:
        self.__dict__.setdefault("reads", []).append((name.rpartition("/")[2][:6], start, end))
        return super().read(name, start, end)

    def taken(self) -> list[str]:
        """Files that were read since the last call."""
        found = [name for name, _, _ in self.__dict__.get("reads", [])]
        self.__dict__["reads"] = []
        return found


def one_file(folder: Path, monkeypatch: pytest.MonkeyPatch, slices: Sequence[pa.Table]) -> Entry:
    """The same entry, built with its parts in the manifest."""
    with monkeypatch.context() as patch:
        patch.setattr(manifest, "MOST_INLINE", 1 << 30)
        store = open_store(str(folder))
        build(store, list(slices))
        return find_entry(store, KEY)


def table_file(root: Path) -> Path:
    (path,) = root.glob(f"{KEY}/parts-*.bin")
    return path


PARTS = st.builds(
    lambda rows, tokens, more, digest, blocks: PartInfo(
        "", rows, tokens, 4 * (rows + 1) + 64 + more, digest[:32], 64, digest[32:], blocks
    ),
    st.integers(0, 1 << 20),
    st.integers(0, 1 << 40),
    st.integers(0, 1 << 16),
    st.binary(min_size=32, max_size=32).map(bytes.hex),
    st.just(""),
)


@settings(max_examples=50)
@given(parts=st.lists(PARTS, min_size=1, max_size=20), told=st.booleans())
def test_a_table_gives_back_what_was_written(tmp_path_factory, parts, told):
    parts = [replace(part, name=names.new_part(index)[0]) for index, part in enumerate(parts)]
    source_rows = [part.num_rows + 1 for part in parts] if told else None
    store = open_store(str(tmp_path_factory.mktemp("table")))
    made = write_table(store, KEY, parts, source_rows)
    read = PartTable(TableInfo.from_json(made.info.to_json(), "x"), store, KEY)
    assert read == made
    assert list(read) == [read[index] for index in range(len(parts))] == list(read[:]) == parts
    assert read.num_rows.tolist() == [part.num_rows for part in parts]
    assert (None if read.source_rows is None else read.source_rows.tolist()) == source_rows
    assert read.info.num_tokens == sum(part.num_tokens for part in parts)
    with pytest.raises(IndexError):
        read[len(parts)]


def test_an_entry_with_a_table_is_read_as_one_without(tmp_path, monkeypatch):
    slices = make_slices(SIZES)
    plain = one_file(tmp_path / "plain", monkeypatch, slices)
    store = open_store(str(tmp_path / "table"))
    build(store, slices)
    entry = find_entry(store, KEY)
    assert isinstance(entry.manifest.parts, PartTable)
    assert isinstance(plain.manifest.parts, tuple)
    assert [(one.num_bytes, one.checksum, one.blocks) for one in entry.manifest.parts] == [
        (one.num_bytes, one.checksum, one.blocks) for one in plain.manifest.parts
    ]
    assert entry.num_rows == plain.num_rows == ROWS
    assert (entry.num_tokens, entry.manifest.num_bytes) == (plain.num_tokens, plain.manifest.num_bytes)
    assert entry.slice_starts.tolist() == plain.slice_starts.tolist()
    assert entry.lengths().tolist() == plain.lengths().tolist()
    assert entry.table().equals(plain.table())
    ids = np.random.default_rng(0).integers(0, ROWS, 50)
    assert (
        entry.read(entry.row_ids()[ids]).tokens["input_ids"].tolist()
        == plain.read(plain.row_ids()[ids]).tokens["input_ids"].tolist()
    )
    assert [one.num_rows for one in entry.part_tables()] == list(SIZES)
    assert entry.verify() == []
    state = (tmp_path / "table" / KEY / names.STATE).read_text()
    assert state.count(".arrow") == len(SIZES)


def test_an_entry_is_opened_with_one_read_and_a_row_costs_three(tmp_path):
    build(open_store(str(tmp_path)), make_slices(SIZES))
    store = Counting(str(tmp_path))
    entry = Entry.open(store, KEY)
    assert entry.num_rows == ROWS
    assert store.taken() == ["manife"]
    entry.slice_lengths(4)
    assert store.taken() == ["parts-", "part-0"], "a page, and the lengths of the part"
    entry.slice_lengths(5)
    assert store.taken() == ["part-0"], "its page was read before"
    entry.read(np.array([0]))
    assert sorted(store.taken()) == ["parts-", "parts-"], "rows of all parts, and the page of the first"
    assert len(entry.slice_starts) == len(SIZES) + 1
    assert store.taken() == []


def test_pages_that_are_kept_have_a_bound(tmp_path, monkeypatch):
    build(open_store(str(tmp_path)), make_slices(SIZES))
    table = find_entry(Counting(str(tmp_path)), KEY).manifest.parts
    monkeypatch.setattr(part_table, "KEPT_BYTES", 0)
    for index in (0, 3, 0, 3, 4, 5):
        assert table[index].num_rows == SIZES[index]
    assert table.store.taken().count("parts-") == 4
    assert len(table._kept._pages) == 1


def test_an_entry_travels_without_its_parts(tmp_path):
    build(open_store(str(tmp_path)), make_slices(SIZES))
    entry = find_entry(open_store(str(tmp_path)), KEY)
    entry.read(entry.row_ids())
    sent = pickle.dumps(entry)
    assert b".arrow" not in sent
    assert pickle.loads(sent).read(entry.row_ids()[[3]]).row_ids.tolist() == [int(entry.row_ids()[3])]


@pytest.fixture(scope="module")
def built_once(tmp_path_factory) -> tuple[PosixStore, Path, bytes]:
    root = tmp_path_factory.mktemp("flip")
    store = open_store(str(root))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(manifest, "MOST_INLINE", 0)
        patch.setattr(part_table, "PAGE", 3)
        build(store, make_slices(SIZES))
    return store, table_file(root), table_file(root).read_bytes()


@settings(max_examples=60)
@given(data=st.data())
def test_any_flipped_bit_of_a_table_is_found_before_a_part_is_used(built_once, data):
    store, path, right = built_once
    wrong = bytearray(right)
    place = data.draw(st.integers(0, len(wrong) - 1))
    wrong[place] ^= 1 << data.draw(st.integers(0, 7))
    path.write_bytes(bytes(wrong))
    entry = find_entry(store, KEY)
    with pytest.raises(EntryError, match=r"parts-.*\.bin: piece"):
        assert len(entry.slice_starts) + len(list(entry.manifest.parts)) == 0
    assert [(one.name, one.kind) for one in verify_folder(store, KEY)] == [(path.name, "content")]


@settings(max_examples=60)
@given(data=st.data())
def test_a_hostile_table_ends_in_a_typed_error_or_in_plausible_parts(built_once, tmp_path_factory, data):
    """With right checksums: whoever can write the table can write the manifest too."""
    store, _, right = built_once
    wrong, info = bytearray(right), Manifest.read(store, KEY).parts.info
    for place in data.draw(st.lists(st.integers(0, len(wrong) - 1), min_size=1, max_size=6)):
        wrong[place] = data.draw(st.integers(0, 255))
    pieces = [wrong[start:end] for start, end in pairwise((0, *info.ends))]
    info = replace(info, checksums="".join(checksum_of(bytes(piece)) for piece in pieces))
    hostile = open_store(str(tmp_path_factory.mktemp("hostile")))
    hostile.write(f"{KEY}/{info.name}", bytes(wrong))
    table = PartTable(info, hostile, KEY)
    for use in (lambda: table.num_rows, lambda: table.source_rows, *(lambda i=i: table[i] for i in range(8))):
        try:
            found = use()
        except EntryError:
            continue
        assert not isinstance(found, PartInfo) or names.PART.fullmatch(found.name)


@pytest.mark.parametrize("how", ["gone", "shorter"])
def test_an_entry_whose_table_is_not_whole_is_built_anew_beside_it(tmp_path, how, caplog):
    store = open_store(str(tmp_path))
    build(store, make_slices(SIZES))
    path = table_file(tmp_path)
    if how == "gone":
        path.unlink()
    else:
        path.write_bytes(path.read_bytes()[:-1])
    kind = "missing" if how == "gone" else "size"
    assert [(one.name, one.kind) for one in verify_folder(store, KEY)] == [(path.name, kind)]
    assert find_entry(store, KEY) is None
    assert path.name in caplog.text
    build(store, make_slices(SIZES))
    assert find_entry(store, KEY).folder == f"{KEY}.1"


@settings(max_examples=100)
@given(field=st.sampled_from(list(TableInfo.__dataclass_fields__)), value=st.one_of(
    st.none(), st.integers(-3, 9), st.text(max_size=5), st.lists(st.integers(-1, 9), max_size=4), st.just("../x"),
))  # fmt: skip
def test_a_hostile_description_of_a_table_is_refused_or_harmless(field, value):
    good = {
        "name": "parts-0123456789abcdef.bin", "num_parts": 4, "num_rows": 4, "num_tokens": 9, "num_bytes": 99, "page": 2,
        "ends": [10, 20, 30], "checksums": "0" * 96,
    }  # fmt: skip
    try:
        info = TableInfo.from_json({**good, field: value}, "x")
    except EntryError:
        return
    assert "/" not in info.name
    assert len(info.checksums) == 32 * len(info.ends) == 96
    assert 1 + len(range(0, info.num_parts, info.page)) == 3


def test_a_part_of_another_slice_or_of_another_folder_is_refused(tmp_path):
    store = open_store(str(tmp_path))
    fine = [PartInfo(names.new_part(index)[0], 1, 1, 99, "0" * 32, 8, "1" * 32) for index in range(4)]
    for name in (names.new_part(1)[0], "../part-00002-0123456789abcdef.arrow"):
        table = write_table(store, KEY, [*fine[:2], replace(fine[2], name=name), fine[3]], None)
        with pytest.raises(EntryError, match="part"):
            table[2]
        assert table[3] == fine[3]


def test_gc_keeps_the_table_and_its_parts_and_removes_those_of_a_builder_that_died_before_its_manifest(
    tmp_path,
):
    store = open_store(str(tmp_path))

    class Dies(PosixStore):
        def create(self, name: str, data: bytes) -> bool:
            if name.endswith(names.MANIFEST):
                raise KeyboardInterrupt  # the table is durable, the manifest is not there
            return super().create(name, data)

    with pytest.raises(KeyboardInterrupt):
        build(Dies(str(tmp_path)), make_slices(SIZES))
    left = table_file(tmp_path)
    assert find_entry(store, KEY) is None
    made = build(store, make_slices(SIZES))
    assert made.parts.info.name != left.name
    del made
    removed = [name for one in collect_garbage(store, grace_s=0) for name in one.files]
    assert left.name in removed
    assert not left.exists()
    assert find_entry(store, KEY).verify() == []
    assert [one for one in collect_garbage(store, grace_s=0) if ".arrow" in str(one.files)] == []


def test_of_two_builders_one_wins_and_both_return_its_table(tmp_path):
    store = open_store(str(tmp_path))
    writer, rival = EntryWriter(store, KEY), EntryWriter(store, KEY)
    receipts = [writer.write_part(index, table, {}) for index, table in enumerate(make_slices(SIZES))]
    first = writer.commit(receipts, RECIPE, {})
    assert rival.commit(receipts, RECIPE, {}) == first
    assert len(list(tmp_path.glob(f"{KEY}/parts-*.bin"))) == 2


def test_an_entry_that_grows_goes_on_from_the_table_of_the_finished_one(tmp_path):
    store = open_store(str(tmp_path))
    slices, firsts = make_slices(SIZES), np.cumsum([0, *SIZES]).tolist()
    contents = tuple(f"{index:02d}" for index in range(len(SIZES)))
    spec = GrowingSpec(key=KEY, recipe=RECIPE, report={"source_rows": list(SIZES)}, contents=contents)
    entry = GrowingEntry(Counting(str(tmp_path)), KEY, spec)
    writer = EntryWriter(store, KEY)
    wanted = [
        {"index": index, "first_row": firsts[index], "num_rows": SIZES[index], "bytes": contents[index]}
        for index in range(len(SIZES))
    ]
    receipts = [
        writer.write_part(index, table, {"slice": wanted[index]}) for index, table in enumerate(slices)
    ]
    early = entry.parts.parts[2]
    made = writer.commit(receipts, RECIPE, {"source_rows": list(SIZES)})
    entry.store.taken()
    assert entry.parts.parts[7].num_rows == SIZES[7]
    assert entry.store.taken() == ["manife", "parts-", "parts-"], "the cut of the source, and one page"
    assert entry.parts.parts[2] == early
    assert list(entry.parts.parts[:]) == list(made.parts)
    finished = open_finished(f"{tmp_path}/{KEY}")
    assert finished.source_rows.tolist() == entry.source_rows.tolist() == list(SIZES)
    assert "source_rows" not in finished.report, "it lies in the table"
    other = GrowingSpec(key=KEY, recipe=RECIPE, report={"source_rows": [*SIZES[:-1], 8]}, contents=contents)
    with pytest.raises(EntryError, match="other slices"):
        GrowingEntry(store, KEY, other).has([0])


def test_columns_are_added_to_an_entry_with_a_table(tmp_path):
    store = open_store(str(tmp_path))
    base_manifest = build(store, make_slices(SIZES))
    base = find_entry(store, KEY)
    recipe = {**RECIPE, ADDED: [{"to": KEY}]}
    writer = EntryWriter(store, cache_key(recipe))
    lengths = base.lengths()
    offsets = pa.array(np.concatenate([[0], np.cumsum(lengths)]), pa.int32())
    column = pa.table(
        {"ref": pa.ListArray.from_arrays(offsets, pa.array(np.arange(lengths.sum(), dtype=np.float32)))}
    )
    receipts = [writer.write_part(0, column, {}, {})]
    assert writer.commit(receipts, recipe, {}, base=KEY).num_rows == base_manifest.num_rows
    both = find_entry(store, cache_key(recipe))
    assert both.read(both.row_ids()).tokens["ref"].tolist() == list(range(int(lengths.sum())))
    assert both.verify() == []


def test_only_entries_of_many_parts_have_a_table_and_older_versions_read_the_others(tmp_path, monkeypatch):
    monkeypatch.undo()
    store = open_store(str(tmp_path))
    small = build(store, make_slices(SIZES))
    assert isinstance(small.parts, tuple)
    assert b'"format":1' in store.read(f"{KEY}/{names.MANIFEST}")
    parts = tuple(
        PartInfo(names.new_part(index)[0], 1, 1, 99, "0" * 32, 8, "1" * 32) for index in range(20_000)
    )
    many = Manifest(KEY, parts, small.columns, RECIPE, {"source_rows": [1] * 20_000}).with_table(store, KEY)
    data = many.to_json()
    assert b'"format":3' in data
    assert len(data) < 40_000
    read = Manifest.from_json(data, "x", store, KEY)
    assert read == many
    assert read.parts[19_999] == parts[19_999]
    assert read.source_rows.tolist() == [1] * 20_000


@settings(max_examples=30)
@given(
    sizes=st.lists(st.integers(0, 6), min_size=1, max_size=9),
    ids=st.lists(st.integers(0, 1 << 30), max_size=20),
)
def test_rows_are_those_of_the_slices_whatever_the_pieces(tmp_path_factory, sizes, ids):
    store = open_store(str(tmp_path_factory.mktemp("rows")))
    slices = make_slices(tuple(sizes))
    build(store, slices)
    entry, wanted = find_entry(store, KEY), pa.concat_tables(slices).to_pydict()
    ids = [one % sum(sizes) for one in ids] if sum(sizes) else []
    batch = entry.read(entry.row_ids()[np.array(ids, np.int64)])
    assert batch.rows["source_row"].tolist() == [wanted["source_row"][one] for one in ids]
    assert batch.tokens["input_ids"].tolist() == [each for one in ids for each in wanted["input_ids"][one]]


@pytest.mark.parametrize("kind", ["posix", "s3"])
def test_a_listing_that_leaves_out_parts_shows_everything_else(kind, tmp_path, monkeypatch, request):
    monkeypatch.setattr(posix, "FEW", 4)
    store = open_store(str(tmp_path)) if kind == "posix" else request.getfixturevalue("s3").store("few")
    others = [
        "damaged.json",
        "manifest.json",
        names.new_parts(),
        "state.json",
        names.new_use(),
        "part",
        "q.json",
    ]
    many = [name for index in range(6) for name in names.new_part(index)]
    for name in (*others, *many):
        store.write(f"{KEY}/{name}", b"12")
    requests: list[str] = []
    if kind == "s3":
        fs = type(store._fs())
        before = fs.call_s3

        def page_of_three(self, method, *args, **options):
            requests.append(method)
            return before(self, method, *args, **{**options, "MaxKeys": 3})

        monkeypatch.setattr(fs, "call_s3", page_of_three)
    found = {item.name: item for item in store.scan(KEY, names.MANY)}
    assert set(others) <= set(found)
    assert {item.size for item in found.values()} == {2}
    assert len(set(found) & set(many)) < len(many)
    assert len(requests) <= 6
    assert store.scan("nothing", names.MANY) == ()
    monkeypatch.undo()
    assert {item.name for item in store.scan(KEY)} == {*others, *many}


def test_a_small_entry_in_a_folder_of_many_leftovers_is_opened(tmp_path, monkeypatch):
    monkeypatch.setattr(posix, "FEW", 4)
    monkeypatch.setattr(manifest, "MOST_INLINE", 1 << 20)
    store = open_store(str(tmp_path))
    build(store, make_slices(SIZES))
    assert find_entry(store, KEY).num_rows == ROWS
    (tmp_path / KEY / find_entry(store, KEY).manifest.parts[5].name).unlink()
    assert find_entry(store, KEY) is None
