"""The cache beside `datasets` and mosaicml-streaming, and its S3 reads beside raw clients.

    python benchmarks/cache.py [--rows 10000 100000 1000000] [--work .bench/cache-data] [--json FILE]

Every number comes from a process of its own that does one thing. Columns:

    open    until the first answer to "how many rows are there"
    batch   the next 1024 rows, chosen at random, as arrays (or lists, where the peer gives lists)
    scan    all rows from front to back, 1024 at a time, ids and mask of every row summed
    anon    memory of the process's own after all that, above what the imports took; it cannot be given back
    peak    highest resident memory above the imports: `anon` and mapped pages of files, which can

mosaicml-streaming is installed beside this project's packages, in `.bench/cache`.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import time
import types
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).resolve().parent.parent
BATCH = 1024
ROWS_PER_PART = 10_000
MEAN_LENGTH = 64
PEERS = ["mosaicml-streaming==0.13.0", "zstd", "brotli", "python-snappy", "cramjam", "catalogue", "pillow"]
S3_PARTS, S3_ROWS_PER_PART, S3_MEAN_LENGTH, S3_THREADS = 16, 6_400, 512, 4


def make_table(first_row: int, num_rows: int, mean_length: int) -> Any:
    """Random rows."""
    import pyarrow as pa

    rng = np.random.default_rng(first_row)
    lengths = rng.integers(mean_length // 2, mean_length * 3 // 2 + 1, num_rows)
    offsets = pa.array(np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32))
    ids = rng.integers(0, 150_000, lengths.sum()).astype(np.int32)
    mask = rng.integers(0, 2, lengths.sum()).astype(np.uint8)
    columns = {
        name: pa.ListArray.from_arrays(offsets, pa.array(v))
        for name, v in (("input_ids", ids), ("loss_mask", mask))
    }
    return pa.table(columns | {"source_row": pa.array(np.arange(first_row, first_row + num_rows))})


def build_entry(store: Any, num_parts: int, rows_per_part: int, mean_length: int) -> str:
    """One entry; its URI."""
    from raysvc.cache.key import cache_key
    from raysvc.cache.writer import EntryWriter

    recipe = {"benchmark": [num_parts, rows_per_part, mean_length]}
    writer = EntryWriter(store, cache_key(recipe))
    tables = (make_table(i * rows_per_part, rows_per_part, mean_length) for i in range(num_parts))
    writer.commit([writer.write_part(i, table, {}) for i, table in enumerate(tables)], recipe, {})
    return writer.uri


def memory_mb() -> dict[str, float]:
    """Own memory and highest resident memory of this process, MB."""
    lines = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return {name: int(lines[key].split()[0]) / 1024 for name, key in (("anon", "RssAnon"), ("peak", "VmHWM"))}


def measured(
    imports: Callable[[], object], open_: Callable[[], tuple[int, Callable, Callable]]
) -> dict[str, float]:
    """Time and memory of opening, one random batch and a scan; `open_` gives rows, read and scan."""
    imports()
    before, start = memory_mb(), time.perf_counter()
    num_rows, read, scan = open_()
    opened = time.perf_counter()
    read(np.random.default_rng(0).integers(0, num_rows, BATCH))
    first = time.perf_counter()
    total = scan()
    scanned, after = time.perf_counter(), memory_mb()
    times = {"open": opened - start, "batch": first - opened, "scan": scanned - first}
    return {**times, **{name: after[name] - before[name] for name in after}, "total": total}


def read_raysvc(path: str) -> dict[str, float]:
    """This project."""

    def imports() -> None:
        import raysvc.cache.gather
        import raysvc.cache.parts
        import raysvc.cache.reader  # noqa: F401

    def open_() -> tuple[int, Callable, Callable]:
        from raysvc.cache.reader import open_entry

        entry = open_entry(path)

        def scan() -> int:
            batches = (
                entry.read(np.arange(at, min(at + BATCH, len(entry)))) for at in range(0, len(entry), BATCH)
            )
            return sum(
                int(b.tokens["input_ids"].sum(dtype=np.int64) + b.tokens["loss_mask"].sum()) for b in batches
            )

        return entry.num_rows, entry.read, scan

    return measured(imports, open_)


def read_datasets(path: str) -> dict[str, float]:
    """`datasets`, memory-mapped, with numpy as its format."""

    def imports() -> None:
        import datasets  # noqa: F401

    def open_() -> tuple[int, Callable, Callable]:
        import datasets

        data = datasets.load_from_disk(path).with_format("numpy")

        def scan() -> int:
            batches = (data[at : at + BATCH] for at in range(0, len(data), BATCH))
            return sum(
                int(ids.sum(dtype=np.int64) + mask.sum())
                for b in batches
                for ids, mask in zip(b["input_ids"], b["loss_mask"], strict=True)
            )

        return len(data), lambda ids: data[ids], scan

    return measured(imports, open_)


def read_to_list(path: str) -> dict[str, float]:
    """`datasets.load_from_disk(...).to_list()`: all rows as Python objects."""

    def imports() -> None:
        import datasets  # noqa: F401

    def open_() -> tuple[int, Callable, Callable]:
        import datasets

        rows = datasets.load_from_disk(path).to_list()
        return (
            len(rows),
            lambda ids: [rows[i] for i in ids],
            lambda: sum(sum(r["input_ids"]) + sum(r["loss_mask"]) for r in rows),
        )

    return measured(imports, open_)


def read_streaming(path: str) -> dict[str, float]:
    """mosaicml-streaming, its own format, not shuffled."""

    def imports() -> None:
        stub_torchvision()
        import streaming  # noqa: F401

    def open_() -> tuple[int, Callable, Callable]:
        import streaming

        data = streaming.StreamingDataset(local=path, shuffle=False, batch_size=BATCH)

        def scan() -> int:
            rows = (data[i] for i in range(len(data)))
            return sum(int(r["input_ids"].sum(dtype=np.int64) + r["loss_mask"].sum()) for r in rows)

        return len(data), lambda ids: [data[int(i)] for i in ids], scan

    return measured(imports, open_)


def stub_torchvision() -> None:
    """mosaicml-streaming imports torchvision for images; nothing of it is used here."""
    import transformers.feature_extraction_utils  # noqa: F401  looks for torchvision and must not find the stub

    for name in (
        "torchvision",
        "torchvision.datasets",
        "torchvision.transforms",
        "torchvision.transforms.functional",
    ):
        sys.modules[name] = types.ModuleType(name)
    sys.modules["torchvision.datasets"].VisionDataset = object  # type: ignore[attr-defined]
    sys.modules["torchvision.transforms.functional"].to_tensor = None  # type: ignore[attr-defined]


def write_streaming(path: str, out: str) -> dict[str, float]:
    """The entry's rows in mosaicml-streaming's format."""
    stub_torchvision()
    from streaming import MDSWriter

    from raysvc.cache.reader import open_entry

    entry = open_entry(path)
    columns = {"input_ids": "ndarray:int32", "loss_mask": "ndarray:uint8"}
    with MDSWriter(out=out, columns=columns, size_limit=1 << 24) as writer:
        for at in range(0, len(entry), BATCH):
            batch = entry.read(np.arange(at, min(at + BATCH, len(entry))))
            spans = zip(batch.offsets[:-1], batch.offsets[1:], strict=True)
            for a, b in spans:
                writer.write({name: batch.tokens[name][a:b] for name in columns})
    return {}


def s3_options() -> dict[str, str]:
    """Of the server that the parent started."""
    return {"key": "test", "secret": "test", "endpoint_url": os.environ["BENCH_S3"]}


def s3_raysvc(uri: str) -> dict[str, float]:
    """All parts arrive on the disk, are checked and mapped."""
    from raysvc.cache import gather, parts  # noqa: F401
    from raysvc.cache.reader import open_entry

    warm(uri)
    start = time.perf_counter()
    entry = open_entry(uri, s3_options())
    entry.table()
    return speed(entry.manifest.num_bytes, start)


def s3_raysvc_rows(uri: str) -> dict[str, float]:
    """The same, and every row is read, 1024 at a time."""
    from raysvc.cache import gather, parts  # noqa: F401
    from raysvc.cache.reader import open_entry

    warm(uri)
    start = time.perf_counter()
    entry = open_entry(uri, s3_options())
    for at in range(0, len(entry), BATCH):
        entry.read(np.arange(at, min(at + BATCH, len(entry))))
    return speed(entry.manifest.num_bytes, start)


def s3_s3fs(uri: str) -> dict[str, float]:
    """Raw s3fs, whole objects into memory, from several threads."""
    fs = warm(uri)
    names = [name for name in fs.ls(uri, detail=False) if name.endswith(".arrow")]
    start = time.perf_counter()
    with ThreadPoolExecutor(S3_THREADS) as pool:
        return speed(sum(pool.map(lambda name: len(fs.cat_file(name)), names)), start)


def s3_pyarrow(uri: str) -> dict[str, float]:
    """Raw pyarrow.fs, whole objects into memory, from several threads."""
    import pyarrow.fs

    names = [name for name in warm(uri).ls(uri, detail=False) if name.endswith(".arrow")]
    host = os.environ["BENCH_S3"].partition("//")[2]
    fs = pyarrow.fs.S3FileSystem(
        access_key="test", secret_key="test", endpoint_override=host, scheme="http", region="us-east-1"
    )
    fs.get_file_info(names[0])
    start = time.perf_counter()
    with ThreadPoolExecutor(S3_THREADS) as pool:
        return speed(sum(pool.map(lambda name: fs.open_input_file(name).read_buffer().size, names)), start)


def warm(uri: str) -> Any:
    """An s3fs that has its client, so that no one pays for the session."""
    import fsspec

    fs = fsspec.filesystem("s3", **s3_options(), use_listings_cache=False)  # shared by equal options
    fs.ls(uri)
    return fs


def speed(num_bytes: int, start: float) -> dict[str, float]:
    """MB/s since a moment."""
    return {"mb_s": num_bytes / 1e6 / (time.perf_counter() - start), **memory_mb()}


MEASURES: dict[str, Callable[..., dict[str, float]]] = {
    "raysvc": read_raysvc,
    "datasets, mapped": read_datasets,
    "datasets .to_list()": read_to_list,
    "mosaicml-streaming": read_streaming,
    "write streaming": write_streaming,
    "s3 raysvc": s3_raysvc,
    "s3 raysvc, rows": s3_raysvc_rows,
    "s3 s3fs": s3_s3fs,
    "s3 pyarrow.fs": s3_pyarrow,
}


def in_process(python: str, measure: str, *arguments: str) -> dict[str, float]:
    """One measurement in a fresh process."""
    environ = os.environ | {"PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1"}
    command = [python, "-P", __file__, "--measure", measure, *arguments]
    done = subprocess.run(command, capture_output=True, text=True, env=environ)
    if done.returncode:
        raise SystemExit(f"{measure}: {done.stderr[-2000:]}")
    result: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return result


def peer_python() -> str | None:
    """A Python that has mosaicml-streaming beside this project's packages; None when it cannot be had."""
    python = ROOT / ".bench/cache/bin/python"
    try:
        if not python.exists():
            subprocess.run([sys.executable, "-m", "venv", str(python.parent.parent)], check=True)
            (site,) = python.parent.parent.glob("lib/python*/site-packages")
            (site / "project.pth").write_text(os.path.dirname(os.path.dirname(np.__file__)) + "\n")
        subprocess.run(
            [python, "-m", "pip", "install", "-q", "--no-deps", *PEERS], check=True, capture_output=True
        )
    except (subprocess.CalledProcessError, OSError) as error:
        print(f"without mosaicml-streaming: {error}", file=sys.stderr)
        return None
    return str(python)


