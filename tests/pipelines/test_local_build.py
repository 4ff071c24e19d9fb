"""A small build needs no cluster: what it makes, who makes it, and what a kill leaves."""

from __future__ import annotations

import fcntl
import functools
import json
import logging
import re
import signal
import subprocess
import sys
import threading
import traceback
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml

import raysvc
from raysvc.cli.sample_data import write_rows
from raysvc.job.config import PoolConfig
from raysvc.pipelines import local_build
from raysvc.pipelines.local_build import fits_one_process, only_builder_here
from raysvc.progress import Tick

TOKENIZE = """
import json, sys
import raysvc
entry = raysvc.tokenize(sys.argv[1])
print(json.dumps({"uri": entry.uri, "ray": sorted(m for m in sys.modules if m.split(".")[0] == "ray")}))
"""
PAUSE = """
import sys, time
from pathlib import Path
from raysvc.pipelines import tokenize
real = tokenize.build_slice
def paused(task, tokenizer, piece):
    if piece.index == 3:
        print("three slices are made", flush=True)
        sys.stdin.readline()
    return real(task, tokenizer, piece)
tokenize.build_slice = paused
"""


def write_job(folder: Path, sample: dict[str, str], rows: int = 600, slices: int = 6, **more: Any) -> Path:
    path = write_rows(folder / "rows.jsonl", rows)
    job = {
        "source": {"path": str(path), "format": "chat"},
        "tokenizer": sample["tokenizer"],
        "workers": {"slice_mb": path.stat().st_size / slices / 1e6},
        "cache": {"root": str(folder / "cache")},
        **more,
    }
    (folder / "job.yaml").write_text(yaml.safe_dump(job))
    return folder / "job.yaml"


def start(code: str, job: Path) -> subprocess.Popen[str]:
    pipe = subprocess.PIPE
    return subprocess.Popen(
        [sys.executable, "-c", code, str(job)], stdin=pipe, stdout=pipe, stderr=pipe, text=True
    )


def parts_of(uri: str) -> list[Path]:
    return sorted(Path(uri).glob("part-*.arrow"))


def bytes_of_parts(entry: raysvc.CacheEntry) -> list[bytes]:
    return [(Path(entry.uri) / part.name).read_bytes() for part in entry.entries[0].manifest.parts]


def test_a_small_source_is_tokenized_without_ray(tmp_path: Path, sample: dict[str, str]) -> None:
    process = start(TOKENIZE, write_job(tmp_path, sample))
    out, err = process.communicate(timeout=110)
    assert process.returncode == 0, err
    assert json.loads(out)["ray"] == []


