"""Removing what nobody needs, and nothing else."""

from __future__ import annotations

import errno
import os
import shutil
import subprocess
import sys
import threading
import time
import uuid
from pathlib import Path

import pytest

from raysvc.cache import names, use_marker
from raysvc.cache.entry import Entry
from raysvc.cache.find import collect_garbage, find_entry, list_entries, next_generation, open_finished
from raysvc.cache.key import cache_key
from raysvc.cache.manifest import Manifest
from raysvc.cache.store.open import open_store
from raysvc.cache.store.posix import PosixStore
from raysvc.cache.store.store import Store
from raysvc.cache.use_marker import store_now
from raysvc.cache.verify import mark_damaged
from raysvc.cache.writer import EntryWriter
from raysvc.errors import EntryError, StoreError
from raysvc.pipelines.sources.scan_memo import Memo

from .helpers import KEY, RECIPE, build, make_slices, make_table

DAY_S = 86400.0


@pytest.fixture
def store(tmp_path) -> PosixStore:
    return open_store(str(tmp_path / "cache"))


def age(store: PosixStore, folder: str, by_s: float, *only: str) -> None:
    """Make files older than they are."""
    for path in [*Path(store.root, folder).iterdir(), Path(store.root, folder)]:
        if not only or path.name in only:
            old = path.stat().st_mtime - by_s
            os.utime(path, (old, old))


def build_named(store: Store, name: str) -> str:
    build(store, recipe=RECIPE | {"name": name})
    return cache_key(RECIPE | {"name": name})


def folders(store: Store) -> set[str]:
    return {item.folder for item in list_entries(store)}


def test_nothing_young_is_touched(store):
    build(store)
    EntryWriter(store, build_named(store, "x"), 1).write_part(0, make_table(3), {})
    before = {folder: store.list(folder) for folder in folders(store)}
    assert collect_garbage(store) == []
    assert {folder: store.list(folder) for folder in folders(store)} == before


def test_receipts_and_temporary_files_of_a_finished_entry_go_after_the_grace_period(store):
    manifest = build(store)
    Path(store.root, KEY, ".tmp-left").write_text("x")
    Path(store.root, ".probe-left").write_text("x")
    age(store, KEY, 2 * DAY_S)
    age(store, "", 2 * DAY_S, ".probe-left")
    collect_garbage(store)
    kept = {names.MANIFEST, names.STATE, names.DATASET_INFO} | {part.name for part in manifest.parts}
    assert set(store.list(KEY)) == kept
    assert store.list() == (names.INDEX, KEY)
    assert find_entry(store, KEY).verify() == []


def test_records_of_scans_go_when_they_are_old_and_no_sooner(store):
    memo = Memo(store)
    memo.put({"path": "old"}, {"size": 1})
    memo.put({"path": "new"}, {"size": 2})
    collect_garbage(store, grace_s=0)
    old = max(Path(store.root, names.SCANS).iterdir(), key=lambda path: b"old" in path.read_bytes())
    age(store, names.SCANS, 91 * DAY_S, old.name)
    assert [removal.files for removal in collect_garbage(store)] == [(old.name,)]
    assert Memo(store).get({"path": "old"}) is None
    assert Memo(store).get({"path": "new"}) == {"size": 2}


def test_a_build_that_stopped_long_ago_goes_and_one_that_goes_on_stays(store):
    for key, age_s in (("a" * 64, 2 * DAY_S), ("b" * 64, 0.5 * DAY_S)):
        EntryWriter(store, key).write_part(0, make_table(3), {})
        age(store, key, age_s)
    (removal,) = collect_garbage(store)
    assert (removal.folder, removal.action, removal.reason) == (
        "a" * 64,
        "removed",
        "its build did not go on",
    )
    assert folders(store) == {"b" * 64}


def test_an_old_entry_is_marked_first_and_removed_a_grace_period_later(store):
    build(store)
    age(store, KEY, 10 * DAY_S)
    entry = open_finished(f"{store.url}/{KEY}")
    (mark,) = [one for one in collect_garbage(store, older_than_s=7 * DAY_S) if one.action == "marked"]
    assert (mark.folder, mark.num_bytes > 0) == (KEY, True)
    assert "was not used for 864" in mark.reason
    assert find_entry(store, KEY) is None
    with pytest.raises(EntryError, match="being removed by gc"):
        entry.hold("late reader")
    with pytest.raises(EntryError, match="being removed by gc"):
        entry.table()
    collect_garbage(store, older_than_s=7 * DAY_S)
    assert folders(store) == {KEY}
    age(store, KEY, 2 * DAY_S)
    assert [one.action for one in collect_garbage(store, older_than_s=7 * DAY_S)] == ["removed"]
    assert store.list() == ()


