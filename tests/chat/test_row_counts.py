"""Rows and tokens balance, whatever is added to what."""

from __future__ import annotations

import json
import pickle

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from raysvc.chat.row_counter import EXAMPLES, REASONS, Ledger
from raysvc.chat.row_counts import Books, Quarantined, check_quarantine
from raysvc.chat.row_errors import RowDropped, RowFault
from raysvc.errors import QuarantineExceeded

counts = st.dictionaries(st.sampled_from(["a", "b", "c"]), st.integers(1, 9))


@st.composite
def books(draw: st.DrawFn) -> Books:
    dropped, quarantined, written = draw(counts), draw(counts), draw(st.integers(0, 9))
    trained, context, truncated = (draw(st.integers(0, 99)) for _ in range(3))
    rows = written + sum(dropped.values()) + sum(quarantined.values())
    return Books(
        rows, written, dropped, quarantined, trained + context + truncated, trained, context, truncated
    )


@given(books(), books(), books())
@settings(deadline=None)
def test_books_add_up_in_any_grouping_and_stay_balanced(one: Books, two: Books, three: Books) -> None:
    assert (one + two) + three == one + (two + three)
    assert one + Books() == one
    (one + two + three).check()


@given(books())
@settings(deadline=None)
def test_books_come_back_from_json(one: Books) -> None:
    assert Books.from_json(json.loads(json.dumps(one.to_json()))) == one


@pytest.mark.parametrize(
    "wrong", [Books(rows_in=2, rows_written=1), Books(tokens_rendered=3, tokens_trained=1, tokens_context=1)]
)
def test_books_that_do_not_balance_are_our_fault(wrong: Books) -> None:
    with pytest.raises(AssertionError, match="do not balance"):
        wrong.check()


def test_the_ledger_counts_every_row_once_and_keeps_a_few_examples() -> None:
    ledger = Ledger("data.jsonl")
    for row in range(100):
        ledger.leave_out(row, RowFault("bad", f"number {row}") if row % 2 else RowDropped("too long"))
    closed = ledger.books(written=7, rendered=30, trained=10, context=15)
    assert (closed.rows_in, closed.dropped, closed.quarantined) == (107, {"too long": 50}, {"bad": 50})
    assert closed.tokens_truncated == 5
    assert str(ledger.examples[0]) == "data.jsonl:1: bad (number 1)"
    assert len(ledger.examples) == EXAMPLES


def test_many_different_reasons_are_counted_together() -> None:
    ledger = Ledger("")
    for row in range(REASONS + 20):
        ledger.leave_out(row, RowFault(f"reason {row}"))
    closed = ledger.books(0, 0, 0, 0)
    assert len(closed.quarantined) == REASONS + 1
    assert closed.quarantined["other faults"] == 20


def test_too_many_quarantined_rows_name_the_three_commonest_reasons_with_an_example() -> None:
    closed = Books(rows_in=100, rows_written=85, quarantined={"one": 1, "two": 2, "five": 5, "seven": 7})
    examples = [Quarantined(41, "seven", "what it was", "d"), Quarantined(42, "five")]
    check_quarantine(closed, examples, max_share=0.15)
    with pytest.raises(QuarantineExceeded) as caught:
        check_quarantine(closed, examples, max_share=0.149)
    text = str(pickle.loads(pickle.dumps(caught.value)))
    assert "15 of 100 rows" in text
    assert text.index("seven (7 rows, e.g. row d:41: what it was)") < text.index("five (5 rows, e.g. row 42)")
    assert "two (2 rows)" in text
    assert "one (" not in text


def test_a_row_fault_says_what_and_which() -> None:
    assert str(RowFault("broken", "at 3")) == "broken: at 3"
    assert str(RowFault("broken")) == "broken"
