"""Reading finished entries."""

from __future__ import annotations

import json
import os
import pickle
import subprocess
import sys
import threading
import uuid
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from raysvc.cache.entry import Entry
from raysvc.cache.find import collect_garbage, find_entry, list_entries, open_finished
from raysvc.cache.key import cache_key
from raysvc.cache.local.part_cache import PartCopies, copies_from, node_copies
from raysvc.cache.local.part_reader import READ_AHEAD
from raysvc.cache.store.fsspec_store import FsspecStore
from raysvc.cache.store.open import open_store
from raysvc.cache.store.store import Store
from raysvc.errors import EntryError, EntryTooNew, StoreError
from raysvc.row_batch import RowBatch
from raysvc.row_ids import parse, written

from .helpers import KEY, RECIPE, build, make_slices
from .servers import S3, proxy

SIZES = (5, 0, 7, 1, 0)


@pytest.fixture(params=["local", "memory", "s3"])
def store(request, tmp_path) -> Store:
    if request.param == "s3":
        return request.getfixturevalue("s3").store("entry-")
    return open_store(str(tmp_path / "cache") if request.param == "local" else f"memory://{uuid.uuid4().hex}")


def expected_rows(slices: list[pa.Table]) -> list[dict]:
    return pa.concat_tables(slices).to_pylist()


def rows_of(batch: RowBatch) -> list[dict]:
    """Back to one dict per row."""
    spans = list(zip(batch.offsets.tolist(), batch.offsets[1:].tolist(), strict=False))
    return [
        {name: values[a:b].tolist() for name, values in batch.tokens.items()}
        | {
            name: values[index].item() if hasattr(values[index], "item") else values[index]
            for name, values in batch.rows.items()
        }
        for index, (a, b) in enumerate(spans)
    ]


def test_an_entry_says_what_it_holds(store):
    slices = make_slices(SIZES)
    build(store, slices)
    entry = find_entry(store, KEY)
    assert (entry.uri, entry.key) == (f"{store.url}/{KEY}", KEY)
    assert entry.num_rows == len(entry) == 13
    assert entry.num_tokens == sum(len(row["input_ids"]) for row in expected_rows(slices))
    assert (entry.recipe, entry.report) == (RECIPE, {"rows": 13})
    assert entry.lengths().tolist() == [len(row["input_ids"]) for row in expected_rows(slices)]
    assert entry.lengths().dtype == np.int32
    assert entry.table().select(slices[0].column_names).to_pylist() == expected_rows(slices)
    assert entry.row(entry.row_ids()[7]) == expected_rows(slices)[7]
    assert str(entry.num_rows) in repr(entry)


@given(st.lists(st.integers(0, 12), max_size=30))
@settings(max_examples=60)
def test_rows_come_in_the_order_asked_for(ids):
    store = open_store("memory://rows-in-order")
    slices = make_slices(SIZES)
    build(store, slices)
    entry = find_entry(store, KEY)
    chosen = entry.row_ids()[np.array(ids, np.int64)]
    batch = entry.read(chosen)
    rows = expected_rows(slices)
    assert rows_of(batch) == [rows[i] for i in ids]
    assert batch.row_ids.tolist() == chosen.tolist()
    assert batch.row_ids.dtype == batch.offsets.dtype == np.int64
    assert batch.tokens["input_ids"].dtype == np.int32
    assert batch.tokens["loss_mask"].dtype == np.uint8
    assert batch.tokens["logprobs"].dtype == np.float32


@pytest.mark.parametrize("ids", ["0:0:5", "0:1:0", "0:3:1", "1:0:0", "0:2:7", 13, -1])
def test_a_row_that_is_not_there_is_an_index_error(store, ids):
    build(store, make_slices(SIZES))
    row = parse(ids) if isinstance(ids, str) else ids
    with pytest.raises(IndexError, match=f"no row {written(row)}"):
        find_entry(store, KEY).read(np.array([0, row]))


@pytest.mark.parametrize("name", ["nothing", "input_ids", "uid"])
def test_a_column_that_is_not_one_number_a_row_is_refused_by_name(store, name):
    build(store, make_slices(SIZES))
    with pytest.raises(EntryError, match=f"no per-row column {name}"):
        find_entry(store, KEY).row_values(name)


