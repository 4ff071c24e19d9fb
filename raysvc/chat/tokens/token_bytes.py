"""Bytes of text that every id of a tokenizer stands for.

Axes: V ids.
Always true:
- with a byte-level or metaspace vocabulary the bytes of a text's ids, joined, are the text (a metaspace tokenizer may
  put a space before it);
- an id that no text is made of (a control token) counts no bytes.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import accumulate, pairwise
from typing import Any

import numpy as np
import numpy.typing as npt


def count_bytes(hf: Any) -> npt.NDArray[np.int32] | None:
    """int32 [V], bytes of text of every id, 0 for control tokens; None for a tokenizer without a fast backend."""
    if getattr(hf, "backend_tokenizer", None) is None:
        return None
    counts = np.array([len(piece) for piece in bytes_of_tokens(hf)], np.int32)
    control = [token for token, added in hf.added_tokens_decoder.items() if added.special]
    counts[[*control, *hf.all_special_ids]] = 0
    return counts


def bytes_of_tokens(hf: Any) -> list[bytes]:
    """Bytes of every id of a fast tokenizer, [V]; those of a token that is no plain text are its name."""
    backend = hf.backend_tokenizer
    vocab: dict[str, int] = backend.get_vocab(with_added_tokens=True)
    pieces = [b""] * (max(vocab.values(), default=-1) + 1)
    is_byte_level = b'"ByteLevel"' in _state(backend.decoder)
    for token, piece in zip(
        vocab.values(), (_all_byte_level if is_byte_level else _all_metaspace)(vocab), strict=True
    ):
        pieces[token] = piece
    for token, added in hf.added_tokens_decoder.items():
        pieces[token] = added.content.encode()
    return pieces


def _state(part: Any) -> bytes:
    """JSON of one part of a backend; that of the whole takes half a second to write and parse."""
    state: bytes = b"" if part is None else part.__getstate__()
    return state


def _all_byte_level(texts: Iterable[str]) -> list[bytes]:
    """All at once where every character stands for a byte, which takes a fifth of the time."""
    texts = list(texts)
    try:
        joined = "".join(texts).translate(_BYTE_OF).encode("latin-1")
    except UnicodeEncodeError:
        return [_byte_level(text) for text in texts]
    ends = list(accumulate(map(len, texts), initial=0))
    return [joined[start:end] for start, end in pairwise(ends)]


def _all_metaspace(texts: Iterable[str]) -> list[bytes]:
    return [_metaspace(text) for text in texts]


def _byte_level(text: str) -> bytes:
    try:
        return text.translate(_BYTE_OF).encode("latin-1")
    except UnicodeEncodeError:
        return text.encode()


def _metaspace(text: str) -> bytes:
    if len(text) == 6 and text.startswith("<0x") and text.endswith(">"):
        return bytes([int(text[3:5], 16)])
    return text.replace("\u2581", " ").encode()


def _char_of_byte() -> list[str]:
    shown = {*range(33, 127), *range(161, 173), *range(174, 256)}
    others = iter(range(256, 512))
    return [chr(byte if byte in shown else next(others)) for byte in range(256)]


CHAR_OF_BYTE = _char_of_byte()
"""[256], the character that stands for each byte in a byte-level vocabulary (GPT-2's table)."""
_BYTE_OF = dict.fromkeys(range(256), "\uffff")  # a character that stands for none becomes one that is no byte
_BYTE_OF |= {ord(char): chr(byte) for byte, char in enumerate(CHAR_OF_BYTE)}
