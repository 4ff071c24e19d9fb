"""Identifies what a model is, apart from where it lies: the identity that a key holds, and what has to fit the rows.

A folder is known by the content of its configuration and weights, hashed once and remembered like source files; a hub
name by its commit; `tiny` by what it is made of.

Always true:
- an identity holds no path and no time;
- what a folder holds is looked up by size, times and inode, and hashed where nobody knows.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from raysvc import hub
from raysvc.actors.model.load_model import WEIGHTS, read_config, tiny_sizes
from raysvc.cache.key import canonical_json
from raysvc.cache.local.checksum import checksum_of
from raysvc.cache.local.mmap import map_file
from raysvc.errors import ConfigError
from raysvc.pipelines.sources.file_stamp import is_settled, local_stamp
from raysvc.pipelines.sources.scan_memo import Memo

THREADS = 4
CONFIGS = ("config.json", "adapter_config.json")
RECORD_VERSION = 1
HUB_BYTES = 1 << 34  # a guess, where the hub was asked for the configuration alone
TINY_BYTES = 1 << 20


@dataclass(frozen=True)
class ModelFiles:
    """A model that was looked at.

    Attributes:
        name: as the job gives it; absolute when it is a folder.
        identity: plain JSON for the recipe.
        num_bytes: of its weights.
        vocab_size: entries of its head.
        max_tokens: of a row; None: no limit.
        tokenizer: its `tokenizer.json`; None where there is none.
        revision: commit on the hub.
    """

    name: str
    identity: Mapping[str, Any]
    num_bytes: int
    vocab_size: int
    max_tokens: int | None
    tokenizer: bytes | None = None
    revision: str | None = None


def look_at_model(where: str, name: str, vocab_size: int, seed: int, memo: Memo | None) -> ModelFiles:
    """Read the configuration, and identify the weights.

    Args:
        where: key of the job, for messages.
        name: `tiny`, a folder, or a hub name.
        vocab_size, seed: of `tiny`.
        memo: what was found out about files before.

    Raises:
        ConfigError: there is no model, or it is not a language model.
    """
    if name == "tiny":
        sizes = tiny_sizes(vocab_size)
        identity = {"tiny": {**sizes, "seed": seed}}
        return ModelFiles(name, identity, TINY_BYTES, vocab_size, sizes["max_position_embeddings"])
    folder = Path(name).expanduser()
    if folder.is_dir():
        return _folder(where, folder.absolute(), memo)
    if folder.is_absolute() or name.startswith((".", "~")):
        remedy = "give a folder that this machine and the workers see, a hub name, or tiny"
        raise ConfigError(where, f"there is no folder {name}", remedy)
    return _of_hub(where, name)


def _folder(where: str, folder: Path, memo: Memo | None) -> ModelFiles:
    vocab_size, max_tokens, _ = _config(where, str(folder))
    names = sorted(item.name for item in os.scandir(folder) if item.is_file())
    weights = [name for name in names if name.endswith(".safetensors")]
    weights = weights or [name for name in names if name.endswith(WEIGHTS)]
    if not weights:
        raise ConfigError(where, f"{folder} holds no weights", "give a folder that save_pretrained wrote")
    chosen = [*(name for name in CONFIGS if name in names), *weights]
    with ThreadPoolExecutor(THREADS) as pool:
        found = list(pool.map(lambda name: _content(folder / name, memo), chosen))
    identity = {"files": {name: digest for name, (_, digest) in zip(chosen, found, strict=True)}}
    num_bytes = sum(size for name, (size, _) in zip(chosen, found, strict=True) if name in weights)
    tokenizer = folder / "tokenizer.json"
    kept = tokenizer.read_bytes() if tokenizer.is_file() else None
    return ModelFiles(str(folder), identity, num_bytes, vocab_size, max_tokens, kept)


def _of_hub(where: str, name: str) -> ModelFiles:
    from transformers.utils import cached_file

    vocab_size, max_tokens, commit = _config(where, name)
    if commit is None:
        raise ConfigError(where, f"the hub names no commit of {name}", "download it, and give its folder")
    with hub.answering():
        path = cached_file(
            name, "tokenizer.json", revision=commit, _raise_exceptions_for_missing_entries=False
        )
    kept = None if path is None else Path(path).read_bytes()
    identity = {"hub": name, "commit": commit}
    return ModelFiles(name, identity, HUB_BYTES, vocab_size, max_tokens, kept, commit)


def _config(where: str, name: str) -> tuple[int, int | None, str | None]:
    """Vocabulary, longest row and commit by the model's own configuration."""
    with hub.answering():
        config = read_config(name, where)
    text = config.get_text_config()
    most, entries = (getattr(text, size, None) for size in ("max_position_embeddings", "vocab_size"))
    if not isinstance(entries, int):
        raise ConfigError(where, f"{name!r} does not say its vocab_size", "give a causal language model")
    return entries, most if isinstance(most, int) else None, getattr(config, "_commit_hash", None)


def _content(path: Path, memo: Memo | None) -> tuple[int, str]:
    """Size and XXH3-128 of a file.

    Raises:
        ConfigError: it changes while it is read.
    """
    stamp = _stamp(path)
    about = {"version": RECORD_VERSION, "model_file": _hashed([str(path), stamp])}
    known = memo.get(about) if memo is not None else None
    if known is not None and known.get("size") == stamp["size"] and isinstance(known.get("xxh3"), str):
        return stamp["size"], str(known["xxh3"])
    settled = is_settled(stamp)
    digest = checksum_of(memoryview(map_file(path))) if stamp["size"] else ""
    if _stamp(path) != stamp:
        raise ConfigError(str(path), "changed while it was read", "run again when it is finished")
    if memo is not None and settled:
        memo.put(about, {"size": stamp["size"], "xxh3": digest})
    return stamp["size"], digest


def _stamp(path: Path) -> dict[str, int]:
    handle = os.open(path, os.O_RDONLY)
    try:
        return local_stamp(handle)
    finally:
        os.close(handle)


def _hashed(value: Any) -> str:
    return hashlib.sha256(canonical_json(value)).hexdigest()
