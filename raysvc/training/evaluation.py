"""Evals of a run: when they are due, and what they say.

1. An objective of pairs, labels, steps or a teacher is evaluated by the loss that it trains with: the mean over all mini-batches,
   each with the weight of what its own mean is over. KTO compares each row with the KL of its mini-batch, as in training.
2. All others by the nats of each target, and the bytes that it stands for.

Always true:
- every row of an eval counts once, dummies never; sums are of all ranks;
- but for that KL, no value depends on the number of ranks or on `batch_size`;
- a mini-batch is asked for before the one before it is waited for, through the ring that training uses; no training
  shard lies in the ring meanwhile (`HeldBack`), and the server goes on collating them;
- bits per byte are those of targets that stand for text: a control token is in neither sum.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from raysvc.collate.loss_weights import mean_count
from raysvc.collate.shard import Denominators
from raysvc.job.objectives.eval_metrics import SHOWN
from raysvc.progress import Progress, Tick
from raysvc.training.objective import mean_of, unit_of

if TYPE_CHECKING:
    from raysvc.actors.dispatch.dispatch import WorkerDispatch
    from raysvc.actors.dispatch.future import Pending
    from raysvc.actors.worker.results import Metrics
    from raysvc.client.batch_client import BatchClient, Step
    from raysvc.client.evals import EvalStream
    from raysvc.client.steps import MiniBatch
    from raysvc.collate.row_values import RowValues
    from raysvc.job.config import JobConfig, Reduction

DIGITS = 12  # of a mean: equal shares of right answers are equal, in whatever order they were added up
NO_ROWS = Denominators(0, 0, 0)
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

    def ask(self, dispatch: WorkerDispatch, group: str, mini: MiniBatch) -> Pending[Any]:
        """Ask a group for what `plus` takes."""
        return dispatch.evaluate_async(group, mini)

    def plus(self, values: RowValues, mini: MiniBatch) -> EvalSums:
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


@dataclass(frozen=True)
class EvalMeans:
    """Means of what a loss says of itself.

    Attributes:
        mean: which one the loss of a mini-batch is.
        unit: what two rows are one of, as `pairs`; "": each row counts for itself.
        counts: of the rows so far.
        means: over them; what no mini-batch has is absent.
    """

    mean: Reduction
    unit: str = ""
    counts: Denominators = NO_ROWS
    means: Mapping[str, float] = field(default_factory=dict)

    def ask(self, dispatch: WorkerDispatch, group: str, mini: MiniBatch) -> Pending[Any]:
        """Ask a group for what `plus` takes."""
        return dispatch.evaluate_loss_async(group, mini, float(self._count(mini)))

    def plus(self, metrics: Metrics, mini: MiniBatch) -> EvalMeans:
        """Returns the means with one mini-batch more; its metrics are sums, and so counts are exact."""
        from raysvc.actors.worker.results import extreme_of, step_metrics

        assert mini.info is not None
        more, count = mini.info.denominators, max(self._count(mini), 1)
        metrics = {name: one if extreme_of(name) else one / count for name, one in metrics.items()}
        means = step_metrics(
            [self.means, metrics], [mean_count(one, self.mean) for one in (self.counts, more)]
        )
        return replace(self, counts=self.counts.plus(more), means=means)

    def to_json(self) -> dict[str, Any]:
        """Counts, `loss` and the metrics of the objective; None where there is nothing to divide by."""
        units = {self.unit: self.counts.groups} if self.unit else {}
        there = mean_count(self.counts, self.mean) > 0
        means = {name: float(f"{value:.{DIGITS}g}") for name, value in self.means.items() if there}
        return {"rows": self.counts.rows, **units, "targets": self.counts.tokens, "loss": None, **means}

    def _count(self, mini: MiniBatch) -> int:
        assert mini.info is not None, "a mini-batch that has not arrived has no counts"
        return mean_count(mini.info.denominators, self.mean)


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
        start: what their figures begin with.
    """

    names: tuple[str, ...]
    every: int | None
    stop: int
    start: EvalSums | EvalMeans = EvalSums()

    @classmethod
    def of(cls, job: JobConfig, stop: int) -> Evals:
        """Those of a job whose run has `stop` steps."""
        trainer = job.trainer
        by_tokens = trainer.objective == "sft"
        start = EvalSums() if by_tokens else EvalMeans(mean_of(trainer), unit_of(trainer))
        return cls(tuple(job.evals), trainer.eval_every_steps, stop, start)

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
            found = evaluate(dispatch, group, client.eval(name), progress, self.start)
            yield {"eval": name, **found.to_json(), "eval_s": round(time.perf_counter() - begin, 6)}


def evaluate(
    dispatch: WorkerDispatch,
    group: str,
    stream: EvalStream,
    progress: Progress,
    figures: EvalSums | EvalMeans,
) -> EvalSums | EvalMeans:
    """The figures of all rows of one eval."""
    done = 0
    asked: deque[tuple[MiniBatch, Pending[Any]]] = deque()

    def add() -> None:
        nonlocal figures, done
        mini, answer = asked.popleft()
        figures, done = figures.plus(answer.result(), mini), done + 1
        told = figures.to_json()
        facts = {name: round(told[name], 4) for name in SHOWN if isinstance(told.get(name), float)}
        progress(Tick(f"eval {stream.name}", done, len(stream), "steps", facts, final=done == len(stream)))

    for step in stream:
        (mini,) = step.mini_batches
        asked.append((mini, figures.ask(dispatch, group, mini)))
        if len(asked) == AHEAD:
            add()
    while asked:
        add()
    return figures
