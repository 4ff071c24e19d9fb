"""Ids of a sentencepiece-like tokenizer, word by word: a word that was met before is looked up.

No token of such a vocabulary holds a blank behind another character. So no merge goes over the place before a blank, and
a text may be cut there: the ids of the whole are those of its words, one after the other. This is for tokenizers that
gigatoken does not take (normalizers, Unigram), or where it is not installed.

1. Texts are cut around added tokens, and before a blank behind an ASCII character that is none.
2. The blank that the tokenizer puts before a stretch is put there as a character.
3. Equal words are found in columns. New ones are encoded by a tokenizer that puts no blanks.
4. The ids of all words are gathered.

Always true:
- tokenizers for which the files do not show that the cuts are right get no such encoder;
- texts that hold the mark of a blank themselves get the reference's ids.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import numpy as np
import pyarrow as pa

from raysvc.chat.tokens.added_blanks import Rule, rule_of
from raysvc.chat.tokens.backend_parts import parts_of
from raysvc.chat.tokens.code_points import replaced
from raysvc.chat.tokens.encoder import Bytes, Encoded, Encoder, Ints64, ReferenceEncoder, joined
from raysvc.chat.tokens.tokenizer import LoadedTokenizer

MARK = "\u2581"
_MARK_BYTES = MARK.encode()
_NORMALIZERS = ("Prepend", "NFC", "NFD", "NFKC", "NFKD", "Lowercase")  # none changes ASCII around a blank
_MOST_IDS = 1 << 22  # 16 MiB of remembered ids, then all are forgotten


def word_encoder(tokenizer: LoadedTokenizer, reference: ReferenceEncoder) -> WordEncoder | None:
    """One for this tokenizer; None where its texts are not known to fall into words."""
    backend = tokenizer.hf.backend_tokenizer
    if not _marks_blanks(backend):
        return None
    state = json.loads(tokenizer.content())
    if not _falls_into_words(state):
        return None
    added = [token["content"] for token in state["added_tokens"]]
    bare = _without_blanks(state)
    return WordEncoder(ReferenceEncoder(bare), reference, added, rule_of(backend))


def _marks_blanks(backend: Any) -> bool:
    """Whether the steps before the model are known, and leave marks where blanks were."""
    before, cuts = parts_of(backend.normalizer), parts_of(backend.pre_tokenizer)
    if any(part["type"] not in _NORMALIZERS and not _is_replace(part) for part in before):
        return False
    if [part["type"] for part in cuts] == ["Metaspace"] and cuts[0]["replacement"] == MARK:
        return not any(
            part["type"].startswith("NFK") for part in before
        )  # they make blanks of other characters
    return any(map(_is_replace, before)) and (not cuts or _is_gemmas(cuts))


def _falls_into_words(state: dict[str, Any]) -> bool:
    model, added, cuts = state["model"], state["added_tokens"], state["pre_tokenizer"]
    flags = ("normalized", "lstrip", "rstrip", "single_word")
    if any(token[flag] for token in added for flag in flags) or any(" " in t["content"] for t in added):
        return False
    if model["type"] == "Unigram":  # rounded sums of scores: the tokenizer itself has to cut the words
        pieces = [piece for piece, _ in model["vocab"]]
        exact = bool(cuts) and cuts["type"] == "Metaspace" and cuts.get("split", True)
    else:
        pieces = list(model["vocab"]) if model["type"] == "BPE" else []
        affixes = ("dropout", "continuing_subword_prefix", "end_of_word_suffix")
        exact = not any(model.get(option) for option in affixes)
    if not exact or MARK not in pieces:
        return False
    inside = re.compile(f"[^{MARK}]{MARK}")
    return not any(inside.search(piece) for piece in pieces)


def _is_replace(part: dict[str, Any]) -> bool:
    return bool(part["type"] == "Replace" and part["pattern"] == {"String": " "} and part["content"] == MARK)


def _is_gemmas(cuts: list[dict[str, Any]]) -> bool:
    """A cut at blanks, of which none is left."""
    return len(cuts) == 1 and cuts[0]["type"] == "Split" and cuts[0]["pattern"] == {"String": " "}


def _without_blanks(state: dict[str, Any]) -> Any:
    """The tokenizer without the blank before a text."""
    from tokenizers import Tokenizer

    text = json.dumps({**state, "post_processor": None, "padding": None, "truncation": None})
    text = re.sub(r'"prepend_scheme": "\w+"', '"prepend_scheme": "never"', text)
    bare = json.loads(text)
    if state["normalizer"] is not None:
        parts = [part for part in parts_of(Tokenizer.from_str(text).normalizer) if part["type"] != "Prepend"]
        bare["normalizer"] = {"type": "Sequence", "normalizers": parts}
    text = json.dumps(bare)
    hf = SimpleNamespace(backend_tokenizer=Tokenizer.from_str(text), split_special_tokens=False)
    return SimpleNamespace(hf=hf, content=text.encode)


@dataclass
class _Words:
    """Words that were met: text -> number, and the ids of every number."""

    numbers: dict[str, int]
    found: Encoded


class WordEncoder:
    """Looks words up.

    Args:
        inner: encodes words; it puts no blanks before them.
        reference: for texts that hold the mark of a blank.
        added: all added tokens.
        rule: which stretches between them get a blank.
    """

    def __init__(self, inner: Encoder, reference: Encoder, added: list[str], rule: Rule) -> None:
        self._inner, self._reference, self._rule = inner, reference, rule
        longest_first = sorted((text.encode() for text in added), key=len, reverse=True)
        self._added = re.compile(b"|".join(map(re.escape, longest_first)) or b"(?!)")
        self._words = _Words({}, joined([]))
        self.name = f"{inner.name} by words"

    def encode(self, texts: Sequence[str]) -> Encoded:
        """Ids of the texts."""
        pieces = [text.encode() for text in texts]
        offsets = np.cumsum([0, *map(len, pieces)], dtype=np.int64)
        return self.encode_bytes(np.frombuffer(b"".join(pieces), np.uint8), offsets)

    def encode_bytes(self, data: Bytes, offsets: Ints64) -> Encoded:
        """Ids of N texts in UTF-8."""
        if not len(data):
            return Encoded(np.zeros(0, np.int32), np.zeros_like(offsets))
        whole = data.tobytes()
        cuts, starts = self._cuts(whole, data, offsets)
        words, places = self._numbers(data, cuts, starts)
        found = self._words.found
        sizes = np.diff(found.offsets)[words][places]
        ends = np.concatenate([[0], np.cumsum(sizes)])
        index = np.arange(ends[-1]) + np.repeat(found.offsets[words][places] - ends[:-1], sizes)
        made = Encoded(found.ids[index], ends[np.searchsorted(cuts, offsets)])
        return self._with_marks(made, whole, offsets) if _MARK_BYTES in whole else made

    def _cuts(self, whole: bytes, data: Bytes, offsets: Ints64) -> tuple[Ints64, Ints64]:
        """(int64 [W + 1] where words begin and the end of all, places before which a blank is put)."""
        rows = pairwise(offsets.tolist())
        matches = [match.span() for a, b in rows for match in self._added.finditer(whole, a, b)]
        added = np.array(matches, np.int64).reshape(-1, 2)
        is_cut = np.zeros(len(data) + 1, np.bool_)
        before, after = data[:-1], data[1:]
        is_cut[1:-1] = (after == 32) & (before != 32) & (before < 128)
        is_cut[offsets] = True
        is_cut[added.ravel()] = True
        first = offsets[:-1][np.diff(offsets) > 0]
        if self._rule is not Rule.FIRST:
            first = np.union1d(first, added[:, 1])
        first = first[(first < len(data)) & ~np.isin(first, added[:, 0])]
        if self._rule is not Rule.EVERY:
            first = first[data[first] != 32]
        return np.flatnonzero(is_cut), first[:0] if self._rule is Rule.NONE else first

    def _numbers(self, data: Bytes, cuts: Ints64, starts: Ints64) -> tuple[Ints64, Ints64]:
        """(numbers of the different words, int64 [W] which of these each word is)."""
        put = np.zeros(len(cuts), np.int64)
        put[np.searchsorted(cuts, starts) + 1] = 1
        text, bounds = np.insert(data, starts, np.uint8(32)), cuts + np.cumsum(put)
        buffers = [None, pa.py_buffer(bounds), pa.py_buffer(text)]
        same = pa.Array.from_buffers(pa.large_string(), len(cuts) - 1, buffers).dictionary_encode()
        different: list[str] = same.dictionary.to_pylist()
        if len(self._words.found.ids) > _MOST_IDS:
            self._words = _Words({}, joined([]))
        numbers = self._words.numbers
        places = list(map(numbers.get, different))
        if None in places:
            self._learn([word for word in different if word not in numbers])
            places = list(map(numbers.get, different))
        words = np.array(places, np.int64)
        return words, same.indices.to_numpy()

    def _learn(self, words: list[str]) -> None:
        if not words:
            return
        old, new = self._words.found, self._inner.encode(words)
        self._words.numbers.update(
            zip(words, range(len(old.offsets) - 1, len(old.offsets) - 1 + len(words)), strict=True)
        )
        ids = np.concatenate([old.ids, new.ids])
        self._words.found = Encoded(ids, np.concatenate([old.offsets, new.offsets[1:] + old.offsets[-1]]))

    def _with_marks(self, made: Encoded, whole: bytes, offsets: Ints64) -> Encoded:
        texts = {row: whole[a:b] for row, (a, b) in enumerate(pairwise(offsets.tolist()))}
        rows = [row for row, text in texts.items() if _MARK_BYTES in text]
        return replaced(made, rows, self._reference.encode([texts[row].decode() for row in rows]))
