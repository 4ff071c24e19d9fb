"""Rows of an entry that one can look through: search, choose a source, sort, open one.

Always true:
- every text is escaped, and the page's script only shows and orders rows that stand in the page; without it the first are there;
- at most `SHOWN` rows more are drawn at a time, so that a browser is quick with as many as a page holds;
- a long text is cut in its middle, and says how much is left out.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from html import escape
from typing import TYPE_CHECKING, Any, NamedTuple

from raysvc.inspect.row_view import Kind, RowPicture, TextRun, row_picture
from raysvc.row_ids import written

if TYPE_CHECKING:
    from raysvc.row_batch import RowBatch

TAGS: dict[Kind, str] = {"trained": "b", "special": "i", "context": "span"}
END_CHARACTERS = 2000  # of each end of a long text
SHOWN = 100
BEGIN_CHARACTERS = 120  # of what is seen of a row that is not open
STYLE = """
.browse{display:flex;flex-wrap:wrap;gap:8px;align-items:center;margin-bottom:8px}.browse[hidden],.browse [hidden]{display:none}
.browse input,.browse select,#more{font:inherit;color:inherit;background:var(--card);border:1px solid var(--line);border-radius:6px;padding:4px 8px;max-width:100%}
#rows details{border-bottom:1px solid var(--line)}#rows summary{cursor:pointer;padding:5px 0;overflow:hidden;white-space:nowrap;text-overflow:ellipsis}
#rows summary span{display:inline-block;min-width:84px;padding-right:10px;font-variant-numeric:tabular-nums}#rows summary q{quotes:none;color:var(--soft)}
#rows .row{max-height:60vh;padding:4px 0 12px}.row i{font-style:normal;color:var(--hue)}
"""


class BrowsedRow(NamedTuple):
    """One row, the source it comes from, and its loss where a run reported it."""

    row: RowPicture
    source: str
    loss: float | None = None


def browsed_rows(
    batch: RowBatch, sources: Sequence[str], tokenizer: object, losses: Mapping[int, float]
) -> list[BrowsedRow]:
    """The rows of a batch, with the source of each."""
    ids, mask, bounds = batch.tokens["input_ids"], batch.tokens["loss_mask"], batch.offsets.tolist()
    found = []
    for number, (row_id, source) in enumerate(zip(batch.row_ids.tolist(), sources, strict=True)):
        cells = slice(bounds[number], bounds[number + 1])
        picture = row_picture(row_id, ids[cells].tolist(), mask[cells].tolist(), tokenizer)
        found.append(BrowsedRow(picture, source, losses.get(row_id)))
    return found


def browse(rows: Sequence[BrowsedRow], num_rows: int, set_aside: Sequence[Mapping[str, Any]] = ()) -> str:
    """The section of a page.

    Args:
        num_rows: of the entry, of which these are some.
        set_aside: quarantined rows: where they are, reason and detail.
    """
    which = "All rows"
    if len(rows) != num_rows:
        worst = " and those of the highest loss" if any(one.loss is not None for one in rows) else ""
        which = f"{len(rows):,} of {num_rows:,} rows, evenly spread, with the longest, the shortest{worst}"
    drawn = [*map(_row, rows), *map(_row_aside, set_aside)]
    return (
        f"<h2>Rows</h2><p>{which}. Marked text has loss; a click opens a row. <code>raysvc show --row N</code> prints any row.</p>"
        "<div class='browse' id='browse' hidden><input type='search' id='find' placeholder='Search' aria-label='Search rows'>"
        "<select id='source' aria-label='Source'><option value=''>all sources</option></select>"
        "<select id='state' aria-label='State'><option value=''>in the entry</option></select><select id='order' aria-label='Order'></select><span id='count'></span></div>"
        f"<div id='rows'>{''.join(drawn[: min(len(rows), SHOWN)])}</div>"
        f"<template id='further'>{''.join(drawn[min(len(rows), SHOWN) :])}</template><button id='more' hidden>{SHOWN} more</button>"
    )


def _row(one: BrowsedRow) -> str:
    row = one.row
    share = row.trained / max(row.length, 1)
    text = "".join(run.text for run in row.stretches if run.kind != "special")
    begin = escape(" ".join(text[: 4 * BEGIN_CHARACTERS].split())[:BEGIN_CHARACTERS])
    parts = "".join(run_html(run, row.trained_special) for run in _cut(row.stretches))
    loss = "" if one.loss is None else f"<span>loss {one.loss:.3f}</span>"
    return (
        f"<details data-tokens='{row.length}' data-share='{share:.4f}' data-source='{escape(one.source)}' "
        f"data-loss='{'' if one.loss is None else f'{one.loss:.4f}'}'>"
        f"<summary><span>{written(row.row_id)}</span><span>{row.length:,} tokens</span><span>{share:.0%} trained</span>{loss}<q>{begin}</q>"
        f"</summary><div class='row'>{parts}</div></details>"
    )


def _row_aside(one: Mapping[str, Any]) -> str:
    why, source = escape(str(one["reason"])), escape(str(one.get("dataset") or ""))
    return (
        f"<details data-source='{source}' data-why='{why}'><summary><span>source row {one['source_row']}</span>"
        f"<span>quarantined</span><q>{why}</q></summary><div class='row'>{escape(str(one['detail']))}</div></details>"
    )


def run_html(run: TextRun, special: Sequence[str] = ()) -> str:
    """Text of one kind; what it has of `special` is marked in trained text too."""
    inside = escape(run.text)
    if run.kind == "trained":
        for text in map(escape, special):
            inside = inside.replace(text, f"<i>{text}</i>")
    return f"<{TAGS[run.kind]}>{inside}</{TAGS[run.kind]}>"


def _cut(runs: Sequence[TextRun]) -> Iterator[TextRun]:
    """The runs without the middle of their text, where it is long."""
    total = sum(len(run.text) for run in runs)
    first, last = END_CHARACTERS, total - END_CHARACTERS
    if last <= first:
        yield from runs
        return
    at = 0
    for run in runs:
        begin, end = at, at + len(run.text)
        at = end
        if begin < first:
            yield TextRun(run.text[: first - begin], run.kind)
        if begin < first <= end:
            yield TextRun(f" […{last - first:,} characters…] ", "special")
        if end > last:
            yield TextRun(run.text[max(last - begin, 0) :], run.kind)
