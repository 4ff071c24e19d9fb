"""Text -> token ids, by the reference encoder or by a fast one that was seen to be equal.

Axes: N texts, T tokens of all N texts one after the other, V ids.
Always true:
- the reference is the tokenizer's own backend, as `apply_chat_template(tokenize=True)` calls it;
- a fast encoder is used only after it gave equal ids on the probe texts;
- ids are int32 [T], offsets int64 [N + 1].
"""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from raysvc.chat.tokens.tokenizer import LoadedTokenizer

logger = logging.getLogger(__name__)
Ints32 = npt.NDArray[np.int32]
Ints64 = npt.NDArray[np.int64]
Bytes = npt.NDArray[np.uint8]

PROBES = (
    "",
    " ",
    "\n",
    "Hello, world! It's 12345 o'clock; don't panic.",
    "  two   spaces,\ttabs\t\tand\r\nlines\n\n\nend   ",
    " " * 40 + "x" + " " * 3,
    "na\u00efve caf\u00e9 cafe\u0301 \u01c5 \ufb01 \u212b \u1e9b\u0323",
    "\u4f60\u597d\uff0c\u4e16\u754c\u3002\u3053\u3093\u306b\u3061\u306f \ud55c\uad6d\uc5b4 \u0e44\u0e17\u0e22",
    "\u0645\u0631\u062d\u0628\u0627 \u05e9\u05dc\u05d5\u05dd \u0928\u092e\u0938\u094d\u0924\u0947",
    "\U0001f600\U0001f468\u200d\U0001f469\u200d\U0001f467 \U0001f1e9\U0001f1ea \u2764\ufe0f",
    "\u00a0\u2003\u3000\u200b\ufeff\x00\x01\x1f\x7f\x85\u2028",
    "def f(x):\n    return {'a': [1, 2.5e-3]}  # \u2264 \u03c0\n",
    '{"name": "f", "arguments": {"q": "a\\"b\\\\c\\n"}}',
    "1234567890 1,000.00 \u0661\u0662\u0663 \u00bd \u2167 x\u00b2",
    "I'LL WE'VE they'Re 'S 't \u2019s",
    "https://example.org/a?b=c&d=%20#e_f-g",
)


@dataclass(frozen=True)
class Encoded:
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

    def encode(self, texts: Sequence[str]) -> Encoded:
        """Ids of the texts."""
        ...

    def encode_bytes(self, data: Bytes, offsets: Ints64) -> Encoded:
        """Ids of N texts that lie one after the other in UTF-8: uint8 [B], int64 [N + 1]."""
        ...


class ReferenceEncoder:
    """The `tokenizers` backend of the `transformers` tokenizer."""

    name = "tokenizers"

    def __init__(self, tokenizer: LoadedTokenizer) -> None:
        self._backend = tokenizer.hf.backend_tokenizer
        self._backend.encode_special_tokens = bool(getattr(tokenizer.hf, "split_special_tokens", False))

    def encode(self, texts: Sequence[str]) -> Encoded:
        """Ids of the texts."""
        found = self._backend.encode_batch_fast(list(texts), add_special_tokens=False)
        return _joined([encoding.ids for encoding in found])

    def encode_bytes(self, data: Bytes, offsets: Ints64) -> Encoded:
        """Ids of N texts in UTF-8."""
        whole, bounds = data.tobytes(), offsets.tolist()
        return self.encode([whole[a:b].decode() for a, b in pairwise(bounds)])

    def encode_with_offsets(self, text: str) -> tuple[list[int], list[tuple[int, int]]]:
        """(ids, characters of each) of one text."""
        encoding = self._backend.encode(text, add_special_tokens=False)
        return list(encoding.ids), list(encoding.offsets)

    def says(self, ids: list[int], text: str) -> bool:
        """Whether ids decode to a text, as the tokenizer normalizes it, blanks around it aside."""
        decoded: str = self._backend.decode(ids, skip_special_tokens=False)
        normalizer = self._backend.normalizer
        normal: str = normalizer.normalize_str(text) if normalizer is not None else text
        return decoded.strip() in (text.strip(), normal.strip(), normal.replace("\u2581", " ").strip())


