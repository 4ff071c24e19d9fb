"""Writes down what a run does as it goes: rows, metrics and evals by step, and the summary at its end.

Always true:
- a line is in its file before the step is committed; trackers are told after that;
- who slept while another process took the folder logs and reports nothing;
- losses, rows and tokens of the summary are of the whole run, whatever processes it took; rates are of this one.
"""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from raysvc.client.meter import ROLE
from raysvc.collate.loss_weights import mean_count
from raysvc.errors import ConfigError
from raysvc.evals.eval_decisions import NOTHING_DECIDED, EvalDecisions
from raysvc.job.objectives.units import UNITS, count_of
from raysvc.metrics import record
from raysvc.progress import Progress, Tick
from raysvc.row_ids import written
from raysvc.trackers.reporter import Reporter
from raysvc.trackers.stalls import StallBook, StepTimes
from raysvc.training.loss_shares import LossShares, Shares
from raysvc.training.run_folder import LOGS, Checkpoint, RunFolder
from raysvc.training.step_log import NOTHING, StepLog

if TYPE_CHECKING:
    from raysvc.actors.worker.results import MiniResult
    from raysvc.builds.cache_entry import CacheEntry
    from raysvc.client.batch_client import BatchClient, Step
    from raysvc.job.config import Reduction


NO_METRICS = ("step", "eval", "rows", *UNITS.values(), "targets", "bytes", "eval_s")  # of a line of an eval
STEPS_OF_RATE = 20  # last ones, of which the time that is left follows


