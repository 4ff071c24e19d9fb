"""One build: look at the source, name the entry, use it or make it.

Always true:
- the key is known before any row is tokenized;
- a finished entry is used as it is; a started one goes on from its receipts;
- an entry is finished only when its row counts balance and not too many rows were quarantined.
"""

from __future__ import annotations

import contextlib
import logging
import os
import time
import uuid
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from raysvc.build.build_progress import BuildMeter, source_tag
from raysvc.build.entry_report import Report
from raysvc.build.kept_tokenizer import remember
from raysvc.cache.entry import Entry
from raysvc.cache.find import find_entry, open_entry
from raysvc.cache.generations import build_generation, generations, next_generation
from raysvc.cache.index import nearest_folders
from raysvc.cache.key import Difference, cache_key, nearest
from raysvc.cache.manifest import Manifest
from raysvc.cache.names import DAMAGED, folder_of
from raysvc.cache.store.open import open_store
from raysvc.cache.store.store import Store
from raysvc.cache.use_marker import Hold, this_process
from raysvc.cache.writer import EntryWriter
from raysvc.chat.row_counts import Quarantined, RowCounts, check_quarantine, reasoning_note
from raysvc.chat.slice_tokenizer import FORMAT_VERSION
from raysvc.chat.source.detect import resolve_format, seen
from raysvc.chat.source.formats import Format as RowFormat
from raysvc.chat.source.messages import NORMAL_FORM
from raysvc.chat.tokens.tokenizer import LoadedTokenizer, anchored
from raysvc.errors import EntryError, SourceError, StoreError
from raysvc.job.config import Format, JobConfig, TextSpec
from raysvc.metrics import record
from raysvc.pipelines.sources.scan_memo import Memo
from raysvc.progress import Progress, Tick
from raysvc.redact import redacted

if TYPE_CHECKING:
    from raysvc.cache.manifest import Receipt
    from raysvc.pipelines.sources.slices import Slice
    from raysvc.pipelines.sources.source import Source

log = logging.getLogger(__name__)
EXAMPLES_KEPT = 20
CANDIDATES = 3  # entries that are compared with a miss in full
HIT = "same source, tokenizer, template and options"


@dataclass(frozen=True)
class BuildPlan:
    """What is known before tokenizing.

    Attributes:
        spec: with the format resolved.
        recipe: what decides the bytes; `key` is its hash.
        seen: what format the rows were found to have.
    """

    source: Source
    spec: TextSpec
    tokenizer: LoadedTokenizer
    recipe: dict[str, Any]
    key: str
    seen: str


def plan_build(job: JobConfig, store: Store) -> BuildPlan:
    """Look at the source and load the tokenizer.

    Args:
        job: of one source.
        store: where what was found out about files before lies; a job that trusts no cache reads all.

    Raises:
        SourceError: no rows, or not the columns that the format needs.
        TokenizerError: it cannot be used for this format.
    """
    from raysvc.pipelines.sources.look import look_at

    memo = Memo(store) if job.cache.enabled and not job.cache.force else None
    slice_bytes = None if job.workers.slice_mb is None else int(job.workers.slice_mb * 1e6)
    source = look_at(job.source, slice_bytes, memo)
    form, found = _format_of(job, source)
    kind = form.name
    spec = job.text.model_copy(update={"format": kind, "columns": dict(form.columns)})
    tokenizer = LoadedTokenizer(job.tokenizer)
    if kind in ("chat", "alpaca", "question_answer", "prompt"):
        tokenizer.template_name(has_tools=False)  # refuse before anything starts
    identity = _identity(tokenizer, kind)
    remember(identity["content_sha256"], tokenizer)
    recipe = {
        "format_version": FORMAT_VERSION,
        "source": source.identity,
        "format": kind,
        "columns": dict(spec.columns),
        "messages": _normal_form(spec, tokenizer),
        "tokenizer": identity,
        "train_on": spec.train_on,
        "max_length": spec.max_length,
        "truncation": spec.truncation if spec.max_length else None,
    }
    return BuildPlan(source, spec, tokenizer, recipe, cache_key(recipe), found)


