"""Steps made of groups that producers put.

Axes: N sequences of a step, T their tokens.
Always true:
- which groups are in a step is on disk before the step is handed out: after a restart it has the same bytes;
- a group that cannot be collated is quarantined by id, with its reason; its step is filled, or goes on without it;
- a step that lacks a group has the same mini-batches, and the other groups stay where they are;
- steps that the trainer will never ask for again can be forgotten; then their groups are removed, when all groups of
  the same file are through.
"""

from __future__ import annotations

import json
import logging
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from raysvc.actors.rollouts.group_log import Spool
from raysvc.actors.rollouts.group_pool import Key, Pool
from raysvc.actors.rollouts.group_rows import batch_of, taken, without_targets
from raysvc.actors.rollouts.group_store import GroupStore, PutResult
from raysvc.actors.rollouts.prompts.prompt_desk import PromptRules
from raysvc.actors.rollouts.prompts.prompt_source import PromptSource
from raysvc.actors.rollouts.turn_merger import BrokenTurn, TurnMerger
from raysvc.actors.server.make_step import Recipe, make_step, outline
from raysvc.actors.server.spec import Role, RolloutSpec, StepInfo, StepOutline, as_role
from raysvc.cache.store.claim import Claim
from raysvc.collate.shard import Shard
from raysvc.collate.shard_bytes import ColumnBytes
from raysvc.errors import ConfigError, SourceError, StateMismatch, StepNotReady, StepOutOfOrder
from raysvc.plan.plan import Plan, StepPlan
from raysvc.plan.schedule import Schedule
from raysvc.ragged import offsets_of
from raysvc.rl.rollout_facts import RolloutFacts, facts_of
from raysvc.rl.schema import Schema
from raysvc.rl.turns import Turns
from raysvc.row_batch import RowBatch

log = logging.getLogger(__name__)
MAX_STEPS = 10**9


@dataclass(frozen=True, eq=False)
class _StepRows:
    """Holds what a step is planned from: its rows group after group, with a row of one token where a group is missing.

    Attributes:
        batch: the rows that are there.
        row_ids: int64, -1 where a group is missing.
        lengths: of the same rows.
        uids: of the same rows.
        facts: of the rows that were put.
    """

    batch: RowBatch
    row_ids: npt.NDArray[np.int64]
    lengths: npt.NDArray[np.int64]
    uids: list[str]
    facts: RolloutFacts


