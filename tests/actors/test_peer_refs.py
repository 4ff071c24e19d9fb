"""What peers share of a step is put into Ray's store once, for as long as the step is kept."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest

from raysvc.actors.server.step_cache import PeerRefs
from raysvc.collate.shard import Denominators, MicroBatchInfo, Shard

pytestmark = pytest.mark.ray


def shard() -> Shard:
    arrays = {"input_ids": np.zeros((1, 2), np.int32)}
    micros = (MicroBatchInfo(0, 1, 2, 2),)
    return Shard(0, 0, 0, "padded", arrays, np.zeros(1, np.int64), Denominators(1, 1, 1), micros)


def test_peers_that_take_the_same_get_one_ref_and_one_of_each_node_is_the_first(ray_session: None) -> None:
    import ray

    refs, kept, made = PeerRefs(), shard(), []

    def make() -> Any:
        made.append(len(made))
        return [len(made)]

    def get(columns: Any, node: str) -> tuple[Any, bool]:
        found = refs.get(kept, columns, node, make)
        return found.ref, found.first

    one, first = get(None, "a")
    assert first
    assert [get(None, node) for node in "aba"] == [(one, False), (one, True), (one, False)]
    labels, first = get(("labels",), "a")
    assert (first, labels != one, len(made)) == (True, True, 2)
    assert ray.get([one, labels]) == [[1], [2]]


def test_peers_that_come_at_the_same_time_wait_for_one_making(ray_session: None) -> None:
    refs, kept, go, made = PeerRefs(), shard(), threading.Event(), []

    def make() -> Any:
        made.append(go.wait(60))
        return made

    with ThreadPoolExecutor(8) as pool:
        asked = [pool.submit(refs.get, kept, None, "a", make) for _ in range(8)]
        go.set()
        found = [one.result() for one in asked]
    assert made == [True]
    assert {one.ref for one in found} == {found[0].ref}
    assert sum(one.first for one in found) == 1


def test_a_ref_goes_with_its_step(ray_session: None) -> None:
    refs, kept = PeerRefs(), shard()
    refs.get(kept, None, "a", list)
    assert len(refs) == 1
    del kept
    assert len(refs) == 0
