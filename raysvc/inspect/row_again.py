"""One row of a job's source, read and tokenized again: for what an entry does not keep of its rows.

Always true:
- the row is made as a build makes it, from the bytes that the source has now.
"""

from __future__ import annotations

from itertools import islice
from typing import TYPE_CHECKING

from raysvc.errors import SourceError

if TYPE_CHECKING:
    from raysvc.chat.slice_tokenizer import SliceResult
    from raysvc.job.config import JobConfig


def tokenized_again(job: JobConfig, source_row: int) -> SliceResult:
    """What a build makes of one row.

    Args:
        job: of one source.
        source_row: its number in the source.

    Raises:
        SourceError: the row is not there, or the source cannot be read.
    """
    from raysvc.api import cache_root
    from raysvc.builds.build_plan import plan_build
    from raysvc.cache.store.open import open_store
    from raysvc.chat.slice_tokenizer import SliceTokenizer
    from raysvc.pipelines.reading.media_files import folder_of
    from raysvc.pipelines.reading.readers import read_rows
    from raysvc.pipelines.tokenize import desk_of

    plan = plan_build(job, open_store(cache_root(job), job.cache.storage_options, job.cache.unsafe_store))
    for piece in plan.source.slices:
        if piece.first_row <= source_row < piece.first_row + piece.num_rows:
            rows = read_rows(piece, job.source.storage_options)
            wanted = islice((row for row in rows if row.source_row == source_row), 1)
            desk = None
            if plan.processor is not None:
                desk = desk_of(plan.spec, None, job.source.storage_options, plan.processor)
                desk.folder_of = lambda number: folder_of(piece.path_of(number))  # noqa: B023  run at once
            return SliceTokenizer(plan.spec, tokenizer=plan.tokenizer, desk=desk).run(wanted)
    raise SourceError("source", f"there is no row {source_row}", "look whether its files were changed")
