"""Explains why computed columns are not in the cache: in what those that were computed for the same rows differ."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

from raysvc.cache import names
from raysvc.cache.entry import Entry
from raysvc.cache.key import Difference, nearest
from raysvc.errors import EntryError, StoreError

if TYPE_CHECKING:
    from raysvc.scoring.enrich_plan import EnrichPlan


def why_not_there(base: Entry, plan: EnrichPlan) -> tuple[str, list[Difference]]:
    """One clause, and every field in which the nearest columns of the same rows differ."""
    matches = (names.SHARED.fullmatch(name) for name in base.store.list(base.folder))
    folders = [match[1] for match in matches if match]
    recipes = {}
    for folder in folders:
        if folder.partition(".")[0] == plan.key:
            there = set(base.store.list(folder))
            if names.DAMAGED in there:
                return f"its entry {folder[:12]} is damaged", []
            if there:
                return "it is not finished", []
        with contextlib.suppress(EntryError, StoreError):
            recipes[folder] = Entry.open(base.store, folder).recipe
    close = nearest(dict(plan.recipe), recipes)
    if close is None:
        return "not computed for these rows yet", []
    differences = close[1]
    paths = [one.path.partition("].")[2] for one in differences]
    more = f" and {len(paths) - 3} more" if len(paths) > 3 else ""
    return f"nearest entry {close[0][:12]} differs in {', '.join(paths[:3])}{more}", differences
