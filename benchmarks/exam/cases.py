"""What every loader is asked, as data, and how its answers are counted.

1. A case is some runs after each other. Each but the last one saves a state and is killed some batches later; each but the first
   one goes on from the state of the one before.
2. What was trained is what came before each state, and all that the last run gave.
3. It is compared with what the same contestant gives when nobody disturbs it (`SAME`), or with the list of rows.

Always true:
- a row that came too often is repeated, one that did not come is lost; where all came as often as they should, those at another
  place are moved;
- a row differs where its ids are not those of the source's row: cut, longer, or another row's;
- an error that a case waits for has to come from the run that goes on, and to name rows, source or sizes;
- a contestant whose documentation says that it has no such feature is not played.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import zip_longest
from typing import Any, Protocol

from table import BATCH, OPTIONS, REJECTED, ROWS, SECOND, Played

ALL = tuple(range(ROWS))
EPOCH = -(-ROWS // BATCH)  # batches


@dataclass(frozen=True)
class Run:
    """All ranks of a contestant, begun at once.

    Attributes:
        save_after: batches until the state that the next run goes on from; None: it comes to its end.
        more: batches that are given out after it, and die.
        numbers: of the rows that lie in the source.
        options: that are not `OPTIONS`.
        memory_mb: that all its processes may hold together, beyond what those of the run before held at most.
    """

    save_after: int | None = None
    world: int = 1
    more: int = 3
    numbers: tuple[int, ...] = ALL
    options: Mapping[str, Any] = field(default_factory=dict)
    memory_mb: int | None = None


@dataclass(frozen=True)
class Lives:
    """What a case left: batches that were trained, by rank of the last run, and what the same runs give undisturbed."""

    case: Case
    trained: list[list[list[int]]]
    last: list[Played]
    undisturbed: list[Played]
    differ: list[int] = field(default_factory=list)
    sampled: list[int] = field(default_factory=list)

    @property
    def rows(self) -> list[int]:
        return [row for rank in self.trained for batch in rank for row in batch]


@dataclass(frozen=True)
class Case:
    """One question.

    Attributes:
        says: what happens, in a sentence.
        runs: see the module.
        judge: counts.
        unless: why a contestant does not offer it that does not name it in `OFFERS`.
        alone: options of the undisturbed run; None: those of the first run.
    """

    name: str
    says: str
    runs: tuple[Run, ...]
    judge: Callable[[Lives], Score]
    alone: Mapping[str, Any] | None = None
    unless: str = ""


@dataclass
class Score:
    """How far what was trained is from what should have been: numbers of rows, and what was said."""

    repeated: int = 0
    lost: int = 0
    moved: int = 0
    differ: int = 0
    said: str = ""
    detail: str = ""
    right: bool | None = None
    seconds: float | None = None
    peak_mb: int | None = None

    @property
    def is_right(self) -> bool:
        return (
            not (self.repeated or self.lost or self.moved or self.differ or self.said)
            if self.right is None
            else self.right
        )

    def __str__(self) -> str:
        names = ("repeated", "lost", "moved", "differ")
        counts = [(getattr(self, name), name) for name in names]
        parts = [f"{number} {name}" for number, name in counts if number]
        return ", ".join([*([self.said] if self.said else []), *parts]) or "exact"


class Player(Protocol):
    """What plays: `table.Table`."""

    def play(self, run: str, numbers: Sequence[int], **how: Any) -> list[Played]: ...


def examine(case: Case, table: Player, known: dict[str, list[Played]]) -> Score:
    """Play a case and count.

    Args:
        known: undisturbed runs that were played; this one's is added.
    """
    world, options = case.runs[0].world, case.runs[0].options if case.alone is None else case.alone
    asked = "-".join(["alone", str(world), *(f"{name}{value}" for name, value in sorted(options.items()))])
    usual = "ids" if case.runs[0].options.get("ids") else "rows"
    place = case.name if any(run.numbers != ALL for run in case.runs) else usual
    numbers = case.runs[0].numbers
    asked += f"-{len(numbers)}"
    if case.judge not in (once, unchanged, streamed, buffered) and asked not in known:
        known[asked] = table.play(
            asked, numbers, place=usual if numbers == ALL else place, world=world, options=options
        )
    undisturbed = known.get(asked, [])
    trained: list[list[list[int]]] = []
    loads: list[Any] = []
    differ: list[int] = []
    sampled: list[int] = []
    played = undisturbed
    for run in case.runs:
        if error := next((each.error for each in played if each.error and not each.state), None):
            return Score(said=error, right=False)
        dies = None if run.save_after is None else run.save_after + run.more
        before_mb = max((each.total_mb or 0 for each in played), default=0)
        played = table.play(
            case.name, run.numbers, place=place, world=run.world, loads=loads, save_after=run.save_after, die_after=dies, options=run.options,
            memory_mb=run.memory_mb and run.memory_mb + before_mb,
        )  # fmt: skip
        loads = [each.state for each in played if each.state is not None]
        if dies is not None and len(loads) < run.world:
            return Score(
                said=next((each.error for each in played if each.error), None) or "no state was saved",
                right=False,
            )
        if dies is not None and any(each.ended for each in played):
            return Score(said="was not killed: it ended", right=False)
        done = max((len(rank) for rank in trained), default=0)
        trained += [
            [[]] * done for _ in range(run.world - len(trained))
        ]  # a rank that was not there had no rows
        sampled += [row for each in played for row in each.sampled]
        for rank, each in enumerate(played):
            trained[rank] = [*trained[rank], *each.batches[: run.save_after]]
            differ += _flat((each.differ or [])[: run.save_after])
    score = case.judge(Lives(case, trained, played, undisturbed, differ, sampled))
    score.differ = len(differ)
    if played[0].total_mb:
        score.detail = f"{played[0].total_mb - before_mb} MB more than with {len(numbers)} rows"
    score.seconds, score.peak_mb = played[0].first_s, played[0].peak_mb
    return score


def count(wanted: Sequence[int], got: Sequence[int]) -> Score:
    """Count rows that came too often, not at all, or, where all came as often as they should, at another place."""
    had, should = Counter(got), Counter(wanted)
    repeated, lost = (had - should).total(), (should - had).total()
    moved = 0 if repeated or lost else sum(a != b for a, b in zip(got, wanted, strict=True))
    return Score(repeated, lost, moved)


def _failed(lives: Lives) -> Score | None:
    error = next((each.error for each in lives.last if each.error), None)
    return None if error is None else Score(said=error, right=False)


def same(lives: Lives) -> Score:
    """Each rank got the rows of an undisturbed run, in its order."""
    if failed := _failed(lives):
        return failed
    each = [
        count(alone.rows, _flat(rank)) for alone, rank in zip(lives.undisturbed, lives.trained, strict=True)
    ]
    return Score(*(sum(getattr(one, name) for one in each) for name in ("repeated", "lost", "moved")))


def same_once(lives: Lives) -> Score:
    """As undisturbed, which has every row once an epoch: none comes again in the first half of the first one."""
    score, early = same(lives), lives.rows[: ROWS // 2]
    if score.is_right:
        score = _in_any_order(ALL * OPTIONS["epochs"], lives.rows)
    if not score.said:
        score.repeated += len(early) - len(set(early))
    return score


def same_steps(lives: Lives) -> Score:
    """Each step of all ranks together has the rows that it has in an undisturbed run, on however many ranks, and each rank has it."""
    if failed := _failed(lives):
        return failed
    whole = _steps([each.batches for each in lives.undisturbed])
    score = count(_flat(whole), _flat(_steps(lives.trained)))
    score.moved = 0
    if not (score.repeated or score.lost):
        got = _steps(lives.trained)
        pairs = zip_longest(got, whole, fillvalue=[])
        score.moved = sum((Counter(a) - Counter(b)).total() for a, b in pairs)
    steps = sorted({len(rank) for rank in lives.trained})
    if len(steps) > 1:
        score.said = f"ranks have {' and '.join(map(str, steps))} steps"
    return score


def once(lives: Lives) -> Score:
    """All ranks together have every row once, in as many steps each."""
    if failed := _failed(lives):
        return failed
    score = _in_any_order(ALL, lives.rows)
    steps = sorted({len(rank) for rank in lives.trained})
    if len(steps) > 1:
        score.said = f"ranks have {' and '.join(map(str, steps))} steps"
    return score


def unchanged(lives: Lives) -> Score:
    """Every row came once, with its ids."""
    if failed := _failed(lives):
        return failed
    if lives.last[0].differ is None:
        return Score(said="gave no ids", right=False)
    return _in_any_order(ALL, lives.rows)


def streamed(lives: Lives) -> Score:
    """The last run gave every row once, in memory that is less than its rows."""
    return _failed(lives) or _in_any_order(STREAM, lives.last[0].rows)


def buffered(lives: Lives) -> Score:
    """Every prompt was trained once an epoch; what was answered more often is told beside it."""
    if failed := _failed(lives):
        return failed
    wanted = [*lives.case.runs[0].numbers] * OPTIONS["epochs"]
    score = _in_any_order(wanted, lives.rows)
    score.detail = f"{count(wanted, lives.sampled).repeated} prompts answered again"
    return score


def same_bytes(lives: Lives) -> Score:
    """Each rank got the rows of an undisturbed run in its order, and each epoch has every row once."""
    if failed := _failed(lives):
        return failed
    if lives.last[0].differ is None:
        return Score(said="gave no ids", right=False)
    return same_once(lives)


def other_order(lives: Lives) -> Score:
    """Both epochs have all rows once each, in two orders, neither of which is one of the other seed's."""
    if failed := _failed(lives):
        return failed
    both = (lives.rows, lives.undisturbed[0].rows)
    orders = [part for rows in both for part in _epochs(rows)]
    each = [_in_any_order(ALL, order) for order in orders]
    score = Score(sum(one.repeated for one in each), sum(one.lost for one in each))
    alike = len(orders) - len({tuple(order) for order in orders})
    score.said = f"{alike} of {len(orders)} orders are alike" if alike else ""
    return score


