"""One schema for all puts of a server: who errs gets the error, and nothing becomes NaN."""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from raysvc.errors import SourceError
from raysvc.rl.group import Group
from raysvc.rl.group_table import groups_of, late_table, table_of
from raysvc.rl.schema import Schema, spans_of

NEEDED = ("input_ids", "labels", "logprobs", "reward")


def group(uid: str = "p", size: int = 2, **changes: Any) -> Group:
    fields: dict[str, Any] = {
        "tokens": {"logprobs": [np.full(3, -0.5, np.float32)] * size},
        "rows": {"reward": np.arange(size, dtype=np.float32)},
    }
    ids = [[number, 5, 6] for number in range(size)]
    return Group(uid, ids, [[0, 1, 1]] * size, **{**fields, **changes})


def columns(dtype: Any = np.float32, **rows: Any) -> dict[str, Any]:
    return {"tokens": {"logprobs": [np.full(3, -1, dtype)] * 2}, "rows": rows}


REWARD = np.zeros(2, np.float32)


@pytest.mark.parametrize(
    ("changes", "what"),
    [
        (columns(), "lacks the column 'reward'"),
        ({"rows": {"reward": REWARD}, "tokens": {}}, "lacks the column 'logprobs'"),
        (columns(reward=np.zeros(2, np.int64)), "has 'reward' of int64, other puts of float32"),
        (columns(np.float16, reward=REWARD), "has 'logprobs' of float16, other puts of float32"),
        (columns(np.int32, reward=REWARD), "has 'logprobs' of int32, other puts of float32"),
        (columns(reward=REWARD, length=REWARD), "has the column 'length', which other puts lack"),
    ],
)
def test_a_put_that_differs_from_the_first_is_refused_by_group_column_and_type(
    changes: dict[str, Any], what: str
) -> None:
    schema, odd = Schema(NEEDED), table_of([group("odd", **changes)])
    raced = schema.admit(odd) if len(changes["rows"]) and changes["tokens"] else None
    schema.fix(schema.admit(table_of([group("first")])))
    with pytest.raises(SourceError, match=f"group 'odd': {what}"):
        schema.admit(odd)
    if raced is not None:  # it was admitted before the first one was kept
        with pytest.raises(SourceError, match=f"group 'odd': {what}"):
            schema.fix(raced)
    schema.admit(table_of([group("next")]))


def test_the_first_put_must_have_what_the_plan_trains() -> None:
    schema = Schema(NEEDED)
    with pytest.raises(SourceError, match=r"has no 'reward', which plan.columns names"):
        schema.admit(table_of([group(**columns())]))
    assert not schema.types, "a put that is refused fixes nothing"


def test_a_declared_default_fills_what_is_missing_and_nothing_else() -> None:
    schema = Schema(NEEDED, defaults={"reward": 0.5, "logprobs": -1.0})
    schema.fix(schema.admit(table_of([group()])))
    rows = schema.admit(table_of([Group("q", [[1, 2]], [[0, 1]])])).rows
    assert rows.column("row.reward").to_pylist() == [0.5]
    assert rows.column("token.logprobs").to_pylist() == [[-1.0, -1.0]]
    table = table_of([group("null")])
    holed = table.set_column(
        table.column_names.index("row.reward"), "row.reward", pa.array([None, 2.0], pa.float32())
    )
    assert schema.admit(holed).rows.column("row.reward").to_pylist() == [0.5, 2.0]
    strict = Schema(NEEDED)
    with pytest.raises(SourceError, match="lacks a value of 'reward'"):
        strict.admit(holed)


def test_late_columns_are_kept_apart_whether_they_come_with_their_rows_or_after() -> None:
    schema = Schema(NEEDED, late=("reward",))
    early = schema.admit(table_of([group()]))
    schema.fix(early)
    assert early.late is not None
    assert early.late.column("row.reward").to_pylist() == [0.0, 1.0]
    later = schema.admit(table_of([group("late", **columns())]))
    assert (later.late, later.rows.schema) == (None, early.rows.schema)
    schema.admit_late(late_table("late", {"reward": np.zeros(2, np.float32)}))
    with pytest.raises(SourceError, match="'value' is not declared late"):
        schema.admit_late(late_table("late", {"value": [1.0, 2.0]}))
    with pytest.raises(SourceError, match="has 'reward' of int64, and it is float32"):
        schema.admit_late(late_table("late", {"reward": np.zeros(2, np.int64)}))


