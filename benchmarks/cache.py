"""The cache beside `datasets` and mosaicml-streaming, and its S3 reads beside raw clients.

    python benchmarks/cache.py [--quick] [--rows 10000 100000 1000000] [--repeats 5] [--no-peers] [--no-s3]

Every number comes from a process of its own that does one thing. Columns:

    open       until the first answer to "how many rows are there"
    batch      the next 1024 rows, chosen at random, as arrays (or lists, where the peer gives lists)
    start_cpu  processor time of both
    scan       all rows from front to back, 1024 at a time, ids and mask of every row summed
    anon       memory of the process's own after all that, above what the imports took; it cannot be given back
    peak       highest resident memory above the imports: `anon` and mapped pages of files, which can
    mb_s       S3: MB/s, the best of several runs taken in turn; `of_best` is the share of the faster raw client
    cpu        S3: processor seconds of the client

The server is moto, or the one in RAYSVC_TEST_S3 (CONTRIBUTING.md). mosaicml-streaming is installed beside this project's
packages, in `.bench/cache`; it is left out above 100,000 rows with `--quick`.

Figures (11-21): an entry comes from S3 at 1.20 times the speed of `pyarrow.fs`, which checks nothing (aim 0.8).
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from cache_entries import ROOT, build_entry, in_process
from cache_s3 import MEASURES as S3_CLIENTS
from common import show

ROWS_PER_PART = 10_000
MEAN_LENGTH = 64
PEERS = ["mosaicml-streaming==0.13.0", "zstd", "brotli", "python-snappy", "cramjam", "catalogue", "pillow"]
QUICK_PEER_ROWS = 100_000
S3_PARTS, S3_ROWS_PER_PART, S3_MEAN_LENGTH = 16, 6_400, 512


def peer_python() -> str | None:
    """A Python that has mosaicml-streaming beside this project's packages; None when it cannot be had."""
    python = ROOT / ".bench/cache/bin/python"
    try:
        if not python.exists():
            subprocess.run([sys.executable, "-m", "venv", str(python.parent.parent)], check=True)
            (site,) = python.parent.parent.glob("lib/python*/site-packages")
            (site / "project.pth").write_text(os.path.dirname(os.path.dirname(np.__file__)) + "\n")
        install = [python, "-m", "pip", "install", "-q", "--no-deps", *PEERS]
        subprocess.run(install, check=True, capture_output=True)
    except (subprocess.CalledProcessError, OSError) as error:
        print(f"without mosaicml-streaming: {error}", file=sys.stderr)
        return None
    return str(python)


def compare_rows(work: Path, num_rows: int, peer: str | None) -> list[dict[str, Any]]:
    """Every reader on one entry."""
    from raysvc.cache.store.open import open_store

    script = "cache_readers.py"
    rows_per_part = min(ROWS_PER_PART, num_rows)
    store = open_store(str(work / "entries"))
    uri = build_entry(store, num_rows // rows_per_part, rows_per_part, MEAN_LENGTH)
    results: list[dict[str, Any]] = []
    for name in ("raysvc", "datasets, mapped", "datasets .to_list()"):
        results.append({"reader": name, "rows": num_rows, **in_process(sys.executable, script, name, uri)})
    if peer is not None:
        out, name = str(work / f"mds-{num_rows}"), "mosaicml-streaming"
        in_process(peer, script, "write streaming", uri, out)
        results.append({"reader": name, "rows": num_rows, **in_process(peer, script, name, out)})
        shutil.rmtree(out)
    if len({result.pop("total") for result in results}) != 1:
        raise SystemExit(f"the readers do not read the same: {results}")
    return results


@contextmanager
def s3_server() -> Iterator[str]:
    """The tests' server, for this process and its children; the name of its bucket."""
    sys.path.append(str(ROOT / "tests/cache"))
    import servers

    os.environ.setdefault("AWS_DEFAULT_REGION", "us-east-1")
    given = servers.given_server()
    with servers.moto_server() as moto:
        server = given or moto
        os.environ |= {"AWS_ENDPOINT_URL": server.url}
        os.environ |= {"AWS_ACCESS_KEY_ID": server.key, "AWS_SECRET_ACCESS_KEY": server.secret}
        yield servers.BUCKET


def compare_s3(work: Path, repeats: int) -> list[dict[str, Any]]:
    """Every client on one entry; the best of several runs, taken in turn."""
    from raysvc.cache.store.open import open_store

    os.environ["RAYSVC_PART_CACHE_DIR"] = str(work / "copies")
    best: dict[str, dict[str, Any]] = {}
    with s3_server() as bucket:
        store = open_store(f"s3://{bucket}/bench-{uuid.uuid4().hex}")
        uri = build_entry(store, S3_PARTS, S3_ROWS_PER_PART, S3_MEAN_LENGTH)
        for _ in range(repeats):
            for name in S3_CLIENTS:
                result = {"client": name, **in_process(sys.executable, "cache_s3.py", name, uri)}
                shutil.rmtree(work / "copies", ignore_errors=True)
                best[name] = max(result, best.get(name, result), key=lambda one: one["mb_s"])
    fastest = max(best[name]["mb_s"] for name in ("s3fs", "pyarrow.fs"))
    return [{**one, "of_best": one["mb_s"] / fastest} for one in best.values()]


def main() -> None:
    """Measure all, print two tables, each with one line of JSON."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--quick", action="store_true", help="10,000 and a million rows, the slowest peer only on the first"
    )
    parser.add_argument("--rows", type=int, nargs="*")
    parser.add_argument("--work", type=Path, default=ROOT / ".bench/cache-data")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--no-peers", action="store_true")
    parser.add_argument("--no-s3", action="store_true")
    options = parser.parse_args()
    default = [10_000, 1_000_000] if options.quick else [10_000, 100_000, 1_000_000]
    sizes = default if options.rows is None else options.rows
    shutil.rmtree(options.work, ignore_errors=True)
    options.work.mkdir(parents=True)
    peer = None if options.no_peers or not sizes else peer_python()
    rows = []
    for num in sizes:
        with_peer = not options.quick or num <= QUICK_PEER_ROWS
        rows += compare_rows(options.work, num, peer if with_peer else None)
    if rows:
        show("Readers of an entry on a local disk; seconds and MB", rows, mean_length=MEAN_LENGTH)
    if not options.no_s3:
        show("Reads from S3", compare_s3(options.work, options.repeats))
    shutil.rmtree(options.work)


if __name__ == "__main__":
    main()
