"""Defines what is wrong with the words of a row, seen without other rows.

Always true:
- pure: a text in, pairs of (name of a defect, what it is here) out.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterator

from raysvc.audit.audited_row import shown

_CONTROL = re.compile("[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\ufffd\ufeff\u202a-\u202e\u2066-\u2069]")
_WRONGLY_DECODED = re.compile(
    "Ã[\x80-\xbf]|â€[™œ\x9d“”]|Â[\xa0-\xbf]"
)  # UTF-8 that was read as Latin-1 or CP1252
_GOES_ON = re.compile(r"(?:[(\[{]|\b(?:the|a|an|and|or|of|because|which))\s*$")  # nobody ends with these
AROUND = 20  # characters


def check_text(said: str, answer: str) -> Iterator[tuple[str, str]]:
    """Defects of what a row says, and of its last answer."""
    found = _CONTROL.search(said) or _WRONGLY_DECODED.search(said)
    if found is not None:
        name = unicodedata.name(found.group()[0], f"U+{ord(found.group()[0]):04X}")
        around = said[max(found.start() - AROUND, 0) : found.end() + AROUND]
        yield "control_characters", f"{name} in {around!r}"
    if answer.count("```") % 2:
        yield "answer_unfinished", f"a code block is not closed: {shown(answer[answer.rindex('```') :])}"
    elif _GOES_ON.search(answer):
        yield "answer_unfinished", f"…{shown(answer[-2 * AROUND :])}"