@pytest.mark.parametrize(
    "fields",
    [
        {"uid": 7},
        {"attempt": 1.5},
        {"attempt": True},
        {"weight_version": "1"},
        {"input_ids": [[1.9, 2.0]]},
        {"loss_mask": [[0, 0.5]]},
        {"first_row": -1},
        {"attempt": 2**63},
        {"closed": "no"},
        {"uid": "p\0"},
        {"uid": "\ud800"},
        {"input_ids": [[1, 2**32 + 5]]},
        {"input_ids": None},
        {"input_ids": 3},
        {"loss_mask": None},
        {"tokens": [1]},
        {"tokens": {"logprobs": None}},
        {"rows": 3},
        {"rows": {3: [1.0]}},
        {"rows": {"reward": np.ones(1, np.longdouble)}},
    ],
)
def test_what_is_no_text_or_no_number_of_its_kind_is_refused_and_never_rounded(
    fields: dict[str, Any],
) -> None:
    good: dict[str, Any] = {"uid": "p", "input_ids": [[1, 2]], "loss_mask": [[0, 1]]}
    table_of([Group(**good)])
    with pytest.raises(SourceError):
        table_of([Group(**{**good, **fields})])
    with pytest.raises(SourceError, match="got a dict"):
        table_of([{"uid": "p"}])  # type: ignore[list-item]


@pytest.mark.parametrize("name", ["labels", "position_ids", "attention_mask", "loss_weights", "row_tokens"])
def test_a_column_that_collation_makes_is_refused_and_not_replaced(name: str) -> None:
    for columns in ({"tokens": {name: [[1, 2]]}}, {"rows": {name: [1.0]}}):
        with pytest.raises(
            SourceError, match=f"has a column '{name}', and collation or the worker makes one"
        ):
            table_of([Group("p", [[1, 2]], [[0, 1]], **columns)])


@pytest.mark.parametrize("raw", [False, True])
@pytest.mark.parametrize(
    ("firsts", "whole"), [((0, 0), True), ((2, 3), True), ((1, 3), False), ((2, 0), False)]
)
def test_parts_of_a_group_in_one_put_follow_one_another_or_are_refused(
    firsts: tuple[int, int], whole: bool, raw: bool
) -> None:
    parts = [Group("p", [[number]], [[1]], first_row=first) for number, first in enumerate(firsts)]

    def rows() -> Any:
        table = pa.concat_tables([table_of([part]) for part in parts]) if raw else table_of(parts)
        return Schema(("input_ids",)).admit(table).rows

    if whole:
        (span,) = spans_of(rows())
        assert (span.first, span.stop - span.start) == (firsts[0], 2)
    else:
        with pytest.raises(SourceError, match=f"group 'p': has a part that begins at row {firsts[1]}"):
            rows()


@pytest.mark.parametrize(
    "order", [("a2", "a3", "b1", "c1"), ("a2", "b1", "a3", "c1"), ("b1", "a2", "c1", "a3")]
)
def test_groups_of_one_uid_and_attempt_in_one_put_are_one_group_of_all_their_rows(
    order: tuple[str, ...],
) -> None:
    parts = [group(name[0], int(name[1]), weight_version=int(name[1])) for name in order]
    back = {each.uid: each for each in groups_of(table_of(parts))}
    assert {uid: len(each.input_ids) for uid, each in back.items()} == {"a": 5, "b": 1, "c": 1}
    assert back["a"].rows["reward"].tolist() == [0, 1, 0, 1, 2]
    assert back["a"].weight_version.tolist() == [2, 2, 3, 3, 3], "each sequence keeps its own"
    raw = pa.concat_tables([table_of([part]) for part in parts])  # a table that nobody merged
    rows = Schema(NEEDED).admit(raw).rows
    spans = spans_of(rows)
    assert spans[0].key == (order[0][0], 0)
    assert {span.key[0]: span.stop - span.start for span in spans} == {"a": 5, "b": 1, "c": 1}


def test_a_column_whose_type_changes_within_one_put_is_refused() -> None:
    mixed = [group("a"), group("b", **columns(reward=np.zeros(2, np.int64)))]
    with pytest.raises(SourceError, match="group 'b': has 'reward' of int64, and 'a' has it of float32"):
        table_of(mixed)
