"""The media of encoded rows: where their tokens lie, what is left of them, and the columns that say so.

Axes: N sequences, K after what is not written is left out.
1. The media tokens of a row are those of its media, as many as the processor says, in their order.
2. A row that truncation would cut inside of a medium is dropped; media behind the cut are left out.

Always true:
- a row without media holds no media token;
- a medium in column `media` has all its tokens in the row.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import islice

import numpy as np
import pyarrow as pa

from raysvc.chat.row_errors import RowDropped, RowFault
from raysvc.chat.sequence import Sequence
from raysvc.chat.source.examples import ChatExample
from raysvc.chat.source.media_parts import plain_media
from raysvc.chat.tokens.token_rows import TokenRows
from raysvc.chat.tokens.tokenizer import LoadedTokenizer
from raysvc.media.decoding import all_decoded
from raysvc.media.kinds import WORDS, Kind
from raysvc.media.media_desk import MediaDesk
from raysvc.media.media_processor import MediaProcessor
from raysvc.media.medium import COLUMN, PATCHES, TOKENS, Medium, text_of

FIELDS = [pa.field(COLUMN, pa.string()), pa.field(TOKENS, pa.int32()), pa.field(PATCHES, pa.int32())]
SAMPLED = 2  # rows with media of a chunk that are given to the processor itself
Media = list[tuple[Medium, ...]]


def place_media(
    flat: list[Sequence], tokens: TokenRows, processor: MediaProcessor, cut_at: int | None
) -> Media:
    """The media of N sequences; what is wrong with one is added to the faults of `tokens`.

    Args:
        flat: the sequences.
        tokens: of them.
        processor: that made their texts.
        cut_at: tokens of a row that are kept; None: all.
    """
    where = {kind: np.flatnonzero(tokens.ids == token) for kind, token in processor.token_ids.items()}
    bounds = {kind: np.searchsorted(found, tokens.offsets).tolist() for kind, found in where.items()}
    media: Media = []
    for place, sequence in enumerate(flat):
        own = {
            kind: (found[bounds[kind][place] : bounds[kind][place + 1]] - tokens.offsets[place]).tolist()
            for kind, found in where.items()
        }
        there = sequence.media or any(own.values())
        media.append(_placed(sequence, own, place, tokens, cut_at) if there else ())
    return media


def _placed(
    sequence: Sequence,
    own: dict[Kind, list[int]],
    place: int,
    tokens: TokenRows,
    cut_at: int | None,
) -> tuple[Medium, ...]:
    for kind, there in own.items():
        counts = [one.tokens for one in sequence.media if one.kind == kind]
        if sum(counts) != len(there) or not all(counts):
            why = f"the tokens of {WORDS[kind].many} are not as many as the processor says"
            tokens.faults.setdefault(place, RowFault(why, f"{len(there)} instead of {sum(counts)}"))
            return ()
    left, found = {kind: iter(there) for kind, there in own.items()}, []
    for medium in sequence.media:
        places = list(islice(left[medium.kind], medium.tokens))
        first, last = places[0], places[-1]
        if cut_at is not None and last >= cut_at:
            if first < cut_at:
                why = f"max_length cuts through {WORDS[medium.kind].one}"
                tokens.faults.setdefault(place, RowDropped(why))
            continue
        found.append(Medium(at=first, **medium._asdict()))
    return tuple(found)


def media_arrays(media: Iterable[tuple[Medium, ...]]) -> dict[str, pa.Array]:
    """Name -> [K], the columns."""
    rows = list(media)
    return {
        COLUMN: pa.array([text_of(each) for each in rows], pa.string()),
        TOKENS: pa.array([sum(one.tokens for one in each) for each in rows], pa.int32()),
        PATCHES: pa.array([sum(one.patches for one in each) for each in rows], pa.int32()),
    }


def sampled_places(flat: list[Sequence], seed: int) -> list[int]:
    """Some sequences with media, others for every seed."""
    there = [place for place, sequence in enumerate(flat) if sequence.media]
    count = min(SAMPLED, len(there))
    return sorted(np.random.default_rng(seed).choice(there, count, replace=False).tolist()) if count else []


def true_ids(sequence: Sequence, tokenizer: LoadedTokenizer, desk: MediaDesk) -> list[int]:
    """Returns what the processor itself makes of the conversation and the decoded media."""
    example = sequence.example
    assert isinstance(example, ChatExample)
    text = tokenizer.reference_text(plain_media(example.messages), example.tools, example.prompt)
    with all_decoded(sequence.media, desk.bytes_of) as media:
        return desk.processor.expanded(text, media)
