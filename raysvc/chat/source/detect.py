"""The format of a source, from its columns.

1. `source.columns` says which column is which; what it does not say has one of the usual names (`ALIASES`).
2. The first format of `formats.NEEDS` whose columns are all there is the one; messages with a label are of `kto`.
3. What was found is said in one line (`seen`) and is part of the recipe.

Always true:
- it is found from the column names, never from the content of a row;
- a column that is declared as two of ours is refused;
- a missing column is named, with the columns that are there and the nearest one;
- a column that changes what a row means, and that the format does not use, is refused by its name.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping
from typing import Any

from raysvc.chat.source.formats import (
    BESIDE,
    FUNCTIONS,
    KTO,
    KTO_CHAT,
    NEEDS,
    NO_VALUES,
    ONE_FORMAT,
    OPTIONAL,
    PREFERRED,
    Format,
    refused_why,
)
from raysvc.chat.source.media_parts import NAMES
from raysvc.errors import ConfigError, SourceError
from raysvc.job.config import Format as FormatName
from raysvc.job.config import TextSpec

ALIASES: dict[str, tuple[str, ...]] = {
    "messages": ("messages", "conversations", "conversation"),
    "chosen": ("chosen", "chosen_messages", PREFERRED),
    "rejected": ("rejected", "rejected_messages", "non_preferred_output"),
    "output": ("output", "response"),
    "question": ("question", "query", "prompt", "input"),
    "answer": ("answer", "response", "output"),
    "input": ("input", "context"),
    "system": ("system", "system_prompt"),
    "tools": ("tools", FUNCTIONS),
    "label": KTO,
}
MESSAGE_KEYS = ("role", "content")  # in source.columns they name keys of a message
OTHER_NAMES: dict[str, tuple[str, ...]] = {  # columns beside those, that may have one of the usual names
    name: tuple(ours for ours in beside if ours in ("messages", "instruction", "input", "system", "tools"))
    for name, beside in BESIDE.items()
}


def resolve_format(spec: TextSpec, first_row: Mapping[str, Any]) -> Format:
    """The format of a source, from the columns of its first row, which has nulls for those that only the rows near it have.

    Raises:
        SourceError: a column that is needed is missing, or one is there that cannot be used yet.
        ConfigError: `train_on` or `truncation` that this format cannot have.
    """
    columns = sorted(map(str, first_row))
    for ours, theirs in spec.columns.items():
        _known_column(ours, theirs, columns)
    name: FormatName = _detect(spec, columns) if spec.format == "auto" else spec.format
    found = dict(spec.columns)
    for ours in _needs(spec, name, columns):
        theirs = _theirs(spec, ours, columns)
        if theirs not in columns:
            raise _missing(
                f"format {name} needs a column {theirs!r}", (theirs,), columns, _fitting(spec, columns)
            )
        found[ours] = theirs
    _refuse_twice(found)
    for ours in OTHER_NAMES.get(name, ()):
        found[ours] = _theirs(spec, ours, columns)
    _check_policy(spec, name)
    form = format_of(spec.model_copy(update={"format": name, "columns": _told(found)}))
    for carried in spec.carry:
        if carried not in columns and spec.carry[carried].dtype is None:
            raise _missing(f"source.carry names {carried!r}, which the rows do not have", (carried,), columns)
    _refuse_payload(form, first_row)
    return form


def format_of(spec: TextSpec) -> Format:
    """The format of a spec that names it."""
    assert spec.format != "auto"
    carried = tuple(sorted(spec.carry))
    columns, roles = dict(spec.columns), dict(spec.roles)
    return Format(
        spec.format, columns, spec.train_on, roles, spec.ignore, carried, spec.media, spec.drop_nulls
    )


def seen(form: Format, first_row: Mapping[str, Any]) -> str:
    """One line about what was found, for display."""
    names = NEEDS[form.name]
    if form.name == "kto" and form.column("completion") not in first_row:
        names = KTO_CHAT
    names = (
        *names,
        *(ours for ours in BESIDE.get(form.name, ()) if form.column(ours) in first_row and ours not in names),
    )
    pairs = [ours if form.column(ours) == ours else f"{ours} = {form.column(ours)}" for ours in names]
    value = form.get(first_row, "messages") if form.name == "chat" else None
    if isinstance(value, list) and value and isinstance(value[0], dict):
        named = [form.columns[key] for key in MESSAGE_KEYS if key in form.columns]
        keys = [key for key in (*named, *MESSAGE_KEYS, "from", "value") if key in value[0]]
        named_otherwise = [pair for pair in pairs[:1] if pair != "messages"]
        pairs = [*named_otherwise, f"messages with {' and '.join(keys)}", *pairs[1:]]
    return f"{form.name} ({', '.join(pairs)})"


def _told(found: Mapping[str, str]) -> dict[str, str]:
    """Only what has another name than ours."""
    return {ours: theirs for ours, theirs in found.items() if ours != theirs}


def _theirs(spec: TextSpec, ours: str, columns: list[str]) -> str:
    """The source's name of a column: declared, else the first usual one that is there."""
    if ours in spec.columns:
        return spec.columns[ours]
    names = ALIASES.get(ours, ())
    if ours == "question" and "instruction" in columns:
        names = tuple(name for name in names if name != "input")  # which is the instruction's
    return next((name for name in names if name in columns), ours)


