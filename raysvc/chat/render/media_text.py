"""A conversation with media -> its text with every placeholder replaced, and what stands where.

1. No text of the conversation may hold the processor's token of media.
2. The template runs for real, with media as `{"type": kind}` alone; turns are found and verified on that text.
3. The media tokens of the render are its placeholders. There is one for each medium, written while the template is at the
   message of that medium.
4. Each is replaced by what the processor writes for a medium of that size, and the spans move along. What replaces a
   placeholder is never under loss: a turn that holds one is refused, and text under loss is cut around it.

Always true:
- the ids of the text are those of the processor for this conversation and these media;
- the media of a sequence are in the order of their tokens.
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
from raysvc.chat.sequence import FREE, MediumPlace, Sequence, Span
from raysvc.chat.source.examples import ChatExample
from raysvc.chat.source.media_parts import media_places, plain_media, wrong_count
from raysvc.media.kinds import WORDS, Kind, size_text
from raysvc.media.media_desk import MediaDesk, Taken
from raysvc.media.media_processor import MediaProcessor, Replacement


class _Hole(NamedTuple):
    """Characters of a placeholder, and what replaces it."""

    start: int
    end: int
    text: str


def check_media(example: ChatExample, processor: MediaProcessor) -> None:
    """Rule 1, and the beginning of 4.

    Raises:
        RowFault: a text holds the token, or a trained message a medium.
    """
    if example.media and any(place in example.trained for place, _ in media_places(example.messages)):
        raise _in_turn(processor.kind)
    said = json.dumps([example.messages, example.tools], ensure_ascii=False, default=str)
    if processor.token in said:
        words = WORDS[processor.kind]
        raise RowFault(
            f"a text holds the token of {words.many}",
            f"{processor.token!r} stands in a message: it would be taken for {words.one}",
        )


def plain_example(example: ChatExample) -> ChatExample:
    """The conversation as the template gets it."""
    return replace(example, messages=plain_media(example.messages))


def filled_with_media(sequence: Sequence, render: Render, example: ChatExample, desk: MediaDesk) -> Sequence:
    """Rules 3 and 4.

    Args:
        sequence: of the render, with its spans.
        render: of `plain_example(example)`.
        example: with the places of its media.
        desk: takes them.

    Raises:
        RowFault: placeholders and media do not match, one cannot be taken, or a trained turn holds one.
    """
    token, many = desk.processor.token, WORDS[desk.kind].many
    found = [match.span() for match in re.finditer(re.escape(token), sequence.text)]
    wanted = media_places(example.messages)
    if len(found) != len(wanted):
        raise RowFault(wrong_count(desk.kind), f"the template shows {len(found)} of {len(wanted)} {many}")
    _check_owners(render, found, [place for place, _ in wanted], desk.kind)
    holes, places = [], []
    for (start, end), (_, medium) in zip(found, wanted, strict=True):
        taken = desk.take(example.media[medium])
        made = _replacement(desk, taken)
        holes.append(_Hole(start, end, made.text))
        places.append(MediumPlace(taken.sha256, taken.size, made.tokens, made.patches, taken.num_bytes))
    text, spans = _filled(sequence, holes, desk.kind)
    return replace(sequence, text=text, spans=spans, example=example, media=tuple(places))


def _replacement(desk: MediaDesk, taken: Taken) -> Replacement:
    try:
        return desk.processor.replacement(*taken.size)
    except (ValueError, ArithmeticError, IndexError) as error:
        words = WORDS[desk.kind]
        raise RowFault(
            f"the processor refuses the {words.size} of {words.one}",
            f"{size_text(desk.kind, taken.size)}: {str(error)[:120]}",
        ) from None


def _check_owners(render: Render, found: Many[tuple[int, int]], places: Many[int], kind: Kind) -> None:
    """Whether each placeholder was written for the message of its medium."""
    ends = list(accumulate(map(len, render.blocks)))
    for (start, _), place in zip(found, places, strict=True):
        owner = render.owners[bisect_right(ends, start)]
        if owner not in (place, NOBODY):
            what = f"the template shows {WORDS[kind].one} of message {place} in message {owner}"
            raise RowFault(wrong_count(kind), what)


def _filled(sequence: Sequence, holes: Many[_Hole], kind_of_media: Kind) -> tuple[str, list[Span]]:
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
            raise _in_turn(kind_of_media)
        edges = [start, *(edge for hole in inside for edge in (hole.start, hole.end)), end]
        for a, b in zip(edges[::2], edges[1::2], strict=True):
            if b > a:
                spans.append((a + _shift(holes, a), b + _shift(holes, b), kind))
    return "".join(pieces), spans


def _in_turn(kind: Kind) -> RowFault:
    return RowFault(f"a trained message holds {WORDS[kind].one}", "only text can be trained")


def _shift(holes: Many[_Hole], at: int) -> int:
    """How far a place outside of holes moves: by the holes before it."""
    return sum(len(hole.text) - (hole.end - hole.start) for hole in holes if hole.end <= at)
