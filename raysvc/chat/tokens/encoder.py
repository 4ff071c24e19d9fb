"""Text -> token ids, by the reference encoder or by a fast one that was seen to be equal.

Axes: N texts, T tokens of all N texts one after the other, V ids.
Always true:
- the reference is the tokenizer's own backend, as `apply_chat_template(tokenize=True)` calls it;
- ids are int32 [T], offsets int64 [N + 1].

For sentencepiece-like models gigatoken remembers the ids of words, but only from one call with a single text to the next: a call with
a batch begins with nothing. So the texts of a batch are joined:

1. The tokenizer gets one more added token, drawn at random, to stand between texts: nothing goes on across it.
2. `Metaspace` of scheme `first` puts a blank before the first text alone. It becomes `never`, and the texts get the blank here.
3. The memory of words has no end, and takes some 14 bytes for each byte of new words: the tokenizer is loaded again after so
   much text that this takes about 2 % of the time. For a large one (Gemma) that would be too much text, so it is not joined.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import count, pairwise
from threading import Lock
from typing import Any, Protocol
from uuid import uuid4

import numpy as np
import numpy.typing as npt

from raysvc.chat.tokens.backend_parts import unknown_id
from raysvc.ragged import offsets_of

Ints32 = npt.NDArray[np.int32]
Ints64 = npt.NDArray[np.int64]
Bytes = npt.NDArray[np.uint8]


@dataclass(frozen=True)
class EncodedTexts:
    """Ids of N texts.

    Attributes:
        ids: int32 [T].
        offsets: int64 [N + 1].
    """

    ids: Ints32
    offsets: Ints64


class Encoder(Protocol):
    """Encodes texts without adding special tokens."""

    name: str

    def encode(self, texts: Sequence[str]) -> EncodedTexts:
        """Ids of the texts."""
        ...

    def encode_bytes(self, data: Bytes, offsets: Ints64) -> EncodedTexts:
        """Ids of N texts that lie one after the other in UTF-8: uint8 [B], int64 [N + 1]."""
        ...


class TokenizerFiles(Protocol):
    """Declares what encoders are made from: a loaded tokenizer, or one like it."""

    @property
    def hf(self) -> Any:
        """Returns the encoder in the form of a `transformers` tokenizer."""
        ...

    @property
    def free_id(self) -> int:
        """An id that no token has."""
        ...

    def content(self) -> bytes:
        """Returns the encoder as the bytes of a `tokenizer.json`."""
        ...


class ReferenceEncoder:
    """The `tokenizers` backend of the `transformers` tokenizer.

    Attributes:
        unknown: id of what the model has no token for, None when it has none.
    """

    name = "tokenizers"

    def __init__(self, tokenizer: TokenizerFiles) -> None:
        self._backend = tokenizer.hf.backend_tokenizer
        self._backend.encode_special_tokens = bool(getattr(tokenizer.hf, "split_special_tokens", False))
        self.unknown = unknown_id(self._backend)

    def encode(self, texts: Sequence[str]) -> EncodedTexts:
        """Ids of the texts."""
        found = self._backend.encode_batch_fast(list(texts), add_special_tokens=False)
        return joined([encoding.ids for encoding in found])

    def encode_bytes(self, data: Bytes, offsets: Ints64) -> EncodedTexts:
        """Ids of N texts in UTF-8."""
        whole, bounds = data.tobytes(), offsets.tolist()
        return self.encode([whole[a:b].decode() for a, b in pairwise(bounds)])

    def encode_with_offsets(self, text: str) -> tuple[list[int], list[tuple[int, int]]]:
        """(ids, characters of each) of one text."""
        encoding = self._backend.encode(text, add_special_tokens=False)
        return list(encoding.ids), list(encoding.offsets)

    def decode(self, ids: list[int]) -> str:
        """Text of ids."""
        return str(self._backend.decode(ids, skip_special_tokens=False))


class GigatokenEncoder:
    """`gigatoken`, from the content of a `tokenizer.json`; one thread unless RAYON_NUM_THREADS says more.

    Args:
        content: of the file.
        free_id: that no token has.
    """

    name = "gigatoken"

    def __init__(self, content: bytes, free_id: int) -> None:
        import gigatoken

        self._parallel = int(os.environ.get("RAYON_NUM_THREADS", "1") or 1) > 1
        self._joined: JoinedTexts | None = None
        if gains(content) and not self._parallel:
            self._joined = JoinedTexts(content, free_id)
        else:
            self._inner = gigatoken.Tokenizer.from_json(content)

    def encode(self, texts: Sequence[str]) -> EncodedTexts:
        """Ids of the texts."""
        return self.encode_pieces([text.encode() for text in texts])

    def encode_pieces(self, texts: list[bytes]) -> EncodedTexts:
        """Ids of texts in UTF-8."""
        if not texts:
            return joined([])
        if self._joined:
            return EncodedTexts(*self._joined.encode(texts))
        return self._encoded(texts)

    def encode_bytes(self, data: Bytes, offsets: Ints64) -> EncodedTexts:
        """Ids of N texts in UTF-8, without an object per text."""
        import awkward as ak

        if self._joined or len(offsets) == 1:
            whole = data.tobytes()
            return self.encode_pieces([whole[a:b] for a, b in pairwise(offsets.tolist())])
        chars = ak.contents.NumpyArray(data, parameters={"__array__": "char"})
        strings = ak.contents.ListOffsetArray(
            ak.index.Index64(offsets), chars, parameters={"__array__": "string"}
        )
        return self._encoded(ak.Array(strings))

    def _encoded(self, texts: Any) -> EncodedTexts:
        return EncodedTexts(*ids_and_offsets(self._inner.encode_batch(texts, parallel=self._parallel)))


def joined(lists: list[list[int]]) -> EncodedTexts:
    offsets = offsets_of([*map(len, lists)])
    ids = np.fromiter((token for ids in lists for token in ids), np.int32, int(offsets[-1]))
    return EncodedTexts(ids, offsets)


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