def compare_rows(work: Path, num_rows: int, peer: str | None) -> list[dict[str, Any]]:
    """Every reader on one entry."""
    from raysvc.cache.store import open_store

    rows_per_part = min(ROWS_PER_PART, num_rows)
    uri = build_entry(
        open_store(str(work / "entries")), num_rows // rows_per_part, rows_per_part, MEAN_LENGTH
    )
    results = []
    for name in ("raysvc", "datasets, mapped", "datasets .to_list()"):
        results.append({"reader": name, "rows": num_rows, **in_process(sys.executable, name, uri)})
    if peer is not None:
        out = str(work / f"mds-{num_rows}")
        in_process(peer, "write streaming", uri, out)
        results.append(
            {"reader": "mosaicml-streaming", "rows": num_rows, **in_process(peer, "mosaicml-streaming", out)}
        )
        shutil.rmtree(out)
    if len({result["total"] for result in results}) != 1:
        raise SystemExit(f"the readers do not read the same: {results}")
    return results


@contextmanager
def s3_server() -> Iterator[None]:
    """The tests' moto server."""
    sys.path.insert(0, str(ROOT / "tests/core/cache"))
    import servers

    os.environ["AWS_DEFAULT_REGION"] = "us-east-1"
    with servers.moto_server() as s3:
        os.environ["BENCH_S3"] = s3.url
        yield