def find_or_build(
    job: JobConfig, root: str, address: str | None, progress: Progress
) -> tuple[Entry, bool, str]:
    """The job's entry, whether it was there, and why it was used or built."""
    store = open_store(root, job.cache.storage_options, job.cache.unsafe_store)
    job = job.model_copy(update={"tokenizer": anchored(job.tokenizer)})
    plan = plan_build(job, store)
    if not job.cache.enabled:
        recipe = {**plan.recipe, "private": uuid.uuid4().hex}
        plan = replace(plan, recipe=recipe, key=cache_key(recipe))
        private = _build(job, plan, store, build_generation, address, progress)
        return private, False, "cache.enabled is false"
    entry = None if job.cache.force else find_entry(store, plan.key)
    if entry is not None:
        _check_share(job, Report(entry.report, entry.uri))  # a stricter job than the one that built it
        record("cache_hits", 1, source=source_tag(job))
        return entry, True, HIT
    record("cache_misses", 1, source=source_tag(job))
    reason = "cache.force is true" if job.cache.force else _why_missed(store, plan)[0]
    chosen = next_generation if job.cache.force else build_generation
    return _build(job, plan, store, chosen, address, progress), False, reason


def _normal_form(spec: TextSpec, tokenizer: LoadedTokenizer) -> dict[str, Any] | None:
    """How messages are read, where there are any."""
    if spec.format in ("text", "pretokenized") or tokenizer.chat_template is None:
        return None
    fits = [tokenizer.fit(has_tools) for has_tools in (False, True)]
    return {
        "normal_form": NORMAL_FORM,
        "roles": dict(spec.roles),
        "ignore": sorted(spec.ignore),
        "arguments": ["text" if fit.text_arguments else "object" for fit in fits],
        "parts": ["kept" if fit.parts else "joined" for fit in fits],
    }


def _format_of(job: JobConfig, source: Source) -> tuple[RowFormat, str]:
    """(format, what was seen)."""
    row = source.first_row()
    if row is None:
        where = ", ".join(job.source.path) or str(job.source.dataset)
        raise SourceError(
            "source", f"{where} holds no row that can be read", "give files with one JSON object per line"
        )
    form = resolve_format(job.text, row)
    return form, seen(form, row)


def explain_job(job: JobConfig, root: str) -> dict[str, Any]:
    """Whether a job of one source would hit the cache, and in what it differs from the nearest entry; builds nothing."""
    store = open_store(root, job.cache.storage_options, job.cache.unsafe_store)
    plan = plan_build(job, store)
    entry = find_entry(store, plan.key)
    if entry is not None:
        return {"hit": True, "key": plan.key, "reason": HIT, "uri": entry.uri, "differences": []}
    reason, differences = _why_missed(store, plan)
    return {"hit": False, "key": plan.key, "reason": reason, "differences": [str(one) for one in differences]}


def _why_missed(store: Store, plan: BuildPlan) -> tuple[str, list[Difference]]:
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


def _build(
    job: JobConfig,
    plan: BuildPlan,
    store: Store,
    generation_of: Callable[[Store, str], int],
    address: str | None,
    progress: Progress,
) -> Entry:
    store.probe()
    if store.url.startswith("memory://"):
        what = "it lives in one process, and the workers of a build are others"
        raise StoreError(store.url, what, "use a folder or a bucket as cache.root")
    generation, hold = _held_generation(store, plan.key, generation_of)
    with hold:
        writer = EntryWriter(store, plan.key, generation)
        making = _Making(job, plan, writer, progress)
        if making.small:
            from raysvc.pipelines.local_build import only_builder_here

            with only_builder_here(writer.uri, making.say_another_builds):
                return making.entry(address)
        return making.entry(address)


def _held_generation(store: Store, key: str, generation_of: Callable[[Store, str], int]) -> tuple[int, Hold]:
    """Where to build, held so that gc leaves it alone; another place where gc was faster."""
    for _ in range(3):
        generation = generation_of(store, key)
        with contextlib.suppress(EntryError):
            return generation, Hold(store, folder_of(key, generation), this_process())
    raise EntryError(f"{store.url}/{key}", "gc deletes it again and again", "find out which process runs gc")


