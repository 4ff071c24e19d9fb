"""A whole loop over messages as one Python function: the tree of its turns inside, no call for a message.

Always true:
- it adds the texts and spans that `Shapes` adds turn by turn, or returns -1 and leaves that to it;
- it is made of one state of the tree, and `Tree.insert` makes that state old.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from raysvc.chat.render.answers import Source
from raysvc.chat.render.symbols import Hole
from raysvc.chat.render.trees import write_tree
from raysvc.chat.sequence import CLOSED_TURN, Span
from raysvc.chat.source.messages import Message

Prove = Callable[[str, Message], None]
# (messages, places under loss, characters so far, texts, spans) -> characters now, or -1
Loop = Callable[[list[Message], frozenset[int], int, list[str], list[Span]], int]


def compile_loop(root: Any, start: int, prove: Prove) -> Loop:
    """The function of a loop that begins at message `start`.

    Args:
        root: of the tree of its turns; leaves are turn shapes, or anything else for what has to be rendered.
        start: first message.
        prove: checks a stretch of text against its message.
    """
    source = Source()
    source.names["prove"] = prove
    lines = [
        "def function(messages, trained, length, texts, spans):",
        f"    for at in range({start}, len(messages)):",
        "        message = messages[at]",
    ]
    write_tree(root, 2, lines, source, _write_turn, "return -1")
    lines.append("    return length")
    exec("\n".join(lines), source.names)
    made: Loop = source.names["function"]
    return made


def _write_turn(turn: Any, source: Source) -> list[str]:
    """Lines for one turn."""
    segments = getattr(turn, "segments", None)
    if segments is None:
        return ["return -1"]
    holes = [n for n, part in enumerate(segments) if isinstance(part, Hole)]
    names = [f"t{n}" if n in holes else source.name(part) for n, part in enumerate(segments)]
    size = [str(sum(len(part) for part in segments if isinstance(part, str)))]
    lines = [f"{names[n]} = {source.text(segments[n])}" for n in holes]
    lines.append(f"size = {' + '.join(size + [f'len({names[n]})' for n in holes])}")
    parts = f"({''.join(f'{name}, ' for name in names)})"
    if not turn.silent:
        lines += ["if at in trained:", *(f"    {line}" for line in _span_lines(turn, parts))]
    return [*lines, f"texts += {parts}", "length += size", "continue"]


def _span_lines(turn: Any, parts: str) -> list[str]:
    """Lines for its span; `said` is -1 when any text is proved by the turn's shape alone."""
    if turn.start < 0:
        return ["return -1"]
    span = f"spans.append((length + {turn.start}, length + size - {turn.trailer}, {CLOSED_TURN}))"
    if turn.said < 0:
        return [span]
    return [f"prove(''.join({parts})[{turn.start}:size - {turn.said}], message)", span]
