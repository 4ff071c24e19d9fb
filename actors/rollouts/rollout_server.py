"""A batch server whose steps are made of rollouts that producers put (RL).

Always true:
- puts, reservations and filters need no lease: they come from any process;
- every one of them may come twice;
- what decides later steps (weight version, reservations, dropped groups) is on disk before it is answered;
- a trainer that goes back gets the version that trained that step, and the same groups from there on;
- a step that was forgotten is refused, never made of other groups.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from raysvc.actors.rollouts.rollout_stream import RolloutStream
from raysvc.actors.rollouts.weight_readers import WeightReaders
from raysvc.actors.server.batch_server import BatchServer
from raysvc.actors.server.kept.folder_claim import claim_of
from raysvc.actors.server.kept.served_records import ServedRecords
from raysvc.actors.server.make_step import Recipe
from raysvc.actors.server.spec import TRAIN, Role, RolloutSpec, ServeSpec
from raysvc.actors.server.step_maker import Made
from raysvc.errors import (
    ConfigError,
    LeaseError,
    PromptsEnded,
    SourceError,
    StepFailed,
    StepNotReady,
    StepOutOfOrder,
)
from raysvc.metrics import record
from raysvc.rl.group import Group
from raysvc.rl.group_table import table_of
from raysvc.rl.prompt_state import PromptState

log = logging.getLogger(__name__)
CHECK_EVERY_S = 0.5


class RolloutServer(BatchServer):
    """See the module; the spec has `rollouts`, and a journal."""

    def __init__(self, spec_json: str, incarnation_id: str) -> None:
        spec = ServeSpec.model_validate_json(spec_json)
        assert spec.rollouts is not None, "launch picks this class for specs with rollouts"
        assert spec.journal is not None, "groups are spooled beside the journal"
        self._rollout_spec: RolloutSpec = spec.rollouts
        recipe, folder = Recipe(spec.plan, spec.pad_token_id), f"{spec.journal}/rollouts"
        claim = claim_of(spec, incarnation_id)
        self._rollouts = RolloutStream(spec.name, spec.rollouts, recipe, folder, spec.storage_options, claim)
        self._producers: dict[str, float] = {}  # owner -> clock value of its last sign of life
        self._weight_readers = WeightReaders(spec.rollouts.producer_ttl_s)
        super().__init__(spec_json, incarnation_id, self._rollouts, claim)

    def describe(self) -> dict[str, Any]:
        """Does what `BatchServer.describe` does; from now on the run folder says how steps are made.

        Raises:
            FolderHeld: another server that lives owns the run folder.
            ConfigError: the run folder handed out other prompts.
        """
        facts = super().describe()
        self._rollouts.store.begin_prompts()
        assert self.spec.journal is not None, "groups are spooled beside the journal"
        records = ServedRecords(self.spec.journal, self.spec.storage_options, self._claim)
        records.keep(self._frontier(), self.spec)
        return facts

    def put_groups(self, *tables: Any, owner: str = "") -> tuple[int, int, dict[str, str]] | None:
        """Keep groups: tables of `raysvc.rl.group_table.table_of`, or groups; returns how many are new, how many were
        there, and a verdict of each uid; None when there is no capacity for what was not reserved: ask again.

        Raises:
            SourceError: a group breaks a rule; then nothing of the call is kept.
        """
        self._saw(owner)
        if (table := _table(tables)) is None:
            return 0, 0, {}
        result = self._rollouts.put(table, owner, gate=self._frontier())
        if result is None:
            return None
        record("groups_put", result.new, server=self.spec.name)
        return result.new, result.known, result.verdicts

    def add_columns(self, table: Any) -> int:
        """Late columns of groups that are there; returns how many rows got something new.

        Raises:
            SourceError: no such group, row or late column.
        """
        return self._rollouts.store.add_columns(table)

    def close_groups(self, keys: list[tuple[str, int]]) -> int:
        """No rows of these groups will follow; returns how many were open."""
        return self._rollouts.store.close(keys)

    def reserve(self, uids: list[str], owner: str = "", attempt: int = 0) -> dict[str, str]:
        """A verdict of each uid: those that are granted may be started on now, as many as there is capacity.

        Raises:
            ConfigError: the server hands out prompts: a group of another uid would be refused once it is sampled.
        """
        if self._rollouts.prompts is not None:
            what = f"server {self.spec.name!r} hands out the prompts"
            raise ConfigError("reserve", what, "loop over producer.prompts()")
        self._saw(owner)
        return self._rollouts.store.reserve(uids, self._frontier(), owner, attempt)

    def prompts(self, owner: str, ask: str, count: int, is_first: bool) -> tuple[list[Any], bool]:
        """Up to `count` prompts for a producer to sample, each as the fields of `raysvc.rl.prompt.Prompt`; and whether the stream has ended.

        Raises:
            ConfigError: the server has no prompts.
        """
        source = self._rollouts.prompts
        if source is None:
            what = f"server {self.spec.name!r} hands out no prompts"
            raise ConfigError("prompts", what, "serve_rollouts(prompts=...), or reserve uids of your own")
        self._saw(owner)
        store = self._rollouts.store
        handed = store.hand_out(owner, ask, count, self._frontier(), is_first)
        told = source.read([each.uid for each in handed])
        found = [[*each, *row] for each, row in zip(handed, told, strict=True)]
        return found, not found and store.desk.is_ended

    def status(self, uids: list[str], attempt: int = 0) -> dict[str, PromptState]:
        """Say where each of these prompts stands."""
        return self._rollouts.store.status(uids, self._frontier(), attempt)

    def release(self, uids: list[str]) -> None:
        """A producer gave up on these prompts."""
        self._rollouts.store.release(uids)

    def renew(self, owner: str) -> None:
        """A sign of life of a producer."""
        self._saw(owner)
        self._rollouts.store.renew(owner)

    def drop(self, uids: list[str]) -> int:
        """A filter does not want these prompts: their groups that are in no step go; returns how many went."""
        return self._rollouts.store.drop(uids)

    def set_weight_version(self, fence: int, version: int, frontier: int = 0) -> None:
        """The weights that train from now on; the caller committed all steps below `frontier`.

        Raises:
            FencedError: the caller was replaced.
            ConfigError: it goes back, jumps, or makes a planned step too old.
        """
        self._leases.check(fence)
        try:
            self._rollouts.store.set_version(version, max(frontier, self._frontier()))
        except ValueError as error:
            remedy = "let versions advance by at most one per committed step"
            raise ConfigError("set_weight_version", str(error), remedy) from None

    def publish(self, fence: int, version: int, where: Any, name: str, frontier: int = 0) -> list[str] | None:
        """Weights that train from now on, for producers: folder and name of a file, or the blob and a name for it, which is put again: Ray
        frees an object when the process that put it is gone. Returns the files that producers are reading, as `WeightReaders.in_use`.

        Raises:
            FencedError, ConfigError: as `set_weight_version`.
        """
        import ray

        self.set_weight_version(fence, version, frontier)
        self._rollouts.store.publish(version, [where if isinstance(where, str) else ray.put(where), name])
        living = self._living()
        return self._weight_readers.in_use(lambda owner: owner in living)

    def weights(
        self, after: int | None, has: str | None, owner: str, read: str
    ) -> tuple[int, list[Any]] | None:
        """Returns the weights that were published last, folder or a reference (in a list, in which Ray does not resolve it), and name; None:
        there are none, or they are those of version `after`.

        Args:
            has: name of the weights that the producer has, where it knows it: after a rewind others may have the same version.
            read: names this read; `weights_read` ends it.
        """
        self._saw(owner)
        published = self._rollouts.store.published
        if published is None or (published[0] == after and has in (None, published[1][1])):
            return None
        return self._weight_readers.begin(read, owner, lambda: self._rollouts.store.published)

    def weights_read(self, read: str) -> None:
        """A producer has the weights in its memory, or has given up."""
        self._weight_readers.end(read)

    def stats(self) -> dict[str, Any]:
        """Returns what `BatchServer.stats` does, and counts of groups and of live producers."""
        store = self._rollouts.store
        with store.changed:
            pool = store.pool
            counts = {"ready": len(pool.ready), "waiting": len(pool.waiting), "weight_version": pool.version}
        # steps form as long as rollouts come: there is no last one
        return {
            **super().stats(),
            "num_steps": None,
            "rollouts": {**counts, "producers": self._num_producers()},
        }

    def _export(self) -> None:
        record("groups_ready", len(self._rollouts.store.pool.ready), server=self.spec.name)
        record("producers_seen", self._num_producers(), server=self.spec.name)

    def _saw(self, owner: str) -> None:
        self._producers = {**self._living(), owner: time.monotonic()}

    def _living(self) -> dict[str, float]:
        oldest_s = time.monotonic() - self._rollout_spec.producer_ttl_s
        return {each: seen_s for each, seen_s in list(self._producers.items()) if seen_s >= oldest_s}

    def _num_producers(self) -> int:
        return len(self._living())

    def rollouts(self) -> dict[str, Any]:
        """Counts of groups, the weight version and timeline, and the capacity that producers have."""
        store, frontier, prompts = self._rollouts.store, self._frontier(), self._rollouts.prompts
        with store.changed:
            pool = store.pool
            return {
                "ready": len(pool.ready),
                "waiting": len(pool.waiting),
                "planned": pool.planned(frontier),
                "trained": pool.trained(frontier),
                "evicted": pool.evicted,
                "stale": pool.stale,
                "dropped": len(store.dropped),
                "quarantined": {f"{uid}#{n}": reason for (uid, n), reason in pool.quarantined.items()},
                "reserved": len(pool.reserved),
                "capacity": pool.capacity(frontier),
                "weight_version": pool.version,
                "timeline": pool.timeline,
                "sequences": store.num_rows,
                "turns": self._rollouts.turns(),
                "prompts": prompts and store.desk.book.counts(prompts.total),
            }

    def commit(self, fence: int, step: int, skipped: bool = False, rank: int = 0, moves: int = 0) -> int:
        """Does what `BatchServer.commit` does; tables of trained groups leave memory."""
        frontier = super().commit(fence, step, skipped, rank, moves)
        self._rollouts.store.let_go_below(frontier)
        return frontier

    def move(
        self,
        fence: int,
        frontier: int,
        state: dict[str, Any] | None = None,
        rank: int = 0,
        moves: int | None = None,
    ) -> int:
        """Does what `BatchServer.move` does, and restores the weight version that trained this step. A step that was
        forgotten is refused.
        """
        self._leases.check(fence)
        self._rollouts.refuse_forgotten(frontier)
        before = self._frontier()
        moved = super().move(fence, frontier, state, rank, moves)
        if (
            self._frontier() == frontier
        ):  # not an old call that came again, nor a rank that is ahead of the others
            self._went_to(frontier, before)
        return moved

    def delete_before(self, fence: int, step: int) -> int:
        """Remove what only steps below `step` need: no checkpoint that goes back there will be loaded.

        Raises:
            FencedError: the caller was replaced.
            StepOutOfOrder: a step below is not committed.
        """
        self._leases.check(fence)
        if step > self._frontier():
            expected = f"at most {self._frontier()}, the first that is not committed"
            raise StepOutOfOrder(self.spec.name, step, expected)
        self.flush()  # a restart must not begin below what is gone
        return self._rollouts.delete_before(step)

    def form_size(self, fence: int, step: int, roles: tuple[Role, ...]) -> int | None:
        """Bytes of the shards of a step, formed now if there are groups for it; None while there are not."""
        self._leases.check(fence)
        if not self._rollouts.form(step, self._frontier()):
            return None
        try:
            return self.sizes(step, step + 1, roles)[0]
        except LeaseError:
            raise
        except Exception:
            if not self._rollouts.repair(step, roles):
                raise
            return None

    def _went_to(self, step: int, before: int) -> None:
        timeline = self._rollouts.store.rewind(step, before)
        if timeline is not None:
            log.warning(
                "went back name=%s step=%d version=%d timeline=%d abandoned_until=%d",
                self.spec.name, timeline.begin, timeline.version, timeline.number, timeline.abandoned_until,
            )  # fmt: skip

    def _made(
        self, fence: int, step: int, roles: tuple[Role, ...], stream: str, by_rank: bool = False
    ) -> Made:
        """A step once its groups are there; a group that cannot be collated is quarantined, and the step made again.

        Raises:
            StepNotReady: they did not come in time.
        """
        if stream != TRAIN:
            return super()._made(fence, step, roles, stream, by_rank)
        groups_s = 0.0
        while True:
            groups_s += self._await_groups(fence, step)
            try:
                info, shards = super()._made(fence, step, roles, stream, by_rank)
                return replace(info, groups_s=groups_s), shards
            except StepFailed:
                if not self._rollouts.repair(step, roles):
                    raise

    def _await_groups(self, fence: int, step: int) -> float:
        """Wait until the step is formed, and return how long; a holder that was replaced stops waiting."""
        begin, store = time.monotonic(), self._rollouts.store
        while True:
            self._leases.check(fence)
            rounds = store.rounds
            if self._rollouts.form(step, self._frontier()):
                return time.monotonic() - begin
            if store.desk.is_ended and not store.under_way():
                if self._rollouts.form(step, self._frontier()):
                    continue  # the last ones came between the two looks
                raise PromptsEnded(self.spec.name, step, len(store.pool.ready), store.pool.batch_size)
            if time.monotonic() - begin > self._rollout_spec.wait_s:
                ready, needed = len(store.pool.ready), store.pool.batch_size
                raise StepNotReady(self.spec.name, step, ready, needed, store.under_way())
            store.wait(rounds, CHECK_EVERY_S)

    def _frontier(self) -> int:
        return self._leases.leases.of_reader("").frontier


def _table(parts: Sequence[Any]) -> Any | None:
    """One table of everything that a call puts; None: nothing.

    Raises:
        SourceError: a group breaks a rule, or the parts have different columns.
    """
    import pyarrow as pa

    groups = [group for part in parts if not isinstance(part, pa.Table) for group in _listed(part)]
    tables = [part for part in parts if isinstance(part, pa.Table)]
    tables += [table_of(groups)] if groups else []
    if not tables:
        return None
    if len({tuple(table.schema) for table in tables}) > 1:
        names = " and ".join(str(table.schema.names) for table in tables)
        raise SourceError(
            "put_groups", f"puts different columns at once: {names}", "give all the same columns"
        )
    return pa.concat_tables(tables)


def _listed(groups: Any) -> list[Group]:
    if isinstance(groups, Group):
        return [groups]
    if not isinstance(groups, list | tuple):
        what = f"got a reference to a {type(groups).__name__}"
        raise SourceError("put_groups", what, "put references to groups, or to lists of them")
    return list(groups)
