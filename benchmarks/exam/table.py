"""Where a contestant is played: a parent of its processes in its own Python, a folder, and what they left.

Always true:
- a kill is a SIGKILL that a process sends itself after a batch, some batches after it saved its state;
- a run without a state begins in a place of its own (`run`), and a run that goes on is told the same place;
- where a contestant gives the ids of rows, a row differs where they are not those of the source's row.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import threading
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from words import ids_of, number_of, text_of, write_rows

ROWS, BATCH = 203, 4  # a prime number of batches more or less: the last batch is short
SECOND = 150  # rows from here on are the second source of a mixture
REJECTED = 1000  # is added to the number of a row for the rejected answer of a pair
OPTIONS = {"batch_size": BATCH, "epochs": 2, "seed": 7, "workers": 0, "shuffle": True}


@dataclass
class Played:
    """What a process left: its batches of row numbers, an error, whether it came to its end, seconds to the first batch, and memory.

    Attributes:
        total_mb: what all processes of the contestant held together, those of its Ray too, where a limit was set.
        sampled: rows whose prompts were answered, where the contestant does that.
        differ: for each batch, the numbers of rows whose ids are not those of the source; None: it gives numbers alone.
    """

    batches: list[list[int]] = field(default_factory=list)
    error: str | None = None
    ended: bool = False
    first_s: float | None = None
    peak_mb: int | None = None
    state: Path | None = None
    differ: list[list[int]] | None = None
    total_mb: int | None = None
    sampled: list[int] = field(default_factory=list)

    @property
    def rows(self) -> list[int]:
        return [row for batch in self.batches for row in batch]


def read_log(log: Path) -> Played:
    """Read what a process left."""
    played = Played()
    for line in log.read_text().splitlines() if log.exists() else []:
        said = json.loads(line)
        if "rows" in said:
            played.batches.append(said["rows"])
        if "ids" in said:
            rows = [number_of(ids) for ids in said["ids"]]
            played.batches.append(rows)
            wrong = [row for row, ids in zip(rows, said["ids"], strict=True) if ids != ids_of(text_of(row))]
            played.differ = [*(played.differ or []), wrong]
        played.sampled += said.get("sampled", [])
        played.first_s = said.get("first_s", played.first_s)
        played.error = said.get("error", played.error)
        played.total_mb = said.get("total_mb", played.total_mb)
        played.ended, played.peak_mb = said.get("end", played.ended), said.get("peak_mb", played.peak_mb)
    return played


class Table:
    """One contestant's processes; close it."""

    def __init__(self, python: str, adapter: str, folder: Path, limit_s: float = 240.0) -> None:
        self.folder, self.limit_s = folder, limit_s
        folder.mkdir(parents=True)
        self._number, self._said = 0, threading.Condition()
        self._ended: set[str] = set()
        script = Path(__file__).parent / "play.py"
        one = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")
        self._errors = (folder / "parent.err").open("w")
        self._parent = subprocess.Popen(
            [python, str(script), adapter], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._errors,
            cwd=folder, env={**os.environ, **one, "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}, text=True, bufsize=1,
        )  # fmt: skip
        if self._parent.stdout.readline().strip() != "ready":
            raise RuntimeError(f"{adapter} did not start: see {folder / 'parent.err'}")
        threading.Thread(target=self._listen, daemon=True).start()

    def close(self) -> None:
        self._parent.stdin.close()
        self._parent.wait()
        self._errors.close()

    def rows_at(self, place: str, numbers: Sequence[int], o: Mapping[str, Any]) -> Path:
        """Write a source; one that changes is written again at the same place."""
        path = self.folder / place / ("rows.list" if o.get("long") else "rows.jsonl")
        path.parent.mkdir(exist_ok=True)
        write_rows(path, numbers, o.get("ids", False))
        return path

    def play(
        self, run: str, numbers: Sequence[int], *, place: str = "rows", world: int = 1, loads: Sequence[Path] = (),
        save_after: int | None = None, die_after: int | None = None, options: Mapping[str, Any] | None = None,
        memory_mb: int | None = None,
    ) -> list[Played]:  # fmt: skip
        """Play all ranks at once, each from a state of its own, or all from that of rank 0 where the world is another."""
        given = {**OPTIONS, **(options or {})}
        rows, port = self.rows_at(place, numbers, given), _free_port()
        states = loads if len(loads) == world else [*loads[:1]] * world
        paths = []
        for rank in range(world):
            base = self.folder / f"{self._number:03d}"
            self._number += 1
            known = {**given, "rank": rank, "world_size": world, "run": run}
            spec = {"rows": str(rows), "options": known, "log": f"{base}.log", "errors": f"{base}.err", "save": f"{base}.state",
                    "save_after": save_after, "die_after": die_after, "load": str(states[rank]) if states else None,
                    "port": port, "memory_mb": memory_mb}  # fmt: skip
            paths.append(base.with_suffix(".json"))
            paths[-1].write_text(json.dumps(spec))
            print(paths[-1], file=self._parent.stdin, flush=True)
        return [self._wait(path) for path in paths]

    def _wait(self, path: Path) -> Played:
        log, state = path.with_suffix(".log"), path.with_suffix(".state")
        with self._said:
            ended = self._said.wait_for(lambda: str(path) in self._ended or self._over(), self.limit_s)
        if not ended and log.exists():
            pid = json.loads(log.read_text().splitlines()[0])["pid"]
            with suppress(ProcessLookupError):
                os.killpg(pid, signal.SIGKILL)
        played = read_log(log)
        if not ended or self._over():
            played.error = played.error or (f"no end in {self.limit_s:.0f} s" if not ended else "no process")
        played.state = state if state.exists() else None
        return played

    def _over(self) -> bool:
        return self._parent.poll() is not None

    def _listen(self) -> None:
        for line in self._parent.stdout:
            with self._said:
                self._ended.add(line.strip())
                self._said.notify_all()
        with self._said:
            self._said.notify_all()


def _free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])