def test_an_entry_is_opened_by_its_name_alone_in_its_folder(tmp_path, monkeypatch):
    build(open_store(str(tmp_path)), make_slices(SIZES))
    monkeypatch.chdir(tmp_path)
    assert open_finished(KEY).num_rows == 13


def test_an_entry_without_any_row_can_be_read(store):
    build(store, make_slices((0, 0)))
    entry = find_entry(store, KEY)
    assert entry.num_rows == entry.num_tokens == len(entry.lengths()) == entry.table().num_rows == 0
    assert entry.read(np.array([], np.int64)).tokens["input_ids"].dtype == np.int32


def test_many_threads_may_read_at_once(store):
    slices = make_slices((40,) * 10)
    build(store, slices)
    entry, rows, wrong = find_entry(store, KEY), expected_rows(slices), []

    def reader(seed: int) -> None:
        for _ in range(5):
            ids = np.random.default_rng(seed).integers(0, 400, 20)
            if rows_of(entry.read(entry.row_ids()[ids])) != [rows[i] for i in ids]:
                wrong.append(seed)

    threads = [threading.Thread(target=reader, args=(seed,)) for seed in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


def test_an_entry_survives_pickling(store):
    build(store)
    entry = find_entry(store, KEY)
    other = pickle.loads(pickle.dumps(entry))
    assert other.row(3) == entry.row(3)


def test_datasets_opens_an_entry_as_it_is(tmp_path):
    import datasets

    slices = make_slices(SIZES)
    build(open_store(str(tmp_path)), slices)
    loaded = datasets.load_from_disk(open_finished(f"{tmp_path}/{KEY}").uri)
    assert loaded.features == datasets.Features(
        {
            "input_ids": datasets.List(datasets.Value("int32")),
            "loss_mask": datasets.List(datasets.Value("uint8")),
            "logprobs": datasets.List(datasets.Value("float32")),
            "reward": datasets.Value("float32"),
            "solved": datasets.Value("bool"),
            "source_row": datasets.Value("int64"),
            "uid": datasets.Value("string"),
        }
    )
    assert loaded.to_list() == expected_rows(slices)
    assert len(loaded.cache_files) == len(SIZES)


def test_the_files_for_datasets_are_fixed_when_a_builder_died_before_them(tmp_path):
    import datasets

    store = open_store(str(tmp_path))
    build(store)
    (tmp_path / KEY / "state.json").unlink()
    assert open_finished(f"{tmp_path}/{KEY}").verify()[0].name == "state.json"
    find_entry(store, KEY)
    assert len(datasets.load_from_disk(f"{tmp_path}/{KEY}")) == 12


def test_opening_reads_no_part_of_a_remote_entry(s3: S3):
    store = s3.store()
    build(store)
    with proxy(s3) as seen:
        entry = open_finished(f"{store.url}/{KEY}", seen.options)
        assert entry.num_rows == 12
        assert [line for line in seen.proxy.seen if ".arrow" in line] == []


def test_reading_imports_nothing_heavy(tmp_path):
    build(open_store(str(tmp_path)))
    code = (
        "import sys, numpy; from raysvc.cache.find import open_finished;"
        f"e = open_finished({str(tmp_path / KEY)!r}); e.read(e.row_ids()); e.lengths(); e.table(); e.verify();"
        "print({'pandas', 'ray', 'torch', 'datasets', 'fsspec'} & set(sys.modules))"
    )
    environ = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environ)
    assert done.stdout.strip() == "set()", done.stderr


def test_opening_costs_the_same_for_any_number_of_rows(tmp_path):
    store = open_store(str(tmp_path))
    build(store, make_slices((50,) * 4))
    entry = find_entry(store, KEY)
    assert entry.parts._views == {}
    entry.row(entry.row_ids()[60])
    assert list(entry.parts._views) == [1]


