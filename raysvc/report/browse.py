"""Rows of an entry that one can look through: search, choose a source, sort, open one.

Always true:
- every text is escaped, and the page's script only hides and orders rows that stand in the page; without it all of them are there;
- a long text is cut in its middle, and says how much is left out.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from html import escape
from typing import TYPE_CHECKING, NamedTuple

from raysvc.inspect.row_view import Kind, RowPicture, TextRun, row_picture
from raysvc.row_ids import written

if TYPE_CHECKING:
    from raysvc.row_batch import RowBatch

TAGS: dict[Kind, str] = {"trained": "b", "special": "i", "context": "span"}
END_CHARACTERS = 2000  # of each end of a long text
BEGIN_CHARACTERS = 120  # of what is seen of a row that is not open
STYLE = """
.browse{display:flex;flex-wrap:wrap;gap:8px;align-items:center;margin-bottom:8px}.browse[hidden],.browse [hidden]{display:none}
.browse input,.browse select{font:inherit;color:inherit;background:var(--card);border:1px solid var(--line);border-radius:6px;padding:4px 8px;max-width:100%}
#rows details{border-bottom:1px solid var(--line)}#rows summary{cursor:pointer;padding:5px 0;overflow:hidden;white-space:nowrap;text-overflow:ellipsis}
#rows summary span{display:inline-block;min-width:84px;padding-right:10px;font-variant-numeric:tabular-nums}#rows summary q{quotes:none;color:var(--soft)}
#rows .row{max-height:60vh;padding:4px 0 12px}.row i{font-style:normal;color:var(--hue)}
"""


class BrowsedRow(NamedTuple):
    """One row, and the source it comes from."""

    row: RowPicture
    source: str


def browsed_rows(batch: RowBatch, sources: Sequence[str], tokenizer: object) -> list[BrowsedRow]:
    """The rows of a batch, with the source of each."""
    ids, mask, bounds = batch.tokens["input_ids"], batch.tokens["loss_mask"], batch.offsets.tolist()
    found = []
    for number, (row_id, source) in enumerate(zip(batch.row_ids.tolist(), sources, strict=True)):
        cells = slice(bounds[number], bounds[number + 1])
        picture = row_picture(row_id, ids[cells].tolist(), mask[cells].tolist(), tokenizer)
        found.append(BrowsedRow(picture, source))
    return found


def browse(rows: Sequence[BrowsedRow], num_rows: int) -> str:
    """The section of a page.

    Args:
        num_rows: of the entry, of which these are some.
    """
    which = "All rows" if len(rows) == num_rows else f"{len(rows)} of {num_rows:,} rows, evenly spread"
    return (
        f"<h2>Rows</h2><p>{which}. Marked text has loss; a click opens a row. <code>raysvc show --row N</code> prints any row.</p>"
        "<div class='browse' id='browse' hidden><input type='search' id='find' placeholder='Search' aria-label='Search rows'>"
        "<select id='source' aria-label='Source'><option value=''>all sources</option></select>"
        "<select id='order' aria-label='Order'></select><span id='count'></span></div>"
        f"<div id='rows'>{''.join(map(_row, rows))}</div>"
    )


def _row(one: BrowsedRow) -> str:
    row = one.row
    share = row.trained / max(row.length, 1)
    text = "".join(run.text for run in row.stretches if run.kind != "special")
    begin = escape(" ".join(text[: 4 * BEGIN_CHARACTERS].split())[:BEGIN_CHARACTERS])
    parts = "".join(f"<{TAGS[run.kind]}>{escape(run.text)}</{TAGS[run.kind]}>" for run in _cut(row.stretches))
    return (
        f"<details data-tokens='{row.length}' data-share='{share:.4f}' data-source='{escape(one.source)}'>"
        f"<summary><span>{written(row.row_id)}</span><span>{row.length:,} tokens</span><span>{share:.0%} trained</span><q>{begin}</q>"
        f"</summary><div class='row'>{parts}</div></details>"
    )


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
