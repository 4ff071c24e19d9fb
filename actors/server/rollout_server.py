"""A batch server whose steps are made of rollouts that producers put (RL).

Always true:
- puts, reservations and filters need no lease: they come from any process;
- every one of them may come twice;
- what decides later steps (weight version, reservations, dropped groups) is in the journal before it is answered;
- a step that was forgotten is refused, never made of other groups.
"""

from __future__ import annotations

import time
from typing import Any

from raysvc.actors.server.batch_server import BatchServer
from raysvc.actors.server.make_step import Recipe
from raysvc.actors.server.rollout_stream import RolloutStream
from raysvc.actors.server.spec import TRAIN, Role, RolloutSpec, ServeSpec, StepInfo
from raysvc.collate.shard import Shard
from raysvc.errors import ConfigError, StepNotReady, StepOutOfOrder

CHECK_EVERY_S = 0.5


class RolloutServer(BatchServer):
    """See the module; the spec has `rollouts`, and a journal."""

    def __init__(self, spec_json: str, incarnation_id: str) -> None:
        spec = ServeSpec.model_validate_json(spec_json)
        assert spec.rollouts is not None, "launch picks this class for specs with rollouts"
        assert spec.journal is not None, "groups are spooled beside the journal"
        self._rollout_spec: RolloutSpec = spec.rollouts
        recipe, folder = Recipe(spec.plan, spec.pad_token_id), f"{spec.journal}/rollouts"
        self._rollouts = RolloutStream(spec.name, spec.rollouts, recipe, folder, spec.storage_options)
        super().__init__(spec_json, incarnation_id, self._rollouts)

    def put_groups(self, *tables: Any) -> tuple[int, int]:
        """Keep groups: tables of `raysvc.rl.group.table_of`, or groups; returns how many are new, and how many were there.

        Raises:
            SourceError: a group breaks a rule; then nothing of that table is kept.
        """
        counts = [self._rollouts.put(_table(table)) for table in tables]
        return sum(new for new, _ in counts), sum(old for _, old in counts)

    def reserve(self, uids: list[str]) -> list[str]:
        """The uids that may be started on now, as many as there is capacity."""
        with self._rollouts.changed:
            granted = self._rollouts.pool.reserve(uids, self._frontier())
        self._rollouts.save()
        return granted

    def release(self, uids: list[str]) -> None:
        """A producer gave up on these prompts."""
        with self._rollouts.changed:
            self._rollouts.pool.release(uids)
        self._rollouts.save()

    def drop(self, uids: list[str]) -> int:
        """A filter does not want these prompts: their groups that are in no step go; returns how many went."""
        with self._rollouts.changed:
            gone = self._rollouts.pool.drop(uids)
            self._rollouts.dropped += gone
        self._rollouts.save()
        return len(gone)

    def set_weight_version(self, fence: int, version: int) -> None:
        """The weights that train from now on.

        Raises:
            FencedError: the caller was replaced.
            ConfigError: it goes back, or makes a planned step too old.
        """
        self._leases.check(fence)
        with self._rollouts.changed:
            try:
                self._rollouts.pool.set_version(version, self._frontier())
            except ValueError as error:
                remedy = "let versions advance by at most one per committed step"
                raise ConfigError("set_weight_version", str(error), remedy) from None
        self._rollouts.save()

    def rollouts(self) -> dict[str, Any]:
        """Counts of groups, the weight version, and the capacity that producers have."""
        with self._rollouts.changed:
            pool, frontier = self._rollouts.pool, self._frontier()
            return {
                "ready": len(pool.ready),
                "planned": sum(len(keys) for step, keys in pool.steps.items() if step >= frontier),
                "trained": pool.trained(frontier),
                "evicted": pool.evicted,
                "dropped": len(self._rollouts.dropped),
                "reserved": len(pool.reserved),
                "capacity": pool.capacity(frontier),
                "weight_version": pool.version,
                "sequences": self._rollouts.num_rows,
            }

    def commit(self, fence: int, step: int, skipped: bool = False, rank: int = 0, moves: int = 0) -> int:
        """As `BatchServer.commit`; tables of trained groups leave memory."""
        frontier = super().commit(fence, step, skipped, rank, moves)
        self._rollouts.let_go_below(frontier)
        return frontier

    def move(
        self,
        fence: int,
        frontier: int,
        state: dict[str, Any] | None = None,
        rank: int = 0,
        moves: int | None = None,
    ) -> int:
        """As `BatchServer.move`; a step that was forgotten is refused."""
        self._leases.check(fence)
        self._rollouts.refuse_forgotten(frontier)
        return super().move(fence, frontier, state, rank, moves)

    def forget_below(self, fence: int, step: int) -> int:
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
        return self._rollouts.forget_below(step)

    def form_size(self, fence: int, step: int, roles: tuple[Role, ...]) -> int | None:
        """Bytes of the shards of a step, formed now if there are groups for it; None while there are not."""
        self._leases.check(fence)
        frontier = self._frontier()
        with self._rollouts.changed:
            if not self._rollouts.form(step, frontier):
                return None
            self._rollouts.changed.notify_all()
        return self.sizes(step, step + 1, roles)[0]

    def fetch(
        self, fence: int, step: int, roles: tuple[Role, ...], stream: str = TRAIN
    ) -> tuple[StepInfo | Shard, ...]:
        """As `BatchServer.fetch`, once enough groups are there.

        Raises:
            StepNotReady: they did not come in time.
        """
        if stream == TRAIN:
            self._await_groups(fence, step)
        return super().fetch(fence, step, roles, stream)

    def fetch_rank(
        self, fence: int, step: int, rank: int, num_ranks: int, stream: str = TRAIN
    ) -> tuple[StepInfo | Shard, ...]:
        """As `BatchServer.fetch_rank`, once enough groups are there."""
        if stream == TRAIN:
            self._await_groups(fence, step)
        return super().fetch_rank(fence, step, rank, num_ranks, stream)

    def _await_groups(self, fence: int, step: int) -> None:
        """Wait until the step is formed; a holder that was replaced stops waiting."""
        begin, rollouts = time.monotonic(), self._rollouts
        while True:
            self._leases.check(fence)
            frontier = self._frontier()
            with rollouts.changed:
                if rollouts.form(step, frontier):
                    rollouts.changed.notify_all()  # the step after it may be waiting for this one
                    return
                if time.monotonic() - begin > self._rollout_spec.wait_s:
                    ready, needed = len(rollouts.pool.ready), rollouts.pool.batch_size
                    raise StepNotReady(self.spec.name, step, ready, needed)
                rollouts.changed.wait(CHECK_EVERY_S)

    def _frontier(self) -> int:
        return self._leases.leases.of_reader("").frontier


def _table(groups: Any) -> Any:
    import pyarrow as pa

    from raysvc.rl.group import Group, table_of

    if isinstance(groups, pa.Table):
        return groups
    return table_of([groups] if isinstance(groups, Group) else list(groups))
