"""Rows as an HTML page to send to somebody: style inside, no script, nothing to fetch, every text escaped."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape

from raysvc.inspect.row_view import Kind, RowPicture
from raysvc.report.page import STYLE

TAGS: Mapping[Kind, str] = {"trained": "b", "special": "i", "context": "span"}
MORE_STYLE = ".row{max-height:none}.row i{font-style:normal;color:var(--hue)}.card{margin-bottom:12px}.card p{margin:0 0 6px}"


def render_rows(title: str, facts: Sequence[str], rows: Sequence[tuple[str, RowPicture]]) -> str:
    """A page of (headline, row)."""
    said = "".join(f"<p>{escape(fact)}</p>" for fact in facts)
    cards = "".join(f"<div class='card'><p>{escape(head)}</p>{row_html(row)}</div>" for head, row in rows)
    return (
        f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>{escape(title)}</title>'
        f'<meta name="viewport" content="width=device-width"><style>{STYLE}{MORE_STYLE}</style></head><body>'
        f"<h1>{escape(title)}</h1><p>Marked text has loss.</p>{said}{cards}</body></html>\n"
    )


def row_html(row: RowPicture) -> str:
    """The text of a row."""
    parts = (f"<{TAGS[kind]}>{escape(text)}</{TAGS[kind]}>" for text, kind in row.stretches)
    return f"<div class='row'>{''.join(parts)}</div>"