def compare_s3(work: Path, repeats: int) -> list[dict[str, Any]]:
    """Every client on one entry; the best of several runs, taken in turn."""
    from raysvc.cache.store import open_store

    with s3_server():
        store = open_store("s3://raysvc-tests/bench", s3_options())
        uri = build_entry(store, S3_PARTS, S3_ROWS_PER_PART, S3_MEAN_LENGTH)
        best: dict[str, dict[str, Any]] = {}
        for _ in range(repeats):
            for name in ("s3 raysvc", "s3 raysvc, rows", "s3 s3fs", "s3 pyarrow.fs"):
                os.environ["RAYSVC_PART_CACHE_DIR"] = str(work / "copies")
                result = {"client": name.removeprefix("s3 "), **in_process(sys.executable, name, uri)}
                shutil.rmtree(work / "copies", ignore_errors=True)
                best[name] = max(result, best.get(name, result), key=lambda one: one["mb_s"])
    return list(best.values())


def print_table(results: list[dict[str, Any]]) -> None:
    """Aligned columns."""
    names = [name for name in results[0] if name != "total"]
    lines = [names, *([_shown(name, result[name]) for name in names] for result in results)]
    widths = [max(len(line[i]) for line in lines) for i in range(len(names))]
    for line in lines:
        print("  ".join(cell.rjust(width) for cell, width in zip(line, widths, strict=True)))
    print()


