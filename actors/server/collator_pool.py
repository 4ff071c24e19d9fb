"""The collators of one trainer: who makes which shards of a step, and how many there are.

Axes: R ranks of a role, M mini-batches.
1. A trainer begins with as many as it may have: first steps are waited for anyway.
2. A call goes to the one that has the fewest unfinished calls, of equals to the one whose turn was the longest ago.
3. When for some `patience` steps in a row all earlier steps were made by the time of asking, one has nothing to do: it gets no more
   calls, and ends after `LEAVING_STEPS` more, when what it made has been read. Who asks for less than two steps ahead waits for
   every step, and keeps all.
4. When a step that was asked for two steps ago is not made, the workers wait, or will soon: one is started again. The next one is
   let go only after twice the patience, so that their number comes to rest.

Always true:
- nothing here blocks: calls are sent, and wait for the server's answer in their process;
- the processes end with the trainer, and a dead one is started again, wherever there is room; on each node there is one at least;
- a rank's shards are made on its own node where that is known and has room, and go through shared memory alone;
- who makes a shard, and how many there are, changes no byte of it.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Sequence
from typing import Any

from raysvc.actors.launch import start_collators
from raysvc.actors.server.spec import Part, Role

log = logging.getLogger(__name__)
PATIENCE_STEPS = 64
LEAVING_STEPS = 64


class CollatorPool:
    """See the module.

    Args:
        spec_json: the `ServeSpec` of the server.
        size: processes at most, or one for each node.
        nodes: node of each rank of every role, as far as known; later ranks begin again at the first.
    """

    def __init__(self, spec_json: str, size: int, nodes: Sequence[str] = ()) -> None:
        self._spec_json, self._size = spec_json, size
        self.nodes = tuple(nodes)  # read once, with the first step
        self._lock = threading.Lock()
        self._by_node: dict[str | None, NodeCollators] = {}  # guarded by _lock

    def make(self, step: Any, roles: tuple[Role, ...], num_mini_batches: int, stream: str) -> list[Any]:
        """Refs of a step's info, then of its shards: mini-batch after mini-batch, role after role, rank after rank.

        Args:
            step: ref of an `AdmittedStep`.
            roles: each one's ranks and columns.
            num_mini_batches: M.
            stream: of the step.
        """
        parts = [Part(number, rank) for number, role in enumerate(roles) for rank in range(role.dp_size)]
        made = self._made(step, roles, parts, num_mini_batches, stream)
        return [made[0][0], *(refs[1 + mini] for mini in range(num_mini_batches) for refs in made)]

    def make_part(
        self, step: Any, roles: tuple[Role, ...], part: Part, num_mini_batches: int, stream: str
    ) -> list[Any]:
        """Refs of a step's info, then of a rank's shard of each mini-batch; arguments as `make`."""
        return self._made(step, roles, [part], num_mini_batches, stream)[0]

    def _made(
        self, step: Any, roles: tuple[Role, ...], parts: Sequence[Part], num_mini_batches: int, stream: str
    ) -> list[list[Any]]:
        with self._lock:
            if not self._by_node:
                self._start()
            for own in self._by_node.values():
                own.next_step()
            return [
                self._by_node[self._node_of(part)].call(1 + num_mini_batches, (step, roles, part, stream))
                for part in parts
            ]

    def _node_of(self, part: Part) -> str | None:
        return self.nodes[part.rank % len(self.nodes)] if self.nodes else None

    def _start(self) -> None:
        """Puts as many on each node, one at least."""
        nodes: list[str | None] = [*dict.fromkeys(self.nodes)] or [None]
        counts = {node: max(1, len(range(place, self._size, len(nodes)))) for place, node in enumerate(nodes)}
        log.info("collators=%d nodes=%d", sum(counts.values()), len(nodes))
        self._by_node = {node: NodeCollators(self._spec_json, count, node) for node, count in counts.items()}


class NodeCollators:
    """Those of one node.

    Args:
        spec_json: the `ServeSpec` of the server.
        most: of them.
        node: where; None: spread.
    """

    def __init__(self, spec_json: str, most: int, node: str | None) -> None:
        self._spec_json, self._most, self._node = spec_json, most, node
        self._patience, self._calm_steps, self._step = PATIENCE_STEPS, 0, 0
        self._ahead = 0  # steps that were asked for before the oldest of them was made, at most
        self._leaving: list[tuple[int, Any]] = []  # (step of this class at which it ends, handle)
        self._working: list[
            tuple[Any, dict[Any, int]]
        ] = []  # (handle, unfinished call -> step of this class)
        self._start(most)

    def __len__(self) -> int:
        return len(self._working)

    def next_step(self) -> None:
        """Say that a step is asked for: rules 3 and 4."""
        self._step += 1
        self._leaving = [each for each in self._leaving if each[0] > self._step]
        for _, unfinished in self._working:
            for call in _finished(list(unfinished)):
                del unfinished[call]
        oldest = min((step for _, calls in self._working for step in calls.values()), default=self._step)
        self._ahead = max(self._ahead, self._step - oldest)
        self._calm_steps = self._calm_steps + 1 if oldest == self._step and self._ahead >= 2 else 0
        if oldest <= self._step - 2 and len(self._working) < self._most:
            self._start(1)
            self._patience *= 2
        elif self._calm_steps >= self._patience and len(self._working) > 1:
            self._calm_steps = 0
            handle, _ = self._working.pop(0)
            self._leaving.append((self._step + LEAVING_STEPS, handle))
            log.info("collators=%d node=%s: one had nothing to do", len(self._working), self._node)

    def call(self, num_returns: int, arguments: tuple[Any, ...]) -> list[Any]:
        """Refs of what the least busy one returns."""
        least = min(range(len(self._working)), key=lambda place: len(self._working[place][1]))
        self._working.append(self._working.pop(least))
        handle, unfinished = self._working[-1]
        refs: list[Any] = handle.make.options(num_returns=num_returns).remote(*arguments)
        unfinished[refs[0]] = self._step
        return refs

    def _start(self, count: int) -> None:
        handles = start_collators(self._spec_json, count, self._node)
        self._working += [(handle, {}) for handle in handles]
        if len(self._working) > count:
            log.info("collators=%d node=%s: steps were late", len(self._working), self._node)


def _finished(calls: list[Any]) -> list[Any]:
    """Those of some calls that have returned, also with an error."""
    import ray

    found: list[Any] = (
        ray.wait(calls, num_returns=len(calls), timeout=0, fetch_local=False)[0] if calls else []
    )
    return found
