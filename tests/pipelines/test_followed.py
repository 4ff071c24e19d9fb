"""Looks at a source that is followed, without a build: what users' files do meanwhile."""

from __future__ import annotations

import gzip
import json
import os
import time
from datetime import UTC, date, datetime
from decimal import Decimal
from pathlib import Path
from unittest.mock import patch

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
        if calls[0] % 4 == 0 and not Path(path).name.startswith("99"):
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


def test_nothing_is_listed_for_good_before_a_row_can_be_read(folder: Path) -> None:
    (folder / "a.jsonl").write_text("{broken\n")
    with pytest.raises(SourceError, match="no row that can be read"):
        follow(folder.parent)
    (folder / "a.jsonl").write_text(lines(1))
    assert numbers(follow(folder.parent)) == [1]


def test_a_first_file_without_a_row_that_can_be_read_is_no_obstacle(folder: Path) -> None:
    (folder / "a.jsonl").write_text("{broken\n")
    (folder / "b.jsonl").write_text(lines(1))
    source = follow(folder.parent)
    assert source.first_row() == {"n": 1}
    assert numbers(source) == [1]


def test_a_first_row_with_times_is_known_when_its_file_is_removed(folder: Path) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    row = {"n": 1, "at": datetime(2026, 1, 2, tzinfo=UTC), "day": date(2026, 1, 2), "cost": Decimal("1.20")}
    pq.write_table(pa.Table.from_pylist([row]), folder / "a.parquet")
    with patch.object(file_stamp, "RACY_S", 0.0):
        time.sleep(0.05)
        follow(folder.parent)
    (folder / "a.parquet").unlink()
    found = follow(folder.parent).first_row()
    assert found is not None
    assert found["n"] == 1
    assert datetime.fromisoformat(found["at"]) == row["at"]
    assert (found["day"], found["cost"]) == ("2026-01-02", "1.20")


def test_a_whole_file_from_the_future_counts_when_it_was_seen_still(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Clocks differ, and archives bring times along."""
    (folder / "a.jsonl.gz").write_bytes(gzip.compress(lines(1).encode()))
    monkeypatch.setattr(file_stamp, "RACY_S", 0.0)
    time.sleep(0.05)
    source = follow(folder.parent)
    late = folder / "b.jsonl.gz"
    late.write_bytes(gzip.compress(lines(2).encode()))
    clock = [100.0]
    monkeypatch.setattr(time, "monotonic", lambda: clock[0])
    for seconds, is_written in ((0, True), (9, False), (5, True), (9, False)):
        clock[0] += seconds
        if is_written:
            os.utime(late, (time.time() + 1e6 + clock[0],) * 2)
        source.look()
        assert numbers(source) == [1]
    clock[0] += 2
    source.look()
    assert numbers(source) == [1, 2]


def test_a_file_that_is_counted_and_changed_says_what_to_do(folder: Path) -> None:
    (folder / "a.jsonl").write_text(lines(1, 2))
    source = follow(folder.parent)
    (folder / "a.jsonl").write_text(lines(1, 3, 4))
    with pytest.raises(SourceError, match=r"has changed since; restore it .* or begin again in another"):
        source.look()


def test_a_file_that_is_renamed_is_a_new_one_and_the_log_names_both(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (folder / "a.jsonl").write_text(lines(1, 2, 3))
    source = follow(folder.parent)
    source.look()
    (folder / "a.jsonl").rename(folder / "b.jsonl")
    (folder / "c.jsonl").write_text(lines(4, 5, 6))
    source.look()
    assert [one.num_rows for one in source.slices] == [3, 6]
    [said] = [record.getMessage() for record in caplog.records if record.name == followed.log.name]
    assert said.startswith(f"{folder}/b.jsonl has the lines of {folder}/a.jsonl, which are counted already")
