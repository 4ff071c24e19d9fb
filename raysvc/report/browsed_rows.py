"""Chooses the rows of an entry that a page lists, and those of which it holds the text.

Always true:
- a page lists all rows of an entry with at most `LISTED` rows of `LISTED_TOKENS` tokens, else some, evenly spread;
- the texts that it holds have some `BROWSED_TOKENS` tokens, however many rows there are.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from heapq import nlargest
from typing import TYPE_CHECKING, Any

import numpy as np

from raysvc.inspect.row_view import row_picture
from raysvc.media.medium import TOKENS
from raysvc.ragged import Int64s
from raysvc.report.browse import END_TOKENS, BrowsedRow, BrowsedRows
from raysvc.row_ids import split

if TYPE_CHECKING:
    import numpy.typing as npt

    from raysvc.builds.cache_entry import CacheEntry

LISTED = 200_000
LISTED_TOKENS = 200_000_000
READ_TOKENS = 8_000_000  # at a time
BROWSED_TOKENS = 2_000_000
ROW_TOKENS = 40  # what a row takes beside its tokens, in tokens
LEAST_BROWSED = 200
ENDS = 100  # longest rows, shortest ones, and ones of the highest loss
OF_A_SOURCE = 20


@dataclass(frozen=True)
class SeenRows:
    """Holds what reading the rows of an entry told.

    Attributes:
        row_ids: int64 [N], of the rows that are listed, in the order of the entry.
        lengths: int32 [N].
        trained: int64 [N], tokens with loss.
        with_media: ids of those that have media.
    """

    row_ids: Int64s
    lengths: npt.NDArray[np.int32]
    trained: Int64s
    with_media: Sequence[int]


def seen_rows(
    entry: CacheEntry, rows: Int64s, lengths: npt.NDArray[np.int32], losses: Mapping[int, float]
) -> SeenRows:
    """Reads the rows that are listed, some millions of tokens at a time."""
    mean = max(float(lengths.mean()), 1.0)
    places = spread(len(rows), min(LISTED, int(LISTED_TOKENS / mean)))
    if len(places) < len(rows):
        places = sorted({*places, *_ends(rows, lengths, losses)})
    listed = np.array(places, np.int64)
    each = max(int(READ_TOKENS / mean), 1)
    trained, media = [], []
    for first in range(0, len(listed), each):
        batch = entry.rows.read(rows[listed[first : first + each]])
        mask = np.concatenate([[0], np.cumsum(batch.tokens["loss_mask"], dtype=np.int64)])
        trained.append(mask[batch.offsets[1:]] - mask[batch.offsets[:-1]])
        if (counts := batch.rows.get(TOKENS)) is not None:
            media += batch.row_ids[np.flatnonzero(counts)].tolist()
    return SeenRows(rows[listed], lengths[listed], np.concatenate(trained), media)


def browsed_rows(
    entry: CacheEntry, seen: SeenRows, losses: Mapping[int, float], steps: Mapping[int, Sequence[int]]
) -> BrowsedRows:
    """All rows that were seen, with the text of those that one looks for and of as many others as there is room for."""
    source = split(seen.row_ids).source if entry.sources else np.zeros(len(seen.row_ids), np.int64)
    chosen = seen.row_ids[_chosen(seen, source, losses)]
    batch, tokenizer = entry.rows.read(chosen), entry.tokenizer
    ids: npt.NDArray[Any] = batch.tokens["input_ids"]
    mask: npt.NDArray[Any] = batch.tokens["loss_mask"]
    bounds = batch.offsets.tolist()
    texts = {}
    for number, row_id in enumerate(chosen.tolist()):
        cells = slice(bounds[number], bounds[number + 1])
        picture = row_picture(row_id, ids[cells].tolist(), mask[cells].tolist(), tokenizer)
        texts[row_id] = BrowsedRow(picture, _marked(ids[cells], mask[cells]))
    used = {token if token >= 0 else ~token for row in texts.values() for token in row.ids}
    return BrowsedRows(
        row_ids=seen.row_ids.tolist(),
        lengths=seen.lengths.tolist(),
        trained=seen.trained.tolist(),
        source=source.tolist(),
        sources=entry.sources or ("rows",),
        texts=texts,
        losses=losses,
        steps=steps,
        pieces={token: str(tokenizer.decode([token])) for token in sorted(used)},
    )


def _chosen(seen: SeenRows, source: Int64s, losses: Mapping[int, float]) -> list[int]:
    """Places of the rows whose text is shown."""
    count, cut = len(seen.row_ids), np.minimum(seen.lengths, 2 * END_TOKENS)
    room = BROWSED_TOKENS / (ROW_TOKENS + float(cut.mean()))
    chosen = set(spread(count, max(LEAST_BROWSED, int(room))))
    if len(chosen) < count:
        chosen.update(_ends(seen.row_ids, seen.lengths, losses))
        for number in np.unique(source).tolist():
            there = np.flatnonzero(source == number)
            chosen.update(there[spread(len(there), OF_A_SOURCE)].tolist())
    return sorted(chosen)


def _ends(rows: Int64s, lengths: npt.NDArray[np.int32], losses: Mapping[int, float]) -> list[int]:
    """Places of the longest rows, the shortest, and those of the highest loss."""
    by_length = np.argsort(lengths, kind="stable")
    worst = np.flatnonzero(np.isin(rows, nlargest(ENDS, losses, key=lambda row: losses[row])))
    return [*by_length[:ENDS].tolist(), *by_length[-ENDS:].tolist(), *worst.tolist()]


def _marked(ids: npt.NDArray[np.int32], mask: npt.NDArray[np.uint8]) -> list[int]:
    """The ids of a row without its middle, where it is long; one with loss as -id - 1."""
    marked: list[int] = np.where(mask != 0, -ids - 1, ids).tolist()
    return marked if len(marked) <= 2 * END_TOKENS else [*marked[:END_TOKENS], *marked[-END_TOKENS:]]


def spread(count: int, most: int) -> list[int]:
    """Returns at most `most` numbers below `count`, evenly spread."""
    take = min(count, most)
    return [index * count // take for index in range(take)]
