"""A source is what its files hold; what was read once is not read again, and is never believed wrongly."""

from __future__ import annotations

import json
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from raysvc.cache.store.open import open_store
from raysvc.cache.store.posix import PosixStore
from raysvc.errors import SourceError, StoreError
from raysvc.job.config import SourceConfig
from raysvc.pipelines.sources import file_stamp, fingerprint
from raysvc.pipelines.sources.dataset import resolved_revision
from raysvc.pipelines.sources.file_stamp import is_settled, store_tag
from raysvc.pipelines.sources.look import look_at
from raysvc.pipelines.sources.scan_memo import Memo
from raysvc.pipelines.sources.source import Source

OLD_S = 1_600_000_000


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the files that were read whole, and files count as still at once: their change time is now."""
    monkeypatch.setattr(file_stamp, "RACY_S", -3600.0)
    found: list[str] = []
    real = fingerprint.scan_file

    def counting(path: str, *rest: Any) -> Any:
        found.append(Path(path).name)
        return real(path, *rest)

    monkeypatch.setattr(fingerprint, "scan_file", counting)
    return found


@pytest.fixture
def rows(tmp_path: Path) -> Path:
    path = tmp_path / "data" / "rows.jsonl"
    path.parent.mkdir()
    path.write_bytes(b'{"text": "one"}\n{"text": "two"}\n')
    return path


def look(path: Path | str, root: Path, slice_bytes: int | None = None) -> Source:
    return look_at(SourceConfig(path=(str(path),)), slice_bytes, Memo(open_store(str(root))))


def records(root: Path) -> list[Path]:
    return sorted((root / ".scans").iterdir())


def test_a_file_that_did_not_change_is_not_read_again(rows: Path, tmp_path: Path, reads: list[str]) -> None:
    first, second = (look(rows, tmp_path / "root") for _ in range(2))
    assert reads == ["rows.jsonl"]
    assert first.identity == second.identity
    assert first.slices == second.slices
    assert len(second.slices) == 1
    assert reads == ["rows.jsonl"]


def test_another_cut_keeps_the_identity_and_reads_for_the_slices_alone(
    rows: Path, tmp_path: Path, reads: list[str]
) -> None:
    whole = look(rows, tmp_path / "root")
    fine = look(rows, tmp_path / "root", slice_bytes=10)
    assert fine.identity == whole.identity
    assert len(reads) == 1
    assert len(fine.slices) == 2
    assert len(reads) == 2


def test_a_touched_or_moved_file_keeps_its_identity_and_is_read_again(
    rows: Path, tmp_path: Path, reads: list[str]
) -> None:
    before = look(rows, tmp_path / "root").identity
    os.utime(rows, (OLD_S, OLD_S))
    assert look(rows, tmp_path / "root").identity == before
    moved = rows.rename(rows.with_name("other.jsonl"))
    assert look(moved, tmp_path / "root").identity == before
    assert reads == ["rows.jsonl", "rows.jsonl", "other.jsonl"]


def test_an_edit_of_the_same_size_with_the_old_time_put_back_is_noticed(
    rows: Path, tmp_path: Path, reads: list[str]
) -> None:
    os.utime(rows, (OLD_S, OLD_S))
    before = look(rows, tmp_path / "root").identity
    with rows.open("r+b") as file:
        file.write(b'{"text": "eno"}')
    os.utime(rows, (OLD_S, OLD_S))
    after = look(rows, tmp_path / "root").identity
    assert (after[0]["size"], after[0]["sha256"] != before[0]["sha256"]) == (before[0]["size"], True)


def test_a_file_that_was_just_written_is_not_remembered(rows: Path, tmp_path: Path) -> None:
    look(rows, tmp_path / "root")
    assert not (tmp_path / "root").exists()


@pytest.mark.parametrize("field", ["mtime_ns", "ctime_ns"])
def test_a_stamp_counts_when_the_file_was_still_for_long_enough(field: str) -> None:
    stamp = {"size": 1, "mtime_ns": 0, "ctime_ns": 0, "inode": 1, field: OLD_S * 10**9}
    assert is_settled(stamp, OLD_S + file_stamp.RACY_S)
    assert not is_settled(stamp, OLD_S + file_stamp.RACY_S - 0.001)
    assert not is_settled(stamp, OLD_S - 3600), "a clock that went back says nothing"


def _cut_short(record: dict[str, Any]) -> str:
    return json.dumps(record)[:-20]


def _flipped(record: dict[str, Any]) -> str:
    return json.dumps({**record, "value": {**record["value"], "sha256": "0" * 64}})


def _resealed(record: dict[str, Any], **value: Any) -> str:
    from raysvc.cache.local.sealed import sealed

    fields = {"about": record["about"], "value": {**record["value"], **value}}
    return sealed(fields).decode()


@pytest.mark.parametrize(
    "damage",
    [
        _cut_short,
        _flipped,
        lambda record: "[" * 100_000,
        lambda record: "",
        lambda record: "[]",
        lambda record: json.dumps({**record, "about": {"path": "/etc/passwd"}}),
        lambda record: _resealed(record, sha256=["0" * 64]),
        lambda record: _resealed(record, kind="pickle"),
        lambda record: _resealed(record, size=-1),
        lambda record: _resealed(record, cuts=[[0, 99, 1]], size=True),
        lambda record: _resealed(record, size="1"),
    ],
)
def test_a_record_that_is_damaged_or_hostile_is_ignored_and_replaced(
    damage: Any, rows: Path, tmp_path: Path, reads: list[str]
) -> None:
    before = look(rows, tmp_path / "root")
    slices = before.slices
    for path in records(tmp_path / "root"):
        path.write_text(damage(json.loads(path.read_text())))
    reads.clear()
    after = look(rows, tmp_path / "root")
    assert (after.identity, after.slices) == (before.identity, slices)
    assert reads
    reads.clear()
    assert look(rows, tmp_path / "root").slices == slices
    assert not reads


@pytest.mark.parametrize(
    "cuts",
    [
        [[0, 10, 1]],
        [[1, 32, 2]],
        [[0, 10, 1], [11, 32, 1]],
        [[0, 32, 33]],
        [[0, 32, 0]],
        [[0, 40, 2], [40, 32, 1]],
        [[0, 32]],
        [["0", 32, 2]],
        "cuts",
        None,
    ],
)
def test_cuts_that_no_scan_could_give_are_looked_for_again(
    cuts: Any, rows: Path, tmp_path: Path, reads: list[str]
) -> None:
    slices = look(rows, tmp_path / "root").slices
    for path in records(tmp_path / "root"):
        path.write_text(_resealed(json.loads(path.read_text()), cuts=cuts))
    assert look(rows, tmp_path / "root").slices == slices


class ReadOnly(PosixStore):
    """A root that this user may read."""

    def create(self, name: str, data: bytes) -> bool:
        raise StoreError(self.root, "cannot be written", "choose another one")


def test_a_root_that_cannot_be_written_only_has_no_memo(rows: Path, tmp_path: Path, reads: list[str]) -> None:
    memo = Memo(ReadOnly(str(tmp_path)))
    first, second = (look_at(SourceConfig(path=(str(rows),)), None, memo).identity for _ in range(2))
    assert first == second
    assert len(reads) == 2


def test_a_file_that_changes_while_it_is_read_is_an_error(
    rows: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = fingerprint.scan_file

    def changing(path: str, *rest: Any) -> Any:
        scan = real(path, *rest)
        rows.write_bytes(b'{"text": "longer than before, and late"}\n')
        return scan

    monkeypatch.setattr(fingerprint, "scan_file", changing)
    with pytest.raises(SourceError, match=r"rows\.jsonl.*changed while it was read"):
        look(rows, tmp_path / "root")


def test_a_source_that_changed_since_is_told_and_a_touch_or_a_new_file_is_not(
    rows: Path, tmp_path: Path
) -> None:
    source = look(rows.parent, tmp_path / "root")
    source.check_unchanged()
    os.utime(rows, (OLD_S, OLD_S))
    rows.with_name("new.jsonl").write_bytes(b'{"text": "new"}\n')
    source.check_unchanged()
    rows.write_bytes(b'{"text": "eno"}\n{"text": "two"}\n')
    with pytest.raises(SourceError, match="changed while it was tokenized"):
        source.check_unchanged()


def test_a_store_that_says_nothing_of_the_content_has_its_bytes_hashed(rows: Path, tmp_path: Path) -> None:
    import fsspec

    fsspec.filesystem("memory").pipe_file("/identity/rows.jsonl", rows.read_bytes())
    remote = look("memory://identity/rows.jsonl", tmp_path / "root")
    assert remote.identity == look(rows, tmp_path / "root").identity
    assert look(f"file://{rows}", tmp_path / "root").identity == remote.identity


@pytest.mark.parametrize(
    ("url", "info", "tag"),
    [
        ("s3://b/x", {"size": 3, "ETag": '"ab"'}, {"size": 3, "etag": "ab"}),
        ("gs://b/x", {"size": 3, "etag": "of this upload", "md5Hash": "m"}, {"size": 3, "md5hash": "m"}),
        ("hf://datasets/x", {"size": 3, "blob_id": "b"}, {"size": 3, "blob_id": "b"}),
        ("https://x/y", {"size": 3, "ETag": '"3-1600000000"'}, None),
        ("s3://b/x", {"ETag": "ab"}, None),
        ("/data/x", {"size": 3, "ino": 1}, None),
    ],
)
def test_what_a_store_says_of_content_is_taken_and_nothing_else(
    url: str, info: dict[str, Any], tag: dict[str, Any] | None
) -> None:
    assert store_tag(url, info) == tag


def test_a_saved_dataset_is_its_bytes_whatever_its_fingerprint_says(tmp_path: Path, reads: list[str]) -> None:
    import datasets

    data = datasets.Dataset.from_list([{"text": "one"}, {"text": "two"}])
    data.save_to_disk(str(tmp_path / "a"))
    datasets.Dataset.from_list([{"text": "two"}, {"text": "one"}]).save_to_disk(str(tmp_path / "b"))
    for folder in "ab":
        state = tmp_path / folder / "state.json"
        state.write_text(
            json.dumps({**json.loads(state.read_text()), "_fingerprint": f"claimed-{folder == 'c'}"})
        )
    memo = Memo(open_store(str(tmp_path / "root")))
    first, second, again = (
        look_at(SourceConfig(dataset=str(tmp_path / folder)), None, Memo(memo.store)).identity
        for folder in "aba"
    )
    assert first == again != second
    assert len(reads) == 2, "the memo knows the files of a folder too"


def test_the_revision_of_a_dataset_is_the_commit_that_was_resolved() -> None:
    commit = "0123456789abcdef0123456789abcdef01234567"
    urls = {f"hf://datasets/owner/name@{commit}/data/{n}.parquet": {} for n in range(2)}
    assert resolved_revision(SimpleNamespace(info=SimpleNamespace(download_checksums=urls))) == commit
    assert resolved_revision(SimpleNamespace(info=SimpleNamespace(download_checksums=None))) is None