class GigatokenEncoder:
    """`gigatoken`, from the same serialized tokenizer; one thread unless RAYON_NUM_THREADS says more."""

    name = "gigatoken"

    def __init__(self, tokenizer: LoadedTokenizer) -> None:
        import gigatoken

        self._inner = gigatoken.Tokenizer.from_json(tokenizer.hf.backend_tokenizer.to_str())
        self._parallel = int(os.environ.get("RAYON_NUM_THREADS", "1") or 1) > 1

    def encode(self, texts: Sequence[str]) -> Encoded:
        """Ids of the texts."""
        if not texts:
            return _joined([])
        return self._encoded(list(texts))

    def encode_bytes(self, data: Bytes, offsets: Ints64) -> Encoded:
        """Ids of N texts in UTF-8, without an object per text."""
        import awkward as ak

        if len(offsets) == 1:
            return _joined([])
        chars = ak.contents.NumpyArray(data, parameters={"__array__": "char"})
        strings = ak.contents.ListOffsetArray(
            ak.index.Index64(offsets), chars, parameters={"__array__": "string"}
        )
        return self._encoded(ak.Array(strings))

    def _encoded(self, texts: Any) -> Encoded:
        layout: Any = self._inner.encode_batch(texts, parallel=self._parallel).layout
        offsets = np.asarray(layout.offsets.data, dtype=np.int64)
        ids = np.asarray(layout.content.data)[offsets[0] : offsets[-1]]
        return Encoded(ids.astype(np.int32, copy=False).view(np.int32), offsets - offsets[0])


def _joined(lists: list[list[int]]) -> Encoded:
    offsets = np.zeros(len(lists) + 1, np.int64)
    np.cumsum([len(ids) for ids in lists], out=offsets[1:])
    ids = np.fromiter((token for ids in lists for token in ids), np.int32, int(offsets[-1]))
    return Encoded(ids, offsets)


def probe_texts(tokenizer: LoadedTokenizer) -> list[str]:
    """Texts on which an encoder has to prove itself: hard ones, and every added token inside some text."""
    added = sorted({token.content for token in tokenizer.hf.added_tokens_decoder.values()})
    inside = [
        form.replace("{}", token) for token in added[:256] for form in ("{}", "a {} b", "a{}b", " {} \n")
    ]
    return [*PROBES, *inside, "".join(added[:64]), " ".join(PROBES)]


def choose_encoder(tokenizer: LoadedTokenizer, reference: ReferenceEncoder) -> tuple[Encoder, str]:
    """The fastest encoder that is equal to the reference on the probe texts, and why it is not a faster one."""
    if getattr(tokenizer.hf, "split_special_tokens", False):
        return reference, "the tokenizer splits special tokens"
    try:
        fast: Encoder = GigatokenEncoder(tokenizer)
    except ImportError:
        return reference, "gigatoken is not installed"
    except Exception as error:  # noqa: BLE001  a native package may refuse a tokenizer in any way
        logger.warning("encoder=%s refused the tokenizer: %s", GigatokenEncoder.name, error)
        return reference, f"gigatoken refused the tokenizer: {error}"
    texts = probe_texts(tokenizer)
    different = first_difference(fast, reference, texts)
    if different is None:
        return fast, ""
    logger.warning("encoder=%s differs from the reference on a probe: %r", fast.name, texts[different][:80])
    return reference, f"{fast.name} differs on a probe text"


def first_difference(fast: Encoder, reference: Encoder, texts: Sequence[str]) -> int | None:
    """Index of the first text on which two encoders differ."""
    try:
        ours, theirs = fast.encode(texts), reference.encode(texts)
    except Exception as error:  # noqa: BLE001  a native encoder that raises is one that differs
        logger.warning("encoder=%s raised on a probe: %s", fast.name, error)
        return 0
    if np.array_equal(ours.offsets, theirs.offsets) and np.array_equal(ours.ids, theirs.ids):
        return None
    for index in range(len(texts)):
        mine = ours.ids[ours.offsets[index] : ours.offsets[index + 1]]
        if not np.array_equal(mine, theirs.ids[theirs.offsets[index] : theirs.offsets[index + 1]]):
            return index
    return 0
