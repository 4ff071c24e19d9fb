"""Packers keep to the capacity, lose nothing, and come close to the least number of packs."""

from itertools import product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from raysvc.plan.cost import CostModel
from raysvc.plan.pack import aligned, pack_best_fit, pack_first_fit, split_to, spread

LENGTHS = st.lists(st.integers(0, 100), max_size=60).map(lambda values: np.array(values, np.int64))
ALIGNS = st.sampled_from([1, 2, 8, 16])


def check(packs, lengths, capacity, align):
    """Each line of the module's list."""
    assert sorted(item for pack in packs for item in pack) == list(range(len(lengths)))
    sizes = aligned(lengths, align)
    for pack in packs:
        assert sizes[pack].sum() <= capacity or len(pack) == 1


@settings(max_examples=150)
@given(LENGTHS, st.integers(1, 150), ALIGNS, st.sampled_from([pack_first_fit, pack_best_fit]))
def test_packs_hold_every_sequence_once_within_the_capacity(lengths, capacity, align, packer):
    packs = packer(lengths, capacity, align)
    check(packs, lengths, capacity, align)
    assert packs == packer(lengths, capacity, align)
    assert (
        len(packs) <= max(1, 2 * -(-int(aligned(lengths, align).sum()) // capacity) + 1)
        or max(lengths) > capacity
    )


def test_first_fit_is_the_textbook_one():
    # longest first, of equal lengths the later one, into the first pack with room
    assert pack_first_fit(np.array([5, 7, 5, 2, 4, 2, 5, 1, 6]), 10) == [[1, 5, 7], [8, 4], [6, 2], [0, 3]]


def test_best_fit_takes_the_fullest_pack_with_room():
    # after [6], [5]: 3 fits both, the fuller one is [6]
    assert pack_best_fit(np.array([6, 5, 3, 4]), 10) == [[0, 3], [1, 2]]


def fewest_packs(sizes, capacity):
    """The optimum, by trying every assignment."""
    places = np.array(list(product(range(len(sizes)), repeat=len(sizes))))
    loads = np.stack([(places == pack) @ sizes for pack in range(len(sizes))], axis=1)
    used = np.array([len(set(where)) for where in places.tolist()])
    return used[(loads <= capacity).all(axis=1)].min()


@pytest.mark.parametrize("align", [1, 4])
def test_best_fit_is_within_one_pack_of_the_optimum_for_small_cases(align):
    rng = np.random.default_rng(0)
    for _ in range(20):
        lengths = rng.integers(1, 20, rng.integers(1, 6)).astype(np.int64)
        assert len(pack_best_fit(lengths, 20, align)) <= fewest_packs(aligned(lengths, align), 20) + 1


@settings(max_examples=150)
@given(LENGTHS, st.integers(100, 300), ALIGNS, st.integers(1, 20))
def test_spread_keeps_to_the_capacity_or_says_that_it_cannot(lengths, capacity, align, num_packs):
    packs = spread(lengths, num_packs, capacity, align, CostModel(1, 0))
    if packs is not None:
        assert len(packs) == num_packs
        check(packs, lengths, capacity, align)


@settings(max_examples=60)
@given(LENGTHS, st.integers(1, 9), st.booleans())
def test_splitting_reaches_the_multiple_unless_every_pack_is_single(lengths, multiple, in_order):
    packs = pack_best_fit(lengths, 200)
    more = split_to(packs, multiple, CostModel().of(lengths), in_order=in_order)
    check(more, lengths, 200, 1)
    assert all(more)
    assert len(more) % multiple == 0 or all(len(pack) == 1 for pack in more)
    assert len(more) < len(packs) + multiple


def test_alignment_counts_in_the_capacity():
    packs = pack_best_fit(np.full(16, 8, np.int64), capacity=128, align=32)
    assert [len(pack) for pack in packs] == [4, 4, 4, 4]
