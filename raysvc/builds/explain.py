"""Why a job hits the cache or misses it; builds nothing."""

from __future__ import annotations

import contextlib
from typing import Any

from raysvc.builds.build_plan import BuildPlan, plan_build
from raysvc.cache.entry import Entry
from raysvc.cache.find import find_entry
from raysvc.cache.generations import generations
from raysvc.cache.index import nearest_folders
from raysvc.cache.key import Difference, nearest
from raysvc.cache.names import DAMAGED, folder_of
from raysvc.cache.store.open import open_store
from raysvc.cache.store.store import Store
from raysvc.errors import EntryError, StoreError
from raysvc.job.config import JobConfig

CANDIDATES = 3  # entries that are compared with a miss in full
HIT = "same source, tokenizer, template and options"


def explain_job(job: JobConfig, root: str) -> dict[str, Any]:
    """Whether a job of one source would hit the cache, and in what it differs from the nearest entry; builds nothing."""
    store = open_store(root, job.cache.storage_options, job.cache.unsafe_store)
    plan = plan_build(job, store)
    entry = find_entry(store, plan.key)
    if entry is not None:
        return {"hit": True, "key": plan.key, "reason": HIT, "uri": entry.uri, "differences": []}
    reason, differences = why_missed(store, plan)
    return {"hit": False, "key": plan.key, "reason": reason, "differences": [str(one) for one in differences]}


def why_missed(store: Store, plan: BuildPlan) -> tuple[str, list[Difference]]:
    """One clause, and every field in which the nearest finished entry differs; asks the index, not every entry."""
    for generation in generations(store, plan.key):
        if DAMAGED in store.list(folder_of(plan.key, generation)):
            return f"its entry {folder_of(plan.key, generation)[:12]} is damaged", []
    recipes = {}
    for folder in nearest_folders(store, plan.recipe, CANDIDATES):
        with contextlib.suppress(EntryError, StoreError):
            recipes[folder] = Entry.open(store, folder).recipe
    close = nearest(plan.recipe, recipes)
    if close is None:
        return "the cache holds no finished entry yet", []
    key, differences = close
    names = [one.path for one in differences]
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return f"nearest entry {key[:12]} differs in {', '.join(names[:3])}{more}", differences
