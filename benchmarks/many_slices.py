"""A build of very many slices: how long it takes, and what its processes hold at most.

    python benchmarks/many_slices.py --slices 500 20000

Every slice is two rows of a file that is made here, and is read, tokenized and written like any other. A local Ray of two
CPUs is started for each number. Memory is the largest resident set that was seen, once a second; of the driver the
kernel's own high-water mark.

Figures (11-27): 20,000 slices on two busy cores take 541 s (231 on 11-25), driver 361 MB and builder 306; 5,000 take 56 s, 268 and 256 MB;
500 take 24 s, 190 and 237 MB. The driver grows by 9 kB a slice.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import resource
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

from common import show

WATCHED = {"ray::Builder": "builder", "ray::MapWorker": "worker", "gcs_server": "GCS", "raylet": "raylet"}


class Watch(threading.Thread):
    """Largest resident sets of the processes below this one, in MB."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.most: dict[str, int] = {}

    def run(self) -> None:
        import psutil

        own = psutil.Process()
        while True:
            for process in own.children(recursive=True):
                try:
                    command, size = " ".join(process.cmdline()), process.memory_info().rss
                except psutil.Error:
                    continue
                for word, name in WATCHED.items():
                    if command.startswith(word) or f"/{word} " in command:
                        self.most[name] = max(self.most.get(name, 0), size // 10**6)
            time.sleep(1)


def build(slices: int, answer: Any) -> None:
    """One build in this process."""
    import ray

    import raysvc
    from raysvc.cli.sample_data import chat_rows, row_texts, write_rows, write_tokenizer

    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        tokenizer = write_tokenizer(folder / "tokenizer", row_texts(chat_rows(200)), vocab_size=512)
        rows = write_rows(folder / "rows.jsonl", 2 * slices)
        job = {
            "source": {"path": str(rows), "format": "chat"},
            "tokenizer": str(tokenizer),
            "cache": {"root": f"{name}/cache"},
            "workers": {"min": 2, "max": 2, "slice_mb": os.path.getsize(rows) / slices / 2 / 1e6 / 1.02},
        }
        ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False, object_store_memory=200 << 20)
        watch = Watch()
        watch.start()
        began = time.perf_counter()
        entry = raysvc.tokenize(job)
        seconds = time.perf_counter() - began
        ray.shutdown()
    driver = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 // 10**6
    made = sum(entry.report["encoders"].values())
    memory = {f"{who} MB": size for who, size in {"driver": driver, **watch.most}.items()}
    answer.put(json.dumps({"slices": made, "seconds": round(seconds, 1), **memory}))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--slices", type=int, nargs="+", default=[500, 20000])
    rows = []
    for slices in parser.parse_args().slices:
        spawning = multiprocessing.get_context("spawn")
        answer = spawning.Queue()
        process = spawning.Process(target=build, args=(slices, answer))
        process.start()
        rows.append(json.loads(answer.get()))
        process.join()
    show("A build of many slices", rows)


if __name__ == "__main__":
    main()
