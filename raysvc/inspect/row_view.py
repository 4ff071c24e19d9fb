"""Rows as a person looks at them: where each lies in a shard, and which of its tokens have loss.

Axes: S rows and dummies of a rank, L tokens of one row.
Always true:
- pure: arrays in, text and numbers out;
- what is called trained is what the shard's own `labels` (else `loss_mask`) say, not what the entry says;
- the stretches of a row cover its tokens once, in order.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import numpy as np
import numpy.typing as npt

from raysvc.collate.row_values import cells_of
from raysvc.job.column_dtypes import dtype_name
from raysvc.media.medium import COLUMNS

if TYPE_CHECKING:
    from raysvc.collate.shard import Shard

Kind = Literal["trained", "context", "special"]
KINDS: tuple[Kind, ...] = ("context", "trained", "special")
DUMMY = -1
OWN = frozenset(
    [
        "input_ids",
        "loss_mask",
        "labels",
        "attention_mask",
        "position_ids",
        "segment_ids",
        "source_row",
        "seq_lengths",
        "row_tokens",
        "row_group",
        "row_group_rows",
        "row_group_tokens",
        "row_trajectory_tokens",
        "turn_tokens",
        *COLUMNS,
    ]
)


class TextRun(NamedTuple):
    """Text of neighbouring tokens of one kind; `special` tokens without loss mark where turns begin and end."""

    text: str
    kind: Kind


class Place(NamedTuple):
    """Says where a row lies: number of mini-batch, rank, micro-batch on it, line of the shard, first column."""

    mini: int
    rank: int
    micro: int
    line: int
    column: int


@dataclass(frozen=True)
class RowPicture:
    """One row.

    Attributes:
        row_id: of the entry; `DUMMY` for a row that only fills up a rank.
        length: tokens.
        trained: tokens with loss.
        stretches: its text.
        place: None for a row of an entry.
        group: number of its group in the mini-batch; None for a row of an entry, -1 for a dummy.
        first, last: positions of its first and last token.
        columns: what else goes with it: values per row as they are, of others their type and shape.
        trained_special: texts of its special tokens that have loss.
    """

    row_id: int
    length: int
    trained: int
    stretches: tuple[TextRun, ...]
    place: Place | None = None
    group: int | None = None
    first: int = 0
    last: int = 0
    columns: Mapping[str, Any] = field(default_factory=dict)
    trained_special: tuple[str, ...] = ()

    @property
    def is_dummy(self) -> bool:
        """Returns whether it only fills up a rank."""
        return self.row_id == DUMMY


def stretches(ids: Sequence[int], trained: Sequence[bool], tokenizer: Any = None) -> tuple[TextRun, ...]:
    """The text of `ids` [L], cut where its kind changes; without a tokenizer the ids themselves."""
    special = _special_ids(tokenizer)
    kinds = ["trained" if hit else "special" if token in special else "context"
             for token, hit in zip(ids, trained, strict=True)]  # fmt: skip
    cuts = [0, *(at for at, (a, b) in enumerate(itertools.pairwise(kinds), start=1) if a != b), len(ids)]
    edges = [(start, stop) for start, stop in itertools.pairwise(cuts) if start < stop]
    return tuple(TextRun(_text(ids[start:stop], tokenizer), kinds[start]) for start, stop in edges)  # type: ignore[arg-type]


def row_picture(row_id: int, ids: Sequence[int], mask: Sequence[int], tokenizer: Any = None) -> RowPicture:
    """A row of an entry."""
    trained = [bool(hit) for hit in mask]
    with_loss = _special_ids(tokenizer) & {token for token, hit in zip(ids, trained, strict=True) if hit}
    return RowPicture(
        row_id,
        len(ids),
        sum(trained),
        stretches(ids, trained, tokenizer),
        last=max(len(ids) - 1, 0),
        trained_special=tuple(_text([token], tokenizer) for token in sorted(with_loss)),
    )


def shard_pictures(shard: Shard, tokenizer: Any = None) -> list[RowPicture]:
    """The rows and dummies of a shard, line after line."""
    arrays = shard.arrays
    flat = {
        name: array.reshape(-1)
        for name, array in arrays.items()
        if array.ndim == 2 and name not in shard.row_vectors
    }
    trained, width = _trained(arrays), arrays["input_ids"].shape[1]
    found = []
    for index, cell in enumerate(cells_of(shard).tolist()):
        length = int(arrays["seq_lengths"][index])
        cells = slice(cell, cell + length)
        ids, hits = flat["input_ids"][cells].tolist(), trained[cells].tolist()
        positions = flat["position_ids"][cells] if "position_ids" in flat else np.arange(length)
        line = cell // width
        micro = next(n for n, micro in enumerate(shard.micro_batches) if micro.start <= line < micro.stop)
        found.append(
            RowPicture(
                row_id=int(shard.row_ids[index]),
                length=length,
                trained=sum(hits),
                stretches=stretches(ids, hits, tokenizer),
                place=Place(shard.mini, shard.rank, micro, line, cell % width),
                group=int(arrays["row_group"][index]),
                first=int(positions[0]),
                last=int(positions[-1]),
                columns=_columns(shard, index),
            )
        )
    return found


def columns_of_row(row: Mapping[str, Any]) -> dict[str, Any]:
    """Returns what goes with a row of an entry beside its tokens; of what is long, how much there is."""
    others = {name: value for name, value in row.items() if name not in OWN}
    return {
        name: f"{len(value)} values" if isinstance(value, list) else value for name, value in others.items()
    }


def _columns(shard: Shard, index: int) -> dict[str, Any]:
    """The same of a row of a shard."""
    length, found = int(shard.arrays["seq_lengths"][index]), {}
    for name, array in shard.arrays.items():
        if name in OWN or name.startswith("cu_seqlens"):
            continue
        if array.ndim == 1:
            found[name] = array[index].tolist()
        else:
            lead = array.shape[1:] if name in shard.row_vectors else (length, *array.shape[2:])
            found[name] = f"{dtype_name(array.dtype)} {list(lead)}"
    return found


def padding_cells(shard: Shard) -> tuple[int, int]:
    """Cells of the micro-batches without a token of a real row, and all of them."""
    cells = sum((micro.stop - micro.start) * micro.width for micro in shard.micro_batches)
    real = int(shard.arrays["seq_lengths"][shard.row_ids >= 0].sum())
    return cells - real, cells


def _trained(arrays: dict[str, npt.NDArray[Any]]) -> npt.NDArray[np.bool_]:
    if "labels" in arrays:
        return np.asarray(arrays["labels"].reshape(-1) != -100)
    if "loss_mask" in arrays:
        return np.asarray(arrays["loss_mask"].reshape(-1) != 0)
    return np.zeros(arrays["input_ids"].size, np.bool_)


def _special_ids(tokenizer: Any) -> frozenset[int]:
    if tokenizer is None:
        return frozenset()
    return frozenset(number for number, token in tokenizer.added_tokens_decoder.items() if token.special)


def _text(ids: Sequence[int], tokenizer: Any) -> str:
    return str(tokenizer.decode(ids)) if tokenizer is not None else " ".join(map(str, ids)) + " "
