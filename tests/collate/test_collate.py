"""Arrays of every layout against a collator that goes token by token."""

import gc
import sys
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from raysvc.collate.collate import CollateSpec, collate_mini_batch
from raysvc.collate.columns import SEVERAL_ROWS
from raysvc.errors import ConfigError
from raysvc.job.config import PlanConfig
from raysvc.plan.plan import Plan

COLUMNS = (
    "input_ids", "attention_mask", "position_ids", "loss_mask", "labels", "advantages", "router", "reward", "source_row",
)  # fmt: skip
PADS = {"advantages": -1.5, "router": 7, "reward": 0.25, "source_row": -1}
PAD_TOKEN = 1
SHAPES = [
    {"layout": "padded_right"},
    {"layout": "padded_left"},
    {"layout": "padded_right", "micro_batch_size": 2, "pad_to_multiple": 8},
    {"layout": "padded_left", "micro_batch_tokens": 90},
    {"layout": "padded_right", "micro_batch_tokens": 20, "oversize": "truncate"},
    {"layout": "packed", "micro_batch_tokens": 64},
    {"layout": "packed", "micro_batch_tokens": 64, "align": 8, "pad_to_multiple": 16},
    {"layout": "packed", "micro_batch_tokens": 12, "oversize": "truncate"},
    {"layout": "packed", "micro_batch_tokens": 16, "oversize": "alone", "align": 4},
    {"layout": "stream", "window": 16, "micro_batch_size": 2},
    {"layout": "stream", "window": 7, "micro_batch_size": 3, "pad_to_multiple": 4},
]


def naive(data, config, mini, rank, width_of_line):
    """Every 2-D array of one rank, cell by cell."""
    plan = mini.ranks[rank]
    lines = []
    for line in range(len(plan.lines) - 1):
        cells = []
        for number, row in enumerate(plan.rows[plan.lines[line] : plan.lines[line + 1]].tolist()):
            cells += sequence(data, config, mini, row, number, len(cells))
        empty = (PAD_TOKEN, 0, 0, 0, -100, PADS["advantages"], PADS["router"], 0)
        gap = [empty] * (width_of_line - len(cells))
        lines.append(gap + cells if config.layout == "padded_left" else cells + gap)
    names = (*COLUMNS[:7], "segment_ids")
    return {name: np.array([[cell[k] for cell in line] for line in lines]) for k, name in enumerate(names)}


def sequence(data, config, mini, row, number, column):
    if row < 0:
        dummy = (PAD_TOKEN, 1, 0, 0, -100, PADS["advantages"], PADS["router"], 1)
        cells = [dummy, (*dummy[:2], 1, *dummy[3:])]
    else:
        at = data.offsets[mini.row_ids[row]] + mini.starts[row]
        cells = []
        for k in range(mini.lengths[row]):
            place = column + k if config.layout == "stream" else k
            target = data.tokens["loss_mask"][at + k] and place > 0
            token = data.tokens["input_ids"][at + k]
            extra = data.tokens["advantages"][at + k], data.tokens["router"][at + k]
            cells.append((token, 1, place, int(target), token if target else -100, *extra, number + 1))
    align = config.align if config.layout == "packed" else 1
    empty = (PAD_TOKEN, 0, 0, 0, -100, PADS["advantages"], PADS["router"], 0)
    return cells + [empty] * (-len(cells) % align)


LENGTHS = st.lists(st.integers(0, 40), min_size=1, max_size=25).filter(any)


