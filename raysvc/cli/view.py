"""Shows progress and tables: rich on a terminal, one plain line every few seconds otherwise.

Always true:
- progress goes to stderr, so stdout holds results alone;
- where stdout is no terminal, nothing is cut to a width and nothing is drawn;
- the first tick of a phase and its last one are always shown.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any

from raysvc.progress import Tick

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import Progress

LINE_EVERY_S = 3.0
_shown = True  # False: quiet


def show_progress(shown: bool) -> None:
    """Sets whether views that are made from now on show anything."""
    global _shown
    _shown = shown


class View:
    """A progress callback; use it as a context manager."""

    def __init__(self) -> None:
        from rich.console import Console

        self._console = Console(stderr=True)
        self._quiet = not _shown
        self._live = _live(self._console) if self._console.is_terminal and _shown else None
        self._tasks: dict[str, Any] = {}
        self._shown_s: dict[str, float] = {}
        self._last: dict[str, Tick] = {}  # newest of each phase, where it was too early to show it

    def __enter__(self) -> View:
        if self._live is not None:
            self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._live is not None:
            self._live.stop()
        for tick in self._last.values():
            print(plain(tick), file=sys.stderr, flush=True)

    def say(self, text: str) -> None:
        """Show a line that is no progress."""
        if not self._quiet:
            print(text, file=sys.stderr, flush=True)

    def __call__(self, tick: Tick) -> None:
        if self._quiet:
            return
        if self._live is not None:
            self._bar(tick)
        elif tick.final or time.monotonic() - self._shown_s.get(tick.phase, -1e9) >= LINE_EVERY_S:
            self._shown_s[tick.phase] = time.monotonic()
            self._last.pop(tick.phase, None)
            print(plain(tick), file=sys.stderr, flush=True)
        else:
            self._last[tick.phase] = tick

    def _bar(self, tick: Tick) -> None:
        assert self._live is not None
        if tick.phase not in self._tasks:
            self._tasks[tick.phase] = self._live.add_task(tick.phase, total=None, count="", facts="")
        task = self._tasks[tick.phase]
        done, total = tick.done, tick.total
        if not tick.unit:  # nothing to count: it waits, or has what it waited for
            done, total = (0, None) if tick.waiting else (1, 1)
        elif tick.final and total is None:
            total = done
        if tick.waiting and self._live.tasks[task].finished:
            self._live.reset(task)
        self._live.update(task, completed=done, total=total, count=counted(tick), facts=said(tick))
        if tick.final:
            self._live.stop_task(task)


def plain(tick: Tick) -> str:
    """A tick as one line."""
    return " ".join(
        filter(None, (f"[{tick.phase}]", counted(tick), said(tick), "done" if tick.final else ""))
    )


def counted(tick: Tick) -> str:
    """Says how much is done, of how much where that is known; "" where nothing is counted."""
    total = f"/{tick.total:g}" if tick.total is not None else ""
    last = tick.done if tick.total is None else tick.total
    unit = tick.unit.removesuffix("s") if last == 1 else tick.unit
    return f"{tick.done:g}{total} {unit}" if unit else ""


def said(tick: Tick) -> str:
    """Returns what a tick says beside its count: what it waits for, and its figures."""
    return " ".join(
        text for text in (f"({tick.waiting})" if tick.waiting else "", facts_text(tick.facts)) if text
    )


def facts_text(facts: Mapping[str, Any]) -> str:
    """Figures in one line."""
    return " ".join(f"{name}={number(value)}" for name, value in facts.items())


def printable(text: str) -> str:
    """Text in which nothing can steer a terminal: control characters and changes of direction as escapes."""
    return "".join(
        one if one.isprintable() or one in "\n\t" else one.encode("unicode_escape").decode() for one in text
    )


def number(value: object) -> str:
    """A figure as a person reads it."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return printable(str(value))
    if isinstance(value, int) or abs(value) >= 1000:
        return f"{value:,.0f}"  # 17,963, not 1.796e+04
    return f"{value:.4g}"


def print_table(title: str, rows: Mapping[str, Any]) -> None:
    """A short two-column table on stdout; `name: value` lines where that is no terminal."""
    if not sys.stdout.isatty():
        print(title, *(f"{name}: {number(value)}" for name, value in rows.items()), sep="\n")
        return
    from rich.console import Console
    from rich.table import Table

    table = Table(title=title, show_header=False, title_justify="left")
    for name, value in rows.items():
        table.add_row(name, number(value))
    Console(soft_wrap=False).print(table)


def print_rows(title: str, rows: Sequence[Mapping[str, Any]]) -> None:
    """A table on stdout; the first row's names are the columns. Tabs between them where that is no terminal."""
    if not rows:
        print(f"{title}: none")
        return
    if not sys.stdout.isatty():
        print("\t".join(rows[0]))
        for row in rows:
            print("\t".join(printable(str(value)) for value in row.values()))
        return
    from rich.console import Console
    from rich.table import Table

    table = Table(*rows[0], title=title, title_justify="left")
    for row in rows:
        table.add_row(*(number(value) for value in row.values()))
    Console(soft_wrap=False).print(table)


def _live(console: Console) -> Progress:
    from rich.progress import (
        BarColumn,
        Progress,
        SpinnerColumn,
        TextColumn,
        TimeElapsedColumn,
    )

    return Progress(
        SpinnerColumn(),
        TextColumn("{task.description}"),
        BarColumn(bar_width=30),
        TextColumn("{task.fields[count]}"),
        TimeElapsedColumn(),
        TextColumn("{task.fields[facts]}"),
        console=console,
        refresh_per_second=4,
    )
