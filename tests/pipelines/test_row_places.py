"""Slices of CSV and Arrow files: every row once, and no slice reads what stands before it."""

from __future__ import annotations

import contextlib
import csv
import gzip
import io
import random
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from raysvc.errors import SourceError
from raysvc.job.config import SourceConfig
from raysvc.pipelines.reading import csv_rows, pinned_file
from raysvc.pipelines.reading.pins import BLOCK_BYTES
from raysvc.pipelines.reading.readers import has_long_line, read_rows
from raysvc.pipelines.sources import row_places, slices
from raysvc.pipelines.sources.look import look_at
from raysvc.pipelines.sources.slices import Slice


def slices_of(path: Path, slice_bytes: int) -> tuple[Slice, ...]:
    return look_at(SourceConfig(path=(str(path),)), slice_bytes).slices


def rows_of(pieces: tuple[Slice, ...]) -> list[tuple[int, Any]]:
    return [(row.source_row, row.data) for piece in pieces for row in read_rows(piece, {})]


@settings(max_examples=60)
@given(
    rows=st.lists(
        st.tuples(st.text('a,"\n\r é日', max_size=8), st.text(max_size=8)), min_size=1, max_size=25
    ),
    slice_bytes=st.integers(1, 60),
    line_end=st.sampled_from(["\n", "\r\n", "\n\n"]),
    begin=st.sampled_from(["", "\ufeff"]),
    last_end=st.booleans(),
)
def test_slices_of_a_csv_file_are_its_rows(
    tmp_path_factory: pytest.TempPathFactory,
    rows: list[tuple[str, str]],
    slice_bytes: int,
    line_end: str,
    begin: str,
    last_end: bool,
) -> None:
    path = tmp_path_factory.mktemp("csv") / "rows.csv"
    rows = [(one, other.encode(errors="ignore").decode().replace("\0", "")) for one, other in rows]
    text = io.StringIO()
    writer = csv.writer(text, lineterminator=line_end, quoting=csv.QUOTE_ALL)
    writer.writerows([("question", "answer"), *rows])
    whole = text.getvalue() if last_end else text.getvalue().removesuffix(line_end)
    path.write_bytes((begin + whole).encode())
    expected = list(csv.reader(io.StringIO(whole, newline="")))
    found = rows_of(slices_of(path, slice_bytes))
    assert [(row["question"], row["answer"]) for _, row in found] == [tuple(r) for r in expected[1:] if r]
    assert [number for number, _ in found] == list(range(len(found)))


def arrow_file(path: Path, table: pa.Table, kind: str, batch: int) -> Path:
    make = pa.ipc.new_file if kind == "file" else pa.ipc.new_stream
    with pa.OSFile(str(path), "wb") as sink, make(sink, table.schema) as writer:
        for start in range(0, len(table), batch):
            writer.write_table(table.slice(start, batch))
            writer.write_table(table.slice(0, 0))
    return path


TABLE = pa.table({"n": list(range(300)), "text": [f"row {n} " + "x" * (n % 50) for n in range(300)]})
WORDS = TABLE.append_column("word", pa.array([str(n % 7) for n in range(300)]).dictionary_encode())


@pytest.mark.parametrize("kind", ["file", "stream"])
@pytest.mark.parametrize("batch", [1, 7, 300])
@pytest.mark.parametrize("table", [TABLE, WORDS], ids=["plain", "dictionary"])
@pytest.mark.parametrize("slice_bytes", [300, 5000, 1 << 20])
def test_slices_of_an_arrow_file_are_its_rows(
    tmp_path: Path, kind: str, batch: int, table: pa.Table, slice_bytes: int
) -> None:
    path = arrow_file(tmp_path / "rows.arrow", table, kind, batch)
    pieces = slices_of(path, slice_bytes)
    assert rows_of(pieces) == list(enumerate(table.to_pylist()))
    if slice_bytes < 1000:
        assert len(pieces) > 5


@pytest.mark.parametrize("compression", ["uncompressed", "zstd"])
@pytest.mark.parametrize("slice_bytes", [300, 1 << 20])
def test_an_arrow_file_of_polars_is_its_rows(tmp_path: Path, compression: str, slice_bytes: int) -> None:
    import polars

    path = tmp_path / "rows.arrow"
    polars.from_arrow(TABLE).write_ipc(path, compression=compression, record_batch_size=40)
    pieces = slices_of(path, slice_bytes)
    assert rows_of(pieces) == list(enumerate(pa.ipc.open_file(path).read_all().to_pylist()))
    assert len(pieces) > 3 or slice_bytes > 1000


