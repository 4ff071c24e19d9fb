"""Turns that continue one another as one row: which row of a group holds which others, so that the loss stays the same.

A rollout in turns repeats its history: turn k + 1 begins with all tokens of turn k. Where it does, to the token, one forward pass
over the longest row gives the logits of all of them.

Axes: S rows of a group as they were put, L tokens of a row, N rows of several groups, T their tokens.

1. Rows are looked at from the longest to the shortest.
2. A row is held by the first row kept so far that begins with its tokens, agrees with it in what a row says as a whole and in what the
   model reads (but for the last token, which predicts nothing), and trains none of its targets, nor does a row that this one holds.
   One that the plan would drop for its length holds nobody.
3. A row that nobody can hold is kept.
4. A row of a later turn that does not begin with the row that shares most tokens with it has a broken prefix, at the token where they
   part. They are of one trajectory; where rows name none, they share a sampled token.

Always true:
- each target of each row is a target of exactly one row that is kept, with the values that its own row has there;
- the tokens before a target, and what the model reads with them, are those of its own row;
- which rows are held depends on the group alone.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from raysvc.ragged import Int64s
from raysvc.row_batch import RowBatch, WideRows

Array = npt.NDArray[Any]
TWICE = "trains the same tokens"
SHOWN = 8  # tokens of a broken prefix


class BrokenPrefix(NamedTuple):
    """A turn that does not begin with the turn before it, as if its history had been tokenized again.

    Attributes:
        earlier: row of the turn before.
        later: row whose history differs.
        at: the first token that differs.
        sampled: ids of the earlier row from there on, eight at most.
        found: those of the later row.
    """

    earlier: int
    later: int
    at: int
    sampled: tuple[int, ...]
    found: tuple[int, ...]


@dataclass(frozen=True, eq=False)
class Turns:
    """Holds what `find_turns` found in a group.

    Attributes:
        holder: int64 [S], the row that holds each row; itself where it is kept.
        apart: reason -> rows that begin another row and could not be held by it.
        broken: prefixes that are broken.
    """

    holder: Int64s
    apart: Mapping[str, int]
    broken: tuple[BrokenPrefix, ...]

    @property
    def num_held(self) -> int:
        """Rows that travel inside another."""
        return int(np.count_nonzero(self.holder != np.arange(len(self.holder))))


@dataclass(frozen=True, eq=False)
class TurnRows:
    """The rows of a group, as far as merging looks at them.

    Attributes:
        ids: [S] of int32 [L].
        targets: [S] of bool [L], False at the first token.
        read: column that the model reads -> [S] of [L, *shape].
        whole: column of one value a row -> [S, *shape]; rows that differ in one are not merged.
        longest: tokens of the longest row that is trained; None: any is.
    """

    ids: Sequence[Array]
    targets: Sequence[npt.NDArray[np.bool_]]
    read: Mapping[str, Sequence[Array]]
    whole: Mapping[str, Array]
    longest: int | None = None


def find_turns(rows: TurnRows) -> Turns:
    """Decide which rows of a group travel inside others; see the module."""
    raw = [np.ascontiguousarray(ids, np.int32).tobytes() for ids in rows.ids]
    holder = np.arange(len(raw))
    # kept row -> its targets, and those of the rows that it holds
    taken: dict[int, npt.NDArray[np.bool_]] = {}
    apart: Counter[str] = Counter()
    for row in sorted(range(len(raw)), key=lambda each: (-len(raw[each]), each)):
        reasons = []
        for kept, used in taken.items():
            if not raw[kept].startswith(raw[row]) or (rows.longest or len(used)) < len(used):
                continue
            if (reason := _why_apart(rows, row, kept, used)) is None:
                holder[row] = kept
                used[: len(rows.ids[row])] |= rows.targets[row]
                break
            reasons.append(reason)
        else:
            taken[row] = rows.targets[row].copy()
            apart.update(reasons[:1])
    return Turns(holder, dict(apart), _broken(rows, raw))


def _why_apart(rows: TurnRows, row: int, kept: int, used: npt.NDArray[np.bool_]) -> str | None:
    """Says why a row that another begins with is not held by it; None: it is."""
    length = len(rows.ids[row])
    for name, values in rows.whole.items():
        if not np.array_equal(values[row], values[kept]):
            return f"differs in {name!r}"
    if bool((used[:length] & rows.targets[row]).any()):
        return TWICE
    for name, column in rows.read.items():
        if not np.array_equal(column[row][: length - 1], column[kept][: length - 1]):
            return f"differs in {name!r}"
    return None


def _broken(rows: TurnRows, raw: Sequence[bytes]) -> tuple[BrokenPrefix, ...]:
    firsts = [int(each.argmax()) if each.any() else len(each) for each in rows.targets]
    trajectory = rows.whole.get("trajectory")
    # what a later turn has in common with its earlier one at least: the prompt, and a sampled token where nobody says who follows whom
    shared = [4 * (first + (trajectory is None)) for first in firsts]
    heads = [own[:length] for own, length in zip(raw, shared, strict=True)]
    found = []
    for later in range(len(raw)):
        parents = [
            earlier
            for earlier, first in enumerate(firsts)
            if first < min(firsts[later], len(rows.ids[earlier]))  # it was sampled sooner
            and (trajectory is None or trajectory[earlier] == trajectory[later])
            and raw[later].startswith(heads[earlier])
        ]
        common = {earlier: _common(rows.ids[earlier], rows.ids[later]) for earlier in parents}
        closest = max(parents, key=lambda each: common[each], default=None)
        if closest is None or (at := common[closest]) in (len(rows.ids[closest]), len(rows.ids[later])):
            continue
        if at < firsts[later]:
            ids = (tuple(rows.ids[row][at : at + SHOWN].tolist()) for row in (closest, later))
            found.append(BrokenPrefix(closest, later, at, *ids))
    return tuple(found)


def _common(one: Array, other: Array) -> int:
    """Tokens that both begin with."""
    length = min(len(one), len(other))
    differ = one[:length] != other[:length]
    return int(differ.argmax()) if differ.any() else length


def merged(batch: RowBatch, holder: Int64s, read: Sequence[str]) -> RowBatch:
    """The same rows; those that hold others have the targets of these too, `turn_index` and `turn_count` (`FlatRows`).

    Args:
        batch: N rows of several groups, one group after the other.
        holder: int64 [N], the row of the batch that holds each row.
        read: columns that the model reads: they stay those of the row that is kept.
    """
    number = np.arange(len(holder))
    held = np.flatnonzero(holder != number)
    targets = _targets(batch)
    source = np.concatenate([batch.offsets[row] + np.flatnonzero(targets[row]) for row in held])
    goal = np.concatenate([batch.offsets[holder[row]] + np.flatnonzero(targets[row]) for row in held])
    tokens = {name: _moved(values, source, goal) for name, values in batch.tokens.items() if name not in read}
    tokens |= {name: batch.tokens[name] for name in read if name in batch.tokens}
    counts = np.bincount(holder, minlength=len(holder))
    tokens["turn_index"] = _turn_index(batch, holder, source, goal)
    rows = {**batch.rows, "turn_count": counts.astype(np.int64)}
    wide = {
        name: its if name in read else _moved_pieces(its, targets, holder, held)
        for name, its in batch.wide.items()
    }
    return replace(batch, tokens=tokens, rows=rows, wide=wide)


def _targets(batch: RowBatch) -> list[npt.NDArray[np.bool_]]:
    mask = batch.tokens["loss_mask"] != 0
    mask[batch.offsets[:-1][batch.lengths > 0]] = False
    return [mask[start:stop] for start, stop in pairwise(batch.offsets.tolist())]


def _turn_index(batch: RowBatch, holder: Int64s, source: Int64s, goal: Int64s) -> npt.NDArray[np.int32]:
    """int32 [T], of each token of a kept row the turn that trains it, 0 for its own and where none does."""
    before = np.zeros(len(holder), np.int64)  # how many rows are held by the same one before this
    seen: Counter[int] = Counter()
    for row in np.flatnonzero(holder != np.arange(len(holder))).tolist():
        seen[int(holder[row])] += 1
        before[row] = seen[int(holder[row])]
    by_token = np.repeat(before, batch.lengths).astype(np.int32)
    out = np.zeros(int(batch.offsets[-1]), np.int32)
    out[goal] = by_token[source]
    return out


def _moved(values: Array, source: Int64s, goal: Int64s) -> Array:
    out = values.copy()
    out[goal] = values[source]
    return out


def _moved_pieces(
    its: WideRows, targets: Sequence[npt.NDArray[np.bool_]], holder: Int64s, held: Int64s
) -> WideRows:
    pieces = list(its.pieces)
    for kept in np.unique(holder[held]).tolist():
        pieces[kept] = pieces[kept].copy()
    for row in held.tolist():
        cells = np.flatnonzero(targets[row])
        pieces[int(holder[row])][cells] = its.pieces[row][cells]
    return replace(its, pieces=pieces)