def _shown(name: str, value: Any) -> str:
    if name in ("open", "batch", "scan"):
        return f"{value * 1e3:,.1f} ms"
    return (
        f"{value:,.0f}" + (" MB" if name in ("anon", "peak") else "")
        if isinstance(value, float)
        else str(value)
    )


def main() -> None:
    """Measure all, print two tables and one line of JSON."""
    if not sys.flags.safe_path:  # beside this file lies a tokenize.py, which is no module of Python's
        os.execv(sys.executable, [sys.executable, "-P", *sys.argv])
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rows", type=int, nargs="*", default=[10_000, 100_000, 1_000_000])
    parser.add_argument("--work", type=Path, default=ROOT / ".bench/cache-data")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--no-peers", action="store_true")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--measure", nargs="+", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.measure:
        print(json.dumps(MEASURES[options.measure[0]](*options.measure[1:])))
        return
    shutil.rmtree(options.work, ignore_errors=True)
    options.work.mkdir(parents=True)
    peer = None if options.no_peers else peer_python()
    rows = [result for num in options.rows for result in compare_rows(options.work, num, peer)]
    if rows:
        print_table(rows)
    s3 = compare_s3(options.work, options.repeats)
    print_table(s3)
    shutil.rmtree(options.work)
    text = json.dumps({"rows": rows, "s3": s3, "mean_length": MEAN_LENGTH, "cpus": os.cpu_count()})
    if options.json:
        options.json.write_text(text)
    print(text)


if __name__ == "__main__":
    main()
