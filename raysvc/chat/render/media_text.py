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
from typing import NamedTuple

from raysvc.chat.render.rendered import NOBODY, Render
from raysvc.chat.row_errors import RowFault
from raysvc.chat.sequence import FREE, MediumPlace, Sequence, Span
from raysvc.chat.source.examples import ChatExample
from raysvc.chat.source.media_parts import media_places, plain_media, wrong_count
from raysvc.media.decoding import check_decodable
from raysvc.media.kinds import WORDS, Kind, size_text
from raysvc.media.media_desk import MediaDesk, StoredMedium
from raysvc.media.media_processor import MediaProcessor, Replacement


class _Hole(NamedTuple):
    """Characters of a placeholder, and what replaces it."""

    start: int
    end: int
    text: str
    kind: Kind


def check_media(example: ChatExample, processor: MediaProcessor) -> None:
    """Rule 1, and the beginning of 4.

    Raises:
        RowFault: a text holds the token, or a trained message a medium.
    """
    for place, _, kind in media_places(example.messages) if example.media else ():
        if place in example.trained:
            raise _in_turn(kind)
    said = json.dumps([example.messages, example.tools], ensure_ascii=False, default=str)
    for kind, token in processor.tokens.items():
        if token in said:
            words = WORDS[kind]
            what = f"{token!r} stands in a message: it would be taken for {words.one}"
            raise RowFault(f"a text holds the token of {words.many}", what)


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
    kinds = {token: kind for kind, token in desk.processor.tokens.items()}
    marks = re.finditer("|".join(map(re.escape, kinds)), sequence.text)
    found = [(match.start(), match.end(), kinds[match.group()]) for match in marks]
    wanted = media_places(example.messages)
    _check_kinds([kind for _, _, kind in found], [kind for _, _, kind in wanted])
    _check_owners(render, found, [place for place, _, _ in wanted])
    holes, places = [], []
    for (start, end, kind), (_, medium, _) in zip(found, wanted, strict=True):
        taken = desk.take(kind, example.media[medium])
        made = _replacement(desk, kind, taken)
        holes.append(_Hole(start, end, made.text, kind))
        places.append(MediumPlace(kind, taken.sha256, taken.size, made.tokens, made.patches, taken.num_bytes))
    check_decodable(places)
    text, spans = _filled(sequence, holes)
    return replace(sequence, text=text, spans=spans, example=example, media=tuple(places))


def _replacement(desk: MediaDesk, kind: Kind, taken: StoredMedium) -> Replacement:
    try:
        return desk.processor.replacement(kind, *taken.size)
    except (ValueError, ArithmeticError, IndexError) as error:
        words = WORDS[kind]
        raise RowFault(
            f"the processor refuses the {words.size} of {words.one}",
            f"{size_text(kind, taken.size)}: {str(error)[:120]}",
        ) from None


def _check_kinds(found: list[Kind], wanted: list[Kind]) -> None:
    """Checks whether a text has one placeholder of the kind of each medium, in order."""
    for kind in dict.fromkeys([*wanted, *found]):
        shown, there = found.count(kind), wanted.count(kind)
        if shown != there:
            what = f"the template shows {shown} of {there} {WORDS[kind].many}"
            raise RowFault(wrong_count(kind), what)
    if found != wanted:
        what = f"the template shows {', '.join(found)} for {', '.join(wanted)}"
        raise RowFault(wrong_count(wanted[0]), what)


def _check_owners(render: Render, found: Many[tuple[int, int, Kind]], places: Many[int]) -> None:
    """Checks whether each placeholder was written for the message of its medium."""
    for (start, _, kind), place in zip(found, places, strict=True):
        owner = render.owners[bisect_right(render.bounds, start) - 1]
        if owner not in (place, NOBODY):
            what = f"the template shows {WORDS[kind].one} of message {place} in message {owner}"
            raise RowFault(wrong_count(kind), what)


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
            raise _in_turn(inside[0].kind)
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