def test_a_schema_without_a_length_is_read_as_polars_writes_it(tmp_path: Path) -> None:
    path = arrow_file(tmp_path / "rows.arrow", TABLE, "file", 40)
    data = path.read_bytes()
    assert data[8:12] == b"\xff" * 4
    path.write_bytes(data[:8] + data[16:])  # without the mark and the length
    assert rows_of(slices_of(path, 300)) == list(enumerate(TABLE.to_pylist()))
    path.write_bytes(data[:8] + data[16:40])
    with pytest.raises(SourceError, match="ends before its first batch"):
        slices_of(path, 300)


@pytest.fixture
def bytes_read(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Bytes of each read of a file's content, compressed or not."""
    found: list[int] = []
    real_range, real_read = pinned_file._range, pinned_file.ContentStream.read

    def counted_range(path: str, options: dict[str, Any], start: int, end: int, size: int) -> bytes:
        found.append(end - start)
        return real_range(path, options, start, end, size)

    def counted_read(self: pinned_file.ContentStream, num_bytes: int) -> bytes:
        data = real_read(self, num_bytes)
        found.append(len(data))
        return data

    monkeypatch.setattr(pinned_file, "_range", counted_range)
    monkeypatch.setattr(pinned_file.ContentStream, "read", counted_read)
    return found


@pytest.mark.parametrize("name", ["rows.csv", "rows.tsv", "rows.csv.gz", "stream.arrow", "file.arrow"])
def test_reading_all_slices_reads_the_file_about_once(
    tmp_path: Path, bytes_read: list[int], name: str
) -> None:
    texts = [f"{n} " + "x" * 5000 for n in range(4000)]
    path = tmp_path / name
    if name.endswith(".arrow"):
        arrow_file(path, pa.table({"text": texts}), name.partition(".")[0], 20)
    else:
        data = ("text\n" + "\n".join(texts) + "\n").encode()
        path.write_bytes(gzip.compress(data, 1) if name.endswith(".gz") else data)
    pieces = slices_of(path, 2 * BLOCK_BYTES)
    assert len(pieces) > 8
    scanned = sum(bytes_read)
    bytes_read.clear()
    assert [row["text"] for _, row in rows_of(pieces)] == texts
    assert scanned < 1.01 * 4000 * 5100
    assert sum(bytes_read) < 2 * 4000 * 5100  # blocks at edges are read for both sides


def test_a_row_over_the_limit_is_a_slice_that_is_never_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in (row_places, slices):
        monkeypatch.setattr(module, "MAX_LINE_BYTES", 1000)
    path = tmp_path / "rows.csv"
    path.write_text("text\na\n" + "y" * 1001 + "\nb\n")
    pieces = slices_of(path, 1 << 20)
    assert any(has_long_line(one) for one in pieces)
    found = [(row.source_row, row.data) for one in pieces for row in read_rows(one, {})]
    assert found == [(0, {"text": "a"}), (1, None), (2, {"text": "b"})]


def test_a_quote_that_never_closes_is_an_error_that_names_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(csv_rows, "MOST_FIELD_BYTES", 1000)
    (tmp_path / "rows.csv").write_text('text\na\n"' + "y\n" * 1000)
    with pytest.raises(SourceError, match=r"rows\.csv.*cannot be read as csv: field larger"):
        slices_of(tmp_path / "rows.csv", 1 << 20)


@pytest.mark.parametrize("name", ["rows.csv", "rows.arrow"])
def test_a_file_that_changed_after_the_scan_gives_no_row(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    if name == "rows.csv":
        path.write_text("text\n" + "abc\n" * 1000)
    else:
        arrow_file(path, TABLE, "stream", 10)
    pieces = slices_of(path, 500)
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(bytes(data))
    with pytest.raises(SourceError, match="changed while it was tokenized"):
        rows_of(pieces)


@pytest.mark.parametrize("kind", ["file", "stream"])
def test_a_flipped_bit_in_an_arrow_file_is_an_error_or_other_rows_and_never_a_crash(
    tmp_path: Path, kind: str
) -> None:
    path = arrow_file(tmp_path / "rows.arrow", TABLE.slice(0, 40), kind, 10)
    data, rng = path.read_bytes(), random.Random(1)
    for _ in range(80):
        damaged = bytearray(data)
        damaged[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
        path.write_bytes(bytes(damaged))
        with contextlib.suppress(SourceError):
            rows_of(slices_of(path, 500))


def test_an_arrow_file_that_ends_with_a_whole_batch_but_no_footer_is_refused(tmp_path: Path) -> None:
    path = arrow_file(tmp_path / "rows.arrow", TABLE, "file", 100)
    data = path.read_bytes()
    cuts = [one.end for piece in slices_of(path, 1) for one in piece.pieces]
    path.write_bytes(data[: cuts[0]])
    with pytest.raises(SourceError, match="ends before its footer"):
        slices_of(path, 1)
