"""What every rank gets: the list in `raysvc.plan.rank_plan`, asserted line by line."""

from itertools import combinations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from raysvc.plan.cost import CostModel
from raysvc.plan.pack import aligned
from raysvc.plan.rank_plan import Rules, deal, deal_windows

LENGTHS = st.lists(st.integers(0, 300), max_size=50).map(lambda values: np.array(values, np.int32))
DP_SIZES = st.sampled_from([1, 2, 3, 4, 5, 7, 8])


@st.composite
def rules(draw):
    kind = draw(st.sampled_from(["rows", "tokens", "packed"]))
    if kind == "rows":
        return Rules("padded_right", draw(st.integers(1, 9)), None)
    tokens = draw(st.integers(50, 1200))
    if kind == "tokens":
        return Rules("padded_left", None, tokens, pad_to_multiple=draw(st.sampled_from([1, 8])))
    packing = draw(st.sampled_from(["balanced", "best_fit", "first_fit"]))
    return Rules("packed", None, tokens, align=draw(st.sampled_from([1, 16])), packing=packing)


def check(ranks, lengths, dp_size, rules):
    """Each line of the module's list."""
    rows = np.concatenate([rank.rows for rank in ranks])
    assert sorted(rows[rows >= 0].tolist()) == list(range(len(lengths)))  # every row on exactly one rank
    counts = {len(rank.micro_batches) for rank in ranks}
    assert len(ranks) == dp_size
    assert len(counts) == 1
    assert counts.pop() >= 1
    for rank in ranks:
        assert rank.rows.dtype == rank.lines.dtype == np.int32
        assert rank.lines[0] == 0
        assert rank.lines[-1] == len(rank.rows)
        assert (np.diff(rank.lines) > 0).all()
        stops = [stop for _, stop in rank.micro_batches]
        assert [start for start, _ in rank.micro_batches] == [0, *stops[:-1]]  # every line in one micro-batch
        assert stops[-1] == len(rank.lines) - 1
        assert all(stop > start for start, stop in rank.micro_batches)
        for start, stop in rank.micro_batches:
            check_micro_batch(rank.rows[rank.lines[start] : rank.lines[stop]], lengths, rules)
    dummies = int((rows < 0).sum())
    if rules.rows is not None:
        assert dummies < dp_size or len(lengths) == 0
    elif dummies:  # nothing was left to split
        assert all((np.diff(rank.lines) == 1).all() for rank in ranks)
        assert all(stop - start == 1 for rank in ranks for start, stop in rank.micro_batches)


def check_micro_batch(rows, lengths, rules):
    real = rows[rows >= 0]
    if rules.rows is not None:
        assert len(rows) <= rules.rows
    elif len(real) > 1 and rules.layout == "packed":
        assert aligned(lengths[real].astype(np.int64), rules.align).sum() <= rules.tokens
    elif len(real) > 1:
        width = -(-int(lengths[real].max()) // rules.pad_to_multiple) * rules.pad_to_multiple
        assert width * len(real) <= rules.tokens


@settings(max_examples=300)
@given(LENGTHS, DP_SIZES, rules())
def test_ranks_keep_every_promise(lengths, dp_size, rules):
    ranks = deal(lengths, dp_size, rules)
    check(ranks, lengths, dp_size, rules)
    again = deal(lengths.copy(), dp_size, rules)
    assert [rank.rows.tobytes() for rank in ranks] == [rank.rows.tobytes() for rank in again]


@pytest.mark.parametrize("dp_size", [1, 2, 8])
@pytest.mark.parametrize("num_rows", [0, 1, 9])
@pytest.mark.parametrize("layout", ["padded_right", "packed"])
def test_few_rows_or_none_still_give_every_rank_a_micro_batch(num_rows, dp_size, layout):
    lengths = np.full(num_rows, 10, np.int32)
    check(deal(lengths, dp_size, Rules(layout, None, 100)), lengths, dp_size, Rules(layout, None, 100))


def test_a_number_of_packs_above_the_number_of_rows_is_no_error():
    # the case in which peers fail: six sequences that need eight packs for four ranks
    lengths = np.array([90, 90, 90, 90, 60, 30], np.int32)
    rules = Rules("packed", None, 100)
    ranks = deal(lengths, 4, rules)
    check(ranks, lengths, 4, rules)
    assert sum(int((rank.rows < 0).sum()) for rank in ranks) == 2


@pytest.mark.parametrize("rules", [Rules("padded_right", 4, None), Rules("packed", None, 4096)])
def test_ranks_cost_about_the_same(rules):
    rng = np.random.default_rng(1)
    imbalance = []
    for _ in range(10):
        lengths = np.clip(rng.lognormal(5.5, 0.8, 256), 10, 4000).astype(np.int32)
        costs = [rules.cost.of(lengths[rank.rows[rank.rows >= 0]]).sum() for rank in deal(lengths, 8, rules)]
        imbalance.append(max(costs) / np.mean(costs))
    assert max(imbalance) < 1.1  # a single row of 4000 tokens fills a pack and costs more than any mix
    assert np.mean(imbalance) < 1.03


def test_two_ranks_are_near_the_best_split_of_few_rows():
    rng = np.random.default_rng(2)
    cost, ratios = CostModel(1, 0), []
    for _ in range(50):
        lengths = rng.integers(1, 100, 8).astype(np.int32)
        ranks = deal(lengths, 2, Rules("padded_right", 8, None, cost=cost))
        worst = max(int(lengths[rank.rows].sum()) for rank in ranks)
        best = min(
            max(int(lengths[list(half)].sum()), int(lengths.sum() - lengths[list(half)].sum()))
            for half in combinations(range(8), 4)
        )
        ratios.append(worst / best)
    assert max(ratios) < 4 / 3
    assert np.mean(ratios) < 1.05


def test_micro_batches_come_costliest_first():
    lengths = np.arange(1, 65, dtype=np.int32)
    for rank in deal(lengths, 4, Rules("padded_right", 4, None)):
        longest = [lengths[rank.rows[start:stop]].max() for start, stop in rank.micro_batches]
        assert longest == sorted(longest, reverse=True)


@settings(max_examples=60)
@given(st.lists(st.integers(1, 4), max_size=12), DP_SIZES, st.integers(1, 3))
def test_windows_stay_whole_and_even_out_over_ranks(sizes, dp_size, per_micro):
    window_of = np.repeat(np.arange(len(sizes)), sizes).astype(np.int32)
    ranks = deal_windows(window_of, dp_size, per_micro)
    lines = [
        rank.rows[a:b].tolist() for rank in ranks for a, b in zip(rank.lines, rank.lines[1:], strict=False)
    ]
    real = sorted(line for line in lines if line != [-1])
    assert real == [np.flatnonzero(window_of == window).tolist() for window in range(len(sizes))]
    assert len({len(rank.micro_batches) for rank in ranks}) == 1
    assert len(lines) - len(real) < dp_size or not sizes


@pytest.mark.parametrize("dp_size", [2, 3, 4])
def test_a_budget_that_would_hold_everything_still_shares_the_work(dp_size):
    """Filled to the budget, the first micro-batch would take most rows and leave the others idle."""
    lengths = np.array([157] * 8 + [84] * 2 + [63] * 6 + [40] * 16, np.int32)
    ranks = deal(lengths, dp_size, Rules("padded_right", None, 4096))
    cells = [len(rank.rows) * int(lengths[rank.rows].max()) for rank in ranks]
    assert {len(rank.micro_batches) for rank in ranks} == {1}
    assert max(cells) <= 1.35 * (sum(cells) / dp_size)
