"""The prompts of a stream: which row stands at a position, and what it says. Nothing is kept but the opened entries.

Always true:
- position p is the p-th group of the plan, whatever steps the trainer makes of the rollouts;
- a position without a row (rows that were dropped leave holes) has no uid.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import Any

import numpy as np

from raysvc.actors.rollouts.prompts.prompt_book import position_of
from raysvc.actors.server.spec import PromptSpec
from raysvc.cache.rows import Rows
from raysvc.errors import SourceError
from raysvc.job.carried import RESERVED
from raysvc.plan.entry_plan import plan_of_entries
from raysvc.plan.plan import Plan
from raysvc.row_ids import written

TOLD = frozenset({"row_id", "source_row", "weight_version"})


class PromptSource:
    """See the module.

    Args:
        spec: the entries, and the order of their rows; they are opened when something is asked.
    """

    def __init__(self, spec: PromptSpec) -> None:
        self._spec = spec

    @cached_property
    def _opened(self) -> tuple[Rows, Plan]:
        entries = tuple(one.opened(self._spec.storage_options) for one in self._spec.sources)
        mixture = self._spec.mixture
        stages, shuffles = (mixture.stages, mixture.shuffles) if mixture else ((), ())
        return Rows(entries), plan_of_entries(self._spec.plan, entries, stages, shuffles)

    @property
    def total(self) -> int:
        """Positions of all epochs."""
        return self._opened[1].schedule.num_steps

    @property
    def identity(self) -> str:
        """Returns the identity of the order of the prompts."""
        return self._opened[1].hash

    def uid_at(self, position: int) -> str | None:
        """The uid of the prompt at a position; None: it has none.

        Raises:
            SourceError: several rows stand there.
        """
        row_ids = self._row_ids(position)
        if len(row_ids) > 1:
            what = f"position {position} has {len(row_ids)} rows of one group, and a prompt is one row"
            raise SourceError("serve_rollouts(prompts)", what, "use source.format: prompt")
        return f"{position}/{written(int(row_ids[0]))}" if len(row_ids) else None

    def read(self, uids: Sequence[str]) -> list[tuple[int, Any, dict[str, Any]]]:
        """Returns of each prompt its epoch, its tokens up to the first target, int32 [L], and its columns."""
        rows, plan = self._opened
        found = []
        for uid in uids:
            position = position_of(uid)
            batch = rows.read(self._row_ids(position))
            targets = np.flatnonzero(batch.tokens["loss_mask"])
            ids = batch.tokens["input_ids"][: int(targets[0]) if len(targets) else None]
            columns = {
                name: values[0].tolist() if isinstance(values[0], np.ndarray | np.generic) else values[0]
                for name, values in batch.rows.items()
                if name not in RESERVED | TOLD
            }
            found.append((plan.schedule.epoch_of(position), np.array(ids, np.int32), columns))
        return found

    def _row_ids(self, position: int) -> Any:
        return np.concatenate([mini.row_ids for mini in self._opened[1].step(position, 1).mini_batches])
