"""Both tiers together try all examples of a property test; the first tries an eighth of them."""

from __future__ import annotations

import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.conftest import pytest_collection_modifyitems

MAKEFILE = (Path(__file__).parents[2] / "Makefile").read_text()


def tier(target: str) -> str:
    """The marks that a target of the Makefile asks for."""
    found = re.search(rf'^{target}: dev\n\t.*?pytest -m ("[^"]*"|\S+)', MAKEFILE, re.MULTILINE)
    assert found is not None
    return found[1].strip('"')


@pytest.mark.parametrize(
    ("marks", "of_80", "of_12", "of_3"),
    [
        (tier("test"), 10, 5, 3),
        (tier("test-long"), 80, 12, 3),
        (tier("coverage"), 80, 12, 3),
        ("", 80, 12, 3),
    ],
)
def test_a_tier_tries_its_share_of_the_examples(
    marks: str, of_80: int, of_12: int, of_3: int, request: pytest.FixtureRequest
) -> None:
    tried: dict[int, list[int]] = {80: [], 12: [], 3: []}

    def item(most: int) -> pytest.Function:
        @settings(max_examples=most)
        @given(st.integers())
        def holds(number: int) -> None:
            tried[most].append(number)

        return cast(
            pytest.Function, pytest.Function.from_parent(request.node.parent, name="holds", callobj=holds)
        )

    items: list[Any] = [item(most) for most in tried]
    config: Any = SimpleNamespace(option=SimpleNamespace(markexpr=marks))
    pytest_collection_modifyitems(config, items)
    for each in items:
        each.function()
    assert [len(numbers) for numbers in tried.values()] == [of_80, of_12, of_3]


def test_the_second_tier_takes_the_property_tests_of_the_first() -> None:
    assert tier("test") == "not slow"
    assert tier("test-long") == "slow or hypothesis"
