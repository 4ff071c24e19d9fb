"""Orders the groups of an epoch by a keyed permutation with random access.

Axes: G groups, P positions asked for.

1. A key is made of salt, seed and epoch.
2. `full`: a Feistel network keyed by it permutes [0, G'), the smallest rectangle of at least G; images outside [0, G) are walked
   on until they are inside. A small G has a table instead.
3. `block(n)`: the blocks are permuted by the key, and each block inside by the key and its number.
4. Or a function of the user returns the groups of an epoch (`CustomOrder`), each once.

Always true:
- `order.at(epoch, positions)` is a pure function of (seed, epoch, shuffle, G): pure integers, the same on
  every machine;
- over all positions of an epoch every group comes exactly once;
- time and memory depend on the positions asked for, never on G; but a function of the user is held by epoch.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt

from raysvc.errors import PlanError
from raysvc.plan.groups import OrderRows

Int64s = npt.NDArray[np.int64]
UInt64s = npt.NDArray[np.uint64]

_ROUNDS = 8
_WHERE = "plan.order"
_ROUNDS_EACH = 6  # of many small permutations, whose images are shuffled once more
_TABLE_SIZE = (
    1024  # below this a permutation is a sorted table of hashes, uniform even where a Feistel network is not
)
_MIX_1, _MIX_2 = np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB)
_S27, _S30, _S31, _S32 = (np.uint64(bits) for bits in (27, 30, 31, 32))


class GroupOrder:
    """Answers what a plan asks of its order, as an order does that follows from the plan's identity and that no slices decide."""

    @property
    def last_join(self) -> int:
        """Position from which on no further source joins."""
        return 0

    def digest(self, epoch: int) -> str | None:
        """sha256 of the order of `epoch`, 64 hex digits; None: it follows from the identity."""
        return None

    def turns_before(self, position: int, num_sources: int = 1) -> list[int]:
        """[K], how many groups of each of so many sources, from its first one on, those before a position of the stream may have, all
        epochs counted."""
        return [position] * num_sources

    def decided_by(self, stages: Sequence[Any]) -> Any:
        """The order with stages of a mixture that were decided while it was followed.

        Raises:
            PlanError: there are some, and it is no mixture.
        """
        if stages:
            raise PlanError("weights", "the plan is not a mixture", "name several sources in `mixture`")
        return self

    def needs_from(self, epoch: int, position: int) -> tuple[Int64s, Int64s]:
        """All slices [S], those first that the positions of the epoch from this one on need first, and the position from which on
        each is needed [S]; its end for those that it needs no more. None of an order over all rows."""
        return np.zeros(0, np.int64), np.zeros(0, np.int64)

    def needed(self, epoch: int, position: int) -> list[tuple[int, int]]:
        """(source, slice), as `needs_from`."""
        return [(0, number) for number in self.needs_from(epoch, position)[0].tolist()]


@dataclass(frozen=True)
class Order(GroupOrder):
    """Order of `num_groups` groups in every epoch.

    Attributes:
        num_groups: groups of one epoch.
        seed: of the run.
        block: None: as they lie; 0: all shuffled; n: blocks of n groups shuffled, and the groups inside each
            block.
        salt: tells orders of the same seed apart (the key of a mixture's source).
    """

    num_groups: int
    seed: int
    block: int | None
    salt: str = ""

    def at(self, epoch: int, positions: Int64s) -> Int64s:
        """Groups at `positions` (int64 [P], each in [0, G)) of `epoch`."""
        if self.block is None:
            return positions
        if self.block == 0:
            return Permutation.keyed(self.num_groups, f"{self.salt}/{self.seed}/{epoch}").at(
                positions
            )  # 1, 2
        return self._blocks(epoch).at(positions)  # 1, 3

    def _blocks(self, epoch: int) -> _Blocks:
        assert self.block
        return _Blocks(self.num_groups, self.block, f"{self.salt}/{self.seed}/{epoch}")


def parse_shuffle(shuffle: str) -> int | None:
    """`Order.block` of a checked `plan.shuffle`: none, full or block(n)."""
    if shuffle == "none":
        return None
    return 0 if shuffle == "full" else int(shuffle[len("block(") : -1])


