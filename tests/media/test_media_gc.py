"""Media live as long as an entry or a build refers to them, and no longer."""

from __future__ import annotations

import hashlib
import os
import shutil
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from raysvc.cache import names
from raysvc.cache.gc import Removal, collect_garbage
from raysvc.cache.store.open import open_store
from raysvc.cache.use_marker import Hold
from raysvc.cache.verify import mark_damaged, verify_folder
from raysvc.cache.writer import EntryWriter
from raysvc.errors import StoreError
from raysvc.media import media_gc
from raysvc.media.media_gc import remove_media
from raysvc.media.media_index import media_problems, read_digests
from raysvc.media.media_store import FOLDER, medium_path, write_medium
from raysvc.media.medium import media_of

from .families import llava
from .rows import data_url, jpeg, openai
from .test_media_build import build

FIRST, SECOND, BOTH = jpeg(60, 44), jpeg(90, 200, 1), jpeg(33, 61, 2)


def digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return llava(tmp_path_factory.mktemp("llava"))


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory, folder: Path) -> tuple[Path, list[str]]:
    """A root with two entries that share one medium, and the folders of the entries."""
    top = tmp_path_factory.mktemp("built")
    keys = []
    for own in (FIRST, SECOND):
        entry = build(top, folder, [openai([data_url(own), data_url(BOTH)])])
        keys.append(entry.key)
        for path in (top / "cache" / entry.key).glob("use*"):
            path.unlink()  # of this process, which lets go of nothing before it ends
    return top / "cache", keys


@pytest.fixture
def root(built: tuple[Path, list[str]], tmp_path: Path) -> Path:
    return Path(shutil.copytree(built[0], tmp_path / "cache"))


def kept(root: Path) -> set[str]:
    return {path.name for path in (root / FOLDER).rglob("*") if path.is_file() and len(path.name) == 64}


def collect(root: Path, **options: Any) -> list[Removal]:
    found = collect_garbage(open_store(str(root)), **{"grace_s": 0.0, "beside": remove_media, **options})
    return [one for one in found if one.folder == FOLDER]


def test_what_an_entry_refers_to_stays_and_goes_with_the_last_entry(
    root: Path, built: tuple[Path, list[str]]
) -> None:
    all_three = {digest(one) for one in (FIRST, SECOND, BOTH)}
    assert collect(root) == []
    assert kept(root) == all_three
    shutil.rmtree(root / built[1][0])
    (removal,) = collect(root)
    assert removal.files == (digest(FIRST),)
    assert removal.num_bytes == len(FIRST)
    assert kept(root) == all_three - {digest(FIRST)}
    collect(root, older_than_s=0.0)  # the last entry goes
    collect(root)
    assert kept(root) == set()
    assert not (root / media_gc.MARK).exists()


def test_a_look_removes_nothing_and_a_young_medium_stays(root: Path) -> None:
    store = open_store(str(root))
    orphan = write_medium(store, b"an orphan")
    (seen,) = collect(root, dry_run=True)
    assert seen.files == (orphan,)
    assert collect(root, grace_s=3600.0) == []
    old = time.time() - 7200
    os.utime(root / medium_path(orphan), (old, old))
    assert [one.files for one in collect(root, grace_s=3600.0)] == [(orphan,)]
    assert orphan not in kept(root)


def unfinished(root: Path, media: list[str]) -> str:
    """A build with one finished slice that refers to media."""
    import pyarrow as pa

    writer = EntryWriter(open_store(str(root)), "ab" * 32, 0)
    table = pa.table(
        {
            "input_ids": pa.array([[1]], pa.list_(pa.int32())),
            "loss_mask": pa.array([[1]], pa.list_(pa.uint8())),
        }
    )
    writer.write_part(0, table, {"media": media})
    return writer.folder


