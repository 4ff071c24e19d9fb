"""The collators of one trainer: who makes which shards of a step.

Axes: R ranks of a role, M mini-batches.
Always true:
- nothing here blocks: calls are sent, and wait for the server's answer in their process;
- the processes start with the first step, end with the trainer, and a dead one is started again, wherever there is room;
- a rank's shards are made on its own node where that is known and has room, and go through shared memory alone.
"""

from __future__ import annotations

import itertools
import logging
import threading
from collections.abc import Iterator, Sequence
from typing import Any

from raysvc.actors.launch import start_collators
from raysvc.actors.server.spec import Part, Role

log = logging.getLogger(__name__)


class CollatorPool:
    """See the module.

    Args:
        spec_json: the `ServeSpec` of the server.
        size: processes.
        nodes: node of each rank of every role, as far as known; later ranks begin again at the first.
    """

    def __init__(self, spec_json: str, size: int, nodes: Sequence[str] = ()) -> None:
        self._spec_json, self._size = spec_json, size
        self.nodes = tuple(nodes)  # read once, with the first step
        self._lock = threading.Lock()
        self._turns: dict[str | None, Iterator[Any]] = {}  # guarded by _lock: methods by node, in turn

    def make(self, step: Any, roles: tuple[Role, ...], num_mini_batches: int, stream: str) -> list[Any]:
        """Refs of a step's info, then of its shards: mini-batch after mini-batch, role after role, rank after rank.

        Args:
            step: ref of an `AdmittedStep`.
            roles: each one's ranks and columns.
            num_mini_batches: M.
            stream: of the step.
        """
        parts = [Part(number, rank) for number, role in enumerate(roles) for rank in range(role.dp_size)]
        made = [self.make_part(step, roles, part, num_mini_batches, stream) for part in parts]
        return [made[0][0], *(refs[1 + mini] for mini in range(num_mini_batches) for refs in made)]

    def make_part(
        self, step: Any, roles: tuple[Role, ...], part: Part, num_mini_batches: int, stream: str
    ) -> list[Any]:
        """Refs of a step's info, then of a rank's shard of each mini-batch; arguments as `make`."""
        with self._lock:
            if not self._turns:
                self._start()
            node = self.nodes[part.rank % len(self.nodes)] if self.nodes else None
            method = next(self._turns[node])
        refs: list[Any] = method.options(num_returns=1 + num_mini_batches).remote(step, roles, part, stream)
        return refs

    def _start(self) -> None:
        """As many on each node, one at least."""
        nodes: list[str | None] = [*dict.fromkeys(self.nodes)] or [None]
        counts = {node: max(1, len(range(place, self._size, len(nodes)))) for place, node in enumerate(nodes)}
        log.info("collators=%d nodes=%d", sum(counts.values()), len(nodes))
        for node, count in counts.items():
            handles = start_collators(self._spec_json, count, node)
            self._turns[node] = itertools.cycle([handle.make for handle in handles])
