"""Every row of an eval once, beside training.

Axes: R ranks.
Always true:
- every row comes once, padded with dummies to the ranks; denominators count real rows only;
- it has its own cursor and look-ahead: nothing of the training stream moves;
- it may be iterated again, and starts at its first step then.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from raysvc.actors.server.spec import Role
from raysvc.client.look_ahead import Limit, LookAhead, PlannedSizes
from raysvc.client.steps import Mini, Step
from raysvc.plan.schedule import Schedule

if TYPE_CHECKING:
    from raysvc.actors.server.spec import StepInfo
    from raysvc.client.connection import Connection


@dataclass(frozen=True)
class _Fetch:
    index: int
    info: Any
    shards: tuple[Any, ...]


class EvalStream:
    """Steps of one eval, each of one mini-batch; make it with `client.eval(name)`."""

    def __init__(self, connection: Connection, name: str, dp_size: int, limit: Limit) -> None:
        self.name, self.dp_size = name, dp_size
        self._connection, self._limit = connection, limit
        outline = connection.get(connection.control("eval_schedule", name))
        self.schedule = Schedule.from_json(outline)

    def __len__(self) -> int:
        """Steps."""
        return self.schedule.num_steps

    def __iter__(self) -> Iterator[Step]:
        window = LookAhead(self._fetch, PlannedSizes(self._ask_sizes, len(self)), self._limit)
        with closing(window.run(0, len(self))) as fetches:
            for fetch in fetches:
                info: StepInfo = self._connection.get(fetch.info)
                mini = Mini(fetch.shards, info.mini_batches[0], {}, info.rows[0])
                yield Step(fetch.index, 0, (mini,))

    def _fetch(self, index: int) -> _Fetch:
        args = (index, (Role(self.dp_size),), self.name)
        info, *shards = self._connection.fetch("fetch", 1 + self.dp_size, *args)
        return _Fetch(index, info, tuple(shards))

    def _ask_sizes(self, first: int, stop: int) -> Callable[[], list[int]]:
        return self._connection.sizes(first, stop, (Role(self.dp_size),), self.name)
