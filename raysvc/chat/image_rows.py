"""The images of encoded rows: where their tokens lie, what is left of them, and the columns that say so.

Axes: N sequences, K after what is not written is left out.
1. The image tokens of a row are those of its images, as many as the processor says, in their order.
2. A row that truncation would cut inside of an image is dropped; images behind the cut are left out.

Always true:
- a row without images holds no image token;
- an image in column `media` has all its tokens in the row.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import accumulate

import numpy as np
import pyarrow as pa

from raysvc.chat.row_errors import RowDropped, RowFault
from raysvc.chat.sequence import Sequence
from raysvc.chat.source.formats import ChatExample
from raysvc.chat.source.media_parts import plain_images
from raysvc.chat.tokens.token_rows import TokenRows
from raysvc.chat.tokens.tokenizer import LoadedTokenizer
from raysvc.media.media_desk import MediaDesk
from raysvc.media.medium import COLUMN, PATCHES, TOKENS, Medium, text_of
from raysvc.media.pixels import rgb

FIELDS = [pa.field(COLUMN, pa.string()), pa.field(TOKENS, pa.int32()), pa.field(PATCHES, pa.int32())]
MISCOUNTED = "the tokens of images are not as many as the processor says"
CUT = "max_length cuts through an image"
SAMPLED = 2  # rows with images of a chunk that are given to the processor itself
Media = list[tuple[Medium, ...]]


def place_images(flat: list[Sequence], tokens: TokenRows, image_token_id: int, cut_at: int | None) -> Media:
    """The media of N sequences; what is wrong with one is added to the faults of `tokens`.

    Args:
        flat: the sequences.
        tokens: of them.
        image_token_id: of the processor.
        cut_at: tokens of a row that are kept; None: all.
    """
    where = np.flatnonzero(tokens.ids == image_token_id)
    bounds = np.searchsorted(where, tokens.offsets).tolist()
    media: Media = []
    for place, sequence in enumerate(flat):
        own = (where[bounds[place] : bounds[place + 1]] - tokens.offsets[place]).tolist()
        media.append(_placed(sequence, own, place, tokens, cut_at) if own or sequence.images else ())
    return media


def _placed(
    sequence: Sequence, own: list[int], place: int, tokens: TokenRows, cut_at: int | None
) -> tuple[Medium, ...]:
    counts = [image.tokens for image in sequence.images]
    if sum(counts) != len(own) or not all(counts):
        tokens.faults.setdefault(place, RowFault(MISCOUNTED, f"{len(own)} instead of {sum(counts)}"))
        return ()
    ends = list(accumulate(counts))
    found = []
    for image, end in zip(sequence.images, ends, strict=True):
        first, last = own[end - image.tokens], own[end - 1]
        if cut_at is not None and last >= cut_at:
            if first < cut_at:
                tokens.faults.setdefault(place, RowDropped(CUT))
            continue
        found.append(Medium(kind="image", at=first, **image._asdict()))
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
    """Some sequences with images, others for every seed."""
    there = [place for place, sequence in enumerate(flat) if sequence.images]
    count = min(SAMPLED, len(there))
    return sorted(np.random.default_rng(seed).choice(there, count, replace=False).tolist()) if count else []


def true_ids(sequence: Sequence, tokenizer: LoadedTokenizer, desk: MediaDesk) -> list[int]:
    """What the processor itself makes of the conversation and the decoded images."""
    example = sequence.example
    assert isinstance(example, ChatExample)
    text = tokenizer.reference_text(plain_images(example.messages), example.tools, example.prompt)
    return desk.processor.expanded(text, [rgb(desk.bytes_of(image.sha256)) for image in sequence.images])
