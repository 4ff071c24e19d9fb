"""A source as LLaMA-Factory declares it: an entry of `dataset_info.json`, named FILE:NAME.

| in the entry | in the job |
|---|---|
| `file_name`; `hf_hub_url` with `subset`, `split`, `revision` | `source.path`, beside the file; `source.dataset` and the same names |
| `formatting: alpaca` (what it is without one) | `format: alpaca`, or `preference` with `ranking` |
| `formatting: sharegpt` or `openai` | `format: chat`, or `preference` with `ranking`, or `kto` with a column `kto_tag` |
| `columns` | `source.columns` |
| `tags` | the keys of a message in `source.columns`, and `source.roles` |

Always true:
- what an entry says and a job cannot is refused by its name.
"""

from __future__ import annotations

import difflib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from raysvc.chat.source.messages import ROLES, SPELLINGS
from raysvc.errors import SourceError
from raysvc.job.config import SourceConfig

FILE = "dataset_info.json"
ALPACA = {"prompt": "instruction", "query": "input", "response": "output", "history": "history"}
SHARED = {name: name for name in ("system", "tools", "images", "videos", "audios", "chosen", "rejected")}
SHAREGPT = {"messages": "messages", "kto_tag": "label"}
DEFAULTS = {"alpaca": {"prompt": "instruction", "query": "input", "response": "output"}}
OURS = {
    "user_tag": "user",
    "assistant_tag": "assistant",
    "observation_tag": "tool",
    "function_tag": "function_call",
    "system_tag": "system",
}
KEYS = ("file_name", "hf_hub_url", "formatting", "ranking", "columns", "tags", "subset", "split", "revision")
UNREAD = ("ms_hub_url", "om_hub_url")  # beside hf_hub_url: the same rows from elsewhere


def source_of(data: str) -> SourceConfig:
    """The source that `raysvc init` is asked for: an entry of `dataset_info.json`, or else files.

    Raises:
        SourceError: no such entry, or one that a job cannot say.
    """
    path, colon, name = data.rpartition(":")
    if data.endswith(FILE):
        path, colon, name = data, ":", ""
    if not colon or not path.endswith(FILE):
        return SourceConfig(path=(data,))
    entry = _entry(path, name)
    odd = sorted(entry.keys() - {*KEYS, *UNREAD})
    if odd:
        raise _refused(path, name, f"has {', '.join(odd)}, which a job cannot say")
    return SourceConfig(**_where(path, name, entry), **_what(path, name, entry))


def _entry(path: str, name: str) -> Mapping[str, Any]:
    try:
        known = json.loads(Path(path).expanduser().read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise SourceError(path, f"cannot be read: {error}", f"name a file like {FILE}:NAME") from error
    if not isinstance(known, dict) or not isinstance(known.get(name), dict):
        names = list(known) if isinstance(known, dict) else []
        near = difflib.get_close_matches(name, names, 3) or names[:10]
        raise SourceError(path, f"has no entry {name!r}", f"name one: {FILE}:{' or '.join(near) or 'NAME'}")
    return dict(known[name])


def _where(path: str, name: str, entry: Mapping[str, Any]) -> dict[str, Any]:
    if "hf_hub_url" in entry:
        place = {"dataset": entry["hf_hub_url"], "split": entry.get("split", "train")}
        return place | {key: entry[key] for key in ("subset", "revision") if entry.get(key)}
    if "file_name" not in entry:
        raise _refused(path, name, "has neither file_name nor hf_hub_url")
    return {"path": (str(Path(path).parent / entry["file_name"]),)}


def _what(path: str, name: str, entry: Mapping[str, Any]) -> dict[str, Any]:
    """Format, columns and roles."""
    formatting, tags = entry.get("formatting", "alpaca"), entry.get("tags", {})
    if formatting not in ("alpaca", "sharegpt", "openai"):
        raise _refused(path, name, f"has the formatting {formatting!r}")
    alpaca, given = formatting == "alpaca", entry.get("columns")
    if given is None:
        given = DEFAULTS.get(formatting, {"messages": "conversations"})
    known = {**SHARED, **(ALPACA if alpaca else SHAREGPT)}
    odd = sorted(given.keys() - known.keys())
    if odd:
        why = "raysvc joins a prompt and a response of KTO as one text" if odd == ["kto_tag"] else "unknown"
        raise _refused(path, name, f"maps {', '.join(odd)} with formatting {formatting}: {why}")
    columns = {known[key]: theirs for key, theirs in given.items() if theirs and known[key] != theirs}
    keys = (tags.get("role_tag"), tags.get("content_tag"))
    if any(keys) and keys not in SPELLINGS:
        columns |= {ours: tag for ours, tag in zip(("role", "content"), keys, strict=True) if tag}
    roles = {tags[tag]: ours for tag, ours in OURS.items() if tags.get(tag)}
    form = "alpaca" if alpaca else "chat"
    if entry.get("ranking"):
        form = "preference"
    elif given.get("kto_tag"):
        form = "kto"
    roles = {theirs: ours for theirs, ours in roles.items() if ROLES.get(theirs, theirs) != ours}
    return {"format": form, "columns": columns, "roles": roles}


def _refused(path: str, name: str, what: str) -> SourceError:
    return SourceError(
        path, f"the entry {name!r} {what}", "write source.path, source.format and source.columns by hand"
    )
