"""The format of a source, from its columns.

Always true:
- it is found from the column names, never from the content of a row;
- a missing column is named, with the columns that are there and the nearest one.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping
from typing import Any

from raysvc.chat.source.formats import NEEDS, Format
from raysvc.config import Format as FormatName
from raysvc.config import TextSpec
from raysvc.errors import ConfigError, SourceError

OPTIONAL = ("tools", "system", "input", "prompt", "loss_mask", "labels", "attention_mask")


def resolve_format(spec: TextSpec, first_row: Mapping[str, Any]) -> Format:
    """The format of a source, from the columns of its first row.

    Raises:
        SourceError: a column that is needed is missing.
        ConfigError: `train_on` or `truncation` that this format cannot have.
    """
    columns = sorted(map(str, first_row))
    for ours, theirs in spec.columns.items():
        _known_column(ours, theirs, columns)
    name = _detect(spec, columns) if spec.format == "auto" else spec.format
    for ours in NEEDS[name]:
        theirs = spec.columns.get(ours, ours)
        if theirs not in columns:
            raise _missing(f"format {name} needs a column {theirs!r}", (theirs,), columns)
    _check_policy(spec, name)
    return Format(name, dict(spec.columns), spec.train_on)


def _known_column(ours: str, theirs: str, columns: list[str]) -> None:
    known = sorted({*OPTIONAL, *(name for needs in NEEDS.values() for name in needs)})
    if ours not in known:
        raise ConfigError(
            f"source.columns.{ours}",
            f"{ours!r} is not a column we use{_nearest((ours,), known)}",
            f"use one of {', '.join(known)}",
        )
    if theirs not in columns:
        raise _missing(f"columns.{ours} names {theirs!r}, which the rows do not have", (theirs,), columns)


def _detect(spec: TextSpec, columns: list[str]) -> Any:
    for name, needs in NEEDS.items():
        if all(spec.columns.get(ours, ours) in columns for ours in needs):
            return name
    wanted = tuple(dict.fromkeys(ours for needs in NEEDS.values() for ours in needs))
    raise _missing("no format fits the rows", wanted, columns)


def _missing(what: str, wanted: tuple[str, ...], columns: list[str]) -> SourceError:
    return SourceError(
        "source",
        f"{what}; the rows have the columns {', '.join(columns) or '(none)'}{_nearest(wanted, columns)}",
        "set source.format, or map a column with source.columns: {messages: your_column}",
    )


def _nearest(wanted: Iterable[str], there: list[str]) -> str:
    for name in wanted:
        near = difflib.get_close_matches(name, there, 1)
        if near:
            return f" (did you mean {near[0]!r} for {name!r}?)"
    return ""


def _check_policy(spec: TextSpec, name: FormatName) -> None:
    if spec.train_on == "completion" and name in ("chat", "text", "pretokenized"):
        raise ConfigError(
            "train_on",
            f"completion needs rows with a prompt and a completion, and these are {name}",
            "use last_assistant_message or all_assistant_messages",
        )
    if spec.train_on == "message_weight" and name != "chat":
        raise ConfigError(
            "train_on", f"message_weight needs chat rows, and these are {name}", "use completion"
        )
    if spec.truncation == "keep_end_turns" and name in ("text", "pretokenized"):
        raise ConfigError(
            "truncation", f"keep_end_turns needs turns, and {name} rows have none", "use keep_start"
        )
