"""A driver's end of `raysvc.actors.server.trainer_feedback`: what was handed out, what is not reported yet, what was decided.

Always true:
- no step is asked for while a decision is on its way, so that none is made by both plans;
- outcomes that were handed in are on disk before a decision, a look at them, a state and the end of the client;
- outcomes of steps that a rewind makes void before they were sent are not sent.
"""

from __future__ import annotations

import threading
import uuid
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from raysvc.errors import ConfigError
from raysvc.feedback.request import Request, RowOutcomes
from raysvc.ragged import Int64s
from raysvc.row_ids import parsed

SEND_AT_ROWS = 65_536  # a megabyte and a half with one column
_OWN = ("step", "row_id")
Numbers = Sequence[int] | Sequence[str] | Sequence[float] | npt.NDArray[Any]


class Sender(Protocol):
    """Holds what brings calls of a driver to its server."""

    def after_commits(self, method: str, *args: Any) -> Any:
        """Returns what the server answers, when it has every commit that was made before."""
        ...


class DriverFeedback:
    """See the module; arguments are what `BatchClient` has checked.

    Args:
        sender: of the driver.
        frontier: its next step.
        decided: (from step, digest) of what was decided so far; what is decided here is added.
    """

    def __init__(self, sender: Sender, frontier: int, decided: list[tuple[int, str]]) -> None:
        self._sender = sender
        self._asking = threading.Lock()
        self._asked = frontier  # guarded by _asking; the steps below were asked for
        self._decided = decided
        self._unsent: dict[int, tuple[Int64s, dict[str, Any]]] = {}  # step -> rows and their columns

    def ask(self, step: int, fetch: Callable[[], Any]) -> Any:
        """Ask for a step."""
        with self._asking:
            self._asked = max(self._asked, step + 1)
            return fetch()

    def moved(self, frontier: int) -> None:
        """Steps from `frontier` on are asked for again."""
        with self._asking:
            self._asked = frontier
        self._unsent = {step: rows for step, rows in self._unsent.items() if step < frontier}

    @property
    def asked(self) -> int:
        """The steps below it were asked for."""
        return self._asked

    def set_weights(self, weights: dict[str, float], from_step: int | None) -> int:
        """See `Decisions.set_mixture_weights`, also for what it raises."""
        if not any(weights.values()):
            what = f"{weights} has none above 0"
            raise ConfigError("set_mixture_weights(weights)", what, "give one source some weight")
        return self._decide(Request(uuid.uuid4().hex, from_step, weights))

    def skip_rows(self, row_ids: Numbers, from_step: int | None) -> int:
        """See `Decisions.skip_rows`, also for what it raises."""
        rows = _row_ids("skip_rows(row_ids)", row_ids).reshape(-1)
        if not len(rows):
            raise ConfigError("skip_rows(row_ids)", "names no row", "give one at least")
        return self._decide(Request(uuid.uuid4().hex, from_step, None, tuple(rows.tolist())))

    def report(self, step: int, row_ids: Numbers, columns: Mapping[str, Numbers]) -> None:
        """See `BatchClient.report_rows`, also for what it raises."""
        rows = _row_ids("report_rows(row_ids)", row_ids)
        if step in self._unsent:
            what = f"step {step} was reported already"
            raise ConfigError("report_rows(step)", what, "report all columns of a step in one call")
        if not columns or rows.ndim != 1:
            what = f"{len(columns)} columns for rows of shape {list(rows.shape)}"
            raise ConfigError("report_rows", what, "give row ids [N], and a column such as loss=[...]")
        known = {name: _floats(f"report_rows({name})", values) for name, values in columns.items()}
        for name, values in known.items():
            if values.shape != rows.shape or name in _OWN:
                what = f"has shape {list(values.shape)} for {len(rows)} rows, or the name of another column"
                raise ConfigError(f"report_rows({name})", what, "give one number a row")
        if not len(rows):
            return  # all rows of the step were left out
        self._unsent[step] = (rows, known)
        if sum(len(rows) for rows, _ in self._unsent.values()) >= SEND_AT_ROWS:
            self.flush()

    def flush(self) -> None:
        """Have what was reported kept; on disk when this returns."""
        unsent, self._unsent = self._unsent, {}
        by_columns: dict[tuple[str, ...], list[int]] = {}
        for step in sorted(unsent):
            by_columns.setdefault(tuple(sorted(unsent[step][1])), []).append(step)
        for names, steps in by_columns.items():
            rows = [unsent[step][0] for step in steps]
            columns = {name: np.concatenate([unsent[step][1][name] for step in steps]) for name in names}
            of_rows = np.repeat(np.array(steps, np.int64), [len(each) for each in rows])
            outcomes = RowOutcomes(of_rows, np.concatenate(rows), columns)
            self._sender.after_commits("report_rows", outcomes)

    def outcomes(self, first: int, stop: int) -> RowOutcomes:
        """See `Decisions.row_outcomes`."""
        self.flush()
        return RowOutcomes(*self._sender.after_commits("row_outcomes", first, stop))

    def _decide(self, request: Request) -> int:
        self.flush()
        with self._asking:
            step, digest = self._sender.after_commits("decide", request, self._asked)
            if (step, digest) not in self._decided:
                self._decided.append((step, digest))
        return int(step)


def _row_ids(where: str, row_ids: Numbers) -> Int64s:
    """int64, as they were given.

    Raises:
        ConfigError: some are no row ids.
    """
    try:
        found = np.array([parsed(one) for one in row_ids] if isinstance(row_ids, list | tuple) else row_ids)
    except (TypeError, ValueError, RuntimeError) as error:
        raise ConfigError(where, str(error), "give whole numbers") from None
    are_whole = found.dtype.kind in "iu" or not found.size
    if not are_whole or found.min(initial=0) < 0 or found.max(initial=0) > np.iinfo(np.int64).max:
        raise ConfigError(where, f"{row_ids!r} are not row ids"[:200], "give whole numbers from 0 on")
    return found.astype(np.int64)


def _floats(where: str, values: Numbers) -> npt.NDArray[np.float32]:
    try:
        return np.array(values, np.float32)
    except (TypeError, ValueError, RuntimeError) as error:  # such as a tensor of a GPU
        raise ConfigError(where, str(error), "give numbers, or an array on the CPU") from None
