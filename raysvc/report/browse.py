"""Rows of an entry that one can look through: search, choose a source or a reason, sort, open one.

Axes: N rows, T tokens of those that the page holds, K different ones.
Always true:
- facts of rows and tokens of all, or of as many as there is room for, lie packed in the page; its script makes their text of
  the bytes of each token, and draws only those that are looked at;
- a row without its middle says how many tokens are left out;
- the two rows of a pair stand together, whatever is searched or sorted by, and have one loss, which is told at the first.
"""

from __future__ import annotations

import base64
import json
import re
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from html import escape
from typing import TYPE_CHECKING, Any

import numpy as np

from raysvc.inspect.row_view import Kind, RowPicture, TextRun
from raysvc.row_ids import written

if TYPE_CHECKING:
    import numpy.typing as npt

TAGS: dict[Kind, str] = {"trained": "b", "special": "i", "context": "span"}
SHOWN = 100
STYLE = """
.browse{display:flex;flex-wrap:wrap;gap:8px;align-items:center;margin-bottom:8px}.browse[hidden],.browse [hidden]{display:none}
.browse input,.browse select,#more{font:inherit;color:inherit;background:var(--card);border:1px solid var(--line);border-radius:6px;padding:4px 8px;max-width:100%}
#rows>details{border-bottom:1px solid var(--line)}#rows summary{cursor:pointer;padding:5px 0;overflow:hidden;white-space:nowrap;text-overflow:ellipsis}
#rows summary span{display:inline-block;min-width:84px;padding-right:10px;font-variant-numeric:tabular-nums}#rows summary q{quotes:none;color:var(--soft)}#rows .aside>summary{white-space:normal}
@media(max-width:640px){#rows summary q{display:block;overflow:hidden;text-overflow:ellipsis}}
#rows>.first{border-bottom:0}#rows>.second{border-left:3px solid var(--line);padding-left:10px}
#rows .row{max-height:60vh;padding:4px 0 12px}.row i{font-style:normal;color:var(--hue)}#rows p{margin:0 0 4px;overflow-wrap:anywhere}
.ids{display:flex;flex-wrap:wrap;gap:4px;font-size:11px;max-height:40vh;overflow:auto;margin-bottom:12px}
.ids i{font-style:normal;color:var(--hue)}
.ids>*{border:1px solid var(--line);border-radius:3px;padding:0 3px;font-weight:400}.ids>b{color:var(--on);background:var(--onb)}.ids code{white-space:pre-wrap;display:block}
"""


@dataclass(frozen=True, eq=False)
class BrowsedRows:
    """Holds the rows of a page, column by column, in the order of the entry.

    Attributes:
        row_ids: [N], of every row that is listed.
        lengths: [N], its tokens.
        trained: [N], its tokens with loss.
        source: [N], the number of its source in `sources`.
        sources: names.
        kept: [N], how many of its tokens are in the page: all, none, or as many of its beginning as of its end.
        ids: int32 [T], the tokens that are kept, row after row.
        hits: bool [T], which of them have loss.
        pieces: id -> bytes of text, of the tokens of `ids`.
        num_rows: of the entry; a pair is two.
        special: those of them that are special tokens.
        losses: row id -> what a run reported last; of a pair it is that of its first row.
        steps: row id -> steps that trained it.
        untrained: row id -> why no step trains it.
        roles: [N], what each row of a pair is in it, a pair's two rows one after the other; empty where rows are no pairs.
    """

    row_ids: Sequence[int]
    lengths: Sequence[int]
    trained: Sequence[int]
    source: Sequence[int]
    sources: Sequence[str]
    kept: Sequence[int]
    ids: npt.NDArray[np.int32]
    hits: npt.NDArray[np.bool_]
    pieces: Mapping[int, bytes]
    num_rows: int
    special: frozenset[int] = frozenset()
    losses: Mapping[int, float] = field(default_factory=dict)
    steps: Mapping[int, Sequence[int]] = field(default_factory=dict)
    untrained: Mapping[int, str] = field(default_factory=dict)
    roles: Sequence[str] = ()


