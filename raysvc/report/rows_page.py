"""Rows as an HTML page to send to somebody: style inside, no script, nothing to fetch, every text escaped."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape

from raysvc.inspect.row_media import ShownMedium
from raysvc.inspect.row_view import RowPicture
from raysvc.report.browse import text_html
from raysvc.report.page import STYLE
from raysvc.report.pictures import picture_figure

MORE_STYLE = ".row{max-height:none}.row i{font-style:normal;color:var(--hue)}.card{margin-bottom:12px}.card p{margin:0 0 6px}"
MORE_STYLE += "figure{margin:6px 0;font-size:12px;overflow-wrap:anywhere}figure img{display:block}"


def render_rows(
    title: str,
    facts: Sequence[str],
    rows: Sequence[tuple[str, RowPicture]],
    media: Mapping[int, Sequence[ShownMedium]] | None = None,
) -> str:
    """A page of (headline, row), with small pictures of the media of some rows inside the page."""
    shown = {row: "".join(map(picture_figure, some)) for row, some in (media or {}).items()}
    said = "".join(f"<p>{escape(fact)}</p>" for fact in facts)
    cards = "".join(
        f"<div class='card'><p>{escape(head)}</p><div class='row'>{text_html(row)}</div>{shown.get(row.row_id, '')}</div>"
        for head, row in rows
    )
    return (
        f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>{escape(title)}</title>'
        f'<meta name="viewport" content="width=device-width"><style>{STYLE}{MORE_STYLE}</style></head><body>'
        f"<h1>{escape(title)}</h1><p>Marked text has loss.</p>{said}{cards}</body></html>\n"
    )
