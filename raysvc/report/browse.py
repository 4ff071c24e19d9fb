"""Rows of an entry that one can look through: search, choose a source or a reason, sort, open one.

Always true:
- facts of rows and the texts of some lie packed in the page; its script draws them as text, and only those that are looked at;
- a long text is cut in its middle, and says how much is left out.
"""

from __future__ import annotations

import base64
import json
import re
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from html import escape
from typing import Any

from raysvc.inspect.row_view import Kind, RowPicture, TextRun
from raysvc.row_ids import written

TAGS: dict[Kind, str] = {"trained": "b", "special": "i", "context": "span"}
END_CHARACTERS = 2000  # of each end of a long text
END_TOKENS = 500  # of each end of a long row
SHOWN = 100
STYLE = """
.browse{display:flex;flex-wrap:wrap;gap:8px;align-items:center;margin-bottom:8px}.browse[hidden],.browse [hidden]{display:none}
.browse input,.browse select,#more{font:inherit;color:inherit;background:var(--card);border:1px solid var(--line);border-radius:6px;padding:4px 8px;max-width:100%}
#rows>details{border-bottom:1px solid var(--line)}#rows summary{cursor:pointer;padding:5px 0;overflow:hidden;white-space:nowrap;text-overflow:ellipsis}
#rows summary span{display:inline-block;min-width:84px;padding-right:10px;font-variant-numeric:tabular-nums}#rows summary q{quotes:none;color:var(--soft)}
@media(max-width:640px){#rows summary q{display:block;overflow:hidden;text-overflow:ellipsis}}
#rows .row{max-height:60vh;padding:4px 0 12px}.row i{font-style:normal;color:var(--hue)}#rows p{margin:0 0 4px;overflow-wrap:anywhere}
.ids{display:flex;flex-wrap:wrap;gap:4px;font-size:11px;max-height:40vh;overflow:auto;margin-bottom:12px}
.ids>*{border:1px solid var(--line);border-radius:3px;padding:0 3px;font-weight:400}.ids>b{color:var(--on);background:var(--onb)}.ids code{white-space:pre-wrap;display:block}
"""


@dataclass(frozen=True)
class BrowsedRow:
    """Shows one row whose text is in the page.

    Attributes:
        picture: its text.
        ids: its tokens; an id with loss as -id - 1.
    """

    picture: RowPicture
    ids: Sequence[int] = ()


@dataclass(frozen=True)
class BrowsedRows:
    """Holds the rows of a page, column by column, in the order of the entry.

    Attributes:
        row_ids: of every row that is listed.
        lengths: its tokens.
        trained: its tokens with loss.
        source: the number of its source in `sources`.
        sources: names.
        texts: row id -> the row, of those whose text is in the page.
        losses: row id -> what a run reported last.
        steps: row id -> steps that trained it.
        pieces: id -> text, of the tokens of `texts`.
    """

    row_ids: Sequence[int]
    lengths: Sequence[int]
    trained: Sequence[int]
    source: Sequence[int]
    sources: Sequence[str]
    texts: Mapping[int, BrowsedRow]
    losses: Mapping[int, float] = field(default_factory=dict)
    steps: Mapping[int, Sequence[int]] = field(default_factory=dict)
    pieces: Mapping[int, str] = field(default_factory=dict)


def browse(
    rows: BrowsedRows, counts: Mapping[str, Any], set_aside: Sequence[Mapping[str, Any]], command: str
) -> str:
    """The section of a page.

    Args:
        rows: of the entry, all or some.
        counts: of the entry, which say how many rows there are.
        set_aside: quarantined rows: where they are, reason and detail.
        command: that shows a row, without the row.
    """
    listed, num_rows, told = len(rows.row_ids), counts["rows_written"], len(rows.texts)
    which = "All rows" if listed == num_rows else f"{listed:,} of {num_rows:,} rows, evenly spread"
    if told < listed:
        worst = ", and those of the highest loss" if rows.losses else ""
        which += f"; {told:,} of them with their text, which a search reads: evenly spread, some of each source, the longest, the shortest{worst}"
    return (
        f"<h2>Rows</h2><p>{which}. Marked text has loss; a click opens a row. <code>{escape(command)} --row N</code> prints any row.</p>"
        "<div class='browse' id='browse' hidden><input type='search' id='find' placeholder='Search' aria-label='Search rows'>"
        "<select id='source' aria-label='Source'><option value=''>all sources</option></select>"
        "<select id='state' aria-label='State'><option value=''>in the entry</option></select><select id='order' aria-label='Order'></select><span id='count'></span></div>"
        f"<div id='rows' data-shown='{SHOWN}'></div><button id='more' hidden>{SHOWN} more</button>"
        f'<script type="application/octet-stream" id="table">{_packed(_table(rows, counts, set_aside, command))}</script>'
    )


def _table(
    rows: BrowsedRows, counts: Mapping[str, Any], set_aside: Sequence[Mapping[str, Any]], command: str
) -> dict[str, Any]:
    ids = list(map(int, rows.row_ids))
    return {
        "command": command,
        "written": counts["rows_written"],
        "quarantined": counts["quarantined"],
        "id": list(map(written, ids)),
        "tokens": list(map(int, rows.lengths)),
        "trained": list(map(int, rows.trained)),
        "source": list(map(int, rows.source)),
        "sources": list(rows.sources),
        "loss": [None if row not in rows.losses else round(rows.losses[row], 4) for row in ids],
        "steps": [rows.steps.get(row) for row in ids],
        "texts": [_told(rows.texts[row]) if row in rows.texts else None for row in ids],
        "pieces": rows.pieces,
        "aside": [_aside(one, len(rows.sources) > 1) for one in set_aside],
    }


def _packed(table: Mapping[str, Any]) -> str:
    text = json.dumps(table, separators=(",", ":"), ensure_ascii=False, allow_nan=False)
    return base64.b64encode(zlib.compress(text.encode(errors="replace"))).decode()


def _told(row: BrowsedRow) -> dict[str, Any]:
    runs = [list(one) for one in _marks(_cut(row.picture.stretches), row.picture.trained_special)]
    return {"runs": runs, "ids": row.ids} if row.ids else {"runs": runs}


def _aside(one: Mapping[str, Any], of_some: bool) -> dict[str, Any]:
    source = str(one.get("dataset") or "")
    shown = f"{source}:{one['source_row']}" if of_some and source else str(one["source_row"])
    return {"source": source, "why": one["reason"], "detail": one["detail"], "shown": shown}


def text_html(row: RowPicture) -> str:
    """The text of a row, for a page without a script."""
    text = ""
    for tags, inside in _marks(row.stretches, row.trained_special):
        begin, end = (f"<{tags.replace(' ', '><')}>", "".join(f"</{tag}>" for tag in tags.split()[::-1]))
        text += f"{begin}{escape(inside)}{end}"
    return text


def _marks(runs: Sequence[TextRun] | Iterator[TextRun], special: Sequence[str]) -> Iterator[tuple[str, str]]:
    """(tags, text): the tags stand one in the other; what there is of `special` in trained text is marked too."""
    either = re.compile(
        "|".join(re.escape(text) for text in sorted(special, key=len, reverse=True)) or "(?!)"
    )
    for run in runs:
        if run.kind != "trained":
            yield TAGS[run.kind], run.text
            continue
        at = 0
        for found in either.finditer(run.text):
            if at < found.start():
                yield "b", run.text[at : found.start()]
            yield "b i", found[0]
            at = found.end()
        if at < len(run.text):
            yield "b", run.text[at:]


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
