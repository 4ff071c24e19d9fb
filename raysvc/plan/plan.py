"""Says which rows are in which step, mini-batch, rank and micro-batch.

Axes: N rows, G groups, R ranks.
Always true:
- `step(k, dp_size)` is a pure function of the plan: same bytes on every machine, in any order of calls, after
  any restart;
- the rows of a step and of its mini-batches do not depend on dp_size, micro-batches, packing or layout (but
  `stream`);
- the rows of a group are in one mini-batch;
- over an epoch every row comes exactly once (`tail: drop` leaves some out, `tail: wrap` takes some again);
- a row in `skip_rows`, or over the budget with `oversize: drop`, leaves a hole: no other row moves;
- what is decided from step k on moves no row of a step before k;
- time and memory of a step depend on its rows, and with `shuffle: window` on the slices of a window, never on N.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from copy import copy
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from raysvc.errors import PlanError
from raysvc.job.config import PlanConfig
from raysvc.plan.cost import CostModel
from raysvc.plan.fact_table import facts_html, facts_text
from raysvc.plan.groups import Groups
from raysvc.plan.mixture import Mixture, Stage
from raysvc.plan.pack import aligned
from raysvc.plan.plan_rows import HeldRows
from raysvc.plan.rank_plan import RankPlan, Rules, deal, deal_pairs, deal_windows, pair_cells
from raysvc.plan.row_pieces import Pieces, Windows
from raysvc.plan.schedule import Schedule
from raysvc.plan.sliced.sliced_rows import SlicedRows
from raysvc.row_ids import written

PlanRows = HeldRows | SlicedRows
PLAN_VERSION = 2  # ids of rows are addresses
DEFAULT_MICRO_BATCH_SIZE = 8
PACKED_TOKENS = 4096  # least capacity of a packed line where none is given


@dataclass(frozen=True, eq=False)
class MiniBatchPlan(Pieces):
    """One mini-batch: its real rows, group after group, and what each rank gets of them.

    Attributes:
        row_ids: int64 [N], the real rows; no dummies.
        lengths: int32 [N], tokens that are used of each row.
        starts: int32 [N], the first token that is used of each row; 0 but for `layout: stream`.
        group_index: int32 [N], number of the row's group in this mini-batch, ascending.
        ranks: one plan for each rank.
    """

    ranks: tuple[RankPlan, ...] = ()


@dataclass(frozen=True, eq=False)
class StepPlan:
    """One step: `index` counted from 0 over the run, its `epoch`, its `mini_batches`; `order` as `Plan.order_of`."""

    index: int
    epoch: int
    mini_batches: tuple[MiniBatchPlan, ...]
    order: str | None = None


class Plan:
    """All steps of a run.

    Args:
        config: section `plan` of the job.
        rows: of the entries; or int [N], tokens of every row, which may be a memory map and is never copied.
        uids: beside tokens, one uid per row; rows of one uid are a group. None: every row is its own group.
        entry_keys: keys of the cache entries that the rows come from.
        mixture: the stream of groups when there are several entries; rows lie one entry after the other.
        chosen: int64 [N], ascending: the rows of the entries that the plan is of; None: all. `rows` are these alone.

    Attributes:
        schedule: step arithmetic.
        identity: what decides which rows are in which mini-batch, by name.
        hash: sha256 of `identity`.

    Raises:
        PlanError: no plan can satisfy rows and config.
    """

    def __init__(
        self,
        config: PlanConfig,
        rows: PlanRows | npt.NDArray[np.integer[Any]],
        *,
        uids: Sequence[str] | None = None,
        entry_keys: Sequence[str] = (),
        mixture: Mixture | None = None,
        chosen: npt.NDArray[np.int64] | None = None,
    ) -> None:
        if isinstance(rows, np.ndarray):
            rows = HeldRows(rows, Groups.singles(len(rows)) if uids is None else Groups.of_uids(uids))
        longest = rows.longest()
        needs = pair_cells(longest, _rules(config)) if rows.are_pairs else longest
        config = with_capacity(config, needs)
        if not rows.are_sliced:
            _refuse_oversize(config, needs, "pair" if rows.are_pairs else "row")
        _refuse_contradictions(config, rows, mixture)
        self.config = config
        self.rows = rows
        self.windows = (
            Windows(longest, config.window, rows.places)
            if config.layout == "stream" and config.window
            else None
        )
        num_groups = self.windows.num_windows if self.windows else rows.num_groups
        if (
            mixture is not None
            and (known := sum(source.num_groups for source in mixture.sources)) != num_groups
        ):
            raise PlanError(
                "plan.mixture", f"{known} groups for {num_groups}", "name the groups of every entry"
            )
        self.order = mixture or rows.order(config, num_groups)
        self.schedule = schedule_of(config, self.order.num_groups)
        self.rules = _rules(config)
        self.identity = _identity(config, self.schedule, rows, entry_keys, mixture)
        self._only, left_out = _choice(config, rows)
        if chosen is not None:
            self.identity["chosen"] = hashlib.sha256(chosen.astype("<i8").tobytes()).hexdigest()
        elif rows.are_sliced and config.rows is not None:
            ids = [[*sorted(set(config.rows.include or ()))], [*sorted(set(config.rows.exclude))]]
            told = json.dumps([None if config.rows.include is None else ids[0], ids[1]])
            self.identity["chosen"] = hashlib.sha256(told.encode()).hexdigest()
        if config.order is not None:
            self.identity["order"] = {"name": config.order, "first_epoch": self.order.digest(0)}
        self.hash = hashlib.sha256(json.dumps(self.identity, sort_keys=True).encode()).hexdigest()
        self._skips = [
            (0, np.union1d(np.array(config.skip_rows, np.int64), left_out))
        ]  # (from step, all left out)

    def __repr__(self) -> str:
        return facts_text("plan", self._facts())

    def _repr_html_(self) -> str:
        return facts_html("Plan", self._facts())

    def _facts(self) -> dict[str, Any]:
        schedule, config = self.schedule, self.config
        return {
            "rows": self.rows.num_rows,
            "groups": schedule.num_groups,
            "steps": schedule.num_steps,
            "epochs": schedule.epochs,
            "groups a step": schedule.batch_size,
            "optimizer steps": schedule.optimizer_steps,
            "layout": config.layout,
            "shuffle": f"{config.order or config.shuffle}, seed {config.seed}",
            "hash": self.hash[:16],
        }

    def deciding(self, stages: Sequence[Stage], skips: Sequence[tuple[int, npt.NDArray[np.int64]]]) -> Plan:
        """This plan with what was decided while it was followed; identity, hash and schedule stay.

        Args:
            stages: of the mixture, by ascending `first`; see `Mixture.decided`.
            skips: (step, rows that are left out from it on), by ascending step.

        Raises:
            PlanError: stages for a plan that is no mixture.
        """
        decided = copy(self)
        decided.order = self.order.decided_by(stages)
        decided._skips = self._skips[:1]
        for step, rows in skips:
            decided._skips = [*decided._skips, (step, np.union1d(decided._skips[-1][1], rows))]
        return decided

    def step(self, step: int, dp_size: int, cp_size: int = 1) -> StepPlan:
        """The plan of `step` (0-based, over all epochs) for `dp_size` ranks.

        Args:
            cp_size: parts that their lines are cut into; the rows of a rank do not depend on it, where they lie may.

        Raises:
            PlanError: there is no such step, or no rank.
        """
        if isinstance(dp_size, bool) or not isinstance(dp_size, int | np.integer) or dp_size < 1:
            raise PlanError(
                "dp_size", f"{dp_size!r} must be an integer of at least 1", "give the number of ranks"
            )
        groups = self.groups_of(step)
        size = self.schedule.mini_batch_size
        parts = [groups[start : start + size] for start in range(0, len(groups), size)]
        epoch = self.schedule.epoch_of(step)
        skip = next(rows for first, rows in reversed(self._skips) if first <= step)
        rules = self.rules.cut_by(cp_size)
        minis = tuple(self._mini_batch(part, dp_size, skip, rules) for part in parts)
        return StepPlan(step, epoch, minis, self.order_of(epoch))

    def order_of(self, epoch: int) -> str | None:
        """sha256 of the order of `epoch` by the function of `plan.order`; None: the order follows from the identity."""
        return self.order.digest(epoch)

    def rows_known_by(self, step: int, num_sources: int) -> list[int]:
        """[K], of each of so many sources the groups, from its first one on, that steps up to this one may have."""
        end = self.schedule.groups_before(step) + self.schedule.groups_at(step)
        return self.order.turns_before(end, num_sources)

    def groups_of(self, step: int) -> npt.NDArray[np.int64]:
        """int64 [B], groups of `step`, in the order of the epoch.

        Raises:
            PlanError: there is no such step.
        """
        whole = isinstance(step, int | np.integer) and not isinstance(step, bool)
        if not whole or not 0 <= step < self.schedule.num_steps:
            raise PlanError(
                "step", f"{step!r} must be in [0, {self.schedule.num_steps})", "ask for one of them"
            )
        first = self.schedule.position_of(step)
        positions = np.arange(first, first + self.schedule.groups_at(step), dtype=np.int64)
        return self.order.at(self.schedule.epoch_of(step), positions % self.schedule.num_groups)

    def _mini_batch(
        self, groups: npt.NDArray[np.int64], dp_size: int, skip: npt.NDArray[np.int64], rules: Rules
    ) -> MiniBatchPlan:
        pieces = self._pieces(groups, skip)
        if self.windows is None:
            dealt = deal_pairs if self.rows.are_pairs else deal
            ranks = dealt(pieces.lengths, dp_size, rules, self.rows.patches_of(pieces.row_ids))
        else:
            ranks = deal_windows(pieces.group_index, dp_size, self._windows_per_micro_batch())
        return MiniBatchPlan(**vars(pieces), ranks=ranks)

    def _pieces(self, groups: npt.NDArray[np.int64], skip: npt.NDArray[np.int64]) -> Pieces:
        if self.windows is not None:
            return self.windows.pieces_of(groups).without(skip)
        row_ids, group_index = self.rows.rows_of(groups)
        lengths = self.rows.lengths_of(row_ids)
        pieces = Pieces(row_ids, np.zeros(len(row_ids), np.int32), lengths, group_index)
        if self._only is not None:
            skip = np.union1d(skip, np.setdiff1d(row_ids, self._only))
        pieces = pieces.without(skip)
        if not self.rows.are_pairs:
            self._refuse_over(pieces, pieces.lengths)
            return pieces.within(self.rules.tokens, self.config.oversize)
        pieces = pieces.whole_pairs()
        if self.rules.tokens is None:
            return pieces
        cells = np.repeat(pair_cells(pieces.lengths, self.rules), 2)
        self._refuse_over(pieces, cells)
        over = cells > self.rules.tokens
        half = self.rules.tokens // 2 // self._step_of_widths * self._step_of_widths
        return pieces.without_over(over, half, self.config.oversize)

    def _refuse_over(self, pieces: Pieces, cells: npt.NDArray[np.integer[Any]]) -> None:
        """Refuse rows over the budget where not all lengths were known from the start."""
        if self.rows.are_sliced and self.config.oversize == "error" and self.rules.tokens is not None:
            over = np.flatnonzero(cells > self.rules.tokens)
            if len(over):
                raise PlanError(
                    "plan.micro_batch_tokens",
                    f"row {written(pieces.row_ids[over[0]])} has {cells[over[0]]} tokens, over its {self.rules.tokens}",
                    "raise it, or set plan.oversize to truncate, drop or alone",
                )

    @property
    def _step_of_widths(self) -> int:
        return self.rules.align if self.rules.layout == "packed" else self.rules.pad_to_multiple

    def _windows_per_micro_batch(self) -> int:
        if self.rules.rows is not None or self.rules.tokens is None:
            return self.rules.rows or 1
        return max(1, self.rules.tokens // (self.config.window or 1))


def with_capacity(config: PlanConfig, lengths: npt.NDArray[np.integer[Any]]) -> PlanConfig:
    """The config, where `packed` names no capacity with that of the longest row, and at least `PACKED_TOKENS`.

    Raises:
        PlanError: it names none, and no length is known.
    """
    if config.layout != "packed" or config.micro_batch_tokens is not None:
        return config
    if not len(lengths):
        what = "packed with a window has to know its capacity before the rows, and there is no max_length"
        raise PlanError("plan.micro_batch_tokens", what, "set it, or max_length")
    longest = aligned(np.array([lengths.max(initial=0), PACKED_TOKENS], np.int64), config.align)
    return config.model_copy(update={"micro_batch_tokens": int(longest.max())})


def schedule_of(config: PlanConfig, num_groups: int) -> Schedule:
    """The schedule of `num_groups` groups per epoch.

    Raises:
        PlanError: no step can be made.
    """
    return Schedule(
        num_groups=num_groups,
        batch_size=config.batch_size,
        mini_batch_size=config.mini_batch_size or config.batch_size,
        epochs=config.epochs,
        tail=config.tail,
        update_epochs=config.update_epochs,
    )


def _choice(config: PlanConfig, rows: PlanRows) -> tuple[npt.NDArray[np.int64] | None, npt.NDArray[np.int64]]:
    """Returns of rows that are numbered by slice the only ones that a plan has (None: all), and those that it has not; ids, ascending.

    Any other plan is over the chosen rows from the start.

    Raises:
        PlanError: a row that is not there.
    """
    none = np.zeros(0, np.int64)
    if config.rows is None or not rows.are_sliced:
        return None, none
    only = None if config.rows.include is None else np.unique(np.array(config.rows.include, np.int64))
    left_out = np.unique(np.array(config.rows.exclude, np.int64))
    for name, ids in (("include", only), ("exclude", left_out)):
        try:
            rows.check(none if ids is None else ids)
        except PlanError as error:
            raise PlanError(f"plan.rows.{name}", error.what, "remove it") from None
    if only is not None and not len(np.setdiff1d(only, left_out)):
        raise PlanError("plan.rows", "no row is left", "include some, or exclude fewer")
    return only, left_out


def _refuse_contradictions(config: PlanConfig, rows: PlanRows, mixture: Mixture | None) -> None:
    if config.order is not None and mixture is not None:
        raise PlanError(
            "plan.order", "a mixture orders its sources by their weights", "leave one of them out"
        )
    if config.layout == "stream" and (rows.num_groups < rows.num_rows or mixture is not None):
        raise PlanError(
            "plan.layout", "stream cuts rows without regard to groups", "use packed for groups or mixtures"
        )
    if config.skip_rows:
        try:
            rows.check(np.array(config.skip_rows, np.int64))
        except PlanError as error:
            raise PlanError("plan.skip_rows", error.what, "remove it") from None


def _refuse_oversize(config: PlanConfig, lengths: npt.NDArray[np.integer[Any]], what: str) -> None:
    budget = config.micro_batch_tokens
    if budget is None or config.oversize != "error" or config.layout == "stream" or not len(lengths):
        return
    row = int(lengths.argmax())
    if lengths[row] > budget:
        raise PlanError(
            "plan.micro_batch_tokens",
            f"{int((lengths > budget).sum())} {what}s are over its {budget} tokens ({what} {row} has {lengths[row]})",
            "raise it, or set plan.oversize to truncate, drop or alone",
        )


def _rules(config: PlanConfig) -> Rules:
    by_tokens = config.micro_batch_tokens is not None
    return Rules(
        layout=config.layout,
        rows=None if by_tokens else config.micro_batch_size or DEFAULT_MICRO_BATCH_SIZE,
        tokens=config.micro_batch_tokens,
        pad_to_multiple=config.pad_to_multiple,
        align=config.align,
        packing=config.packing,
        cost=CostModel(*config.cost) if config.cost else CostModel(),
    )


def _identity(
    config: PlanConfig, schedule: Schedule, rows: PlanRows, entry_keys: Sequence[str], mixture: Mixture | None
) -> dict[str, Any]:
    slices = {"slices": "of each source" if mixture else rows.digest} if rows.are_sliced else {}
    return {
        **slices,
        "version": PLAN_VERSION,
        "batch_size": schedule.batch_size,
        "mini_batch_size": schedule.mini_batch_size,
        "tail": schedule.tail,
        "seed": None if config.shuffle == "none" else config.seed,
        "shuffle": config.shuffle,
        "num_rows": rows.num_rows,
        "num_groups": schedule.num_groups,
        "uids": "" if rows.are_sliced else rows.digest,
        "window": config.window if config.layout == "stream" else None,
        "entry_keys": list(entry_keys),
        "mixture": mixture.identity() if mixture else None,
    }