def mixed(lives: Lives) -> Score:
    """As undisturbed, and of the first 160 rows some half are of each source."""
    limit = lives.case.runs[0].options["limit"]  # of each run; the last one gave out more
    lives = replace(lives, trained=[rank[:limit] for rank in lives.trained])
    score = same(lives)
    share = sum(row >= SECOND for row in lives.rows) / max(1, len(lives.rows))
    if not score.said and not 0.4 <= share <= 0.6:
        score.said = f"{share:.0%} of the rows are of a source of half the weight"
    return score


def paired(lives: Lives) -> Score:
    """As undisturbed, and each batch has both answers of each of its rows."""
    score = same(lives)
    batches = [Counter(batch) for rank in lives.trained for batch in rank]
    both = [
        (batch[row], batch[row + REJECTED])
        for batch in batches
        for row in {each % REJECTED for each in batch}
    ]
    torn = sum(chosen != rejected for chosen, rejected in both)
    if not score.said and torn:
        score.said = f"{torn} pairs are torn"
    return score


NAMED = ("row", "source", "data", "match", "differ", "changed", "size", "length", "num_samples")


def noticed(lives: Lives) -> Score:
    """It refuses, by an error that names rows, source or sizes; otherwise rows are counted against the run that nobody changed."""
    error = next((each.error for each in lives.last if each.error), None)
    if error is not None:
        known = any(name in error.lower() for name in NAMED)
        return Score(said="noticed", detail=error, right=True) if known else Score(said=error, right=False)
    score = count(lives.undisturbed[0].rows, [row % CHANGED for row in lives.rows if row != ROWS])
    score.said, score.right = "silent", False
    return score


