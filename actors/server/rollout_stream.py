"""Steps made of groups that producers put.

Axes: N sequences of a step, T their tokens, G groups ever put.
Always true:
- a put is on disk before it is acknowledged, so a dead server loses no rollout;
- which groups are in a step is on disk before the step is handed out: after a restart it has the same bytes;
- steps that the trainer will never ask for again can be forgotten; then their groups are removed, when all groups of
  the same put are through;
- row ids count sequences in the order in which they were put, and never change.
"""

from __future__ import annotations

import json
import logging
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from raysvc.actors.server.group_log import Forgotten, Spool
from raysvc.actors.server.group_pool import Key, Pool, Ready
from raysvc.actors.server.journal import Journal
from raysvc.actors.server.make_step import Recipe, make_step, outline
from raysvc.actors.server.spec import Role, RolloutSpec, StepInfo, StepOutline, as_role
from raysvc.collate.shard import Shard
from raysvc.collate.shard_bytes import ColumnBytes
from raysvc.errors import SourceError, StateMismatch, StepNotReady, StepOutOfOrder
from raysvc.plan.plan import Plan, StepPlan
from raysvc.plan.schedule import Schedule
from raysvc.row_batch import RowBatch

log = logging.getLogger(__name__)
MAX_STEPS = 10**9


@dataclass(frozen=True)
class _Place:
    """Where a group lies: rows [start, stop) of a table; its first sequence is row `row_id`."""

    table: str
    start: int
    stop: int
    row_id: int


