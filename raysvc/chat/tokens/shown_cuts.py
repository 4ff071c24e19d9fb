"""A tokenizer of bytes with a vocabulary that shows every cut of a text.

A vocabulary shows a cut only where one of its tokens would lie across it: without a token `'s`, few ids tell whether a
character is a letter. In this one, the last byte of a character and the first of the next are one token unless a cut is between.

Always true:
- normalizers and pre-tokenizers are those of the tokenizer, and nothing else of it is left;
- of two characters side by side, one at least is beyond ASCII: what is ASCII alone is tried with the tokenizer itself.
"""

from __future__ import annotations

from itertools import product
from typing import Any

from raysvc.chat.tokens.file_tokenizer import FileTokenizer
from raysvc.chat.tokens.token_bytes import CHAR_OF_BYTE

_ASCII = range(0x80)
_ENDS = range(0x80, 0xC0)  # the last byte of a character beyond ASCII
_BEGINS = range(0xC2, 0xF5)  # the first


def shown_cuts(backend: Any) -> ShownCuts | None:
    """That of a tokenizer; None where its pre-tokenizer does not make bytes of a text."""
    pre = backend.pre_tokenizer
    if pre is None or b'"ByteLevel"' not in pre.__getstate__():
        return None
    return ShownCuts(backend)


class ShownCuts:
    """Holds what encoders are made from, as of a loaded tokenizer.

    Args:
        backend: of the tokenizer.

    Attributes:
        hf: like a `transformers` tokenizer.
        free_id: that no token has.
    """

    def __init__(self, backend: Any) -> None:
        from tokenizers import Tokenizer, models

        pairs = [*product(_ENDS, _BEGINS), *product(_ASCII, _BEGINS), *product(_ENDS, _ASCII)]
        merges = [(CHAR_OF_BYTE[a], CHAR_OF_BYTE[b]) for a, b in pairs]
        vocab = {token: number for number, token in enumerate([*CHAR_OF_BYTE, *map("".join, merges)])}
        made = Tokenizer(models.BPE(vocab=vocab, merges=merges))
        made.pre_tokenizer = backend.pre_tokenizer
        if backend.normalizer is not None:
            made.normalizer = backend.normalizer
        if backend.decoder is not None:
            made.decoder = backend.decoder
        self.hf = FileTokenizer(made, {}, (), None)
        self.free_id = len(vocab)

    def content(self) -> bytes:
        """Returns the encoder as the bytes of a `tokenizer.json`."""
        text: str = self.hf.backend_tokenizer.to_str()
        return text.encode()