def _in_any_order(wanted: Sequence[int], got: Sequence[int]) -> Score:
    score = count(wanted, got)
    score.moved = 0
    return score


def _epochs(rows: Sequence[int]) -> tuple[Sequence[int], Sequence[int]]:
    """Both epochs; where the first one is not whole, both are as short."""
    end = ROWS if len(set(rows[:ROWS])) == ROWS else len(rows) // 2
    return rows[:end], rows[end:]


def _flat(batches: Sequence[Sequence[int]]) -> list[int]:
    return [row for batch in batches for row in batch]


def _steps(ranks: Sequence[Sequence[Sequence[int]]]) -> list[list[int]]:
    most = max((len(rank) for rank in ranks), default=0)
    return [_flat([rank[step] for rank in ranks if step < len(rank)]) for step in range(most)]


CHANGED = 1000  # is added to the number of a row whose text is another one
ADDED = (*ALL, ROWS)
REPLACED = tuple(row + CHANGED * (row == 101) for row in ALL)
EVEN = tuple(range(204))  # 24 do not divide it, two and three do: nobody has to pad
PAIRS = {"pairs": True}
SHORT, STREAM = tuple(range(512)), tuple(range(4096))  # rows of 64 KiB
IDS = {"ids": True}
PACKED, MIXED = {"packed": True, **IDS}, {"mixture": True, "limit": 40}
WORKERS, ONE_EPOCH = {"workers": 2}, {"epochs": 1}
ROLLOUTS = {"rollouts": True}
LONG = {"long": True, "shuffle": False, **ONE_EPOCH}
TWO, THREE = ({"batch_size": size, "epochs": 1} for size in (12, 8))

