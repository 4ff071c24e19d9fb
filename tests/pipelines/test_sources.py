"""Files are found, identified by content and cut into slices that lose no row."""

from __future__ import annotations

import gzip
import hashlib
import io
import json
import random
import tarfile
from pathlib import Path

import pyarrow as pa
import pyarrow.csv as pc
import pyarrow.parquet as pq
import pytest
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st

from raysvc.errors import SourceError
from raysvc.job.config import SourceConfig
from raysvc.pipelines.reading.pins import BLOCK_BYTES
from raysvc.pipelines.reading.readers import read_lines, read_rows
from raysvc.pipelines.sources.cuts import LineCutter, even_cuts
from raysvc.pipelines.sources.look import look_at
from raysvc.pipelines.sources.scan import HASHED_BEHIND, READ_BYTES, scan_file
from raysvc.pipelines.sources.slices import place_of_row

ROWS = [{"text": f"row {number} " + "x" * (number % 17)} for number in range(100)]


def lines_of(rows: list[dict[str, str]]) -> bytes:
    return b"".join(json.dumps(row).encode() + b"\n" for row in rows)


def rows_through(path: str, slice_bytes: int) -> list[tuple[int, str]]:
    """(number, text) of every row, read slice by slice."""
    found = []
    for piece in look_at(SourceConfig(path=(path,)), slice_bytes).slices:
        if piece.is_lines:
            for number, line in enumerate(read_lines(piece, {}).splitlines(), start=piece.first_row):
                found.append((number, json.loads(line)["text"]))
        else:
            found += [(row.source_row, row.data["text"]) for row in read_rows(piece, {}) if row.data]
    return found


def write(folder: Path, kind: str) -> str:
    path = folder / f"rows.{kind}"
    table = pa.Table.from_pylist(ROWS)
    if kind == "jsonl":
        path.write_bytes(lines_of(ROWS))
    elif kind == "jsonl.gz":
        path.write_bytes(gzip.compress(lines_of(ROWS)))
    elif kind == "json":
        path.write_text(json.dumps(ROWS))
    elif kind == "csv":
        pc.write_csv(table, path)
    elif kind == "tar":
        with tarfile.open(path, "w") as tar:
            for number, row in enumerate(ROWS):
                info = tarfile.TarInfo(f"{number}.txt")
                info.size = len(row["text"])
                tar.addfile(info, io.BytesIO(row["text"].encode()))
    elif kind == "parquet":
        pq.write_table(table, path, row_group_size=7)
    else:
        with pa.OSFile(str(path), "wb") as file, pa.ipc.new_stream(file, table.schema) as writer:
            writer.write_table(table)
    return str(path)


@pytest.mark.parametrize("kind", ["jsonl", "jsonl.gz", "json", "csv", "parquet", "arrow", "tar"])
@pytest.mark.parametrize("slice_bytes", [200, 1 << 20])
def test_every_row_of_every_kind_of_file_is_read_once_with_its_number(
    tmp_path: Path, kind: str, slice_bytes: int
) -> None:
    expected = [(number, row["text"]) for number, row in enumerate(ROWS)]
    assert rows_through(write(tmp_path, kind), slice_bytes) == expected


@pytest.mark.parametrize("kind", ["jsonl", "jsonl.gz", "json", "csv", "parquet", "arrow", "tar"])
def test_the_first_row_of_every_kind_of_file_is_found(tmp_path: Path, kind: str) -> None:
    row = look_at(SourceConfig(path=(write(tmp_path, kind),))).first_row()
    assert row is not None
    row.pop("__key__", None)  # of a tar
    assert row == ROWS[0]