class RolloutStream:
    """See the module.

    Args:
        name: of the server.
        spec: staleness and waiting.
        recipe: plan and padding.
        folder: fsspec URL; groups and memberships lie below it.
        storage_options: for fsspec.
    """

    def __init__(
        self, name: str, spec: RolloutSpec, recipe: Recipe, folder: str, storage_options: Mapping[str, Any]
    ) -> None:
        self._name, self._recipe = name, recipe
        self._spool = Spool(folder, storage_options)
        self._journal = Journal(f"{folder}/pool", storage_options)
        self.changed = threading.Condition()  # guards what follows; notified when groups come
        self.pool = Pool(recipe.plan.batch_size, spec.max_staleness)
        self._places: dict[Key, _Place] = {}
        self._tables: dict[str, pa.Table] = {}
        self._num_rows = 0
        self.forgotten: set[Key] = set()
        self.dropped: list[Key] = []  # a filter threw them away
        self._load()

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
        """What a checkpoint must agree with."""
        plan = self._recipe.plan
        return {
            "rollouts": self._name,
            "batch_size": plan.batch_size,
            "mini_batch_size": plan.mini_batch_size,
        }

    @property
    def entry_key(self) -> str:
        """There is no entry."""
        return ""

    @property
    def num_rows(self) -> int:
        """Sequences that were ever put."""
        return self._num_rows

    @property
    def is_open(self) -> bool:
        """Whether tables are held in memory."""
        return bool(self._tables)

    def put(self, table: pa.Table) -> tuple[int, int]:
        """Keep the new groups of a table; returns how many were new and how many were there before.

        Raises:
            SourceError: a sequence that no micro-batch can hold.
        """
        self._refuse_oversize(table)
        with self.changed:
            places = _places(table, "", 0)
            new = [key for key in places if key not in self.pool.versions]
            for key in places:
                self.pool.reserved.discard(key[0])
            if new:
                rows = np.concatenate([np.arange(places[key].start, places[key].stop) for key in new])
                kept = table.take(pa.array(rows))
                self._add(self._spool.put(kept), kept)
            self.changed.notify_all()
        return len(new), len(places) - len(new)

    def form(self, step: int, frontier: int) -> bool:
        """Plan a step when enough groups are there, and write down which; call it with `changed` held.

        Raises:
            StepOutOfOrder: the step was forgotten.
        """
        self.refuse_forgotten(step)
        before = step in self.pool.steps
        keys = self.pool.form(step, frontier)
        if keys is None:
            return False
        if not before:
            self._spool.write_step(step, keys, trained_by=self.pool.trained_by(step))
        return True

    def make(self, step: int, roles: Sequence[Role | int]) -> tuple[StepInfo, tuple[Shard, ...]]:
        """Info and shards of a step that was formed."""
        rows, uids = self._rows(step)
        known = [as_role(role) for role in roles]
        plans = [self._plan(step, rows, uids, role.dp_size) for role in known]
        recipes = [self._recipe.carrying(role.columns) for role in known]
        info, shards = make_step(plans, lambda mini: _taken(rows, mini.row_ids), recipes)
        versions = rows.rows["weight_version"]
        return replace(info, weight_versions=(int(versions.min()), int(versions.max()))), shards

    def outline(self, step: int, role: Role | int) -> StepOutline:
        """What the plan says of a formed step.

        Raises:
            StepNotReady: it is not formed.
        """
        rows, uids = self._rows(step)
        role = as_role(role)
        config = self._recipe.carrying(role.columns).plan
        return outline(self._plan(step, rows, uids, role.dp_size), config, ColumnBytes.of(rows, config))

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

    def save(self) -> None:
        """Make durable what decides later steps and is in no group's file: weight version, reservations, dropped groups."""
        self._journal.save(self._pool_state)

    def free(self) -> bool:
        """Let go of tables in memory; they are read again when a step needs them."""
        with self.changed:
            held = bool(self._tables)
            self._tables.clear()
        return held

    def let_go_below(self, frontier: int) -> None:
        """Keep in memory only tables that hold a group that is not trained yet."""
        with self.changed:
            open_keys = [key for step, keys in self.pool.steps.items() if step >= frontier for key in keys]
            open_keys += [group.key for group in self.pool.ready]
            needed = {self._places[key].table for key in open_keys}
            for name in set(self._tables) - needed:
                del self._tables[name]

    def refuse_forgotten(self, step: int) -> None:
        """Refuse a step whose groups may be gone.

        Raises:
            StepOutOfOrder: it was forgotten.
        """
        if step < self.pool.kept_from:
            expected = f"a step from {self.pool.kept_from} on, earlier ones were forgotten"
            raise StepOutOfOrder(self._name, step, expected)

    def forget_below(self, step: int) -> int:
        """Give up the steps below `step` for good; returns how many files went."""
        with self.changed:
            if step > self.pool.kept_from:
                gone = set(self.pool.forget_below(step)) - self.forgotten
                tables = self._through()
                gone |= {key for key, place in self._places.items() if place.table in tables} - self.forgotten
                versions = {key: self.pool.versions[key] for key in sorted(gone)}
                self._spool.forget(Forgotten(step, versions, tables))
                self._drop(gone, tables)
        return self._spool.remove_forgotten()

    def _through(self) -> dict[str, int]:
        """Puts of which no group is needed any more: name -> rows."""
        open_keys = {key for keys in self.pool.steps.values() for key in keys}
        open_keys |= {group.key for group in self.pool.ready}
        rows: dict[str, int] = {}
        needed = {self._places[key].table for key in open_keys}
        for place in self._places.values():
            if place.table not in needed:
                rows[place.table] = max(rows.get(place.table, 0), place.stop)
        return rows

    def _drop(self, gone: set[Key], tables: Mapping[str, int]) -> None:
        self.forgotten |= gone
        self.dropped = [key for key in self.dropped if key not in self.forgotten]
        self._places = {key: place for key, place in self._places.items() if place.table not in tables}
        for name in set(self._tables) & set(tables):
            del self._tables[name]

    def _load(self) -> None:
        what = self._spool.forgotten()
        for name in sorted({*self._spool.names(), *what.tables}):
            if name in what.tables:
                self._num_rows += what.tables[name]
            else:
                self._load_table(name)
        self.forgotten = set(what.groups)
        self.pool.kept_from = what.kept_from
        self.pool.versions.update(what.groups)
        self.pool.steps = {step: keys for step, keys in self._spool.steps().items() if step >= what.kept_from}
        through = self.forgotten.union(*self.pool.steps.values())
        self.pool.ready = [group for group in self.pool.ready if group.key not in through]
        self._load_pool_state(self._journal.load())

    def _pool_state(self) -> dict[str, Any]:
        with self.changed:
            return {
                "version": self.pool.version,
                "version_step": self.pool.version_step,
                "reserved": sorted(self.pool.reserved),
                "dropped": list(self.dropped),
            }

    def _load_pool_state(self, state: Mapping[str, Any] | None) -> None:
        if state is None:
            return
        pool = self.pool
        pool.version, pool.version_step = state["version"], state["version_step"]
        pool.reserved |= set(state["reserved"]) - {uid for uid, _ in pool.versions}
        self.dropped = [(uid, attempt) for uid, attempt in state["dropped"]]
        pool.ready = [group for group in pool.ready if group.key not in self.dropped]

    def _load_table(self, name: str) -> None:
        try:
            self._add(name, self._spool.read(name))
        except pa.ArrowInvalid:
            log.warning("passed over a torn file: %s", name)

    def _add(self, name: str, table: pa.Table) -> None:
        places = _places(table, name, self._num_rows)
        versions = table.column("weight_version").to_numpy()
        for key, place in places.items():
            if self.pool.put(Ready(key, int(versions[place.start]))):
                self._places[key] = place
        self._num_rows += table.num_rows
        self._tables[name] = table

    def _rows(self, step: int) -> tuple[RowBatch, list[str]]:
        """The rows of a formed step, group after group, and the uid of each."""
        with self.changed:
            self.refuse_forgotten(step)
            keys = self.pool.steps.get(step)
            if keys is None:
                raise StepNotReady(self._name, step, len(self.pool.ready), self.pool.batch_size)
            places = [self._places[key] for key in keys]
        tables = [self._table(place.table).slice(place.start, place.stop - place.start) for place in places]
        ids = [np.arange(place.row_id, place.row_id + place.stop - place.start) for place in places]
        batch = _batch(pa.concat_tables(tables, promote_options="default"), np.concatenate(ids))
        names = [f"{uid}#{attempt}" for (uid, attempt), own in zip(keys, ids, strict=True) for _ in own]
        return batch, names

    def _table(self, name: str) -> pa.Table:
        with self.changed:
            if name in self._tables:
                return self._tables[name]
        table = self._spool.read(name)
        with self.changed:
            self._tables[name] = table
        return table

    def _plan(self, step: int, rows: RowBatch, uids: list[str], dp_size: int) -> StepPlan:
        config = self._recipe.plan.model_copy(
            update={"shuffle": "none", "epochs": 1, "tail": "pad", "update_epochs": 1, "skip_rows": ()}
        )
        plan = Plan(config, rows.lengths, uids=uids).step(0, dp_size)
        minis = tuple(replace(mini, row_ids=rows.row_ids[mini.row_ids]) for mini in plan.mini_batches)
        return StepPlan(step, 0, minis)

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


