"""A server of a mixture as a plain object, and a trainer that asks it for steps; no Ray."""

from __future__ import annotations

import uuid
from pathlib import Path
from typing import Any

import numpy as np

from raysvc import row_ids
from raysvc.actors.server.batch_server import BatchServer
from raysvc.actors.server.spec import MixtureSpec, Role, ServeSpec
from raysvc.client.data_state import state_of
from raysvc.feedback.request import Request
from raysvc.job.config import PlanConfig
from raysvc.plan.schedule import Schedule

NAMES = ("a", "b", "c")
ROWS = (90, 60, 40)


def mixed_spec(uris: list[str], journal: Path, **fields: Any) -> ServeSpec:
    """40 steps of 8 rows: of a, b and c 4, 2 and 2 of every 8."""
    plan = {"batch_size": 8, "mini_batch_size": 4, "epochs": 2, "seed": 3, **fields.pop("plan", {})}
    stages = fields.pop("stages", ((0, (80, 40, 40)),))
    mixture = MixtureSpec(names=NAMES, stages=stages)
    return ServeSpec(
        name="mixed", sources=uris, mixture=mixture, plan=PlanConfig(**plan), pad_token_id=0, journal=str(journal), **fields
    )  # fmt: skip


class Trainer:
    """One attach; `asked` as a driver counts it."""

    def __init__(self, server: BatchServer) -> None:
        self.server = server
        self.lease = server.attach(uuid.uuid4().hex, takeover=True)
        self.asked = self.lease.frontier
        self.decided = list(self.lease.decided)

    def rows(self, step: int, dp_size: int = 1) -> list[list[int]]:
        """Rows of each mini-batch of a step."""
        self.asked = max(self.asked, step + 1)
        info: Any = self.server.fetch(self.lease.fence, step, (Role(dp_size),))[0]
        return [mini.row_ids.tolist() for mini in info.mini_batches]

    def decide(self, request: Request) -> int:
        """The step from which it holds."""
        step, digest = self.server.decide(self.lease.fence, request, self.asked)
        if (step, digest) not in self.decided:
            self.decided.append((step, digest))
        return step

    def weights(self, a: float, b: float, c: float, from_step: int | None = None) -> int:
        """Decide about weights, in a call of its own."""
        return self.decide(Request(uuid.uuid4().hex, from_step, {"a": a, "b": b, "c": c}))

    def skip(self, rows: list[int], from_step: int | None = None) -> int:
        """Leave rows out."""
        return self.decide(Request(uuid.uuid4().hex, from_step, None, tuple(rows)))

    def state(self, frontier: int) -> dict[str, Any]:
        """What a checkpoint at `frontier` holds of the plan."""
        return dict(
            state_of(self.lease, Schedule.from_json(self.lease.schedule), frontier, decided=self.decided)[
                "plan"
            ]
        )

    def restore(self, state: dict[str, Any]) -> None:
        """Go to a checkpoint."""
        frontier = 0 if state["committed_step"] is None else state["committed_step"] + 1
        self.server.move(self.lease.fence, frontier, state)
        self.asked = frontier


def sources_of(rows: list[int]) -> np.ndarray:
    """int [3], rows of each source."""
    return np.bincount(row_ids.split(np.array(rows, np.int64)).source, minlength=len(ROWS))
