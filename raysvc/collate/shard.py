"""Defines what one rank gets of one mini-batch: named arrays, and where its micro-batches lie in them.

Axes: B lines (a row, a pack or a window each), W columns, S sequences (rows) of this rank, line after line.
Arrays of every layout:
    input_ids, position_ids, labels                 int32 [B, W]
    attention_mask, loss_mask                       uint8 [B, W]
    extra per-token columns [B, W, *shape], extra per-row columns [S, *shape]; text is numpy's fixed-width text
    seq_lengths         int32 [S]       tokens of each row
    row_tokens          int32 [S]       targets of each row (`stream`: of its window)
    row_group           int32 [S]       number of the row's group in the mini-batch, -1 for a dummy
    row_group_rows      int32 [S]       rows of that group in the mini-batch (`stream`: 1)
    row_group_tokens    int32 [S]       targets of that group in the mini-batch (`stream`: of the row's window)
and of rows that name their trajectory
    row_trajectory_tokens int32 [S]     targets of that trajectory in the mini-batch
and where a row holds several turns
    turn_tokens         int32 [B, W]    targets of the turn that the token is of
and with several rows on a line (`packed`, `stream`):
    segment_ids         int32 [B, W]    number of the row on its line, from 1; 0 in padding
    cu_seqlens          int32 [S + B]   for each line 0 and the end of each of its rows, alignment included
    cu_seqlens_offsets  int32 [B + 1]   where each line begins in `cu_seqlens`
and where a line was cut for context parallelism (`packed`, zigzag)
    cu_seqlens_local    int32 [S + B]   `cu_seqlens` of the rank's own part of each line
and of rows with media, as their processor gives them (`pixel_values`, `image_grid_thw`, ...)
    <name>              [M, ...]        media or patches, row after row
    <name>_bounds       int32 [S + 1]   where the part of each row begins in <name>
Always true:
- `read_shard(shard.to_wire())` is the same shard, without a copy; what travels is built of numpy and text alone (docs/wire.md);
- `private(cut(shard.to_wire()))` has the same arrays in memory of its own; to cut copies small arrays alone;
- `micro(i)` copies nothing;
- the micro-batches cover every line once, in order;
- denominators are those of the whole mini-batch, the same on every rank.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Collection
from dataclasses import dataclass, fields, replace
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from raysvc.errors import ConfigError
from raysvc.job.column_dtypes import BF16
from raysvc.job.config import Layout
from raysvc.plan.fact_table import facts_html, facts_text

Array = npt.NDArray[Any]
Wire = tuple[str, dict[str, Array]]  # header, arrays: what a ref holds
# what a rank gets: a list of the header and a dict of arrays, pieces of them, or (dtype, shape, bytes) of small ones, as lists. Ray
# pickles arrays, and none of the rest: a shard of a few rows costs half the call then
CutWire = list[Any]
PLAIN_BYTES = 1 << 14  # arrays up to this size travel as bytes
PIECE_BYTES = 1 << 20  # the most that Ray copies into its store without starting six threads
CUT_BELOW = 8 << 20  # larger arrays stay whole
WIRE_FORMAT, WIRE_VERSION = "raysvc.shard", 1  # the version grows when an old reader would misread
BOUNDS = "_bounds"  # ends the name of an array that says where rows begin in another one


class MicroBatchInfo(NamedTuple):
    """Lines [start, stop) of a shard, their first `width` columns (`padded_left`: the last ones).

    Attributes:
        num_tokens: tokens of real rows and dummies, without padding.
    """

    start: int
    stop: int
    width: int
    num_tokens: int


@dataclass(frozen=True)
class Denominators:
    """Counts of a whole mini-batch, real rows only.

    Attributes:
        tokens: targets, positions whose label is not -100.
        rows: rows (`stream`: windows), whether they have a target or not; a row that holds several turns counts for each.
        groups: groups.
        trajectories: trajectories of the groups; 0 where rows name none.
    """

    tokens: int
    rows: int
    groups: int
    trajectories: int = 0

    def plus(self, more: Denominators) -> Denominators:
        """Returns the counts of two mini-batches together."""
        return Denominators(
            self.tokens + more.tokens,
            self.rows + more.rows,
            self.groups + more.groups,
            self.trajectories + more.trajectories,
        )


@dataclass(frozen=True, eq=False, repr=False)
class Shard:
    """The arrays of one (step, mini-batch, rank); see the module for their names.

    Attributes:
        step: index of the step.
        mini: number of the mini-batch in the step.
        rank: data-parallel rank.
        layout: of the arrays.
        arrays: name -> array; read-only once it went through an object store.
        row_ids: int64 [S], -1 for a dummy.
        denominators: of the whole mini-batch.
        micro_batches: ranges over the lines.
        row_vectors: names of the per-row arrays of several numbers a row.
        pad_token_id: in cells of `input_ids` without a token.
    """

    step: int
    mini: int
    rank: int
    layout: Layout
    arrays: dict[str, Array]
    row_ids: npt.NDArray[np.int64]
    denominators: Denominators
    micro_batches: tuple[MicroBatchInfo, ...]
    row_vectors: tuple[str, ...] = ()
    pad_token_id: int = 0

    @property
    def nbytes(self) -> int:
        """Bytes of all arrays."""
        return sum(array.nbytes for array in self.arrays.values()) + self.row_ids.nbytes

    def digest(self) -> str:
        """sha256 of names, types, shapes and bytes of all arrays, 64 hex digits; `raysvc replay` prints it too."""
        found = hashlib.sha256()
        for name, array in sorted({**self.arrays, "row_ids": self.row_ids}.items()):
            found.update(f"{name} {array.dtype.str} {array.shape}\n".encode())
            found.update(np.ascontiguousarray(array).data)
        return found.hexdigest()

    @cached_property
    def of_media(self) -> tuple[str, ...]:
        """Names of the arrays of media, without those of their bounds."""
        return tuple(name for name in self.arrays if name + BOUNDS in self.arrays)

    def without(self, names: Collection[str]) -> Shard:
        """The shard without these arrays, and the bounds of those of media."""
        gone = {*names, *(name + BOUNDS for name in names)}
        return replace(self, arrays={name: array for name, array in self.arrays.items() if name not in gone})

    def micro(self, index: int) -> dict[str, Array]:
        """Views of the arrays of micro-batch `index`; those of a cell per token are [lines, width, *shape]."""
        micro = self.micro_batches[index]
        lines = slice(micro.start, micro.stop)
        sequences, bounds = lines, slice(0, 0)
        if "cu_seqlens_offsets" in self.arrays:
            offsets = self.arrays["cu_seqlens_offsets"]
            bounds = slice(int(offsets[micro.start]), int(offsets[micro.stop]))
            sequences = slice(bounds.start - micro.start, bounds.stop - micro.stop)
        columns = slice(-micro.width, None) if self.layout == "padded_left" else slice(0, micro.width)
        out: dict[str, Array] = {}
        for name, array in self.arrays.items():
            if array.ndim >= 2 and name not in self.row_vectors:
                out[name] = array[lines, columns]
            elif name in ("cu_seqlens", "cu_seqlens_local"):
                out[name] = array[bounds]
            elif name == "cu_seqlens_offsets":
                out[name] = array[micro.start : micro.stop + 1]
            else:
                out[name] = array[sequences]
        for name in self.of_media:
            begins = self.arrays[name + BOUNDS][sequences.start : sequences.stop + 1]
            out[name + BOUNDS], out[name] = begins, self.arrays[name][int(begins[0]) : int(begins[-1])]
        return out

    def __repr__(self) -> str:
        return facts_text("shard", self._facts())

    def _repr_html_(self) -> str:
        return facts_html("Shard", self._facts())

    def _facts(self) -> dict[str, Any]:
        lines = self.arrays["input_ids"].shape if "input_ids" in self.arrays else ()
        return {
            "step": self.step,
            "mini": self.mini,
            "rank": self.rank,
            "layout": f"{self.layout} {list(lines)}",
            "rows": int((self.row_ids >= 0).sum()),
            "dummies": int((self.row_ids < 0).sum()),
            "micro-batches": len(self.micro_batches),
            "arrays": " ".join(self.arrays),
            "bytes": self.nbytes,
        }

    def to_wire(self) -> Wire:
        """The shard as plain values, for workers that have only numpy; nothing is copied. docs/wire.md describes them."""
        counts = self.denominators
        header = {
            "format": WIRE_FORMAT,
            "version": WIRE_VERSION,
            "step": self.step,
            "mini": self.mini,
            "rank": self.rank,
            "layout": self.layout,
            "denominators": vars(counts),
            "micro_batches": self.micro_batches,
            "row_vectors": self.row_vectors,
            "pad_token_id": self.pad_token_id,
        }
        return json.dumps(header), {**self.arrays, "row_ids": self.row_ids}


def read_shard(value: Wire | Shard) -> Shard:
    """The shard of what a ref of `MiniBatch.shards` holds; nothing is copied.

    Raises:
        ConfigError: it is no shard, or one of a later wire version.
    """
    if isinstance(value, Shard):
        return value
    header, arrays = _header_and_arrays(value)
    return Shard(
        header["step"], header["mini"], header["rank"], header["layout"],
        {name: array for name, array in arrays.items() if name != "row_ids"},
        arrays["row_ids"], Denominators(**{f.name: header["denominators"].get(f.name, 0) for f in fields(Denominators)}),
        tuple(MicroBatchInfo(*micro) for micro in header["micro_batches"]), tuple(header["row_vectors"]), header["pad_token_id"],
    )  # fmt: skip


def cut(wire: Wire) -> CutWire:
    """The wire for a rank, which copies it in any case: small arrays as bytes, and those of 1 to 8 MiB as lists of lines, of 1 MiB
    together or less."""
    header, arrays = wire
    return [header, {name: plain(array) for name, array in arrays.items()}]


def private(wire: CutWire) -> Wire:
    """The wire with whole arrays, in memory of its own."""
    header, arrays = wire
    return header, {name: whole(value) for name, value in arrays.items()}


def plain(array: Array) -> Array | list[Any]:
    """An array as it travels to a rank; see `CutWire`."""
    if array.nbytes <= PLAIN_BYTES:
        return ["bfloat16" if array.dtype == BF16 else array.dtype.str, list(array.shape), array.tobytes()]
    if not PIECE_BYTES < array.nbytes <= CUT_BELOW:
        return array
    lines = max(1, PIECE_BYTES * len(array) // array.nbytes)
    return [array[first : first + lines] for first in range(0, len(array), lines)]


def whole(value: Array | list[Any]) -> Array:
    """The array of what `plain` returned, in memory of its own."""
    if not isinstance(value, list):
        return value.copy()
    if isinstance(value[0], str):
        name, shape, data = value
        return np.frombuffer(bytearray(data), BF16 if name == "bfloat16" else name).reshape(shape)
    own = np.empty((sum(map(len, value)), *value[0].shape[1:]), value[0].dtype)
    return np.concatenate(value, out=own)


def _header_and_arrays(value: Any) -> tuple[dict[str, Any], dict[str, Array]]:
    try:
        text, arrays = value
        header = json.loads(text)
        right = header["format"] == WIRE_FORMAT
    except (TypeError, ValueError, KeyError):
        right = False
    if not right:
        what = f"{type(value).__name__} is no shard of a server"
        raise ConfigError("read_shard(value)", what, "give what ray.get returns for a ref of mini.shards")
    if header["version"] != WIRE_VERSION:
        what = f"the shard has wire version {header['version']}, and this reader knows {WIRE_VERSION}"
        raise ConfigError("read_shard(value)", what, "install the raysvc of the server on the worker")
    return header, arrays
