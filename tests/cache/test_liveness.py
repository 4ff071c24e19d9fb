"""Random histories of builds, readers, crashes and gc over one root.

The clock is the test's own: listings tell its time, so that days pass in microseconds. While gc runs, another
action happens between two of its calls to the store.
"""

from __future__ import annotations

import contextlib
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from raysvc.cache import names
from raysvc.cache.find import collect_garbage, find_entry
from raysvc.cache.generations import build_generation
from raysvc.cache.key import ADDED, cache_key
from raysvc.cache.manifest import Receipt
from raysvc.cache.store.open import open_store
from raysvc.cache.store.store import Found, Store
from raysvc.cache.use_marker import USE_TTL_S, Hold, share
from raysvc.cache.verify import verify_folder
from raysvc.cache.writer import EntryWriter
from raysvc.errors import EntryError

from .helpers import make_slices

DAYS = 30 * 86400.0
GRACE_S = 2 * 3600.0
SLICES = make_slices((2, 3))
RECIPES = [{"name": name} for name in "ab"]
LENGTHS = np.concatenate([np.diff(one.column("input_ids").combine_chunks().offsets) for one in SLICES])
OFFSETS = pa.array(np.concatenate([[0], np.cumsum(LENGTHS)]), pa.int32())
COLUMN = pa.table({"ref": pa.ListArray.from_arrays(OFFSETS, pa.array(np.zeros(LENGTHS.sum(), np.float32)))})


@dataclass
class Clocked:
    """A store with a clock of its own, which calls `between` before each operation."""

    inner: Store
    now_s: float = 1e9
    times: dict[str, float] = field(default_factory=dict)
    between: Callable[[], None] = lambda: None

    @property
    def url(self) -> str:
        return self.inner.url

    def scan(self, folder: str = "", few_of: tuple[str, ...] = ()) -> Sequence[Found]:
        self.between()
        prefix = f"{folder}/" if folder else ""
        return [
            Found(i.name, i.size, self.times.get(prefix + i.name, 0.0), i.is_folder)
            for i in self.inner.scan(folder, few_of)
        ]

    def list(self, folder: str = "") -> Sequence[str]:
        self.between()
        return self.inner.list(folder)

    def read(self, name: str, start: int | None = None, end: int | None = None) -> bytes:
        return self.inner.read(name, start, end)

    def download(self, name: str, target: BinaryIO) -> None:
        self.inner.download(name, target)

    def write(self, name: str, data: bytes | memoryview) -> None:
        self.between()
        self.times[name] = self.now_s
        self.inner.write(name, data)

    def create(self, name: str, data: bytes) -> bool:
        self.between()
        made = self.inner.create(name, data)
        if made:
            self.times[name] = self.now_s
        return made

    def delete(self, name: str) -> None:
        self.between()
        self.inner.delete(name)

    def local_path(self, name: str) -> Path | None:
        return None

    def probe(self) -> None:
        self.inner.probe()


@dataclass
class Builder:
    """A build in progress, held."""

    writer: EntryWriter
    hold: Hold
    recipe: dict[str, Any]
    receipts: list[Receipt] = field(default_factory=list)
    base: str = ""  # folder of the entry that it adds a column to
    base_hold: Hold | None = None


