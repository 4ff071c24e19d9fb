"""One row on a terminal: its headline and its text, with the trained tokens marked."""

from __future__ import annotations

from typing import TYPE_CHECKING

from raysvc.cli.view import printable
from raysvc.progress import how_many

if TYPE_CHECKING:
    from rich.console import Console

    from raysvc.inspect.row_view import Kind, RowPicture

STYLES: dict[Kind, str] = {"trained": "bold green", "context": "dim", "special": "cyan"}


def print_picture(console: Console, head: str, picture: RowPicture) -> None:
    """Prints a row; what is trained stands between » and «."""
    from rich.text import Text

    text = Text()
    for words, kind in picture.stretches:
        words = printable(words)
        text.append(f"»{words}«" if kind == "trained" else words, style=STYLES[kind])
    console.print(Text(f"\n── {head}", style="bold"), soft_wrap=True)
    if not picture.is_dummy:
        console.print(text, soft_wrap=True)


def token_counts(picture: RowPicture) -> str:
    """Says how many tokens a row has, and how many of them are trained in how many turns."""
    turns = sum(stretch.kind == "trained" for stretch in picture.stretches)
    where = f" in {how_many(turns, 'turn')}" if turns else ""
    return f"{how_many(picture.length, 'token')}, {picture.trained} trained{where}"
