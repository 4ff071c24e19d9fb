"""An entry as a `datasets.Dataset` that TRL trains on as it is, with further columns of its rows. Extra: `raysvc[trl]`.

Always true:
- `labels` are -100 exactly where our `loss_mask` is 0; the first token of a row is never a target;
- the Arrow parts are mapped, not copied: labels are made when a row is read, further columns when a batch is;
- rows that are held out are those of the job's eval, by prompt;
- a further column has the type, the shape and the pad of its declaration, and lies at the tokens it is about.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from raysvc.builds.job_plan import declared_columns
from raysvc.cache.find import open_finished
from raysvc.collate.columns import IGNORED
from raysvc.errors import ConfigError
from raysvc.evals.held_rows import evaluated_rows, held_out, trained_rows
from raysvc.integrations.row_tensors import laid, tensor_of
from raysvc.job.config import EvalConfig, JobConfig, RowsConfig
from raysvc.job.job_file import load_job

if TYPE_CHECKING:
    from datasets import Dataset

ROW_ID = "row_id"
Collate = Callable[[list[dict[str, Any]]], dict[str, Any]]


def labelled(uri: str, storage_options: Mapping[str, Any] | None = None, *, row_ids: bool = False) -> Dataset:
    """The rows of a finished entry as `input_ids` and `labels`.

    Give it to `SFTTrainer` with `dataset_kwargs={"skip_prepare_dataset": True}` (the ids stay ours) and
    `remove_unused_columns=False` (the mask is read before it is dropped).

    Args:
        uri: of the entry.
        storage_options: passed to fsspec.
        row_ids: rows bring their number, by which `WithColumns` finds their other columns.
    """
    from datasets import load_from_disk

    entry = open_finished(uri, dict(storage_options or {}))
    tokens = f"{entry.store.url}/{entry.folders[-1]}"  # where the tokens lie, whatever was computed for them
    rows = load_from_disk(tokens, storage_options=dict(storage_options or {}) or None)
    names = ["input_ids", "loss_mask"]
    if row_ids:
        rows, names = rows.add_column(ROW_ID, entry.row_ids()), [*names, ROW_ID]
    return rows.with_transform(_labelled, columns=names)


def trained_and_held(
    config: str | Path | Mapping[str, Any] | JobConfig, share: float = 0.05
) -> tuple[Dataset, Dataset]:
    """The rows that a job trains, and those that it holds out by prompt, both as `labelled`; tokenizes first when needed.

    Args:
        config: the job, of one source.
        share: that is held out where no eval of the job holds rows out.

    Raises:
        ConfigError: the job has several sources.
        PlanError: nothing is held out, or nothing is left to train.
        UserMistake: as `raysvc.tokenize`.
    """
    from raysvc.api import tokenize

    job = load_job(config)
    if held_out(job) is None:
        job = job.model_copy(update={"evals": {**job.evals, "held": EvalConfig(share=share)}})
    entry = tokenize(job)
    if len(entry.entries) > 1:
        raise ConfigError("mixture", "has several sources", "call labelled with each of entry.entries")
    ids, chosen = entry.row_ids(), trained_rows(job, entry.entries) or RowsConfig()
    held = np.isin(ids, evaluated_rows(job, entry.entries))
    trained = ~np.isin(ids, chosen.exclude)
    if chosen.include is not None:
        trained &= np.isin(ids, chosen.include)
    rows = labelled(entry.uri, job.cache.storage_options)
    return rows.select(np.flatnonzero(trained)), rows.select(np.flatnonzero(held))


class WithColumns:
    """A collator that adds columns of an entry to the batches of another one.

        SFTTrainer(..., data_collator=WithColumns(collator, entry.uri, ["experts", "domain"]),
                   train_dataset=labelled(entry.uri, row_ids=True), ...)

    Per token they are `[B, L, *shape]`, per row `[B, *shape]`, as tensors; text is a list. They are read from the mapped
    parts, and no Python runs per token. A `compute_loss` has to take them out of `inputs`.

    Args:
        collate: of the host; it pads on the right.
        uri: of the entry.
        columns: their names.
        storage_options: passed to fsspec.

    Raises:
        ConfigError: the entry has no such column.
    """

    def __init__(
        self,
        collate: Collate,
        uri: str,
        columns: Sequence[str],
        storage_options: Mapping[str, Any] | None = None,
    ) -> None:
        self._collate, self._columns = collate, tuple(columns)
        self._entry = open_finished(uri, dict(storage_options or {}))
        carried = declared_columns(self._entry.recipe)
        self._pads = {name: carried[name]["pad"] if name in carried else 0 for name in self._columns}
        first = self._entry.read(np.array([self._entry.first_row()]))
        known = sorted({*first.tokens, *first.rows, *first.wide})
        for name in self._columns:
            if name not in known:
                raise ConfigError("columns", f"the entry has no {name!r}", f"use some of: {', '.join(known)}")

    def __call__(self, rows: list[dict[str, Any]]) -> dict[str, Any]:
        batch = self._collate([{name: row[name] for name in row if name != ROW_ID} for row in rows])
        lines, width = batch["input_ids"].shape
        if lines != len(rows):
            what = f"made {lines} lines of {len(rows)} rows"
            raise ConfigError("WithColumns", what, "use a collator that pads: padding_free=False")
        found = self._entry.read(np.array([row[ROW_ID] for row in rows], np.int64))
        return batch | {name: tensor_of(laid(found, name, width, pad)) for name, pad in self._pads.items()}


def _labelled(rows: dict[str, list[Any]]) -> dict[str, list[Any]]:
    labels = [
        [
            token if trained and place else IGNORED
            for place, (token, trained) in enumerate(zip(*row, strict=True))
        ]
        for row in zip(rows["input_ids"], rows["loss_mask"], strict=True)
    ]
    others = {ROW_ID: rows[ROW_ID]} if ROW_ID in rows else {}
    return {"input_ids": rows["input_ids"], "labels": labels, **others}
