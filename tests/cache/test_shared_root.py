"""A root that many people use: misses are cheap, dead stores are refused soon, terminals stay safe."""

from __future__ import annotations

import socket
import time

import pytest

from raysvc.cache import names
from raysvc.cache.entry import Entry
from raysvc.cache.find import find_entry
from raysvc.cache.generations import build_generation
from raysvc.cache.index import nearest_folders, note
from raysvc.cache.key import cache_key
from raysvc.cache.store import retry
from raysvc.cache.store.open import open_store
from raysvc.cli.view import printable
from raysvc.errors import StoreError

from .helpers import RECIPE, build
from .servers import S3, proxy


def test_a_miss_asks_as_often_for_many_entries_as_for_one(s3: S3):
    asked = []
    for count in (1, 12):
        store = s3.store("miss-")
        for number in range(count):
            build(store, recipe=RECIPE | {"name": str(number)})
        wanted = RECIPE | {"name": "another"}
        with proxy(s3) as seen:
            through = open_store(store.url, seen.options)
            through.list()
            before = len(seen.proxy.seen)
            assert find_entry(through, cache_key(wanted)) is None
            (folder,) = nearest_folders(through, wanted, 1)
            assert Entry.open(through, folder).recipe["name"] != "another"
            assert build_generation(through, cache_key(wanted)) == 0
            asked.append(len(seen.proxy.seen) - before)
    assert asked[0] == asked[1] <= 7


def test_the_nearest_entry_shares_most_fields(tmp_path):
    store = open_store(str(tmp_path))
    recipes = {"a" * 64: {"x": 1, "y": 2, "z": 3}, "b" * 64: {"x": 1, "y": 9, "z": 9}}
    for folder, recipe in recipes.items():
        note(store, folder, recipe)
    store.write(f"{names.INDEX}/nonsense", b"")
    assert nearest_folders(store, {"x": 1, "y": 2, "z": 4}, 2) == ["a" * 64, "b" * 64]
    assert nearest_folders(store, {"y": 9, "z": 9}, 1) == ["b" * 64]


@pytest.mark.parametrize("kind", ["hangs", "refuses"])
def test_a_dead_store_is_refused_soon(monkeypatch, kind):
    """A server that takes connections and never answers, and one that is not there."""
    monkeypatch.setattr(retry, "FIRST_ANSWER_S", 1.0)
    monkeypatch.setattr(retry.first_answer, "__defaults__", (1.0,))
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        if kind == "hangs":
            server.listen()
        port = server.getsockname()[1]
        options = {"key": "a", "secret": "b", "endpoint_url": f"http://127.0.0.1:{port}"}
        begin = time.monotonic()
        with pytest.raises(StoreError, match="did not answer"):
            open_store("s3://dead/root", options).list()
        assert time.monotonic() - begin < 30  # a minute and more without the limit


def test_a_web_server_is_no_root():
    with pytest.raises(StoreError, match="nothing can be written there") as caught:
        open_store("https://TOKEN@host/cache")
    assert "TOKEN" not in str(caught.value)


def test_rows_cannot_steer_a_terminal():
    text = "a\x1b]0;title\x07b\x9bc\u202ed\r\tü\n日本"
    assert printable(text) == "a\\x1b]0;title\\x07b\\x9bc\\u202ed\\r\tü\n日本"