class RunLog:
    """The logs of a run, from a step on.

    Args:
        folder: of the run.
        checkpoint: where it goes on; None at the first step.
        stop: the step after the last one.
        progress: told of each step.
        reporter: told of each step, eval and checkpoint.
        steps_per_epoch: for the `epoch` that trackers show.
        shares: of a step's loss.
        mean: which one the loss of a mini-batch is.
        unit: what two rows are one of, as `pairs`; "": each row counts for itself.

    Raises:
        StateMismatch: a log is not what it was when the checkpoint was made.
    """

    def __init__(
        self,
        folder: RunFolder,
        checkpoint: Checkpoint | None,
        stop: int,
        progress: Progress,
        reporter: Reporter,
        steps_per_epoch: int,
        shares: LossShares,
        mean: Reduction,
        unit: str = "",
    ) -> None:
        self._progress, self._stop, self._folder = progress, stop, folder
        self._reporter, self._steps_per_epoch, self._shares = reporter, steps_per_epoch, shares
        self._mean: Reduction = mean
        self._unit = unit
        self._step_s = deque[float](maxlen=STEPS_OF_RATE)
        kept = {} if checkpoint is None else checkpoint.extents
        paths = (folder.rows, folder.metrics, folder.evals, folder.served)
        self._logs = {path.name: StepLog(path, kept.get(path.name, NOTHING)) for path in paths}
        self._rows, self._metrics, self._evals, self._served = self._logs.values()
        self.tokens = 0  # trained by this process
        self._seen: int = 0 if checkpoint is None else checkpoint.state["input_tokens"]

    def served(self, line: Mapping[str, Any]) -> None:
        """Write down how the steps from here on are made."""
        self._served.append(line)
        self._served.sync()

    def to_state(self) -> dict[str, Any]:
        """Returns what a checkpoint says of the logs, after making all lines survive a power cut."""
        for log in self._logs.values():
            log.sync()
        return {LOGS: {name: log.extent for name, log in self._logs.items()}, "input_tokens": self._seen}

    def step(self, step: Step, results: list[list[MiniResult]], step_s: float, times: StepTimes) -> None:
        """Write down a trained step; results[dp rank][optimizer step of it].

        Raises:
            FolderLost: another process trains in the folder by now.
        """
        self._folder.check_owner()
        from raysvc.actors.worker.results import reduce_metrics, reduce_timing, step_metrics

        infos = [mini.info for mini in step.optimizer_steps() if mini.info is not None]
        for index, info in enumerate(infos):
            line = {
                "step": step.index,
                "mini": index,
                "epoch": step.epoch,
                "row_ids": list(map(written, info.row_ids.tolist())),
            }
            self._rows.append(line)
        losses = [sum(rank[index].loss for rank in results) for index in range(len(infos))]
        tokens = sum(info.denominators.tokens for info in infos)
        self.tokens += tokens
        means = [mean_count(info.denominators, self._mean) for info in infos]
        loss, last = _mean(losses, means), results[0][-1]
        of_minis = [reduce_metrics([rank[index].metrics for rank in results]) for index in range(len(infos))]
        told = step_metrics(of_minis, means)
        counts = {"rows": sum(len(info.row_ids) for info in infos), "tokens": tokens, "minis": len(infos)}
        if self._unit:
            counts[self._unit] = sum(info.denominators.groups for info in infos)
        counts["input_tokens"] = sum(int(info.lengths.sum()) for info in infos)
        counts["cells"] = sum(info.num_cells for info in infos)
        self._seen += counts["input_tokens"]
        took: dict[str, Any] = {"step_s": round(step_s, 6), "stall_s": round(times.waited_s, 6)}
        if charged := times.charged():
            took["stall_by"] = {part: round(seconds, 6) for part, seconds in charged.items()}
        parts = [reduce_timing([rank[index].timing for rank in results]) for index in range(len(infos))]
        timing = {"timing": parts} if any(parts) else {}
        facts = {"loss": loss, "grad_norm": last.grad_norm, "lr": last.metrics["lr"]}
        shares = self._shares.of(results)
        self._metrics.append({"step": step.index, **facts, **told, **counts, **took, **timing, **shares})
        self._report(step.index + 1, facts, told, counts, step_s, times.waited_s, shares.get("by_source", {}))
        shown: dict[str, Any] = {
            "loss": round(loss, 4),
            "tokens/s": round(tokens / max(step_s, 1e-9)),
            "stall ms": round(times.waited_s * 1e3, 1),
        }
        self._step_s.append(step_s)
        left = self._stop - step.index - 1
        if left:
            shown["ETA"] = f"{left * statistics.median(self._step_s):.0f} s"
        self._progress(Tick("train", step.index + 1, self._stop, "steps", shown, final=not left))

    def evals(self, step: int, lines: Iterable[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
        """Write down what the evals say after `step`; returns that."""
        self._folder.check_owner()
        told = []
        for line in lines:
            self._evals.append({"step": step, **line})
            self._reporter.on_eval(step + 1, eval_metrics(line))
            told.append(line)
        return told

    def checkpoint(self, steps: int, folder: Path) -> None:
        """A checkpoint of so many steps is complete."""
        self._folder.check_owner()
        self._reporter.on_checkpoint(steps, str(folder))

    def close(self) -> None:
        """Close the files."""
        for log in self._logs.values():
            log.close()

    def _report(
        self,
        steps: int,
        facts: Mapping[str, float],
        told: Mapping[str, float],
        counts: Mapping[str, int],
        step_s: float,
        stall_s: float,
        by_source: Shares,
    ) -> None:
        """Tell the trackers, under the names of HF's Trainer and of TRL where they have one."""
        self._reporter.on_step(
            steps,
            {
                "loss": facts["loss"],
                "grad_norm": facts["grad_norm"],
                "learning_rate": facts["lr"],
                **told,
                "epoch": steps / self._steps_per_epoch,
                "num_input_tokens_seen": self._seen,
                "tokens_per_second": counts["tokens"] / max(step_s, 1e-9),
                "step_seconds": step_s,
                "stall_seconds": stall_s,
                "padding_share": 1.0 - counts["input_tokens"] / max(counts["cells"], 1),
                **{f"loss/{name}": nats / count for name, (nats, count) in by_source.items() if count},
            },
        )


def _mean(losses: Sequence[float], counts: Sequence[int]) -> float:
    """The loss of a step: over all its mini-batches together, each with the weights that it met."""
    return sum(loss * count for loss, count in zip(losses, counts, strict=True)) / max(sum(counts), 1)


def eval_metrics(line: Mapping[str, Any]) -> dict[str, float]:
    """Returns the metrics of a line of evals.jsonl, named as HF's Trainer names those of one of several eval
    datasets.
    """
    prefix, seconds = f"eval_{line['eval']}_", line["eval_s"]
    found = {name: value for name, value in line.items() if name not in NO_METRICS}
    found |= {"runtime": seconds, "samples_per_second": count_of(line).number / max(seconds, 1e-9)}
    return {prefix + name: float(value) for name, value in found.items() if value is not None}


def write_summary(
    folder: RunFolder,
    entry: CacheEntry,
    left_out: Mapping[str, Any],
    steps: int,
    resumed_from: int | None,
    loop_s: float,
    stalls: StallBook | None = None,
    tokens: int = 0,
    finished: bool = True,
    reporter: Reporter | None = None,
    decisions: EvalDecisions = NOTHING_DECIDED,
) -> dict[str, Any]:
    """Returns what a run says at its end, also to its trackers.

    Args:
        left_out: rows that were not trained, as `raysvc.inspect.left_out` finds them.
        finished: it has trained all its steps, or its evals stopped it.
        decisions: of its evals.

    Raises:
        ConfigError: the folder has no metrics.
        FolderLost: another process trains in it by now.
    """
    folder.check_owner()
    lines = list(folder.lines(folder.metrics))
    if not lines:
        raise ConfigError("trainer.run_dir", f"{folder.path} has no metrics.jsonl", "use another run_dir")
    best = min(lines, key=lambda line: float(line["loss"]))
    summary = {
        "steps": steps,
        "optimizer_steps": sum(line["minis"] for line in lines),
        "rows": sum(line["rows"] for line in lines),
        **{unit: sum(line[unit] for line in lines) for unit in UNITS.values() if unit in lines[0]},
        "tokens_trained": sum(line["tokens"] for line in lines),
        "loss_first": lines[0]["loss"],
        "loss_last": lines[-1]["loss"],
        "loss_best": best["loss"],
        "loss_best_step": best["step"],
        "tokens_per_s": round(tokens / loop_s, 1) if loop_s else 0.0,
        "stall_fraction": round(stalls.total_s / loop_s, 4) if loop_s and stalls else 0.0,
        "stalls": dict((stalls or StallBook()).summary()),
        "evals": {line["eval"]: line for line in folder.lines(folder.evals)},  # the last of each
        **decisions.to_summary(),
        "cache": entry.facts,
        "left_out": dict(left_out),
        "resumed_from": resumed_from,
        "model": str(folder.model) if finished and folder.model.exists() else None,
    }
    if reporter is not None:
        reporter.on_end(_end_metrics(lines, resumed_from or 0, loop_s), finished)
        if outcome := reporter.outcome():
            summary["report_to"] = outcome
    folder.write_summary(summary)
    return summary


def _end_metrics(lines: Sequence[Mapping[str, Any]], start: int, loop_s: float) -> dict[str, float]:
    """Returns what HF's Trainer says at its end; the loss of the whole run, rates of this process."""
    ours = [line for line in lines if line["step"] >= start]
    runtime_s = max(loop_s, 1e-9)
    return {
        "train_loss": sum(line["loss"] for line in lines) / len(lines),
        "train_runtime": loop_s,
        "train_steps_per_second": len(ours) / runtime_s,
        "train_samples_per_second": sum(line["rows"] for line in ours) / runtime_s,
    }


def observe_step(
    entry_uri: str,
    client: BatchClient,
    step: Step,
    results: Sequence[Sequence[MiniResult]],
    stall_s: float,
) -> StepTimes:
    """Record a step that all ranks have finished; returns what its stall verdict is made from.

    Args:
        entry_uri: where parts are read from.
        results: results[rank][mini].
        stall_s: nothing was computed because data was late.
    """
    server = client.lease.name
    for rank in results:
        record("stage_seconds", sum(mini.wait_s for mini in rank), server=server, role=ROLE)
        record("h2d_seconds", sum(mini.copy_s for mini in rank), server=server, role=ROLE)
        record("shard_bytes", sum(mini.nbytes for mini in rank), server=server, role=ROLE)
    copy_s = max((sum(mini.copy_s for mini in rank) for rank in results), default=0.0)
    # seconds of the server, where the step says them
    read_s, collate_s = step.read_s, step.collate_s
    scheme = entry_uri.partition("://")[0] if "://" in entry_uri else "file"
    times = StepTimes(step.index, stall_s, read_s, collate_s, copy_s, scheme, build_s=step.build_s)
    client.meter.stalled(times)
    return times