def _places(table: pa.Table, name: str, first_row: int) -> dict[Key, _Place]:
    keys = list(zip(table.column("uid").to_pylist(), table.column("attempt").to_pylist(), strict=True))
    bounds = [0, *(row for row in range(1, len(keys)) if keys[row] != keys[row - 1]), len(keys)]
    return {keys[start]: _Place(name, start, stop, first_row + start) for start, stop in pairwise(bounds)}


def _batch(table: pa.Table, row_ids: npt.NDArray[np.int64]) -> RowBatch:
    tokens, rows = {}, {"weight_version": table.column("weight_version").to_numpy()}
    offsets = np.zeros(len(row_ids) + 1, np.int64)
    for name in table.column_names:
        if name in ("input_ids", "loss_mask") or name.startswith("token."):
            column = table.column(name)
            offsets[1:] = np.cumsum(pc.list_value_length(column).to_numpy())
            tokens[name.removeprefix("token.")] = pc.list_flatten(column).to_numpy()
        elif name.startswith("row."):
            rows[name.removeprefix("row.")] = table.column(name).to_numpy()
    return RowBatch(row_ids, offsets, tokens, rows)


def _taken(batch: RowBatch, row_ids: npt.NDArray[np.int64]) -> RowBatch:
    """The rows with these ids, in their order."""
    order = np.argsort(batch.row_ids, kind="stable")
    at = order[np.searchsorted(batch.row_ids, row_ids, sorter=order)]
    lengths = batch.lengths[at]
    offsets = np.concatenate([[0], np.cumsum(lengths)])
    cells = np.arange(int(offsets[-1])) + np.repeat(batch.offsets[at] - offsets[:-1], lengths)
    tokens = {name: values[cells] for name, values in batch.tokens.items()}
    return RowBatch(row_ids, offsets, tokens, {name: values[at] for name, values in batch.rows.items()})
