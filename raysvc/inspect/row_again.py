"""One row of a job's source, read and tokenized again: for what an entry does not keep of its rows.

Always true:
- the row is made as a build makes it, from the bytes that the source has now.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from raysvc.errors import SourceError

if TYPE_CHECKING:
    from raysvc.chat.sequence import Sequence
    from raysvc.chat.slice_tokenizer import SliceResult
    from raysvc.chat.source.json_rows import SourceRow
    from raysvc.inspect.row_view import RowPicture
    from raysvc.job.config import JobConfig


@dataclass(frozen=True)
class RowAgain:
    """One source row and what becomes of it.

    Attributes:
        row: as its file has it.
        place: in its file, in words.
        result: a slice of this row alone.
        pictures: what is written of it, one for each of its sequences; empty where it is left out.
        texts: what is rendered of it, with spans as far as these are known; empty where nothing can be rendered.
    """

    row: SourceRow
    place: str
    result: SliceResult
    pictures: list[RowPicture]
    texts: list[Sequence]


def tokenized_again(job: JobConfig, source_row: int) -> RowAgain:
    """Makes one row as a build makes it.

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
    from raysvc.inspect.row_view import row_picture
    from raysvc.pipelines.reading.media_files import folder_of
    from raysvc.pipelines.reading.readers import read_rows
    from raysvc.pipelines.sources.slices import place_of_row
    from raysvc.pipelines.tokenize import desk_of

    plan = plan_build(job, open_store(cache_root(job), job.cache.storage_options, job.cache.unsafe_store))
    for piece in plan.source.slices:
        if piece.first_row <= source_row < piece.first_row + piece.num_rows:
            rows = read_rows(piece, job.source.storage_options)
            row = next((row for row in rows if row.source_row == source_row), None)
            if row is None:
                raise SourceError(
                    "source", f"row {source_row} is an empty line", "give the number of another row"
                )
            desk = None
            if plan.processor is not None:
                desk = desk_of(plan.spec, None, job.source.storage_options, plan.processor)
                desk.folder_of = lambda number: folder_of(piece.path_of(number))  # noqa: B023  run at once
            tokenizer = SliceTokenizer(plan.spec, tokenizer=plan.tokenizer, desk=desk)
            result = tokenizer.run([row])
            columns = (result.table[name].to_pylist() for name in ("input_ids", "loss_mask"))
            hf = tokenizer.tokenizer.hf
            pictures = [row_picture(source_row, ids, mask, hf) for ids, mask in zip(*columns, strict=True)]
            place = place_of_row(plan.source.slices, source_row)
            return RowAgain(row, place, result, pictures, tokenizer.rendered(row))
    last = max((piece.first_row + piece.num_rows for piece in plan.source.slices), default=0) - 1
    raise SourceError("source", f"there is no row {source_row}", f"its rows have the numbers 0 to {last}")
