"""Every row of an eval once, dealt to the ranks, beside training in rank mode.

Always true:
- over all ranks every row comes once; dummies fill up, so all ranks have the same number of steps and micro-batches;
- it has its own cursor, look-ahead and thread: nothing of the training stream moves or waits;
- it may be iterated again, and starts at its first step then.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from typing import TYPE_CHECKING

from raysvc.client.look_ahead import Limit, LookAhead, PlannedSizes
from raysvc.client.rank_reader import RankReader
from raysvc.client.rank_steps import RankMicro, RankStep, micros_of
from raysvc.plan.schedule import Schedule

if TYPE_CHECKING:
    from raysvc.client.connection import Connection


class RankEval:
    """This rank's part of an eval; make it with `rank_client.eval(name)`, on every rank."""

    def __init__(self, connection: Connection, name: str, num_ranks: int, limit: Limit) -> None:
        self.name, self.dp_size = name, num_ranks
        self._connection, self._limit = connection, limit
        self.schedule = Schedule.from_json(connection.get(connection.control("eval_schedule", name)))

    def __len__(self) -> int:
        """Steps."""
        return self.schedule.num_steps

    def __iter__(self) -> Iterator[RankMicro]:
        return self.micro_batches()

    def micro_batches(self, device: str = "cpu") -> Iterator[RankMicro]:
        """This rank's micro-batches, as tensors."""
        return micros_of(self.steps(), device)

    def steps(self) -> Iterator[RankStep]:
        """This rank's shards, one mini-batch a step.

        Raises:
            StepFailed: the step that would come next could not be made.
        """
        in_threads = self._limit.steps > 0
        reader = RankReader(self._connection, self.dp_size, in_threads=in_threads, stream=self.name)
        sizes = PlannedSizes(reader.ask_sizes, len(self))
        window = LookAhead(lambda index: reader.ask(index, 1), sizes, self._limit)
        with closing(reader), closing(window.run(0, len(self))) as fetches:
            for fetch in fetches:
                yield reader.arrive(fetch)
