"""Rows of an entry as a shard of Ray Train that says where it is and goes on from there. Extra: `raysvc[train]`.

    TorchTrainer(train_loop, datasets={"train": EntryData(entry.uri)}, dataset_config=EntryDataConfig(), ...)

Axes: N rows of an epoch, R ranks, B rows of a batch.

1. An epoch is one order of all rows: a function of (shuffle, seed, epoch), whatever the ranks and batches are.
2. All ranks are at one position of it. Step by step they take the next R * B rows, B each, in the order of ranks, and the position moves on.
3. At the end of an epoch fewer are left. They are dealt as evenly as they can be, a row more or less, and so that no rank has none: where
   fewer than R rows would be left for the last step, the step before it gives some of its own (at B = 1 there is no such step, and
   some ranks take two rows). Only where fewer than R rows are left at all is the epoch over.
4. The state is the epoch and the position. Whoever loads it goes on there, with any R and B.

Always true:
- over the ranks, the batches of an epoch hold the rows of its order one after the other, each row once;
- a batch that was read ahead and not given out is not in the state;
- a state of other rows or of another order is refused.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import ray.train

from raysvc.builds.job_plan import declared_columns
from raysvc.cache.entry import Entry
from raysvc.cache.export.arrow_schema import arrow_type
from raysvc.cache.find import open_finished
from raysvc.collate.columns import IGNORED
from raysvc.errors import ConfigError, StateMismatch
from raysvc.integrations.row_tensors import laid, tensor_of
from raysvc.job.plan_config import known_shuffle
from raysvc.plan.order import Order, parse_shuffle
from raysvc.row_batch import RowBatch
from raysvc.row_ids import RowPlaces

STATE_VERSION = 1
ROW_ID = "row_id"


@dataclass(frozen=True)
class EntryData:
    """A value of `datasets`.

    Attributes:
        uri: of a finished entry.
        storage_options: passed to fsspec.
        columns: to read, beside `row_id`; None: all.
        shuffle: full, none or block(n), as `plan.shuffle`.
        seed: of the shuffle.
    """

    uri: str
    storage_options: Mapping[str, Any] | None = None
    columns: Sequence[str] | None = None
    shuffle: str = "full"
    seed: int = 0


class EntryDataConfig(ray.train.DataConfig):  # type: ignore[misc]  # ray is not followed
    """Gives every rank its shard of each `EntryData`; Ray Datasets beside them are split as Ray Train does."""

    def configure(
        self,
        datasets: dict[str, Any],
        world_size: int,
        worker_handles: Any,
        worker_node_ids: Any,
        **kwargs: Any,
    ) -> list[dict[str, Any]]:
        """Returns for each rank a mapping of names to shards."""
        ours = {name: value for name, value in datasets.items() if isinstance(value, EntryData)}
        rest = {name: value for name, value in datasets.items() if name not in ours}
        theirs = super().configure(rest, world_size, worker_handles, worker_node_ids, **kwargs)
        return [
            {**its, **{name: EntryShard(value, rank, world_size) for name, value in ours.items()}}
            for rank, its in enumerate(theirs)
        ]


class EntryShard:
    """Holds what `ray.train.get_dataset_shard` returns: one rank's part of the rows.

    Attributes:
        epoch: that is iterated next, or now; 0-based.
    """

    def __init__(self, data: EntryData, rank: int = 0, num_ranks: int = 1) -> None:
        self._data, self._rank, self._ranks = data, rank, num_ranks
        self.epoch = 0
        self._position = 0  # rows of the epoch that all ranks were given
        self._order: dict[str, Any] = {
            "shuffle": data.shuffle,
            "seed": data.seed,
        }  # of the epoch that has begun
        self._loaded = 0  # states

    def iter_torch_batches(
        self,
        *,
        batch_size: int = 256,
        prefetch_batches: int = 1,
        dtypes: Any = None,
        device: Any = "auto",
        collate_fn: Callable[[Any], Any] | None = None,
        drop_last: bool = False,
        local_shuffle_buffer_size: int | None = None,
        local_shuffle_seed: int | None = None,
    ) -> Iterator[Any]:
        """The rest of this epoch; the next call gives the next one.

        A batch has `row_id` and the columns as tensors: [B, L] per token, padded on the right, and [B] per row; text is a list.
        With `input_ids` come `attention_mask`, and `labels` (-100 where there is no loss) where `loss_mask` is read.

        Args:
            batch_size: rows of a batch of this rank.
            prefetch_batches: that a thread reads and collates ahead.
            dtypes: of the tensors: one, or by name; not with `collate_fn`.
            device: "auto": that of the Ray Train worker.
            collate_fn: gets the columns as numpy, ragged ones as arrays of arrays, or what its class of Ray Data says.
            drop_last: leave out steps in which a batch is not full.
            local_shuffle_buffer_size: n: blocks of n rows are shuffled, and the rows in them, in place of `EntryData.shuffle`.
            local_shuffle_seed: of that; None: `EntryData.seed`.

        Raises:
            ConfigError: an argument that cannot be, or fewer rows than workers.
            StateMismatch: the state was taken in the middle of an epoch of another order.
        """
        if collate_fn is not None and dtypes is not None:
            raise ConfigError("dtypes", "collate_fn makes the tensors", "give one of them")
        for name, number in (("batch_size", batch_size), ("prefetch_batches", prefetch_batches + 1)):
            if not isinstance(number, int) or number < 1:
                raise ConfigError(name, f"{number!r} is not a number of rows or batches", "give an integer")
        if self._entry.num_rows < self._ranks:
            what = f"there are {self._ranks} for {self._entry.num_rows} rows, and each needs one"
            raise ConfigError("num_workers", what, "use fewer workers")
        order = self._order_of(local_shuffle_buffer_size, local_shuffle_seed)
        collate = collate_fn and _formatted(collate_fn)
        place = _device(device)

        def made(positions: np.ndarray[Any, Any]) -> Any:
            rows = self._entry.read(self._places.ids_of(order.at(self.epoch, positions)))
            batch = self._collated(rows, dtypes) if collate is None else collate(self._raw(rows))
            return _moved(batch, place)

        return self._batches(made, batch_size, prefetch_batches, drop_last)

    def state_dict(self) -> dict[str, Any]:
        """Returns where all ranks are after the batch that was given out last; plain JSON, the same on every rank."""
        ended = self._position > 0 and self._entry.num_rows - self._position < self._ranks
        return {
            "version": STATE_VERSION,
            "key": self._entry.key,
            **self._order,
            "epoch": self.epoch + ended,
            "position": 0 if ended else self._position,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a state, of any number of ranks.

        Raises:
            StateMismatch: it is no state, or one of another entry.
        """
        if not isinstance(state, Mapping) or state.get("version") != STATE_VERSION:
            raise StateMismatch("state", "this is not the state of a shard", "give what state_dict returned")
        if state["key"] != self._entry.key:
            what = f"it belongs to the entry {state['key'][:16]}, and this is {self._entry.key[:16]}"
            raise StateMismatch("state.key", what, "give the entry that it was taken of")
        self._loaded += 1
        self.epoch, self._position = state["epoch"], state["position"]
        self._order = {"shuffle": state["shuffle"], "seed": state["seed"]}

    @cached_property
    def _entry(self) -> Entry:
        return open_finished(self._data.uri, dict(self._data.storage_options or {}))

    @cached_property
    def _places(self) -> RowPlaces:
        return RowPlaces([self._entry.slice_starts])

    @cached_property
    def _names(self) -> tuple[str, ...]:
        there = self._entry.columns
        for name in self._data.columns or ():
            if name not in there:
                raise ConfigError(
                    "columns", f"there is no column {name!r}", f"name some of {', '.join(there)}"
                )
        return tuple(self._data.columns or there)

    @cached_property
    def _pads(self) -> dict[str, float | int]:
        carried = declared_columns(self._entry.recipe)
        pads = {name: carried[name].get("pad", 0) if name in carried else 0 for name in self._names}
        return {**pads, "input_ids": int(self._entry.report.get("pad_token_id") or 0)}

    def _order_of(self, buffer_size: int | None, seed: int | None) -> Order:
        """1."""
        shuffle, number = self._data.shuffle, self._data.seed
        if buffer_size is not None:
            shuffle, number = f"block({buffer_size})", number if seed is None else seed
        try:
            if known_shuffle(shuffle).startswith("window"):
                raise ValueError(f"{shuffle!r} is for a server; use full, none or block(n)")
        except ValueError as error:
            raise ConfigError("shuffle", str(error), "see plan.shuffle") from None
        wanted = {"shuffle": shuffle, "seed": number}
        if self._position and wanted != self._order:
            what = f"it was taken in the middle of an epoch of {self._order}, and this is one of {wanted}"
            raise StateMismatch("state", what, "give the shuffle and seed that it was taken with")
        self._order = wanted
        return Order(self._entry.num_rows, number, parse_shuffle(shuffle))

    def _batches(
        self, made: Callable[[Any], Any], size: int, prefetch: int, drop_last: bool
    ) -> Iterator[Any]:
        """2, 3."""
        coming: deque[tuple[int, Future[Any]]] = deque()
        spans, loaded = self._spans(size, drop_last), self._loaded
        with ThreadPoolExecutor(1, thread_name_prefix="raysvc-batches") as pool:
            try:
                while True:
                    while len(coming) <= prefetch and (span := next(spans, None)):
                        first, step = span
                        begin, end = (
                            first + place * step // self._ranks for place in (self._rank, self._rank + 1)
                        )
                        coming.append(
                            (first + step, pool.submit(made, np.arange(begin, end, dtype=np.int64)))
                        )
                    if self._loaded != loaded:
                        raise StateMismatch(
                            "state", "it was loaded in a loop that goes on", "begin a loop after it"
                        )
                    if not coming:
                        break
                    position, batch = coming.popleft()
                    ready = batch.result()
                    self._position = position
                    yield ready
            finally:
                for _, batch in coming:
                    batch.cancel()
        self.epoch, self._position = self.epoch + 1, 0

    def _spans(self, size: int, drop_last: bool) -> Iterator[tuple[int, int]]:
        """For every step: the position, and the rows of all ranks."""
        first, stop, whole = self._position, self._entry.num_rows, size * self._ranks
        while (left := stop - first) >= (whole if drop_last else self._ranks):
            step = whole if drop_last else rows_of_step(left, size, self._ranks)
            yield first, step
            first += step

    def _collated(self, rows: RowBatch, dtypes: Any) -> dict[str, Any]:
        width = int(rows.lengths.max(initial=0))
        arrays: dict[str, Any] = {ROW_ID: rows.row_ids}
        arrays |= {name: laid(rows, name, width, self._pads[name]) for name in self._names}
        if "input_ids" in arrays:
            inside = np.arange(width) < rows.lengths[:, None]
            arrays["attention_mask"] = inside.astype(np.uint8)
            if "loss_mask" in arrays:
                arrays["labels"] = np.where(arrays["loss_mask"] == 1, arrays["input_ids"], IGNORED)
        tensors = {name: tensor_of(values) for name, values in arrays.items()}
        if dtypes is None:
            return tensors
        wanted = dtypes if isinstance(dtypes, Mapping) else dict.fromkeys(tensors, dtypes)
        if unknown := wanted.keys() - tensors.keys():
            raise ConfigError(
                "dtypes", f"there is no column {min(unknown)!r}", f"known are {', '.join(tensors)}"
            )
        kept = {name: one for name, one in tensors.items() if isinstance(one, list)}
        return {
            name: one.to(wanted.get(name, one.dtype)) for name, one in tensors.items() if name not in kept
        } | kept

    def _raw(self, rows: RowBatch) -> _RawBatch:
        columns: dict[str, Any] = {ROW_ID: rows.row_ids}
        for name in self._names:
            columns[name] = _bits(rows.rows[name]) if name in rows.rows else _ragged(rows, name)
        return _RawBatch(columns, {ROW_ID: "int64", **self._entry.columns})


