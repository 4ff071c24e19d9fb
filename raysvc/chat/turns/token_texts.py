"""Finds the control tokens of a tokenizer in a render; the longest one that fits is found."""

from __future__ import annotations

import re
from collections.abc import Iterable

_TAG = r"<[^<>\s]{1,40}>"
MANY = 256  # control tokens, of which it is not worth while to look at each pair
_PIECE = rf"{_TAG}|\s|\w+|."


class TokenTexts:
    """Control tokens of one tokenizer.

    Args:
        added: their texts.
        begin, end: of a sequence, empty where there is none.

    Attributes:
        begin, end: as given.
        texts: longest first.
        are_apart: no two of them can have a character in common.
        one: finds a token.
        lead: matches tokens and blanks, of which one is a token.
        run: as `lead`, up to the end.
    """

    def __init__(self, added: Iterable[str], begin: str, end: str) -> None:
        self.begin, self.end = begin, end
        self.texts = sorted((text for text in added if text), key=len, reverse=True)
        self._any = tuple(self.texts)
        self.are_apart = _are_apart(self._any)
        any_added = "|".join(map(re.escape, self.texts)) or r"(?!)"
        self.one = re.compile(any_added)
        self.lead = re.compile(rf"\s*(?:(?:{any_added})\s*)+")
        self.run = re.compile(rf"{self.lead.pattern}\Z")
        self._piece = re.compile(f"{any_added}|{_PIECE}", re.DOTALL)
        self._tags = re.compile(rf"(?:(?:{any_added}|{_TAG})\s*)+")

    def closes(self, text: str, end: int, start: int = 0) -> bool:
        """Returns whether [start, end) of a text ends with a token."""
        if not text.endswith(self._any, start, end):
            return False
        if self.are_apart:
            return True
        tail = text[max(start, end - 80) : end]
        tokens = list(self.one.finditer(tail))
        return bool(tokens) and tokens[-1].end() == len(tail)

    def first_end(self, text: str, start: int, end: int, heads: Iterable[str]) -> int:
        """Returns where the sequence ends first, if a second end is all that stands behind that, or a second, empty
        turn.

        Args:
            heads: of turns.
        """
        first = text.find(self.end, start, end) if self.end else -1
        stop = first + len(self.end)
        if first < 0 or self.end not in text[stop:end]:
            return end
        heads = {head for head in heads if head.strip()}
        behind = re.sub("|".join(map(re.escape, heads)) or "(?!)", "", text[stop:end])
        return end if self.one.sub("", behind).strip() else stop

    def begin_of_run(self, text: str, start: int, stop: int) -> int:
        """Returns where the tokens and blanks begin that [start, stop) ends with, of which one is a token; -1
        without.
        """
        if not self.are_apart:
            found = self.run.search(text, start, stop)
            return found.start() if found else -1
        at, begin = stop, -1
        while True:
            while at > start and text[at - 1].isspace():
                at -= 1
            begin = at if begin >= 0 else begin
            if not text.endswith(self._any, start, at):
                return begin
            at -= next(len(token) for token in self._any if text.endswith(token, start, at))
            begin = at

    def last_end(self, text: str, start: int, stop: int) -> int | None:
        """Behind the last added token of [start, stop) when only blanks follow it; what begins a sequence ends no turn."""
        last = None
        for token in self.one.finditer(text, start, stop):
            if token.group() == self.begin and token.group() != self.end:
                break
            last = token.end()
        return last if last is not None and not self.lead.sub("", text[last:stop]).strip() else None

    def around(self, text: str, at: int) -> tuple[int, int]:
        """[start, end) of the token that a place is inside of; the place itself when it is in none."""
        near = self.one.finditer(text, max(0, at - len(self.texts[0]))) if self.texts else ()
        return next((token.span() for token in near if token.start() < at < token.end()), (at, at))

    def place_of(self, prompt: str, text: str, start: int, stop: int) -> int:
        """Returns where most of the prompt stands in [start, stop), the first such place; `start` where none of it
        does but blanks.
        """
        first, shown = self._piece.match(prompt), text[:stop]
        found = re.finditer(re.escape(first.group()), shown[start:]) if first else ()
        places = (start, *(start + each.start() for each in found))
        return max(places, key=lambda place: self.repeated(prompt, shown, place))

    def repeated(self, prompt: str, text: str, begin: int) -> int:
        """Characters from `begin` on that say as much of the prompt as is there, in whole pieces and whatever the blanks; none when they are blank.

        One tag of the prompt may be missing before the tags that it ends with.
        """
        if prompt and text.startswith(prompt, begin):
            return len(prompt) if prompt.strip() else 0
        at = begin
        for found in self._piece.finditer(prompt):
            word = found.group()
            if word.isspace():
                at += len(word) * text.startswith(word, at)
                continue
            start = at if text.startswith(word, at) else behind_blanks(text, at)
            end = start + len(word)
            if not text.startswith(word, start) or (word[-1].isalnum() and text[end : end + 1].isalnum()):
                tags = prompt[found.end() :].strip()
                if self._tags.fullmatch(word) and self._tags.fullmatch(tags) and text.startswith(tags, start):
                    at = start + len(tags)
                break
            at = end
        return at - begin if text[begin:at].strip() else 0


def behind_blanks(text: str, at: int) -> int:
    """Returns where the first character that is not blank stands, from `at` on."""
    while text[at : at + 1].isspace():
        at += 1
    return at


def _are_apart(texts: tuple[str, ...]) -> bool:
    """Returns whether no two of some texts can have a character in common where they stand in another, and none begins or ends with a blank."""
    if len(texts) > MANY or any(text != text.strip() for text in texts):
        return False
    ends = {text[-size:] for text in texts for size in range(1, len(text))}
    begins = {text[:size] for text in texts for size in range(1, len(text))}
    inside = any(text in other for text in texts for other in texts if text != other)
    return not inside and ends.isdisjoint(begins)
