"""The order inside a moving window: the list in `raysvc.plan.sliced.window_order`, asserted line by line."""

import time
import tracemalloc
from itertools import accumulate

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from raysvc import row_ids
from raysvc.plan.order import permute_each, round_keys_each
from raysvc.plan.sliced.window_order import WindowOrder

SIZES = st.lists(st.one_of(st.sampled_from([0, 1, 2]), st.integers(0, 40)), min_size=1, max_size=12)
WINDOWS = st.integers(1, 9)
SEEDS = st.integers(0, 2**40)
GOLDEN = [4, 5, 1, 6, 15, 2, 9, 13, 8, 7, 12, 0]


def order_of(sizes: list[int], window: int, seed: int = 0, salt: str = "") -> WindowOrder:
    return WindowOrder(np.array(sizes, np.int64), window, seed, salt)


def whole(sizes: list[int], window: int, seed: int = 0, epoch: int = 0) -> list[tuple[int, int]]:
    """(slice, group in the slice) in the order of an epoch."""
    place = row_ids.split(order_of(sizes, window, seed).at(epoch, np.arange(sum(sizes))))
    assert not place.source.any()
    return list(zip(place.slice.tolist(), place.row.tolist(), strict=True))


@settings(max_examples=200)
@given(SIZES, WINDOWS, SEEDS, st.integers(0, 3))
def test_every_group_comes_exactly_once_in_an_epoch(sizes, window, seed, epoch):
    found = whole(sizes, window, seed, epoch)
    assert sorted(found) == [(number, group) for number, size in enumerate(sizes) for group in range(size)]


@settings(max_examples=100)
@given(SIZES, WINDOWS, SEEDS, st.data())
def test_positions_can_be_asked_for_in_any_order_and_in_batches(sizes, window, seed, data):
    total = sum(sizes)
    if not total:
        return
    order = order_of(sizes, window, seed)
    places = st.lists(st.integers(0, total - 1), min_size=1, max_size=9)
    asked = data.draw(st.lists(places, min_size=1, max_size=4))
    known = order_of(sizes, window, seed).at(1, np.arange(total))
    for positions in asked:
        assert np.array_equal(order.at(1, np.array(positions)), known[positions])


@settings(max_examples=100)
@given(SIZES, WINDOWS, SEEDS, st.data())
def test_a_position_follows_from_the_slices_that_were_reached_alone(sizes, window, seed, data):
    total = sum(sizes)
    if not total:
        return
    position = data.draw(st.integers(0, total - 1))
    group = order_of(sizes, window, seed).at(0, np.array([position]))
    pi = slices_by_place(len(sizes), seed)
    stages = (sum(cells(sizes, pi, window, stage).values()) for stage in range(len(sizes) + window - 1))
    stage = next(number for number, end in enumerate(accumulate(stages)) if end > position)
    reached = set(pi[: stage + 1])
    others = [size if n in reached else size + data.draw(st.integers(1, 9)) for n, size in enumerate(sizes)]
    assert np.array_equal(order_of(others, window, seed).at(0, np.array([position])), group)


def slices_by_place(count: int, seed: int) -> list[int]:
    """pi: the order of an epoch of slices of one group, one open at a time."""
    return [number for number, _ in whole([1] * count, 1, seed)]


