"""Looks at a source that is followed, without a build: what users' files do meanwhile."""

from __future__ import annotations

import gzip
import json
import os
import time
from pathlib import Path

import pytest

from raysvc.cache.store.open import open_store
from raysvc.errors import SourceError
from raysvc.job.config import SourceConfig
from raysvc.pipelines.reading.readers import read_rows
from raysvc.pipelines.sources import file_stamp, followed
from raysvc.pipelines.sources.followed import FollowedSource
from raysvc.pipelines.sources.scan_memo import Memo


def lines(*numbers: int) -> str:
    """A row a number."""
    return "".join(json.dumps({"n": number}) + "\n" for number in numbers)


def follow(root: Path, pattern: str = "in") -> FollowedSource:
    """The folder `in`, by somebody who just started."""
    config = SourceConfig(path=(str(root / pattern),), follow=True)
    return FollowedSource(config, None, Memo(open_store(str(root / "cache"))))


def numbers(source: FollowedSource) -> list[int]:
    """Those of the rows of all listings."""
    return [row.data["n"] for piece in source.slices for row in read_rows(piece, {}) if row.data]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "in").mkdir()
    return tmp_path / "in"


def test_files_without_a_complete_line_hide_no_file_behind_them(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(followed, "LISTING_FILES", 4)
    for number in range(6):
        (folder / f"a{number}.jsonl").write_text(lines(number) + '{"n":')
    source = follow(folder.parent)
    source.look()
    (folder / "z.jsonl").write_text(lines(100))
    source.look()
    assert numbers(source) == [*range(6), 100]


def test_whole_files_without_rows_hide_no_file_behind_them_and_may_still_be_written(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(followed, "LISTING_FILES", 4)
    monkeypatch.setattr(file_stamp, "RACY_S", 0.0)
    (folder / "a.jsonl.gz").write_bytes(gzip.compress(lines(0).encode()))
    for number in range(6):
        (folder / f"b{number}.jsonl.gz").write_bytes(gzip.compress(b""))
    (folder / "z.jsonl.gz").write_bytes(gzip.compress(lines(1, 2).encode()))
    time.sleep(0.05)
    source = follow(folder.parent)
    for _ in range(2):
        source.look()
    assert numbers(source) == [0, 1, 2]
    (folder / "b0.jsonl.gz").write_bytes(gzip.compress(lines(3).encode()))
    time.sleep(0.05)
    source.look()
    assert numbers(source) == [0, 1, 2, 3]


@pytest.mark.parametrize("ending", ["jsonl", "jsonl.gz"])
@pytest.mark.parametrize("pattern", ["in", "in/*"])
def test_files_that_are_removed_during_a_look_end_no_run(
    folder: Path, monkeypatch: pytest.MonkeyPatch, ending: str, pattern: str
) -> None:
    """Somebody cleans up, as fast as we look."""
    monkeypatch.setattr(file_stamp, "RACY_S", 0.0)
    for number in range(40):
        text = lines(number).encode()
        (folder / f"{number:02}.{ending}").write_bytes(text if ending == "jsonl" else gzip.compress(text))
    time.sleep(0.05)
    source = follow(folder.parent, pattern)
    calls, stat, is_file = [0], os.stat, os.path.isfile
    (folder / f"99.{ending}").write_bytes((folder / f"01.{ending}").read_bytes())
    time.sleep(0.05)

    def removing(path: str) -> None:
        calls[0] += 1
        if calls[0] % 4 == 0 and "99" not in str(path):
            Path(path).unlink(missing_ok=True)

    def is_file_then(path: str) -> bool:
        found = is_file(path)
        removing(path)
        return found

    def stat_then(path: str, **options: object) -> os.stat_result:
        found = stat(path, **options)  # type: ignore[call-overload]
        if str(path).endswith(ending):
            removing(path)
        return found  # type: ignore[no-any-return]

    monkeypatch.setattr(os.path, "isfile", is_file_then)
    monkeypatch.setattr(os, "stat", stat_then)
    source.look()
    monkeypatch.undo()
    assert source.listings.num_groups == 41
    assert len(list(folder.iterdir())) < 41


@pytest.mark.parametrize("more", [-1, 0, 512])
def test_lines_that_are_written_over_are_refused_wherever_the_last_block_of_them_ends(
    folder: Path, more: int
) -> None:
    line = '{"n": 1, "x": "' + "x" * (1024 - 18) + '"}\n'
    assert (1 << 20) % len(line) == 0
    path = folder / "a.jsonl"
    path.write_text(line * (1024 + more))
    source = follow(folder.parent)
    with path.open("a") as file:
        file.write(line)
    source.look()
    assert len(numbers(source)) == 1025 + more
    path.write_text(line * (1023 + more) + line.replace("1", "2") * 3)
    with pytest.raises(SourceError, match=r"a\.jsonl.*changed"):
        source.look()
