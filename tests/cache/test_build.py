"""Building under kills and rivals: one finished entry or none, and always the same bytes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import uuid
from collections import Counter
from functools import cache
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from raysvc.cache import manifest, names
from raysvc.cache.find import collect_garbage, find_entry, list_entries, next_generation
from raysvc.cache.gc import TEMPORARY
from raysvc.cache.manifest import Manifest
from raysvc.cache.part_table import PartTable
from raysvc.cache.store.fsspec_store import FsspecStore
from raysvc.cache.store.open import open_store
from raysvc.cache.store.posix import PosixStore
from raysvc.cache.store.store import Store
from raysvc.cache.writer import EntryWriter
from raysvc.errors import EntryError

from .builder import WatchedPosix, delayer
from .helpers import KEY, RECIPE, build, make_slices, make_table
from .servers import S3
from .stand_ins import NfsClient

SIZES = (5, 0, 7)


def run_builders(action: str, **options: Any) -> Any:
    """What `builder.py` prints."""
    script = Path(__file__).with_name("builder.py")
    environ = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    forks = "ignore:This process:DeprecationWarning"  # of Python 3.12 and newer, wherever a thread runs
    command = [sys.executable, "-W", forks, str(script), action, json.dumps(options)]
    done = subprocess.run(command, capture_output=True, text=True, env=environ, timeout=100)
    assert done.stderr == ""
    assert done.returncode == 0
    return json.loads(done.stdout)


def content(manifest: Manifest) -> list[tuple[int, str]]:
    return [(part.num_bytes, part.checksum) for part in manifest.parts]


@cache
def undisturbed(sizes: tuple[int, ...]) -> list[tuple[int, str]]:
    """The content that a build which nobody disturbs makes."""
    return content(build(open_store(f"memory://{uuid.uuid4().hex}"), make_slices(sizes)))


def assert_one_good_entry(store: Store, sizes: tuple[int, ...]) -> Manifest:
    entry = find_entry(store, KEY)
    assert entry is not None
    assert entry.verify() == []
    assert content(entry.manifest) == undisturbed(sizes)
    assert [item.state for item in list_entries(store)] == ["finished"]
    return entry.manifest


class TestKilled:
    """SIGKILL at every point that another process could see."""

    def check(self, store: Store, sizes: tuple[int, ...] = SIZES) -> tuple[str, int]:
        """No half entry; what was finished is kept; the next build ends with the right bytes and no rest."""
        before = find_entry(store, KEY)
        if before is not None:
            assert before.verify() == []
        kept = set(EntryWriter(store, KEY).receipts())
        listed = [name for name in store.list(KEY) if names.PART.fullmatch(name)]
        assert len(listed) - len(kept) <= 1
        made = build(store, make_slices(sizes))
        assert content(made) == undisturbed(sizes)
        after = Counter(name.split("-")[1] for name in store.list(KEY) if names.PART.fullmatch(name))
        assert all(after[f"{index:05d}"] == 1 for index in kept)
        assert_one_good_entry(store, sizes)
        collect_garbage(store, grace_s=0)
        small = {names.MANIFEST, names.STATE, names.DATASET_INFO}
        tables = {made.parts.info.name} if isinstance(made.parts, PartTable) else set()
        passing = (names.USED.fullmatch, lambda name: name.startswith(TEMPORARY))  # the second: for an hour
        left = {name for name in store.list(KEY) if not any(one(name) for one in passing)}
        assert left == small | {part.name for part in made.parts} | tables
        return ("finished" if before else "open"), len(kept)

    def check_datasets(self, folder: Path) -> None:
        """`datasets` sees an entry or none."""
        import datasets

        if (folder / names.STATE).exists() and (folder / names.DATASET_INFO).exists():
            assert len(datasets.load_from_disk(str(folder))) == sum(SIZES)
            assert (folder / names.MANIFEST).exists()
        else:
            with pytest.raises(FileNotFoundError):
                datasets.load_from_disk(str(folder))

    @pytest.mark.parametrize("most_inline", [1 << 20, 0], ids=["one file", "a table of parts"])
    def test_on_a_file_system(self, tmp_path, monkeypatch, most_inline):
        monkeypatch.setattr(manifest, "MOST_INLINE", most_inline)
        points = run_builders("kill", root=str(tmp_path), sizes=SIZES, options={}, most_inline=most_inline)
        for point in range(points):
            self.check_datasets(tmp_path / str(point) / KEY)
        stages = [self.check(open_store(str(tmp_path / str(point)))) for point in range(points)]
        assert stages == sorted(stages, key=lambda stage: (stage[0] == "finished", stage[1]))
        assert set(stages) == {("open", n) for n in range(4)} | {("finished", 3)}

    @pytest.mark.slow
    def test_on_s3(self, s3: S3):
        root, sizes = s3.store("kill-").url, (5,)
        points = run_builders("kill", root=root, sizes=sizes, options=s3.options)
        assert points == 2 * (2 * len(sizes) + 4)
        stages = [self.check(FsspecStore(f"{root}/{point}", s3.options), sizes) for point in range(points)]
        assert set(stages) == {("open", 0), ("open", 1), ("finished", 1)}

    def test_again_and_again_it_still_converges(self, tmp_path):
        sizes = (4,) * 12
        builders = run_builders("preempt", root=str(tmp_path), sizes=sizes, options={}, every=14)
        assert 4 < builders <= len(sizes) + 2
        assert_one_good_entry(open_store(str(tmp_path)), sizes)


class TestRivals:
    """Several builders of one key."""

    @pytest.mark.timeout(600)  # eight processes start at once
    @pytest.mark.parametrize("builders", [2, pytest.param(8, marks=pytest.mark.slow)])
    @pytest.mark.parametrize("where", ["posix", "s3"])
    def test_processes_converge_on_one_entry(self, request, tmp_path, where, builders):
        s3: S3 | None = request.getfixturevalue("s3") if where == "s3" else None
        root, options = (s3.store("race-").url, s3.options) if s3 else (str(tmp_path / "cache"), {})
        for seed in range(2 if where == "posix" else 1):
            out = tmp_path / f"out-{seed}"
            out.mkdir()
            here = f"{root}/{seed}"
            statuses = run_builders(
                "race", root=here, sizes=SIZES, options=options, builders=builders, seed=seed, out=str(out)
            )
            assert statuses == [0] * builders
            store = open_store(here, options)
            winner = assert_one_good_entry(store, SIZES)
            assert [Manifest.from_json(path.read_bytes(), "x") for path in out.iterdir()] == [
                winner
            ] * builders

    @pytest.mark.parametrize("builders", [2, 8])
    def test_nodes_on_nfs_converge_on_one_entry(self, tmp_path, builders):
        now = [0.0]
        root = str(tmp_path / "export")
        clients = [NfsClient(root, clock=lambda: now[0]) for _ in range(builders)]
        for client in clients:
            assert find_entry(client, KEY) is None
        manifests: list[Manifest] = []
        threads = [
            threading.Thread(target=lambda client=client: manifests.append(build(client)))
            for client in clients
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        winner = assert_one_good_entry(clients[0], SIZES)
        assert manifests == [winner] * builders

    def test_threads_in_memory_converge_on_one_entry(self):
        store = open_store("memory://rivals")
        manifests: list[Manifest] = []
        threads = [threading.Thread(target=lambda: manifests.append(build(store))) for _ in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert manifests == [assert_one_good_entry(store, SIZES)] * 8

    def test_what_losers_wrote_is_garbage_after_the_grace_period(self, tmp_path):
        store = WatchedPosix(str(tmp_path), point=delayer(0))
        threads = [threading.Thread(target=lambda: build(store)) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        parts = {part.name for part in find_entry(store, KEY).manifest.parts}
        assert collect_garbage(store, grace_s=3600) == []
        (removal,) = collect_garbage(store, grace_s=0)
        assert parts.isdisjoint(removal.files)
        assert {name for name in store.list(KEY) if names.PART.fullmatch(name)} == parts


class TestWriter:
    @pytest.fixture
    def store(self, tmp_path) -> Store:
        return open_store(str(tmp_path))

    def test_a_part_is_there_before_its_receipt_and_the_manifest_before_what_follows_from_it(self, tmp_path):
        order: list[str] = []

        class Watched(PosixStore):
            def _publish(self, staged: str, path: str) -> bool:
                order.append(os.path.basename(path).partition("-")[0])
                return super()._publish(staged, path)

        build(Watched(str(tmp_path)), make_slices((2,)))
        assert order[:5] == ["part", "receipt", names.MANIFEST, names.DATASET_INFO, names.STATE]
        assert order[5:] == os.listdir(tmp_path / names.INDEX)

    def test_a_damaged_or_partless_receipt_counts_as_none(self, store, tmp_path):
        writer = EntryWriter(store, KEY)
        receipts = [writer.write_part(index, table, {}) for index, table in enumerate(make_slices((3, 3, 3)))]
        (tmp_path / KEY / receipts[0].part.name).unlink()
        path = next((tmp_path / KEY).glob("receipt-00001-*"))
        path.write_bytes(path.read_bytes()[:-5])
        assert set(EntryWriter(store, KEY).receipts()) == {2}

    def test_the_meta_of_a_slice_comes_back(self, store):
        meta = {"row_counts": {"in": 3, "reason": {"too long": 1}}, "examples": ["ü", None, 1.5]}
        receipt = EntryWriter(store, KEY).write_part(0, make_table(3), meta)
        assert EntryWriter(store, KEY).receipts() == {0: receipt}
        assert receipt.meta == meta

    def test_of_several_receipts_of_a_slice_those_that_fit_count(self, store):
        writer = EntryWriter(store, KEY)
        for cut in ("a", "b", "a", "b"):
            writer.write_part(0, make_table(3), {"cut": cut})
        assert {
            writer.receipts(lambda one, cut=cut: one.meta["cut"] == cut)[0].meta["cut"] for cut in "ab"
        } == {"a", "b"}
        assert writer.receipts(lambda one: False) == {}

    @pytest.mark.parametrize("order", [[], [1], [0, 2], [1, 0], [0, 0], [0, 1, 2, 3]])
    def test_slices_must_be_complete_and_in_order(self, store, order):
        writer = EntryWriter(store, KEY)
        receipts = [writer.write_part(index, make_table(1), {}) for index in range(4)]
        if order == [0, 1, 2, 3]:
            assert writer.commit([receipts[i] for i in order], RECIPE, {}).num_rows == 4
        else:
            with pytest.raises(EntryError, match="without a gap"):
                writer.commit([receipts[i] for i in order], RECIPE, {})
            assert find_entry(store, KEY) is None

    def test_slices_must_have_the_same_columns(self, store):
        writer = EntryWriter(store, KEY)
        receipts = [
            writer.write_part(0, make_table(1), {}),
            writer.write_part(1, make_table(1).drop(["uid"]), {}),
        ]
        with pytest.raises(EntryError, match=r"slice 1 has .* slice 0 .*same columns"):
            writer.commit(receipts, RECIPE, {})

    def test_a_part_that_gc_removed_meanwhile_is_not_named_in_a_manifest(self, store):
        writer = EntryWriter(store, KEY)
        receipts = [writer.write_part(0, make_table(1), {})]
        collect_garbage(store, grace_s=0)
        with pytest.raises(EntryError, match=r"1 finished parts are gone.*run the build again"):
            writer.commit(receipts, RECIPE, {})

    def test_a_forced_build_lies_beside_the_finished_one(self, store):
        build(store)
        first = find_entry(store, KEY)
        assert next_generation(store, KEY) == 1
        build(store, make_slices((2,)), generation=next_generation(store, KEY))
        again = find_entry(store, KEY)
        assert (again.folder, again.num_rows) == (f"{KEY}.1", 2)
        assert first.table().num_rows == 12
        assert next_generation(store, KEY) == 2

    def test_a_forced_build_that_was_killed_goes_on_where_it_was(self, store):
        build(store)
        EntryWriter(store, KEY, next_generation(store, KEY)).write_part(0, make_slices()[0], {})
        assert next_generation(store, KEY) == 1
        assert set(EntryWriter(store, KEY, 1).receipts()) == {0}
        assert find_entry(store, KEY).folder == KEY

    def test_a_late_builder_ends_in_the_entry_that_was_finished_first(self, store):
        writer = EntryWriter(store, KEY)
        first = build(store)
        receipts = [writer.write_part(0, pa.concat_tables(make_slices()), {})]
        assert writer.commit(receipts, RECIPE, {"late": True}) == first
