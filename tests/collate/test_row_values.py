"""Numbers of rows into shards and back, in every layout."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from raysvc.collate.row_values import RowValues, gather_rows, in_order, with_columns
from raysvc.errors import ConfigError
from raysvc.job.config import PlanConfig

SHAPES = [
    {"layout": "padded_right", "micro_batch_size": 2},
    {"layout": "padded_left", "micro_batch_tokens": 90, "pad_to_multiple": 8},
    {"layout": "packed", "micro_batch_tokens": 64},
    {"layout": "packed", "micro_batch_tokens": 64, "align": 8},
]
LENGTHS = st.lists(st.integers(1, 40), min_size=1, max_size=20)


def values_of(data, mini) -> RowValues:
    """A number for each token of the mini-batch's rows, and one for each row."""
    lengths = mini.lengths.astype(np.int64)
    total = int(lengths.sum())
    return RowValues(
        mini.row_ids,
        lengths,
        {"score": np.arange(1, total + 1).astype(np.float32)},
        {"reward": mini.row_ids * 2.0},
    )


@settings(max_examples=80, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(LENGTHS, st.sampled_from([1, 2, 3]), st.sampled_from(SHAPES), st.randoms(use_true_random=False))
def test_what_goes_into_shards_comes_out_at_the_same_tokens(
    make_data, make_shards, lengths, dp_size, shape, random
):
    data = make_data(lengths)
    config = PlanConfig(**{"oversize": "alone", "batch_size": 9, **shape})
    for mini, shards in make_shards(data, config, dp_size):
        given_values = values_of(data, mini)
        index = list(range(len(mini.row_ids)))
        random.shuffle(index)
        filled = [with_columns(shard, given_values.pick(np.array(index))) for shard in shards]
        for shard in filled:
            empty = shard.arrays["attention_mask"] == 0
            assert (shard.arrays["score"][empty] == 0).all()
        parts = [gather_rows(shard, {"score": shard.arrays["score"]}) for shard in filled]
        back = in_order(parts, mini.row_ids)
        assert back.row_ids.tolist() == mini.row_ids.tolist()
        assert back.tokens["score"].tolist() == given_values.tokens["score"].tolist()
        assert back.row(0, "score").tolist() == given_values.row(0, "score").tolist()


def test_picked_rows_keep_their_tokens_and_numbers():
    values = RowValues(
        np.array([7, 3, 5]), np.array([2, 0, 3]), {"a": np.arange(5)}, {"r": np.array([0.5, 1.5, 2.5])}
    )
    picked = values.pick(np.array([2, 0, 1]))
    assert picked.row_ids.tolist() == [5, 7, 3]
    assert picked.tokens["a"].tolist() == [2, 3, 4, 0, 1]
    assert picked.rows["r"].tolist() == [2.5, 0.5, 1.5]
    renamed = values.renamed(b="a")
    assert list(renamed.tokens) == ["b"]
    assert not renamed.rows


def test_a_row_without_values_is_refused_by_its_number(make_data, make_shards):
    data = make_data([4, 6])
    [(mini, [shard])] = make_shards(data, PlanConfig(batch_size=2), 1)
    values = values_of(data, mini)
    with pytest.raises(ConfigError, match=rf"rows \[{int(mini.row_ids[1])}\] are missing"):
        with_columns(shard, values.pick(np.array([0])))
    with pytest.raises(ConfigError, match=r"are missing"):
        with_columns(shard, values.pick(np.array([], np.int64)))


def test_a_row_of_another_length_is_refused_by_its_number(make_data, make_shards):
    data = make_data([4, 6])
    [(mini, [shard])] = make_shards(data, PlanConfig(batch_size=2), 1)
    values = values_of(data, mini)
    longer = RowValues(values.row_ids, values.lengths + np.array([0, 1]), {"score": np.zeros(11)})
    with pytest.raises(ConfigError, match=f"row {int(values.row_ids[1])} has another length"):
        with_columns(shard, longer)
