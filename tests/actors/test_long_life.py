"""What a server keeps of a long life: of steps, attaches and detaches nothing, of a forgotten group a digest of its name."""

from __future__ import annotations

import gc
import os
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from raysvc.actors.server.batch_server import BatchServer
from raysvc.actors.server.spec import Role, ServeSpec
from raysvc.job.config import PlanConfig

from .test_server_parts import groups_table, rollout_stream

PUT = 20
MOST_OBJECTS = 0.8  # of a forgotten group: a name takes 3, a digest that is not packed yet 1


@pytest.fixture(autouse=True)
def quick_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "fsync", lambda handle: None)


def test_a_forgotten_group_costs_a_digest_of_its_name(tmp_path: Path) -> None:
    stream, step = rollout_stream(str(tmp_path)), 0

    def live(first: int, stop: int) -> None:
        nonlocal step
        for number in range(first, stop, PUT):
            stream.put(groups_table(list(range(number, number + PUT))))
            for _ in range(PUT // 2):
                assert stream.form(step, step)
                step += 1
            stream.store.let_go_below(step)
            stream.store.set_version(step, step)
            stream.delete_before(step)

    assert _objects_of_each(live, 1000, 5000) < MOST_OBJECTS


def test_a_step_that_was_trained_costs_nothing_nor_does_an_attach(
    tmp_path: Path, entry: Callable[..., str]
) -> None:
    plan = PlanConfig(batch_size=2, epochs=1000, shuffle="none")  # the orders of 1,024 epochs are remembered
    spec = ServeSpec(
        name="s", sources=[entry(8)], plan=plan, pad_token_id=0, journal=str(tmp_path / "journal")
    )
    server = BatchServer(spec.model_dump_json(), "first")

    fence = server.attach("me").fence

    def train(first: int, stop: int) -> None:
        for step in range(first, stop):
            server.sizes(step, step + 2, (Role(1),))
            server.fetch(fence, step, (Role(1),))
            server.commit(fence, step)

    def come_and_go(first: int, stop: int) -> None:
        for _ in range(first, stop):
            server.detach(server.attach("me", takeover=True).fence)

    try:
        assert _objects_of_each(train, 400, 900) < 2, "a size that is remembered takes 20"
        assert _objects_of_each(come_and_go, 100, 400) < 2
    finally:
        server._orphans._ended.set()


def _objects_of_each(live: Callable[[int, int], None], first: int, stop: int) -> float:
    """Blocks of Python's memory that are left of each, from the `first` on; an object takes one or two."""
    live(0, first)
    gc.collect()
    before = sys.getallocatedblocks()
    live(first, stop)
    gc.collect()
    return (sys.getallocatedblocks() - before) / (stop - first)
