"""A whole loop over messages as one Python function: the tree of its turns inside, no call for a message.

Always true:
- it adds the texts and spans that `Shapes` adds turn by turn, or returns -1 and leaves that to it;
- it is made of one state of the tree, and `Tree.insert` makes that state old.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from raysvc.chat.answers import Source
from raysvc.chat.messages import Message
from raysvc.chat.sequence import CLOSED_TURN, Span
from raysvc.chat.trees import write_tree

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
    parts = [source.name(part) if isinstance(part, str) else source.text(part) for part in segments]
    lines = [f"text = ''.join(({''.join(f'{part}, ' for part in parts)}))"]
    if not turn.silent:
        lines += ["if at in trained:", *(f"    {line}" for line in _span_lines(turn))]
    return [*lines, "texts.append(text)", "length += len(text)", "continue"]


def _span_lines(turn: Any) -> list[str]:
    if turn.start < 0:
        return ["return -1"]
    span = f"spans.append((length + {turn.start}, length + len(text) - {turn.trailer}, {CLOSED_TURN}))"
    if turn.said < 0:
        return [span]
    return [f"prove(text[{turn.start}:len(text) - {turn.said}], message)", span]
