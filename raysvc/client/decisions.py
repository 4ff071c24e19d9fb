"""Lets a driver decide about rows to come while it trains.

Always true:
- a decision is on disk when the call that made it returns, and every resume and replay follows it;
- a step that was asked for before is not changed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from raysvc.client.arguments import integer, mapping, number, optional_integer
from raysvc.client.connection import Connection
from raysvc.feedback.driver_feedback import DriverFeedback, Numbers
from raysvc.feedback.request import RowOutcomes


class Decisions:
    """`BatchClient.decisions`. Iterate it to read `from_step`, `weights` (or None) and `skip_rows` of each one so far, in order.

    Args:
        connection: the lease.
        feedback: of the client.
        changed: called when steps to come have other sizes than before.
    """

    def __init__(
        self, connection: Connection, feedback: DriverFeedback, changed: Callable[[], object]
    ) -> None:
        self._connection, self._feedback, self._changed = connection, feedback, changed

    def __iter__(self) -> Iterator[dict[str, Any]]:
        return iter(self._connection.get(self._connection.control("decisions")))

    def set_mixture_weights(self, weights: Mapping[str, float], *, from_step: int | None = None) -> int:
        """Change the weights of a mixture from a step on, for good; returns that step. Calling it again with the same weights and
        step changes nothing.

        Args:
            weights: every source -> its weight, relative to the others, 0 for none of it; they count what `mixture.by` says.
            from_step: None: the first step that this client did not ask for, which is beyond its look-ahead.

        Raises:
            StepOutOfOrder: this client asked for that step already, or there is none.
            PlanError: the plan is no mixture; a source has no weight or is not known; a source joins after that step.
            ConfigError: a weight is negative or no number, or all are 0.
        """
        known = {
            name: number(f"set_mixture_weights(weights[{name!r}])", weight)
            for name, weight in mapping("set_mixture_weights(weights)", weights).items()
        }
        step = optional_integer("set_mixture_weights(from_step)", from_step, 0)
        return self._made(self._feedback.set_weights(known, step))

    def skip_rows(self, row_ids: Numbers, *, from_step: int | None = None) -> int:
        """Leave rows out from a step on, for good; returns that step. They leave holes: no other row moves.

        Args:
            row_ids: as in `MiniBatchInfo.row_ids`, or as a row log writes them; at most 100,000 in one call.
            from_step: as in `set_mixture_weights`.

        Raises:
            StepOutOfOrder: as `set_mixture_weights`.
            PlanError: there is no such row.
        """
        step = optional_integer("skip_rows(from_step)", from_step, 0)
        return self._made(self._feedback.skip_rows(row_ids, step))

    def row_outcomes(self, first: int, stop: int) -> RowOutcomes:
        """Returns what `report_rows` reported of the rows of the steps `first` to `stop - 1`; also before a restart."""
        begin, end = (
            integer(f"row_outcomes({name})", at, 0) for name, at in (("first", first), ("stop", stop))
        )
        return self._feedback.outcomes(begin, end)

    def _made(self, step: int) -> int:
        self._changed()
        return step
