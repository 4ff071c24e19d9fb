"""Tars of samples: rows against what `datasets` and `tarfile` read of the same file, for any cut into slices."""

from __future__ import annotations

import io
import json
import tarfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from raysvc.errors import SourceError
from raysvc.job.config import SourceConfig
from raysvc.pipelines.reading.readers import read_rows
from raysvc.pipelines.sources.look import look_at
from tests.media.rows import jpeg, wav

SLOW = settings(max_examples=25, suppress_health_check=list(HealthCheck))
FORMATS = (tarfile.USTAR_FORMAT, tarfile.GNU_FORMAT, tarfile.PAX_FORMAT)


def tar_of(files: list[tuple[str, bytes]], kind: int = tarfile.PAX_FORMAT) -> bytes:
    """Written by the standard library."""
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w", format=kind) as tar:
        for name, data in files:
            info = tarfile.TarInfo(name)
            info.size = len(data)
            tar.addfile(info, io.BytesIO(data))
    return out.getvalue()


def rows_of(path: Path | str, slice_bytes: int = 1 << 20, options: dict[str, Any] | None = None) -> list[Any]:
    source = look_at(SourceConfig(path=(str(path),), storage_options=options or {}), slice_bytes)
    rows = [row for piece in source.slices for row in read_rows(piece, options or {})]
    assert [row.source_row for row in rows] == list(range(len(rows)))
    return rows


def talk(number: int) -> dict[str, Any]:
    asked = {"role": "user", "content": f"<image>{number}?"}
    return {"messages": [asked, {"role": "assistant", "content": "A thing."}], "id": number}


def shard(count: int) -> list[tuple[str, bytes]]:
    """JSON and an image each; every third has two images, every fourth is text alone."""
    files = []
    for number in range(count):
        files.append((f"part/{number:04d}.json", json.dumps(talk(number)).encode()))
        if number % 4 != 3:
            files.append((f"part/{number:04d}.jpg", jpeg(30 + number, 40, number)))
        if number % 3 == 2:
            files.append((f"part/{number:04d}.second.png", jpeg(20, 20, number, "PNG")))
    return files


@SLOW
@given(
    sizes=st.lists(st.tuples(st.integers(0, 1500), st.integers(1, 3)), min_size=1, max_size=12),
    kind=st.sampled_from(FORMATS),
    slice_bytes=st.integers(300, 6000),
    long=st.booleans(),
)
def test_rows_are_the_members_that_the_standard_library_reads(
    tmp_path_factory: pytest.TempPathFactory, sizes: Any, kind: int, slice_bytes: int, long: bool
) -> None:
    folder = "d" * (120 if long and kind != tarfile.USTAR_FORMAT else 5)
    rng = np.random.default_rng(len(sizes))
    files = [
        (f"{folder}/ä{number:03d}.{n}.png", rng.bytes(size))
        for number, (size, count) in enumerate(sizes)
        for n in range(count)
    ]
    path = tmp_path_factory.mktemp("any") / "a.tar"
    path.write_bytes(tar_of(files, kind))
    with tarfile.open(path) as tar:
        theirs = [(one.name, tar.extractfile(one).read()) for one in tar]  # type: ignore[union-attr]
    found = rows_of(path, slice_bytes)
    ours = [(one["path"], one["bytes"]) for row in found for one in row.data["images"]]
    assert ours == theirs
    assert [len(row.data["images"]) for row in found] == [count for _, count in sizes]


def test_samples_are_those_of_datasets(tmp_path: Path) -> None:
    import datasets

    path = tmp_path / "a.tar"
    files = [one for number in range(5) for one in (
        (f"k/{number}.json", json.dumps(talk(number)).encode()),
        (f"k/{number}.txt", f"said {number} ä".encode()),
        (f"k/{number}.jpg", jpeg(30 + number, 40, number)),
    )]  # fmt: skip
    path.write_bytes(tar_of(files))
    theirs = datasets.load_dataset("webdataset", data_files=str(path), split="train", streaming=True)
    theirs = theirs.cast_column("jpg", datasets.Image(decode=False))
    for row, told in zip(rows_of(path, 3000), theirs, strict=True):
        assert row.data["__key__"] == told["__key__"]
        assert row.data["text"] == told["txt"]
        assert {name: row.data[name] for name in ("messages", "id")} == told["json"]
        assert [one["bytes"] for one in row.data["images"]] == [told["jpg"]["bytes"]]


