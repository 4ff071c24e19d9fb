"""Rows of a job's source as text, for those that an entry left out: it keeps their numbers, and not what they hold.

Always true:
- a text is of the bytes that the entry was built from: of a source that is gone, or is another by now, that is said in place of it;
- no text is longer than `TEXT_CHARS`, and what is read for all of them is at most `READ_SLICES` slices.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from raysvc.errors import RaysvcError

if TYPE_CHECKING:
    from raysvc.builds.cache_entry import CacheEntry
    from raysvc.cache.entry import Entry
    from raysvc.chat.source.json_rows import SourceRow
    from raysvc.job.config import JobConfig

TEXT_CHARS = 4000
READ_SLICES = 16  # of 32 MB at most


def with_texts(job: JobConfig, entry: CacheEntry, rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Rows that were left out, each with `text`: what it holds, or why that is not told.

    Args:
        rows: `source_row` and, in a mixture, `dataset` of each.
    """
    from raysvc.builds.mixed_job import jobs_of

    texts: dict[tuple[str, int], str] = {}
    for (name, its), one in zip(jobs_of(job).items(), entry.entries, strict=True):
        numbers = {row["source_row"] for row in rows if row.get("dataset", "") == name}
        if numbers:
            found = _texts(its, one, numbers)
            texts.update({(name, number): text for number, text in found.items()})
    nothing = "(its text is not read for this page)"
    return [{**row, "text": texts.get((row.get("dataset", ""), row["source_row"]), nothing)} for row in rows]


def source_text(row: SourceRow) -> str:
    """A row as JSON; of one that is none, its line, where it has one."""
    if row.data is not None:
        return json.dumps(row.data, ensure_ascii=False, default=_plain)
    return (row.line or b"(it has no text)").decode(errors="replace")


def _texts(job: JobConfig, entry: Entry, numbers: set[int]) -> dict[int, str]:
    """Number -> text of some rows of one source."""
    if job.source.ray is not None:
        return dict.fromkeys(numbers, "(its text is not here: rows come from a Ray Dataset)")
    try:
        return {row.source_row: _cut(source_text(row)) for row in _rows(job, entry, numbers)}
    except (RaysvcError, OSError) as error:
        return dict.fromkeys(numbers, f"(its text cannot be read any more: {error})")


def _rows(job: JobConfig, entry: Entry, numbers: set[int]) -> Iterator[SourceRow]:
    from raysvc.api import cache_root
    from raysvc.builds.build_plan import source_of
    from raysvc.cache.store.open import open_store
    from raysvc.errors import SourceError
    from raysvc.pipelines.reading.readers import read_rows

    source = source_of(job, open_store(cache_root(job), job.cache.storage_options, job.cache.unsafe_store))
    if source.identity != entry.recipe.get("source") and not job.source.follow:
        raise SourceError("source", "holds other rows now", "restore it to see what was left out")
    read = 0
    for piece in source.slices:
        rows = range(piece.first_row, piece.first_row + piece.num_rows)
        if read < READ_SLICES and any(number in rows for number in numbers):
            read += 1
            yield from (
                row for row in read_rows(piece, job.source.storage_options) if row.source_row in numbers
            )


def _cut(text: str) -> str:
    return (
        text
        if len(text) <= TEXT_CHARS
        else f"{text[:TEXT_CHARS]}… ({len(text) - TEXT_CHARS:,} more characters)"
    )


def _plain(value: object) -> str:
    return f"{len(value):,} bytes" if isinstance(value, bytes) else str(value)
