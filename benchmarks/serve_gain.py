"""Steps in the same time with and without look-ahead, where making a step takes about as long as training on it.

    python benchmarks/serve_gain.py [--seconds 4]

The compute time is set to what a step costs without look-ahead (read, collate, carry over), so a perfect loader does twice
the steps. Workloads:
- `short padded`: 256 rows of about 400 tokens from the local disk, 100 ms of compute: there is little to hide;
- `long packed`: 512 rows of about 1500 tokens, packed, from the local disk;
- `slow store`: 256 rows of about 1500 tokens, packed, from S3 (moto) at 25 MB/s a connection, each row read once;
- `making is slower`: `long packed` with a fifth of that compute: look-ahead cannot make steps faster than the server does.

Figures: 1.57 to 1.96 times the steps where making a step takes as long as computing it, nothing where there is nothing to hide (11-23).
"""

from __future__ import annotations

import argparse
import socket
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).parent))
from common import make_entry, quiet_ray, show

ROOT = Path(__file__).parents[1]
STORE_MB_S = 25
PACKED = {"layout": "packed", "micro_batch_tokens": 16384, "epochs": 100}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=4.0)
    options = parser.parse_args()
    quiet_ray(num_cpus=4, object_store_mb=700)
    with tempfile.TemporaryDirectory() as folder:
        show("What look-ahead gains", gain(Path(folder), options.seconds))


def gain(folder: Path, seconds: float) -> list[dict[str, Any]]:
    """One row per workload: steps in the same time, with look-ahead 0 and 2."""
    short = make_entry(folder / "gain", 256 * 40, 400, seed=1)
    long = make_entry(folder / "gain", 512 * 20, 1500, seed=2)
    short_plan = {"batch_size": 256, "micro_batch_size": 256, "epochs": 100}
    long_plan = {"batch_size": 512, **PACKED}
    rows = [
        compare("short padded", [short], short_plan, seconds, compute_s=0.1),
        compare("long packed", [long], long_plan, seconds),
    ]
    making_s = rows[-1]["compute ms"] / 1e3
    rows.append(compare("making is slower", [long], long_plan, seconds, compute_s=making_s / 5))
    with slow_store(folder) as (uris, options):
        plan = {"batch_size": 256, **PACKED, "epochs": 1, "shuffle": "none"}
        rows.append(compare("slow store", uris, plan, seconds, storage_options=options))
    return rows


def compare(
    name: str,
    uris: list[str],
    plan: dict[str, Any],
    seconds: float,
    compute_s: float | None = None,
    **fields: Any,
) -> dict[str, Any]:
    """Steps without and with look-ahead; with several entries each measurement has one that nobody read before."""
    with server(uris[0], plan, **fields) as running:
        making_s = statistics.median(waits(served(running, 0), 0.0, 8))
    compute_s = round(making_s, 4) if compute_s is None else compute_s
    steps = {}
    for depth, uri in zip((0, 2), (uris[1:] or uris * 2), strict=True):
        with server(uri, plan, **fields) as running:
            steps[depth] = loop(served(running, depth), compute_s, seconds)
    before, after = (steps[depth]["steps"] / steps[depth]["seconds"] for depth in (0, 2))
    return {
        "workload": name,
        "compute ms": round(1e3 * compute_s, 1),
        "making ms": round(1e3 * making_s, 1),
        "steps/s, 0 ahead": round(before, 2),
        "steps/s, 2 ahead": round(after, 2),
        "gain": round(after / before, 2),
        "of a perfect loader": round(after * compute_s, 3),
        "stall %, 2 ahead": steps[2]["stall %"],
    }


def loop(batches: Iterator[Any], compute_s: float, seconds: float) -> dict[str, float]:
    """Stall and overhead of the loop, after three steps of warming up. A step that came is read before the compute; reading
    is no waiting, whoever brought the step."""
    waited: list[float] = []
    reading: list[float] = []
    begin = stop = 0.0
    for number, arrays in enumerate(timed := Timed(batches)):
        if number == 3:
            begin = timed.asked
        touch(arrays)
        if number >= 3:
            waited.append(timed.came - timed.asked)
            reading.append(time.perf_counter() - timed.came)
        time.sleep(compute_s)
        stop = time.perf_counter()
        if number >= 12 and stop - begin > seconds:
            break
    batches.close()  # type: ignore[attr-defined]
    elapsed = stop - begin
    return {
        "stall %": round(100 * sum(waited) / elapsed, 2),
        "overhead ms": round(1e3 * (elapsed / len(waited) - compute_s), 2),
        "median wait ms": round(1e3 * statistics.median(waited), 3),
        "median reading ms": round(1e3 * statistics.median(reading), 3),
        "steps": len(waited),
        "seconds": elapsed,
    }


