"""Mixtures: the list in `raysvc.plan.mixture`, asserted line by line."""

import time
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from raysvc.errors import PlanError
from raysvc.job.config import PlanConfig
from raysvc.plan.mixture import (
    Mixture,
    MixtureSource,
    Stage,
    apportion,
    counts_by_epochs,
    counts_by_weight,
)
from raysvc.plan.plan import Plan


@st.composite
def mixtures(draw, max_stages=3):
    sizes = draw(st.lists(st.integers(1, 40), min_size=1, max_size=5))
    sources = tuple(MixtureSource(f"k{number}", size) for number, size in enumerate(sizes))
    stages, first = [], 0
    for _ in range(draw(st.integers(1, max_stages))):
        counts = draw(st.lists(st.integers(0, 50), min_size=len(sizes), max_size=len(sizes)).filter(any))
        stages.append(Stage(first, tuple(counts)))
        first += draw(st.integers(1, 80))
    return Mixture(
        sources, tuple(stages), seed=draw(st.integers(0, 3)), block=draw(st.sampled_from([None, 0, 7]))
    )


def stream(mixture: Mixture, length: int) -> tuple[np.ndarray, np.ndarray]:
    """Source, and group in the source, at the first `length` positions; asked for epoch by epoch."""
    epochs, positions = np.divmod(np.arange(length), mixture.num_groups)
    groups = np.concatenate([mixture.at(e, positions[epochs == e]) for e in range(int(epochs.max()) + 1)])
    offsets = np.cumsum([0] + [source.num_groups for source in mixture.sources])
    source = np.searchsorted(offsets, groups, side="right") - 1
    return source, groups - offsets[source]


@settings(max_examples=100)
@given(mixtures(max_stages=1), st.integers(1, 3))
def test_every_period_has_exactly_the_counts(mixture, epochs):
    source, _ = stream(mixture, mixture.num_groups * epochs)
    per_epoch = source.reshape(epochs, -1)
    for row in per_epoch:
        assert tuple(np.bincount(row, minlength=len(mixture.sources))) == mixture.stages[0].counts


@settings(max_examples=100)
@given(mixtures(max_stages=1))
def test_every_prefix_is_close_to_the_shares(mixture):
    source, _ = stream(mixture, mixture.num_groups)
    counts = np.array(mixture.stages[0].counts)
    so_far = np.cumsum(source[:, None] == np.arange(len(counts)), axis=0)
    exact = np.arange(1, len(source) + 1)[:, None] * counts / counts.sum()
    assert np.abs(so_far - exact).max() <= len(counts) / 2


@settings(max_examples=100)
@given(mixtures(), st.integers(1, 200))
def test_a_source_comes_whole_before_any_of_it_comes_again(mixture, length):
    source, group = stream(mixture, length)
    for number, entry in enumerate(mixture.sources):
        groups = group[source == number]
        for start in range(0, len(groups), entry.num_groups):
            part = groups[start : start + entry.num_groups]
            assert len(set(part.tolist())) == len(part)


@settings(max_examples=60)
@given(mixtures(max_stages=2), st.integers(0, 100), st.integers(1, 30))
def test_a_source_added_later_moves_nothing_that_came_before(mixture, later, size):
    first = mixture.stages[-1].first + 1 + later
    sources = (*mixture.sources, MixtureSource("new", size))
    grown = Mixture(
        sources, (*mixture.stages, Stage(first, (1,) * len(sources))), seed=mixture.seed, block=mixture.block
    )
    for before, after in zip(stream(mixture, first), stream(grown, first), strict=True):
        assert np.array_equal(before, after)
    assert "new" in {sources[number].key for number in stream(grown, first + len(sources))[0][first:]}


def test_a_source_has_an_order_of_its_own_wherever_it_stands_in_the_list():
    one, two = MixtureSource("one", 50), MixtureSource("two", 50)
    source, group = stream(Mixture((one, two), (Stage(0, (50, 50)),)), 100)
    assert group[source == 0].tolist() != group[source == 1].tolist()
    turned, again = stream(Mixture((two, one), (Stage(0, (50, 50)),)), 100)
    assert again[turned == 1].tolist() == group[source == 0].tolist()


@settings(max_examples=100)
@given(st.lists(st.floats(0, 10), min_size=1, max_size=6).filter(any), st.integers(0, 1000))
def test_apportioned_counts_sum_up_and_are_within_one_of_exact(weights, total):
    counts = apportion(weights, total)
    assert sum(counts) == total
    whole = sum(map(Fraction, weights))
    assert all(
        abs(count - Fraction(weight) * total / whole) < 1
        for count, weight in zip(counts, weights, strict=True)
    )


def test_counts_by_rows_by_tokens_and_by_epochs():
    assert counts_by_weight([0.75, 0.25], [300, 1000]) == (300, 100)  # the first is the scarce one
    assert counts_by_weight([1, 1], [100, 100], tokens=[1000, 3000]) == (100, 33)
    assert counts_by_epochs([2, 0.5], [10, 30]) == (20, 15)
    with pytest.raises(PlanError, match="weights"):
        counts_by_weight([0.0, 0.0], [1, 1])


@pytest.mark.parametrize(
    ("sources", "stages", "message"),
    [
        ([("a", 0)], [(0, (1,))], "source 'a' has no groups"),
        ([("a", 1), ("a", 2)], [(0, (1, 1))], "source 'a' comes twice"),
        ([("a", 1)], [(3, (1,))], "stages begin at"),
        ([("a", 1)], [(0, (1,)), (0, (2,))], "stages begin at"),
        ([("a", 1)], [(0, (0,))], "period"),
        ([("a", 1)], [(0, (1, 1))], "more counts"),
    ],
)
def test_a_mixture_that_cannot_be_is_refused(sources, stages, message):
    with pytest.raises(PlanError, match=message):
        Mixture(tuple(MixtureSource(*s) for s in sources), tuple(Stage(*stage) for stage in stages))


def test_a_plan_over_a_mixture_counts_and_resumes_like_any_other():
    lengths = np.arange(1, 31)
    mixture = Mixture((MixtureSource("a", 10), MixtureSource("b", 20)), (Stage(0, (20, 10)),))
    plan = Plan(PlanConfig(batch_size=6, epochs=2), lengths, entry_keys=("a", "b"), mixture=mixture)
    assert plan.schedule.num_steps == 10
    for step in range(plan.schedule.num_steps):
        rows = plan.step(step, 2).mini_batches[0].row_ids
        assert (rows < 10).sum() == 4
    every = [plan.step(step, 1).mini_batches[0].row_ids for step in range(plan.schedule.num_steps)]
    assert np.bincount(np.concatenate(every), minlength=30).tolist() == [4] * 10 + [1] * 20
    with pytest.raises(PlanError, match="30 groups for 29"):
        Plan(PlanConfig(), lengths[:-1], mixture=mixture)


def test_a_step_of_a_billion_groups_is_as_fast_as_any():
    sources = tuple(MixtureSource(f"s{number}", 10**8) for number in range(10))
    mixture = Mixture(sources, (Stage(0, (10**8,) * 10),))
    positions = np.arange(5 * 10**8, 5 * 10**8 + 64)
    took = []
    for epoch in range(5):
        start = time.perf_counter()
        mixture.at(epoch, positions)
        took.append(time.perf_counter() - start)
    assert min(took) < 0.5  # 2 ms; the source of each of these groups takes a minute
