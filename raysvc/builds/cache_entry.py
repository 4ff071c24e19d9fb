"""A finished entry as a user holds it: rows, their text, where they come from.

Always true:
- nothing is built here, and no part is read before a row of it is asked for;
- nothing in an entry chooses code, a path or a flag: its tokenizer comes from bytes that it keeps.
"""

from __future__ import annotations

import itertools
import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from raysvc.builds.entry_report import Report, joined_report
from raysvc.cache.rows import Rows
from raysvc.errors import ConfigError, PlanError, TokenizerError
from raysvc.job.config import PAIRED
from raysvc.plan.fact_table import facts_html, facts_text, records_html, spans_html
from raysvc.plan.sliced.sliced_rows import check_rows
from raysvc.progress import how_many
from raysvc.ragged import Int64s
from raysvc.row_ids import parsed, split, written

if TYPE_CHECKING:
    import pyarrow as pa
    import ray.data

    from raysvc.actors.server.spec import ServeSpec
    from raysvc.cache.entry import Entry


Kind = TypeVar("Kind")
FIRST_ROWS = 3  # that a notebook shows of an entry
FIRST_CHARS = 600  # of each


class EntryRow(dict[str, Any]):
    """One row of an entry: column name -> list or value. A notebook shows its text, marked."""

    def __init__(self, values: Mapping[str, Any], entry: CacheEntry) -> None:
        super().__init__(values)
        self._entry = entry

    @property
    def text(self) -> str:
        """The row as the tokenizer decodes it, special tokens included.

        Raises:
            TokenizerError: the entry keeps no tokenizer.
        """
        return str(self._entry.tokenizer.decode(self["input_ids"]))

    @property
    def spans(self) -> list[tuple[str, bool]]:
        """Stretches of text: (text, trained).

        Raises:
            TokenizerError: the entry keeps no tokenizer.
        """
        return self._runs([bool(hit) for hit in self["loss_mask"]])

    def marked(self) -> list[tuple[str, bool, bool]]:
        """Stretches of text: (text, trained, special tokens).

        Raises:
            TokenizerError: the entry keeps no tokenizer.
        """
        added = self._entry.tokenizer.added_tokens_decoder
        special = {token for token, one in added.items() if one.special}
        kinds = [
            (bool(hit), token in special)
            for token, hit in zip(self["input_ids"], self["loss_mask"], strict=True)
        ]
        return [(text, *kind) for text, kind in self._runs(kinds)]

    def _runs(self, kinds: Sequence[Kind]) -> list[tuple[str, Kind]]:
        """Neighbouring tokens of one kind, as text."""
        ids, tokenizer, at = self["input_ids"], self._entry.tokenizer, 0
        found = []
        for kind, run in itertools.groupby(kinds):
            stop = at + sum(1 for _ in run)
            found.append((str(tokenizer.decode(ids[at:stop])), kind))
            at = stop
        return found

    def __reduce__(self) -> tuple[Any, ...]:
        return dict, (dict(self),)

    def _repr_html_(self) -> str:
        facts = {"tokens": len(self["input_ids"]), "trained": sum(self["loss_mask"])}
        facts |= {name: value for name, value in self.items() if not isinstance(value, list)}
        return facts_html("Row", facts) + spans_html(self.marked())


