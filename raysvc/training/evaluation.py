"""Evals of a run: when they are due, and what they say.

Axes: N rows of a mini-batch.
Always true:
- every row of an eval counts once, dummies never; sums are of all ranks;
- a mini-batch is asked for before the one before it is waited for, through the ring that training uses; no training
  shard lies in the ring meanwhile (`HeldBack`), and the server goes on collating them;
- bits per byte are those of targets that stand for text: a control token is in neither sum.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from raysvc.progress import Progress, Tick

if TYPE_CHECKING:
    from raysvc.actors.dispatch.dispatch import WorkerDispatch
    from raysvc.actors.dispatch.future import Pending
    from raysvc.client.batch_client import BatchClient, Step
    from raysvc.client.evals import EvalStream
    from raysvc.collate.row_values import RowValues
    from raysvc.job.config import JobConfig

AHEAD = 2  # mini-batches that the workers hold: one is evaluated, one is copied


@dataclass(frozen=True)
class EvalSums:
    """Sums over rows.

    Attributes:
        rows: rows.
        targets: tokens under loss.
        nll: nats over them.
        text_bytes: bytes of text that they stand for; 0 when that is not known.
        text_nll: nats over those that stand for text.
    """

    rows: int = 0
    targets: int = 0
    nll: float = 0.0
    text_bytes: int = 0
    text_nll: float = 0.0

    def plus(self, values: RowValues) -> EvalSums:
        """Returns the sums with the rows of one mini-batch added."""
        rows = values.rows
        return EvalSums(
            self.rows + len(values.row_ids),
            self.targets + int(rows["targets"].sum()),
            self.nll + float(rows["nll"].sum()),
            self.text_bytes + int(rows["text_bytes"].sum() if "text_bytes" in rows else 0),
            self.text_nll + float(rows["text_nll"].sum() if "text_nll" in rows else 0.0),
        )

    def to_json(self) -> dict[str, Any]:
        """Counts, `loss` (nats a target) and `bits_per_byte`; None where there is nothing to divide by."""
        bits = self.text_nll / math.log(2)
        return {
            "rows": self.rows,
            "targets": self.targets,
            "bytes": self.text_bytes,
            "loss": self.nll / self.targets if self.targets else None,
            "bits_per_byte": bits / self.text_bytes if self.text_bytes else None,
        }


class HeldBack:
    """Hands fetched steps to the workers, none from an eval's step on before the eval is over.

    Args:
        stage: hands a step's pending shards to the workers.
        until: the first step that is held back.
    """

    def __init__(self, stage: Callable[[Step], object], until: float) -> None:
        self._stage = stage
        self._until = until
        self._held: list[Step] = []

    def __call__(self, step: Step) -> None:
        if step.index < self._until:
            self._stage(step)
        else:
            self._held.append(step)

    def go_on(self, until: float) -> None:
        """The eval is over; the next one comes before step `until`."""
        self._until = until
        held, self._held = self._held, []
        for step in held:
            self(step)


@dataclass(frozen=True)
class Evals:
    """The evals of a job, and after which steps they run.

    Attributes:
        names: of the evals.
        every: steps between two evaluations; None: only at the end.
        stop: steps of the run.
    """

    names: tuple[str, ...]
    every: int | None
    stop: int

    @classmethod
    def of(cls, job: JobConfig, stop: int) -> Evals:
        """Those of a job whose run has `stop` steps."""
        return cls(tuple(job.evals), job.trainer.eval_every_steps, stop)

    def due(self, done: int) -> bool:
        """Returns whether they run once `done` steps are trained."""
        return bool(self.names) and (done == self.stop or (self.every is not None and done % self.every == 0))

    def next_after(self, done: int) -> float:
        """Returns how many steps are trained when the evals run next; infinite if they do not."""
        return next((float(at) for at in range(done + 1, self.stop + 1) if self.due(at)), math.inf)

    def run(
        self, client: BatchClient, dispatch: WorkerDispatch, group: str, progress: Progress
    ) -> Iterator[dict[str, Any]]:
        """Run all of them on a group of workers; one line each."""
        for name in self.names:
            begin = time.perf_counter()
            sums = evaluate(dispatch, group, client.eval(name), progress)
            yield {"eval": name, **sums.to_json(), "eval_s": round(time.perf_counter() - begin, 6)}


def evaluate(dispatch: WorkerDispatch, group: str, stream: EvalStream, progress: Progress) -> EvalSums:
    """All rows of one eval."""
    sums, done = EvalSums(), 0
    asked: deque[Pending[RowValues]] = deque()

    def add() -> None:
        nonlocal sums, done
        sums, done = sums.plus(asked.popleft().result()), done + 1
        facts = {name: round(value, 4) for name, value in sums.to_json().items() if isinstance(value, float)}
        progress(Tick(f"eval {stream.name}", done, len(stream), "steps", facts, final=done == len(stream)))

    for step in stream:
        asked.append(dispatch.evaluate_async(group, step.mini_batches[0]))
        if len(asked) == AHEAD:
            add()
    while asked:
        add()
    return sums