@settings(max_examples=250, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(LENGTHS, st.sampled_from([1, 2, 3, 5, 8]), st.sampled_from(SHAPES), st.integers(0, 3))
def test_every_cell_is_what_the_slow_collator_says(make_data, make_shards, lengths, dp_size, shape, seed):
    data = make_data(lengths, seed)
    base = {"oversize": "alone", "batch_size": 11, "mini_batch_size": 6, "seed": seed, "columns": COLUMNS}
    config = PlanConfig(**{**base, **shape})
    for mini, shards in make_shards(data, config, dp_size, pad_token_id=PAD_TOKEN, pad_values=PADS):
        assert len(shards) == dp_size
        for rank, shard in enumerate(shards):
            check_shard(data, config, mini, rank, shard)
        check_counts(data, config, mini, shards)


@pytest.mark.parametrize("layout", ["padded_right", "padded_left"])
def test_a_costlier_micro_batch_of_shorter_rows_may_come_before_a_wider_one(make_data, make_shards, layout):
    data = make_data([40, 40, 30, 30, 30])
    config = PlanConfig(layout=layout, micro_batch_tokens=90, batch_size=5, columns=COLUMNS)
    [(mini, [shard])] = make_shards(data, config, 1, pad_token_id=PAD_TOKEN, pad_values=PADS)
    assert [micro.width for micro in shard.micro_batches] == [30, 40]
    check_shard(data, config, mini, 0, shard)


def check_shard(data, config, mini, rank, shard):
    arrays, plan = shard.arrays, mini.ranks[rank]
    want = naive(data, config, mini, rank, arrays["input_ids"].shape[1])
    for name in (*COLUMNS[:7], *(["segment_ids"] if config.layout in ("packed", "stream") else [])):
        assert arrays[name].ndim == 2
        assert np.array_equal(arrays[name], want[name]), name
    assert {arrays[name].dtype for name in ("input_ids", "labels", "position_ids")} == {np.dtype(np.int32)}
    assert arrays["attention_mask"].dtype == arrays["loss_mask"].dtype == np.uint8
    assert arrays["router"].dtype == np.uint16
    assert np.array_equal(arrays["labels"] != -100, arrays["loss_mask"] == 1)
    for name in ("reward", "source_row"):
        values = np.append(data.rows[name][mini.row_ids], np.array(PADS[name], data.rows[name].dtype))
        assert np.array_equal(arrays[name], values[plan.rows])
    assert np.array_equal(shard.row_ids, np.append(mini.row_ids, -1)[plan.rows])
    assert shard.arrays["seq_lengths"].tolist() == [mini.lengths[r] if r >= 0 else 2 for r in plan.rows]


def check_counts(data, config, mini, shards):
    denominators = shards[0].denominators
    labels = np.concatenate([(shard.arrays["labels"] != -100).sum(axis=1) for shard in shards])
    assert denominators.tokens == labels.sum()
    assert denominators.groups == mini.num_groups
    assert denominators.rows == (mini.num_groups if config.layout == "stream" else len(mini.row_ids))
    for shard in shards:
        assert shard.denominators == denominators
        real = shard.row_ids >= 0
        assert (shard.arrays["row_group"][~real] == -1).all()
        assert (shard.arrays["row_tokens"][~real] == 0).all()
    if config.layout != "stream":
        assert sum(int(shard.arrays["row_tokens"].sum()) for shard in shards) == denominators.tokens


@settings(max_examples=80, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(LENGTHS, st.sampled_from([1, 3, 4]), st.sampled_from(SHAPES))
def test_micro_batches_hold_every_token_and_boundaries_fit(make_data, make_shards, lengths, dp_size, shape):
    data = make_data(lengths)
    config = PlanConfig(**{"oversize": "alone", "batch_size": 30, "columns": COLUMNS, **shape})
    for mini, shards in make_shards(data, config, dp_size):
        seen = 0
        for shard in shards:
            for number, micro in enumerate(shard.micro_batches):
                arrays = shard.micro(number)
                assert arrays["input_ids"].shape == (micro.stop - micro.start, micro.width)
                assert micro.width % config.pad_to_multiple == 0
                assert arrays["attention_mask"].sum() == micro.num_tokens
                seen += micro.num_tokens
                check_boundaries(config, arrays)
            whole = int(shard.arrays["attention_mask"].sum())
            assert whole == sum(micro.num_tokens for micro in shard.micro_batches)
        dummies = sum(int((shard.row_ids < 0).sum()) for shard in shards)
        assert seen == int(mini.lengths.sum()) + 2 * dummies


def check_boundaries(config, arrays):
    if config.layout not in SEVERAL_ROWS:
        assert "cu_seqlens" not in arrays
        assert len(arrays["seq_lengths"]) == len(arrays["input_ids"])
        return
    offsets = arrays["cu_seqlens_offsets"] - arrays["cu_seqlens_offsets"][0]
    sequence = 0
    for line, (start, stop) in enumerate(pairwise(offsets)):
        bounds = arrays["cu_seqlens"][start:stop].tolist()
        assert bounds[0] == 0
        assert bounds[-1] <= arrays["input_ids"].shape[1]
        for number, (first, last) in enumerate(pairwise(bounds)):
            length = int(arrays["seq_lengths"][sequence])
            sequence += 1
            if config.layout == "packed":
                assert first % config.align == 0
                assert arrays["position_ids"][line, first : first + length].tolist() == list(range(length))
                if length:
                    assert arrays["labels"][line, first] == -100  # no target crosses a boundary
            assert (arrays["segment_ids"][line, first : first + length] == number + 1).all()
            assert (arrays["attention_mask"][line, first + length : last] == 0).all()
    assert sequence == len(arrays["seq_lengths"])


@pytest.mark.parametrize("layout", ["padded_right", "packed"])
@pytest.mark.parametrize("num_rows", [0, 1, 2, 9])
def test_few_rows_give_dummies_of_two_tokens_and_no_more(make_data, make_shards, layout, num_rows):
    lengths = [400] * num_rows or [5]
    skip = () if num_rows else (0,)
    config = PlanConfig(
        layout=layout, micro_batch_tokens=400, batch_size=9, skip_rows=skip, shuffle="none", oversize="alone"
    )
    [(_, shards)] = make_shards(make_data(lengths), config, 8)
    for shard in shards:
        for line in np.flatnonzero(shard.row_ids < 0).tolist():
            assert shard.arrays["attention_mask"][line].sum() == 2
            assert shard.arrays["position_ids"][line, :2].tolist() == [0, 1]
            assert (shard.arrays["input_ids"][line] == 1).all()
            assert (shard.arrays["labels"][line] == -100).all()
    assert shards[0].denominators.rows == num_rows
    dummies = sum(int((shard.row_ids < 0).sum()) for shard in shards)
    assert dummies == -(-max(num_rows, 1) // 8) * 8 - num_rows


def test_a_first_token_is_never_a_target_even_when_the_mask_says_so(make_data, make_shards):
    data = make_data([4, 1, 3], trained=2.0)  # every token trained
    for layout in ("padded_right", "padded_left", "packed"):
        config = PlanConfig(layout=layout, micro_batch_tokens=16, batch_size=3)
        [(_, [shard])] = make_shards(data, config, 1)
        assert shard.denominators.tokens == 3 + 0 + 2
        assert sorted(shard.arrays["row_tokens"].tolist()) == [0, 2, 3]


def test_the_cost_of_a_column_that_is_not_asked_for_is_nothing(make_data, make_shards):
    config = PlanConfig(batch_size=2, columns=("input_ids",))
    [(_, [shard])] = make_shards(make_data([4, 5]), config, 1)
    per_row = {"seq_lengths", "row_tokens", "row_group", "row_group_rows", "row_group_tokens"}
    assert set(shard.arrays) == {"input_ids", *per_row}


def test_an_unknown_column_is_named_with_those_that_are_there(make_data, make_shards):
    config = PlanConfig(batch_size=2, columns=("input_ids", "logprobs"))
    with pytest.raises(
        ConfigError, match=r"plan.columns: the rows have no 'logprobs'; use some of: advantages, att"
    ):
        make_shards(make_data([4, 5]), config, 1)


def test_input_that_cannot_be_written_to_is_left_alone(make_data, make_shards):
    data = make_data([4, 5, 6])
    before = {name: values.copy() for name, values in data.tokens.items()}
    for values in data.tokens.values():
        values.flags.writeable = False
    make_shards(data, PlanConfig(batch_size=3, columns=COLUMNS), 2)
    assert all(np.array_equal(before[name], data.tokens[name]) for name in before)


@pytest.mark.parametrize("layout", ["padded_right", "padded_left", "packed", "stream"])
def test_no_python_runs_per_token_or_per_row(make_data, make_shards, layout):
    def calls(num_rows, length):
        config = PlanConfig(
            layout=layout, batch_size=num_rows, columns=COLUMNS, window=num_rows * length,
            micro_batch_tokens=num_rows * length,
        )  # fmt: skip
        data = make_data([length] * num_rows)
        plan = Plan(config, data.lengths)
        mini = plan.step(0, 1).mini_batches[0]
        rows, count = data.take(mini.row_ids), 0

        def on_event(frame, event, arg):
            nonlocal count
            count += event in ("call", "c_call")

        arguments = {"step": 0, "mini_index": 0, "layout": layout, "pad_token_id": 0, "columns": COLUMNS}
        gc.collect()  # finalizers of what other tests left would be counted
        gc.disable()
        sys.setprofile(on_event)
        try:
            collate_mini_batch(rows, mini, CollateSpec(**arguments))
        finally:
            sys.setprofile(None)
            gc.enable()
        return count

    few = calls(16, 10)
    assert calls(160, 10) <= few + 5
    assert calls(16, 200) <= few + 5
