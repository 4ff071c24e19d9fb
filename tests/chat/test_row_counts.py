"""Rows and tokens balance, whatever is added to what."""

from __future__ import annotations

import json
import pickle
from contextlib import nullcontext

import pytest
from hypothesis import given
from hypothesis import strategies as st

from raysvc.chat.row_counter import EXAMPLES, REASONS, FirstRows, RowCounter
from raysvc.chat.row_counts import Quarantined, RowCounts, check_quarantine
from raysvc.chat.row_errors import RowDropped, RowFault
from raysvc.errors import QuarantineExceeded

counts = st.dictionaries(st.sampled_from(["a", "b", "c"]), st.integers(1, 9))


@st.composite
def row_counts(draw: st.DrawFn) -> RowCounts:
    dropped, quarantined, written = draw(counts), draw(counts), draw(st.integers(0, 9))
    trained, context, truncated = (draw(st.integers(0, 99)) for _ in range(3))
    rows = written + sum(dropped.values()) + sum(quarantined.values())
    return RowCounts(
        rows, written, dropped, quarantined, trained + context + truncated, trained, context, truncated
    )


@given(row_counts(), row_counts(), row_counts())
def test_row_counts_add_up_in_any_grouping_and_stay_balanced(
    one: RowCounts, two: RowCounts, three: RowCounts
) -> None:
    assert (one + two) + three == one + (two + three)
    assert one + RowCounts() == one
    (one + two + three).check()


@given(row_counts())
def test_row_counts_come_back_from_json(one: RowCounts) -> None:
    assert RowCounts(**json.loads(json.dumps(one.to_json()))) == one


@pytest.mark.parametrize(
    "wrong",
    [RowCounts(rows_in=2, rows_written=1), RowCounts(tokens_rendered=3, tokens_trained=1, tokens_context=1)],
)
def test_row_counts_that_do_not_balance_are_our_fault(wrong: RowCounts) -> None:
    with pytest.raises(AssertionError, match="do not balance"):
        wrong.check()


def test_the_counter_counts_every_row_once_and_keeps_a_few_examples() -> None:
    counter = RowCounter("data.jsonl")
    for row in range(200):
        counter.leave_out(row, RowFault("bad", f"number {row}") if row % 2 else RowDropped("too long"))
    closed = counter.row_counts(written=7, rendered=30, trained=10, context=15)
    assert (closed.rows_in, closed.dropped, closed.quarantined) == (207, {"too long": 100}, {"bad": 100})
    assert closed.tokens_truncated == 5
    assert str(counter.examples[0]) == "data.jsonl:1: bad (number 1)"
    assert len(counter.examples) == EXAMPLES == 50


def test_many_different_reasons_are_counted_together() -> None:
    counter = RowCounter("")
    for row in range(REASONS + 20):
        counter.leave_out(row, RowFault(f"reason {row}"))
    closed = counter.row_counts(0, 0, 0, 0)
    assert len(closed.quarantined) == REASONS + 1
    assert closed.quarantined["other faults"] == 20


def test_too_many_quarantined_rows_name_the_three_commonest_reasons_with_an_example() -> None:
    closed = RowCounts(rows_in=100, rows_written=85, quarantined={"one": 1, "two": 2, "five": 5, "seven": 7})
    examples = [Quarantined(41, "seven", "what it was", "d"), Quarantined(42, "five")]
    check_quarantine(closed, examples, max_share=0.15)
    with pytest.raises(QuarantineExceeded) as caught:
        check_quarantine(closed, examples, max_share=0.149)
    text = str(pickle.loads(pickle.dumps(caught.value)))
    assert "15 of 100 rows" in text
    assert text.index("seven (7 rows, e.g. row d:41: what it was)") < text.index("five (5 rows, e.g. row 42)")
    assert "two (2 rows)" in text
    assert "one (" not in text


def test_three_rows_are_shown_where_one_reason_has_them_all() -> None:
    closed = RowCounts(rows_in=9, quarantined={"bad": 9})
    examples = [Quarantined(row, "bad", detail) for row, detail in ((3, "x"), (4, "y"), (5, "x"), (6, "z"))]
    with pytest.raises(QuarantineExceeded, match=r"bad \(9 rows, e.g. rows 3 and 5: x, row 4: y\)"):
        check_quarantine(closed, examples, max_share=0.5)


@pytest.mark.parametrize(
    ("max_quarantine", "before", "rows", "bad", "ends"),
    [
        (0.01, 0, 999, 999, False),  # too few to decide
        (0.01, 0, 1000, 900, False),  # nine of ten
        (0.01, 0, 1000, 901, True),
        (0.95, 0, 1000, 950, False),  # the job allows it
        (0.95, 0, 1000, 951, True),
        (0.01, 500, 1000, 1000, False),  # those before may all be good
        (0.01, 500, 5000, 4951, True),
        (0.01, 1000, 5000, 5000, False),  # not of the build's first rows
    ],
)
def test_a_build_ends_early_when_nearly_all_of_its_first_rows_are_quarantined(
    max_quarantine: float, before: int, rows: int, bad: int, ends: bool
) -> None:
    expected = pytest.raises(QuarantineExceeded, match=f"{bad} of the first {rows} rows .* row 7: x")
    with expected if ends else nullcontext():
        FirstRows(max_quarantine, before).check(rows, {"bad": bad}, [Quarantined(7, "bad", "x")])


def test_a_row_fault_says_what_and_which() -> None:
    assert str(RowFault("broken", "at 3")) == "broken: at 3"
    assert str(RowFault("broken")) == "broken"
