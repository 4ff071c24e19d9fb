"""Texts of a sentencepiece-like tokenizer, encoded by gigatoken as one text.

For these models gigatoken remembers the ids of words, but only from one call with a single text to the next: a call with a
batch begins with nothing. So the texts of a batch are joined.

1. The tokenizer gets one more added token, drawn at random, to stand between texts: nothing goes on across it.
2. `Metaspace` of scheme `first` puts a blank before the first text alone. It becomes `never`, and the texts get the blank here.
3. The memory of words has no end, and takes some 14 bytes for each byte of new words: the tokenizer is loaded again after so
   much text that this takes about 2 % of the time. For a large one (Gemma) that would be too much text, so it is not joined.

Always true:
- ids are those of each text alone.
"""

from __future__ import annotations

import json
import re
from itertools import count
from threading import Lock
from typing import Any
from uuid import uuid4

import numpy as np
import numpy.typing as npt

IdsAndOffsets = tuple[npt.NDArray[np.int32], npt.NDArray[np.int64]]
"""Ids of N texts, [T], and [N + 1]."""

MOST_BYTES = 1 << 23  # of a text that is joined: other threads wait while it is encoded
MOST_CONTENT = 1 << 21  # bytes of a tokenizer: its memory of words stays below 1 GB, whatever the texts are
TEXT_PER_CONTENT = 32  # bytes that are encoded for each byte of the tokenizer before it is loaded again
_BYTE_FALLBACK = re.compile(rb'"byte_fallback":\s*true')


def ids_and_offsets(array: Any) -> IdsAndOffsets:
    """Those in an array of `awkward`."""
    offsets = np.asarray(array.layout.offsets.data, dtype=np.int64)
    ids = np.asarray(array.layout.content.data)[offsets[0] : offsets[-1]]
    return ids.astype(np.int32, copy=False).view(np.int32), offsets - offsets[0]


def gains(content: bytes) -> bool:
    """Returns whether gigatoken takes a `tokenizer.json` for a sentencepiece-like one, and it is small enough."""
    return len(content) <= MOST_CONTENT and _BYTE_FALLBACK.search(content) is not None


class JoinedTexts:
    """Encodes batches as one text.

    Args:
        content: of the `tokenizer.json`.
        free_id: that no token has.
    """

    def __init__(self, content: bytes, free_id: int) -> None:
        head, key, model = content.partition(b'"model":')
        state = json.loads(head + key + b"0}")
        added = [token["content"] for token in state["added_tokens"]]
        fence = next(char for char in map(chr, count()) if char not in "".join(added))
        mark, flags = f"{fence}{uuid4().hex}{fence}", ("single_word", "lstrip", "rstrip", "normalized")
        state["added_tokens"].append(
            {"id": free_id, "content": mark, "special": True, **dict.fromkeys(flags, False)}
        )
        self._mark, self._mark_id = mark.encode(), free_id
        scheme = '"prepend_scheme": "{}"'.format
        pre = json.dumps(state["pre_tokenizer"])
        opening = "|".join(map(re.escape, (" ", "\u2581", *added))).encode()
        self._no_blank = re.compile(opening) if scheme("first") in pre else None
        state["pre_tokenizer"] = json.loads(pre.replace(scheme("first"), scheme("never")))
        self._content = json.dumps(state).encode().removesuffix(b"0}") + model
        self._lock = Lock()  # a second call on the tokenizer at the same time raises
        self._load()

    def _load(self) -> None:
        import gigatoken

        self._inner: Any = gigatoken.Tokenizer.from_json(self._content)
        self._bytes_left = TEXT_PER_CONTENT * len(self._content)

    def encode(self, texts: list[bytes]) -> IdsAndOffsets:
        """Those of texts in UTF-8."""
        if self._no_blank is not None:
            starts = self._no_blank.match
            texts = [b" " + text if text and not starts(text) else text for text in texts]
        whole = self._mark.join(texts)
        with self._lock:
            if len(whole) > MOST_BYTES:
                return ids_and_offsets(self._inner.encode_batch(texts, parallel=False))
            if self._bytes_left < len(whole):
                self._load()
            self._bytes_left -= len(whole)
            ids = self._inner.encode(whole).view(np.int32)
        marks = np.flatnonzero(ids == self._mark_id)
        ends = np.append(marks - np.arange(len(marks)), len(ids) - len(marks))
        assert len(ends) == len(texts)
        return np.delete(ids, marks), np.append(0, ends)