def test_the_mark_goes_last_and_the_manifest_first(store):
    order: list[str] = []

    class Watched(PosixStore):
        def delete(self, name: str) -> None:
            order.append(name.rpartition("/")[2])
            super().delete(name)

    build(store)
    collect_garbage(Watched(store.root), older_than_s=0, grace_s=0)
    deleted = [name for name in order if not name.startswith((".", "receipt"))]
    assert deleted[1] == names.MANIFEST, "after its record in the index"
    assert deleted[-2:] == [names.DELETING, KEY]


def test_the_least_recently_used_entries_go_until_the_rest_fits(store):
    keys = [build_named(store, name) for name in "abc"]
    for key, days in zip(keys, (1, 3, 2), strict=True):
        age(store, key, days * DAY_S)
    use_marker.Hold(store, keys[1], "reader").release()
    size = sum(item.num_bytes for item in list_entries(store)) / 3
    marks = collect_garbage(store, max_bytes=int(2.5 * size), grace_s=30 * DAY_S)
    assert [one.folder for one in marks] == [keys[2]], "the oldest one was used just now"
    with use_marker.Hold(store, keys[1], "reader") as hold:
        age(store, keys[1], 2 * use_marker.USE_TTL_S, hold._marker.name)
        marks = collect_garbage(store, max_bytes=int(1.5 * size), grace_s=30 * DAY_S)
        assert [one.folder for one in marks] == [keys[0]], "a marker that ended is still a sign of use"


def test_an_entry_in_use_is_never_touched(store):
    keys = [build_named(store, name) for name in "abcd"]
    for key in keys:
        age(store, key, 10 * DAY_S)
    with use_marker.Hold(store, keys[0], "reader"):
        removals = collect_garbage(
            store, older_than_s=1.0, max_bytes=0, in_use=[keys[1], f"{store.url}/{keys[2]}/"], grace_s=0
        )
        assert {one.folder for one in removals if one.action == "marked"} == {keys[3]}
        assert folders(store) == set(keys[:3])
        assert all(find_entry(store, key).verify() == [] for key in keys[:3])


def test_a_marked_entry_that_is_held_after_all_is_waited_for(store):
    build(store)
    hold = use_marker.Hold(store, KEY, "reader")
    store.create(f"{KEY}/{names.DELETING}", b"{}")
    age(store, KEY, 2 * DAY_S, names.DELETING, names.MANIFEST)
    assert [
        one
        for one in collect_garbage(store)
        if one.action == "removed" and KEY in one.folder and not one.files
    ] == []
    assert find_entry(store, KEY) is None
    assert names.MANIFEST in store.list(KEY)
    hold.release()
    collect_garbage(store)
    assert folders(store) == set()


def test_damaged_and_superseded_entries_go(store):
    build(store)
    mark_damaged(store, KEY, [])
    build(store)
    build(store, make_slices((1,)), generation=next_generation(store, KEY))
    assert find_entry(store, KEY).folder == f"{KEY}.2"
    reasons = {one.folder: one.reason for one in collect_garbage(store) if one.action == "marked"}
    assert reasons == {KEY: "it is damaged", f"{KEY}.1": f"{KEY}.2 replaces it"}
    collect_garbage(store, grace_s=0)
    assert folders(store) == {f"{KEY}.2"}
    assert find_entry(store, KEY).num_rows == 1


def test_a_dry_run_tells_the_same_and_does_nothing(store):
    build(store)
    build_named(store, "other")
    EntryWriter(store, "a" * 64).write_part(0, make_table(3), {})
    before = {folder: store.list(folder) for folder in folders(store)}
    dry = collect_garbage(store, older_than_s=0, grace_s=0, dry_run=True)
    assert {folder: store.list(folder) for folder in folders(store)} == before
    wet = collect_garbage(store, older_than_s=0, grace_s=0)
    assert [(one.folder, one.action, one.num_bytes) for one in dry] == [
        (one.folder, one.action, one.num_bytes) for one in wet
    ]
    assert folders(store) == set()


