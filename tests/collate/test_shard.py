"""Micro-batches are views; how a shard travels is in test_wire.py."""

import pickle

import numpy as np
import pytest

from raysvc.collate.info import info_of
from raysvc.job.config import PlanConfig

SHAPES = [{}, {"layout": "padded_left"}, {"layout": "packed", "micro_batch_tokens": 64}]


@pytest.fixture(params=SHAPES, ids=lambda shape: shape.get("layout", "padded_right"))
def batch(request, make_data, make_shards):
    data = make_data(np.random.default_rng(0).integers(3, 60, 41))
    config = PlanConfig(batch_size=41, **request.param)
    [(mini, shards)] = make_shards(data, config, 3)
    return mini, shards


def test_micro_batches_are_views_that_cover_every_line_once(batch):
    for shard in batch[1]:
        lines = []
        for number, micro in enumerate(shard.micro_batches):
            for name, view in shard.micro(number).items():
                assert view.base is not None
                assert not view.size or np.shares_memory(view, shard.arrays[name])
            lines += range(micro.start, micro.stop)
        assert lines == list(range(len(shard.arrays["input_ids"])))


def test_columns_of_a_shard_lie_in_blocks_of_their_own(batch):
    for shard in batch[1]:
        for array in shard.arrays.values():
            assert array.flags.c_contiguous


def test_info_says_what_a_driver_may_know_and_stays_small(batch):
    mini, shards = batch
    info = info_of(mini, shards)
    assert info.row_ids.tolist() == mini.row_ids.tolist()
    assert info.lengths.tolist() == mini.lengths.tolist()
    assert info.denominators == shards[0].denominators
    assert info.num_dummies == sum(int((shard.row_ids < 0).sum()) for shard in shards)
    assert sum(info.rank_tokens) == int(mini.lengths.sum()) + 2 * info.num_dummies
    assert info.nbytes == sum(info.rank_bytes) == sum(shard.nbytes for shard in shards)
    computed = sum(
        int(shard.micro(k)["input_ids"].size) for shard in shards for k in range(len(shard.micro_batches))
    )
    assert info.num_cells == computed
    assert info.pad_share == pytest.approx(1 - int(mini.lengths.sum()) / computed)
    assert len(pickle.dumps(info)) < 2000
