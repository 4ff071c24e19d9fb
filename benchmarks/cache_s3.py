"""Readers of an entry on S3, each run by `benchmarks/cache.py` in a process of its own.

    python benchmarks/cache_s3.py raysvc ENTRY      # endpoint and keys: AWS_ENDPOINT_URL, AWS_ACCESS_KEY_ID, ...

The clock starts when the files are known: raw clients have listed them, raysvc has opened the entry (what that takes is a
column). raysvc's bytes end checked, in files on the disk; those of the raw clients unchecked, in memory.
"""

from __future__ import annotations

import os
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from cache_entries import BATCH, Times, Watch, memory_mb, run_one

THREADS = 4


def read_parts(uri: str) -> Times:
    """All parts arrive on the disk, are checked and mapped."""
    entry, open_s = opened(uri)
    watch = Watch()
    entry.table()
    return {**speed(entry.manifest.num_bytes, watch), "open": open_s}


def read_rows(uri: str) -> Times:
    """The same, and every row is read, 1024 at a time."""
    entry, open_s = opened(uri)
    watch = Watch()
    for at in range(0, len(entry), BATCH):
        entry.read(entry.row_ids(at, min(at + BATCH, len(entry))))
    return {**speed(entry.manifest.num_bytes, watch), "open": open_s}


def read_s3fs(uri: str) -> Times:
    """Raw s3fs, whole objects into memory, from several threads."""
    fs = warm(uri)
    names = [name for name in fs.ls(uri, detail=False) if name.endswith(".arrow")]
    watch = Watch()
    with ThreadPoolExecutor(THREADS) as pool:
        return speed(sum(pool.map(lambda name: len(fs.cat_file(name)), names)), watch)


def read_pyarrow(uri: str) -> Times:
    """Raw pyarrow.fs, whole objects into memory, from several threads."""
    import pyarrow.fs

    names = [name for name in warm(uri).ls(uri, detail=False) if name.endswith(".arrow")]
    scheme, _, host = os.environ["AWS_ENDPOINT_URL"].partition("://")
    fs = pyarrow.fs.S3FileSystem(endpoint_override=host, scheme=scheme, region="us-east-1")
    fs.get_file_info(names[0])
    watch = Watch()
    with ThreadPoolExecutor(THREADS) as pool:
        return speed(sum(pool.map(lambda name: fs.open_input_file(name).read_buffer().size, names)), watch)


def opened(uri: str) -> tuple[Any, float]:
    """The entry, and how long it took to open."""
    import pyarrow.compute  # noqa: F401 - imported before the clock starts, as are the peers

    from raysvc.cache import gather, parts  # noqa: F401
    from raysvc.cache.find import open_finished
    from raysvc.cache.local import part_cache, part_source  # noqa: F401

    warm(uri)
    start = time.perf_counter()
    return open_finished(uri), time.perf_counter() - start


def warm(uri: str) -> Any:
    """An s3fs that has its client, so that no one pays for the session."""
    import fsspec

    fs = fsspec.filesystem("s3", use_listings_cache=False)  # shared by equal options
    fs.ls(uri)
    return fs


def speed(num_bytes: int, watch: Watch) -> Times:
    """MB/s, and CPU seconds of this process."""
    wall, cpu = watch.lap()
    return {"mb_s": num_bytes / 1e6 / wall, "cpu": cpu, **memory_mb()}


MEASURES = {"raysvc": read_parts, "raysvc, rows": read_rows, "s3fs": read_s3fs, "pyarrow.fs": read_pyarrow}

if __name__ == "__main__":
    run_one(MEASURES, *sys.argv[1:])
