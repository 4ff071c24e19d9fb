"""The rule by which sources are starved."""

from __future__ import annotations

import itertools
import math

from raysvc.training.adapting import starved

GOOD = {"a": (10.0, 10), "b": (24.0, 20)}


def test_a_source_is_starved_above_the_factor_of_the_median_of_the_others() -> None:
    weights = {"a": 2.0, "b": 1.0, "bad": 1.0}
    assert starved(weights, {**GOOD, "bad": (23.0, 10)}, 2.0) == {"a": 2.0, "b": 1.0, "bad": 0.0}
    assert starved(weights, {**GOOD, "bad": (22.0, 10)}, 2.0) is None
    assert starved(weights, GOOD, 2.0) is None, "nothing of it was trained"
    assert starved({**weights, "bad": 0.0}, {**GOOD, "bad": (99.0, 1)}, 2.0) is None, "it is starved already"
    assert starved({"a": 1.0}, GOOD, 2.0) is None
    assert starved({"a": 1.0, "b": 1.0}, {"a": (5.0, 1), "b": (1.0, 1)}, 2.0) == {"a": 0.0, "b": 1.0}


def test_a_loss_of_nan_starves_its_source_and_no_other() -> None:
    for order in itertools.permutations("abcd"):
        losses = {name: (math.nan if name == "c" else 10.0, 10) for name in order}
        assert starved(dict.fromkeys(order, 1.0), losses, 2.0) == {"a": 1.0, "b": 1.0, "c": 0.0, "d": 1.0}
