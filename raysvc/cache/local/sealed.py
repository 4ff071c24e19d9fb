"""JSON that carries a checksum of itself.

Always true:
- `opened` gives what was given to `sealed`, or raises: a changed, missing or added byte anywhere is found;
- a sealed file has no space after its colons, so one of which a bit changed is never taken for one of an earlier version.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import Any

from raysvc.cache.key import canonical_json

SEAL = "sha256"


def seal_of(fields: Mapping[str, Any]) -> str:
    """The checksum of an object's other fields."""
    return hashlib.sha256(canonical_json(fields)).hexdigest()


def sealed(fields: Mapping[str, Any]) -> bytes:
    """The bytes of a file that holds `fields` and their checksum."""
    return canonical_json({**fields, SEAL: seal_of(fields)})


def opened_if_sealed(data: bytes) -> dict[str, Any]:
    """Gives what `opened` gives; what an earlier version wrote, as `json.dumps` does and without a checksum, as it is.

    Raises:
        ValueError: the file is not what was written.
    """
    try:
        raw = json.loads(data)
        is_earlier = isinstance(raw, dict) and SEAL not in raw and json.dumps(raw).encode() == data
    except (ValueError, RecursionError):
        is_earlier = False
    return dict(raw) if is_earlier else opened(data)


def opened(data: bytes) -> dict[str, Any]:
    """Returns what was given to `sealed`.

    Raises:
        ValueError: the file is not what was written; the text says in what way.
    """
    try:
        raw = json.loads(data)
        seal = raw.pop(SEAL, None)
        intact = seal == seal_of(raw) and sealed(raw) == data
    except (ValueError, TypeError, AttributeError, KeyError, RecursionError):
        raise ValueError(f"is not the JSON that was written ({len(data)} bytes)") from None
    if seal is None:
        raise ValueError("has no checksum")
    if not intact:
        raise ValueError("is damaged: its checksum does not match its content")
    return dict(raw)
