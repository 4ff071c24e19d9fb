"""benchmarks/dynamic_cp_plan.py: what its plans promise, by the lengths alone, for random lengths, ranks and sizes."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "dynamic_cp_plan.py"


@pytest.fixture(scope="module")
def planner() -> Any:
    spec = importlib.util.spec_from_file_location("dynamic_cp_plan", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules["dynamic_cp_plan"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class Costs:
    """Linear and quadratic work, and a price for every rank that takes part."""

    def pairs(self, length: int, size: int) -> int:
        return length * length

    def seconds(self, cells: float, pairs: float, size: int) -> float:
        return (cells + pairs / 1000) / size + 0.01 * cells * (size - 1) / size


@pytest.mark.parametrize("seed", range(30))
def test_every_document_is_in_one_group_that_holds_it_and_groups_tile_the_ranks_of_each_micro_batch(
    planner: Any, seed: int
) -> None:
    rng = np.random.default_rng(seed)
    ranks, limit = 2 ** int(rng.integers(0, 7)), int(rng.integers(64, 1000))
    first = 2 ** int(rng.integers(0, ranks.bit_length()))
    sizes = [first] if seed % 3 == 0 else [size for size in (1, 2, 4, 8, 16, 32, 64) if size <= ranks]
    longest = sizes[-1] * (limit // 2)  # rounded up to two parts a rank, it still fits
    drawn = rng.lognormal(5, 1.5, int(rng.integers(1, 300))).astype(int)
    lengths = np.clip(drawn, 1, longest).tolist()

    plan = planner.plan_groups(lengths, ranks, limit, Costs(), sizes)

    found = [document for groups in plan for group in groups for document in group.documents]
    assert sorted(found) == list(range(len(lengths)))
    for groups in plan:
        own = [group.size for group in groups]
        assert set(own) <= set(sizes)
        assert sum(own) == ranks, "every rank has each micro-batch once"
        assert all(sum(own[:place]) % size == 0 for place, size in enumerate(own))
        for group in groups:
            parts = [
                2 * group.size * int(np.ceil(lengths[document] / (2 * group.size)))
                if group.size > 1
                else lengths[document]
                for document in group.documents
            ]
            assert sum(parts) == group.cells <= group.size * limit


def test_long_documents_get_many_ranks_and_short_ones_one(planner: Any) -> None:
    lengths = [4000] + [100] * 120
    (groups,) = planner.plan_groups(lengths, 32, 1000, Costs(), [1, 2, 4, 8, 16, 32])
    (long,) = (group for group in groups if 0 in group.documents)
    assert long.size == 16
    assert {group.size for group in groups if group is not long} == {1}
    fixed = planner.plan_groups(lengths, 32, 1000, Costs(), [4])
    assert planner.seconds_of([groups], Costs()) < planner.seconds_of(fixed, Costs()) / 2