class TestDamage:
    """A damaged entry is found, named, and never served."""

    @pytest.fixture
    def built(self, tmp_path) -> tuple[Store, Path]:
        store = open_store(str(tmp_path))
        build(store, make_slices(SIZES))
        return store, tmp_path / KEY

    def part(self, folder: Path, index: int = 2) -> Path:
        return next(folder.glob(f"part-{index:05d}-*.arrow"))

    def test_a_sound_entry_has_no_problem(self, store):
        build(store)
        assert find_entry(store, KEY).verify() == []

    def test_a_flipped_byte_is_found_wherever_it_is(self, built):
        store, folder = built
        path = self.part(folder)
        sound = path.read_bytes()
        for place in range(0, len(sound), 97):
            path.write_bytes(sound[:place] + bytes([sound[place] ^ 4]) + sound[place + 1 :])
            problems = find_entry(store, KEY).verify()
            assert [(p.name, p.kind) for p in problems] == [(path.name, "content")]

    def test_a_missing_part_is_found_and_the_entry_not_opened(self, built):
        store, folder = built
        entry = find_entry(store, KEY)
        path = self.part(folder)
        path.unlink()
        assert [(p.name, p.kind) for p in entry.verify()] == [(path.name, "missing")]
        with pytest.raises(EntryError, match=f"{path.name}: it is missing"):
            entry.row(parse("0:2:1"))
        with pytest.raises(EntryError, match=f"{path.name}: it is missing"):
            open_finished(entry.uri)

    def test_a_truncated_part_is_found_and_the_entry_not_opened(self, built):
        store, folder = built
        entry = find_entry(store, KEY)
        path = self.part(folder)
        path.write_bytes(path.read_bytes()[:-8])
        assert [(p.name, p.kind) for p in entry.verify()] == [(path.name, "size")]
        with pytest.raises(EntryError, match=f"{path.name}.*bytes instead of"):
            entry.row(parse("0:2:1"))
        with pytest.raises(EntryError, match=f"{path.name}.*bytes instead of"):
            open_finished(entry.uri)

    def test_a_flipped_byte_in_the_manifest_is_found(self, built):
        from raysvc.cache.verify import verify_folder

        store, folder = built
        path = folder / "manifest.json"
        path.write_bytes(path.read_bytes().replace(b'"num_rows":5', b'"num_rows":4'))
        assert [(p.name, p.kind) for p in verify_folder(store, KEY)] == [("manifest.json", "content")]
        with pytest.raises(EntryError, match=r"manifest\.json: its checksum"):
            open_finished(str(folder))

    def test_files_that_follow_from_the_manifest_are_written_again(self, built):
        from raysvc.cache.verify import repair, verify_folder

        store, folder = built
        sound = {path.name: path.read_bytes() for path in folder.glob("*.json")}
        (folder / "state.json").write_text("{}")
        (folder / "dataset_info.json").unlink()
        problems = verify_folder(store, KEY)
        assert sorted((p.name, p.kind) for p in problems) == [
            ("dataset_info.json", "missing"),
            ("state.json", "content"),
        ]
        repair(store, KEY, problems)
        assert {path.name: path.read_bytes() for path in folder.glob("*.json")} == sound
        assert verify_folder(store, KEY) == []
        repair(store, KEY, [])

    def test_a_part_that_changes_while_it_is_checked_is_a_problem(self, built, monkeypatch):
        from raysvc.cache.store.posix import PosixStore
        from raysvc.cache.verify import verify_folder

        store, folder = built
        name, read = self.part(folder).name, PosixStore.read
        shorter = lambda self, path: read(self, path)[: -1 if path.endswith(name) else None]  # noqa: E731
        monkeypatch.setattr(PosixStore, "read", shorter)
        assert [(p.name, p.kind) for p in verify_folder(store, KEY)] == [(name, "size")]

    def test_a_folder_without_a_manifest_is_no_entry(self, built):
        from raysvc.cache.verify import verify_folder

        store, folder = built
        (folder / "manifest.json").unlink()
        with pytest.raises(EntryError, match="no complete entry"):
            verify_folder(store, KEY)

    def test_a_marked_entry_is_out_of_service_and_built_anew_beside_it(self, built):
        from raysvc.cache.verify import mark_damaged

        store, folder = built
        path = self.part(folder)
        path.write_bytes(path.read_bytes()[:-1] + b"\xff")
        mark_damaged(store, KEY, find_entry(store, KEY).verify())
        assert path.name in (folder / "damaged.json").read_text()
        assert find_entry(store, KEY) is None
        with pytest.raises(EntryError, match="marked as damaged"):
            open_finished(str(folder))
        build(store, make_slices(SIZES))
        assert find_entry(store, KEY).folder == f"{KEY}.1"
        assert find_entry(store, KEY).verify() == []
        assert {item.folder: item.state for item in list_entries(store)} == {
            KEY: "damaged",
            f"{KEY}.1": "finished",
        }

    def test_an_entry_of_a_newer_version_is_refused_by_all(self, built):
        store, folder = built
        manifest = json.loads((folder / "manifest.json").read_text()) | {"format": 4, "readable_since": "9.9"}
        entry = find_entry(store, KEY)
        (folder / "manifest.json").write_text(json.dumps(manifest))
        for call in (lambda: find_entry(store, KEY), lambda: open_finished(str(folder)), entry.verify):
            with pytest.raises(EntryTooNew, match=r"install raysvc 9\.9"):
                call()

    def test_a_manifest_copied_from_elsewhere_is_refused(self, built, tmp_path):
        store, folder = built
        other = cache_key({"other": 1})
        folder.rename(tmp_path / other)
        with pytest.raises(EntryError, match="belongs to"):
            open_finished(f"{store.url}/{other}")

    def test_a_bad_entry_is_named_and_built_anew_beside_it(self, built, caplog):
        store, folder = built
        self.part(folder).unlink()
        assert find_entry(store, KEY) is None
        assert f"{self.part_name(store)}: it is missing" in caplog.text
        build(store, make_slices(SIZES))
        assert find_entry(store, KEY).folder == f"{KEY}.1"

    def test_a_folder_where_the_manifest_should_be_is_an_entry_that_is_built_anew(self, built, caplog):
        store, folder = built
        (folder / "manifest.json").unlink()
        (folder / "manifest.json").mkdir()
        assert [one.folder for one in collect_garbage(store, grace_s=0, dry_run=True)] == []
        assert find_entry(store, KEY) is None
        assert "its manifest cannot be read" in caplog.text
        build(store, make_slices(SIZES))
        assert find_entry(store, KEY).folder == f"{KEY}.1"

    def part_name(self, store) -> str:
        manifest = json.loads(store.read(f"{KEY}/manifest.json"))
        return next(part["name"] for part in manifest["parts"] if part["name"].startswith("part-00002"))

    def test_an_unfinished_or_missing_entry_is_told_apart(self, tmp_path):
        store = open_store(str(tmp_path))
        store.write(f"{KEY}/receipt", b"1")
        with pytest.raises(EntryError, match="has not finished"):
            Entry.open(store, KEY)
        with pytest.raises(EntryError, match="there is no such entry"):
            open_finished(f"{tmp_path}/nothing")
        with pytest.raises(EntryError, match="is not the key of an entry"):
            open_finished(f"{tmp_path}/..")


