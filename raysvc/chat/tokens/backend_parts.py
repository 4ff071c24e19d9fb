"""The steps of a tokenizer's backend, and what of a text they drop.

Always true:
- of a tokenizer that drops all blanks, as those of words do, no token holds one: the library's offsets say where each stands;
- a tokenizer that drops anything else, or only some blanks, is refused when it is loaded.
"""

from __future__ import annotations

import json
from typing import Any

from raysvc.errors import TokenizerError

Part = dict[str, Any]
_NO_CHARACTER = "\U0010fffe"
_BLANKS = " \t\n"
_PROBE = "".join(map(chr, range(33, 127))) + _BLANKS + "\u00e9\u4f60\u3002"


def parts_of(step: Any) -> list[Part]:
    """A normalizer or pre-tokenizer as JSON, the parts of a sequence one after the other."""
    return [] if step is None else _flat(json.loads(step.__getstate__()))


def _flat(part: Part) -> list[Part]:
    inner = part.get("normalizers") or part.get("pretokenizers")
    return [part] if inner is None else [leaf for one in inner for leaf in _flat(one)]


def unknown_id(backend: Any) -> int | None:
    """Id of what the model has no token for, None when it has none."""
    from tokenizers.models import Unigram

    if isinstance(backend.model, Unigram):  # which does not say it
        found = [token.id for token in backend.model.tokenize(_NO_CHARACTER)]
        return found[0] if len(found) == 1 else None
    text = getattr(backend.model, "unk_token", None)
    return backend.token_to_id(text) if text else None


def drops_blanks(backend: Any) -> bool:
    """Returns whether no token of text holds a blank."""
    return set(_BLANKS) <= _dropped(backend)


def refuse_dropped_text(backend: Any) -> None:
    """Refuse a tokenizer whose ids do not say all of a text.

    Raises:
        TokenizerError: its pre-tokenizer drops more than blanks, or only some of them.
    """
    lost = _dropped(backend)
    if lost - {*_BLANKS} or (lost and not drops_blanks(backend)):
        kinds = ", ".join(part["type"] for part in parts_of(backend.pre_tokenizer))
        raise TokenizerError(
            "tokenizer",
            f"its pre-tokenizer ({kinds}) drops {''.join(sorted(lost))[:20]!r}, so its ids do not say a text",
            "use a tokenizer that keeps everything, or all but blanks",
        )


def _dropped(backend: Any) -> set[str]:
    """Characters of a probe that stand in no piece."""
    if backend.pre_tokenizer is None:
        return set()
    patterns = [part.get("pattern", {}) for part in parts_of(backend.pre_tokenizer)]
    text = " ".join([_PROBE, *(pattern["String"] for pattern in patterns if "String" in pattern)])
    kept = {place for _, (a, b) in backend.pre_tokenizer.pre_tokenize_str(text) for place in range(a, b)}
    return {char for place, char in enumerate(text) if place not in kept}