@dataclass
class _Making:
    """One process's share of a build: from what is finished to the manifest."""

    job: JobConfig
    plan: BuildPlan
    writer: EntryWriter
    progress: Progress

    @cached_property
    def small(self) -> bool:
        """Whether this process builds what is left itself."""
        from raysvc.pipelines.local_build import fits_one_process
        from raysvc.pipelines.tokenize import split_done

        left = split_done(self.writer, self.plan.source.slices)[1]
        num_bytes = sum(piece.num_bytes for piece in left)
        return fits_one_process(num_bytes, len(left), self.job.workers, os.cpu_count() or 1)

    def say_another_builds(self) -> None:
        """A tick."""
        self.progress(Tick("tokenize", 0, None, "rows", waiting="another process builds this entry"))

    def entry(self, address: str | None) -> Entry:
        """Make what nobody has made, and finish the entry."""
        from raysvc.pipelines.tokenize import split_done

        begin = time.perf_counter()
        job, source = self.job, self.plan.source
        done, left = split_done(self.writer, source.slices)
        meter = BuildMeter(self.progress, source.slices, done.values(), job, source.num_bytes)
        for receipt in self._receipts(left, address, meter) if left else ():
            if receipt.slice_index not in done:
                done[receipt.slice_index] = receipt
                meter.add(receipt)
        receipts = [done[piece.index] for piece in source.slices]
        report = make_report(job, self.plan, receipts, time.perf_counter() - begin)
        report["length_percentiles"] = percentiles(_lengths(self.writer, receipts))
        source.check_unchanged()
        self.writer.commit(receipts, self.plan.recipe, report, self.plan.tokenizer.content())
        meter.finish()
        if note := reasoning_note(report["row_counts"]):
            log.warning("%s", note)
        return open_entry(self.writer.uri, job.cache.storage_options)

    def _receipts(self, left: Sequence[Slice], address: str | None, meter: BuildMeter) -> Iterator[Receipt]:
        from raysvc.pipelines.tokenize import BuildTask

        task = BuildTask(self.plan.spec, self.writer, self.job.source.storage_options)
        if self.small:
            from raysvc.pipelines.local_build import local_receipts

            meter.waiting("loading the tokenizer")
            return local_receipts(task, left, self.plan.tokenizer)
        from raysvc.cluster import connect
        from raysvc.pipelines.shared_build import shared_receipts

        meter.waiting("starting Ray")
        connect(address)
        meter.waiting("starting workers")
        return shared_receipts(task, left, self.job.workers)


def make_report(
    job: JobConfig, plan: BuildPlan, receipts: Sequence[Receipt], seconds: float
) -> dict[str, Any]:
    """What the user is told of a build; stored with the entry.

    Raises:
        QuarantineExceeded: more rows than `max_quarantine` could not be verified.
        SourceError: no row is left.
    """
    row_counts = sum((RowCounts.from_json(one.meta["row_counts"]) for one in receipts), RowCounts())
    row_counts.check()
    examples = [item for one in receipts for item in one.meta["examples"]]
    _check_share(job, {"row_counts": row_counts.to_json(), "examples": examples})
    if row_counts.rows_written == 0:
        reasons = (
            ", ".join(f"{name}: {count}" for name, count in row_counts.dropped.items()) or "none were read"
        )
        raise SourceError(
            "source", f"no row is left to train on ({reasons})", "check train_on, max_length and truncation"
        )
    return {
        "tokenizer": job.tokenizer.model_dump(mode="json"),
        "format": plan.seen,
        "pad_token_id": _pad_token_id(plan.tokenizer.hf),
        "vocab_size": len(plan.tokenizer.hf),
        "row_counts": row_counts.to_json(),
        "examples": examples[:EXAMPLES_KEPT],
        "verification": {
            "rows_compared_with_the_reference": sum(int(one.meta["sampled"]) for one in receipts),
            "switched_to_the_reference": sorted({str(one.meta["switched"]) for one in receipts} - {""}),
        },
        "encoders": dict(Counter(str(one.meta["encoder"]) for one in receipts)),
        "seconds": round(seconds, 3),
        "source_bytes": plan.source.num_bytes,
        "paths": [redacted(path) for path in job.source.path or (str(job.source.dataset),)],
    }


def _pad_token_id(hf: Any) -> int:
    """What fills padding cells; any id will do, since no cell of padding is attended to or trained."""
    candidates = (hf.pad_token_id, hf.eos_token_id, 0)
    return next(int(one) for one in candidates if one is not None)


def _identity(tokenizer: LoadedTokenizer, kind: Format) -> dict[str, Any]:
    """What of the tokenizer decides the bytes; a template does only where conversations are rendered."""
    identity = tokenizer.identity()
    if kind in ("text", "pretokenized"):
        return {name: identity[name] for name in identity if not name.startswith("template")}
    tokenizer.check_date()
    return identity


def _lengths(writer: EntryWriter, receipts: Sequence[Receipt]) -> npt.NDArray[np.int32]:
    parts = tuple(one.part for one in receipts)
    return Entry(writer.store, writer.folder, Manifest(writer.key, parts, receipts[0].columns, {})).lengths()


def _check_share(job: JobConfig, report: Mapping[str, Any]) -> None:
    examples = [Quarantined(**item) for item in report["examples"]]
    check_quarantine(RowCounts.from_json(report["row_counts"]), examples, job.max_quarantine)


def percentiles(lengths: npt.NDArray[np.int32]) -> dict[str, int]:
    """Tokens per row at some shares of the rows."""
    names = {"min": 0, "p50": 50, "p90": 90, "p99": 99, "max": 100}
    return {name: int(np.percentile(lengths, q)) for name, q in names.items()} if len(lengths) else {}
