"""A conversation with images -> its text with every placeholder replaced, and what stands where.

1. No text of the conversation may hold the processor's image token.
2. The template runs for real, with images as `{"type": "image"}` alone; turns are found and verified on that text.
3. The image tokens of the render are its placeholders. There is one for each image, written while the template is at the
   message of that image.
4. Each is replaced by what the processor writes for an image of that size, and the spans move along. What replaces a
   placeholder is never under loss: a turn that holds one is refused, and text under loss is cut around it.

Always true:
- the ids of the text are those of the processor for this conversation and these images;
- the images of a sequence are in the order of their tokens.
"""

from __future__ import annotations

import json
import re
from bisect import bisect_right
from collections.abc import Sequence as Many
from dataclasses import replace
from itertools import accumulate
from typing import NamedTuple

from raysvc.chat.render.rendered import NOBODY, Render
from raysvc.chat.row_errors import RowFault
from raysvc.chat.sequence import FREE, ImagePlace, Sequence, Span
from raysvc.chat.source.formats import ChatExample
from raysvc.chat.source.media_parts import WRONG_COUNT, media_places, plain_images
from raysvc.media.media_desk import MediaDesk, Taken
from raysvc.media.media_processor import Replacement

IN_TEXT = "a text holds the token of images"
IN_TURN = "a trained message holds an image"
REFUSED = "the processor refuses the size of an image"


class _Hole(NamedTuple):
    """Characters of a placeholder, and what replaces it."""

    start: int
    end: int
    text: str


def check_images(example: ChatExample, image_token: str) -> None:
    """Rule 1, and the beginning of 4.

    Raises:
        RowFault: a text holds the token, or a trained message an image.
    """
    if example.media and any(place in example.trained for place, _ in media_places(example.messages)):
        raise RowFault(IN_TURN, "only text can be trained")
    said = json.dumps([example.messages, example.tools], ensure_ascii=False, default=str)
    if image_token in said:
        raise RowFault(IN_TEXT, f"{image_token!r} stands in a message: it would be taken for an image")


def plain_example(example: ChatExample) -> ChatExample:
    """The conversation as the template gets it."""
    return replace(example, messages=plain_images(example.messages))


def with_images(sequence: Sequence, render: Render, example: ChatExample, desk: MediaDesk) -> Sequence:
    """Rules 3 and 4.

    Args:
        sequence: of the render, with its spans.
        render: of `plain_example(example)`.
        example: with the places of its images.
        desk: takes them.

    Raises:
        RowFault: placeholders and images do not match, an image cannot be taken, or a trained turn holds one.
    """
    token = desk.processor.image_token
    found = [match.span() for match in re.finditer(re.escape(token), sequence.text)]
    wanted = media_places(example.messages)
    if len(found) != len(wanted):
        raise RowFault(WRONG_COUNT, f"the template shows {len(found)} of {len(wanted)} images")
    _check_owners(render, found, [place for place, _ in wanted])
    holes, images = [], []
    for (start, end), (_, medium) in zip(found, wanted, strict=True):
        taken = desk.take(example.media[medium])
        made = _replacement(desk, taken)
        holes.append(_Hole(start, end, made.text))
        images.append(
            ImagePlace(taken.sha256, taken.width, taken.height, made.tokens, made.patches, taken.num_bytes)
        )
    text, spans = _filled(sequence, holes)
    return replace(sequence, text=text, spans=spans, example=example, images=tuple(images))


def _replacement(desk: MediaDesk, taken: Taken) -> Replacement:
    try:
        return desk.processor.replacement(taken.width, taken.height)
    except (ValueError, ArithmeticError, IndexError) as error:
        raise RowFault(REFUSED, f"{taken.width} x {taken.height}: {str(error)[:120]}") from None


def _check_owners(render: Render, found: Many[tuple[int, int]], places: Many[int]) -> None:
    """Whether each placeholder was written for the message of its image."""
    ends = list(accumulate(map(len, render.blocks)))
    for (start, _), place in zip(found, places, strict=True):
        owner = render.owners[bisect_right(ends, start)]
        if owner not in (place, NOBODY):
            raise RowFault(WRONG_COUNT, f"the template shows an image of message {place} in message {owner}")


def _filled(sequence: Sequence, holes: Many[_Hole]) -> tuple[str, list[Span]]:
    """The text with its holes filled, and its spans there."""
    pieces, at = [], 0
    for hole in holes:
        pieces += [sequence.text[at : hole.start], hole.text]
        at = hole.end
    pieces.append(sequence.text[at:])
    spans: list[Span] = []
    for start, end, kind in sequence.spans:
        inside = [hole for hole in holes if hole.start < end and hole.end > start]
        if inside and kind != FREE:
            raise RowFault(IN_TURN, "only text can be trained")
        edges = [start, *(edge for hole in inside for edge in (hole.start, hole.end)), end]
        for a, b in zip(edges[::2], edges[1::2], strict=True):
            if b > a:
                spans.append((a + _shift(holes, a), b + _shift(holes, b), kind))
    return "".join(pieces), spans


def _shift(holes: Many[_Hole], at: int) -> int:
    """How far a place outside of holes moves: by the holes before it."""
    return sum(len(hole.text) - (hole.end - hole.start) for hole in holes if hole.end <= at)
