"""Finds what a job's source would be as an entry: its name, whether the cache has it, and why not.

Always true:
- the key is known before any row is tokenized;
- a finished entry is used as it is, unless the job forbids that.
"""

from __future__ import annotations

import contextlib
import uuid
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from raysvc.builds.build_plan import BuildPlan, plan_build
from raysvc.builds.build_progress import source_tag
from raysvc.builds.build_report import check_share
from raysvc.builds.entry_report import Report
from raysvc.cache.entry import Entry
from raysvc.cache.find import find_entry
from raysvc.cache.generations import build_generation, generations, next_generation
from raysvc.cache.index import nearest_folders
from raysvc.cache.key import PRIVATE, SHARED, Difference, cache_key, nearest
from raysvc.cache.names import DAMAGED, folder_of
from raysvc.cache.store.open import open_store
from raysvc.cache.store.store import Store
from raysvc.chat.row_counts import errors_of
from raysvc.chat.tokens.tokenizer import anchored
from raysvc.errors import EntryError, StoreError
from raysvc.job.config import JobConfig
from raysvc.metrics import record

CANDIDATES = 3  # entries that are compared with a miss in full
HIT = "same source, tokenizer, template and options"


@dataclass(frozen=True)
class Lookup:
    """Holds what a look at source and cache found.

    Attributes:
        entry: the finished one; None: it has to be built.
        reason: why it is used or has to be built.
        generation_of: chooses where it is built.
        name: of the source in its mixture.
    """

    job: JobConfig
    store: Store
    plan: BuildPlan
    entry: Entry | None
    reason: str
    generation_of: Callable[[Store, str], int] = build_generation
    name: str = ""


def look(job: JobConfig, root: str, name: str = "") -> Lookup:
    """Look at the source, name its entry, and find it.

    Args:
        job: of one source.
        root: of the cache.
        name: of the source in its mixture.

    Raises:
        QuarantineExceeded: the entry is there, and a less strict job built it.
        UserMistake: as `plan_build`.
    """
    with errors_of(name):
        return _look(job, root, name)


def _look(job: JobConfig, root: str, name: str) -> Lookup:
    store = open_store(root, job.cache.storage_options, job.cache.unsafe_store)
    job = job.model_copy(update={"tokenizer": anchored(job.tokenizer)})
    plan = plan_build(job, store)
    if job.source.follow:
        return Lookup(job, store, plan, None, "its source is followed", name=name)
    if not job.cache.enabled:
        recipe = {**plan.recipe, PRIVATE: uuid.uuid4().hex, SHARED: plan.key}
        plan = replace(plan, recipe=recipe, key=cache_key(recipe))
        return Lookup(job, store, plan, None, "cache.enabled is false", name=name)
    entry = None if job.cache.force else find_entry(store, plan.key)
    if entry is not None:
        check_share(job, Report(entry.report, entry.uri), plan.source)
        record("cache_hits", 1, source=source_tag(job))
        return Lookup(job, store, plan, entry, HIT, name=name)
    record("cache_misses", 1, source=source_tag(job))
    if job.cache.force:
        return Lookup(job, store, plan, None, "cache.force is true", next_generation, name)
    return Lookup(job, store, plan, None, why_missed(store, plan)[0], name=name)


def explain_job(job: JobConfig, root: str) -> dict[str, Any]:
    """Returns whether a job of one source would hit the cache, and in what it differs from the nearest entry; builds nothing."""
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
