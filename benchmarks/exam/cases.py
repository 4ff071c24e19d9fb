"""What every loader is asked, and how its answers are counted.

The oracle is the list of rows, and what the same contestant gives when nobody disturbs it. Always true:
- a kill is a SIGKILL that the process sends itself after a batch, some batches after it saved its state;
- what was trained is what came before the state, and all that came after going on from it;
- `noticed` counts an error only if it comes from the load or the run after it, and the case is one where rows changed.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import threading
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROWS, BATCH = 203, 4  # a prime number of batches more or less: the last batch is short


@dataclass
class Played:
    """What a process left: its batches of row numbers, an error, whether it came to its end, seconds to the first batch, and memory."""

    batches: list[list[int]] = field(default_factory=list)
    error: str | None = None
    ended: bool = False
    first_s: float | None = None
    peak_mb: int | None = None

    @property
    def rows(self) -> list[int]:
        return [row for batch in self.batches for row in batch]


class Table:
    """Where a contestant is played: its Python, its adapter, and a folder."""

    def __init__(self, python: str, adapter: str, folder: Path, limit_s: float = 600.0) -> None:
        self.python, self.adapter, self.folder, self.limit_s = python, adapter, folder, limit_s
        folder.mkdir(parents=True)
        self.rows = self.write_rows("rows", range(ROWS))
        self._number, self._counting = 0, threading.Lock()
        self._undisturbed: dict[tuple[Any, ...], list[Played]] = {}

    def write_rows(self, name: str, rows: Sequence[int]) -> Path:
        path = self.folder / f"{name}.jsonl"
        path.write_text("".join(json.dumps({"row": row, "text": f"row {row}"}) + "\n" for row in rows))
        return path

    def play(
        self,
        *,
        load: Path | None = None,
        save_after: int | None = None,
        die_after: int | None = None,
        rows: Path | None = None,
        port: int = 0,
        **options: Any,
    ) -> tuple[Played, Path]:
        """Play it, from a state if one is given; returns what it left and where its state is."""
        with self._counting:
            self._number += 1
            base = self.folder / f"{self._number:03d}"
        state, log = base.with_suffix(".state"), base.with_suffix(".log")
        known = {
            "rank": 0, "world_size": 1, "batch_size": BATCH, "epochs": 2, "seed": 7, "workers": 0, "shuffle": True, **options,
        }  # fmt: skip
        spec = {"rows": str(rows or self.rows), "options": known, "log": str(log), "save": str(state), "save_after": save_after,
                "die_after": die_after, "load": str(load) if load else None}  # fmt: skip
        path = base.with_suffix(".json")
        path.write_text(json.dumps(spec))
        script = Path(__file__).parent / "play.py"
        with base.with_suffix(".err").open("w") as err:
            try:
                subprocess.run(
                    [self.python, str(script), self.adapter, str(path)],
                    stdout=err, stderr=err, timeout=self.limit_s, check=False, cwd=self.folder,
                    env={**os.environ, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)},
                )  # fmt: skip
            except subprocess.TimeoutExpired:
                return Played(error=f"no end in {self.limit_s:.0f} s"), state
        return _read(log), state

    def undisturbed(self, world_size: int = 1, **options: Any) -> list[Played]:
        """What each rank gives when nobody disturbs it; played once."""
        asked = (world_size, *sorted(options.items()))
        if asked not in self._undisturbed:
            self._undisturbed[asked] = [played for played, _ in self.play_ranks(world_size, **options)]
        return self._undisturbed[asked]

    def play_ranks(
        self, world_size: int, loads: Sequence[Path | None] = (), **options: Any
    ) -> list[tuple[Played, Path]]:
        """Play all ranks at once, each from a state of its own, or all from the only one that is given."""
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        states = list(loads) * (world_size if len(loads) == 1 else 1) or [None] * world_size
        with ThreadPoolExecutor(world_size) as pool:
            asked = [
                pool.submit(
                    self.play, load=states[rank], rank=rank, world_size=world_size, port=port, **options
                )
                for rank in range(world_size)
            ]
            return [each.result() for each in asked]


def _read(log: Path) -> Played:
    played = Played()
    for line in log.read_text().splitlines() if log.exists() else []:
        said = json.loads(line)
        if "rows" in said:
            played.batches.append(said["rows"])
            played.first_s = said.get("first_s", played.first_s)
        played.error = said.get("error", played.error)
        played.ended, played.peak_mb = said.get("end", played.ended), said.get("peak_mb", played.peak_mb)
    return played


@dataclass
class Score:
    """How far what was trained is from what should have been: numbers of rows."""

    repeated: int = 0
    lost: int = 0
    moved: int = 0
    said: str = ""
    seconds: float | None = None
    peak_mb: int | None = None

    @property
    def is_exact(self) -> bool:
        return not (self.repeated or self.lost or self.moved) and self.said in ("", "refused by name")

    def __str__(self) -> str:
        if self.is_exact:
            return "exact" if not self.said else self.said
        parts = [
            f"{n} {name}"
            for n, name in ((self.repeated, "repeated"), (self.lost, "lost"), (self.moved, "moved"))
            if n
        ]
        return ", ".join([*parts, *([self.said] if self.said else [])])


def compare(wanted: Sequence[int], got: Played) -> Score:
    """Count rows that came too often, not at all, or at another place; an error is told and nothing is counted."""
    if got.error is not None:
        return Score(said=got.error)
    had, should = Counter(got.rows), Counter(wanted)
    repeated, lost = (had - should).total(), (should - had).total()
    moved = 0 if repeated or lost else sum(a != b for a, b in zip(got.rows, wanted, strict=True))
    return Score(repeated, lost, moved, seconds=got.first_s, peak_mb=got.peak_mb)


def _killed(
    table: Table, save_after: int, *, more: int = 3, stops: int = 1, world: int = 1, **options: Any
) -> Score:
    whole = table.undisturbed(world, **options)
    if error := next((each.error for each in whole if each.error), None):
        return Score(said=error)
    done, loads = 0, []
    for _ in range(stops):
        loads = [
            state
            for _, state in table.play_ranks(
                world, loads, save_after=save_after, die_after=save_after + more, **options
            )
        ]
        if not all(state.exists() for state in loads):
            return Score(said="no state was saved")
        done += save_after
    scores = [
        compare([row for batch in each.batches[done:] for row in batch], left)
        for each, (left, _) in zip(whole, table.play_ranks(world, loads, **options), strict=True)
    ]
    said = next((each.said for each in scores if each.said), "")
    counts = (sum(getattr(each, name) for each in scores) for name in ("repeated", "lost", "moved"))
    return Score(*counts, said, scores[0].seconds, scores[0].peak_mb)


def middle(table: Table) -> Score:
    """A kill in the middle of an epoch; it goes on from a state three batches before."""
    return _killed(table, 17)


def end_of_epoch(table: Table) -> Score:
    """The state is that of an epoch's last batch."""
    return _killed(table, -(-ROWS // BATCH))


def second_resume(table: Table) -> Score:
    """It dies twice: the second state is one of a run that was resumed."""
    return _killed(table, 9, stops=2)


def two_workers(table: Table) -> Score:
    """Two processes read ahead for the loader."""
    return _killed(table, 17, workers=2)


def two_ranks(table: Table) -> Score:
    """Two ranks, each killed and resumed from a state of its own."""
    return _killed(table, 9, world=2)


def other_world(table: Table) -> Score:
    """One epoch, 24 rows a step, that begins on two ranks and ends on three; the states are those of rank 0."""
    before = table.play_ranks(2, batch_size=12, epochs=1, save_after=4, die_after=4)
    if not before[0][1].exists():
        return Score(said=before[0][0].error or "no state was saved")
    after = table.play_ranks(3, [before[0][1]], batch_size=8, epochs=1)
    return _once([*before, *after])


def uneven(table: Table) -> Score:
    """Three ranks see an epoch of a number of rows that three does not divide: all of them once."""
    return _once(table.play_ranks(3, epochs=1))


def _once(played: Sequence[tuple[Played, Path]]) -> Score:
    """All ranks together have every row once."""
    if error := next((each.error for each, _ in played if each.error), None):
        return Score(said=error)
    return _in_any_order(Played([batch for each, _ in played for batch in each.batches]), range(ROWS))


def epochs_differ(table: Table) -> Score:
    """Two epochs have all rows once each, in two orders; the same seed gives the same, another seed another."""
    (first,) = table.undisturbed()
    again, _ = table.play()
    other, _ = table.play(seed=8)
    for each in (first, again, other):
        if each.error:
            return Score(said=each.error)
    score = compare(first.rows, again)
    halves = [first.rows[:ROWS], first.rows[ROWS:]]
    for half in halves:
        own = _in_any_order(Played([half]), range(ROWS))
        score.repeated, score.lost = score.repeated + own.repeated, score.lost + own.lost
    if halves[0] == halves[1]:
        score.said = "both epochs have one order"
    elif first.rows == other.rows:
        score.said = "another seed gives the same order"
    return score


def changed_source(table: Table) -> Score:
    """A row in front is gone when it goes on: every row is another one than its number says."""
    _, state = table.play(save_after=17, die_after=20)
    if not state.exists():
        return Score(said="no state was saved")
    left, _ = table.play(load=state, rows=table.write_rows("changed", range(1, ROWS)))
    if left.error is not None:
        names = ("row", "source", "data", "match", "differ", "changed", "size", "length", "num_samples")
        known = any(name in left.error.lower() for name in names)
        return Score(said="refused by name" if known else left.error)
    return Score(said="goes on without a word")


def _in_any_order(played: Played, wanted: Sequence[int]) -> Score:
    score = compare(wanted, played)
    score.moved = 0
    return score


CASES: tuple[Callable[[Table], Score], ...] = (
    middle, end_of_epoch, second_resume, two_workers, two_ranks, other_world, uneven, epochs_differ, changed_source,
)  # fmt: skip
