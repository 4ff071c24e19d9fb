"""Shows an entry, a plan, a step or a shard in a notebook: a small table, every text escaped."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from html import escape
from typing import Any

MAX_TEXT = 120


def facts_html(title: str, facts: Mapping[str, Any]) -> str:
    """A two-column table."""
    rows = "".join(
        f"<tr><th style='text-align:left'>{escape(name)}</th><td style='text-align:left'>{_shown(value)}</td></tr>"
        for name, value in facts.items()
    )
    return f"<table><caption style='text-align:left'>{escape(title)}</caption>{rows}</table>"


def records_html(title: str, names: Sequence[str], lines: Sequence[Sequence[Any]]) -> str:
    """A table that opens by a click."""
    head, *body = (
        "".join(f"<{tag} style='text-align:left'>{_shown(value)}</{tag}>" for value in line)
        for tag, some in (("th", [names]), ("td", lines))
        for line in some
    )
    rows = "".join(f"<tr>{line}</tr>" for line in body)
    return f"<details><summary>{escape(title)}</summary><table><tr>{head}</tr>{rows}</table></details>"


def spans_html(spans: Iterable[tuple[str, bool, bool]], most: int | None = None) -> str:
    """Text as (text, trained, special): what is trained is marked, and special tokens are blue.

    Args:
        most: characters; None: all of them.
    """
    inside, left = "", most
    for text, trained, special in spans:
        shown = escape(text[:left])
        shown = f"<span style='color:#2f6fde'>{shown}</span>" if special else shown
        inside += f"<mark>{shown}</mark>" if trained else shown
        left = None if left is None else left - len(text)
        if left is not None and left < 0:
            inside += "…"
            break
    return f"<div style='white-space:pre-wrap;overflow-wrap:anywhere'>{inside}</div>"


def facts_text(title: str, facts: Mapping[str, Any]) -> str:
    """The same in one line."""
    return f"<{title}: {', '.join(f'{name} {_plain(value)}' for name, value in facts.items())}>"


def _shown(value: Any) -> str:
    return escape(_plain(value))


def _plain(value: Any) -> str:
    text = f"{value:,}" if isinstance(value, int) and not isinstance(value, bool) else str(value)
    return text if len(text) <= MAX_TEXT else f"{text[: MAX_TEXT - 1]}…"
