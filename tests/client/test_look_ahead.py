"""How far ahead is fetched: pure, without Ray."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from hypothesis import given, settings
from hypothesis import strategies as st

from raysvc.client.look_ahead import FormedSizes, Limit, LookAhead, PlannedSizes


class Fetch(NamedTuple):
    index: int


def make(sizes: list[int], limit: Limit, asked: list[int]) -> LookAhead[Fetch]:
    def ask(index: int) -> Fetch:
        asked.append(index)
        return Fetch(index)

    def ask_sizes(first: int, stop: int) -> Callable[[], list[int]]:
        return lambda: sizes[first:stop]

    return LookAhead(ask, PlannedSizes(ask_sizes, len(sizes)), limit)


@settings(max_examples=200)
@given(
    st.lists(st.integers(1, 20), min_size=1, max_size=40),
    st.integers(0, 5),
    st.one_of(st.none(), st.integers(0, 40)),
    st.data(),
)
def test_every_step_comes_once_in_order_and_what_is_ahead_keeps_to_both_limits(
    sizes: list[int], steps: int, nbytes: int | None, data: st.DataObject
) -> None:
    start = data.draw(st.integers(0, len(sizes)))
    asked: list[int] = []
    window = make(sizes, Limit(steps, nbytes), asked)
    for expected, fetch in enumerate(window.run(start, len(sizes)), start):
        assert fetch.index == expected
        ahead = asked[asked.index(fetch.index) + 1 :]
        assert len(ahead) <= steps
        if nbytes is None:
            assert len(ahead) == min(steps, len(sizes) - 1 - fetch.index)
        else:
            assert sum(sizes[step] for step in ahead) <= nbytes
            following = fetch.index + 1 + len(ahead)
            if len(ahead) < steps and following < len(sizes):
                assert sum(sizes[step] for step in ahead) + sizes[following] > nbytes, (
                    "no room is left unused"
                )
    assert asked == list(range(start, len(sizes)))
    assert window.num_outstanding == 0


def test_an_iteration_that_is_left_holds_nothing() -> None:
    window = make([1] * 10, Limit(3), [])
    fetches = window.run(0, 10)
    next(fetches)
    assert window.num_outstanding == 3
    fetches.close()
    assert window.num_outstanding == 0


@settings(max_examples=200)
@given(
    st.lists(st.integers(1, 20), min_size=1, max_size=30), st.integers(0, 5), st.integers(0, 40), st.data()
)
def test_a_step_of_unknown_size_is_asked_for_when_it_is_needed_and_what_is_ahead_keeps_to_the_bytes(
    sizes: list[int], steps: int, nbytes: int, data: st.DataObject
) -> None:
    asked, formed = list[int](), 0

    def ask(index: int) -> Fetch:
        asked.append(index)
        return Fetch(index)

    window = LookAhead(
        ask, FormedSizes(lambda step: sizes[step] if step < formed else None), Limit(steps, nbytes)
    )
    for fetch in window.run(0, len(sizes)):
        for _ in range(2):  # before the step is there, and after
            ahead = asked[fetch.index + 1 :]
            assert sum(sizes[step] for step in ahead) == window.nbytes <= nbytes
            assert len(ahead) <= steps
            assert all(step < formed for step in ahead)
            formed = max(formed, fetch.index + 1, data.draw(st.integers(0, len(sizes))))
            window.extend()
        following = fetch.index + 1 + len(ahead)
        fits = window.nbytes + sizes[following] <= nbytes if following < len(sizes) else False
        assert not (fits and following < formed and len(ahead) < steps) or following in asked
    assert asked == list(range(len(sizes)))
    window.extend()
    assert window.num_outstanding == 0