class World:
    """What lives, and what must be true of it."""

    def __init__(self, store: Store) -> None:
        self.store = Clocked(store)
        self.readers: list[tuple[str, Hold]] = []  # folder, hold
        self.builders: list[Builder] = []
        self.used_s: dict[str, float] = {}  # folder -> last use

    def begin(self, which: int) -> None:
        recipe = RECIPES[which]
        key = cache_key(recipe)
        writer = EntryWriter(self.store, key, build_generation(self.store, key))
        with contextlib.suppress(EntryError):  # gc was faster
            self.builders.append(Builder(writer, Hold(self.store, writer.folder, "builder"), recipe))

    def go_on(self, which: int) -> None:
        if not self.builders:
            return
        builder = self.builders[which % len(self.builders)]
        if builder.base and not builder.receipts:
            builder.receipts.append(builder.writer.write_part(0, COLUMN, {}, required={}))
            return
        if not builder.base and len(builder.receipts) < len(SLICES):
            index = len(builder.receipts)
            builder.receipts.append(builder.writer.write_part(index, SLICES[index], {}))
            return
        builder.writer.commit(builder.receipts, builder.recipe, {}, base=builder.base)
        self.builders.remove(builder)
        builder.hold.release()
        if builder.base_hold is not None:
            builder.base_hold.release()
            self.used_s[builder.base] = self.store.now_s
        self.used_s[builder.writer.folder] = self.store.now_s

    def build(self, which: int) -> None:
        """A whole build."""
        self.begin(which)
        for _ in range(len(SLICES) + 1):
            self.go_on(-1)

    def begin_adding(self, which: int) -> None:
        """A build of a column for an entry, if that is there; the base is held and shared before anything is written."""
        base = find_entry(self.store, cache_key(RECIPES[which]))
        if base is None:
            return
        self.used_s[base.folder] = self.store.now_s
        recipe = added_to(which)
        writer = EntryWriter(self.store, cache_key(recipe), build_generation(self.store, cache_key(recipe)))
        with contextlib.suppress(EntryError):  # gc was faster
            base_hold = Hold(self.store, base.folder, "builder")
            hold = Hold(self.store, writer.folder, "builder")
            share(self.store, base.folder, writer.folder)
            self.builders.append(Builder(writer, hold, recipe, [], base.folder, base_hold))

    def add(self, which: int) -> None:
        """A whole build of a column."""
        before = len(self.builders)
        self.begin_adding(which)
        for _ in range(2 if len(self.builders) > before else 0):
            self.go_on(-1)

    def open_added(self, which: int) -> None:
        self._open(cache_key(added_to(which)))

    def open(self, which: int) -> None:
        self._open(cache_key(RECIPES[which]))

    def _open(self, key: str) -> None:
        entry = find_entry(self.store, key)
        if entry is None:
            return
        self.used_s[entry.folder] = self.store.now_s
        with contextlib.suppress(EntryError):
            self.readers.append((entry.folder, entry.hold("reader")))

    def close(self, which: int) -> None:
        if self.readers:
            folder, hold = self.readers.pop(which % len(self.readers))
            hold.release()
            self.used_s[folder] = self.store.now_s

    def crash(self, which: int) -> None:
        """The process is gone: nobody renews, nobody releases."""
        everybody: list[Any] = [*self.readers, *self.builders]
        if everybody:
            victim = everybody[which % len(everybody)]
            (self.readers if isinstance(victim, tuple) else self.builders).remove(victim)
            holds = [victim[1]] if isinstance(victim, tuple) else [victim.hold, victim.base_hold]
            for hold in filter(None, holds):
                hold._dropped.detach()  # what a killed process would not run

    def wait(self, hours: int) -> None:
        """Time passes; the living have renewed in time."""
        self.store.now_s += hours * 3600.0
        builders = [hold for one in self.builders for hold in (one.hold, one.base_hold) if hold is not None]
        for hold in [*(hold for _, hold in self.readers), *builders]:
            hold.renew()

    def collect(self, grace_s: float, at: int, other: Callable[[], None]) -> None:
        """gc, with another action between its calls number `at` and `at + 1`."""
        calls = iter(range(1 << 30))

        def between() -> None:
            if next(calls) == at:
                self.store.between = lambda: None
                other()

        idle = {f: self.store.now_s - used for f, used in self.used_s.items()}
        self.store.between = between
        try:
            removals = collect_garbage(self.store, older_than_s=DAYS, grace_s=grace_s)
        finally:
            self.store.between = lambda: None
        for one in removals:
            if one.action == "marked":
                assert idle.get(one.folder, DAYS) >= DAYS or "replaces" in one.reason, one

    def check(self) -> None:
        """Whoever holds, has it whole."""
        for folder, _ in self.readers:
            assert verify_folder(self.store.inner, folder) == []
        for builder in self.builders:
            there = set(self.store.inner.list(builder.writer.folder))
            assert {one.part.name for one in builder.receipts} <= there
            if builder.base:
                assert verify_folder(self.store.inner, builder.base) == []


def added_to(which: int) -> dict[str, Any]:
    return {**RECIPES[which], ADDED: [{"to": cache_key(RECIPES[which]), "columns": {"ref": {}}}]}


ACTIONS = ("build", "begin", "begin_adding", "add", "go_on", "go_on", "open", "open_added", "close", "crash")
NAMED = ("begin", "build", "open", "begin_adding", "add", "open_added")  # of an entry, not of a process
action = st.tuples(st.sampled_from(ACTIONS), st.integers(0, 3))
step = st.one_of(
    action,
    action,
    st.tuples(st.just("wait"), st.sampled_from([1, 3, 31 * 24])),
    st.tuples(st.just("gc"), st.tuples(st.sampled_from([0.0, GRACE_S]), st.integers(0, 15), action)),
)


def run_history(world: World, history: list[tuple[str, Any]]) -> None:
    def act(name: str, number: int) -> None:
        getattr(world, name)(number % 2 if name in NAMED else number)

    for name, argument in history:
        if name == "wait":
            world.wait(argument)
        elif name == "gc":
            grace_s, at, (other, number) = argument
            world.collect(grace_s, at, lambda other=other, number=number: act(other, number))
        else:
            act(name, argument)
        world.check()
    nobody_left(world)


def nobody_left(world: World) -> None:
    """When all have gone, by release or by crash, everything goes."""
    for number in range(len(world.readers) + len(world.builders)):
        world.crash(number)
    for _ in range(5):  # a base goes after what shares it
        world.store.now_s += DAYS + USE_TTL_S
        collect_garbage(world.store, older_than_s=DAYS, grace_s=GRACE_S)
    assert [name for name in world.store.inner.list() if names.split_folder(name)] == []


@pytest.mark.slow
@given(st.lists(step, max_size=25))
@settings(max_examples=30, suppress_health_check=[HealthCheck.too_slow])
def test_what_is_used_stays_and_what_nobody_uses_goes(tmp_path_factory, history):
    run_history(World(open_store(str(tmp_path_factory.mktemp("root")))), history)


@pytest.mark.parametrize("grace_s", [0.0, GRACE_S])
@pytest.mark.parametrize("other", ["open", "build", "begin", "begin_adding", "add"])
def test_a_use_at_any_moment_of_gc_is_respected(tmp_path, other, grace_s):
    """Every place between two calls of gc, for an entry and for a build that are due."""
    for at in range(30):
        world = World(open_store(str(tmp_path / str(at))))
        world.build(0)
        world.begin(1)
        world.go_on(0)
        world.crash(0)
        world.wait(31 * 24)
        for which in (0, 1):
            world.collect(grace_s, at, lambda which=which, world=world: getattr(world, other)(which))
            world.check()
        world.wait(3)
        world.collect(grace_s, 99, lambda: None)
        world.check()


@pytest.mark.slow
@given(st.lists(step, max_size=12))
@settings(max_examples=8, suppress_health_check=list(HealthCheck))
def test_the_same_on_s3(s3, history):
    run_history(World(s3.store(f"live-{uuid.uuid4().hex}-")), history)
