"""What a server of rollouts keeps of groups that were trained and forgotten: their names, and nothing else."""

from __future__ import annotations

import gc
import os
import tracemalloc
from pathlib import Path

import pytest

from .test_server_parts import groups_table, rollout_stream

PUT = 20
MOST_BYTES = 60  # of a forgotten group; a digest of its name takes 16


def test_a_forgotten_group_costs_its_name_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "fsync", lambda handle: None)
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
            stream.forget_below(step)

    live(0, 1000)
    gc.collect()
    tracemalloc.start()
    try:
        before, _ = tracemalloc.get_traced_memory()
        live(1000, 4000)
        gc.collect()
        after, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert (after - before) / 3000 < MOST_BYTES
