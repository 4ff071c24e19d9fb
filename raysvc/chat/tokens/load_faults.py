"""Explains why a tokenizer could not be loaded, and what to do about it.

Always true:
- a file of the folder that is broken is named, and so is code that was not allowed to run or that failed.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from raysvc.errors import TokenizerError
from raysvc.job.config import TokenizerConfig

WHERE = "tokenizer"
_JSON = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "config.json",
)
_TEXTS = ("chat_template.jinja",)
_LFS = b"version https://git-lfs"
_RARE = "\u0e5b \U0001f9ff \U000f0000"
_SAVE = "save one with transformers' AutoTokenizer.from_pretrained(folder).save_pretrained(folder)"
_OTHERS = {
    "tekken.json": f"pip install mistral-common and {_SAVE}",
    "tokenizer.model": f"pip install sentencepiece protobuf tiktoken and {_SAVE}",
}
_USUAL = "give a folder with tokenizer.json, or a hub name that this machine can reach"
_READ = "read it, and set tokenizer.trust_remote_code to true to run it; or give a folder with tokenizer.json and no auto_map"


def load_fault(config: TokenizerConfig, error: Exception) -> TokenizerError:
    """Returns what `AutoTokenizer` raised, as a mistake with its remedy."""
    broken = _broken_file(Path(config.name))
    if broken is not None:
        return TokenizerError(WHERE, *broken)
    first = (str(error).strip().split("\n") or [""])[0][:300]
    what = f"{config.name!r} could not be loaded ({type(error).__name__}: {first})"
    if "custom code" in first and not config.trust_remote_code:
        return TokenizerError(WHERE, f"{config.name!r} brings Python code, which was not run", _READ)
    if config.trust_remote_code and not isinstance(error, OSError | ValueError):
        return TokenizerError(WHERE, what, "its own Python code may have failed: make it run, or " + _USUAL)
    return TokenizerError(WHERE, *(_no_file(config.name) or (what, _USUAL)))


def slow_fault(config: TokenizerConfig, hf: Any) -> TokenizerError:
    """A tokenizer that is Python code alone."""
    remedy = "give a copy with tokenizer.json: many models have one in Hugging Face's format"
    if (Path(config.name) / "tokenizer.json").is_file():
        remedy = "it has a tokenizer.json too: remove auto_map from its tokenizer_config.json, and it is used"
    what = (
        f"{config.name!r} is Python code alone ({type(hf).__name__}), which does not say where a token stands"
    )
    return TokenizerError(WHERE, what, remedy)


def check_model(name: str, backend: Any) -> None:
    """Refuse a model that would raise at an unknown word of some row, or that gives a text other ids each time.

    Raises:
        TokenizerError: it does.
    """
    dropout = getattr(backend.model, "dropout", None)
    if dropout:
        what = f"the model of {name!r} leaves out merges at random (dropout {dropout:.3g}), so a text has no ids of its own"
        raise TokenizerError(WHERE, what, "set model.dropout in tokenizer.json to null")
    try:
        backend.encode(_RARE, add_special_tokens=False)
    except Exception as error:  # noqa: BLE001  `tokenizers` raises nothing narrower
        unknown = getattr(backend.model, "unk_token", None)
        what = f"the vocabulary of {name!r} lacks its unknown token {unknown!r}, so it encodes no unknown word ({error})"
        remedy = f"add {unknown!r} to model.vocab in tokenizer.json, or name one there that it has as model.unk_token"
        if unknown is None:
            what = f"the model of {name!r} names no unknown token, so it encodes no unknown word ({error})"
            remedy = "set model.unk_id in tokenizer.json to the number of its unknown token"
        raise TokenizerError(WHERE, what, remedy) from None


def stop_ids(path: Path, size: int) -> list[int]:
    """The `eos_token_id`s of a `generation_config.json` that a vocabulary of some size has.

    Raises:
        TokenizerError: the file does not say them.
    """
    try:
        given = json.loads(path.read_bytes())["eos_token_id"] if path.stat().st_size else None
    except KeyError:
        return []
    except (ValueError, TypeError) as error:
        raise TokenizerError(WHERE, f"{path} is no JSON object ({error})", "repair or remove it") from None
    ids = given if isinstance(given, list) else [] if given is None else [given]
    if any(type(token) is not int for token in ids):
        raise TokenizerError(WHERE, f"eos_token_id of {path} is {given!r}, and no ids", "repair or remove it")
    return [token for token in ids if 0 <= token < size]


def check_templates(name: str, own: Any) -> None:
    """Refuse a `chat_template` that is neither a text nor named texts.

    Raises:
        TokenizerError: it is something else.
    """
    texts = own.values() if isinstance(own, dict) else () if own is None else (own,)
    if not all(isinstance(text, str) for text in texts):
        raise TokenizerError(
            WHERE,
            f"chat_template in the tokenizer_config.json of {name!r} is neither a text nor a list of {{name, template}}",
            "repair it, or set tokenizer.chat_template",
        )


def check_repeats(templates: Mapping[str, str]) -> None:
    """Refuse a chat template that draws at random.

    Raises:
        TokenizerError: one does.
    """
    from jinja2 import nodes

    from raysvc.chat.render.chat_environment import chat_environment

    for text in templates.values():
        if "random" not in text and "lipsum" not in text:
            continue
        tree = chat_environment().parse(text)
        filters = {f"|{node.name}" for node in tree.find_all(nodes.Filter)}
        names = {node.name for node in tree.find_all(nodes.Name)}
        for drawn in sorted({"|random", "lipsum"} & (filters | names)):
            raise varying_fault(f" ({drawn})")


def varying_fault(why: str = "") -> TokenizerError:
    """A template does not write the same text twice."""
    return TokenizerError(
        "tokenizer.chat_template",
        f"the chat template writes another text each time{why}, and a row must always give the same tokens",
        "set tokenizer.chat_template to a template that does not",
    )


def _no_file(name: str) -> tuple[str, str] | None:
    """(what a folder has instead of tokenizer.json, what to do), None where it has that, or is a name of the hub."""
    folder = Path(name)
    if not folder.exists() and (name.startswith((".", "~", "/")) or name.count("/") > 1):
        return f"there is no folder {folder.absolute()}", _USUAL
    if not folder.is_dir() or (folder / "tokenizer.json").is_file():
        return None
    other = next((name for name in _OTHERS if (folder / name).is_file()), None)
    if other is not None:
        return (
            f"{folder} has {other} and no tokenizer.json",
            f"give a copy with tokenizer.json, or {_OTHERS[other]}",
        )
    return None if any(folder.iterdir()) else (f"{folder} is an empty folder", _USUAL)


def _broken_file(folder: Path) -> tuple[str, str] | None:
    """(what is wrong with a file of a folder, what to do), None when nothing is seen."""
    for name in (*_JSON, *_TEXTS):
        path = folder / name
        if not path.is_file():
            continue
        data = path.read_bytes()
        if data.startswith(_LFS):
            return f"{path} is a pointer of Git LFS, and not the file", "run git lfs pull in that folder"
        try:
            found = data.decode() if name in _TEXTS else json.loads(data)
        except ValueError as error:
            kind = "UTF-8" if name in _TEXTS else "JSON"
            return f"{path} is not {kind} ({error})", "download or write it again"
        if name in _JSON and not isinstance(found, dict):
            return f"{path} is no JSON object, but a {type(found).__name__}", "download or write it again"
    return None