class TestRemote:
    """Copies of remote parts on this node's disk."""

    @pytest.fixture
    def built(self, s3: S3) -> FsspecStore:
        store = s3.store("copies-")
        build(store, make_slices((30,) * 6))
        return store

    def entry(self, store: FsspecStore, through: S3, copies: PartCopies) -> Entry:
        found = find_entry(FsspecStore(store.url, through.options), KEY)
        return Entry(found.store, found.folder, found.manifest, copies)

    def downloads(self, server: S3) -> int:
        return sum(".arrow" in line and line.startswith("GET") for line in server.proxy.seen)

    def test_a_part_is_fetched_once_by_all_entries_of_the_node(self, s3, built, private_copies):
        with proxy(s3) as seen:
            for _ in range(2):
                entry = self.entry(built, seen, PartCopies(private_copies, 1 << 30))
                entry.read(entry.row_ids())
                entry.read(entry.row_ids()[::-1])
            assert self.downloads(seen) == 6

    def test_a_copy_that_was_changed_on_disk_is_fetched_again(self, s3, built, private_copies):
        with proxy(s3) as seen:
            expected = self.entry(built, seen, PartCopies(private_copies, 1 << 30)).row(3)
            for copy in private_copies.glob("*.arrow"):
                copy.write_bytes(copy.read_bytes()[:-9] + b"\xff" * 9)
            assert self.entry(built, seen, PartCopies(private_copies, 1 << 30)).row(3) == expected
            for copy in private_copies.glob("*.arrow"):
                copy.write_bytes(b"")
            assert self.entry(built, seen, PartCopies(private_copies, 1 << 30)).row(3) == expected

    def test_a_bit_that_flips_on_the_way_is_fixed_by_another_fetch(self, s3, built, private_copies):
        with proxy(s3, only=".arrow", flip=1) as bad:
            entry = self.entry(built, bad, PartCopies(private_copies, 1 << 30))
            assert entry.row(3)["source_row"] == 3
            assert bad.proxy.flip == 0

    def test_a_part_that_arrives_wrong_again_is_refused(self, s3, built, private_copies):
        with proxy(s3, only=".arrow", flip=99) as bad:
            entry = self.entry(built, bad, PartCopies(private_copies, 1 << 30))
            with pytest.raises(EntryError, match=r"s3://.*part-00000.*arrived twice"):
                entry.row(3)
            _wait_until(lambda: list(private_copies.glob("*.arrow")) == [])

    def test_a_part_that_vanished_is_named(self, s3, built, private_copies):
        entry = self.entry(built, s3, PartCopies(private_copies, 1 << 30))
        built.delete(f"{KEY}/{entry.manifest.parts[0].name}")
        with pytest.raises(EntryError, match=r"part-00000.*it is missing"):
            entry.row(3)

    def test_copies_stay_within_their_bound(self, s3, built, private_copies):
        part = find_entry(built, KEY).manifest.parts[0].num_bytes
        copies = PartCopies(private_copies, 5 * part)
        entry = self.entry(built, s3, copies)
        rng = np.random.default_rng(0)
        for _ in range(5):
            ids = rng.permutation(180)
            assert entry.read(entry.row_ids()[ids]).rows["source_row"].tolist() == ids.tolist()
            assert copies.held_bytes() <= 2.5 * part * 1.1
        assert entry.parts._mapped_bytes <= 2.5 * part

    def test_reading_from_front_to_back_fetches_ahead(self, s3, built, private_copies):
        with proxy(s3) as seen:
            entry = self.entry(built, seen, PartCopies(private_copies, 1 << 30))
            entry.read(entry.row_ids()[:10])
            _wait_until(lambda: self.downloads(seen) == 1 + READ_AHEAD)
            entry.read(entry.row_ids()[10:40])
            _wait_until(lambda: self.downloads(seen) == 2 + READ_AHEAD)

    def test_reading_at_random_fetches_only_what_was_announced(self, s3, built, private_copies):
        with proxy(s3) as seen:
            entry = self.entry(built, seen, PartCopies(private_copies, 1 << 30))
            entry.read(entry.row_ids()[[100]])
            assert self.downloads(seen) == 1
            entry.prefetch(entry.row_ids()[[170, 0]])
            _wait_until(lambda: self.downloads(seen) == 3)
            entry.read(entry.row_ids()[[0, 170, 100]])
            assert self.downloads(seen) == 3

    def test_lengths_need_no_download_of_a_part(self, s3, built, private_copies):
        entry = self.entry(built, s3, PartCopies(private_copies, 1 << 30))
        assert len(entry.lengths()) == 180
        assert list(private_copies.iterdir()) == []

    def test_the_environment_says_where_copies_lie_and_how_many(self, tmp_path):
        copies = copies_from({"RAYSVC_PART_CACHE_DIR": str(tmp_path / "x"), "RAYSVC_PART_CACHE_GB": "0.5"})
        assert (copies.folder, copies.max_bytes) == (tmp_path / "x", 500_000_000)
        assert copies.folder.stat().st_mode & 0o777 == 0o700
        assert copies_from({"RAYSVC_PART_CACHE_DIR": str(tmp_path / "y")}).max_bytes > 0
        with pytest.raises(StoreError, match="RAYSVC_PART_CACHE_GB: 'much' is not a number"):
            copies_from({"RAYSVC_PART_CACHE_DIR": str(tmp_path), "RAYSVC_PART_CACHE_GB": "much"})
        assert node_copies() is node_copies()


def _wait_until(condition, timeout_s: float = 60.0) -> None:
    import time

    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.005)