def _needs(spec: TextSpec, name: FormatName, columns: list[str]) -> tuple[str, ...]:
    """The columns that a format needs; `kto` takes messages with a label where there is no completion."""
    if name == "kto" and _theirs(spec, "completion", columns) not in columns and _is_kto_chat(spec, columns):
        return KTO_CHAT
    return NEEDS[name]


def _is_kto_chat(spec: TextSpec, columns: list[str]) -> bool:
    """Returns whether there are messages with a label that means something here, and is not carried."""
    there = [name for name in columns if name not in {*spec.ignore, *spec.carry}]
    return all(_theirs(spec, ours, there) in there for ours in KTO_CHAT)


def _refuse_twice(found: Mapping[str, str]) -> None:
    """No column is two of ours: what is trained would stand behind itself."""
    ours_of: dict[str, str] = {}
    for ours, theirs in found.items():
        if ours in MESSAGE_KEYS:
            continue
        if theirs in ours_of:
            what = f"{theirs!r} is read as {ours_of[theirs]!r} and as {ours!r}"
            remedy = "give each its own column; source.format: kto takes messages with a label"
            raise ConfigError("source.columns", what, remedy)
        ours_of[theirs] = ours


def _refuse_payload(form: Format, row: Mapping[str, Any]) -> None:
    for name in form.refused:
        if row.get(name) not in NO_VALUES:
            raise SourceError(
                "source",
                f"the rows have a column {name!r}, which format {form.name} does not use",
                refused_why(name),
            )


def _known_column(ours: str, theirs: str, columns: list[str]) -> None:
    known = sorted(
        {
            *OPTIONAL,
            *(each.columns[0] for each in NAMES.values()),
            *MESSAGE_KEYS,
            *(name for needs in NEEDS.values() for name in needs),
        }
    )
    if ours not in known:
        raise ConfigError(
            f"source.columns.{ours}",
            f"{ours!r} is not a column we use{_nearest((ours,), known)}",
            f"use one of {', '.join(known)}",
        )
    if ours not in MESSAGE_KEYS and theirs not in columns:
        raise _missing(f"columns.{ours} names {theirs!r}, which the rows do not have", (theirs,), columns)


def _detect(spec: TextSpec, columns: list[str]) -> FormatName:
    found = _fitting(spec, columns)
    if found is not None:
        return found
    wanted = tuple(dict.fromkeys(ours for needs in NEEDS.values() for ours in needs))
    raise _missing("no format fits the rows", wanted, columns)


def _fitting(spec: TextSpec, columns: list[str]) -> FormatName | None:
    """The first format whose columns are there, or None."""
    for name, needs in NEEDS.items():
        if name == "chat" and _is_kto_chat(spec, columns):
            return "kto"
        if all(_theirs(spec, ours, columns) in columns for ours in needs):
            return name  # type: ignore[return-value]
    return None


def _missing(
    what: str, wanted: tuple[str, ...], columns: list[str], fits: FormatName | None = None
) -> SourceError:
    what = f"{what}; the rows have the columns {', '.join(columns) or '(none)'}{_nearest(wanted, columns)}"
    if fits is not None:
        return SourceError("source", what, f"set source.format: {fits}, which fits them; {ONE_FORMAT}")
    return SourceError(
        "source",
        what,
        "leave source.format out, and name columns: source.columns.messages=YOURS, or source.columns.question=YOURS "
        "source.columns.answer=ANOTHER",
    )


def _nearest(wanted: Iterable[str], there: list[str]) -> str:
    for name in wanted:
        near = [] if name in there else difflib.get_close_matches(name, there, 1)
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
    if name == "prompt" and spec.max_length is not None and spec.truncation.startswith("keep"):
        raise ConfigError(
            "truncation", "a prompt must not be cut: it would ask something else", "use drop or error"
        )
    if spec.truncation == "keep_end_turns" and name in ("text", "pretokenized", "stepwise"):
        raise ConfigError(
            "truncation", f"keep_end_turns needs turns, and {name} rows have none", "use keep_start"
        )