def test_folders_of_others_are_left_alone(store):
    build(store)
    for folder in ("not a key!", "a.b.c", ".hidden"):
        Path(store.root, folder).mkdir()
        Path(store.root, folder, "file").write_text("x")
        age(store, folder, 99 * DAY_S)
    Path(store.root, "README").write_text("x")
    collect_garbage(store, older_than_s=0, max_bytes=0, grace_s=0)
    assert set(store.list()) == {"not a key!", "a.b.c", ".hidden", "README"}


@pytest.mark.parametrize("where", ["memory", "s3"])
def test_it_works_on_object_stores(request, where):
    store = (
        request.getfixturevalue("s3").store("gc-")
        if where == "s3"
        else open_store(f"memory://{uuid.uuid4().hex}")
    )
    key = build_named(store, "old")
    EntryWriter(store, KEY).write_part(0, make_table(3), {})
    with find_entry(store, key).hold("reader"):
        assert collect_garbage(store, older_than_s=0, grace_s=0)
        assert folders(store) == {key}
    collect_garbage(store, older_than_s=0, grace_s=0)
    assert tuple(store.list()) == ()


def test_ages_are_by_the_clock_of_the_store(store):
    class Ahead(PosixStore):
        """A server whose clock is a day ahead."""

        def _stage(self, staged: str, data: bytes | memoryview) -> None:
            super()._stage(staged, data)
            os.utime(staged, (time.time() + DAY_S,) * 2)

    ahead = Ahead(store.root)
    EntryWriter(ahead, KEY).write_part(0, make_table(3), {})
    os.utime(Path(store.root, KEY), (time.time() + DAY_S,) * 2)
    assert abs(store_now(ahead) - time.time() - DAY_S) < 60
    assert collect_garbage(ahead, grace_s=3600) == []


class TestHold:
    def test_renewing_leaves_one_marker_and_never_none(self, store):
        build(store)
        seen: list[int] = []

        class Watched(PosixStore):
            def delete(self, name: str) -> None:
                super().delete(name)
                seen.append(sum(bool(names.USE.fullmatch(one)) for one in self.list(KEY)))

        with use_marker.Hold(Watched(store.root), KEY, "reader") as hold:
            hold.renew()
            hold.renew()
            assert seen == [1, 1]
        assert seen == [1, 1, 0]

    def test_a_reader_that_cannot_write_reads_all_the_same(self, store, caplog):
        class ReadOnly(PosixStore):
            def write(self, name: str, data: bytes | memoryview) -> None:
                raise StoreError(self.root, "cannot be written", "choose another cache.root")

        build(store)
        with use_marker.Hold(ReadOnly(store.root), KEY, "reader"):
            assert "not marked as used" in caplog.text


