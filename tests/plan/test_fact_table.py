"""Tables for notebooks."""

from raysvc.plan.fact_table import MAX_TEXT, facts_html, facts_text


def test_a_fact_is_a_row_of_the_table_and_no_text_of_it_is_markup():
    html = facts_html("<Plan>", {"rows": 12345, "name": "<b>", "shuffled": True})
    assert "&lt;Plan&gt;" in html
    assert "&lt;b&gt;" in html
    assert "<b>" not in html
    assert "12,345" in html
    assert "True" in html
    assert html.count("<tr>") == 3


def test_a_long_text_is_cut_and_marked():
    text = facts_text("Entry", {"uri": "x" * 500})
    assert "…" in text
    assert len(text) <= MAX_TEXT + len("<Entry: uri >")
