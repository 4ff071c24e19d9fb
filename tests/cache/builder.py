"""Builders in processes of their own: killed at a given point, or racing each other.

One process imports everything once and forks a child per builder, so that a hundred builders take seconds.

    python builder.py kill  '<json options>'    killed at point 0, 1, 2, ...; each in the root <root>/<point>
    python builder.py preempt '<json options>'  killed again and again in one root
    python builder.py race  '<json options>'    several at once in one root, with random delays
"""

from __future__ import annotations

import importlib.util
import json
import os
import random
import signal
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import s3fs

from raysvc.cache import manifest
from raysvc.cache.store.fsspec_store import FsspecStore
from raysvc.cache.store.open import open_store
from raysvc.cache.store.posix import PosixStore
from raysvc.cache.store.store import buffers_of

_spec = importlib.util.spec_from_file_location("helpers", Path(__file__).with_name("helpers.py"))
helpers = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(helpers)


IMPORTED_ONCE = s3fs  # the children find it ready


def no_point(name: str) -> None:
    """Go on."""


@dataclass(frozen=True)
class WatchedPosix(PosixStore):
    """Calls `point` before and after every system call that another process could see."""

    point: Callable[[str], None] = field(default=no_point, compare=False)

    def _stage(self, staged: str, data: Any) -> None:
        self.point("before staging")
        whole = b"".join(buffers_of(data))
        Path(staged).write_bytes(whole[: len(whole) // 2])
        self.point("half staged")
        Path(staged).unlink()
        super()._stage(staged, data)
        self.point("staged")

    def _publish(self, staged: str, path: str) -> bool:
        won = super()._publish(staged, path)
        self.point("published")
        return won

    def _unstage(self, staged: str) -> None:
        super()._unstage(staged)
        self.point("unstaged")


@dataclass(frozen=True)
class WatchedRemote(FsspecStore):
    """Calls `point` before and after every request that changes the store."""

    point: Callable[[str], None] = field(default=no_point, compare=False)

    def write(self, name: str, data: Any) -> None:
        self.point("before write")
        super().write(name, data)
        self.point("written")

    def create(self, name: str, data: bytes) -> bool:
        self.point("before create")
        won = super().create(name, data)
        self.point("created")
        return won


def store_at(root: str, options: dict[str, Any], point: Callable[[str], None]) -> PosixStore | FsspecStore:
    """A watched store."""
    return WatchedRemote(root, options, point=point) if "://" in root else WatchedPosix(root, point=point)


def killer(at: int) -> Callable[[str], None]:
    """Kill this process when it comes to the point with this number."""
    seen = iter(range(1 << 30))

    def point(name: str) -> None:
        if next(seen) == at:
            os.kill(os.getpid(), signal.SIGKILL)

    return point


def delayer(seed: int) -> Callable[[str], None]:
    """Sleep for a few random milliseconds at every point."""
    rng = random.Random(seed)
    return lambda name: time.sleep(rng.random() ** 3 * 0.01)


def in_child(action: Callable[[], None]) -> int:
    """Run something in a forked child; its process id."""
    pid = os.fork()
    if pid:
        return pid
    try:
        action()
    except BaseException:  # noqa: BLE001  the child must not go on as its parent
        traceback.print_exc()
        os._exit(1)
    os._exit(0)


def kill_everywhere(root: str, sizes: list[int], options: dict[str, Any], most_inline: int = 1 << 20) -> int:
    """Builders killed at point 0, 1, 2, ... until one lives to its end; the number of those killed."""
    manifest.MOST_INLINE = most_inline
    for point in range(1000):
        here = f"{root}/{point}"

        def one_build(at: int = point, here: str = here) -> None:
            helpers.build(store_at(here, options, killer(at)), helpers.make_slices(tuple(sizes)))

        if os.waitpid(in_child(one_build), 0)[1] != signal.SIGKILL:
            return point
    raise RuntimeError("a builder has no end")


def preempt(root: str, sizes: list[int], options: dict[str, Any], every: int) -> int:
    """One entry built by builders that each live for `every` points; how many it took."""
    for attempt in range(1000):

        def one_build() -> None:
            helpers.build(store_at(root, options, killer(every)), helpers.make_slices(tuple(sizes)))

        if os.waitpid(in_child(one_build), 0)[1] == 0:
            return attempt + 1
    raise RuntimeError("it does not converge")


def race(
    root: str, sizes: list[int], options: dict[str, Any], builders: int, seed: int, out: str
) -> list[int]:
    """Exit status of builders that start at the same moment; each leaves the manifest it was given in `out`."""
    ready, go = os.pipe()

    def one_build(index: int) -> None:
        os.close(go)
        os.read(ready, 1)
        store = store_at(root, options, delayer(seed * 100 + index))
        manifest = helpers.build(store, helpers.make_slices(tuple(sizes)))
        Path(out, str(index)).write_bytes(manifest.to_json())

    children = [in_child(lambda index=index: one_build(index)) for index in range(builders)]
    os.close(go)
    return [os.waitpid(pid, 0)[1] for pid in children]


if __name__ == "__main__":
    helpers.build(open_store("memory://warm"))  # what is imported and made at first use, the children have
    action = {"kill": kill_everywhere, "preempt": preempt, "race": race}[sys.argv[1]]
    print(json.dumps(action(**json.loads(sys.argv[2]))))