class TestUse:
    """An entry that is used stays; one that nobody uses goes."""

    def test_an_entry_that_a_reader_has_open_is_held_until_it_is_let_go_of(self, store):
        build(store)
        entry = open_finished(f"{store.url}/{KEY}")
        entry.row(0)
        age(store, KEY, 10 * DAY_S, *(n for n in store.list(KEY) if not names.USE.fullmatch(n)))
        assert collect_garbage(store, older_than_s=0, max_bytes=0, grace_s=0) == []
        assert entry.row(entry.row_ids()[7])["source_row"] == 7
        assert open_finished(entry.uri).verify() == []
        del entry
        wait_until(lambda: not any(names.USE.fullmatch(name) for name in store.list(KEY)))
        collect_garbage(store, older_than_s=0, grace_s=0)
        assert folders(store) == set()

    def test_a_hit_is_a_use(self, store):
        build(store)
        age(store, KEY, 40 * DAY_S)
        assert find_entry(store, KEY) is not None
        assert collect_garbage(store, older_than_s=30 * DAY_S)[-1].reason == "nothing needs them"
        age(store, KEY, 20 * DAY_S)
        assert collect_garbage(store, older_than_s=30 * DAY_S) == [], (
            "the sign of use outlives the grace period"
        )
        age(store, KEY, 20 * DAY_S)
        assert [one.action for one in collect_garbage(store, older_than_s=30 * DAY_S)] == ["marked"]

    def test_many_hits_leave_one_sign(self, store):
        build(store)
        for _ in range(5):
            find_entry(store, KEY)
        assert sum(bool(names.USED.fullmatch(name)) for name in store.list(KEY)) == 1

    @pytest.mark.parametrize("grace_s", [0, 3600.0])
    def test_what_is_held_after_the_listing_is_not_deleted(self, store, grace_s):
        """A reader comes between gc's listing and its first deletion."""
        build(store)
        holds = []

        class Late(PosixStore):
            def create(self, name: str, data: bytes) -> bool:
                if name.endswith(names.DELETING) and not holds:
                    holds.append(use_marker.Hold(store, KEY, "late reader"))
                return super().create(name, data)

        age(store, KEY, DAY_S)
        collect_garbage(Late(store.root), older_than_s=0, grace_s=grace_s)
        age(store, KEY, DAY_S, names.DELETING)
        collect_garbage(store, older_than_s=0, grace_s=grace_s)
        assert Entry(store, KEY, Manifest.from_json(store.read(f"{KEY}/{names.MANIFEST}"), "")).verify() == []
        holds[0].release()

    def test_a_build_that_runs_is_not_deleted(self, store):
        with use_marker.Hold(store, KEY, "builder"):
            EntryWriter(store, KEY).write_part(0, make_table(3), {})
            collect_garbage(store, grace_s=0)
            assert len(EntryWriter(store, KEY).receipts()) == 1
        collect_garbage(store, grace_s=0)
        assert folders(store) == set()

    def test_holds_are_renewed_without_anybody_asking(self, store, monkeypatch):
        monkeypatch.setattr(use_marker, "USE_TTL_S", 0.2)
        monkeypatch.setattr(use_marker, "_keepers", {})
        build(store)
        with use_marker.Hold(store, KEY, "reader"):
            first = {name for name in store.list(KEY) if names.USE.fullmatch(name)}
            wait_until(lambda: {n for n in store.list(KEY) if names.USE.fullmatch(n)}.isdisjoint(first))

    def test_a_store_that_hangs_keeps_no_other_one_waiting(self, store, monkeypatch, tmp_path):
        """A hold that was let go of on a network that answers no more."""
        answers = threading.Event()

        class Hanging(PosixStore):
            def local_path(self, name):
                return None

            def delete(self, name):
                answers.wait(60)
                super().delete(name)

        away = Hanging(str(tmp_path / "away"))
        build(away)
        build(store)
        monkeypatch.setattr(use_marker, "USE_TTL_S", 0.2)
        monkeypatch.setattr(use_marker, "_keepers", {})
        use_marker.Hold(away, KEY, "reader")
        with use_marker.Hold(store, KEY, "reader"):
            first = {name for name in store.list(KEY) if names.USE.fullmatch(name)}
            wait_until(lambda: {n for n in store.list(KEY) if names.USE.fullmatch(n)}.isdisjoint(first))
            assert any(names.USE.fullmatch(name) for name in away.list(KEY))
        answers.set()
        wait_until(lambda: not any(names.USE.fullmatch(name) for name in away.list(KEY)))

    def test_a_thread_that_renews_ends_with_its_last_hold(self, store, monkeypatch):
        monkeypatch.setattr(use_marker, "USE_TTL_S", 0.2)
        monkeypatch.setattr(use_marker, "_keepers", {})
        build(store)
        keeper = use_marker._keeper_of(store, KEY)
        for _ in range(2):
            with use_marker.Hold(store, KEY, "reader"):
                assert keeper._thread is not None
            wait_until(lambda: keeper._thread is None)

    def test_a_forked_child_does_not_end_its_parents_hold(self, store):
        build(store)
        hold = use_marker.Hold(store, KEY, "parent")
        child = os.fork()
        if child == 0:
            del hold
            use_marker._end_local()
            os._exit(0)
        assert os.waitpid(child, 0)[1] == 0
        assert hold._marker.name in store.list(KEY)
        hold.release()


