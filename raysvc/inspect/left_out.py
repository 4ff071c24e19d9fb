"""Finds what of a source a run did not train, and why: rows that are not in the entry, or not whole, and rows in no step.

Always true:
- every row of the entry that the run's row log does not name is counted once, under one reason;
- that is done at the end of a run, so it is left out where it would take more than seconds, and the result says so.
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Any

import numpy as np

from raysvc.builds.job_plan import untrained_rows
from raysvc.errors import StateMismatch
from raysvc.job.objectives.units import UNITS
from raysvc.row_ids import parse

if TYPE_CHECKING:
    from raysvc.builds.cache_entry import CacheEntry
    from raysvc.job.config import JobConfig
    from raysvc.training.run_folder import RunFolder

COUNTED_ROWS = 2_000_000  # of an entry
COUNTED_BYTES = 50_000_000  # of a row log: some 4 million rows


def left_out(job: JobConfig, entry: CacheEntry, folder: RunFolder) -> dict[str, Any]:
    """Returns which rows of the source are not in the entry, or not whole, or in no step; empty while a build is going on.

    Returns:
        `dropped`, `quarantined` and `untrained`: reason -> rows, the last one None where entry or log are too large to count;
        which counts in `unit`: rows, or what two of them are one of; `truncated`: rows; `example`: the first quarantined row, or None.

    Raises:
        StateMismatch: the row log is not what was written.
    """
    report = entry.report
    if "row_counts" not in report:
        return {}
    counts, examples = report["row_counts"], report["examples"]
    example = None
    if examples:
        why = "; ".join(filter(None, (examples[0]["reason"], examples[0]["detail"])))
        source = f"{name}:" if (name := examples[0].get("dataset")) else ""
        example = f"row {source}{examples[0]['source_row']}: {why}"
    return {
        "dropped": dict(counts["dropped"]),
        "quarantined": dict(counts["quarantined"]),
        "truncated": counts.get("rows_truncated", 0),
        "untrained": _untrained(job, entry, folder),
        "unit": UNITS.get(str(entry.entries[0].recipe.get("format")), "rows"),
        "example": example,
    }


def steps_of_rows(folder: RunFolder) -> dict[int, list[int]]:
    """Row -> the steps that trained it.

    Raises:
        StateMismatch: the row log is not what was written.
    """
    found: dict[int, list[int]] = {}
    try:
        for line in folder.lines(folder.rows):
            for row in line["row_ids"]:
                found.setdefault(parse(row), []).append(int(line["step"]))
    except StateMismatch:  # a ValueError, which says itself what to do
        raise
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        what = f"holds what no run writes ({error})"
        raise StateMismatch(
            str(folder.rows), what, "restore it, or remove it: steps of rows are then not told"
        ) from error
    return found


def _untrained(job: JobConfig, entry: CacheEntry, folder: RunFolder) -> dict[str, int] | None:
    """Reason -> rows of the entry that the run has not trained; None: there are too many to count."""
    logged = folder.rows.stat().st_size if folder.rows.is_file() else 0
    if entry.num_rows > COUNTED_ROWS or logged > COUNTED_BYTES:
        return None
    rows, lengths = entry.row_ids(), entry.rows.lengths()
    trained = np.fromiter(steps_of_rows(folder), np.int64)
    other = ~np.isin(rows, trained)
    reasons = Counter(untrained_rows(job, entry, rows[other], lengths[other]).values())
    if rest := int(other.sum()) - reasons.total():
        reasons["not reached"] = rest
    of_unit = 2 if entry.entries[0].recipe.get("format") in UNITS else 1
    return {why: -(-count // of_unit) for why, count in reasons.items()}
