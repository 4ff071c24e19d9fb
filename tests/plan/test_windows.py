"""`layout: stream`: windows over concatenated documents."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from raysvc.errors import PlanError
from raysvc.job.config import PlanConfig
from raysvc.plan.plan import Plan
from raysvc.plan.row_pieces import Windows

LENGTHS = st.lists(st.integers(0, 30), min_size=1, max_size=30).filter(any)


@settings(max_examples=150)
@given(LENGTHS, st.integers(1, 40), st.data())
def test_windows_hold_the_concatenated_tokens_and_each_once(lengths, window, data):
    windows = Windows(np.array(lengths), window)
    owner = [(row, token) for row, length in enumerate(lengths) for token in range(length)]
    asked = data.draw(st.lists(st.integers(0, windows.num_windows - 1), max_size=8))
    pieces = windows.pieces_of(np.array(asked, np.int64))
    got = [
        (int(group), int(row), token)
        for group, row, start, length in zip(
            pieces.group_index, pieces.row_ids, pieces.starts, pieces.lengths, strict=True
        )
        for token in range(start, start + length)
    ]
    want = [
        (at, *owner[k])
        for at, w in enumerate(asked)
        for k in range(w * window, min((w + 1) * window, len(owner)))
    ]
    assert got == want
    assert windows.num_windows == -(-len(owner) // window)


@settings(max_examples=40)
@given(LENGTHS, st.integers(1, 20), st.integers(1, 4))
def test_an_epoch_of_windows_trains_every_token_once(lengths, window, dp_size):
    config = PlanConfig(layout="stream", window=window, batch_size=3, mini_batch_size=2)
    plan = Plan(config, np.array(lengths))
    seen = np.zeros((len(lengths), 30), int)
    for step in range(plan.schedule.num_steps):
        for mini in plan.step(step, dp_size).mini_batches:
            dealt = np.concatenate([rank.rows for rank in mini.ranks])
            for piece in dealt[dealt >= 0]:
                start = mini.starts[piece]
                seen[mini.row_ids[piece], start : start + mini.lengths[piece]] += 1
    assert np.array_equal(seen, np.arange(30) < np.array(lengths)[:, None])


def test_windows_go_by_tokens_or_rows_into_micro_batches():
    lengths = np.full(40, 16)
    base = {"layout": "stream", "window": 32, "batch_size": 16, "shuffle": "none"}
    by_rows = Plan(PlanConfig(**base, micro_batch_size=2), lengths).step(0, 2).mini_batches[0]
    assert by_rows.ranks[0].micro_batches == ((0, 2), (2, 4), (4, 6), (6, 8))
    by_tokens = Plan(PlanConfig(**base, micro_batch_tokens=100), lengths).step(0, 2).mini_batches[0]
    assert by_tokens.ranks[0].micro_batches == ((0, 3), (3, 6), (6, 8))


def test_groups_cannot_be_streamed():
    with pytest.raises(PlanError, match="without regard to groups"):
        Plan(PlanConfig(layout="stream", window=8), np.full(4, 9), uids=list("aabb"))