def test_rows_are_numbered_over_all_files_of_a_folder(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_bytes(lines_of(ROWS[:40]))
    (tmp_path / "b.jsonl").write_bytes(lines_of(ROWS[40:]))
    (tmp_path / "_notes.jsonl").write_text("hidden")
    assert rows_through(str(tmp_path), 300) == [(number, row["text"]) for number, row in enumerate(ROWS)]


def test_the_place_of_a_row_is_a_line_of_its_file(tmp_path: Path) -> None:
    words = {}
    for name, size in {"a": 3, "b": 40, "c": 5}.items():
        lines = [json.dumps({"text": f"{name} {number} {'x' * 50}"}) for number in range(size)]
        lines.insert(size // 2, "")  # an empty line has a number too
        (tmp_path / f"{name}.jsonl").write_text("".join(line + "\n" for line in lines))
        words |= {(f"{tmp_path}/{name}.jsonl", at): line for at, line in enumerate(lines, start=1) if line}
    (tmp_path / "d.csv").write_text("text\nfirst\nsecond\n")
    names = [f"{tmp_path}/{name}" for name in ("a.jsonl", "b.jsonl", "c.jsonl", "d.csv")]
    source = look_at(SourceConfig(path=names), 400)
    assert len(source.slices) > 3
    rows = [row for one in source.slices for row in read_rows(one, {})]
    places = [place_of_row(source.slices, row.source_row) for row in rows]
    assert places[-2:] == [f"row {number} of {tmp_path}/d.csv" for number in (1, 2)]
    told = {(path, int(line.split()[1])): row.data["text"]
            for row, (line, path) in zip(rows, (place.split(" of ") for place in places[:-2]), strict=False)}  # fmt: skip
    assert told == {place: json.loads(line)["text"] for place, line in words.items()}
    assert place_of_row(source.slices, 1000) == ""


def test_a_saved_dataset_with_a_split_slice_gives_these_rows(tmp_path: Path) -> None:
    import datasets

    datasets.Dataset.from_list(ROWS).save_to_disk(str(tmp_path / "saved"))
    source = look_at(SourceConfig(dataset=str(tmp_path / "saved"), split="train[10%:30%]"))
    rows = [row.data for piece in source.slices for row in read_rows(piece, {})]
    assert rows == ROWS[10:30]


def test_the_identity_is_the_content_and_never_the_place(tmp_path: Path) -> None:
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        (tmp_path / name / f"{name}.jsonl").write_bytes(lines_of(ROWS))
    first, second = (look_at(SourceConfig(path=(str(tmp_path / name),))).identity for name in "ab")
    assert first == second
    (tmp_path / "b" / "b.jsonl").write_bytes(lines_of([*ROWS[:-1], {"text": "other"}]))
    assert look_at(SourceConfig(path=(str(tmp_path / "b"),))).identity != first


def test_the_first_row_skips_lines_that_are_no_objects(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_bytes(b'{"broken\n[1]\n{"text": "good"}\n')
    assert look_at(SourceConfig(path=(str(tmp_path / "a.jsonl"),))).first_row() == {"text": "good"}


@pytest.mark.parametrize("name", ["a.jsonl", "a.json", "list.json", "a.parquet"])
def test_a_first_row_has_the_columns_of_the_rows_near_it_as_in_a_table(tmp_path: Path, name: str) -> None:
    rows = [{"prompt": "a"}, {"prompt": "b", "completion": "c"}, {"prompt": "d", "label": True}]
    if name.endswith("parquet"):
        pq.write_table(
            pa.Table.from_pylist(
                [{**dict.fromkeys(("prompt", "completion", "label")), **row} for row in rows]
            ),
            tmp_path / name,
        )
    else:
        (tmp_path / name).write_bytes(json.dumps(rows).encode() if "list" in name else lines_of(rows))
    source = look_at(SourceConfig(path=(str(tmp_path / name),)))
    assert source.first_row() == {"prompt": "a", "completion": None, "label": None}
    found = [row.data for piece in source.slices for row in read_rows(piece, {})]
    assert found == rows  # which stay as they are


def test_an_unknown_ending_says_which_are_known(tmp_path: Path) -> None:
    (tmp_path / "rows.xlsx").write_text("x")
    with pytest.raises(SourceError, match=r"\.jsonl"):
        look_at(SourceConfig(path=(str(tmp_path / "rows.xlsx"),)))


def test_31_rows_over_16_slices_are_balanced() -> None:
    sizes = [rows for _, _, rows in even_cuts(31, 16)]
    assert (sum(sizes), max(sizes), min(sizes)) == (31, 2, 1)


@settings(max_examples=300)
@given(
    data=st.lists(st.binary(max_size=30).map(lambda b: b.replace(b"\n", b"")), max_size=40),
    last_newline=st.booleans(),
    slice_bytes=st.integers(1, 80),
    block=st.integers(1, 50),
)
def test_line_slices_touch_end_at_line_ends_and_count_their_lines(
    data: list[bytes], last_newline: bool, slice_bytes: int, block: int
) -> None:
    text = b"\n".join(data) + (b"\n" if last_newline and data else b"")
    cutter = LineCutter(slice_bytes)
    for start in range(0, len(text), block):
        cutter.feed(text[start : start + block])
    cuts = cutter.finish()
    assert [start for start, _, _ in cuts] == ([0] + [end for _, end, _ in cuts])[: len(cuts)]
    assert (cuts[-1][1] if cuts else 0) == len(text)
    for start, end, rows in cuts:
        assert rows == len(text[start:end].split(b"\n")) - (text[end - 1 : end] == b"\n")
        assert end == len(text) or text[end - 1 : end] == b"\n"


@pytest.mark.parametrize("ending", ["", ".gz"])
def test_a_scan_of_many_reads_finds_the_digests_and_lines_of_the_whole(tmp_path: Path, ending: str) -> None:
    rng = random.Random(2)
    size = 2 * HASHED_BEHIND * READ_BYTES + rng.randrange(READ_BYTES)
    words = [rng.randbytes(rng.randrange(1, 3000)) for _ in range(100)]
    text = b"".join(rng.choices(words, k=size // 1500))
    path = tmp_path / f"rows.jsonl{ending}"
    path.write_bytes(gzip.compress(text, 1) if ending else text)
    found = scan_file(str(path), 1 << 20, {})
    assert (found.size, found.sha256) == (len(text), hashlib.sha256(text).hexdigest())
    blocks = [text[at : at + BLOCK_BYTES] for at in range(0, len(text), BLOCK_BYTES)]
    assert list(found.digests) == [xxhash.xxh3_128_hexdigest(block) for block in blocks]
    lines = [text[start:end].split(b"\n") for start, end, _ in found.cuts]
    assert [rows for _, _, rows in found.cuts] == [len(each) - (not each[-1]) for each in lines]
    assert len(text) > HASHED_BEHIND * READ_BYTES
    assert len(found.cuts) > 10
