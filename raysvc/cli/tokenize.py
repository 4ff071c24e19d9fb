"""`raysvc tokenize`: build a job's cache entry, or say that it is there."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

from raysvc.chat.row_counts import reasoning_remedy
from raysvc.cli.common import Address, AsJson, Job, Overrides, edge, emit
from raysvc.cli.view import View, print_table, printable
from raysvc.progress import how_many

if TYPE_CHECKING:
    from raysvc.builds.cache_entry import CacheEntry

EXAMPLES_SHOWN = 5


@edge
def tokenize(
    config: Job = "job.yaml",
    overrides: Overrides = None,
    address: Address = None,
    as_json: AsJson = False,
) -> None:
    """Tokenize a job's source into the cache.

    Example: raysvc tokenize job.yaml max_length=4096
    """
    from raysvc import api
    from raysvc.job.job_file import load_job

    job = load_job(config, overrides or ())
    with View() as view:
        entry = api.tokenize(job, address=address, progress=view)
    print(cache_line(entry), file=sys.stderr)
    if as_json:
        emit({"cache": entry.facts, "report": dict(entry.report)})
        return
    print_table("Tokenized", report_rows(entry))
    for example in entry.report["examples"][:EXAMPLES_SHOWN]:
        why = "; ".join(filter(None, (example["reason"], example["detail"])))
        print(printable(f"quarantined: row {example['source_row']}: {why}"))


def cache_line(entry: CacheEntry) -> str:
    """One line that says hit or miss, key and reason."""
    return f"cache {'hit' if entry.hit else 'miss'}: key={entry.key[:16]} ({entry.reason}) {entry.uri}"


def report_rows(entry: CacheEntry) -> dict[str, Any]:
    """The report as a person reads it."""
    from raysvc.chat.source.loss_flags import IGNORED

    report = entry.report
    row_counts = report["row_counts"]
    rows: dict[str, Any] = {"rows in": row_counts["rows_in"], "rows written": row_counts["rows_written"]}
    if "format" in report:
        rows["format"] = report["format"]
    left_out = report.get("left_out", [])
    keys = [name for name in left_out if name.startswith(IGNORED)]
    if columns := [name for name in left_out if name not in keys]:
        rows["columns left out"] = f"{', '.join(columns)} (source.carry takes them along)"
    if keys:
        rows["keys of messages that nothing reads"] = ", ".join(keys)
    rows |= {f"normalized: {change}": count for change, count in row_counts.get("normalized", {}).items()}
    rows |= {f"dropped: {reason}": count for reason, count in row_counts["dropped"].items()}
    rows |= {f"quarantined: {reason}": count for reason, count in row_counts["quarantined"].items()}
    if removed := row_counts.get("reasoning_removed", 0):
        rows["trained messages without their reasoning"] = f"{removed} ({reasoning_remedy(row_counts)})"
    if endless := row_counts.get("turns_without_end", 0):
        rows["trained turns without an end"] = (
            f"{endless}, in {how_many(row_counts['rows_without_end'], 'row')} no turn has one"
        )
    rows["rows truncated"] = row_counts.get("rows_truncated", 0)
    for name in ("trained", "context", "truncated"):
        rows[f"tokens {name}"] = row_counts[f"tokens_{name}"]
    rows["tokens per row"] = " ".join(
        f"{name} {value}" for name, value in report["length_percentiles"].items()
    )
    rows["encoder"] = ", ".join(
        f"{name} ({how_many(count, 'slice')})" for name, count in report["encoders"].items()
    )
    verification = report["verification"]
    rows["rows compared with the reference"] = verification["rows_compared_with_the_reference"]
    for reason in verification["switched_to_the_reference"]:
        rows["switched to the reference encoder"] = reason
    rows["seconds"] = report["seconds"]
    return rows
