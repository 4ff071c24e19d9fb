"""Chooses the encoder of a tokenizer: the fastest that is seen to be equal to the reference.

Always true:
- a fast encoder is used only after it gave equal ids on the probe texts, which hold every added token, and those that touch each other;
- a loaded tokenizer is probed once, however many sources have it;
- code points are tried when they first stand in a text (`code_points`).
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from itertools import pairwise
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import numpy as np

from raysvc.chat.tokens import encoder
from raysvc.chat.tokens.code_points import GuardedEncoder, Pair, shown_cuts
from raysvc.chat.tokens.encoder import Encoder, ReferenceEncoder, TokenizerFiles
from raysvc.chat.tokens.normalizing_encoder import hidden_tokens, normalizing_encoder
from raysvc.chat.tokens.tokenizer import LoadedTokenizer

logger = logging.getLogger(__name__)

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
    "a\u2581b \u2581 \u2581\u2581 c \u2581<0x41>",
)


class Encoders(NamedTuple):
    """Holds what encodes the texts of one tokenizer.

    Attributes:
        reference: what is right.
        best: the fastest that is equal to it.
        why: there is no faster one; empty for gigatoken.
    """

    reference: ReferenceEncoder
    best: Encoder
    why: str


_FOUND: WeakKeyDictionary[LoadedTokenizer, Encoders] = WeakKeyDictionary()


def encoders_of(tokenizer: LoadedTokenizer) -> Encoders:
    """The encoders of a tokenizer, chosen when it is asked for them first."""
    found = _FOUND.get(tokenizer)
    if found is None:
        reference = ReferenceEncoder(tokenizer)
        found = _FOUND[tokenizer] = Encoders(reference, *choose_encoder(tokenizer, reference))
    return found


def share_encoders(of: LoadedTokenizer, other: LoadedTokenizer) -> None:
    """Let another one from the same files, whose template alone differs, have the encoders of `of`."""
    _FOUND[other] = encoders_of(of)


def probe_texts(tokenizer: LoadedTokenizer) -> list[str]:
    """Texts on which an encoder is tried: hard ones, every added token inside some text, and those that touch each other."""
    tokens = [*tokenizer.hf.added_tokens_decoder.values()]
    added = sorted({token.content for token in tokens})
    inside = [form.replace("{}", token) for token in added for form in ("{}", "a {} b", "a{}b", " {} \n")]
    return [*PROBES, *inside, *_touching(tokens), "".join(added), " ".join(PROBES)]


def _touching(tokens: list[Any]) -> list[str]:
    """Texts in which two added tokens want the same characters, or one and the blank before a text do."""
    added = {token.content for token in tokens}
    begins: dict[str, list[str]] = {}
    for token in added:
        for size in range(1, len(token)):
            begins.setdefault(token[:size], []).append(token)
    over = {
        token + other[size:]
        for token in added
        for size in range(1, len(token))
        for other in begins.get(token[-size:], [])
    }
    # behind `rstrip`, the library panics at one with `lstrip`
    open_with_blank = {token.content for token in tokens if token.content[:1].isspace() and not token.lstrip}
    over |= {token.content + other for token in tokens if token.rstrip for other in open_with_blank}
    return sorted({*over, *(f"a{text}a" for text in over), *(token.strip() for token in open_with_blank)})


def choose_encoder(tokenizer: LoadedTokenizer, reference: ReferenceEncoder) -> tuple[Encoder, str]:
    """The fastest encoder that is equal to the reference on the probe texts, and why it is not a faster one."""
    if getattr(tokenizer.hf, "split_special_tokens", False):
        return reference, "the tokenizer splits special tokens"
    if any(token.single_word for token in tokenizer.hf.added_tokens_decoder.values()):
        return reference, "an added token is one only as a word (single_word)"
    texts = probe_texts(tokenizer)
    fast, why = _gigatoken(tokenizer, reference, texts)
    if fast is not None:
        return fast, ""
    logger.warning("encoder=%s is used: %s", reference.name, why)
    return reference, why


def _gigatoken(
    tokenizer: LoadedTokenizer, reference: ReferenceEncoder, texts: Sequence[str]
) -> tuple[Encoder | None, str]:
    """(gigatoken, or None; why not)."""
    try:
        fast = _taken(tokenizer, reference)
        shown = _shown(tokenizer)
    except ImportError:
        return None, "gigatoken is not installed (pip install gigatoken)"
    except Exception as error:  # noqa: BLE001  a native package may refuse a tokenizer in any way
        return None, f"gigatoken refused the tokenizer: {str(error).partition(chr(10))[0]}"
    different = first_difference(fast, reference, texts)
    if different is None:
        odd = hidden_tokens(tokenizer.hf) if isinstance(fast, encoder.GigatokenEncoder) else ""
        guarded = GuardedEncoder(fast, reference, shown, odd)
        return (None, f"{fast.name} differs on ASCII") if guarded.different else (guarded, "")
    logger.warning("encoder=%s differs from the reference on a probe: %r", fast.name, texts[different][:80])
    return None, f"{fast.name} differs on a probe text"


def _shown(tokenizer: LoadedTokenizer) -> Pair | None:
    """The encoders of the same tokenizer with a vocabulary that shows all cuts."""
    files = shown_cuts(tokenizer.hf.backend_tokenizer)
    if files is None:
        return None
    reference = ReferenceEncoder(files)
    return _taken(files, reference), reference


def _taken(tokenizer: TokenizerFiles, reference: ReferenceEncoder) -> Encoder:
    """gigatoken, of normalized texts where it does not take the normalizer."""
    try:
        return encoder.GigatokenEncoder(tokenizer.content(), tokenizer.free_id)
    except ImportError:
        raise
    except Exception:
        normalizing = normalizing_encoder(tokenizer, reference)
        if normalizing is None:
            raise
        return normalizing


def first_difference(fast: Encoder, reference: Encoder, texts: Sequence[str]) -> int | None:
    """Index of the first text on which two encoders differ."""
    try:
        ours, theirs = fast.encode(texts), reference.encode(texts)
    except Exception as error:  # noqa: BLE001  a native encoder that raises is one that differs
        logger.warning("encoder=%s raised on a probe: %s", fast.name, error)
        return 0
    if np.array_equal(ours.offsets, theirs.offsets) and np.array_equal(ours.ids, theirs.ids):
        return None
    rows = ([found.ids[a:b] for a, b in pairwise(found.offsets)] for found in (ours, theirs))
    return next(index for index, pair in enumerate(zip(*rows, strict=True)) if not np.array_equal(*pair))
