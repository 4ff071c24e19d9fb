"""The steps of one cache entry, or of a mixture of several: plan, read, collate. No Ray; what it holds can be freed and opened again.

Always true:
- `make(step, roles)` is pure in (entry, plan, decisions, step, roles);
- after `free` the next call opens the entry again and gives the same bytes;
- of entries that are being built, a step waits for its own slices, and has the bytes that the finished entries give it;
- what was decided is on disk before a step follows it, and is read again whenever the entry is opened.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from raysvc import row_ids
from raysvc.actors.server.entry_media import EntryMedia
from raysvc.actors.server.make_step import Recipe, make_step, outline
from raysvc.actors.server.spec import (
    TRAIN,
    MixtureSpec,
    Part,
    Role,
    ServeSpec,
    SourceSpec,
    StepInfo,
    StepOutline,
    as_role,
)
from raysvc.actors.server.step_cache import SharedSteps
from raysvc.cache.entry import Entry
from raysvc.cache.rows import Rows
from raysvc.cache.store.claim import Claim
from raysvc.collate.shard import Shard
from raysvc.collate.shard_bytes import ColumnBytes
from raysvc.collate.text_columns import of_fixed_width, text_names, text_widths, widest_of
from raysvc.feedback.decision import Decision, Sources, check_decided, decided_plan
from raysvc.feedback.feedback_log import FeedbackLog
from raysvc.media.processor_spec import ProcessorSpec
from raysvc.plan.entry_plan import chosen_entries, eval_plan, plan_of_entries
from raysvc.plan.plan import MiniBatchPlan, Plan
from raysvc.plan.schedule import Schedule
from raysvc.plan.state import PlanState
from raysvc.row_batch import RowBatch

SIZES = 256  # of the newest steps and roles, 2 kB each


@dataclass(frozen=True)
class _Facts:
    """Holds what stays known when the data are freed."""

    schedule: Schedule
    plan_hash: str
    identity: dict[str, Any]
    entry_key: str
    num_rows: int


@dataclass(frozen=True)
class _Open:
    """Rows and plan, while they are held.

    Attributes:
        some_rows: a row, which tells the columns.
        texts: columns of text that travel.
        text_widths: of them in the whole run; None: each mini-batch has its own.
        sizes: bytes of the newest steps that were asked for, by step and role.
    """

    rows: Rows
    plan: Plan
    some_rows: RowBatch
    texts: tuple[str, ...]
    text_widths: Mapping[str, int] | None
    media: EntryMedia | None
    decisions: tuple[Decision, ...]
    sizes: SharedSteps[int] = field(default_factory=lambda: SharedSteps(SIZES))

    def slices_of(self, step: int) -> list[tuple[Entry, list[int]]]:
        """The entries that are being built, each with the slices of it that a step has rows of."""
        found = [(number, one) for number, one in enumerate(self.rows.entries) if one.coming]
        if not found:
            return []
        place = row_ids.split(self.plan.groups_of(step))
        return [(one, np.unique(place.slice[place.source == number]).tolist()) for number, one in found]

    def ends_of(self, step: int) -> list[tuple[Entry, int]]:
        """The entries, each with its groups that all steps up to this one have."""
        ends = self.plan.rows_known_by(step, len(self.rows.entries))
        return list(zip(self.rows.entries, ends, strict=True))

    def read(self, mini: MiniBatchPlan) -> RowBatch:
        rows = self.rows.read(mini.row_ids)
        return of_fixed_width(rows, self._widths(rows))

    def like(self, mini: MiniBatchPlan) -> RowBatch:
        """A row with columns as wide as those of a mini-batch; rows are read only where their texts decide that."""
        rows = self.some_rows
        if self.texts and self.text_widths is None:
            rows = self.rows.read(mini.row_ids)
        return of_fixed_width(self.some_rows, self._widths(rows))

    def _widths(self, rows: RowBatch) -> Mapping[str, int]:
        return widest_of(rows, self.texts) if self.text_widths is None else self.text_widths


class EntryStream:
    """Steps of an entry.

    Args:
        sources: the entry, or those of a mixture.
        storage_options: for fsspec.
        recipe: plan and padding.
        mixture: how the sources are mixed; None: there is one.
        processor: of the media of rows; None: they have none.
        feedback: where decisions are; None: none can be made.
    """

    def __init__(
        self,
        sources: Sequence[SourceSpec],
        storage_options: Mapping[str, Any],
        recipe: Recipe,
        mixture: MixtureSpec | None = None,
        processor: ProcessorSpec | None = None,
        feedback: FeedbackLog | None = None,
    ) -> None:
        self._sources, self._storage_options, self._recipe = tuple(sources), dict(storage_options), recipe
        self._mixture, self._processor, self._feedback = mixture, processor, feedback
        self._failure = ""  # why nobody builds any more
        self._entries: tuple[Entry, ...] = ()  # that failure is told to; before they are open
        self._lock = threading.Lock()
        self._open: _Open | None = None  # guarded by self._lock
        self._known: _Facts | None = None  # written once, under self._lock

    @property
    def schedule(self) -> Schedule:
        """Steps, epochs and mini-batches."""
        return self._facts().schedule

    @property
    def plan_hash(self) -> str:
        """Identity of the order of rows."""
        return self._facts().plan_hash

    @property
    def identity(self) -> dict[str, Any]:
        """The fields under `plan_hash`."""
        return self._facts().identity

    @property
    def entry_key(self) -> str:
        """The key of the entry."""
        return self._facts().entry_key

    @property
    def num_rows(self) -> int:
        """Rows of the entry."""
        return self._facts().num_rows

    @property
    def is_open(self) -> bool:
        """Returns whether data are held."""
        with self._lock:
            return self._open is not None

    def make(
        self, step: int, roles: Sequence[Role | int], part: Part | None = None
    ) -> tuple[StepInfo, tuple[Shard, ...]]:
        """Info and shards of a step, as `make_step`."""
        opened, known = self._opened(), [as_role(role) for role in roles]
        build_s = self.wait_for(step)
        plans = [opened.plan.step(step, role.dp_size, role.cp or 1) for role in known]
        recipes = [self._recipe.of(role) for role in known]
        info, shards = make_step(plans, opened.read, recipes, part, opened.media)
        return replace(info, build_s=build_s), shards

    def is_there(self, step: int) -> bool:
        """Returns whether the rows of a step are tokenized."""
        opened = self._opened()
        return all(entry.knows(end) for entry, end in opened.ends_of(step)) and all(
            entry.has(slices) for entry, slices in opened.slices_of(step)
        )

    def wait_for(self, step: int) -> float:
        """Wait until the rows of a step are tokenized; seconds.

        Raises:
            EntryError: their build has failed.
        """
        opened = self._opened()
        waited_s = sum(entry.wait_until_known(end) for entry, end in opened.ends_of(step))
        return waited_s + sum(entry.wait_for(slices) for entry, slices in opened.slices_of(step))

    def end_build(self, why: str) -> None:
        """The build has failed: whoever waits for its rows is told why. "": another build begins."""
        self._failure = why
        for entry in self._entries:
            entry.fail(why)

    def outline(self, step: int, role: Role | int) -> StepOutline:
        """Returns what the plan says of a step."""
        return self._outline(self._opened(), step, as_role(role))

    def nbytes(self, step: int, role: Role) -> int:
        """Bytes of a role's shards of a step; planned once for all ranks that ask."""
        opened = self._opened()
        return opened.sizes.get(
            (step, role), None, lambda: self._outline(opened, step, role).nbytes, lambda _: 1
        )

    def _outline(self, opened: _Open, step: int, role: Role) -> StepOutline:
        recipe = self._recipe.of(role)
        media = opened.media if recipe.media else None

        def column_bytes(mini: MiniBatchPlan) -> ColumnBytes:
            return ColumnBytes.of(opened.like(mini), recipe.plan)

        return outline(opened.plan.step(step, role.dp_size, role.cp or 1), recipe, column_bytes, media)

    def check(self, state: Mapping[str, Any]) -> None:
        """Refuse a state of another plan.

        Raises:
            StateMismatch: names every field that differs.
        """
        opened = self._opened()
        known = PlanState.from_json(state)
        known.check(opened.plan)
        check_decided(state, known.next_step, opened.decisions)

    @property
    def decisions(self) -> tuple[Decision, ...]:
        """Returns what was decided so far."""
        return self._opened().decisions

    def decides(self) -> tuple[Plan, Sources | None]:
        """Returns what a decision is made of: the plan, and the sources of a mixture."""
        opened, mixture = self._opened(), self._mixture
        if mixture is None:
            return opened.plan, None
        shuffles = [
            one or self._recipe.plan.shuffle for one in mixture.shuffles or (None,) * len(mixture.names)
        ]
        entries = chosen_entries(self._recipe.plan, opened.rows.entries, mixture.shuffles)
        return opened.plan, Sources(mixture.names, entries, mixture.by, shuffles)

    def follow(self, decisions: Sequence[Decision]) -> None:
        """Make the steps to come by these decisions, which are on disk."""
        with self._lock:
            if self._open is not None:
                plan = decided_plan(self._open.plan, decisions)
                sizes: SharedSteps[int] = SharedSteps(SIZES)
                self._open = replace(self._open, plan=plan, decisions=tuple(decisions), sizes=sizes)

    def catch_up(self, number: int) -> None:
        """Know at least so many decisions."""
        if self._feedback is not None and len(self.decisions) < number:
            self.follow(self._feedback.decisions())

    def free(self) -> bool:
        """Let go of mapped parts and plan; whether anything was held."""
        with self._lock:
            held, self._open = self._open is not None, None
        return held

    def _opened(self) -> _Open:
        with self._lock:
            if self._open is None:
                rows, plan = self._rows_and_plan()
                columns = self._recipe.plan.columns
                some_rows = rows.read(np.array([rows.first_row()]))
                texts = text_names(some_rows, columns)
                widths = None if plan.rows.are_sliced else text_widths(rows.entries, columns)
                fixed = of_fixed_width(some_rows, widest_of(some_rows, texts) if widths is None else widths)
                ColumnBytes.of(fixed, self._recipe.plan)  # refuses columns that are not there
                media = EntryMedia.of(rows, plan, self._processor)
                decisions = tuple(self._feedback.decisions()) if self._feedback else ()
                plan = decided_plan(plan, decisions)
                self._open = _Open(rows, plan, some_rows, texts, widths, media, decisions)
                self._known = _Facts(plan.schedule, plan.hash, plan.identity, rows.key, rows.num_rows)
            return self._open

    def _rows_and_plan(self) -> tuple[Rows, Plan]:
        mixture = self._mixture
        self._entries = tuple(one.opened(self._storage_options) for one in self._sources)
        if self._failure:  # it was told before there was an entry to tell
            for entry in self._entries:
                entry.fail(self._failure)
        stages, shuffles = (mixture.stages, mixture.shuffles) if mixture else ((), ())
        return Rows(self._entries), plan_of_entries(self._recipe.plan, self._entries, stages, shuffles)

    def _facts(self) -> _Facts:
        if self._known is None:
            self._opened()
        assert self._known is not None
        return self._known


def feedback_log(journal: str, storage_options: Mapping[str, Any], claim: Claim | None = None) -> FeedbackLog:
    """Returns what was said back to a server with this journal; only with its claim one may write."""
    return FeedbackLog(f"{journal}/feedback", storage_options, claim)


def streams_of(spec: ServeSpec) -> dict[str, EntryStream]:
    """The streams of a server that read an entry: what is trained, if it is one, and the evals."""
    streams: dict[str, EntryStream] = {}
    if spec.sources:
        recipe = Recipe(spec.plan, spec.pad_token_id)
        streams[TRAIN] = EntryStream(
            spec.sources,
            spec.storage_options,
            recipe,
            spec.mixture,
            spec.processor,
            feedback_log(spec.journal, spec.storage_options) if spec.journal else None,
        )
    for name, evaluation in spec.evals.items():
        plan = eval_plan(spec.plan, evaluation.batch_size, evaluation.without, evaluation.rows)
        recipe = Recipe(plan, spec.pad_token_id)
        streams[name] = EntryStream(
            evaluation.sources, spec.storage_options, recipe, processor=spec.processor
        )
    return streams
