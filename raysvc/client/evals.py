"""Every row of an eval once, beside training: as refs for a driver, or dealt to ranks that read for themselves.

Axes: R ranks.
Always true:
- over all ranks every row comes once; dummies fill up, so all ranks have the same number of steps and micro-batches;
- denominators count real rows only;
- it has its own cursor and look-ahead: nothing of the training stream moves or waits;
- it may be iterated again, and starts at its first step then.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator
from contextlib import closing
from typing import TYPE_CHECKING

from raysvc.actors.server.spec import Role
from raysvc.client.look_ahead import F, Limit, LookAhead, PlannedSizes
from raysvc.client.rank_reader import RankReader, ReadAhead, StepFetch
from raysvc.client.steps import MicroBatch, MiniBatch, RankStep, Step, micros_of
from raysvc.plan.schedule import Schedule

if TYPE_CHECKING:
    from raysvc.actors.server.spec import StepInfo
    from raysvc.client.connection import Connection

AskSizes = Callable[[int, int], Callable[[], list[int | None]]]


class _Eval:
    """Has what both kinds share: an eval of a server, and a look-ahead over its steps."""

    def __init__(self, connection: Connection, name: str, dp_size: int, limit: Limit) -> None:
        self.name, self.dp_size = name, dp_size
        self._connection, self._limit = connection, limit
        self.schedule = Schedule.from_json(connection.get(connection.control("eval_schedule", name)))

    def __len__(self) -> int:
        """Steps."""
        return self.schedule.num_steps

    def _fetches(self, ask: Callable[[int], F], sizes: AskSizes) -> Generator[F, None, None]:
        window = LookAhead(ask, PlannedSizes(sizes, len(self)), self._limit)
        with closing(window.run(0, len(self))) as fetches:
            yield from fetches


class EvalStream(_Eval):
    """Steps of one eval, each of one mini-batch; make it with `client.eval(name)`."""

    def __iter__(self) -> Iterator[Step]:
        with closing(self._fetches(self._fetch, self._ask_sizes)) as fetches:
            for fetch in fetches:
                made, *shards = fetch.refs
                info: StepInfo = self._connection.get(made)
                mini = MiniBatch(tuple(shards), info.mini_batches[0], {}, info.rows[0])
                yield Step(fetch.index, 0, (mini,))

    def _fetch(self, index: int) -> StepFetch:
        return StepFetch(index, self._connection.fetch_step(index, (Role(self.dp_size),), 1, self.name))

    def _ask_sizes(self, first: int, stop: int) -> Callable[[], list[int | None]]:
        return self._connection.sizes(first, stop, (Role(self.dp_size),), self.name)


class RankEval(_Eval):
    """This rank's part of an eval; make it with `rank_client.eval(name)`, on every rank."""

    def __init__(self, connection: Connection, name: str, role: Role, limit: Limit) -> None:
        super().__init__(connection, name, role.dp_size, limit)
        self._role = role

    def __iter__(self) -> Iterator[MicroBatch]:
        return self.micro_batches()

    def micro_batches(self, device: str = "cpu") -> Iterator[MicroBatch]:
        """This rank's micro-batches, as tensors."""
        return micros_of(self.steps(), device)

    def steps(self) -> Iterator[RankStep]:
        """This rank's shards, one mini-batch a step.

        Raises:
            StepFailed: the step that would come next could not be made.
        """
        reader = RankReader(self._connection, self._role, stream=self.name)

        def ask(index: int) -> StepFetch:
            return reader.ask(index, 1)

        if not self._limit.steps:
            with closing(self._fetches(ask, reader.ask_sizes)) as fetches:
                yield from map(reader.arrive, fetches)
            return
        sizes, steps = PlannedSizes(reader.ask_sizes, len(self)), range(len(self))
        with closing(ReadAhead(self._connection, ask, reader.arrive, sizes, self._limit, steps)) as ahead:
            for _ in steps:
                yield ahead.take() or ahead.wait()