def cells(sizes: list[int], pi: list[int], window: int, stage: int) -> dict[int, int]:
    """Slice -> groups that `stage` has of it, by the definition: cell j of slice pi(stage - j)."""
    here = {pi[stage - j]: j for j in range(window) if 0 <= stage - j < len(pi)}
    return {n: (j + 1) * sizes[n] // window - j * sizes[n] // window for n, j in here.items()}


@settings(max_examples=60)
@given(SIZES, WINDOWS, SEEDS)
def test_a_group_of_the_slice_at_place_p_comes_in_the_stages_p_to_p_plus_w_minus_1(sizes, window, seed):
    found = whole(sizes, window, seed)
    pi = slices_by_place(len(sizes), seed)
    at = 0
    seen: dict[int, set[int]] = {}
    for stage in range(len(sizes) + window - 1):
        here = cells(sizes, pi, window, stage)
        rows = found[at : at + sum(here.values())]
        at += len(rows)
        for number, count in here.items():
            mine = {group for where, group in rows if where == number}
            assert len(mine) == count
            assert not mine & seen.setdefault(number, set())
            seen[number] |= mine
    assert at == len(found)


@settings(max_examples=60)
@given(SIZES, WINDOWS, SEEDS, st.integers(0, 2), st.data())
def test_slices_are_named_in_the_order_in_which_the_rest_of_an_epoch_needs_them(
    sizes, window, seed, epoch, data
):
    if not sum(sizes):
        return
    position = data.draw(st.integers(0, sum(sizes) - 1))
    named = order_of(sizes, window, seed).needs_from(epoch, position)[0].tolist()
    assert sorted(named) == list(range(len(sizes)))
    needed = list(dict.fromkeys(number for number, _ in whole(sizes, window, seed, epoch)[position:]))
    # a stage shuffles its slices, so a slice may come up to W - 1 places late, and the ones of the open window come first:
    # up to W - 1 of them have no row left
    for place, number in enumerate(needed):
        assert named.index(number) < place + 2 * window - 1 + sizes.count(0)


def test_the_order_is_the_same_on_every_machine_and_in_every_version():
    # written down once: a change here moves the data order of every run that resumes
    found = whole([4, 0, 3, 8, 1, 5], window=3, seed=7, epoch=1)
    numbers = [sum([4, 0, 3, 8, 1, 5][:where]) + group for where, group in found]
    assert numbers[:12] == GOLDEN


def test_seed_epoch_salt_and_window_each_give_another_order():
    sizes = [500] * 20
    base = order_of(sizes, 4, 0).at(0, np.arange(10_000))
    for other in (
        order_of(sizes, 4, 1).at(0, np.arange(10_000)),
        order_of(sizes, 4, 0).at(1, np.arange(10_000)),
        order_of(sizes, 4, 0, salt="x").at(0, np.arange(10_000)),
        order_of(sizes, 5, 0).at(0, np.arange(10_000)),
    ):
        assert (base == other).mean() < 0.01


@pytest.mark.parametrize("size", [2, 3, 5, 8, 50, 1000, 40_000])
def test_each_permutation_is_one_and_lands_uniformly(size):
    keys = round_keys_each("k", np.array([9]))
    images = permute_each(np.array([size]), keys, np.zeros(size, np.int64), np.arange(size))
    assert np.array_equal(np.sort(images), np.arange(size))
    trials, bins = 4000, min(size, 10)
    for probe in {0, size // 2, size - 1}:
        numbers = np.arange(trials)
        keys = round_keys_each("k", numbers)
        where = permute_each(np.full(trials, size), keys, numbers, np.full(trials, probe))
        edges = [-(-k * size // bins) for k in range(bins + 1)]
        expected = trials * np.diff(edges) / size
        chi_square = ((np.histogram(where, edges)[0] - expected) ** 2 / expected).sum()
        assert chi_square < bins + 5 * np.sqrt(2 * bins)  # five standard deviations


def test_ten_thousand_million_rows_in_twenty_thousand_slices_need_little_time_and_memory():
    sizes = np.full(20_000, 500_000)
    took = []
    for is_traced in (False, True):  # it is slow while memory is traced
        if is_traced:
            tracemalloc.start()
        order = WindowOrder(sizes, 64, 0)
        order.at(0, np.array([9_999_999_999]))
        for start in range(10**9, 10**9 + 10 * 1024, 1024):
            begin_s = time.perf_counter()
            found = order.at(0, np.arange(start, start + 1024))
            took.append(time.perf_counter() - begin_s)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert len(np.unique(found)) == 1024
    assert peak < 20e6, peak
    assert min(took) < 0.03, took  # 1 ms


@given(st.integers(0, 2047), st.integers(0, 2**20 - 1), st.integers(0, 2**32 - 1))
def test_the_number_of_a_row_names_its_source_slice_and_row(source, number, row):
    one = row_ids.join(np.array([number]), np.array([row])) + row_ids.source_base(source)
    assert one.dtype == np.int64
    assert one[0] >= 0
    assert tuple(int(each[0]) for each in row_ids.split(one)) == (source, number, row)