CASES = (
    Case("middle", "killed in the middle of an epoch, goes on from a state three batches before", (Run(17), Run()), same),
    Case("end", "the state is that of an epoch's last batch", (Run(EPOCH), Run()), same),
    Case("twice", "dies again after it went on", (Run(9), Run(9), Run()), same),
    Case("workers", "two processes read ahead", (Run(17, options=WORKERS), Run(options=WORKERS)), same_once),
    Case("ranks", "two ranks die, each goes on from its own state", (Run(9, 2), Run(None, 2)), same),
    Case("world", "dies on two ranks and goes on on three, 24 rows a step", (Run(4, 2, numbers=EVEN, options=TWO), Run(None, 3, numbers=EVEN, options=THREE)), same_steps),
    Case("uneven", "203 rows on three ranks, each row once, as many steps a rank", (Run(None, 3, options=ONE_EPOCH),), once),
    Case("repeats", "the same seed gives the same order again", (Run(),), same),
    Case("differs", "epochs and seeds have orders of their own", (Run(options={"seed": 8}),), other_order, {}),
    Case("added", "a row is appended while it is dead", (Run(17), Run(numbers=ADDED)), noticed),
    Case("replaced", "a row that is still to come is another one when it goes on", (Run(17), Run(numbers=REPLACED)), noticed),
    Case("packed", "rows are packed into sequences; dies, goes on", (Run(9, options=PACKED), Run(options=PACKED)), same_bytes),
    Case("mixture", "rows from 150 on are a source of half the weight; dies, goes on", (Run(9, options=MIXED), Run(options=MIXED)),
         mixed),
    Case("pairs", "two answers of each row; a batch has both; dies, goes on", (Run(9, options=PAIRS), Run(options=PAIRS)), paired,
         unless="a row is one example"),
    Case("rollouts", "answers to prompts end in another order, and wait in a buffer; the learner and what samples die, go on", (Run(40, numbers=EVEN, options=ROLLOUTS), Run(numbers=EVEN, options=ROLLOUTS)), buffered,
         unless="answers are not its business"),
    Case("bytes", "rows of 2 to 11 tokens have, in their batches, the ids of the source", (Run(options={**IDS, **ONE_EPOCH}),), unchanged),
    Case("stream", "256 MiB of rows, read in order in 128 MiB more than 32 MiB of them need", (Run(numbers=SHORT, options=LONG, memory_mb=100_000), Run(numbers=STREAM, options=LONG, memory_mb=128)), streamed),
)  # fmt: skip
