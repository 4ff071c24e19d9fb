"""Keeps what a trainer said back, on disk beside its leases.

    decisions/000000000003.json                       one decision, see `raysvc.feedback.decision`
    outcomes/000000000042.3.120-139.<uid>-<digest>.arrow  outcomes of the rows of steps 120 to 139, when 3 decisions were known

A table of outcomes has `step` (int64), `row_id` (int64), and a float32 for each column that was reported: 20 bytes for a row with
one column.
Always true:
- a record is complete when it can be seen, and durable when the call that wrote it returns; none is ever changed;
- decisions are numbered from 0 without a gap; one that is missing or damaged is an error that names it, and so are damaged outcomes;
- of several reports of a row of a step the first one counts that was made since the last decision that changed the step: a step
  that is trained again after a death changes no outcome, and each rank may report its own rows;
- outcomes take at most `MOST_BYTES` and `MOST_RECORDS`: the oldest records go first. Decisions stay.
"""

from __future__ import annotations

import uuid
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from raysvc.cache.local.named_digest import named, read_named
from raysvc.cache.local.sealed import opened_if_sealed, sealed
from raysvc.cache.store.claim import Claim, open_owned
from raysvc.errors import EntryError
from raysvc.feedback.decision import Decision
from raysvc.feedback.request import RowOutcomes
from raysvc.ragged import Int64s

if TYPE_CHECKING:
    pass

MOST_BYTES = 1 << 30
MOST_RECORDS = 4096
LOST = "restore it; or remove it, and the outcomes of its steps are lost"


class _Record(NamedTuple):
    """Name of a table of outcomes, and what it says."""

    name: str
    known: int
    first: int
    last: int


class FeedbackLog:
    """A folder at any fsspec URL; only the owner of the folder above writes."""

    def __init__(
        self, url: str, storage_options: Mapping[str, Any] | None = None, claim: Claim | None = None
    ) -> None:
        self._store = open_owned(url, storage_options, claim)
        self._next: int | None = None  # number of the next report; None: not listed yet

    def decisions(self) -> list[Decision]:
        """All of them, in the order in which they were made.

        Raises:
            EntryError: one is missing or damaged.
        """
        numbers = sorted(_number(name) for name in self._store.list("decisions") if name.endswith(".json"))
        return [self._decision(number) for number in range(numbers[-1] + 1)] if numbers else []

    def add(self, number: int, decision: Decision) -> bool:
        """Keep a decision as number so many; False: that number is taken."""
        record = {**decision.to_json(), "number": number}
        return self._store.create(f"decisions/{number:012d}.json", sealed(record))

    def report(self, outcomes: RowOutcomes, known: int) -> None:
        """Keep outcomes of whole steps.

        Args:
            known: decisions that were made before.
        """
        import pyarrow as pa

        table = pa.table({"step": outcomes.steps, "row_id": outcomes.row_ids, **outcomes.columns})
        sink = pa.BufferOutputStream()
        with pa.ipc.new_file(sink, table.schema) as writer:
            writer.write_table(table)
        if self._next is None:
            self._next = max((_number(one.name) for one in self._records()), default=-1) + 1
        number, self._next = self._next, self._next + 1
        steps = f"{outcomes.steps.min()}-{outcomes.steps.max()}"
        data = memoryview(sink.getvalue())
        name = named(f"{number:012d}.{known}.{steps}.{uuid.uuid4().hex[:8]}", "arrow", data)
        self._store.write(f"outcomes/{name}", data)
        self._remove_oldest()

    def outcomes(
        self, first: int, stop: int, decisions: Sequence[Decision], row_ids: Int64s | None = None
    ) -> RowOutcomes:
        """Returns what counts of the steps `first` to `stop - 1`.

        Args:
            row_ids: only of these rows; None: of all.

        Raises:
            StoreError: a report is damaged.
        """
        import pyarrow as pa

        taken = []
        for record in self._records():
            if record.last < first or record.first >= stop:
                continue
            data = read_named(self._store, f"outcomes/{record.name}", LOST)
            table = pa.ipc.open_file(pa.BufferReader(data)).read_all()
            steps = table["step"].to_numpy()
            changed = min((one.from_step for one in decisions[record.known :]), default=stop)
            there = (first <= steps) & (steps < min(stop, changed))
            if row_ids is not None:
                there &= np.isin(table["row_id"].to_numpy(), row_ids)
            taken.append(table.filter(pa.array(there)))
        if not taken:
            return RowOutcomes(np.zeros(0, np.int64), np.zeros(0, np.int64), {})
        whole = pa.concat_tables(taken, promote_options="default")
        kept = _first_of_each(whole["step"].to_numpy(), whole["row_id"].to_numpy())
        columns = {
            name: whole[name].to_numpy().astype(np.float32)[kept]
            for name in whole.column_names
            if name not in ("step", "row_id")
        }
        return RowOutcomes(whole["step"].to_numpy()[kept], whole["row_id"].to_numpy()[kept], columns)

    def _decision(self, number: int) -> Decision:
        name = f"decisions/{number:012d}.json"
        try:
            record = opened_if_sealed(self._store.read(name))
            if record.get("number", number) != number:
                raise ValueError("it is another one")
            return Decision.from_json(record)
        except (FileNotFoundError, ValueError, KeyError, TypeError) as error:
            what = f"decision {number} of this run is missing or damaged ({type(error).__name__})"
            remedy = "restore the file: without it the steps after it cannot be made again"
            raise EntryError(f"{self._store.url}/{name}", what, remedy) from error

    def _records(self) -> list[_Record]:
        """Reports in the order in which they were made."""
        found = []
        for name in sorted(self._store.list("outcomes")):
            parts = name.split(".")
            if len(parts) == 5 and parts[0].isdigit() and parts[4] == "arrow":
                first, _, last = parts[2].partition("-")
                found.append(_Record(name, int(parts[1]), int(first), int(last)))
        return found

    def _remove_oldest(self) -> None:
        found = sorted((each for each in self._store.scan("outcomes")), key=lambda each: each.name)
        nbytes = sum(each.size for each in found)
        while found and (len(found) > MOST_RECORDS or nbytes > MOST_BYTES):
            oldest, *found = found
            nbytes -= oldest.size
            self._store.delete(f"outcomes/{oldest.name}")


def _first_of_each(steps: Int64s, row_ids: Int64s) -> Int64s:
    """Returns the places where a row of a step stands first, by step."""
    order = np.lexsort((np.arange(len(steps)), row_ids, steps))
    is_new = np.ones(len(order), bool)
    is_new[1:] = (np.diff(steps[order]) != 0) | (np.diff(row_ids[order]) != 0)
    places = np.sort(order[is_new])
    return np.asarray(places[np.argsort(steps[places], kind="stable")], np.int64)


def _number(name: str) -> int:
    stem = name.split(".")[0]
    return int(stem) if stem.isdigit() else -1
