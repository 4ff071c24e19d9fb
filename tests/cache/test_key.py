"""Keys and recipes: what decides the bytes decides the key, and nothing else does."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from raysvc.cache.key import MISSING, Difference, cache_key, explain, nearest, rows_key

scalars = (
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text()
)
values = st.recursive(
    scalars,
    lambda item: st.lists(item, max_size=4) | st.dictionaries(st.text(), item, max_size=4),
    max_leaves=12,
)
recipes = st.dictionaries(st.text(), values, max_size=5)
quick = settings(max_examples=100)


def shuffled(value: Any, rng: random.Random) -> Any:
    """The same JSON with its fields in another order."""
    if isinstance(value, dict):
        items = [(name, shuffled(item, rng)) for name, item in value.items()]
        rng.shuffle(items)
        return dict(items)
    return [shuffled(item, rng) for item in value] if isinstance(value, list) else value


def places(value: Any, path: tuple = ()) -> list[tuple]:
    """Paths of everything in a recipe."""
    children = (
        value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    )
    return [path] + [place for name, item in children for place in places(item, (*path, name))]


def replaced(value: Any, path: tuple, new: Any) -> Any:
    if not path:
        return new
    if isinstance(value, dict):
        return value | {path[0]: replaced(value[path[0]], path[1:], new)}
    return [*value[: path[0]], replaced(value[path[0]], path[1:], new), *value[path[0] + 1 :]]


@quick
@given(recipes, st.randoms())
def test_the_order_of_fields_does_not_change_the_key(recipe, rng):
    assert cache_key(shuffled(recipe, rng)) == cache_key(recipe)
    assert explain(recipe, shuffled(recipe, rng)) == []


@quick
@given(recipes, scalars, st.data())
def test_any_change_of_a_recipe_changes_the_key_and_is_explained(recipe, new, data):
    path = data.draw(st.sampled_from(places(recipe)[1:] or [("added",)]))
    changed = replaced(recipe, path, new) if path != ("added",) else recipe | {"added": new}
    assume(json.dumps(changed, sort_keys=True) != json.dumps(recipe, sort_keys=True))
    assert cache_key(changed) != cache_key(recipe)
    assert explain(recipe, changed) != []


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ({"": {"": None}}, {"": None}),
        ({"a.b": 1}, {"a": {"b": 1}}),
        ({"a[0]": 1}, {"a": [1]}),
        ({"a": {"": 1}}, {"a": {".": 1}}),
        ({"": 1}, {'[""]': 1}),
    ],
)
def test_a_field_whose_name_looks_like_a_path_is_told_from_the_path(one, other):
    assert explain(one, other) != []
    assert explain(other, one) != []


@quick
@given(recipes, st.text(), scalars)
def test_a_field_more_changes_the_key(recipe, name, value):
    assume(name not in recipe)
    assert cache_key(recipe | {name: value}) != cache_key(recipe)


@given(st.lists(st.integers(), min_size=2, unique=True))
@quick
def test_the_order_of_a_list_counts(items):
    assert cache_key({"files": items}) != cache_key({"files": items[::-1]})


def test_a_key_is_64_hex_digits_and_the_same_in_another_process():
    recipe = {"b": [1, 2.5, None], "a": {"text": "grüße 🙂 \ud800"}}
    code = f"from raysvc.cache.key import cache_key; print(cache_key({recipe!a}))"
    environ = os.environ | {"PYTHONHASHSEED": "77", "PYTHONPATH": os.pathsep.join(sys.path)}
    other = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, env=environ
    )
    assert other.stdout.strip() == cache_key(recipe)
    assert len(cache_key(recipe)) == 64
    assert set(cache_key(recipe)) <= set("0123456789abcdef")


@pytest.mark.parametrize(
    "value", [float("nan"), float("inf"), b"bytes", {1, 2}, {1: "x"}, object(), Path("/x")]
)
def test_what_json_cannot_say_exactly_is_refused(value):
    with pytest.raises(TypeError, match="a"):
        cache_key({"a": [value]})


def test_a_difference_says_where_and_what():
    a = {"source": {"files": [{"size": 1}, {"size": 2}]}, "only_a": 1}
    b = {"source": {"files": [{"size": 1}, {"size": 3}]}, "text": "x" * 1000}
    assert explain(a, b) == [
        Difference("only_a", 1, MISSING),
        Difference("source.files[1].size", 2, 3),
        Difference("text", MISSING, "x" * 1000),
    ]
    assert str(explain(a, b)[1]) == "source.files[1].size: 2 -> 3"
    assert len(str(explain(a, b)[2])) < 120


def test_the_nearest_recipe_has_the_fewest_differences():
    others = {"far": {"a": 1, "b": 1, "c": 1}, "near": {"a": 1, "b": 2, "c": 1}}
    assert nearest({"a": 1, "b": 2, "c": 3}, others) == ("near", [Difference("c", 1, 3)])
    assert nearest({"a": 1}, {}) is None


def test_private_entries_of_one_recipe_have_one_key_of_their_rows():
    shared = {"source": "s", "format": 4}
    more = {**shared, "added": [{"to": cache_key(shared), "columns": {"x": 1}}]}
    most = {**more, "added": [*more["added"], {"to": cache_key(more), "columns": {"y": 2}}]}
    for name in ("one", "another"):
        mine = {**shared, "private": name, "shared": cache_key(shared)}
        with_more = {**mine, "added": [{"to": cache_key(mine), "columns": {"x": 1}}]}
        last = {"to": cache_key(with_more), "columns": {"y": 2}}
        with_most = {**with_more, "added": [*with_more["added"], last]}
        for private, known in ((mine, shared), (with_more, more), (with_most, most)):
            key = cache_key(private)
            assert key != rows_key(key, private) == cache_key(known) == rows_key(cache_key(known), known)