class Timed:
    """An iterator that knows when an item was asked for, and when it came."""

    def __init__(self, items: Iterator[Any]) -> None:
        self._items, self.asked, self.came = items, 0.0, 0.0

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        self.asked = time.perf_counter()
        item = next(self._items)
        self.came = time.perf_counter()
        return item


def waits(batches: Iterator[Any], compute_s: float, count: int) -> list[float]:
    """Seconds waited for each of the first steps but two."""
    timed, out = Timed(batches), []
    for _ in range(count + 2):
        touch(next(timed))
        out.append(timed.came - timed.asked)
        time.sleep(compute_s)
    batches.close()  # type: ignore[attr-defined]
    return out[2:]


def served(name: str, depth: int) -> Iterator[Any]:
    """Arrays of rank 0 of 1, so many steps ahead, every step committed."""
    from raysvc.client.rank_client import attach_rank

    with attach_rank(name, dp_size=1, rank=0, group="bench", look_ahead_steps=depth) as client:
        client.rewind(0)
        for step in client.steps():
            yield step.shards[0].arrays
            client.commit(step.index)


def touch(arrays: dict[str, Any]) -> None:
    """Read one cell of every page."""
    for array in arrays.values():
        np.asarray(array).reshape(-1).view(np.uint8)[::4096].sum()


@contextmanager
def server(uri: str, plan: dict[str, Any], **fields: Any) -> Iterator[str]:
    """Name of a server of an entry, for as long as it is measured."""
    from raysvc.actors.launch import start_server, stop_server
    from raysvc.actors.server.spec import ServeSpec
    from raysvc.job.config import PlanConfig

    spec = ServeSpec(
        name="gain",
        sources=[uri],
        plan=PlanConfig(**plan),
        pad_token_id=0,
        journal=None,
        num_cpus=0.5,
        **fields,
    )
    start_server(spec, detached=True)
    try:
        yield spec.name
    finally:
        stop_server(spec.name)


@contextmanager
def slow_store(folder: Path) -> Iterator[tuple[list[str], dict[str, str]]]:
    """Three entries on S3, a part per step, and the options to read them slowly."""
    sys.path.append(str(ROOT / "tests" / "cache"))
    import servers

    from raysvc.cache.store.open import open_store

    with servers.moto_server() as s3, throttled(int(s3.url.rsplit(":", 1)[1])) as port:
        uris = []
        for number in range(3):
            local = Path(make_entry(folder / "slow", 256 * 60, 1500, seed=10 + number, rows_per_part=256))
            store = open_store(f"s3://{servers.BUCKET}/slow", s3.options)
            files = sorted(
                local.iterdir(), key=lambda path: path.name == "manifest.json"
            )  # the manifest last
            for path in files:
                store.write(f"{local.name}/{path.name}", path.read_bytes())
            uris.append(f"{store.url}/{local.name}")
        yield uris, {**s3.options, "endpoint_url": f"http://127.0.0.1:{port}"}


@contextmanager
def throttled(port: int) -> Iterator[int]:
    """A way to a port of this machine that lets STORE_MB_S pass per connection; yields its own port."""
    listener = socket.create_server(("127.0.0.1", 0), backlog=64)

    def accept() -> None:
        while True:
            try:
                here, _ = listener.accept()
            except OSError:
                return
            there = socket.create_connection(("127.0.0.1", port))
            for one, other, mb_s in ((here, there, None), (there, here, STORE_MB_S)):
                threading.Thread(target=carry, args=(one, other, mb_s), daemon=True).start()

    threading.Thread(target=accept, daemon=True).start()
    try:
        yield listener.getsockname()[1]
    finally:
        listener.close()


def carry(one: socket.socket, other: socket.socket, mb_s: float | None) -> None:
    """Bytes from one end to the other until either closes."""
    try:
        while data := one.recv(1 << 18):
            other.sendall(data)
            if mb_s is not None:
                time.sleep(len(data) / (mb_s * 1e6))
        other.shutdown(socket.SHUT_WR)
    except OSError:
        return


if __name__ == "__main__":
    main()
