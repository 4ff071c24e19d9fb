"""Renders rows by what traces of earlier rows found, with the real render as the judge.

1. A row walks through the automaton of its template.
2. Where it meets something new it is rendered for real, and traced. What the trace found is kept when the trace, and
   then the walk, give the real blocks, owners and marks.
3. One row in `SAMPLE_EVERY` is rendered for real too. After a difference all rows are.

Always true:
- whatever goes wrong ends in the real render;
- `counts` has every row, by what became of it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from datetime import datetime
from typing import Any

from raysvc.chat.bounds.budget import OverBudget
from raysvc.chat.render.rendered import Render, Written, render_of
from raysvc.chat.trace.automaton import Miss
from raysvc.chat.trace.traced_value import Untraceable
from raysvc.chat.trace.tracing import TracingTemplate

SAMPLE_EVERY = 256
MAX_REFUSED = 64
REASON_CHARS = 100

Real = Callable[[list[Any], Any, bool], Render]


class FastRender:
    """The fast way through one template.

    Args:
        real: the real render, which may raise; the others are its arguments too.

    Attributes:
        counts: rows "walked", "rendered" (for real), and of these "learned", "refused" (not traceable), "different".
        reasons: why rows were refused or different -> how many.
    """

    def __init__(self, text: str, variables: Mapping[str, Any], real: Real, now: datetime) -> None:
        self._real = real
        self._template = TracingTemplate(text, variables, now)
        self._is_trusted = True  # no walk differed from the real render
        self.counts: Counter[str] = Counter()
        self.reasons: Counter[str] = Counter()

    def render(self, messages: list[Any], tools: Any, prompt: bool) -> Render:
        """Render one row.

        Raises:
            RowFault: the template raised.
        """
        row = (messages, tools, prompt)
        try:
            if not self._is_trusted:
                raise Untraceable("a row was different")
            made = render_of(self._template.walk(*row), messages)
        except Exception as error:  # noqa: BLE001  the template raises too, or the real render knows better
            self.counts["rendered"] += 1
            self._note_costly(error)
            real = self._real(*row)
            if isinstance(error, Miss) and self.counts["refused"] < MAX_REFUSED:
                self._learn(real, *row)
            return real
        self.counts["walked"] += 1
        if self.counts["walked"] % SAMPLE_EVERY:
            return made
        return self._judge(made, self._real(*row))

    @property
    def rows_to_go(self) -> int:
        """Rows before the next one that has to go to `render`, where it gets a real render."""
        return (-1 - self.counts["walked"]) % SAMPLE_EVERY if self._is_trusted else 0

    def filled_in(self, messages: list[Any]) -> str | None:
        """The text of a row without tools, None when the words of its texts decide on what is written (`operations`)."""
        try:
            trace = self._template.trace(messages, None, False)
            render = render_of(trace.out, messages)
            return render.text if trace.fills_in and render == self._real(messages, None, False) else None
        except Exception:  # noqa: BLE001  what cannot be traced is walked or rendered
            return None

    def stretches(self, messages: list[Any], tools: Any = None) -> list[Written] | None:
        """What a row writes, None when it has to go to `render`: it is new, or due for the real render."""
        if not self.rows_to_go:
            return None
        try:
            written = self._template.walk(messages, tools, False)
        except Exception as error:  # noqa: BLE001  new, or the template raises: `render` knows which
            self._note_costly(error)
            return None
        self.counts["walked"] += 1
        return written

    def _learn(self, real: Render, messages: list[Any], tools: Any, prompt: bool) -> None:
        """Keep what a trace of a row finds when it says what the real render says."""
        try:
            trace = self._template.trace(messages, tools, prompt)
            if render_of(trace.out, messages) != real:
                raise Untraceable("the trace differs from the real render")
            for state, way in trace.ways:
                state.insert(way)
            self.counts["learned"] += 1
            self._judge(render_of(self._template.walk(messages, tools, prompt), messages), real)
        except Exception as error:  # noqa: BLE001  what cannot be traced is rendered
            self._note("refused", f"{type(error).__name__}: {error}")

    def _judge(self, made: Render, real: Render) -> Render:
        """The real render; when it is another one, nothing is walked any more."""
        if made != real:
            self._note("different", f"{made.text[:40]!r} for {real.text[:40]!r}")
            self._is_trusted = False
        return real

    def _note_costly(self, error: Exception) -> None:
        """Walk no more where a row took all that a render may: it would take it twice, as the real render decides."""
        if isinstance(error, OverBudget):
            self._note("costly", error.detail)
            self._is_trusted = False

    def _note(self, fate: str, reason: str) -> None:
        self.counts[fate] += 1
        self.reasons[f"{fate}: {reason[:REASON_CHARS]}"] += 1
