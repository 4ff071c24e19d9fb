"""The rows of a step with turns that continue one another merged, and what there is to say of the others.

Always true:
- a group is merged the same way whenever its step is made, by any server;
- a group is counted, and its broken prefixes are logged, once while it is among the newest `MOST_KNOWN`;
- a step without turns that continue one another has the bytes that it would have with `rows: keep`.
"""

from __future__ import annotations

import logging
import threading
from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from raysvc.actors.rollouts.group_pool import Key
from raysvc.job.config import PlanConfig
from raysvc.ragged import Int64s
from raysvc.rl.turns import BrokenPrefix, TurnRows, Turns, find_turns, merged
from raysvc.row_batch import RowBatch

log = logging.getLogger(__name__)
MOST_KNOWN = 4096  # groups whose turns are remembered
MOST_LOGGED = 20  # broken prefixes


class BrokenTurn(NamedTuple):
    """A broken prefix, and the group that has it."""

    key: Key
    prefix: BrokenPrefix


class TurnMerger:
    """See the module.

    Args:
        name: of the server, for the log.
        plan: turns that differ in a column of it of one value a row stay apart, and a row that it drops holds no other.
        read: per-token columns that the model reads; None: those of several numbers a token.
    """

    def __init__(self, name: str, plan: PlanConfig, read: Sequence[str] | None) -> None:
        self._name, self._columns, self._read = name, plan.columns, read
        self._longest = plan.micro_batch_tokens if plan.oversize == "drop" else None
        self._lock = threading.Lock()  # guards what follows
        self._known: dict[Key, Turns] = {}  # in the order in which they came
        self._counts: Counter[str] = Counter()
        self._apart: Counter[str] = Counter()

    def counts(self) -> dict[str, Any]:
        """Rows that travel inside others, broken prefixes, and reason -> rows that could not be merged, of groups that steps had."""
        with self._lock:
            return {
                "merged": self._counts["merged"],
                "broken": self._counts["broken"],
                "apart": dict(self._apart),
            }

    def merge(self, batch: RowBatch, keys: Sequence[Key], bounds: Sequence[int]) -> tuple[RowBatch, Int64s]:
        """The rows, of which some hold others; and int64 [N], the row that holds each.

        Args:
            batch: N rows, group after group.
            keys: G groups.
            bounds: G + 1, where each group begins among the rows.
        """
        holder = np.arange(len(batch))
        for key, (start, stop) in zip(keys, pairwise(bounds), strict=True):
            if stop - start > 1:
                holder[start:stop] = start + self._turns(key, batch, start, stop).holder
        if np.array_equal(holder, np.arange(len(batch))):
            return batch, holder
        return merged(batch, holder, self._read_of(batch)), holder

    def turns_of(self, key: Key, batch: RowBatch) -> Turns:
        """Returns what becomes of the rows of one group."""
        return self._turns(key, batch, 0, len(batch))

    def broken(self, keys: Sequence[Key]) -> list[BrokenTurn]:
        """The broken prefixes of groups that were merged."""
        with self._lock:
            known = [(key, self._known[key]) for key in keys if key in self._known]
        return [BrokenTurn(key, prefix) for key, turns in known for prefix in turns.broken]

    def _turns(self, key: Key, batch: RowBatch, start: int, stop: int) -> Turns:
        with self._lock:
            known = self._known.get(key)
        if known is not None:
            return known
        found = find_turns(self._rows(batch, start, stop))
        with self._lock:
            if key in self._known:
                return found  # another thread was first
            self._known[key] = found
            if len(self._known) > MOST_KNOWN:
                self._known.pop(next(iter(self._known)))
            self._counts.update(merged=found.num_held, broken=len(found.broken))
            self._apart.update(found.apart)
            told = self._counts["broken"] <= MOST_LOGGED
        for prefix in found.broken if told else ():
            log.warning(
                "broken prefix name=%s group=%s#%d row=%d continues row=%d up to token=%d, where id=%d became id=%d",
                self._name, *key, prefix.later, prefix.earlier, prefix.at, prefix.sampled[0], prefix.found[0],
            )  # fmt: skip
        return found

    def _read_of(self, batch: RowBatch) -> tuple[str, ...]:
        return tuple(batch.wide) if self._read is None else tuple(self._read)

    def _rows(self, batch: RowBatch, start: int, stop: int) -> TurnRows:
        whole: Mapping[str, npt.NDArray[Any]] = {
            name: values[start:stop]
            for name, values in batch.rows.items()
            if name in self._columns or name == "trajectory"
        }
        targets = [each != 0 for each in _pieces(batch, "loss_mask", start, stop)]
        for each in targets:
            each[:1] = False
        return TurnRows(
            ids=_pieces(batch, "input_ids", start, stop),
            targets=targets,
            read={name: _pieces(batch, name, start, stop) for name in self._read_of(batch)},
            whole=whole,
            longest=self._longest,
        )


def _pieces(batch: RowBatch, name: str, start: int, stop: int) -> list[npt.NDArray[Any]]:
    """The values of rows [start, stop), one array per row."""
    if name in batch.wide:
        return list(batch.wide[name].pieces[start:stop])
    bounds = batch.offsets[start : stop + 1].tolist()
    return [batch.tokens[name][first:last] for first, last in pairwise(bounds)]
