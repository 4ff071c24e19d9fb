"""What a server of 1e10 rows holds, and how long it takes to open and to plan: real entries, whose parts are links to one file.

    python benchmarks/scale_entries.py [--slices 20000 --rows 500000] [--full-slices 2000] [--folder DIR]
    python benchmarks/scale_entries.py --manifests 20000 48000 312500 1000000

One part of `--rows` short rows is written and linked once for each slice; the manifest names them all. The server's own
stream (`EntryStream`) opens the entry in a process of its own and outlines steps of 1024 rows for 8 ranks. Each line is one
process: seconds to open, to outline the first step, and one in the middle of the epoch, then milliseconds of processor time of
each of the steps that follow it (median, slowest); memory of the process that is its own (anonymous pages) and with mapped files (RSS).
`full` is measured on fewer slices, because its lengths are a file of 4 bytes a row. `--manifests` measures manifests of so many parts
of 42 MB, as 32 MB of text give, that are in memory only.
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
from typing import Any

import numpy as np

sys.path.append(str(Path(__file__).parent))
from common import show

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
    (folder / "manifest.json").write_bytes(
        Manifest(writer.key, tuple(parts), first.columns, recipe, report).to_json()
    )
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
    from raysvc.job.config import PlanConfig

    config = PlanConfig(batch_size=1024, shuffle=shuffle, micro_batch_tokens=16384)
    before = memory()["own MB"]
    begin = time.perf_counter()
    stream = EntryStream(uri, {}, Recipe(config, 0))
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


def manifest_of(parts: int) -> dict[str, Any]:
    """What a manifest of so many parts takes to be written and read, in this process."""
    from raysvc.cache.key import cache_key
    from raysvc.cache.local.checksum import BLOCK, DIGITS
    from raysvc.cache.manifest import REQUIRED, Manifest, PartInfo
    from raysvc.cache.names import new_part

    num_bytes, rows = 42 << 20, 32_000
    facts = (rows, 8_000_000, num_bytes, "0" * 32, 1000, "1" * 32, "2" * (DIGITS * num_bytes // BLOCK))
    infos = tuple(PartInfo(new_part(number)[0], *facts) for number in range(parts))
    report = {"source_rows": [rows] * parts}
    begin = time.perf_counter()
    data = Manifest(cache_key({}), infos, REQUIRED, {}, report).that_fits().to_json()
    written = time.perf_counter() - begin
    del infos
    before = memory()["own MB"]
    begin = time.perf_counter()
    manifest = Manifest.from_json(data, "here")
    return {
        "parts": parts,
        "TB of parts": round(parts * num_bytes / 1e12, 1),
        "checksums of blocks": bool(manifest.parts[0].blocks),
        "MB": round(len(data) / 1e6),
        "written s": round(written, 1),
        "read s": round(time.perf_counter() - begin, 1),
        "own MB": round(memory()["own MB"] - before),
    }


def main() -> None:
    """Write the entries, measure each in a process of its own, print."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--slices", type=int, default=20_000)
    parser.add_argument("--rows", type=int, default=500_000)
    parser.add_argument("--full-slices", type=int, default=2_000)
    parser.add_argument("--folder", type=Path)
    parser.add_argument("--one", nargs=2, help="measure an entry and a shuffle, in this process")
    parser.add_argument("--manifests", type=int, nargs="*", default=[])
    parser.add_argument("--manifest", type=int, help="measure one, in this process")
    arguments = parser.parse_args()
    if arguments.one:
        print(json.dumps(measure(*arguments.one)))
        return
    if arguments.manifest:
        print(json.dumps(manifest_of(arguments.manifest)))
        return
    table = []
    for parts in arguments.manifests:
        command = [sys.executable, __file__, "--manifest", str(parts)]
        table.append(json.loads(subprocess.run(command, stdout=subprocess.PIPE, check=True).stdout))
    if table:
        show("Manifests", table)
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
