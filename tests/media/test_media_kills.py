"""A build of rows with images that is killed halfway, again and again, beside a gc that never stops."""

from __future__ import annotations

import hashlib
import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from raysvc.cache.gc import collect_garbage
from raysvc.cache.store.open import open_store
from raysvc.cache.verify import verify_folder
from raysvc.media.media_gc import remove_media
from raysvc.media.media_index import media_problems
from raysvc.media.media_store import FOLDER, write_medium
from raysvc.media.medium import media_of

from .families import llava
from .rows import data_url, jpeg, openai, write_jsonl

ROWS = 120
PROGRAM = """
import itertools, json, sys, time
import raysvc
from raysvc.media import media_desk
write, written = media_desk.write_medium, itertools.count(1)
def some(store, data):
    while next(written) > int(sys.argv[2]):
        time.sleep(600)
    return write(store, data)
media_desk.write_medium = some
entry = raysvc.tokenize(**json.loads(sys.argv[1]))
print(entry.uri)
"""


def media_in(root: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in (root / FOLDER).rglob("*") if len(path.name) == 64}


def as_if_hours_had_passed(root: Path) -> set[str]:
    """Marks of killed builds are gone and media old; the media that receipts name."""
    for mark in root.glob("*/use-*.json"):
        mark.unlink()
    old = time.time() - 7200
    for path in (root / FOLDER).rglob("*"):
        if path.is_file():
            os.utime(path, (old, old))
    receipts = [json.loads(path.read_bytes()) for path in root.glob("*/receipt-*.json")]
    return {digest for one in receipts for digest in one["meta"].get("media", ())}


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_kills_and_gc_lose_no_medium_and_leave_no_orphan(tmp_path: Path) -> None:
    folder, root = llava(tmp_path / "llava"), tmp_path / "cache"
    images = [jpeg(40 + n % 50, 30 + n % 7, n) for n in range(ROWS)]
    rows = write_jsonl(tmp_path / "rows.jsonl", (openai([data_url(one)]) for one in images))
    job = {
        "source": {"path": str(rows)},
        "tokenizer": str(folder),
        "cache": {"root": str(root)},
        "workers": {"slice_mb": 0.02},
    }

    def command(most: int) -> list[str]:
        """Of a build that waits for its end once it has written so many media."""
        return [sys.executable, "-c", PROGRAM, json.dumps(job), str(most)]

    store, rng, kills = open_store(str(root)), random.Random(7), 0
    orphan = write_medium(store, b"of no row")
    while kills < 2:
        before, end = len(media_in(root)), time.monotonic() + 300
        more = rng.randint(15, 40)
        process = subprocess.Popen(command(more), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        while process.poll() is None and len(media_in(root)) < before + more and time.monotonic() < end:
            if any(root.glob("*/use-*.json")):
                collect_garbage(
                    store, beside=remove_media, grace_s=0.0
                )  # it must leave a build alone that runs
            time.sleep(0.02)
        assert process.poll() is None, "the build ended before it was killed"
        assert len(media_in(root)) == before + more
        os.kill(process.pid, signal.SIGKILL)
        process.wait()
        assert orphan in media_in(root), "a build was running whenever gc looked"
        named = as_if_hours_had_passed(root)
        collect_garbage(store, beside=remove_media, grace_s=3600.0)
        assert media_in(root).keys() == named, "what receipts name stays, and nothing else"
        assert named
        orphan = write_medium(store, b"of no row either")
        kills += 1
    done = subprocess.run(command(ROWS + 1), capture_output=True, text=True, check=True)
    uri = done.stdout.strip().splitlines()[-1]
    entry_folder = uri.rpartition("/")[2]
    as_if_hours_had_passed(root)
    collect_garbage(store, beside=remove_media, grace_s=3600.0)
    digests = {hashlib.sha256(one).hexdigest() for one in images}
    assert media_in(root).keys() == digests, "no medium is lost, and no other is left"
    assert verify_folder(store, entry_folder, media_problems) == []
    import raysvc

    entry = raysvc.open_entry(uri)
    assert entry.num_rows == ROWS
    assert {
        one.sha256 for text in entry.table().column("media").to_pylist() for one in media_of(text)
    } == digests
