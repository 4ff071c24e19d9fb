"""A source on a real S3 server: identified by what the server says, read only for slices."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from raysvc.cache.store.open import open_store
from raysvc.config import SourceConfig
from raysvc.errors import SourceError
from raysvc.pipelines.sources import fingerprint
from raysvc.pipelines.sources.scan_memo import Memo
from raysvc.pipelines.sources.source import look_at

from .servers import S3


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the files that were read whole."""
    found: list[str] = []
    real = fingerprint.scan_file

    def counting(path: str, *rest: Any) -> Any:
        found.append(Path(path).name)
        return real(path, *rest)

    monkeypatch.setattr(fingerprint, "scan_file", counting)
    return found


def test_the_etag_identifies_and_nothing_is_read_until_slices_are_wanted(
    s3: S3, tmp_path: Path, reads: list[str]
) -> None:
    there = s3.store("source")
    there.write("rows.jsonl", b'{"text": "one"}\n{"text": "two"}\n')
    config = SourceConfig(path=(there.url,), storage_options=s3.options)
    memo = Memo(open_store(str(tmp_path / "root")))
    source = look_at(config, None, memo)
    assert [set(one) for one in source.identity] == [{"kind", "size", "etag"}]
    assert source.first_row() == {"text": "one"}
    assert reads == []
    assert source.slices[-1].num_rows == 2
    assert look_at(config, None, Memo(memo.store)).slices == source.slices
    assert reads == ["rows.jsonl"]
    there.write("rows.jsonl", b'{"text": "eno"}\n{"text": "two"}\n')
    assert look_at(config, None, memo).identity != source.identity
    with pytest.raises(SourceError, match="changed while it was tokenized"):
        source.check_unchanged()


def test_equal_files_on_one_store_are_equal_wherever_they_lie(s3: S3) -> None:
    there = s3.store("source")
    for name, data in (("a", b'{"text": "1"}\n'), ("b", b'{"text": "1"}\n'), ("c", b'{"text": "2"}\n')):
        there.write(f"{name}/rows.jsonl", data)
    one, two, three = (
        look_at(SourceConfig(path=(f"{there.url}/{name}",), storage_options=s3.options)).identity
        for name in "abc"
    )
    assert one == two != three


def test_the_memo_may_lie_on_s3(
    s3: S3, tmp_path: Path, reads: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("raysvc.pipelines.sources.file_stamp.RACY_S", -3600.0)
    (tmp_path / "rows.jsonl").write_bytes(b'{"text": "one"}\n')
    store = s3.store("memo")
    config = SourceConfig(path=(str(tmp_path / "rows.jsonl"),))
    first, second = (look_at(config, None, Memo(store)).identity for _ in range(2))
    assert first == second
    assert reads == ["rows.jsonl"]