def rows_of_step(left: int, batch_size: int, num_ranks: int) -> int:
    """Returns how many of the rows that are left all ranks together take, at least one each; see 3 of the module."""
    whole = batch_size * num_ranks
    if not whole < left < whole + num_ranks:
        return min(left, whole)
    return left - num_ranks if batch_size > 1 else left


@dataclass(frozen=True)
class _RawBatch:
    """Columns as they are stored, in the forms that a `collate_fn` may ask for."""

    columns: dict[str, Any]
    kinds: Mapping[str, str]

    def table(self) -> Any:
        import pyarrow as pa

        made = {}
        for name, values in self.columns.items():
            kind = self.kinds[name]
            plain = [one.tolist() for one in values] if kind.startswith("list<") else values.tolist()
            made[name] = pa.array(plain, arrow_type(kind))
        return pa.table(made)


def _formatted(collate_fn: Callable[[Any], Any]) -> Callable[[_RawBatch], Any]:
    from ray.data.collate_fn import ArrowBatchCollateFn, PandasBatchCollateFn

    if isinstance(collate_fn, ArrowBatchCollateFn):
        return lambda raw: collate_fn(raw.table())
    if isinstance(collate_fn, PandasBatchCollateFn):
        return lambda raw: collate_fn(raw.table().to_pandas())
    return lambda raw: collate_fn(raw.columns)


def _ragged(rows: RowBatch, name: str) -> np.ndarray[Any, Any]:
    """[N] of arrays."""
    cut = np.empty(len(rows), object)
    values = rows.wide[name].pieces if name in rows.wide else np.split(rows.tokens[name], rows.offsets[1:-1])
    for number, one in enumerate(values):
        cut[number] = _bits(one)
    return cut


def _bits(values: Any) -> Any:
    """bfloat16 as it is stored, uint16."""
    return values["bfloat16"] if values.dtype.names else values


def _device(device: Any) -> Any:
    import torch

    if device != "auto":
        return torch.device(device)
    try:
        import ray.train.torch

        return ray.train.torch.get_device()
    except RuntimeError:  # in no worker of Ray Train
        return torch.device("cpu")


def _moved(batch: Any, device: Any) -> Any:
    """Tensors of a batch on the device; whatever else a `collate_fn` made stays as it is."""
    import torch

    if isinstance(batch, torch.Tensor):
        return batch.to(device)
    if isinstance(batch, Mapping):
        return {name: _moved(one, device) for name, one in batch.items()}
    return batch
