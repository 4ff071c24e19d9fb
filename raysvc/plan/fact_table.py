"""Shows an entry, a plan, a step or a shard in a notebook: a small table, every text escaped."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
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


def spans_html(spans: Sequence[tuple[str, bool]]) -> str:
    """Text with what is trained marked."""
    inside = "".join(f"<mark>{escape(text)}</mark>" if trained else escape(text) for text, trained in spans)
    return f"<div style='white-space:pre-wrap;overflow-wrap:anywhere'>{inside}</div>"


def facts_text(title: str, facts: Mapping[str, Any]) -> str:
    """The same in one line."""
    return f"<{title}: {', '.join(f'{name} {_plain(value)}' for name, value in facts.items())}>"


def _shown(value: Any) -> str:
    return escape(_plain(value))


def _plain(value: Any) -> str:
    text = f"{value:,}" if isinstance(value, int) and not isinstance(value, bool) else str(value)
    return text if len(text) <= MAX_TEXT else f"{text[: MAX_TEXT - 1]}…"
