"""A source on a real S3 server: identified by what the server says, read only for slices."""

from __future__ import annotations

import gzip
import itertools
import json
from pathlib import Path
from typing import Any

import fsspec
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from raysvc.builds.build_plan import plan_build
from raysvc.cache.store.open import open_store
from raysvc.cache.writer import EntryWriter
from raysvc.errors import RaysvcError, SourceError
from raysvc.job.config import JobConfig, SourceConfig
from raysvc.pipelines.reading.readers import read_rows
from raysvc.pipelines.sources import fingerprint
from raysvc.pipelines.sources.look import look_at
from raysvc.pipelines.sources.scan_memo import Memo
from raysvc.pipelines.tokenize import BuildTask, SliceWorker
from tests.builds.test_follow import job_of, lines, steps_of

from .helpers import wait_until_unused
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


def rows_of(*texts: str) -> bytes:
    return b"".join(json.dumps({"text": text}).encode() + b"\n" for text in texts)


@pytest.mark.parametrize("pattern", ["", "/*.jsonl"])
def test_a_second_look_in_one_process_sees_new_and_changed_objects(s3: S3, pattern: str) -> None:
    there = s3.store("source")
    there.write("a.jsonl", rows_of("one"))
    config = SourceConfig(path=(there.url + pattern,), storage_options=s3.options)
    first = look_at(config)
    assert sum(piece.num_rows for piece in first.slices) == 1
    other = fsspec.filesystem("s3", **s3.options, skip_instance_cache=True)  # as another process
    other.pipe_file(f"{there.url}/b.jsonl", rows_of("two", "three"))
    other.pipe_file(f"{there.url}/a.jsonl", rows_of("eno"))
    second = look_at(config)
    assert sum(piece.num_rows for piece in second.slices) == 3
    assert second.identity[0] != first.identity[0]
    rows = [row.data for piece in second.slices for row in read_rows(piece, s3.options)]
    assert rows == [{"text": text} for text in ("eno", "two", "three")]


@pytest.mark.parametrize("name", ["rows.jsonl", "rows.jsonl.gz", "rows.parquet"])
def test_an_object_that_is_overwritten_in_mid_build_makes_no_part_and_no_entry(
    s3: S3, tmp_path: Path, sample: dict[str, str], name: str
) -> None:
    there = s3.store("source")
    there.write(name, _encoded(name, "one", "two"))
    job = JobConfig.model_validate(
        {
            "source": {"path": f"{there.url}/{name}", "storage_options": s3.options, "format": "text"},
            "tokenizer": sample["tokenizer"],
            "train_on": "all_tokens",
        }
    )
    store = open_store(str(tmp_path / "root"))
    plan = plan_build(job, store)
    slices = plan.source.slices
    other = fsspec.filesystem("s3", **s3.options, skip_instance_cache=True)
    other.pipe_file(f"{there.url}/{name}", _encoded(name, "eno", "two"))
    worker = SliceWorker([BuildTask(plan.spec, EntryWriter(store, plan.key, 0), s3.options, 0.01)])
    (error,) = worker({"slice": [json.dumps([[0, slices[0].to_json()]])]})["error"]
    assert name in error
    assert "changed" in error
    assert EntryWriter(store, plan.key, 0).receipts() == {}
    with pytest.raises(SourceError, match=rf"{name}.*changed"):
        plan.source.check_unchanged()
    assert plan_build(job, store).key != plan.key


def test_an_object_that_is_overwritten_between_listing_and_scan_is_not_remembered(
    s3: S3, tmp_path: Path
) -> None:
    there = s3.store("source")
    there.write("rows.jsonl", rows_of("one"))
    config = SourceConfig(path=(f"{there.url}/rows.jsonl",), storage_options=s3.options)
    memo = Memo(open_store(str(tmp_path / "root")))
    source = look_at(config, None, memo)
    other = fsspec.filesystem("s3", **s3.options, skip_instance_cache=True)
    other.pipe_file(f"{there.url}/rows.jsonl", rows_of("eno"))
    with pytest.raises(SourceError, match=r"rows\.jsonl.*changed"):
        _ = source.slices
    assert not (tmp_path / "root").exists()


def _encoded(name: str, *texts: str) -> bytes:
    if name.endswith("gz"):
        return gzip.compress(rows_of(*texts))
    if not name.endswith("parquet"):
        return rows_of(*texts)
    sink = pa.BufferOutputStream()
    pq.write_table(pa.table({"text": list(texts)}), sink)
    return bytes(sink.getvalue().to_pybytes())


def test_a_bucket_that_grows_is_followed_and_an_object_that_is_written_over_is_refused(
    s3: S3, sample: dict[str, str], tmp_path: Path
) -> None:
    """Listings, rows and parts all lie on the store; what was there before keeps its steps."""
    store = s3.store("followed-")
    fs = store._fs()
    sections = {
        "source": {
            "path": f"{store.url}/in/",
            "format": "chat",
            "follow": True,
            "storage_options": s3.options,
        },
        "cache": {"root": f"{store.url}/cache", "storage_options": s3.options},
    }
    job = job_of(tmp_path, sample, **sections)
    seen = []
    for name, numbers in (("b", range(9)), ("a", range(100, 107)), ("c", range(20, 24))):
        fs.pipe_file(f"{store.url}/in/{name}.jsonl", lines(*numbers).encode())
        seen.append(steps_of(job))
    assert [len(steps) for steps in seen] == [2, 4, 5]
    for before, after in itertools.pairwise(seen):
        assert after[: len(before)] == before
    fs.pipe_file(f"{store.url}/in/a.jsonl", lines(1, 2, 3).encode())
    with pytest.raises(RaysvcError, match=r"a\.jsonl"):
        steps_of(job)
    wait_until_unused(open_store(f"{store.url}/cache", s3.options))  # the error refers to a reader
