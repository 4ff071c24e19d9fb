"""Text -> token ids, by the reference encoder or by a fast one that was seen to be equal.

Axes: N texts, T tokens of all N texts one after the other, V ids.
Always true:
- the reference is the tokenizer's own backend, as `apply_chat_template(tokenize=True)` calls it;
- ids are int32 [T], offsets int64 [N + 1].
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from raysvc.chat.tokens.backend_parts import unknown_id
from raysvc.chat.tokens.joined_texts import JoinedTexts, gains, ids_and_offsets

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
    offsets = np.zeros(len(lists) + 1, np.int64)
    np.cumsum([len(ids) for ids in lists], out=offsets[1:])
    ids = np.fromiter((token for ids in lists for token in ids), np.int32, int(offsets[-1]))
    return EncodedTexts(ids, offsets)
