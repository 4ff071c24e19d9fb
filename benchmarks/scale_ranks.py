"""1e10 rows, 4,096 ranks, and builders that die: the server's own stream over an entry that appears late, out of order and twice.

    python benchmarks/scale_ranks.py [--slices 20000 --rows 500000 --ranks 4096]

The entry is real, and its parts are links to a few files. It is read twice by `EntryStream`: finished, and while threads make its
slices. These take slices in disorder and die: before they begin, behind the part, or in the middle of a receipt; some
make a slice that another one has made, or cut the source otherwise. Servers are replaced between steps, and four steps are asked for at a time, from five
places of the epoch. Every step has to give every rank the same rows in the same places, and the shards of one
step the same bytes. The table says what a step takes, in milliseconds of processor time, and what the process holds.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import random
import subprocess
import sys
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).parent))
from common import show

from raysvc import row_ids
from raysvc.actors.server.entry_stream import EntryStream
from raysvc.actors.server.make_step import Recipe
from raysvc.actors.server.spec import SourceSpec
from raysvc.cache.growing.coming import GrowingSpec
from raysvc.cache.key import cache_key
from raysvc.cache.manifest import Manifest, Receipt
from raysvc.cache.names import new_part
from raysvc.cache.store.open import open_store
from raysvc.cache.writer import EntryWriter
from raysvc.job.config import PlanConfig

FILES = 5  # that the parts are links to; ext4 allows 65,000 of each
BUILDERS = 4
ANOTHER = "another cut"
DEATHS = 0.6  # of all tries to make a slice
TWICE = 0.1


class Corpus:
    """Slices of equal size whose parts are links to one of a few files."""

    def __init__(self, folder: Path, slices: int, rows: int) -> None:
        import pyarrow as pa

        self.folder, self.slices, self.rows = folder, slices, rows
        self.recipe = {"slices": slices, "rows": rows}
        self.key = cache_key(self.recipe)
        report = {
            "pad_token_id": 0,
            "vocab_size": 10,
            "source_bytes": slices << 25,
            "source_rows": [rows] * slices,
        }
        contents = tuple(f"content {index}" for index in range(slices))
        self.spec = GrowingSpec(key=self.key, recipe=self.recipe, report=report, contents=contents)
        writer, self._made = EntryWriter(open_store(str(folder / "files")), self.key), []
        for number in range(FILES):
            lengths = np.random.default_rng(number).integers(1, 8, rows)
            offsets = pa.array(np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32))
            ids = pa.array(np.arange(int(lengths.sum()), dtype=np.int32) % 10)
            lists = [
                pa.ListArray.from_arrays(offsets, one) for one in (ids, pa.array(np.ones(len(ids), np.uint8)))
            ]
            self._made.append(
                writer.write_part(number, pa.table({"input_ids": lists[0], "loss_mask": lists[1]}), {})
            )
        self._files = folder / "files" / writer.folder

    def receipt(self, root: Path, number: int, content: str) -> tuple[Path, Receipt]:
        """The part of a slice, linked; where its receipt goes, and the receipt."""
        made, (part, name) = self._made[(number + (content == ANOTHER)) % FILES], new_part(number)
        os.link(self._files / made.part.name, root / part)
        identity = {"index": number, "first_row": number * self.rows, "num_rows": self.rows, "bytes": content}
        return root / name, Receipt(number, replace(made.part, name=part), made.columns, {"slice": identity})

    def finished(self) -> EntryStream:
        """The server's stream of the whole entry."""
        root = self._root("finished")
        parts = tuple(self.receipt(root, number, "")[1].part for number in range(self.slices))
        manifest = Manifest(self.key, parts, self._made[0].columns, self.recipe, self.spec.report)
        (root / "manifest.json").write_bytes(manifest.to_json())
        return EntryStream([SourceSpec(uri=str(root))], {}, self._steps)

    def growing(self) -> tuple[Path, EntryStream]:
        """The folder of an entry that nobody has begun, and a stream of it."""
        root = self._root("growing")
        return root, EntryStream([SourceSpec(uri=str(root), coming=self.spec)], {}, self._steps)

    def _root(self, name: str) -> Path:
        root = self.folder / name / self.key
        root.mkdir(parents=True, exist_ok=True)
        return root

    def with_steps_of(self, batch: int) -> Corpus:
        """The corpus, planned in steps of so many rows."""
        self._steps = Recipe(
            PlanConfig(batch_size=batch, shuffle="window(8)", micro_batch_tokens=64, seed=3), 0
        )
        return self


