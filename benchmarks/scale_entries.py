"""What a server of 1e10 rows holds, and how long it takes to open and to plan: real entries, whose parts are links to one file.

    python benchmarks/scale_entries.py [--slices 20000 --rows 500000] [--full-slices 2000] [--folder DIR]
    python benchmarks/scale_entries.py --tables 20000 312500 1000000 [--s3]

One part of `--rows` short rows is written and linked once for each slice; the manifest names them all. The server's own
stream (`EntryStream`) opens the entry in a process of its own and outlines steps of 1024 rows for 8 ranks. Each line is one
process: seconds to open, to outline the first step, and one in the middle of the epoch, then milliseconds of processor time of
each of the steps that follow it (median, slowest); memory of the process that is its own (anonymous pages) and with mapped files (RSS).
`full` is measured on fewer slices, because its lengths are a file of 4 bytes a row. `--tables` measures how entries of so many parts of
42 MB, as 32 MB of text give, are opened: the names of all parts and receipts are in the folder (on S3 of 1,500 of them), their bytes are not.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

sys.path += [str(Path(__file__).parent), str(Path(__file__).parents[1] / "tests/cache")]
from common import show

if TYPE_CHECKING:
    from raysvc.cache.store.store import Store

MOST_LINKS = 60_000  # of one file; ext4 has 65,000
STEPS = 200


def write_linked(root: Path, slices: int, rows: int) -> str:
    """An entry of `slices` parts that are one file; its uri."""
    import pyarrow as pa

    from raysvc.cache.key import cache_key
    from raysvc.cache.manifest import Manifest
    from raysvc.cache.names import new_part
    from raysvc.cache.store.open import open_store
    from raysvc.cache.writer import EntryWriter

    assert slices < MOST_LINKS
    lengths = np.random.default_rng(0).integers(1, 8, rows)
    offsets = pa.array(np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32))
    ids = pa.array(np.ones(int(lengths.sum()), np.int32))
    mask = pa.array(np.ones(len(ids), np.uint8))
    lists = pa.ListArray.from_arrays(offsets, ids), pa.ListArray.from_arrays(offsets, mask)
    table = pa.table({"input_ids": lists[0], "loss_mask": lists[1], "source_row": pa.array(np.arange(rows))})
    recipe = {"slices": slices, "rows": rows}
    writer = EntryWriter(open_store(str(root)), cache_key(recipe))
    first = writer.write_part(0, table, {})
    folder = root / writer.folder
    parts = [first.part]
    for number in range(1, slices):
        parts.append(type(first.part)(**{**vars(first.part), "name": new_part(number)[0]}))
        os.link(folder / first.part.name, folder / parts[-1].name)
    report = {
        "pad_token_id": 0,
        "vocab_size": 10,
        "source_bytes": slices * 32 << 20,
        "source_rows": [rows] * slices,
    }
    made = Manifest(writer.key, tuple(parts), first.columns, recipe, report)
    (folder / "manifest.json").write_bytes(made.with_table(writer.store, writer.folder).to_json())
    return writer.uri


def memory() -> dict[str, float]:
    """MB of this process: anonymous pages, and all that is resident."""
    lines = Path("/proc/self/status").read_text().splitlines()
    kilobytes = {line.split(":")[0]: int(line.split()[1]) for line in lines if line.startswith("Rss")}
    return {"own MB": kilobytes["RssAnon"] / 1e3, "RSS MB": sum(kilobytes.values()) / 1e3}


def measure(uri: str, shuffle: str) -> dict[str, Any]:
    """One server's stream, opened and asked for steps."""
    from raysvc.actors.server.entry_stream import EntryStream
    from raysvc.actors.server.make_step import Recipe
    from raysvc.actors.server.spec import SourceSpec
    from raysvc.job.config import PlanConfig

    config = PlanConfig(batch_size=1024, shuffle=shuffle, micro_batch_tokens=16384)
    before = memory()["own MB"]
    begin = time.perf_counter()
    stream = EntryStream([SourceSpec(uri=uri)], {}, Recipe(config, 0))
    num_steps = stream.schedule.num_steps
    opened = time.perf_counter()
    stream.outline(0, 8)
    first = time.perf_counter()
    stream.outline(num_steps // 2, 8)
    middle = time.perf_counter()
    plan = stream._opened().plan
    took = []
    for step in range(num_steps // 2, num_steps // 2 + STEPS):
        start = time.process_time()
        plan.step(step, 8)
        took.append(time.process_time() - start)
    begin_read = time.perf_counter()
    stream.make(num_steps // 2, (8,))
    made_s = time.perf_counter() - begin_read
    own = memory()
    return {
        "steps": num_steps,
        "open s": round(opened - begin, 2),
        "first step s": round(first - opened, 3),
        "a step far away s": round(middle - first, 3),
        "plan CPU ms": round(1e3 * float(np.median(took)), 2),
        "slowest": round(1e3 * max(took), 1),
        "made s": round(made_s, 2),
        "own MB": round(own["own MB"]),
        "of the entry MB": round(own["own MB"] - before),
        "with mapped parts MB": round(own["RSS MB"]),
    }


def write_table_of(store: Store, parts: int) -> tuple[str, float]:
    """An entry of so many parts of 42 MB, of which only the table and the manifest are there; its folder, and seconds."""
    from raysvc.cache.key import cache_key
    from raysvc.cache.local.checksum import BLOCK, DIGITS
    from raysvc.cache.manifest import REQUIRED, Manifest
    from raysvc.cache.names import MANIFEST, new_part
    from raysvc.cache.part_info import PartInfo

    num_bytes, rows, recipe = 42 << 20, 32_000, {"parts": parts}
    facts = (rows, 8_000_000, num_bytes, "0" * 32, 1000, "1" * 32, "2" * (DIGITS * num_bytes // BLOCK))
    infos = tuple(PartInfo(new_part(number)[0], *facts) for number in range(parts))
    folder, report = cache_key(recipe), {"source_rows": [rows] * parts, "source_bytes": parts * 32 << 20}
    begin = time.perf_counter()
    made = Manifest(folder, infos, REQUIRED, recipe, report).with_table(store, folder)
    store.create(f"{folder}/{MANIFEST}", made.to_json())
    return folder, time.perf_counter() - begin


def fill(store: Store, folder: str, parts: int) -> None:
    """Files of no bytes with the names of parts and receipts, as many as a listing meets."""
    from raysvc.cache.names import new_part

    if (path := store.local_path(folder)) is not None:
        for number in range(parts):
            for name in new_part(number):
                (path / name).touch()
        return
    fs = store._fs()  # type: ignore[attr-defined]
    fs.pipe(
        {
            f"{store.url}/{folder}/{name}": b""
            for number in range(min(parts, 1500))
            for name in new_part(number)
        }
    )


def opened(root: str, options: dict[str, Any], folder: str) -> dict[str, Any]:
    """What opening the entry takes, in this process, with requests to the store."""
    from raysvc.cache.entry import Entry
    from raysvc.cache.store.open import open_store

    requests: list[str] = []
    store = open_store(root, options)
    kind = type(store)
    reading, listing = kind.read, kind.scan
    kind.read = lambda self, *a: (requests.append("GET"), reading(self, *a))[1]  # type: ignore[method-assign,assignment]
    if "://" in root:
        import s3fs

        store.list()
        called = s3fs.S3FileSystem.call_s3

        def counted(self: Any, method: str, *args: Any, **more: Any) -> Any:
            if "list" in method:
                requests.append("LIST")
            return called(self, method, *args, **more)

        s3fs.S3FileSystem.call_s3 = counted
    else:
        kind.scan = lambda self, *a: (requests.append("LIST"), listing(self, *a))[1]  # type: ignore[method-assign,assignment]
    import pyarrow  # noqa: F401  its import is not the entry's

    before, begin = memory()["own MB"], time.perf_counter()
    entry = Entry.open(store, folder)
    seen = time.perf_counter()
    asked = ", ".join(f"{requests.count(what)} {what}" for what in ("LIST", "GET"))
    assert int(entry.slice_starts[-1]) == entry.num_rows
    assert int(entry.source_rows.sum()) == entry.num_rows
    known = time.perf_counter()
    count, number = len(requests), len(entry.parts.parts) * 2 // 3
    assert entry.parts.parts[number].blocks
    return {
        "opened ms": round(1e3 * (seen - begin), 1),
        "requests": asked,
        "rows of all slices ms": round(1e3 * (known - seen), 1),
        "a part ms": round(1e3 * (time.perf_counter() - known), 1),
        "its requests": len(requests) - count,
        "own MB": round(memory()["own MB"] - before, 1),
    }


def tables(numbers: list[int], root: str, options: dict[str, Any], parts_too: bool) -> list[dict[str, Any]]:
    """Each entry written here, and opened three times in processes of their own: the second fastest."""
    from raysvc.cache.names import MANIFEST
    from raysvc.cache.store.open import open_store

    found = []
    for parts in numbers:
        store = open_store(f"{root}/{parts}", options)
        folder, written_s = write_table_of(store, parts)
        if parts_too:
            fill(store, folder, parts)
        sizes = {item.name[:6]: item.size for item in store.scan(folder, ("part-", "receipt-"))}
        command = [sys.executable, __file__, "--open", f"{root}/{parts}", json.dumps(options), folder]
        runs = [
            json.loads(subprocess.run(command, stdout=subprocess.PIPE, check=True).stdout) for _ in range(3)
        ]
        facts = {
            "parts": parts,
            "store": "S3 (moto)" if options else "disk",
            "manifest kB": round(sizes[MANIFEST[:6]] / 1e3),
            "table MB": round(sizes["parts-"] / 1e6),
            "written s": round(written_s, 1),
        }
        found.append({**facts, **sorted(runs, key=lambda run: run["opened ms"])[1]})
    return found


def main() -> None:
    """Write the entries, measure each in a process of its own, print."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--slices", type=int, default=20_000)
    parser.add_argument("--rows", type=int, default=500_000)
    parser.add_argument("--full-slices", type=int, default=2_000)
    parser.add_argument("--folder", type=Path)
    parser.add_argument("--one", nargs=2, help="measure an entry and a shuffle, in this process")
    parser.add_argument("--tables", type=int, nargs="*", default=[])
    parser.add_argument(
        "--s3", action="store_true", help="tables on S3 (moto) too, of the first two numbers of parts"
    )
    parser.add_argument("--open", nargs=3, help="open an entry in this process: root, options, folder")
    arguments = parser.parse_args()
    if arguments.one:
        print(json.dumps(measure(*arguments.one)))
        return
    if arguments.open:
        root, options, folder = arguments.open
        print(json.dumps(opened(root, json.loads(options), folder)))
        return
    table: list[dict[str, Any]] = []
    if arguments.tables:
        with tempfile.TemporaryDirectory(dir=arguments.folder) as where:
            table += tables(arguments.tables, where, {}, parts_too=True)
        if arguments.s3:
            import servers

            os.environ.setdefault("AWS_DEFAULT_REGION", "us-east-1")
            with servers.moto_server() as s3:
                root = s3.store("tables-").url
                table += tables(arguments.tables[:2], root, s3.options, parts_too=True)
        show("Entries of many parts, opened", table)
        return
    with tempfile.TemporaryDirectory(dir=arguments.folder) as folder:
        for slices, shuffles in (
            (arguments.slices, ("window(8)", "window(64)")),
            (arguments.full_slices, ("window(64)", "full")),
        ):
            uri = write_linked(Path(folder) / str(slices), slices, arguments.rows)
            manifest_mb = os.path.getsize(f"{uri}/manifest.json") / 1e6
            for shuffle in shuffles:
                command = [sys.executable, __file__, "--one", uri, shuffle]
                said = subprocess.run(command, capture_output=True, text=True, check=True).stdout
                facts = {"rows": f"{slices * arguments.rows:.0e}", "slices": slices, "shuffle": shuffle}
                table.append({**facts, "manifest MB": round(manifest_mb, 1), **json.loads(said)})
    show("Large entries", table)


if __name__ == "__main__":
    main()