@pytest.mark.parametrize("where", ["local", "gz", "memory"])
def test_a_tar_is_read_where_files_are(tmp_path: Path, where: str) -> None:
    import gzip

    import fsspec

    data = tar_of(shard(20))
    path = {"local": f"{tmp_path}/a.tar", "gz": f"{tmp_path}/a.tar.gz", "memory": "memory://tars/a.tar"}[
        where
    ]
    with fsspec.open(path, "wb") as file:
        file.write(gzip.compress(data) if where == "gz" else data)
    source = look_at(SourceConfig(path=(path,)), 4000)
    assert len(source.slices) > 3
    first = source.first_row()
    assert first is not None
    assert first["id"] == 0
    assert [row.data["id"] for row in rows_of(path, 4000)] == list(range(20))
    if where == "local":
        Path(path).write_bytes(data.replace(b'"id": 13', b'"id": 31'))
        with pytest.raises(SourceError, match="changed while it was tokenized"):
            [row for piece in source.slices for row in read_rows(piece, {})]


def test_what_is_no_sample_is_left_out_and_what_cannot_be_read_is_a_row_with_an_error(tmp_path: Path) -> None:
    files = [
        ("README", b"no dot"), (".hidden.json", b"{}"), ("__meta__.json", b"{}"),
        ("a.json", b"{"), ("b.json", b"[1]"), ("b.cls", b"7"), ("c.txt", b"\xff"), ("d.json", b'{"text": "x"}'),
        ("d.txt", b"y"), ("e.txt", b"one"), ("e.txt", b"two"), ("f.JSON", b'{"images": []}'), ("f.jpg", b"x"),
    ]  # fmt: skip
    path = tmp_path / "a.tar"
    path.write_bytes(tar_of(files))
    rows = rows_of(path)
    assert [row.data and row.data["__key__"] for row in rows] == [None, "b", None, "d", None, None]
    assert rows[1].data == {"__key__": "b", "json": [1], "cls": "7"}
    said = [row.error for row in rows if row.error]
    assert all(one.startswith("a sample of a tar cannot be read: ") for one in said)
    assert "twice" in said[2]
    assert "both its files and its JSON have images" in said[3]


def damaged(data: bytes) -> dict[str, tuple[bytes, str]]:
    at = data.index(b"part/0003.json")
    link = io.BytesIO()
    with tarfile.open(fileobj=link, mode="w") as tar:
        info = tarfile.TarInfo("a.json")
        info.type, info.linkname = tarfile.SYMTYPE, "b.json"
        tar.addfile(info)
    end = data.rindex(b"\xff\xd9")
    return {
        "inside of a member": (data[: at + 600], "cut off inside of 'part/0003.json'"),
        "inside of a header": (data[: at + 100], "cut off at byte"),
        "between members": (data[:at], "cut off at byte"),
        "before its end mark": (data[: (end // 512 + 1) * 512], "cut off at byte"),
        "a broken header": (data[:at] + b"X" + data[at + 1 :], "damaged at byte"),
        "two joined": (data + data, "goes on behind its end"),
        "a link": (link.getvalue(), "is a link or a device"),
        "no bytes": (b"", "cut off at byte 0"),
    }


@pytest.mark.parametrize("name", damaged(tar_of(shard(8))))
def test_a_damaged_tar_is_refused_and_never_shorter(tmp_path: Path, name: str) -> None:
    data, why = damaged(tar_of(shard(8)))[name]
    path = tmp_path / "a.tar"
    path.write_bytes(data)
    with pytest.raises(SourceError, match=rf"a\.tar.*{why}"):
        rows_of(path)


def test_rows_of_a_tar_become_an_entry_with_their_media(tmp_path: Path) -> None:
    import hashlib

    import raysvc
    from raysvc.media.medium import media_of
    from tests.media.families import qwen, qwen_audio

    pictures = [jpeg(40 + number, 40, number) for number in range(6)]
    clips = [wav(4000 + number) for number in range(6)]
    for folder, mark, ending, media in (
        (qwen(tmp_path / "qwen"), "<image>", "jpg", pictures),
        (qwen_audio(tmp_path / "audio"), "<audio>", "wav", clips),
    ):
        files = []
        for number, data in enumerate(media):
            asked = {"role": "user", "content": f"{mark}What?"}
            told = {"messages": [asked, {"role": "assistant", "content": "It."}]}
            files += [(f"{number}.json", json.dumps(told).encode()), (f"{number}.{ending}", data)]
        files[3] = (files[3][0], media[1][:-90])  # of row 1
        files[5] = (files[5][0], b"")  # of row 2
        (tmp_path / "rows.tar").write_bytes(tar_of(files))
        entry = raysvc.tokenize(
            source={"path": str(tmp_path / "rows.tar")},
            tokenizer=str(folder),
            cache={"root": str(tmp_path / "cache")},
            max_quarantine=1.0,
        )
        digests = {
            row["source_row"]: [one.sha256 for one in media_of(row["media"])]
            for row in map(entry.row, entry.row_ids().tolist())
        }
        assert digests == {n: [hashlib.sha256(media[n]).hexdigest()] for n in (0, 3, 4, 5)}
        (reason,) = entry.report["row_counts"]["quarantined"].items()
        assert reason == (f"{'an image' if ending == 'jpg' else 'an audio clip'} is broken", 2)