class Builders:
    """Threads that make slices until all that are wanted are there."""

    def __init__(self, corpus: Corpus, root: Path, wanted: list[int], seed: int) -> None:
        self.deaths = 0
        self._corpus, self._root, self._rng = corpus, root, random.Random(seed)
        self._left = sorted(wanted, key=lambda number: wanted.index(number) + self._rng.uniform(0, 12))
        self._lock = threading.Lock()  # guards all above
        self._threads = [threading.Thread(target=self._work) for _ in range(BUILDERS)]

    def __enter__(self) -> Builders:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        for thread in self._threads:
            thread.join()

    def _work(self) -> None:
        while True:
            with self._lock:
                if not self._left:
                    return
                number, pause_s = self._left.pop(0), self._rng.expovariate(100)
                fate = self._rng.random()
                how = self._rng.randrange(4) if fate < DEATHS else -1
            time.sleep(pause_s)
            if how >= 0:
                self._die(number, how)
            else:
                for _ in range(2 if fate > 1 - TWICE else 1):
                    path, receipt = self._corpus.receipt(self._root, number, f"content {number}")
                    path.write_bytes(receipt.to_json())

    def _die(self, number: int, how: int) -> None:
        """Leave half a slice, or one of another cut, behind; another builder makes it later."""
        if how:
            path, receipt = self._corpus.receipt(self._root, number, ANOTHER)
            data = receipt.to_json()
            if how > 1:
                path.write_bytes(data if how == 2 else data[: len(data) // 2])
        with self._lock:
            self.deaths += 1
            self._left.insert(self._rng.randrange(min(8, len(self._left) + 1)), number)


def of_all_ranks(stream: EntryStream, step: int, ranks: int) -> tuple[str, float]:
    """Digest of what every rank gets of a step, and the processor seconds of its plan."""
    stream.wait_for(step)
    begin = time.thread_time()
    plan = stream._opened().plan.step(step, ranks)
    took = time.thread_time() - begin
    digest = hashlib.sha256()
    for mini in plan.mini_batches:
        given = np.sort(np.concatenate([rank.rows for rank in mini.ranks]))
        assert np.array_equal(given[given >= 0], np.arange(len(mini.row_ids))), "a row is lost or given twice"
        for array in (
            mini.row_ids,
            mini.lengths,
            *(x for rank in mini.ranks for x in (rank.rows, rank.lines)),
        ):
            digest.update(array.tobytes())
        digest.update(repr([rank.micro_batches for rank in mini.ranks]).encode())
    return digest.hexdigest(), took


def of_bytes(stream: EntryStream, step: int, ranks: int) -> str:
    """Digest of the shards of all ranks."""
    return hashlib.sha256(
        "".join(shard.digest() for shard in stream.make(step, (ranks,))[1]).encode()
    ).hexdigest()


def compared(folder: Path, slices: int, rows: int, ranks: int, seed: int = 0) -> dict[str, Any]:
    """Both runs.

    Returns:
        `same`: whether every step gave every rank the same; `deaths` and `servers` on the way; figures.
    """
    corpus = Corpus(folder, slices, rows).with_steps_of(4 * ranks)
    undisturbed = corpus.finished()
    begin = time.perf_counter()
    num_steps = undisturbed.schedule.num_steps
    open_s = time.perf_counter() - begin
    asked = [(num_steps - 4) * part // 4 + step for part in range(5) for step in range(4)]
    wanted = {step: of_all_ranks(undisturbed, step, ranks) for step in asked}
    order, schedule = undisturbed._opened().plan.order, undisturbed.schedule
    needed: dict[int, None] = {}  # slices, in the order of the steps
    for step in asked:
        begin_of = order.needs_from(0, schedule.position_of(step))[0][:10]
        of_step = row_ids.split(undisturbed._opened().plan.groups_of(step)).slice
        needed.update(dict.fromkeys([*np.unique(of_step).tolist(), *begin_of.tolist()]))
    root, stream = corpus.growing()
    found: dict[int, tuple[str, float]] = {}
    servers = 0
    random.Random(seed).shuffle(asked)
    with Builders(corpus, root, list(needed), seed) as builders, ThreadPoolExecutor(4) as trainers:
        for at in range(0, len(asked), 4):
            steps = asked[at : at + 4]
            ask = partial(of_all_ranks, stream, ranks=ranks)
            found.update(zip(steps, trainers.map(ask, steps), strict=True))
            _, stream = corpus.growing()  # the server dies; the next one knows what lies in the folder
            servers += 1
    same_bytes = of_bytes(stream, asked[0], ranks) == of_bytes(undisturbed, asked[0], ranks)
    status = Path("/proc/self/status").read_text().splitlines()
    own = next(int(line.split()[1]) for line in status if line.startswith("RssAnon"))
    return {
        "rows": f"{slices * rows:.0e}",
        "slices": slices,
        "ranks": ranks,
        "steps compared": len(found),
        "same": same_bytes and all(found[step][0] == wanted[step][0] for step in asked),
        "deaths": builders.deaths,
        "servers": servers + 1,
        "open s": round(open_s, 2),
        "plan CPU ms": round(1e3 * float(np.median([took for _, took in wanted.values()])), 1),
        "while built": round(1e3 * float(np.median([took for _, took in found.values()])), 1),
        "own MB": round(own / 1e3),
    }


def main() -> None:
    """Compare, print."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--slices", type=int, default=20_000)
    parser.add_argument("--rows", type=int, default=500_000)
    parser.add_argument("--ranks", type=int, nargs="*", default=[8, 1024, 4096])
    parser.add_argument("--one", type=Path, help="compare in this folder, in this process")
    arguments = parser.parse_args()
    if arguments.one:
        print(json.dumps(compared(arguments.one, arguments.slices, arguments.rows, *arguments.ranks)))
        return
    table = []
    for ranks in arguments.ranks:
        with tempfile.TemporaryDirectory() as folder:
            sizes = ["--slices", str(arguments.slices), "--rows", str(arguments.rows), "--ranks", str(ranks)]
            command = [sys.executable, __file__, "--one", folder, *sizes]
            done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
            table.append(json.loads(done.stdout))
    show("Ranks and builders", table)


if __name__ == "__main__":
    main()