@dataclass(frozen=True, repr=False)
class CacheEntry:
    """The entries of a job, opened: one, or one for each source of a mixture. `len(entry)` counts its rows, `entry[3]` is the fourth one.

    Attributes:
        entries: of one tokenizer; finished, or to be read while somebody builds them.
        hit: whether it was there already.
        reason: why it was used or built, one clause.
        sources: names of the sources of a mixture.
        paths: files of the job that asked for it; empty: those that it was built from, which may have had other names.
    """

    entries: tuple[Entry, ...]
    hit: bool = True
    reason: str = "opened by its address"
    sources: tuple[str, ...] = ()
    paths: tuple[str, ...] = ()

    @cached_property
    def rows(self) -> Rows:
        """Random access to the rows of all entries."""
        return Rows(self.entries)

    @property
    def uri(self) -> str:
        """Folder or URL."""
        return self.rows.uri

    @property
    def key(self) -> str:
        """64 hex digits: the hash of what decided the bytes."""
        return self.rows.key

    @property
    def num_rows(self) -> int:
        """Rows."""
        return self.rows.num_rows

    def __len__(self) -> int:
        return self.num_rows

    def __getitem__(self, index: int) -> EntryRow:
        """Returns the row at a place in the order of the entry; -1 is the last one.

        Raises:
            IndexError: there is no such place.
            TypeError: it is no whole number.
        """
        return self.row(self.rows.id_at(operator.index(index)))

    @property
    def num_tokens(self) -> int:
        """Tokens of all rows, context included."""
        return self.rows.num_tokens

    @property
    def facts(self) -> dict[str, Any]:
        """Says which entry this is and whether it was there, for machines."""
        return {"key": self.key, "hit": self.hit, "reason": self.reason, "uri": self.uri}

    @property
    def source(self) -> str:
        """The files of its rows, as the job names them that asked for it."""
        return ", ".join(self.paths or self.report.get("paths", ()))

    @cached_property
    def report(self) -> Mapping[str, Any]:
        """Returns what the builder reported: row counts, quarantined examples, encoder, lengths.

        Raises:
            EntryError: a field is missing or of a wrong type.
        """
        return Report(joined_report(self.entries, self.sources), self.uri)

    def table(self) -> pa.Table:
        """All rows, memory-mapped."""
        return self.rows.table()

    def ray_dataset(
        self, columns: Sequence[str] | None = None, *, rows: range | None = None
    ) -> ray.data.Dataset:
        """All rows as a Ray Dataset, one read task a part; lazy. It connects to Ray.

        A row has its columns with their types (bfloat16 as its bits, uint16), and `row_id`, int64, which `plan.rows` of a job
        takes. The nodes have to see the entry's folder.

        Args:
            columns: to read; None: `row_id` and all that the entries have in common.
            rows: positions, as `range(1000, 2000)`; None: all.

        Raises:
            ConfigError: a column or rows that are not there.
            EntryError: its build goes on.
        """
        import ray.data

        from raysvc.cluster import connect
        from raysvc.pipelines.ray_data.entry_datasource import EntryDatasource

        source = EntryDatasource(self.entries, columns, rows)
        connect()
        return ray.data.read_datasource(source)

    def row_ids(self) -> Int64s:
        """int64 [N], ids of all rows, as `raysvc.row_ids` makes them; in the order of the entry."""
        return self.rows.row_ids()

    def row(self, index: int | str) -> EntryRow:
        """One row, by its id, which may be written `0:17:451`."""
        return EntryRow(self.rows.row(int(self._ids([index])[0])), self)

    def origins(self, row_ids: Sequence[int | str]) -> list[tuple[str, int]]:
        """Returns where rows come from: the source (its name in a mixture, else its files), and the row's number
        there.
        """
        ids = self._ids(row_ids)
        numbers = self.rows.read(ids).rows["source_row"].tolist()
        if not self.sources:
            return [(self.source, number) for number in numbers]
        return list(zip(self.sources_of(ids), numbers, strict=True))

    def sources_of(self, row_ids: Sequence[int] | Int64s) -> list[str]:
        """The source of a mixture that each row is of."""
        return [self.sources[number] for number in split(np.asarray(row_ids, np.int64)).source.tolist()]

    def turns(self, row_ids: Sequence[int | str]) -> list[tuple[int, int] | None]:
        """(i, n) of each row: the i-th of the n rows that `each_assistant_turn` made of its source row; None of any other."""
        ids = self._ids(row_ids)
        numbers, local = (found.tolist() for found in self.rows.places(ids))
        return [_turn(self.entries[k], row_id) for k, row_id in zip(numbers, local, strict=True)]

    def _ids(self, row_ids: Sequence[int | str] | Int64s) -> Int64s:
        try:
            ids = np.array([parsed(one) for one in row_ids], np.int64)
        except (OverflowError, ValueError) as error:
            what = f"{row_ids!r} are not ids of rows"[:200]
            raise PlanError("row", what, "take one from a row log, or from raysvc plan --step") from error
        check_rows(self.entries, ids)
        return ids

    def __repr__(self) -> str:
        return facts_text("cache entry", self._shown())

    def _repr_html_(self) -> str:
        aside, told = self.report.get("examples", ()), facts_html("Cache entry", self._shown())
        if aside:
            count = sum(self.report["row_counts"]["quarantined"].values())
            lines = [[_place(one), one["reason"], one["detail"]] for one in aside]
            title = f"{len(aside):,} of {count:,} quarantined rows"
            told += records_html(title, ("source row", "reason", "detail"), lines)
        return told + self._first_rows()

    def _first_rows(self) -> str:
        """The beginnings of some rows; "" where none is there yet, or no tokenizer is kept."""
        if "row_counts" not in self.report or not self.num_rows:
            return ""
        try:
            told = ""
            for row in self.row_ids()[:FIRST_ROWS].tolist():
                values = self.row(row)
                told += f"<div>row {written(row)}, {how_many(len(values['input_ids']), 'token')}:</div>"
                told += spans_html(values.marked(), FIRST_CHARS)
        except TokenizerError:
            return ""
        return f"<details open><summary>First rows</summary>{told}</details>"

    def _shown(self) -> dict[str, Any]:
        return {
            "key": self.key[:16],
            "rows": self.num_rows,
            "tokens": self.num_tokens,
            "source": self.source,
            "uri": self.uri,
        }

    @cached_property
    def tokenizer(self) -> Any:
        """The tokenizer that the entry was built with, from bytes kept in the entry; for decoding.

        Raises:
            TokenizerError: the entry keeps none.
            EntryError: the bytes are not those that the recipe names.
        """
        from raysvc.builds.kept_tokenizer import kept_tokenizer

        return kept_tokenizer(self.entries)


