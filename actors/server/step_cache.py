"""Steps that several callers ask for are made once and kept for a while, up to a number of bytes.

Always true:
- callers that ask for one key at the same time wait for one making;
- a failure goes to everybody who waited for it, and is not kept: who asks again makes again;
- what is kept is at most `max_bytes`, but for one step and for steps that are pinned; what fell out is made again, with
  the same bytes, and a log line says why when one of its readers had not taken it yet;
- a step that its number of readers have taken is let go.

What peers of a mesh share of a step is put into Ray's store once, so that it goes over the network once a node:
- peers that take the same arrays get one ref, whenever they come while the step is kept;
- a ref lives as long as the step is kept, and then as long as a peer has it;
- of each node one peer is told that it is the first.
"""

from __future__ import annotations

import logging
import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, Generic, NamedTuple, TypeVar
from weakref import WeakKeyDictionary

from raysvc.collate.shard import CutWire, Shard

log = logging.getLogger(__name__)
RAY_SENDS_ALONG = 100 << 10  # a smaller answer goes with the call itself, and a ref would cost another
T = TypeVar("T")
Columns = tuple[str, ...] | None


@dataclass
class _CachedStep(Generic[T]):
    readers: int | None
    pinned: bool
    future: Future[T] = field(default_factory=Future)
    nbytes: int = 0
    taken: int = 0


class SharedSteps(Generic[T]):
    """Made values by key.

    Args:
        max_bytes: of all that is kept.
    """

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._lock = threading.Lock()
        self._kept: OrderedDict[Hashable, _CachedStep[T]] = (
            OrderedDict()
        )  # guarded by _lock; oldest use first
        self._fell_out = 0  # guarded by _lock; before all readers had taken it
        self.made = 0  # guarded by _lock; how often `make` was called

    def get(
        self,
        key: Hashable,
        readers: int | None,
        make: Callable[[], T],
        size: Callable[[T], int],
        pinned: bool = False,
    ) -> T:
        """The value of a key, made by the first who asks.

        Args:
            readers: let go after so many have taken it; None: only when there is no room.
            make: called outside the lock, by one caller at a time per key.
            size: bytes of a value.
            pinned: keep it until all readers have taken it, whatever its size.
        """
        with self._lock:
            kept = self._kept.get(key)
            mine = kept is None
            if kept is None:
                kept = self._kept[key] = _CachedStep(readers, pinned)
                self.made += 1
            self._kept.move_to_end(key)
        if mine:
            self._fill(key, kept, make, size)
        value = kept.future.result()
        with self._lock:
            kept.taken += 1
            if readers is not None and kept.taken >= readers and self._kept.get(key) is kept:
                del self._kept[key]
        return value

    def clear(self, unless: Callable[[Hashable], bool] = lambda key: False) -> None:
        """Let go of what is made already, but for the keys of which `unless` is true."""
        with self._lock:
            for key in [key for key, kept in self._kept.items() if kept.future.done() and not unless(key)]:
                del self._kept[key]

    @property
    def nbytes(self) -> int:
        """Bytes that are kept."""
        with self._lock:
            return sum(kept.nbytes for kept in self._kept.values())

    def _fill(
        self, key: Hashable, kept: _CachedStep[T], make: Callable[[], T], size: Callable[[T], int]
    ) -> None:
        try:
            value = make()
        except BaseException as error:  # noqa: BLE001 - handed to everybody who waits
            with self._lock:
                self._kept.pop(key, None)
            kept.future.set_exception(error)
            return
        with self._lock:
            kept.nbytes = size(value)
            self._make_room(key)
        kept.future.set_result(value)

    def _make_room(self, newest: Hashable) -> None:
        total = sum(kept.nbytes for kept in self._kept.values())
        for key, kept in list(self._kept.items()):
            if total <= self._max_bytes:
                return
            if kept.pinned or key == newest or not kept.future.done():
                continue
            total -= self._kept.pop(key).nbytes
            if kept.readers is not None:
                self._say_it_fell_out(key, kept.taken, kept.readers)

    def _say_it_fell_out(self, key: Hashable, taken: int, readers: int) -> None:
        """Logs at the 1st, 2nd, 4th, 8th, ... time."""
        self._fell_out += 1
        if self._fell_out & (self._fell_out - 1) == 0:
            log.warning(
                "no room for step=%s taken_by=%d of=%d share_bytes=%d so_far=%d: it is collated again for the others",
                key, taken, readers, self._max_bytes, self._fell_out,
            )  # fmt: skip


class _Put:
    def __init__(self) -> None:
        self.lock = threading.Lock()  # guards what follows
        self.ref: Any = None
        self.nodes: set[str] = set()


class PeerRef(NamedTuple):
    """What peers take of a step, and whether nobody on the node took it before."""

    ref: Any
    first: bool


class PeerRefs:
    """Refs of what is kept of steps."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._puts: WeakKeyDictionary[Shard, dict[Columns, _Put]] = WeakKeyDictionary()  # guarded by _lock

    def __len__(self) -> int:
        """Returns of how many steps and ranks there are refs."""
        return len(self._puts)

    def get(self, shard: Shard, columns: Columns, node: str, make: Callable[[], list[CutWire]]) -> PeerRef:
        """The ref of what `make` gives; who asks at the same time waits for one making.

        Args:
            shard: of the first mini-batch, as it is kept.
            columns: that the peer takes.
            node: of the peer.
        """
        import ray

        with self._lock:
            put = self._puts.setdefault(shard, {}).setdefault(columns, _Put())
        with put.lock:
            if put.ref is None:
                put.ref = ray.put(make())
            first = node not in put.nodes
            put.nodes.add(node)
            return PeerRef(put.ref, first)