@pytest.mark.ray
def test_a_cluster_and_one_process_write_the_same_bytes(
    tmp_path: Path, sample: dict[str, str], ray_session: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = write_job(tmp_path, sample)
    here = raysvc.tokenize(job)
    monkeypatch.setattr(local_build, "CLUSTER_S", 0.0)
    workers = yaml.safe_load(job.read_text())["workers"] | {"max": 2}
    there = raysvc.tokenize(job, cache={"root": str(tmp_path / "other")}, workers=workers)
    assert here.key == there.key
    bytes_here = bytes_of_parts(here)
    assert bytes_here == bytes_of_parts(there)
    assert len(bytes_here) > 3
    assert here.report["row_counts"] == there.report["row_counts"]


def test_two_processes_make_each_slice_once(tmp_path: Path, sample: dict[str, str]) -> None:
    job = write_job(tmp_path, sample)
    first = start(PAUSE + TOKENIZE, job)
    assert first.stdout is not None
    assert first.stdout.readline() == "three slices are made\n"
    second = start(TOKENIZE, job)
    assert first.stdin is not None
    first.stdin.write("\n")  # the second one may wait for it by now, or come later: both end in one entry
    first.stdin.flush()
    results = [process.communicate(timeout=110) for process in (first, second)]
    uris = {json.loads(out.splitlines()[-1])["uri"] for out, _ in results}
    (uri,) = uris
    assert len(parts_of(uri)) == len(raysvc.open_entry(uri).entries[0].manifest.parts)


def test_a_builder_that_is_stopped_is_not_waited_for_and_may_wake_and_end(
    tmp_path: Path, sample: dict[str, str]
) -> None:
    job = write_job(tmp_path, sample)
    first = start(PAUSE + TOKENIZE, job)
    assert first.stdout is not None
    assert first.stdin is not None
    assert first.stdout.readline() == "three slices are made\n"
    first.send_signal(signal.SIGSTOP)
    try:
        soon = "from raysvc.pipelines import local_build; local_build.ASLEEP_S = 1.0\n"
        out, err = start(soon + TOKENIZE, job).communicate(timeout=110)
        uri = json.loads(out.splitlines()[-1])["uri"]
        built = bytes_of_parts(raysvc.open_entry(uri))
    finally:
        first.send_signal(signal.SIGCONT)
    out, err = first.communicate("\n", timeout=110)
    assert json.loads(out.splitlines()[-1])["uri"] == uri, err
    assert bytes_of_parts(raysvc.open_entry(uri)) == built
    assert raysvc.open_entry(uri).entries[0].verify() == []


def test_a_process_that_waits_goes_on_where_a_killed_one_stopped(
    tmp_path: Path, sample: dict[str, str]
) -> None:
    job = write_job(tmp_path, sample)
    first = start(PAUSE + TOKENIZE, job)
    assert first.stdout is not None
    first.stdout.readline()
    waiting = threading.Event()
    ticks: list[Tick] = []

    def progress(tick: Tick) -> None:
        ticks.append(tick)
        if tick.waiting == "another process builds this entry":
            waiting.set()

    found: list[raysvc.CacheEntry] = []
    second = threading.Thread(target=lambda: found.append(raysvc.tokenize(job, progress=progress)))
    second.start()
    assert waiting.wait(100)
    made = {path.name for path in (tmp_path / "cache").glob("*/part-*.arrow")}
    first.send_signal(signal.SIGKILL)
    first.communicate()
    second.join(100)
    names = {part.name for part in found[0].entries[0].manifest.parts}
    assert len(made) == 3
    assert made <= names, "finished slices are not made again"
    assert ticks[-1].facts["resumed rows"] > 0
    calm = raysvc.tokenize(job, cache={"root": str(tmp_path / "calm")})
    assert found[0].table().equals(calm.table())


def test_a_source_that_grew_past_the_size_is_built_by_the_rule_of_its_new_size(
    tmp_path: Path, sample: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    job = write_job(tmp_path, sample)
    assert raysvc.tokenize(job).num_rows == 600
    with open(tmp_path / "rows.jsonl", "ab") as file:
        file.write((tmp_path / "rows.jsonl").read_bytes())
    monkeypatch.setattr(local_build, "CLUSTER_S", 0.0)
    monkeypatch.setattr("raysvc.cluster.connect", lambda address: pytest.fail("Ray was asked for"))
    with pytest.raises(pytest.fail.Exception, match="Ray was asked for"):
        raysvc.tokenize(job)
    monkeypatch.undo()
    assert raysvc.tokenize(job).num_rows == 1200


@pytest.mark.parametrize(
    ("megabytes", "slices", "pool", "cores", "small"),
    [
        (5, 2, {}, 2, True),
        (100, 25, {}, 2, True),
        (200, 25, {}, 2, False),
        (100, 25, {}, 16, False),
        (50, 12, {}, 16, True),
        (10_000, 300, {}, 1, True),  # a cluster of one worker never wins
        (200, 1, {}, 16, True),  # one slice is one worker's
        (200, 25, {"max": 1}, 16, True),
        (5, 2, {"min": 2}, 2, False),  # a job that asks for workers gets them
    ],
)
def test_small_is_what_one_process_ends_before_a_cluster_would(
    megabytes: int, slices: int, pool: dict[str, int], cores: int, small: bool
) -> None:
    assert fits_one_process(megabytes * 1e6, slices, PoolConfig(**pool), cores) is small


def test_one_of_many_threads_builds_at_a_time_and_no_lock_stays(tmp_path: Path) -> None:
    inside, most = 0, 0
    guard = threading.Lock()

    def build() -> None:
        nonlocal inside, most
        with only_builder_here(str(tmp_path), lambda: None):
            with guard:
                inside += 1
                most = max(most, inside)
            with guard:
                inside -= 1

    threads = [threading.Thread(target=build) for _ in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert most == 1
    assert not local_build._lock_path(str(tmp_path)).exists()


def test_a_host_without_a_folder_for_locks_builds_without(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(*arguments: Any) -> None:
        raise OSError("no locks here")

    monkeypatch.setattr(fcntl, "flock", refused)
    with only_builder_here(str(tmp_path), lambda: None):
        pass


@pytest.mark.parametrize(("slices", "made"), [(1, 0), (75, 3)], ids=["a long slice", "short slices"])
@pytest.mark.parametrize("kind", ["jsonl", "parquet"])
def test_a_build_of_rows_that_are_nearly_all_bad_ends_with_the_first_of_them(
    tmp_path: Path, sample: dict[str, str], kind: str, slices: int, made: int
) -> None:
    job = write_job(tmp_path, sample, rows=400)
    good = [json.loads(line) for line in (tmp_path / "rows.jsonl").read_text().splitlines()]
    bad = {"messages": [{"role": "user", "content": "a"}, {"role": "nobody", "content": "b"}]}
    rows = [*good[:20], *[bad] * 30_000, *good]
    if kind == "jsonl":
        path = tmp_path / "rows.jsonl"
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    else:
        path = tmp_path / "rows.parquet"
        columns = {"messages": [row["messages"] for row in rows]}
        pq.write_table(pa.table(columns), path, row_group_size=400)
    sections: dict[str, Any] = {
        "source": {"path": str(path), "format": "chat"},
        "workers": {"slice_mb": path.stat().st_size / slices / 1e6},
        "max_quarantine": 0.5,
    }
    with pytest.raises(raysvc.errors.QuarantineExceeded, match=r"rows 20 and 21 and 22") as caught:
        raysvc.tokenize(job, **sections)
    assert len(list((tmp_path / "cache").glob("*/part-*.arrow"))) == made
    read = re.search(r"of the first (\d+) rows", str(caught.value))
    assert read
    assert 1000 <= int(read[1]) < 3000, "of 30,000"


def test_a_secret_in_the_address_of_a_source_is_in_no_file_no_log_and_no_error(
    tmp_path: Path, sample: dict[str, str], caplog: pytest.LogCaptureFixture
) -> None:
    secret = "SECRET-d41d8cd9"
    caplog.set_level(logging.DEBUG)
    served = functools.partial(QuietHandler, directory=str(Path(sample["rows"]).parent))
    server = ThreadingHTTPServer(("127.0.0.1", 0), served)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    try:
        url = f"http://127.0.0.1:{server.server_port}"
        job = {"tokenizer": sample["tokenizer"], "cache": {"root": str(tmp_path / "cache")}}
        entry = raysvc.tokenize(source={"path": f"{url}/rows.jsonl?sig={secret}"}, **job)
        with pytest.raises(raysvc.errors.SourceError, match=r"gone\.jsonl") as raised:
            raysvc.tokenize(source={"path": f"{url}/gone.jsonl?sig={secret}"}, **job)
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
    shown = "".join(traceback.format_exception(raised.value))
    assert secret not in shown + repr(raised.value) + json.dumps(entry.report) + repr(entry)
    ours = [record.getMessage() for record in caplog.records if record.name.startswith("raysvc")]
    assert secret not in "".join(ours)
    files = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert len(files) > 2
    assert [path for path in files if secret.encode() in path.read_bytes()] == []


class QuietHandler(SimpleHTTPRequestHandler):
    def log_message(self, *args: object) -> None:
        pass