def test_the_receipts_of_a_build_that_stopped_protect_its_media(root: Path) -> None:
    store = open_store(str(root))
    named, orphan = write_medium(store, b"named"), write_medium(store, b"orphan")
    folder = unfinished(root, [named])
    old = time.time() - 30
    for path in (root / FOLDER).rglob("*"):
        os.utime(path, (old, old))
    (removal,) = collect(root, grace_s=20.0)
    assert removal.files == (orphan,)
    assert named in kept(root)
    shutil.rmtree(root / folder)
    assert [one.files for one in collect(root, grace_s=20.0)] == [(named,)]


def test_nothing_is_removed_while_a_build_runs(root: Path) -> None:
    store = open_store(str(root))
    orphan = write_medium(store, b"orphan")
    with Hold(store, "cd" * 32, "a build"):
        (skipped,) = collect(root)
        assert (skipped.action, skipped.files) == ("skipped", ())
        assert "is being built" in skipped.reason
        assert orphan in kept(root)
        media_gc.wait_for_removal(store, 0.0)  # the mark is gone
    assert [one.files for one in collect(root)] == [(orphan,)]


def test_a_build_waits_for_a_removal_that_has_begun(root: Path) -> None:
    store = open_store(str(root))
    assert media_gc.begin_removal(store, time.time())
    with pytest.raises(StoreError, match="a removal of media has begun"):
        media_gc.wait_for_removal(store, 0.1)
    assert not media_gc.begin_removal(store, time.time()), "another gc leaves it alone"
    assert collect(root) == []
    ender = threading.Timer(0.3, media_gc.end_removal, [store])
    ender.start()
    media_gc.wait_for_removal(store, 30.0)
    assert names.DELETING not in store.list(FOLDER)
    store.create(media_gc.MARK, b"{}")
    assert media_gc.begin_removal(store, time.time() + 2 * media_gc.STALE_S), (
        "a killed one's mark is taken over"
    )


def test_an_entry_that_cannot_be_read_keeps_all_media(root: Path, built: tuple[Path, list[str]]) -> None:
    orphan = write_medium(open_store(str(root)), b"orphan")
    for path in (root / built[1][0]).glob("media-*.bin"):
        path.unlink()
    (skipped,) = collect(root)
    assert (skipped.action, skipped.files) == ("skipped", ())
    assert orphan in kept(root)


def test_verify_names_a_broken_medium_and_a_build_makes_it_again(
    root: Path, built: tuple[Path, list[str]], folder: Path, tmp_path: Path
) -> None:
    store, key = open_store(str(root)), built[1][0]
    assert verify_folder(store, key, media_problems) == []
    path = root / medium_path(digest(BOTH))
    data = bytearray(path.read_bytes())
    data[100] ^= 1
    path.chmod(0o644)
    path.write_bytes(data)
    (problem,) = verify_folder(store, key, media_problems)
    assert (problem.name, problem.kind) == (medium_path(digest(BOTH)), "content")
    mark_damaged(store, key, [problem])
    assert not path.exists()
    assert names.DAMAGED in store.list(key)
    again = build(tmp_path, folder, [openai([data_url(FIRST), data_url(BOTH)])])
    assert again.key == key
    assert path.read_bytes() == BOTH
    assert verify_folder(store, again.entries[0].folder, media_problems) == []
    path.unlink()
    (problem,) = verify_folder(store, again.entries[0].folder, media_problems)
    assert problem.kind == "missing"


def test_an_entry_names_its_media_once_each(
    root: Path, built: tuple[Path, list[str]], folder: Path, tmp_path: Path
) -> None:
    twice = build(
        tmp_path, folder, [openai([data_url(FIRST)] * 2), openai([data_url(FIRST), data_url(SECOND)])]
    )
    assert twice.report["media"]["count"] == 2
    found = read_digests(twice.entries[0].store, twice.entries[0].folder, twice.report)
    assert found == sorted({digest(FIRST), digest(SECOND)})
    assert {one.sha256 for row in range(2) for one in media_of(twice.row(row)["media"])} == set(found)
    collect(root)
    assert read_digests(twice.entries[0].store, twice.entries[0].folder, twice.report) == found
