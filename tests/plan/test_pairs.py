"""Pairs stay together: on a rank, in a micro-batch, one behind the other, in every layout; oracle: a walk over the plan."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from raysvc.errors import PlanError
from raysvc.job.config import PlanConfig
from raysvc.plan.entry_plan import plan_of_entries
from raysvc.plan.groups import Groups
from raysvc.plan.plan import Plan
from raysvc.plan.plan_rows import HeldRows

PLANS: list[dict[str, Any]] = [
    {"micro_batch_size": 4},
    {"micro_batch_size": 1},
    {"layout": "padded_left", "micro_batch_tokens": 64, "pad_to_multiple": 8},
    {"layout": "packed", "micro_batch_tokens": 64, "align": 4},
    {"layout": "packed", "micro_batch_tokens": 64, "packing": "best_fit"},
    {"layout": "packed", "micro_batch_tokens": 32, "oversize": "truncate", "align": 4},
    {"micro_batch_tokens": 32, "oversize": "drop"},
]


def pairs_of(lengths: np.ndarray, config: PlanConfig) -> Plan:
    bounds = np.arange(0, len(lengths) + 1, 2, dtype=np.int64)
    return Plan(config, HeldRows(lengths, Groups.of_runs(bounds, are_pairs=True)))


@settings(max_examples=80)
@given(st.data())
def test_the_two_rows_of_a_pair_are_neighbours_in_one_micro_batch(data: Any) -> None:
    num_pairs, dp_size = data.draw(st.integers(1, 12)), data.draw(st.integers(1, 3))
    lengths = np.array(
        data.draw(st.lists(st.integers(1, 26), min_size=2 * num_pairs, max_size=2 * num_pairs))
    )
    skipped = tuple(sorted(data.draw(st.sets(st.integers(0, 2 * num_pairs - 1), max_size=2))))
    choice = data.draw(st.sampled_from(PLANS))
    config = PlanConfig(batch_size=num_pairs, skip_rows=skipped, **choice)
    [mini] = pairs_of(lengths, config).step(0, dp_size).mini_batches
    gone = {row // 2 for row in skipped}
    if config.oversize == "drop":
        gone |= {pair for pair in range(num_pairs) if 2 * lengths[2 * pair : 2 * pair + 2].max() > 32}
    expected = sorted(
        row for pair in range(num_pairs) for row in (2 * pair, 2 * pair + 1) if pair not in gone
    )
    assert sorted(mini.row_ids.tolist()) == expected
    counts = {len(rank.micro_batches) for rank in mini.ranks}
    assert len(counts) == 1
    seen: list[int] = []
    for rank in mini.ranks:
        for start, stop in rank.micro_batches:
            rows = rank.rows[rank.lines[start] : rank.lines[stop]]
            assert len(rows) % 2 == 0
            for first, second in rows.reshape(-1, 2).tolist():
                if first < 0:
                    assert second < 0
                    continue
                ids = mini.row_ids[[first, second]].tolist()
                assert ids[0] % 2 == 0
                assert ids[1] == ids[0] + 1
                seen += ids
            check_room(config, mini.lengths[rows[rows >= 0]], stop - start)
    assert sorted(seen) == expected


def check_room(config: PlanConfig, lengths: np.ndarray, num_lines: int) -> None:
    if config.micro_batch_size is not None:
        assert num_lines <= max(2, config.micro_batch_size)
    elif config.layout == "packed":
        assert (-(-lengths // config.align) * config.align).sum() <= (config.micro_batch_tokens or 0)
    elif len(lengths):
        assert num_lines * lengths.max() <= (config.micro_batch_tokens or 0)


def test_a_pair_that_fits_no_line_is_refused_by_its_number() -> None:
    lengths = np.array([3, 4, 20, 30])
    with pytest.raises(PlanError, match=r"1 pairs are over its 40 tokens \(pair 1 has 50\)"):
        pairs_of(lengths, PlanConfig(layout="packed", micro_batch_tokens=40))
    assert pairs_of(lengths, PlanConfig(layout="packed")).rules.tokens == 4096


class Source:
    listings = None

    def __init__(self, key: str, form: str) -> None:
        self.key, self.recipe, self.num_rows, self.columns = key, {"format": form}, 4, {}
        self.slice_starts = np.array([0, 4])

    def lengths(self) -> Any:
        return np.full(4, 5)

    def row_values(self, name: str) -> Any:
        return np.array([0, 0, 1, 1])


def test_entries_of_pairs_are_planned_as_pairs_and_mixed_with_nothing_else() -> None:
    stages = ((0, (2, 2)),)
    config = PlanConfig(batch_size=2)
    plan = plan_of_entries(config, [Source("a", "preference"), Source("b", "preference")], stages)
    assert plan.schedule.num_groups == 4
    assert plan.rows.are_pairs
    with pytest.raises(PlanError, match="rows of chat, preference in one stream"):
        plan_of_entries(config, [Source("a", "preference"), Source("b", "chat")], stages)
