"""The most tokens that a model takes, as the files beside its tokenizer say."""

from __future__ import annotations

import json
from typing import Any

from raysvc.chat.tokens.tokenizer import file_beside
from raysvc.job.config import TokenizerConfig

NO_LIMIT = 10**9  # what a tokenizer writes for a limit that it does not know is larger


def model_limit(tokenizer: TokenizerConfig) -> int | None:
    """`max_position_embeddings` of the model, else `model_max_length` of the tokenizer; None: neither is known."""
    model = _read(tokenizer, "config.json")
    inner = model.get("text_config")
    found = (inner if isinstance(inner, dict) else model).get("max_position_embeddings")
    found = found or _read(tokenizer, "tokenizer_config.json").get("model_max_length")
    return int(found) if isinstance(found, int | float) and 0 < found < NO_LIMIT else None


def _read(tokenizer: TokenizerConfig, name: str) -> dict[str, Any]:
    path = file_beside(tokenizer, name)
    try:
        found = json.loads(path.read_text()) if path is not None else {}
    except (OSError, ValueError):
        found = {}
    return found if isinstance(found, dict) else {}
