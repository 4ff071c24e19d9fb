"""The tokenizer that an entry keeps: bytes of the entry, and no code.

Always true:
- nothing but `tokenizer.json` in the folder of the entry's rows is read; no name, path or flag of the entry is followed;
- the bytes have the hash that the entry's recipe names, and that all entries of a mixture name;
- what this process has loaded from the same bytes is not loaded again.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from raysvc.cache import names
from raysvc.cache.part_info import REBUILD
from raysvc.errors import EntryError, TokenizerError

if TYPE_CHECKING:
    from tokenizers import Tokenizer

    from raysvc.cache.entry import Entry
    from raysvc.chat.tokens.tokenizer import LoadedTokenizer

SPECIAL = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")

_loaded: dict[str, Tokenizer] = {}  # hash of its bytes -> the one that a build or a look-up loaded last


def remember(digest: str, tokenizer: LoadedTokenizer) -> None:
    """Say what was loaded from the bytes of this hash: loading takes a third of a second."""
    _loaded.clear()
    _loaded[digest] = tokenizer.hf.backend_tokenizer


def kept_tokenizer(entries: Sequence[Entry]) -> Any:
    """A tokenizer that decodes the rows of entries, without `transformers`.

    Raises:
        TokenizerError: the first entry keeps none.
        EntryError: the bytes are not those of the recipe, or the entries name different ones.
    """
    from raysvc.chat.tokens.file_tokenizer import FileTokenizer

    first = entries[0]
    digest, special = _identity(first)
    for other in entries[1:]:
        if _identity(other)[0] != digest:
            raise EntryError(other.uri, f"it was built with another tokenizer than {first.uri}", REBUILD)
    data = _bytes_of(first)
    where = f"{first.store.url}/{first.folders[-1]}/{names.TOKENIZER}"
    if hashlib.sha256(data).hexdigest() != digest:
        raise EntryError(where, "its bytes are not those that the recipe names", REBUILD)
    backend = _loaded.get(digest) or _backend(data, where)
    return FileTokenizer(backend, special, (), None)


def _backend(data: bytes, where: str) -> Tokenizer:
    from tokenizers import Tokenizer

    try:
        return Tokenizer.from_str(data.decode())
    except Exception as error:  # noqa: BLE001  tokenizers raises plain Exception
        raise EntryError(where, f"it is not a tokenizer ({str(error)[:80]})", REBUILD) from None


def _identity(entry: Entry) -> tuple[str, dict[str, str]]:
    """Hash of the tokenizer's bytes, and its named special tokens."""
    identity = entry.recipe.get("tokenizer")
    if not isinstance(identity, Mapping) or not isinstance(identity.get("content_sha256"), str):
        raise TokenizerError(entry.uri, "its recipe names no tokenizer", REBUILD)
    special = identity.get("special_tokens")
    known = special if isinstance(special, Mapping) else {}
    return identity["content_sha256"], {
        name: known[name] for name in SPECIAL if isinstance(known.get(name), str)
    }


def _bytes_of(entry: Entry) -> bytes:
    try:
        return entry.store.read(f"{entry.folders[-1]}/{names.TOKENIZER}")
    except FileNotFoundError:
        raise TokenizerError(
            entry.uri, "it keeps no tokenizer, so its text cannot be shown", REBUILD
        ) from None
