"""Ids of a tokenizer whose normalizer gigatoken does not take: the texts are normalized first.

`tokenizers` cuts a text around its added tokens, normalizes each stretch between them, and goes on with what came out. So
gigatoken, with the same tokenizer but without these normalizers, gives the same ids for the stretches normalized here.

1. The normalizers at the head of the list that change letters are taken: NFC, NFD, NFKC, NFKD, Lowercase.
2. In texts with other characters than ASCII, each run of these, with the character before it, is normalized by the
   tokenizer's own normalizers: nothing joins an ASCII character to what stands before it. Other ASCII is changed by
   Lowercase alone, in all texts at once where that makes no other added tokens.
3. gigatoken encodes the new texts. A text in which an added token appeared that was not there, as fullwidth letters may
   make one, gets the reference's ids.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import numpy as np

from raysvc.chat.tokens import encoder
from raysvc.chat.tokens.backend_parts import parts_of
from raysvc.chat.tokens.code_points import replaced
from raysvc.chat.tokens.encoder import Bytes, EncodedTexts, Encoder, Ints64, TokenizerFiles

MOST_LOOKED_FOR = 32  # added tokens that are looked for one by one
_BEYOND_ASCII = re.compile("[^\x00-\x7f]+")
_BECOME_ASCII = "[\u212a\u037e\u1fef]"  # K, ; and ` after NFC
_JOINS_MARKS = re.compile("[A-Za-z<=>]$")
_KNOWN = ("NFC", "NFD", "NFKC", "NFKD", "Lowercase")


def normalizing_encoder(tokenizer: TokenizerFiles, reference: Encoder) -> NormalizingEncoder | None:
    """One for this tokenizer; None where its normalizers are others, or its added tokens swallow what is around them.

    Raises:
        Exception: gigatoken does not take the tokenizer without its normalizers either.
    """
    parts = parts_of(tokenizer.hf.backend_tokenizer.normalizer)
    taken = next((n for n, part in enumerate(parts) if part["type"] not in _KNOWN), len(parts))
    state = json.loads(tokenizer.content())
    flags = ("normalized", "lstrip", "rstrip", "single_word")
    if not taken or any(token[flag] for token in state["added_tokens"] for flag in flags):
        return None
    state["normalizer"] = _sequence(parts[taken:])
    inner = encoder.GigatokenEncoder(json.dumps(state).encode(), tokenizer.free_id)
    added = [token["content"] for token in state["added_tokens"]]
    return NormalizingEncoder(inner, reference, parts[:taken], added)


class NormalizingEncoder:
    """Normalizes texts for an encoder that does not.

    Args:
        inner: encodes normalized texts.
        reference: for texts in which normalizing makes an added token.
        parts: normalizers as JSON, of `_KNOWN`.
        added: all added tokens.
    """

    def __init__(
        self,
        inner: encoder.GigatokenEncoder,
        reference: Encoder,
        parts: list[dict[str, Any]],
        added: list[str],
    ) -> None:
        from tokenizers import Tokenizer, models

        state = json.loads(Tokenizer(models.BPE()).to_str())
        state["normalizer"] = _sequence(parts)
        self._normalizer = Tokenizer.from_str(json.dumps(state)).normalizer
        self._lowers = any(part["type"] == "Lowercase" for part in parts)
        self._inner, self._reference = inner, reference
        longest_first = sorted(added, key=len, reverse=True)
        self._added = re.compile("|".join(map(re.escape, longest_first)) or "(?!)")
        self._lower = _few_lower([token.encode() for token in added])
        self.name = f"{inner.name} of normalized texts"

    def encode(self, texts: Sequence[str]) -> EncodedTexts:
        """Ids of the texts."""
        pieces = [text.encode() for text in texts]
        offsets = np.cumsum([0, *map(len, pieces)], dtype=np.int64)
        return self.encode_bytes(np.frombuffer(b"".join(pieces), np.uint8), offsets)

    def encode_bytes(self, data: Bytes, offsets: Ints64) -> EncodedTexts:
        """Ids of N texts in UTF-8."""
        whole, bounds = data.tobytes(), offsets.tolist()
        lowered = self._lowered(whole)
        made, odd = [(lowered or whole)[a:b] for a, b in pairwise(bounds)], {}
        for row, text in enumerate(made):
            if lowered is None or not text.isascii():
                before = whole[bounds[row] : bounds[row + 1]].decode()
                normal = self._normalized(before)
                if normal is None:
                    odd[row], normal = before, ""
                made[row] = normal.encode()
        found = self._inner.encode_pieces(made)
        return replaced(found, list(odd), self._reference.encode(list(odd.values()))) if odd else found

    def _lowered(self, whole: bytes) -> bytes | None:
        """Texts one after the other with their ASCII as it has to be; None where that may make other added tokens."""
        if not self._lowers:
            return whole
        lowered = whole.lower()
        return None if self._lower is None or makes_any(self._lower, whole, lowered) else lowered

    def _normalized(self, text: str) -> str | None:
        """A text normalized between its added tokens; None where that makes other added tokens."""
        pieces, tokens, at, size = [], [], 0, 0
        for match in self._added.finditer(text):
            pieces += [self._stretch(text[at : match.start()]), match.group()]
            size += len(pieces[-2]) + len(pieces[-1])
            tokens.append((size - len(pieces[-1]), size))  # one that grew to its left ends where it did
            at = match.end()
        made = "".join([*pieces, self._stretch(text[at:])])
        return made if [match.span() for match in self._added.finditer(made)] == tokens else None

    def _stretch(self, text: str) -> str:
        if text.isascii():
            return text.lower() if self._lowers else text
        pieces, at = [], 0
        for found in _BEYOND_ASCII.finditer(text):
            begin = max(found.start() - 1, 0)  # a mark may change the character before it
            run = text[begin : found.end()]
            pieces += [self._stretch(text[at:begin]), self._normalizer.normalize_str(run)]
            at = found.end()
        return "".join([*pieces, self._stretch(text[at:])])


def hidden_tokens(hf: Any) -> str:
    """Regex of where NFC may make or end an added token, empty for nowhere: gigatoken takes NFC, but looks for tokens before it."""
    if not any(part["type"] == "NFC" for part in parts_of(hf.backend_tokenizer.normalizer)):
        return ""
    tokens = [*hf.added_tokens_decoder.values()]
    chars = {*"".join(token.content for token in tokens)}
    if any(char > "\x7f" for char in chars):
        return "[^\x00-\x7f]"
    ended = [token.content for token in tokens if token.normalized and _JOINS_MARKS.search(token.content)]
    ends = f"(?:{'|'.join(map(re.escape, ended))})[^\x00-\x7f]" if ended else ""
    return "|".join(filter(None, [ends, _BECOME_ASCII if chars & {*"K;`"} else ""]))


def _few_lower(tokens: list[bytes]) -> list[bytes] | None:
    """Tokens that lowering leaves as they are, None where it does not or they are many."""
    few = len(tokens) <= MOST_LOOKED_FOR
    return tokens if few and all(token == token.lower() for token in tokens) else None


def makes_any(tokens: list[bytes], text: bytes, lowered: bytes) -> bool:
    """Returns whether some token stands in a lowered text that was not there: a capital was where it has a letter."""
    made = np.frombuffer(lowered, np.uint8)
    changed = np.flatnonzero(made != np.frombuffer(text, np.uint8))
    letters = made[changed]
    for token in tokens:
        for place, letter in enumerate(token):
            starts = changed[letters == letter] - place
            starts = starts[(starts >= 0) & (starts <= len(made) - len(token))]
            for at, byte in enumerate(token):
                if not len(starts):
                    break
                starts = starts[made[starts + at] == byte]
            if len(starts):
                return True
    return False


def _sequence(parts: list[dict[str, Any]]) -> dict[str, Any] | None:
    return {"type": "Sequence", "normalizers": parts} if parts else None
