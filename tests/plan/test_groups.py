"""Groups from uids, and trajectories of step-wise rows."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from raysvc.errors import PlanError
from raysvc.plan.groups import Groups
from raysvc.ragged import offsets_of


@settings(max_examples=100)
@given(st.lists(st.sampled_from("abcdef"), min_size=1, max_size=40), st.data())
def test_groups_gather_the_rows_of_a_uid_by_first_appearance(uids, data):
    groups = Groups.of_uids(uids)
    names = list(dict.fromkeys(uids))
    assert groups.num_groups == len(names)
    asked = data.draw(st.lists(st.integers(0, len(names) - 1), max_size=8))
    rows, index = groups.rows_of(np.array(asked, np.int64))
    want = [(row, at) for at, g in enumerate(asked) for row, uid in enumerate(uids) if uid == names[g]]
    assert list(zip(rows.tolist(), index.tolist(), strict=True)) == want


@settings(max_examples=100)
@given(st.lists(st.integers(1, 4), min_size=1, max_size=12), st.data())
def test_runs_are_the_groups_of_uids_that_lie_together(sizes, data):
    uids = [str(group) for group, size in enumerate(sizes) for _ in range(size)]
    runs, gathered = Groups.of_runs(offsets_of(sizes)), Groups.of_uids(uids)
    assert (runs.num_rows, runs.num_groups) == (gathered.num_rows, gathered.num_groups)
    asked = np.array(data.draw(st.lists(st.integers(0, len(sizes) - 1), max_size=8)), np.int64)
    for ours, theirs in zip(runs.rows_of(asked), gathered.rows_of(asked), strict=True):
        assert ours.tolist() == theirs.tolist()


def test_without_uids_every_row_is_a_group_and_nothing_is_held():
    groups = Groups.singles(10**12)
    rows, index = groups.rows_of(np.array([5, 10**11]))
    assert rows.tolist() == [5, 10**11]
    assert index.tolist() == [0, 1]


def test_a_row_without_uid_is_named():
    with pytest.raises(PlanError, match="row 2 has an empty uid"):
        Groups.of_uids(["a", "b", "", "a"])


def test_the_digest_tells_partitions_apart():
    assert Groups.of_uids(["ab", "c"]).digest != Groups.of_uids(["a", "bc"]).digest
    assert Groups.of_runs(np.array([0, 2, 3])).digest != Groups.of_runs(np.array([0, 1, 3])).digest
