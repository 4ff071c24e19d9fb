"""Dealing items evenly: the list in `raysvc.plan.balance`, asserted line by line."""

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from raysvc.plan.balance import _deal_stripes, deal_even


@st.composite
def items(draw):
    num_ranks, per_rank = draw(st.integers(1, 8)), draw(st.integers(1, 12))
    costs = draw(
        st.lists(st.integers(0, 10**6), min_size=num_ranks * per_rank, max_size=num_ranks * per_rank)
    )
    costs = np.array(costs, np.int64)
    return np.argsort(-costs, kind="stable").astype(np.int32), costs, num_ranks


@settings(max_examples=200)
@given(items())
def test_every_rank_gets_as_many_items_costliest_first_and_swaps_never_hurt(case):
    order, costs, num_ranks = case
    dealt = deal_even(order.copy(), costs, num_ranks)
    assert dealt.shape == (len(order) // num_ranks, num_ranks)
    assert sorted(dealt.ravel().tolist()) == list(range(len(order)))
    assert (np.diff(costs[dealt], axis=0) <= 0).all()
    alone, loads = _deal_stripes(order.reshape(-1, num_ranks), costs)
    assert np.array_equal(loads, costs[alone].sum(axis=0))
    assert costs[dealt].sum(axis=0).max() <= loads.max()


def test_an_outlier_is_made_up_for_by_swaps():
    costs = np.array([1000, 300, 300, 300, 290, 200, 190, 120, 110, 100, 90, 80])
    order = np.argsort(-costs, kind="stable").astype(np.int32)
    dealt = deal_even(order, costs, 2)
    stripes, _ = _deal_stripes(order.reshape(-1, 2), costs)
    assert costs[dealt].sum(axis=0).max() < 0.95 * costs[stripes].sum(axis=0).max()


def test_items_at_one_place_cost_about_the_same_on_all_ranks():
    costs = np.sort(np.random.default_rng(0).integers(100, 1000, 512))[::-1].astype(np.int64)
    dealt = costs[deal_even(np.arange(512, dtype=np.int32), costs, 8)]
    assert np.median(dealt.max(axis=1) / dealt.min(axis=1)) < 1.05


def test_dealing_alone_gives_the_largest_of_a_stripe_to_the_least_loaded():
    dealt, loads = _deal_stripes(np.arange(6, dtype=np.int32).reshape(3, 2), np.array([9, 5, 4, 3, 2, 1]))
    assert dealt.tolist() == [[0, 1], [3, 2], [5, 4]]
    assert loads.tolist() == [13, 11]
