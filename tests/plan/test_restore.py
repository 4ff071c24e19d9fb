"""Outputs of workers back in row order, and one step for several roles."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from raysvc.config import PlanConfig
from raysvc.plan import Plan
from raysvc.plan.restore import restore_rows
from raysvc.plan.roles import step_by_role

LENGTHS = np.random.default_rng(3).integers(1, 120, 70).astype(np.int32)


@settings(deadline=None, max_examples=60)
@given(
    st.integers(1, 9),
    st.sampled_from([{}, {"micro_batch_tokens": 300}, {"layout": "packed", "micro_batch_tokens": 128}]),
)
def test_outputs_come_back_in_row_order_without_dummies(dp_size, shape):
    plan = Plan(PlanConfig(batch_size=22, **shape), LENGTHS)
    for mini in plan.step(2, dp_size).mini_batches:
        outputs = [
            np.where(rank.rows >= 0, np.append(mini.row_ids, -9)[rank.rows], -9) for rank in mini.ranks
        ]
        pairs = [np.stack([ids, ids * 2], axis=1).astype(np.float32) for ids in outputs]
        assert restore_rows(mini, outputs).tolist() == mini.row_ids.tolist()
        assert restore_rows(mini, pairs).tolist() == [[row, 2 * row] for row in mini.row_ids.tolist()]


def test_roles_share_rows_and_pad_only_for_themselves():
    plan = Plan(PlanConfig(batch_size=25, mini_batch_size=25), LENGTHS)
    steps = step_by_role(plan, 1, {"policy": 8, "critic": 6, "reference": 5})
    rows = [step.mini_batches[0].row_ids.tolist() for step in steps.values()]
    assert rows[0] == rows[1] == rows[2]
    dummies = {
        role: sum(int((rank.rows < 0).sum()) for rank in step.mini_batches[0].ranks)
        for role, step in steps.items()
    }
    assert dummies == {"policy": 7, "critic": 5, "reference": 0}


@pytest.mark.parametrize("sizes", [{"policy": 6, "critic": 8}])
def test_the_least_common_multiple_comes_only_on_request(sizes):
    plan = Plan(PlanConfig(batch_size=25), LENGTHS)
    shared = step_by_role(plan, 0, sizes, common=True)
    assert shared["policy"] is shared["critic"]
    assert len(shared["policy"].mini_batches[0].ranks) == 24