def _place(one: Mapping[str, Any]) -> str:
    """The number of a row that was left out, in a mixture with its source."""
    return f"{source}:{one['source_row']}" if (source := one.get("dataset")) else str(one["source_row"])


def _turn(entry: Entry, row_id: int) -> tuple[int, int] | None:
    if entry.recipe.get("format") not in PAIRED and entry.recipe.get("train_on") != "each_assistant_turn":
        return None
    _, piece, row = (int(one[0]) for one in split(np.array([row_id])))
    rows = entry.slice_values("source_row", piece)
    first, stop = (int(np.searchsorted(rows, rows[row], side)) for side in ("left", "right"))
    return row - first + 1, stop - first


def open_entry(uri: str | Path, storage_options: Mapping[str, Any] | None = None) -> CacheEntry:
    """Open a finished entry by its folder or URL.

    Raises:
        ConfigError: the address is not a string.
        EntryError: no finished entry there, or a damaged one.
    """
    from raysvc.cache.find import open_finished

    if not isinstance(uri, str | Path) or not str(uri):
        raise ConfigError(
            "open_entry(uri)", f"{uri!r} is not an address", "give the folder or URL of an entry"
        )
    return CacheEntry((open_finished(str(uri), dict(storage_options or {})),))


def read_entry(
    uri: str | Path,
    storage_options: Mapping[str, Any] | None = None,
    *,
    columns: Sequence[str] | None = None,
    rows: range | None = None,
) -> ray.data.Dataset:
    """A finished entry as a Ray Dataset: `open_entry`, then `CacheEntry.ray_dataset`; arguments and errors as there."""
    return open_entry(uri, storage_options).ray_dataset(columns, rows=rows)


def open_served(spec: ServeSpec) -> CacheEntry:
    """Returns what a server serves: its entry, or those of its mixture; rows have the numbers of its plan.

    Raises:
        EntryError: one of them is gone or damaged.
    """
    assert spec.sources, "a server of rollouts has no entry"
    entries = tuple(one.opened(spec.storage_options) for one in spec.sources)
    return CacheEntry(entries, sources=spec.mixture.names if spec.mixture else ())