class TestLooking:
    """A dry run, and what gc can do where writing fails."""

    def test_a_dry_run_works_on_a_root_that_cannot_be_written(self, store):
        build(store)
        age(store, KEY, 10 * DAY_S)

        class ReadOnly(PosixStore):
            def _appear(self, name: str, data: bytes | memoryview) -> bool:
                raise StoreError(self.root, "cannot be written (read-only)", "choose another cache.root")

            def delete(self, name: str) -> None:
                raise StoreError(self.root, "cannot be written (read-only)", "choose another cache.root")

        looked = collect_garbage(ReadOnly(store.root), older_than_s=DAY_S, dry_run=True)
        assert looked[-1].action == "marked"

    def test_gc_frees_a_disk_that_is_full(self, store):
        build(store)
        age(store, KEY, 10 * DAY_S)

        class Full(PosixStore):
            """Names can be made, blocks are used up, as on ext4 and tmpfs."""

            def _stage(self, staged: str, data: bytes | memoryview) -> None:
                if len(data):
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
                super()._stage(staged, data)

        collect_garbage(Full(store.root), older_than_s=DAY_S, grace_s=0)
        assert folders(store) == set()

    def test_a_folder_that_cannot_be_read_is_named_and_the_rest_cleaned(self, store):
        bad, good = build_named(store, "bad"), build_named(store, "good")

        class Locked(PosixStore):
            def scan(self, folder: str = "", few_of: tuple[str, ...] = ()):
                if folder == bad:
                    raise StoreError(self.root, f"{bad} cannot be read", "ask who owns it")
                return super().scan(folder, few_of)

        removals = collect_garbage(Locked(store.root), older_than_s=0, grace_s=0)
        assert [(one.folder, one.action) for one in removals if one.action != "removed"] == [
            (bad, "skipped"),
            (good, "marked"),
        ]
        assert {one.folder: one.state for one in list_entries(Locked(store.root))} == {bad: "unreadable"}


def wait_until(condition, timeout_s: float = 60.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.005)


class TestOthersAtWork:
    """Several gc and builders in one root, at the moments that hurt."""

    def test_a_temporary_file_that_somebody_may_be_writing_stays(self, store):
        build(store)
        young = [".tmp-a", ".probe-a", ".clock-a", f"{KEY}/.tmp-b"]
        for name in young:
            store.write(name, b"x")
        collect_garbage(store, grace_s=0)
        assert {name for name in young if (Path(store.root) / name).exists()} == set(young)

    def test_a_write_whose_folder_gc_removed_is_made_again(self, store, monkeypatch):
        real, lost = os.link, []

        def link(source: str, target: str) -> None:
            if not lost:
                lost.append(source)
                shutil.rmtree(os.path.dirname(source))
            real(source, target)

        monkeypatch.setattr(os, "link", link)
        assert store.create(f"{KEY}/{names.DELETING}", b"x")
        assert lost
        assert store.read(f"{KEY}/{names.DELETING}") == b"x"

    def test_a_folder_that_another_gc_removed_meanwhile_is_no_error(self, store, monkeypatch):
        def unlink(path: str) -> None:
            raise IsADirectoryError(errno.EISDIR, "is a directory", path)

        monkeypatch.setattr(os, "unlink", unlink)
        store.delete("gone")

    def test_a_clock_file_that_somebody_deleted_is_a_store_error(self, store, monkeypatch):
        monkeypatch.setattr(PosixStore, "scan", lambda self, folder="": ())
        with pytest.raises(StoreError, match="not listed"):
            store_now(store)


def test_a_hold_that_is_let_go_of_just_before_the_exit_leaves_no_marker(tmp_path):
    """The thread that ends it is a daemon: the exit waits for the store, not for the thread."""
    build(open_store(str(tmp_path)))
    code = f"""
import threading, time
from raysvc.cache.store.posix import PosixStore
from raysvc.cache.use_marker import Hold
began, raw = threading.Event(), PosixStore.write
def slow(self, name, data):
    if "used-" in name:
        began.set()
        time.sleep(0.3)
    raw(self, name, data)
hold = Hold(PosixStore({str(tmp_path)!r}), {KEY!r}, "a reader")
PosixStore.write = slow
del hold
assert began.wait(30)
"""
    environ = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    subprocess.run([sys.executable, "-c", code], env=environ, check=True)
    left = open_store(str(tmp_path)).list(KEY)
    assert not any(names.USE.fullmatch(name) or name.startswith(".tmp-") for name in left)
    assert any(names.USED.fullmatch(name) for name in left)
