"""The exam of loaders counts what it should, on contestants whose faults are known."""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

EXAM = Path(__file__).parents[2] / "benchmarks" / "exam"


@pytest.fixture(autouse=True)
def exam(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The modules of the exam say each other's bare names."""
    monkeypatch.syspath_prepend(str(EXAM))
    before = set(sys.modules)
    yield
    for name in set(sys.modules) - before:
        if str(getattr(sys.modules[name], "__file__", "")).startswith(str(EXAM)):
            del sys.modules[name]


class Model:
    """A contestant on paper: an order that epochs and seeds have of their own, dealt to the ranks of a step; a state is a row."""

    def __init__(self, fault: str = "") -> None:
        self.fault = fault
        self.sources: dict[Path, tuple[int, ...]] = {}

    def play(
        self, run: str, numbers: tuple[int, ...], *, place: str = "rows", world: int = 1, loads: Any = (),
        save_after: int | None = None, die_after: int | None = None, options: Any = None, memory_mb: int | None = None,
    ) -> list[Any]:  # fmt: skip
        from table import OPTIONS, REJECTED, SECOND, Played

        total_mb = len(numbers) // 8 if self.fault == "holds all rows" else 100
        if memory_mb is not None and total_mb > memory_mb:
            return [Played(error="killed: it needed more memory than the limit", total_mb=total_mb)]

        o = {**OPTIONS, **(options or {})}
        if loads and self.fault != "silent" and self.sources[loads[0]] != tuple(numbers):
            return [Played(error="the source is another one")] * world
        rows = []
        for epoch in range(o["epochs"]):
            order = list(numbers)
            random.Random(f"{o['seed']} {epoch}" if self.fault != "one order" else 0).shuffle(order)
            if "mixture" in o and self.fault != "one source":
                first, second = (
                    [row for row in order if (row >= SECOND) == later] for later in (False, True)
                )
                order = [both[at % len(both)] for at in range(102) for both in (first, second)][:203]
            if self.fault == "a short batch is dropped":
                order = order[:200]
            if "workers" in o and self.fault == "a copy of each worker":
                # in two epochs, each row comes twice
                order = [row for row in list(numbers)[epoch::2] for _ in range(2)]
            rows.append(order)
        begin = int(loads[0].name) if loads else 0
        if begin and self.fault == "skips a row":
            begin += 1
        if begin and self.fault == "a row again":
            begin -= 1
        if begin >= len(numbers) and self.fault == "epoch again":
            begin -= len(numbers)
        whole = [row for order in rows for row in order]
        if loads and self.fault == "two swapped":
            whole[-1], whole[-2] = whole[-2], whole[-1]
        steps = []
        done = 0
        for order in rows:
            at = 0
            while at < len(order):
                size = o["batch_size"] * world
                if loads and self.fault == "last step in two" and len(order) - at <= size:
                    size = -(-(len(order) - at) // 2)
                steps.append((done + at, whole[done + at : done + min(at + size, len(order))]))
                at += size
            done += len(order)
        steps = [(max(at, begin), step[max(0, begin - at) :]) for at, step in steps if at + len(step) > begin]
        ranks = []
        for rank in range(world):
            given = steps[: o.get("limit") if die_after is None else die_after]
            state = None
            if save_after is not None:
                at, step = steps[save_after - 1]
                state = Path(str(at + len(step)))
                self.sources[state] = tuple(numbers)
            batches = [step[rank::world] for _, step in given]
            if loads and world == 3:
                batches = self.grown(rank, batches, order, begin)
            if self.fault == "uneven" and rank == 1:
                batches = [*batches[:-1], *([row] for row in batches[-1])]
            if "pairs" in o and self.fault == "one answer twice":
                batches = [[row for row in batch for _ in range(2)] for batch in batches]
            elif "pairs" in o:
                torn = 101 if self.fault == "torn" else None
                batches = [
                    [row + mate for row in batch for mate in (0, REJECTED)[: 1 if row == torn else 2]]
                    for batch in batches
                ]
            differ = [
                [row for row in batch if row == 101 and self.fault == "cuts a row"] for batch in batches
            ]
            ranks.append(
                Played(
                    batches,
                    ended=die_after is None,
                    state=state,
                    differ=differ if "ids" in o else None,
                    total_mb=total_mb,
                )
            )
        return ranks

    def grown(self, rank: int, batches: list[list[int]], order: list[int], begin: int) -> list[list[int]]:
        """What a rank of three gives after two died, with faults that come of another number of ranks."""
        if self.fault == "a new rank begins at the start" and rank == 2:
            return [order[at : at + 8] for at in range(0, 8 * len(batches), 8)]
        if self.fault == "a rank's count is everybody's":  # each of three skips what each of two had
            mine = order[rank::3][begin // 2 :]
            return [mine[at : at + 8] for at in range(0, len(mine), 8)]
        if self.fault == "a new rank is idle" and rank < 2:
            return batches
        return batches if self.fault != "a new rank is idle" else []


def scores_of(fault: str, *names: str) -> dict[str, str]:
    import cases

    known: dict[str, Any] = {}
    model = Model(fault)
    asked = [case for case in cases.CASES if not names or case.name in names]
    return {case.name: str(cases.examine(case, model, known)) for case in asked}


def test_a_loader_without_faults_is_right_in_every_case() -> None:
    found = scores_of("")
    assert {said for name, said in found.items() if name not in ("added", "replaced")} == {"exact"}
    assert found["added"] == found["replaced"] == "noticed"


@pytest.mark.parametrize(
    ("fault", "case", "says"),
    [
        ("skips a row", "middle", "1 lost"),
        ("skips a row", "twice", "2 lost"),
        ("a row again", "middle", "1 repeated"),
        ("epoch again", "end", "203 repeated"),
        ("two swapped", "middle", "2 moved"),
        ("two swapped", "ranks", "2 repeated, 2 lost"),
        ("skips a row", "world", "1 lost"),
        ("two swapped", "repeats", "exact"),
        ("one order", "differs", "3 of 4 orders are alike"),
        ("a short batch is dropped", "differs", "12 lost"),
        ("a short batch is dropped", "bytes", "3 lost"),
        ("silent", "replaced", "silent"),
        ("skips a row", "mixture", "1 lost"),
        ("one source", "mixture", "% of the rows"),
        ("torn", "pairs", "2 pairs are torn"),
        ("one answer twice", "pairs", "406 pairs are torn"),
        ("two swapped", "world", "exact"),
        ("last step in two", "world", "6 moved"),
        ("a new rank begins at the start", "world", "40 repeated, 36 lost"),
        ("a rank's count is everybody's", "world", "48 lost"),
        ("a new rank is idle", "world", "ranks have 4 and 9 steps"),
        ("a copy of each worker", "workers", "50 repeated"),
        ("cuts a row", "bytes", "1 differ"),
        ("cuts a row", "packed", "2 differ"),
        ("holds all rows", "stream", "killed: it needed more memory than the limit"),
        ("skips a row", "pairs", "2 lost"),
        ("uneven", "uneven", "ranks have 17 and 20 steps"),
    ],
)
def test_a_fault_is_counted(fault: str, case: str, says: str) -> None:
    assert says in scores_of(fault, case)[case]


ADAPTER = """
VERSION = PROMISE = SETTINGS = ""


class Loader:
    def __init__(self, rows, options):
        self.rows, self.at = range(len(rows.read_text().splitlines())), 0

    def batches(self):
        rows = [*self.rows, *self.rows]
        while self.at < len(rows):
            self.at += 4
            yield rows[self.at - 4 : self.at]

    def save(self):
        return self.at

    def load(self, state):
        self.at = state - FAULT


def open_loader(rows, **options):
    return Loader(rows, options)
"""


@pytest.mark.parametrize(("back", "says"), [(0, "exact"), (4, "4 repeated")])
def test_processes_are_really_killed_and_go_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, back: int, says: str
) -> None:
    import cases
    import table

    (tmp_path / "counted.py").write_text(ADAPTER.replace("FAULT", str(back)))
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    played = table.Table(sys.executable, "counted", tmp_path / "played")
    try:
        middle = next(case for case in cases.CASES if case.name == "middle")
        assert str(cases.examine(middle, played, {})) == says
        killed = sorted((tmp_path / "played").glob("*.log"))[1]
        assert '"end"' not in killed.read_text()
        assert len(table.read_log(killed).batches) == 20
    finally:
        played.close()


def test_the_pages_say_what_the_results_say() -> None:
    import results

    for path, text in results.pages().items():
        assert path.read_text() == text, f"{path.name}: run benchmarks/exam/results.py"