@dataclass(frozen=True)
class Permutation:
    """A keyed permutation of [0, size).

    A generalized Feistel network over Z_rows x Z_columns (Black and Rogaway 2002, "Ciphers with arbitrary
    finite domains"), with rows * columns < size + rows, so that cycle walking almost never takes a second
    walk.
    Attributes: size, keys (uint64 round keys).
    """

    size: int
    keys: tuple[int, ...]

    @classmethod
    def keyed(cls, size: int, key: str) -> Permutation:
        """The permutation of [0, size) that `key` names."""
        return cls(size, _round_keys(key))

    def at(self, positions: Int64s) -> Int64s:
        """Images of `positions`."""
        if self.size <= _TABLE_SIZE:
            return _table(self.size, self.keys)[positions]
        return self._walk(positions, forward=True)

    def find(self, images: Int64s) -> Int64s:
        """The inverse of `at`."""
        if self.size <= _TABLE_SIZE:
            return np.argsort(_table(self.size, self.keys)).astype(np.int64)[images]
        return self._walk(images, forward=False)

    def _walk(self, values: Int64s, forward: bool) -> Int64s:
        out = self._pass(values.astype(np.uint64), forward)
        size = np.uint64(self.size)
        while len(outside := np.flatnonzero(out >= size)):
            out[outside] = self._pass(out[outside], forward)
        return out.astype(np.int64)

    def _pass(self, values: UInt64s, forward: bool) -> UInt64s:
        rows = math.isqrt(self.size - 1) + 1
        columns = -(-self.size // rows)
        return _feistel(values, np.uint64(rows), np.uint64(columns), self.keys, forward)


class _Blocks:
    """Blocks of n groups in shuffled order, shuffled inside; the short last block comes where its turn is."""

    def __init__(self, num_groups: int, block: int, key: str) -> None:
        self.block, self.key = block, key
        self.num_blocks = -(-num_groups // block)
        self.short = num_groups - (self.num_blocks - 1) * block
        self.outer = Permutation.keyed(self.num_blocks, key)
        self.short_slot = int(self.outer.find(np.array([self.num_blocks - 1]))[0])

    def at(self, positions: Int64s) -> Int64s:
        missing = self.block - self.short
        after = positions >= self.short_slot * self.block + self.short
        slots, inside = np.divmod(positions + np.where(after, missing, 0), self.block)
        blocks = self.outer.at(slots)
        return blocks * self.block + self._inside(blocks, inside)

    def _inside(self, blocks: Int64s, inside: Int64s) -> Int64s:
        out = np.empty_like(inside)
        for number in np.unique(blocks).tolist():
            size = self.short if number == self.num_blocks - 1 else self.block
            inner = Permutation.keyed(size, f"{self.key}/{number}")
            here = blocks == number
            out[here] = inner.at(inside[here])
        return out


class CustomOrder(GroupOrder):
    """Order of all epochs by a function of the user: `plan.order: module:name`.

    The function is imported where the plan is made: by the server, by `raysvc plan`, and by collators. The identity has its name and
    the digest of its first epoch, so a changed function is another plan; a state has the digest of the epoch that it is in. At most
    two epochs are held.

    Args:
        name: "module:name".
        rows: what the function gets.

    Raises:
        ConfigError: there is no such function.
        PlanError: its first epoch is no order of the groups, or another one when it is asked again.
    """

    def __init__(self, name: str, rows: OrderRows) -> None:
        from raysvc.job.named_function import function_of

        self.num_groups = rows.num_groups
        self._name, self._rows, self._function = name, rows, function_of(_WHERE, name, "(epoch, rows)")
        self._epoch = lru_cache(maxsize=2)(self._made)
        self._digests: dict[int, str] = {}  # of every epoch that was made

    def at(self, epoch: int, positions: Int64s) -> Int64s:
        """Groups at `positions` (int64 [P], each in [0, G)) of `epoch`."""
        return self._epoch(epoch)[positions]

    def digest(self, epoch: int) -> str:
        """sha256 of the order of `epoch`, 64 hex digits."""
        self._epoch(epoch)
        return self._digests[epoch]

    def _made(self, epoch: int) -> Int64s:
        order = self._called(epoch)
        if not self._digests and not np.array_equal(order, self._called(epoch)):
            raise self._unsteady(epoch)
        digest = hashlib.sha256(order.astype("<i8").tobytes()).hexdigest()
        if self._digests.setdefault(epoch, digest) != digest:
            raise self._unsteady(epoch)
        return order

    def _unsteady(self, epoch: int) -> PlanError:
        what = f"{self._name} returned two orders for epoch {epoch}"
        return PlanError(_WHERE, what, "draw from rows.seed and epoch alone, as docs/concepts.md does")

    def _called(self, epoch: int) -> Int64s:
        try:
            returned = self._function(epoch, self._rows)
            order = np.asarray(returned)
        except Exception as error:  # of the user's function: whatever it is, it is named
            from raysvc.job.named_function import line_of

            what = f"{self._name} raised {type(error).__name__} for epoch {epoch}: {error}{line_of(error, 0)}"
            raise PlanError(_WHERE, what, "correct the function") from error
        count = self.num_groups
        if order.shape != (count,) or order.dtype.kind not in "iu":
            kind = f"{order.dtype.name} {list(order.shape)}" if order.shape else type(returned).__name__
            what = f"{self._name} returned {kind} for epoch {epoch}"
            raise PlanError(_WHERE, what, f"return the integers 0 to {count - 1}, each once")
        known = order[(order >= 0) & (order < count)]
        if missing := count - int((np.bincount(known, minlength=count) > 0).sum()):
            what = f"{self._name} left {missing} of {count} groups out of epoch {epoch}"
            raise PlanError(_WHERE, what, f"return the integers 0 to {count - 1}, each once")
        return order.astype(np.int64)


def permute_each(sizes: Int64s, keys: Sequence[UInt64s], which: Int64s, positions: Int64s) -> Int64s:
    """Images of `positions` [P], each under one of U permutations.

    Args:
        sizes: int64 [U].
        keys: round keys, each uint64 [U].
        which: int64 [P], in [0, U), the permutation of each position.
        positions: int64 [P], each below the size of its permutation.
    """
    limits = np.maximum(sizes, 1).astype(np.uint64)
    rows = np.sqrt(limits - np.uint64(1)).astype(np.uint64) + np.uint64(1)  # exact below 2^52
    columns = (limits + rows - np.uint64(1)) // rows
    out, here = np.empty(len(positions), np.uint64), np.arange(len(positions))
    values = positions.astype(np.uint64)
    while len(here):
        its_keys = [key[which] for key in keys]
        out[here] = values = _feistel(values, rows[which], columns[which], its_keys, forward=True)
        outside = np.flatnonzero(values >= limits[which])
        here, values, which = here[outside], values[outside], which[outside]
    return out.astype(np.int64)


def round_keys_each(key: str, numbers: Int64s) -> list[UInt64s]:
    """Round keys for `permute_each`, each uint64 [U]: those that `key` and each of `numbers` [U] name."""
    own = _mix(_mix(numbers.astype(np.uint64)) + np.uint64(1))
    return [_mix(own ^ np.uint64(one)) for one in _round_keys(key)[:_ROUNDS_EACH]]


def _feistel(
    values: UInt64s,
    rows: np.uint64 | UInt64s,
    columns: np.uint64 | UInt64s,
    keys: Sequence[int] | Sequence[UInt64s],
    forward: bool,
) -> UInt64s:
    """One pass over [0, rows * columns)."""
    left, right = np.divmod(values, columns)
    sides, moduli = [left, right], (rows, columns)
    for number in range(len(keys)) if forward else reversed(range(len(keys))):
        moved, fixed, modulus = number % 2, 1 - number % 2, moduli[number % 2]
        shift = _mix(sides[fixed] + np.uint64(keys[number])) >> _S32
        shift = (shift * modulus) >> _S32
        total = sides[moved] + (shift if forward else modulus - shift)
        sides[moved] = np.where(total >= modulus, total - modulus, total)
    return sides[0] * moduli[1] + sides[1]


def _mix(values: UInt64s) -> UInt64s:
    """The finalizer of splitmix64 (Steele, Lea and Flood 2014)."""
    values = (values ^ (values >> _S30)) * _MIX_1
    values = (values ^ (values >> _S27)) * _MIX_2
    return values ^ (values >> _S31)


@lru_cache(maxsize=1024)
def _round_keys(key: str) -> tuple[int, ...]:
    digest = hashlib.sha512(f"raysvc order 1: {key}".encode()).digest()
    return tuple(int.from_bytes(digest[8 * i : 8 * i + 8], "little") for i in range(_ROUNDS))


@lru_cache(maxsize=256)
def _table(size: int, keys: tuple[int, ...]) -> Int64s:
    """int64 [size], a uniform permutation: the indices sorted by their keyed hashes."""
    hashes = _mix(_mix(np.arange(size, dtype=np.uint64) + np.uint64(keys[0])) ^ np.uint64(keys[1]))
    return np.argsort(hashes, kind="stable").astype(np.int64)
