"""Chooses the rows of an entry that a page lists, and those whose tokens it holds.

Axes: N rows that are listed, T tokens that are held.
Always true:
- a page lists all rows of an entry with at most `LISTED` rows of `LISTED_TOKENS` tokens, else some, evenly spread;
- it holds the tokens of all of them where these are at most `HELD_TOKENS`, else some `HELD_TOKENS`: every row that one looks for
  first, and others, evenly spread;
- of a long row it holds the first and the last `END_TOKENS`;
- it lists both rows of a pair, and holds the tokens of both, or of none.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass
from heapq import nlargest
from typing import TYPE_CHECKING, Any

import numpy as np

from raysvc.chat.tokens.token_bytes import bytes_of_tokens
from raysvc.job.config import PAIRED
from raysvc.media.medium import TOKENS
from raysvc.ragged import Int64s, cells_of_runs
from raysvc.report.browse import BrowsedRows
from raysvc.row_ids import split

if TYPE_CHECKING:
    import numpy.typing as npt

    from raysvc.builds.cache_entry import CacheEntry

LISTED = 200_000
LISTED_TOKENS = 200_000_000
READ_TOKENS = 8_000_000  # at a time
HELD_TOKENS = 24_000_000  # 100,000 rows of GSM8K; some 20 MB of a page
END_TOKENS = 2048
LEAST_HELD = 200
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
        kept: int64 [N], how many of its tokens are held.
        ids: int32 [T], those tokens, row after row.
        hits: bool [T], which of them have loss.
        roles: [N], what each row is in its pair; empty where rows are no pairs.
    """

    row_ids: Int64s
    lengths: npt.NDArray[np.int32]
    trained: Int64s
    with_media: Sequence[int]
    kept: Int64s
    ids: npt.NDArray[np.int32]
    hits: npt.NDArray[np.bool_]
    roles: Sequence[str] = ()


def seen_rows(
    entry: CacheEntry, rows: Int64s, lengths: npt.NDArray[np.int32], losses: Mapping[int, float]
) -> SeenRows:
    """Reads the rows that are listed, some millions of tokens at a time."""
    mean = max(float(lengths.mean()), 1.0)
    places = spread(len(rows), min(LISTED, int(LISTED_TOKENS / mean)))
    if len(places) < len(rows):
        places = _whole(entry, {*places, *_ends(rows, lengths, losses)})
    listed = np.array(places, np.int64)
    kept = kept_tokens(entry, rows[listed], lengths[listed], losses)
    each = max(int(READ_TOKENS / mean), 1)
    trained, media, ids, hits = [], [], [], []
    roles: list[str] = []
    for first in range(0, len(listed), each):
        batch = entry.rows.read(rows[listed[first : first + each]])
        hit = batch.tokens["loss_mask"] != 0
        before = np.concatenate([[0], np.cumsum(hit, dtype=np.int64)])
        trained.append(before[batch.offsets[1:]] - before[batch.offsets[:-1]])
        cells = held_cells(batch.offsets, kept[first : first + each])
        ids.append(batch.tokens["input_ids"][cells])
        hits.append(hit[cells])
        if (counts := batch.rows.get(TOKENS)) is not None:
            media += batch.row_ids[np.flatnonzero(counts)].tolist()
        roles += _roles(entry, batch.rows)
    return SeenRows(
        rows[listed], lengths[listed], np.concatenate(trained), media, kept, np.concatenate(ids), np.concatenate(hits), roles
    )  # fmt: skip


def browsed_rows(
    entry: CacheEntry,
    seen: SeenRows,
    num_rows: int,
    losses: Mapping[int, float],
    steps: Mapping[int, Sequence[int]],
    untrained: Mapping[int, str],
) -> BrowsedRows:
    """All rows that were seen, with the text of the tokens that are held."""
    tokenizer, used = entry.tokenizer, np.unique(seen.ids).tolist()
    special = {token for token, added in tokenizer.added_tokens_decoder.items() if added.special}
    return BrowsedRows(
        row_ids=seen.row_ids.tolist(),
        lengths=seen.lengths.tolist(),
        trained=seen.trained.tolist(),
        source=_sources(entry, seen.row_ids).tolist(),
        sources=entry.sources or ("rows",),
        kept=seen.kept.tolist(),
        ids=seen.ids,
        hits=seen.hits,
        pieces=_pieces(tokenizer, used),
        num_rows=num_rows,
        special=frozenset(special.intersection(used)),
        losses=losses,
        steps=steps,
        untrained=untrained,
        roles=seen.roles,
    )


