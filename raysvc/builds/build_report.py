"""Defines what a user is told of a build, made of the receipts of its slices; stored with the entry.

Always true:
- a build whose row counts do not balance, or of which too many rows were quarantined, has no report.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from raysvc.builds.build_plan import BuildPlan
from raysvc.builds.mixed_job import paths_of
from raysvc.cache.entry import Entry
from raysvc.cache.manifest import Manifest
from raysvc.cache.writer import EntryWriter
from raysvc.chat.row_counts import Quarantined, RowCounts, check_quarantine, shown_reasons
from raysvc.errors import SourceError
from raysvc.job.config import JobConfig
from raysvc.pipelines.sources.slices import place_of_row

if TYPE_CHECKING:
    from raysvc.cache.manifest import Receipt
    from raysvc.pipelines.sources.source import Source

EXAMPLES_KEPT = 200


def make_report(
    job: JobConfig, plan: BuildPlan, writer: EntryWriter, receipts: Sequence[Receipt], seconds: float
) -> dict[str, Any]:
    """Returns what the user is told of a build; stored with the entry.

    Raises:
        QuarantineExceeded: more rows than `max_quarantine` could not be verified.
        SourceError: no row is left.
    """
    row_counts = sum((RowCounts(**one.meta["row_counts"]) for one in receipts), RowCounts())
    row_counts.check()
    examples = [item for one in receipts for item in one.meta["examples"]]
    check_share(job, {"row_counts": row_counts.to_json(), "examples": examples}, plan.source)
    if row_counts.rows_written == 0:
        left_out = {**row_counts.dropped, **row_counts.quarantined}
        reasons = shown_reasons(left_out, [Quarantined(**item) for item in examples]) or "none were read"
        raise SourceError(
            "source", f"no row is left to train on: {reasons}", "check train_on, max_length and truncation"
        )
    return {
        **known_before(job, plan),
        "row_counts": row_counts.to_json(),
        "examples": _of_each_reason(examples, EXAMPLES_KEPT),
        "verification": {
            "rows_compared_with_the_reference": sum(int(one.meta["sampled"]) for one in receipts),
            "switched_to_the_reference": sorted({str(one.meta["switched"]) for one in receipts} - {""}),
        },
        "left_out": sorted({name for one in receipts for name in one.meta.get("left_out", ())}),
        "text_widths": _widest(receipts),
        "encoders": dict(Counter(str(one.meta["encoder"]) for one in receipts)),
        "seconds": round(seconds, 3),
        "length_percentiles": percentiles(_entry(writer, receipts).lengths_by_slice()),
    }


def known_before(job: JobConfig, plan: BuildPlan) -> dict[str, Any]:
    """The part of a report that is known before a row is tokenized."""
    return {
        "tokenizer": job.tokenizer.model_dump(mode="json"),
        "format": plan.seen,
        "pad_token_id": _pad_token_id(plan.tokenizer.hf),
        "vocab_size": len(plan.tokenizer.hf),
        "source_bytes": plan.source.num_bytes,
        "source_rows": [piece.num_rows for piece in plan.source.slices],
        "paths": list(paths_of(job)),
    }


def _of_each_reason(examples: Sequence[Mapping[str, Any]], most: int) -> list[Mapping[str, Any]]:
    """At most so many examples, as evenly of all reasons as there are some; in their order."""
    seen: Counter[str] = Counter()
    ranked = []
    for place, one in enumerate(examples):
        ranked.append((seen[one["reason"]], place))
        seen[one["reason"]] += 1
    return [examples[place] for place in sorted(place for _, place in sorted(ranked)[:most])]


def _widest(receipts: Sequence[Receipt]) -> dict[str, int]:
    """Carried column of text -> characters of its longest value."""
    widths: dict[str, int] = {}
    for one in receipts:
        for name, width in one.meta.get("text_widths", {}).items():
            widths[name] = max(widths.get(name, 0), width)
    return widths


def _pad_token_id(hf: Any) -> int:
    """Returns what fills padding cells; any id will do, since no cell of padding is attended to or trained."""
    candidates = (hf.pad_token_id, hf.eos_token_id, 0)
    return next(int(one) for one in candidates if one is not None)


def check_share(job: JobConfig, report: Mapping[str, Any], source: Source | None = None) -> None:
    """Refuse a report of more quarantined rows than a job allows.

    Args:
        source: of the rows, to say where one lies.

    Raises:
        QuarantineExceeded: with the reasons and examples.
    """
    examples = [Quarantined(**item) for item in report["examples"]]
    check_quarantine(
        RowCounts(**report["row_counts"]),
        examples,
        job.max_quarantine,
        lambda row: "" if source is None else place_of_row(source.slices, row),
    )


def percentiles(lengths: Iterable[npt.NDArray[np.int32]]) -> dict[str, int]:
    """Tokens per row at some shares of the rows, as `np.percentile` has them; the arrays are counted one after the other."""
    names = {"min": 0, "p50": 50, "p90": 90, "p99": 99, "max": 100}
    counts = np.zeros(0, np.int64)
    for some in lengths:
        here = np.bincount(some)
        if len(here) > len(counts):
            counts = np.append(counts, np.zeros(len(here) - len(counts), np.int64))
        counts[: len(here)] += here
    ends = np.cumsum(counts)
    return {name: _at_share(ends, q / 100) for name, q in names.items()} if len(ends) else {}


def _at_share(ends: npt.NDArray[np.int64], share: float) -> int:
    """The length between whose two neighbours the share lies; `ends` says how many rows have at most each length."""
    place = (int(ends[-1]) - 1) * share
    low, high = (int(np.searchsorted(ends, at, side="right")) for at in (math.floor(place), math.ceil(place)))
    part = place - math.floor(place)
    return int(high - (high - low) * (1 - part) if part >= 0.5 else low + (high - low) * part)


def _entry(writer: EntryWriter, receipts: Sequence[Receipt]) -> Entry:
    parts = tuple(one.part for one in receipts)
    return Entry(writer.store, writer.folder, Manifest(writer.key, parts, receipts[0].columns, {}))
