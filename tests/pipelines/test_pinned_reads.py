"""What a slice reads is what the scan saw, on every store, or the read fails and names the file."""

from __future__ import annotations

import bz2
import gzip
import io
import itertools
import json
import lzma
import os
import random
import signal
import tarfile
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import fsspec
import numpy as np
import pyarrow as pa
import pyarrow.csv as pc
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from raysvc.errors import SourceError
from raysvc.job.config import SourceConfig
from raysvc.pipelines.reading import pinned_file
from raysvc.pipelines.reading.pins import BLOCK_BYTES, PinHasher
from raysvc.pipelines.reading.readers import read_rows
from raysvc.pipelines.sources.cuts import MAX_LINE_BYTES, LineCutter, group_cuts
from raysvc.pipelines.sources.look import look_at
from raysvc.pipelines.sources.slices import Slice
from raysvc.pipelines.sources.source import Source

Rows = list[tuple[int, str]]


def lines(rows: list[str]) -> bytes:
    return b"".join(json.dumps({"text": text}).encode() + b"\n" for text in rows)


def read(piece: Slice) -> Rows:
    """(number, text), through the JSON that a task gets."""
    piece = Slice.from_json(json.loads(json.dumps(piece.to_json())))
    return [(row.source_row, row.data["text"]) for row in read_rows(piece, {}) if row.data]


def read_all(source: Source) -> Rows:
    return [row for piece in source.slices for row in read(piece)]


def look(path: Path | str, slice_bytes: int | None = None) -> Source:
    return look_at(SourceConfig(path=(str(path),)), slice_bytes)


class WebServer:
    """Files over HTTP, with or without ranges, with or without an ETag and a time."""

    def __init__(self, handler: type[BaseHTTPRequestHandler]) -> None:
        self.bodies: list[int] = []  # bytes that were asked for, of each GET
        handler.web = self  # type: ignore[attr-defined]
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
        self._thread = threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.02})
        self._thread.start()
        self.url = f"http://127.0.0.1:{self._server.server_port}"

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


def handler_of(folder: Path, ranges: bool, stamped: bool) -> type[BaseHTTPRequestHandler]:
    class Handler(SimpleHTTPRequestHandler):
        web: WebServer

        def __init__(self, *args: Any) -> None:
            super().__init__(*args, directory=str(folder))

        def log_message(self, *args: object) -> None:
            pass

        def send_header(self, keyword: str, value: str) -> None:
            if stamped or keyword != "Last-Modified":
                super().send_header(keyword, value)

        def do_GET(self) -> None:
            asked = self.headers.get("Range")
            data = (folder / self.path.partition("?")[0].lstrip("/")).read_bytes()
            if ranges and asked:
                begin, end = asked.removeprefix("bytes=").split("-")
                data = data[int(begin) : int(end) + 1]
                self.send_response(206)
            else:
                self.send_response(200)
            self.web.bodies.append(len(data))
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            try:
                self.wfile.write(data)
            except (BrokenPipeError, ConnectionResetError):
                self.close_connection = True

    return Handler