def _pieces(tokenizer: Any, used: Sequence[int]) -> dict[int, bytes]:
    """Bytes of text of each token; what a tokenizer without a fast backend decodes it to."""
    from tokenizers.decoders import BPEDecoder, WordPiece

    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        return {token: str(tokenizer.decode([token])).encode() for token in used}
    if backend.decoder is None or isinstance(backend.decoder, WordPiece):  # it puts blanks between words
        return {token: _after_itself(tokenizer, token).encode() for token in used}
    if isinstance(backend.decoder, BPEDecoder):  # an end of a word is a blank
        names = tokenizer.convert_ids_to_tokens(used)
        texts = (name.replace(backend.decoder.suffix, " ") for name in names)
        return {token: text.encode() for token, text in zip(used, texts, strict=True)}
    pieces = bytes_of_tokens(tokenizer)
    return {token: pieces[token] if token < len(pieces) else b"" for token in used}


def _after_itself(tokenizer: Any, token: int) -> str:
    """The text of a token behind another one: ` word`, or the rest of a word."""
    return str(tokenizer.decode([token, token])).removeprefix(str(tokenizer.decode([token])))


def _sources(entry: CacheEntry, row_ids: Int64s) -> Int64s:
    return split(row_ids).source if entry.sources else np.zeros(len(row_ids), np.int64)


def kept_tokens(
    entry: CacheEntry, rows: Int64s, lengths: npt.NDArray[np.int32], losses: Mapping[int, float]
) -> Int64s:
    """Returns int64 [N], how many tokens of each row are held."""
    cut = np.minimum(lengths, 2 * END_TOKENS).astype(np.int64)
    if cut.sum() <= HELD_TOKENS:
        return cut
    chosen = {
        *spread(len(rows), max(LEAST_HELD, int(HELD_TOKENS / cut.mean()))),
        *_ends(rows, lengths, losses),
    }
    source = _sources(entry, rows)
    for number in np.unique(source).tolist():
        there = np.flatnonzero(source == number)
        chosen.update(there[spread(len(there), OF_A_SOURCE)].tolist())
    kept = np.zeros(len(rows), np.int64)
    held = _whole(entry, chosen)
    kept[held] = cut[held]
    return kept


def held_cells(offsets: Int64s, kept: Int64s) -> Int64s:
    """int64 [T], cells of the first and the last tokens of each row, as many as are held.

    >>> held_cells(np.array([0, 5, 7]), np.array([4, 2])).tolist()
    [0, 1, 3, 4, 5, 6]
    """
    first = (kept + 1) // 2
    starts = np.stack([offsets[:-1], offsets[1:] - (kept - first)], axis=1)
    return cells_of_runs(starts.reshape(-1), np.stack([first, kept - first], axis=1).reshape(-1))


def _are_pairs(entry: CacheEntry) -> bool:
    """Returns whether rows 2 p and 2 p + 1 are a pair."""
    return any(one.recipe.get("format") in PAIRED for one in entry.entries)


def _whole(entry: CacheEntry, places: Set[int]) -> list[int]:
    """These places, ascending, and those of the other rows of their pairs."""
    return sorted(places | {place ^ 1 for place in places} if _are_pairs(entry) else places)


def _roles(entry: CacheEntry, columns: Mapping[str, npt.NDArray[Any]]) -> list[str]:
    """What each row is in its pair, by the columns that its format gives it."""
    if not _are_pairs(entry):
        return []
    if "mismatched" not in columns:
        return ["chosen" if chosen else "rejected" for chosen in columns["chosen"].tolist()]
    labels = ["good" if label else "bad" for label in columns["label"].tolist()]
    return [
        "mismatched" if other else label for other, label in zip(columns["mismatched"], labels, strict=True)
    ]


def _ends(rows: Int64s, lengths: npt.NDArray[np.int32], losses: Mapping[int, float]) -> list[int]:
    """Places of the longest rows, the shortest, and those of the highest loss."""
    by_length = np.argsort(lengths, kind="stable")
    worst = np.flatnonzero(np.isin(rows, nlargest(ENDS, losses, key=lambda row: losses[row])))
    return [*by_length[:ENDS].tolist(), *by_length[-ENDS:].tolist(), *worst.tolist()]


def spread(count: int, most: int) -> list[int]:
    """Returns at most `most` numbers below `count`, evenly spread."""
    take = min(count, most)
    return [index * count // take for index in range(take)]
