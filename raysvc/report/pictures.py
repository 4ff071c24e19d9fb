"""Media of rows as figures of a page: small pictures inside of it, with what the entry says of each.

Always true:
- a figure fetches nothing, and no text of it is markup;
- a gallery has at most `MOST_PICTURES` figures, and says how many of how many it shows.
"""

from __future__ import annotations

import base64
from collections.abc import Mapping, Sequence
from html import escape

from raysvc.inspect.row_media import ShownMedium
from raysvc.row_ids import written

MOST_PICTURES = 24
STYLE = ".media{display:grid;grid-template-columns:repeat(auto-fill,minmax(200px,1fr));gap:12px}"
STYLE += ".media figcaption{font-size:12px;overflow-wrap:anywhere}.media img{display:block;max-width:100%}"


def picture_figure(medium: ShownMedium, head: str = "") -> str:
    """One medium; `head` stands before what the entry says of it."""
    picture = medium.picture()
    inside = "no picture: it cannot be decoded here"
    if picture is not None:
        inside = f'<img alt="" src="data:image/jpeg;base64,{base64.b64encode(picture).decode()}">'
    return f"<figure>{inside}<figcaption>{escape(f'{head}{medium}')}</figcaption></figure>"


def gallery(media: Mapping[int, Sequence[ShownMedium]]) -> str:
    """The media of some rows, as many as fit; nothing where there are none."""
    found = [(row, medium) for row, each in media.items() for medium in each]
    if not found:
        return ""
    shown = found[:MOST_PICTURES]
    said = f"{len(shown)} of {len(found)} media of {len(media)} sampled rows."
    figures = "".join(picture_figure(medium, f"row {written(row)}: ") for row, medium in shown)
    return f"<h2>Media</h2><p>{said}</p><div class='media'>{figures}</div>"