@pytest.fixture(params=["plain", "ranges", "no-times"])
def web(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[WebServer]:
    kind = request.param
    (tmp_path / "www").mkdir()
    server = WebServer(handler_of(tmp_path / "www", kind != "plain", kind != "no-times"))
    yield server
    server.close()


TEXTS = [f"row {number} " + "x" * (number % 97) for number in range(30_000)]


def test_a_web_server_gives_every_row_once_whether_it_knows_ranges_or_not(
    web: WebServer, tmp_path: Path
) -> None:
    data = lines(TEXTS)
    (tmp_path / "www" / "rows.jsonl").write_bytes(data)
    source = look(f"{web.url}/rows.jsonl", len(data) // 8)
    assert len(source.slices) > 4
    assert read_all(source) == list(enumerate(TEXTS))
    source.check_unchanged()


def test_a_server_without_ranges_sends_the_file_once_to_look_and_once_to_read(tmp_path: Path) -> None:
    texts = ["y" * 1000] * (4 * BLOCK_BYTES // 1000)
    (tmp_path / "rows.jsonl").write_bytes(lines(texts))
    web = WebServer(handler_of(tmp_path, ranges=False, stamped=True))
    try:
        source = look(f"{web.url}/rows.jsonl", BLOCK_BYTES)
        assert len(source.slices) == 5
        looked = len(web.bodies)
        assert read_all(source) == list(enumerate(texts))
    finally:
        web.close()
    # the first range begins at 0 and is served; one refused range for each of the others, and one stream for them all
    assert len(web.bodies) - looked == 1 + (len(source.slices) - 1) + 1


def test_a_web_file_that_changed_after_the_scan_fails_by_name(web: WebServer, tmp_path: Path) -> None:
    path = tmp_path / "www" / "rows.jsonl"
    path.write_bytes(lines(["one", "two"]))
    status = path.stat()
    source = look(f"{web.url}/rows.jsonl")
    slices = source.slices
    path.write_bytes(lines(["one", "owt"]))
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns + 10**10))
    with pytest.raises(SourceError, match=r"rows\.jsonl.*changed"):
        read(slices[0])
    with pytest.raises(SourceError, match=r"rows\.jsonl.*changed"):
        source.check_unchanged()


def test_a_local_file_that_is_put_back_before_the_commit_gives_no_rows_of_the_other(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_bytes(lines(["one", "two"]))
    source = look(path)
    slices = source.slices
    path.write_bytes(lines(["eno", "two"]))
    with pytest.raises(SourceError, match=r"rows\.jsonl.*changed"):
        read(slices[0])
    path.write_bytes(lines(["one", "two"]))
    assert read(slices[0]) == [(0, "one"), (1, "two")]


def test_a_slice_that_was_made_of_other_bytes_is_not_taken_for_this_one(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    found = []
    for texts in (["one", "two"], ["eno", "two"], ["one", "two"]):
        path.write_bytes(lines(texts))
        found.append(look(path).slices[0].identity())
    assert found[0] == found[2] != found[1]


KINDS = (
    "jsonl",
    "jsonl.gz",
    "jsonl.bz2",
    "jsonl.xz",
    "jsonl.zst",
    "json",
    "csv",
    "csv.gz",
    "parquet",
    "arrow",
)


def encoded(kind: str, texts: list[str]) -> bytes:
    table = pa.table({"text": texts})
    sink = pa.BufferOutputStream()
    if kind == "json":
        return json.dumps([{"text": text} for text in texts]).encode()
    if kind.startswith("csv"):
        pc.write_csv(table, sink)
        data = sink.getvalue().to_pybytes()
        return gzip.compress(data) if kind.endswith("gz") else data
    if kind == "parquet":
        pq.write_table(table, sink, row_group_size=7, compression="none")
        return sink.getvalue().to_pybytes()
    if kind == "arrow":
        with pa.ipc.new_stream(sink, table.schema) as writer:
            writer.write_table(table, max_chunksize=7)
        return sink.getvalue().to_pybytes()
    packers: dict[str, Any] = {
        "gz": gzip.compress,
        "bz2": bz2.compress,
        "xz": lzma.compress,
        "zst": lambda data: pa.compress(data, "zstd", asbytes=True),
        "jsonl": lambda data: data,
    }
    return bytes(packers[kind.rpartition(".")[2]](lines(texts)))


@settings(max_examples=150)
@given(data=st.data())
def test_rows_are_those_of_the_scanned_bytes_or_the_read_fails_by_name(
    data: st.DataObject, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """The oracle is the list of texts that was written before the scan."""
    kind = data.draw(st.sampled_from(KINDS))
    local = data.draw(st.booleans())
    sizes = data.draw(st.lists(st.integers(1, 40), min_size=1, max_size=4))
    root = str(tmp_path_factory.mktemp("source")) if local else "memory://pinned"
    fs = fsspec.filesystem("file" if local else "memory")
    if not local and fs.exists("/pinned"):
        fs.rm("/pinned", recursive=True)
    texts: Rows = []
    for place, size in enumerate(sizes):
        mine = [f"{place} {number} " + "z" * (number % 13) for number in range(size)]
        fs.pipe_file(f"{root}/{place}.{kind}", encoded(kind, mine))
        texts += [(len(texts) + number, text) for number, text in enumerate(mine)]
    source = look(root, data.draw(st.integers(20, 2000)))
    order = data.draw(st.permutations(source.slices))
    found: dict[int, Rows] = {}
    for piece in order:
        if data.draw(st.booleans()):
            mutate(fs, f"{root}/{data.draw(st.integers(0, len(sizes) - 1))}.{kind}", data)
        rows, error = outcome(piece)
        if error is None:
            found[piece.index] = rows
        else:
            assert any(one.path in str(error) for one in piece.pieces)
    for piece in source.slices:
        if piece.index in found:
            assert found[piece.index] == texts[piece.first_row : piece.first_row + piece.num_rows]


def outcome(piece: Slice) -> tuple[Rows, SourceError | None]:
    try:
        return read(piece), None
    except SourceError as error:
        return [], error


def mutate(fs: Any, path: str, data: st.DataObject) -> None:
    held = bytearray(fs.cat_file(path))
    how = data.draw(st.sampled_from(["flip", "cut", "add", "swap"]))
    if how == "flip" and held:
        held[data.draw(st.integers(0, len(held) - 1))] ^= 1
    elif how == "cut":
        held = held[: len(held) // 2]
    elif how == "add":
        held += b'{"text": "late"}\n'
    else:
        held = held[::-1]
    fs.pipe_file(path, bytes(held))


@settings(max_examples=100)
@given(data=st.binary(max_size=300), block=st.integers(1, 40), steps=st.integers(1, 60))
def test_digests_do_not_depend_on_how_the_bytes_arrive(data: bytes, block: int, steps: int) -> None:
    hasher = PinHasher(block)
    for start in range(0, len(data), steps):
        hasher.feed(data[start : start + steps])
    pins = hasher.finish()
    assert (pins.size, len(pins.digests)) == (len(data), -(-len(data) // block))
    for start in range(0, len(data), block):
        pins.check(start, memoryview(data)[start : start + block], "x")
        with pytest.raises(SourceError):
            pins.check(start, memoryview(bytes([data[start] ^ 1]) + data[start + 1 : start + block]), "x")


@pytest.mark.slow
@pytest.mark.parametrize("ending", ["gz", "bz2", "xz", "zst"])
def test_a_compressed_file_gives_many_slices_that_can_be_read_in_any_order(
    tmp_path: Path, ending: str
) -> None:
    rng = random.Random(1)
    texts = ["".join(rng.choices("abcdef", k=500)) for _ in range(6 * BLOCK_BYTES // 500)]
    path = tmp_path / f"rows.jsonl.{ending}"
    path.write_bytes(encoded(f"jsonl.{ending}", texts))
    source = look(path, BLOCK_BYTES)
    assert len(source.slices) > 5
    order = rng.sample(source.slices, len(source.slices))
    found = {piece.index: read(piece) for piece in order}
    assert [row for _, rows in sorted(found.items()) for row in rows] == list(enumerate(texts))


@pytest.mark.parametrize("ending", ["gz", "bz2", "xz", "zst"])
@pytest.mark.parametrize("keep", [0.5, 0.999])
def test_a_truncated_file_is_an_error_that_names_it(tmp_path: Path, ending: str, keep: float) -> None:
    path = tmp_path / f"rows.jsonl.{ending}"
    packed = encoded(f"jsonl.{ending}", [random.Random(n).randbytes(20).hex() for n in range(5000)])
    path.write_bytes(packed[: int(len(packed) * keep)])
    with pytest.raises(SourceError, match=rf"rows\.jsonl\.{ending}"):
        look(path)


def test_several_members_of_a_gz_file_are_one_content(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl.gz"
    path.write_bytes(gzip.compress(lines(["one"])) + gzip.compress(lines(["two"])))
    assert read_all(look(path)) == [(0, "one"), (1, "two")]


@pytest.mark.parametrize("ending", ["jsonl", "jsonl.gz"])
@pytest.mark.parametrize("last", [False, True])
def test_a_line_over_the_limit_is_one_quarantined_row_and_is_never_held(
    tmp_path: Path, ending: str, last: bool
) -> None:
    long = b'{"text": "' + b"a" * MAX_LINE_BYTES + b'"}'
    after = b"" if last else b"\n" + lines(["two", "three"])
    data = lines(["one"]) + long + after
    path = tmp_path / f"rows.{ending}"
    path.write_bytes(gzip.compress(data, 1) if ending.endswith("gz") else data)
    source = look(path)
    rows = [row for piece in source.slices for row in read_rows(piece, {})]
    assert [row.source_row for row in rows] == ([0, 1] if last else [0, 1, 2, 3])
    assert [row.data and row.data["text"] for row in rows] == [
        "one",
        None,
        *([] if last else ["two", "three"]),
    ]
    assert rows[1].error == "line too long: 67 MB, the limit is 67 MB"
    assert source.first_row() == {"text": "one"}


@settings(max_examples=300)
@given(
    sizes=st.lists(st.integers(0, 60), max_size=12),
    last_newline=st.booleans(),
    slice_bytes=st.integers(1, 80),
    limit=st.integers(1, 40),
    block=st.integers(1, 90),
)
def test_every_line_over_the_limit_is_a_cut_of_its_own_and_no_other_is(
    sizes: list[int], last_newline: bool, slice_bytes: int, limit: int, block: int
) -> None:
    text = b"\n".join(b"x" * size for size in sizes) + (b"\n" if last_newline and sizes else b"")
    cutter = LineCutter(slice_bytes, limit)
    for start in range(0, len(text), block):
        cutter.feed(text[start : start + block])
    cuts = cutter.finish()
    whole = text.splitlines(keepends=True)
    assert b"".join(text[start:end] for start, end, _ in cuts) == text
    assert [rows for _, _, rows in cuts] == [len(text[start:end].splitlines()) for start, end, _ in cuts]
    long = [line for line in whole if len(line) > limit]
    assert [text[a:b] for a, b, _ in cuts if len(text[a:b].splitlines(True)[0]) > limit] == long


class Bucket(fsspec.AbstractFileSystem):
    """A store with one object, which remembers how many requests were under way together.

    One that is not of the head is answered when `together` of them were, which may take long on a busy machine.
    """

    protocol = "bucket-of-tests"
    cachable = False
    content = b""
    asked, now, most, together = 0, 0, 0, 0
    changed = threading.Condition()

    def _open(self, path: str, mode: str = "rb", block_size: int = 5, **options: Any) -> Any:
        return BucketFile(self, path, mode, block_size, size=len(self.content), **options)

    def info(self, path: str, **options: Any) -> dict[str, Any]:
        return {"name": path, "size": len(self.content), "type": "file"}


class BucketFile(fsspec.spec.AbstractBufferedFile):
    def _fetch_range(self, start: int, end: int) -> bytes:
        with Bucket.changed:
            Bucket.asked += 1
            Bucket.now += 1
            Bucket.most = max(Bucket.most, Bucket.now)
            Bucket.changed.notify_all()
            Bucket.changed.wait_for(lambda: start == 0 or Bucket.most >= Bucket.together, 60)
            Bucket.now -= 1
        return Bucket.content[start:end]


@pytest.fixture
def bucket(monkeypatch: pytest.MonkeyPatch) -> type[Bucket]:
    fsspec.register_implementation("bucket-of-tests", Bucket, clobber=True)
    monkeypatch.setattr(pinned_file, "RANGE_BYTES", 10)
    monkeypatch.setattr(Bucket, "content", bytes(range(256)))
    for name in ("asked", "most", "together"):
        monkeypatch.setattr(Bucket, name, 0)
    return Bucket


@pytest.mark.parametrize("size", [0, 1, 9, 10, 11, 199, 200])
def test_a_file_of_a_store_is_read_whole_whatever_is_asked_for_at_once(
    bucket: type[Bucket], monkeypatch: pytest.MonkeyPatch, size: int
) -> None:
    monkeypatch.setattr(bucket, "content", random.Random(size).randbytes(size))
    for step in (1, 3, 10, 25, 400):
        with pinned_file.ContentStream("bucket-of-tests://rows.jsonl", {}) as stream:
            assert b"".join(iter(lambda: stream.read(step), b"")) == bucket.content  # noqa: B023


def test_many_ranges_are_under_way_together_and_a_look_at_the_head_asks_for_one(bucket: type[Bucket]) -> None:
    with pinned_file.ContentStream("bucket-of-tests://rows.jsonl", {}) as stream:
        assert stream.read(4) == bucket.content[:4]
    assert bucket.asked == 1
    bucket.together = 5
    with pinned_file.ContentStream("bucket-of-tests://rows.jsonl", {}) as stream:
        assert stream.read_all() == bucket.content
    assert bucket.asked == 1 + 26
    assert bucket.together <= bucket.most <= pinned_file.RANGES_AT_ONCE


@pytest.mark.filterwarnings("ignore:.*multi-threaded:DeprecationWarning")
def test_a_child_that_is_forked_after_a_read_reads_too(bucket: type[Bucket]) -> None:
    def read() -> bytes:
        with pinned_file.ContentStream("bucket-of-tests://rows.jsonl", {}) as stream:
            return stream.read_all()

    read()
    child = os.fork()
    if child == 0:
        os._exit(0 if read() == bucket.content else 1)
    end_s = time.monotonic() + 60
    while (found := os.waitpid(child, os.WNOHANG))[0] == 0 and time.monotonic() < end_s:
        time.sleep(0.01)
    if found[0] == 0:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
    assert found == (child, 0), "it waits for threads of its parent"


@pytest.mark.parametrize("kind", ["parquet", "tar", "jsonl"])
def test_slices_of_a_remote_file_read_their_own_ranges_and_keep_no_copy(tmp_path: Path, kind: str) -> None:
    """Row groups, samples and lines: all slices together ask for little more than the bytes of the file."""
    www = tmp_path / "www"
    www.mkdir()
    rng = np.random.default_rng(0)
    texts = [rng.bytes(2000).hex() for _ in range(4000)]
    path = www / f"rows.{kind}"
    if kind == "parquet":
        table = pa.table({"text": texts})
        pq.write_table(table, path, row_group_size=250, compression="none", use_dictionary=False)
    elif kind == "tar":
        with tarfile.open(path, "w") as tar:
            for number, text in enumerate(texts):
                data = json.dumps({"text": text}).encode()
                member = tarfile.TarInfo(f"{number:06d}.json")
                member.size = len(data)
                tar.addfile(member, io.BytesIO(data))
    else:
        path.write_bytes(lines(texts))
    server = WebServer(handler_of(www, ranges=True, stamped=True))
    try:
        source = look(f"{server.url}/rows.{kind}", 2_500_000)
        assert len(source.slices) >= 5
        size, asked, found = path.stat().st_size, 0, []
        for piece in source.slices:
            server.bodies.clear()
            found += [row.data["text"] for row in read_rows(piece, {}) if row.data]
            asked += sum(server.bodies)
    finally:
        server.close()
    assert found == texts
    assert asked < size + len(source.slices) * (3 << 20)  # whole blocks, and the foot of a Parquet file


@settings(max_examples=300)
@given(groups=st.lists(st.integers(0, 40), max_size=12), slices=st.integers(1, 20))
def test_rows_of_groups_are_cut_between_them_unless_a_group_is_large(groups: list[int], slices: int) -> None:
    cuts = group_cuts(groups, slices)
    edges = [0, *itertools.accumulate(groups)]
    assert [row for a, b, _ in cuts for row in range(a, b)] == list(range(edges[-1]))
    assert all(0 < rows == b - a for a, b, rows in cuts)
    most = max(1, -(-edges[-1] // slices))
    inside = {a for a, _, _ in cuts} - set(edges)
    large = [(a, b) for a, b in itertools.pairwise(edges) if b - a > 2 * most]
    assert all(any(a < cut < b for a, b in large) for cut in inside)
    assert all(rows <= 2 * most for _, _, rows in cuts)
