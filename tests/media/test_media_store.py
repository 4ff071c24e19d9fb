"""Media in a cache root, on a disk and on a store in memory."""

from __future__ import annotations

import base64
import hashlib
import threading
import time
import urllib.parse
import uuid
from pathlib import Path
from types import SimpleNamespace

import pytest

from raysvc.cache.store.open import open_store
from raysvc.cache.store.posix import PosixStore
from raysvc.cache.store.store import Store
from raysvc.chat.row_errors import RowFault
from raysvc.errors import EntryError, StoreError
from raysvc.media import media_desk
from raysvc.media.media_desk import MediaDesk
from raysvc.media.media_index import read_digests, write_digests
from raysvc.media.media_store import FOLDER, digest_of, medium_path, read_medium, write_medium
from raysvc.media.medium import Medium, media_of, text_of

from .rows import data_url, jpeg


@pytest.fixture(params=["folder", "memory"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Store:
    return open_store(
        str(tmp_path / "cache") if request.param == "folder" else f"memory://{uuid.uuid4().hex}"
    )


def test_equal_bytes_are_one_file_under_their_digest(store: Store) -> None:
    names = {write_medium(store, data) for data in (b"one", b"two", b"one", b"one")}
    assert names == {hashlib.sha256(data).hexdigest() for data in (b"one", b"two")}
    for data in (b"one", b"two"):
        assert read_medium(store, hashlib.sha256(data).hexdigest()) == data
    files = [name for folder in store.list(FOLDER) for name in store.list(f"{FOLDER}/{folder}")]
    assert sorted(files) == sorted(names)


def test_bytes_of_another_digest_are_never_handed_out(store: Store) -> None:
    digest = hashlib.sha256(b"one").hexdigest()
    with pytest.raises(EntryError, match="the medium is missing"):
        read_medium(store, digest)
    store.write(medium_path(digest), b"two")
    with pytest.raises(EntryError, match="not those that were written"):
        read_medium(store, digest)


@pytest.mark.parametrize("name", ["", "../../etc/passwd", "a" * 63, "A" * 64, "a" * 64 + "\n"])
def test_what_is_no_digest_never_becomes_a_path(store: Store, name: str) -> None:
    with pytest.raises(EntryError, match="not the digest of a medium"):
        read_medium(store, name)


def test_the_list_of_an_entry_is_read_or_refused_with_the_reason(store: Store) -> None:
    digests = [hashlib.sha256(data).hexdigest() for data in (b"one", b"two")]
    told = write_digests(store, "entry", [*digests, digests[0]])
    assert read_digests(store, "entry", {"media": told}) == sorted(digests)
    assert read_digests(store, "entry", {}) == []
    with pytest.raises(EntryError, match="names no list"):
        read_digests(store, "entry", {"media": {"digests": "../etc/passwd"}})
    with pytest.raises(EntryError, match="is missing"):
        read_digests(store, "another", {"media": told})
    store.write(f"damaged/{told['digests']}", bytes(32))
    with pytest.raises(EntryError, match="is damaged"):
        read_digests(store, "damaged", {"media": told})


def taken(fetched: bytes | Exception = b"", **options: object) -> tuple[MediaDesk, list[str]]:
    """A desk whose files all hold the same, and the names that it fetched."""
    asked: list[str] = []

    def fetch(source: str, folder: str, most: int) -> bytes:
        asked.append(f"{folder}{source}")
        if isinstance(fetched, Exception):
            raise fetched
        return fetched

    return MediaDesk(SimpleNamespace(kinds=("image",)), None, fetch, **options), asked  # type: ignore[arg-type]


class SlowStore(PosixStore):
    """Has the first five writers wait for each other, counts who writes at once, and fails for one path."""

    broken = ""
    changed = threading.Condition()  # of the two counts
    writing = most = 0

    def create(self, path: str, data: bytes) -> bool:
        with self.changed:
            SlowStore.writing += 1
            SlowStore.most = max(self.most, self.writing)
            self.changed.notify_all()
            self.changed.wait_for(lambda: SlowStore.most > 4, 60)
        time.sleep(0.05)
        with self.changed:
            SlowStore.writing -= 1
        if self.broken and path.endswith(self.broken):
            raise StoreError(self.url, "the disk is full", "free some")
        return super().create(path, data)


def test_media_are_written_beside_each_other_and_all_are_there_when_the_desk_has_settled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, photos = SlowStore(str(tmp_path)), [jpeg(60, 44, seed) for seed in range(80)]
    desk = MediaDesk(SimpleNamespace(kinds=("image",)), store, lambda *_: b"")  # type: ignore[arg-type]
    for _ in range(2):
        found = [desk.take("image", photo) for photo in photos]
    last = desk.bytes_of(found[-1].sha256)
    desk.settle()
    assert SlowStore.most > 4
    assert last == photos[-1]
    assert [read_medium(store, one.sha256) for one in found] == photos
    monkeypatch.setattr(SlowStore, "broken", digest_of(jpeg(80, 44)))
    desk.take("image", jpeg(80, 44))
    with pytest.raises(StoreError, match="the disk is full"):
        desk.settle()
    desk.settle()


def test_an_image_is_the_same_however_a_row_names_it() -> None:
    photo = jpeg(60, 44)
    encoded = base64.b64encode(photo).decode()
    desk, asked = taken(FileNotFoundError())
    quoted = "data:image/jpeg," + urllib.parse.quote_from_bytes(photo)
    found = {
        desk.take("image", each)
        for each in (photo, {"bytes": photo}, {"url": data_url(photo)}, quoted, encoded)
    }
    found.add(taken(OSError("File name too long"))[0].take("image", encoded))
    [one] = found
    assert (*one.size, one.num_bytes) == (60, 44, len(photo))
    assert desk.bytes_of(one.sha256) == photo
    assert asked == [encoded]


def test_a_file_is_fetched_once_in_each_folder_and_the_last_ones_are_kept(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(media_desk, "PATHS_KEPT", 2)
    desk, asked = taken(jpeg(60, 44))
    desk.folder_of = lambda row: f"{row}/"
    for row, name in [(1, "a"), (1, "a"), (2, "a"), (1, "a"), (1, "b"), (1, "a"), (2, "a")]:
        desk.go_to(row)
        desk.take("image", name)
    assert asked == ["1/a", "2/a", "1/b", "2/a"]


@pytest.mark.parametrize(
    ("source", "reason"),
    [
        ("data:image/png;base64", "a data URL is broken"),
        ("data:image/png;base64,", "a data URL is broken"),
        ("x" * 65, "an image is missing"),
        ("", "an image is missing"),
    ],
)
def test_an_image_that_no_row_can_mean_is_refused(source: str, reason: str) -> None:
    with pytest.raises(RowFault) as caught:
        taken(FileNotFoundError())[0].take("image", source)
    assert caught.value.reason == reason


def test_a_file_that_is_larger_than_any_image_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(media_desk, "MAX_BYTES", 10)
    with pytest.raises(RowFault, match="more than 10 bytes"):
        taken(jpeg(60, 44))[0].take("image", "a.jpg")


def medium(**changes: object) -> Medium:
    given = {
        "sha256": "ab" * 32,
        "kind": "image",
        "size": (3, 4),
        "tokens": 5,
        "at": 6,
        "patches": 7,
        "num_bytes": 8,
    }
    return Medium(**{**given, **changes})  # type: ignore[arg-type]


def test_the_column_of_a_row_gives_its_media_back() -> None:
    both = (medium(), medium(sha256="cd" * 32, at=40), medium(kind="audio", size=(48000, 16000)))
    assert media_of(text_of(both)) == both
    assert text_of(()) is None
    assert media_of(None) == ()


@pytest.mark.parametrize(
    "text",
    [
        "{",
        "[1]",
        '[{"sha256": "x"}]',
        str(text_of((medium(sha256="../x"),))),
        str(text_of((medium(),))).replace("image", "video"),
        str(text_of((medium(),))).replace("image", "audio"),
        str(text_of((medium(at=-1),))),
    ],
)
def test_a_damaged_column_is_refused(text: str) -> None:
    with pytest.raises(EntryError, match="column media"):
        media_of(text)