def browse(
    rows: BrowsedRows, counts: Mapping[str, Any], set_aside: Sequence[Mapping[str, Any]], command: str
) -> str:
    """The section of a page.

    Args:
        rows: of the entry, all or some.
        counts: of the entry, which say how many rows were quarantined.
        set_aside: quarantined rows: where they are, reason, detail and what their source has of them.
        command: that shows a row, without the row.
    """
    listed, num_rows, told = len(rows.row_ids), rows.num_rows, int(np.count_nonzero(rows.kept))
    which = "All rows" if listed == num_rows else f"{listed:,} of {num_rows:,} rows, evenly spread"
    if told < listed:
        worst = ", and those of the highest loss" if rows.losses else ""
        which += f"; {told:,} of them with their text, which a search reads: evenly spread, some of each source, the longest, the shortest{worst}"
    counted = np.bincount(rows.ids)
    order = np.argsort(-counted, kind="stable")[: np.count_nonzero(counted)]
    return (
        f"<h2>Rows</h2><p>{which}. Marked text has loss; a click opens a row. <code>{escape(command)} --row N</code> prints any row.</p>"
        "<div class='browse' id='browse' hidden><input type='search' id='find' placeholder='Search' aria-label='Search rows'>"
        "<select id='source' aria-label='Source'><option value=''>all sources</option></select>"
        "<select id='state' aria-label='State'><option value=''>in the entry</option></select><select id='order' aria-label='Order'></select><span id='count'></span></div>"
        f"<div id='rows' data-shown='{SHOWN}'></div><button id='more' hidden>{SHOWN} more</button>"
        f'<script type="application/octet-stream" id="table">{_packed(_table(rows, counts, set_aside, command, order))}</script>'
        f'<script type="application/octet-stream" id="tokens">{_packed(_tokens(rows, order))}</script>'
    )


def _table(
    rows: BrowsedRows,
    counts: Mapping[str, Any],
    set_aside: Sequence[Mapping[str, Any]],
    command: str,
    order: npt.NDArray[np.intp],
) -> bytes:
    """JSON of what is known of the rows, and of the K tokens in `order`."""
    ids = list(map(int, rows.row_ids))
    table = {
        "command": command,
        "rows": rows.num_rows,
        "quarantined": counts["quarantined"],
        "id": list(map(written, ids)),
        "tokens": list(map(int, rows.lengths)),
        "trained": list(map(int, rows.trained)),
        "source": list(map(int, rows.source)),
        "sources": list(rows.sources),
        "loss": [None if row not in rows.losses else round(rows.losses[row], 4) for row in ids],
        "steps": [rows.steps.get(row) for row in ids],
        "untrained": [rows.untrained.get(row) for row in ids],
        "roles": list(rows.roles),
        "kept": list(map(int, rows.kept)),
        "ids": order.tolist(),
        "pieces": [rows.pieces[token].decode("latin-1") for token in order.tolist()],
        "special": [int(token in rows.special) for token in order.tolist()],
        "aside": [_aside(one, len(rows.sources) > 1) for one in set_aside],
    }
    text = json.dumps(table, separators=(",", ":"), ensure_ascii=False, allow_nan=False)
    return text.encode(errors="replace")


def _tokens(rows: BrowsedRows, order: npt.NDArray[np.intp]) -> bytes:
    """A bit of each token, whether it has loss; then its place in `order` in groups of seven bits, the lowest first (LEB128).

    Frequent tokens have small places: in a deflated page a token takes two thirds of a byte, where text takes more.
    """
    places = np.zeros(int(order.max(initial=-1)) + 1, np.int64)
    places[order] = np.arange(len(order))
    number = places[rows.ids]
    groups = 1 + (number > 0x7F) + (number > 0x3FFF)
    ends = np.cumsum(groups)
    stream = np.zeros(int(ends[-1]) if len(ends) else 0, np.uint8)
    for group in range(3):
        there = groups > group
        more = np.where(groups[there] > group + 1, 0x80, 0)
        stream[(ends - groups)[there] + group] = (number[there] >> 7 * group) & 0x7F | more
    return np.packbits(rows.hits).tobytes() + stream.tobytes()


def _packed(data: bytes) -> str:
    return base64.b64encode(zlib.compress(data)).decode()


def _aside(one: Mapping[str, Any], of_some: bool) -> dict[str, Any]:
    source = str(one.get("dataset") or "")
    shown = f"{source}:{one['source_row']}" if of_some and source else str(one["source_row"])
    told = {"why": one["reason"], "detail": one["detail"], "text": one.get("text", "")}
    return {"source": source, "shown": shown, **told}


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