class RolloutStream:
    """See the module.

    Args:
        name: of the server.
        spec: staleness, waiting, late columns, defaults.
        recipe: plan and padding.
        folder: fsspec URL; groups and memberships lie below it.
        storage_options: for fsspec.
        claim: on the folder; None: it is only read.
    """

    def __init__(
        self,
        name: str,
        spec: RolloutSpec,
        recipe: Recipe,
        folder: str,
        storage_options: Mapping[str, Any],
        claim: Claim | None = None,
    ) -> None:
        self._name, self._recipe, self._spec = name, recipe, spec
        self._spool = Spool(folder, storage_options, claim)
        self._merger = TurnMerger(name, recipe.plan, spec.model_reads) if spec.rows == "merge" else None
        self.prompts = PromptSource(spec.prompts) if spec.prompts else None
        self._opening = threading.Lock()
        self._store: GroupStore | None = None  # guarded by _opening; None: not read yet

    @property
    def store(self) -> GroupStore:
        """All groups; the first use reads them.

        Raises:
            FolderHeld: another server that lives owns the folder.
        """
        with self._opening:
            if self._store is None:
                spec, plan = self._spec, self._recipe.plan
                pool = Pool(plan.batch_size, spec.max_staleness, spec.on_bad_group, on_stale=spec.on_stale)
                schema = Schema(plan.columns, spec.late, spec.defaults)
                self._store = GroupStore(
                    pool,
                    schema,
                    self._spool,
                    spec.producer_ttl_s,
                    prompts=self._rules(),
                    drop_constant=spec.drop_constant,
                    short_tail=plan.tail != "drop",
                )
            return self._store

    def _rules(self) -> PromptRules | None:
        spec, source = self._spec.prompts, self.prompts
        if spec is None or source is None:
            return None
        return PromptRules(source, self._spec.on_stale, spec.max_prompt_s, spec.max_attempts)

    @property
    def pool(self) -> Pool:
        """The state of all groups; guarded by `store.changed`."""
        return self.store.pool

    @property
    def schedule(self) -> Schedule:
        """Endless: steps form as groups come."""
        plan = self._recipe.plan
        return Schedule(
            num_groups=plan.batch_size * MAX_STEPS,
            batch_size=plan.batch_size,
            mini_batch_size=plan.mini_batch_size or plan.batch_size,
            epochs=1,
            tail="drop",
            update_epochs=plan.update_epochs,
        )

    @property
    def plan_hash(self) -> str:
        """Identity of this stream."""
        return json.dumps(self.identity, sort_keys=True)

    @property
    def identity(self) -> dict[str, Any]:
        """Returns what a checkpoint must agree with."""
        plan = self._recipe.plan
        return {
            "rollouts": self._name,
            "batch_size": plan.batch_size,
            "mini_batch_size": plan.mini_batch_size,
            **({} if self.prompts is None else {"prompts": self.prompts.identity}),
        }

    @property
    def entry_key(self) -> str:
        """Empty: rollouts have no entry."""
        return ""

    @property
    def num_rows(self) -> int:
        """Sequences that were ever put."""
        return self.store.num_rows

    @property
    def is_open(self) -> bool:
        """Tells whether tables are held in memory."""
        return self._store is not None and self._store.holds_tables

    def put(self, table: pa.Table, owner: str = "", *, gate: int | None = None) -> PutResult | None:
        """Keep the new groups of a table; None: there is no room, as in `GroupStore.put`.

        Raises:
            SourceError: it breaks a rule, or has a sequence that no micro-batch can hold.
        """
        self._refuse_oversize(table)
        return self.store.put(table, owner, gate=gate)

    def form(self, step: int, frontier: int) -> bool:
        """Plan a step when enough groups are there, and write down which; whether it is planned.

        Raises:
            StepOutOfOrder: the step was forgotten.
        """
        self.refuse_forgotten(step)
        return self.store.form(step, frontier)

    def make(self, step: int, roles: Sequence[Role | int]) -> tuple[StepInfo, tuple[Shard, ...]]:
        """Info and shards of a step that was formed."""
        return self._made(step, self._step_rows(step), roles)

    def outline(self, step: int, role: Role | int) -> StepOutline:
        """Returns what the plan says of a formed step.

        Raises:
            StepNotReady: it is not formed.
        """
        rows, role = self._step_rows(step), as_role(role)
        recipe = self._recipe.of(role)
        column_bytes = ColumnBytes.of(rows.batch, recipe.plan)
        return outline(self._plan(step, rows, role), recipe, lambda mini: column_bytes)

    def nbytes(self, step: int, role: Role) -> int:
        """Bytes of a role's shards of a formed step."""
        return self.outline(step, role).nbytes

    def turns(self) -> dict[str, Any] | None:
        """Counts what became of turns, as `TurnMerger.counts`; None: rows travel as they were put."""
        return None if self._merger is None else self._merger.counts()

    def trained_by(self, step: int) -> int:
        """The weight version that trains a step, as far as it was told."""
        with self.store.changed:
            told = self.pool.told
            at, version = next((each for each in reversed(told) if each[0] <= step), told[0])
        return version + max(0, step - at)

    def batch_of_group(self, key: Key) -> RowBatch:
        """The rows of a group as they were put.

        Raises:
            KeyError: they are gone.
            StoreError: the file is damaged.
        """
        return batch_of(self.store.rows_of(key), self.store.group(key).row_ids)

    def as_trained(
        self, batch: RowBatch, keys: Sequence[Key], counts: npt.NDArray[np.int64]
    ) -> tuple[RowBatch, npt.NDArray[np.bool_] | None]:
        """Returns rows of a formed step, those that are too old without a target; and which these are, bool [N], None: none is withheld here.

        Args:
            batch: N rows, group after group.
            keys: its groups.
            counts: rows of each.
        """
        with self.store.changed:
            pool = self.pool
            if not pool.withholds:
                return batch, None
            oldest = [pool.trained_from.get(key, 0) for key in keys]
        is_old = batch.rows["weight_version"].astype(np.int64) < np.repeat(oldest, counts)
        return without_targets(batch, is_old), is_old

    def turns_of(self, key: Key, batch: RowBatch) -> Turns | None:
        """Finds what becomes of the turns of a group, of these rows; None: rows travel as they were put."""
        return None if self._merger is None else self._merger.turns_of(key, batch)

    def broken_turns(self, step: int) -> list[BrokenTurn]:
        """The turns of a step that was made that do not begin with the turn before."""
        return [] if self._merger is None else self._merger.broken(self.pool.steps[step])

    def is_there(self, step: int) -> bool:
        """Returns True: nobody waits here for a step to be formed."""
        return True

    def wait_for(self, step: int) -> float:
        """Waits for what `is_there` asks for."""
        return 0.0

    def repair(self, step: int, roles: Sequence[Role | int]) -> bool:
        """Quarantine the groups of a step that cannot be collated by themselves; whether there were any.

        What the plan or a role asks in vain is the mistake of no group: then none is quarantined for it.
        """
        with self.store.changed:
            known = self.pool.quarantined
            keys = [key for key in self.pool.steps.get(step, ()) if key not in known]
        bad = {key: reason for key in keys if (reason := self._fault(step, key, roles)) is not None}
        for key, reason in bad.items():
            log.error("quarantined name=%s step=%d group=%s reason=%s", self._name, step, key, reason)
        if bad:
            self.store.quarantine(bad)
        return bool(bad)

    def check(self, state: Mapping[str, Any]) -> None:
        """Refuse a state of another stream.

        Raises:
            StateMismatch: names every field that differs.
        """
        old, new = state.get("identity", {}), self.identity
        names = sorted({*old, *new})
        found = [
            f"{name} was {old.get(name)!r} and is {new.get(name)!r}"
            for name in names
            if old.get(name) != new.get(name)
        ]
        if found:
            raise StateMismatch("state", "it belongs to another plan: " + "; ".join(found), "restore these")

    def free(self) -> bool:
        """Let go of tables in memory; they are read again when a step needs them."""
        return self.store.free()

    def refuse_forgotten(self, step: int) -> None:
        """Refuse a step whose groups may be gone.

        Raises:
            StepOutOfOrder: it was forgotten.
        """
        if step < self.pool.kept_from:
            expected = f"a step from {self.pool.kept_from} on, earlier ones were forgotten"
            raise StepOutOfOrder(self._name, step, expected)

    def delete_before(self, step: int) -> int:
        """Give up the steps below `step` for good; returns how many files went."""
        return self.store.delete_before(step)

    def _step_rows(self, step: int) -> _StepRows:
        """The rows of a formed step, group after group.

        Raises:
            StepNotReady: it is not formed.
            KeyError: the rows of a group are gone; names it.
        """
        with self.store.changed:
            self.refuse_forgotten(step)
            keys = self.pool.steps.get(step)
            if keys is None:
                raise StepNotReady(self._name, step, len(self.pool.ready), self.pool.batch_size)
            missing = {key for key in keys if key in self.pool.quarantined}
        return self._rows(step, keys, missing)

    def _rows(self, step: int, keys: Sequence[Key], missing: set[Key]) -> _StepRows:
        there = [key for key in keys if tuple(key) not in missing]
        groups = {key: self.store.group(key) for key in there}
        ids = {key: group.row_ids for key, group in groups.items()}
        tables = [self.store.rows_of(key) for key in there] or [self.store.schema.no_rows()]
        batch = batch_of(pa.concat_tables(tables), np.concatenate([*ids.values(), np.array([], np.int64)]))
        counts = np.array([len(ids[key]) for key in there], np.int64)
        batch, withheld = self.as_trained(batch, there, counts)
        facts = facts_of(batch, np.repeat(np.arange(len(there)), counts), self.trained_by(step), withheld)
        if self._merger is not None and there:
            bounds = offsets_of(counts)
            batch, holder = self._merger.merge(batch, there, bounds.tolist())
            kept = np.split(holder == np.arange(len(holder)), bounds[1:-1])
            ids = {key: ids[key][mine] for key, mine in zip(there, kept, strict=True)}
        hole = np.array([-1])
        row_ids = np.concatenate([ids.get(key, hole) for key in keys])
        uids = [f"{uid}#{attempt}" for uid, attempt in keys for _ in ids.get((uid, attempt), hole)]
        if np.count_nonzero(row_ids >= 0) < len(batch):
            batch = taken(batch, row_ids[row_ids >= 0])
        lengths = np.ones(len(row_ids), np.int64)
        lengths[row_ids >= 0] = batch.lengths
        return _StepRows(batch, row_ids, lengths, uids, facts)

    def _made(
        self, step: int, rows: _StepRows, roles: Sequence[Role | int]
    ) -> tuple[StepInfo, tuple[Shard, ...]]:
        known = [as_role(role) for role in roles]
        plans = [self._plan(step, rows, role) for role in known]
        recipes = [self._recipe.of(role) for role in known]
        info, shards = make_step(plans, lambda mini: taken(rows.batch, mini.row_ids), recipes)
        versions = rows.facts.columns["weight_version"]
        oldest_newest = (int(versions.min()), int(versions.max())) if len(versions) else None
        return replace(info, weight_versions=oldest_newest, rollouts=rows.facts), shards

    def _plan(self, step: int, rows: _StepRows, role: Role) -> StepPlan:
        holes = tuple(np.flatnonzero(rows.row_ids < 0).tolist())
        config = self._recipe.plan.model_copy(
            update={"shuffle": "none", "epochs": 1, "tail": "pad", "update_epochs": 1, "skip_rows": holes}
        )
        plan = Plan(config, rows.lengths, uids=rows.uids).step(0, role.dp_size, role.cp or 1)
        minis = tuple(replace(mini, row_ids=rows.row_ids[mini.row_ids]) for mini in plan.mini_batches)
        return StepPlan(step, 0, minis)

    def _fault(self, step: int, key: Key, roles: Sequence[Role | int]) -> str | None:
        """Says why a group alone cannot be collated; None: it can."""
        try:
            self._made(step, self._rows(step, [key], set()), roles)
        except KeyError:
            return "its rows are gone"
        except ConfigError as error:
            return None if error.where.startswith("plan.") else f"ConfigError: {error}"
        except Exception as error:  # noqa: BLE001 - whatever it is, it is the reason
            return f"{type(error).__name__}: {error}"
        return None

    def _refuse_oversize(self, table: pa.Table) -> None:
        plan = self._recipe.plan
        if plan.micro_batch_tokens is None or plan.oversize != "error":
            return
        lengths = pc.list_value_length(table.column("input_ids")).to_numpy()
        if int(lengths.max()) > plan.micro_batch_tokens:
            uid = table.column("uid")[int(lengths.argmax())].as_py()
            what = f"has a sequence of {lengths.max()} tokens, plan.micro_batch_tokens is {plan.micro_batch_tokens}"
            raise SourceError(
                f"group {uid!r}", what, "raise it, or set plan.oversize to truncate, drop or alone"
            )
