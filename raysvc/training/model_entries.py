"""Checks whether the model has an entry for every id of the rows, before anything is started for it.

A tokenizer may have more ids than its model (Gemma 3 1B has one more), as long as no row uses them. So rows are looked at only
where the numbers differ.

Always true:
- where both are folders that can be read here, it is known before Ray starts, but for a source that Ray has to tokenize;
- a model whose configuration does not say how many entries it has is not looked at: the worker refuses the first such row.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from raysvc import hub
from raysvc.actors.model.load_model import read_config
from raysvc.actors.model.tiny_vision import NAME as TINY_VISION
from raysvc.errors import ConfigError

if TYPE_CHECKING:
    from raysvc.builds.cache_entry import CacheEntry
    from raysvc.job.config import JobConfig


def may_lack_entries(job: JobConfig) -> bool:
    """Returns whether the folder of the tokenizer has more ids than the folder of the model says that it has."""
    entries = _entries_of_folder(job.trainer.model)
    ids = _ids_of_folder(job.tokenizer.name) if entries is not None else None
    return entries is not None and ids is not None and entries < ids


def check_entries(job: JobConfig, entry: CacheEntry) -> None:
    """Refuse a model that lacks an entry for an id of the rows, or of the padding of a padded layout.

    Raises:
        ConfigError: it does.
    """
    report, name = entry.report, job.trainer.model
    entries = _entries_of_folder(name)
    if entries is None:
        entries = _entries_on_the_hub(name)
    if entries is None or entries >= report.get("vocab_size", 0):
        return
    found = _first_beyond(entry, entries)
    if found is None and job.plan.layout.startswith("padded") and report["pad_token_id"] >= entries:
        found = f"the padding the id {report['pad_token_id']}"
    if found is not None:
        what = f"has {entries} entries, and {found}"
        raise ConfigError("trainer.model", what, "give a model of the tokenizer that the rows were made with")


def _first_beyond(entry: CacheEntry, entries: int) -> str | None:
    """The first row with an id beyond so many entries, in words."""
    import pyarrow.compute as pc

    start = 0
    for one in entry.entries:
        for table in one.part_tables():
            lists = table.column("input_ids").combine_chunks()
            ids = pc.list_flatten(lists)
            if len(ids) and pc.max(ids).as_py() >= entries:
                place = pc.index(pc.greater_equal(ids, entries), True).as_py()
                row = start + pc.list_parent_indices(lists)[place].as_py()
                return f"row {row} has the id {ids[place].as_py()}"
            start += table.num_rows
    return None


def _ids_of_folder(name: str) -> int | None:
    read = _json_of(name, "tokenizer.json")
    vocab = read.get("model", {}).get("vocab")
    if not isinstance(vocab, dict | list):
        return None
    own = vocab.values() if isinstance(vocab, dict) else range(len(vocab))
    return 1 + max([*own, *(token["id"] for token in read.get("added_tokens") or ())], default=-1)


def _entries_of_folder(name: str) -> int | None:
    read = _json_of(name, "config.json")
    found = read.get("vocab_size", (read.get("text_config") or {}).get("vocab_size"))
    return found if isinstance(found, int) else None


def _json_of(name: str, file: str) -> dict[str, Any]:
    """Returns what a file of a folder says; nothing where it is not there, or is broken, which others say better."""
    from raysvc.chat.source.json_rows import load_json

    try:
        read = load_json((Path(name).expanduser() / file).read_bytes())
    except (OSError, ValueError, RecursionError):
        return {}
    return read if isinstance(read, dict) else {}


def _entries_on_the_hub(name: str) -> int | None:
    if name in ("tiny", TINY_VISION) or os.path.isdir(os.path.expanduser(name)) or os.path.isabs(name):
        return None
    with hub.answering():
        found = getattr(read_config(name).get_text_config(), "vocab_size", None)
    return found if isinstance(found, int) else None
