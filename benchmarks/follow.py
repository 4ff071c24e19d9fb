"""How long a trace waits: from a line that is appended to a followed file, to the step that trains it in the metrics of the run.

python benchmarks/follow.py     # 1.5 min
"""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import yaml

from raysvc.cli.sample_data import chat_rows, row_texts, write_tokenizer

BATCH, BATCHES = 8, 12
RUN = "import raysvc, sys; raysvc.train(sys.argv[1])"


def main() -> None:
    with tempfile.TemporaryDirectory() as place:
        print(measured(Path(place)))


def measured(folder: Path) -> str:
    """Seconds of each batch of rows, sorted."""
    write_tokenizer(folder / "tokenizer", row_texts(chat_rows(200)), vocab_size=512)
    rows = [json.dumps(row) + "\n" for row in chat_rows(BATCH * (BATCHES + 1))]
    (folder / "in").mkdir()
    queue, run = folder / "in" / "traces.jsonl", folder / "run"
    queue.write_text("".join(rows[:BATCH]))
    job = {
        "source": {"path": str(folder / "in"), "format": "chat", "follow": True},
        "tokenizer": str(folder / "tokenizer"),
        "cache": {"root": str(folder / "cache")},
        "plan": {"batch_size": BATCH, "shuffle": "window"},
        "server": {"name": "followed"},
        "trainer": {"run_dir": str(run), "max_steps": BATCHES + 1},
    }
    (folder / "job.yaml").write_text(yaml.safe_dump(job))
    command = [sys.executable, "-c", RUN, str(folder / "job.yaml")]
    trainer = subprocess.Popen(command, env={**os.environ, "RAY_ADDRESS": "local"}, stderr=subprocess.DEVNULL)
    rng, took = random.Random(0), []
    for number in range(BATCHES + 1):
        began = time.perf_counter()
        if number:
            with queue.open("a") as file:
                file.write("".join(rows[BATCH * number : BATCH * (number + 1)]))
        while not (run / "metrics.jsonl").exists() or len(_lines(run)) <= number:
            if trainer.poll() is not None and len(_lines(run)) <= number:
                raise SystemExit("the run ended early")
            time.sleep(0.02)
        if number:
            took.append(round(time.perf_counter() - began, 2))
        time.sleep(rng.uniform(0, 3))
    trainer.wait()
    return " ".join(map(str, sorted(took)))


def _lines(run: Path) -> list[str]:
    return (run / "metrics.jsonl").read_text().splitlines()


if __name__ == "__main__":
    main()
