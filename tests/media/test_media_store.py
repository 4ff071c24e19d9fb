"""Media in a cache root, on a disk and on a store in memory."""

from __future__ import annotations

import hashlib
import uuid
from pathlib import Path

import pytest

from raysvc.cache.store.open import open_store
from raysvc.cache.store.store import Store
from raysvc.errors import EntryError
from raysvc.media.media_store import FOLDER, medium_path, read_medium, write_medium
from raysvc.media.medium import Medium, digests_of, media_of, text_of


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


def medium(**changes: object) -> Medium:
    given = {
        "sha256": "ab" * 32,
        "kind": "image",
        "width": 3,
        "height": 4,
        "tokens": 5,
        "at": 6,
        "patches": 7,
        "num_bytes": 8,
    }
    return Medium(**{**given, **changes})  # type: ignore[arg-type]


def test_the_column_of_a_row_gives_its_media_back() -> None:
    both = (medium(), medium(sha256="cd" * 32, at=40))
    assert media_of(text_of(both)) == both
    assert text_of(()) is None
    assert media_of(None) == ()
    assert digests_of([text_of(both), None, text_of(both[:1])]) == ["ab" * 32, "cd" * 32]


@pytest.mark.parametrize(
    "text",
    [
        "{",
        "[1]",
        '[{"sha256": "x"}]',
        str(text_of((medium(sha256="../x"),))),
        str(text_of((medium(kind="video"),))),
        str(text_of((medium(at=-1),))),
    ],
)
def test_a_damaged_column_is_refused(text: str) -> None:
    with pytest.raises(EntryError, match="column media"):
        media_of(text)
