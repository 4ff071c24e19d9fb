"""Gathers what a report tells, from an entry, its plan and a run folder.

Always true:
- nothing is estimated: figures are counts of the entry, of the plan's steps, or lines of the run's own log;
- a section whose material is not there is absent.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from raysvc.builds.job_plan import report_of, untrained_rows
from raysvc.cache.key import rows_key
from raysvc.cache.store.open import absolute
from raysvc.collate.plan_report import PlanReport
from raysvc.feedback.feedback_log import FeedbackLog
from raysvc.inspect.left_out import steps_of_rows
from raysvc.inspect.row_media import ShownMedium, media_of_rows
from raysvc.inspect.source_texts import with_texts
from raysvc.job.objectives.units import UNITS
from raysvc.report.browse import BrowsedRows
from raysvc.report.browsed_rows import SeenRows, browsed_rows, seen_rows, spread
from raysvc.row_ids import split
from raysvc.trackers.tracker import without_secrets
from raysvc.training.run_folder import RunFolder
from raysvc.training.run_identity import KEYS, identity_in
from raysvc.training.run_job import given_fields

if TYPE_CHECKING:
    from raysvc.builds.cache_entry import CacheEntry
    from raysvc.job.config import JobConfig

MEDIA_ROWS = 12


@dataclass(frozen=True)
class Facts:
    """Material of one page.

    Attributes:
        title: of the page.
        overview: name -> value.
        lengths: source -> tokens of every row.
        trained: source -> share of tokens with loss, 0 to 1, of the listed rows.
        rows: of the entry, to look through.
        row_counts: the entry's row_counts.
        set_aside: quarantined examples, with the text that their source has of them.
        plan: for `dp_size` ranks; None where the source has no end.
        steps: lines of the run's metrics; empty without a run.
        evals: lines of the run's evals.
        run_dir: whose logs these are.
        command: that shows a row.
        summary: of the run; None without one.
        media: of some rows, by row number.
        decisions: of the run, in the order in which they were made.
        job: dotted key -> value of the fields that the job gives, without credentials.
    """

    title: str
    overview: Mapping[str, Any]
    lengths: Mapping[str, Sequence[float]]
    trained: Mapping[str, Sequence[float]]
    rows: BrowsedRows
    row_counts: Mapping[str, Any]
    set_aside: Sequence[Mapping[str, Any]]
    plan: PlanReport | None
    dp_size: int
    steps: Sequence[Mapping[str, Any]]
    summary: Mapping[str, Any] | None
    evals: Sequence[Mapping[str, Any]] = ()
    run_dir: str = ""
    command: str = "raysvc show"
    media: Mapping[int, Sequence[ShownMedium]] = field(default_factory=dict)
    decisions: Sequence[Mapping[str, Any]] = ()
    job: Mapping[str, Any] = field(default_factory=dict)


def gather(job: JobConfig, entry: CacheEntry, command: str = "raysvc show") -> Facts:
    """Everything that is known about a job: its entry, its plan and, where it ran, its run.

    Args:
        command: that shows a row of it, without the row.
    """
    folder = RunFolder(absolute(job.run_dir))
    steps = list(folder.lines(folder.metrics))
    report = entry.report
    lengths, rows = entry.rows.lengths(), entry.row_ids()
    other = _other_rows(folder, entry)
    losses = {} if other else _losses(job, len(steps))
    seen = seen_rows(entry, rows, lengths, losses)
    trained = {} if other else steps_of_rows(folder)
    has_end = not any(one.listings for one in entry.entries)
    return Facts(
        title=f"{job.server.name}: {folder.path.name}" if steps else job.server.name,
        overview={
            "source": entry.source,
            **_counted(entry, len(rows)),
            "tokens": entry.num_tokens,
            "trained on": job.train_on.replace("_", " "),
            "entry": entry.key[:16],
            "tokenized in": f"{report['seconds']:.1f} s",
            **({"run": str(folder.path)} if steps else {}),
            **({"rows of the run": other} if other else {}),
        },
        lengths=_by_source(entry, rows, lengths),
        trained=_by_source(entry, seen.row_ids, seen.trained / np.maximum(seen.lengths, 1)),
        rows=browsed_rows(
            entry,
            seen,
            len(rows),
            losses,
            trained,
            _untrained(job, entry, seen, trained, folder) if has_end else {},
        ),
        row_counts=report["row_counts"],
        set_aside=with_texts(job, entry, report["examples"]),
        plan=report_of(job, entry) if has_end else None,
        dp_size=job.trainer.dp_size,
        steps=steps,
        summary=folder.summary(),
        evals=list(folder.lines(folder.evals)),
        run_dir=str(folder.path),
        command=command,
        media=media_of_rows(
            entry, [seen.with_media[place] for place in spread(len(seen.with_media), MEDIA_ROWS)]
        ),
        decisions=_decisions(job),
        job=without_secrets(given_fields(job)),
    )


def _counted(entry: CacheEntry, num_rows: int) -> dict[str, int]:
    """The rows of an entry, or the pairs or examples of two rows each that they are."""
    unit = UNITS.get(str(entry.entries[0].recipe.get("format")))
    return {"rows": num_rows} if unit is None else {unit: num_rows // 2}


def newest_rate(steps: Sequence[Mapping[str, Any]], most: int = 20) -> float:
    """Trained tokens per second of the last steps together."""
    last = steps[-most:]
    return float(sum(step["tokens"] for step in last) / max(sum(step["step_s"] for step in last), 1e-9))


def worst_stalls(steps: Sequence[Mapping[str, Any]], most: int = 5) -> list[Mapping[str, Any]]:
    """The steps that waited longest for data, longest first; those that did not wait are left out."""
    waited = [step for step in steps if step["stall_s"] > 0.001]
    return sorted(waited, key=lambda step: -float(step["stall_s"]))[:most]


def _other_rows(folder: RunFolder, entry: CacheEntry) -> str:
    """Says so where a run trained rows of other entries, which have the same ids; "" where it did not."""
    trained = (identity_in(folder.path) or {}).get(KEYS) or ()
    pairs = zip(trained, entry.entries, strict=False)  # a mixture may have got more sources since
    other = next((key for key, one in pairs if key != rows_key(one.key, one.recipe)), "")
    return other and f"those of another entry, {other[:16]}, so their losses and steps are not told here"


def _feedback(job: JobConfig) -> FeedbackLog:
    return FeedbackLog(f"{absolute(job.run_dir)}/server/feedback", job.cache.storage_options)


def _losses(job: JobConfig, steps: int) -> dict[int, float]:
    """Row -> the loss that a run reported of it last, a mean over its targets where the run said how many there are.

    A row without a target has none: the loss of a pair is that of its first row.
    """
    log = _feedback(job)
    found = log.outcomes(0, steps, log.decisions())
    nothing = np.full(len(found.steps), np.nan)
    sums = found.columns.get("loss", nothing).astype(np.float64)
    targets = np.nan_to_num(found.columns.get("targets", nothing).astype(np.float64), nan=1.0)
    told = np.flatnonzero(np.isfinite(sums) & (targets > 0))
    return dict(zip(found.row_ids[told].tolist(), (sums[told] / targets[told]).tolist(), strict=True))


def _untrained(
    job: JobConfig, entry: CacheEntry, seen: SeenRows, trained: Mapping[int, Any], folder: RunFolder
) -> dict[int, str]:
    """Row that is listed -> why no step trains it, or that none of a run that is over has."""
    found = untrained_rows(job, entry, seen.row_ids, seen.lengths)
    if trained and folder.summary() is not None:
        found = {**dict.fromkeys(seen.row_ids.tolist(), "not reached by this run"), **found}
    return {row: why for row, why in found.items() if row not in trained}


def _decisions(job: JobConfig) -> list[dict[str, Any]]:
    """Lists from which step on there are other weights, and rows that are left out."""
    known = _feedback(job).decisions()
    return [{"step": one.from_step, "weights": one.weights, "skip_rows": one.skip_rows} for one in known]


def _by_source(
    entry: CacheEntry, rows: npt.NDArray[np.int64], values: npt.NDArray[Any]
) -> dict[str, Sequence[float]]:
    """Values of rows by the source they come from; one source is named `rows`."""
    if not entry.sources:
        return {"rows": values.tolist()}
    numbers = split(rows).source
    return {name: values[numbers == number].tolist() for number, name in enumerate(entry.sources)}
