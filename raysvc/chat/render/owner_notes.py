"""Notes of a template that runs: for which message it writes from there on.

1. Before a template is compiled, every `for` of its root gets a note at the beginning of a step, of what the step is about,
   and one behind the loop. In a loop over `range`, whose steps are numbers, each variable that the body sets gets one too.
   Loops over tools and calls get none: no message is in them.
2. While it renders, these add to the notes of its context, each with the number of pieces that are written so far.
3. `blocks_of` follows them.

Always true:
- what a template writes is the same with the notes, which write nothing;
- text belongs to the message of the innermost loop over messages that the writing line stands in, or to nobody;
- outside of those, in loops over numbers whose bodies set one variable to a message, it belongs to that message; with two, to nobody;
- what a macro, a block or a recursive loop writes belongs to whom the line belongs that calls it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from jinja2 import nodes, pass_context

from raysvc.chat.render.rendered import NOBODY

STEP, SET, END = "_ step", "_ set", "_ end"  # names of filters; no template can write one with a blank


Note = tuple[int, int, tuple[Any, ...], str]
"""(pieces before it, depth of its loop among loops from 1, values, name).

Values are what the step of a loop is about, or the one that a variable was set to; none behind a loop. The name is that of the
variable, empty of a step.
"""


Level = tuple[int, tuple[int, ...], dict[str, int]]
"""Of a loop that runs: (place of the message that its step, or that of a loop around, is about, or -1; places of messages in variables
of loops around; variable -> place of its message, of this one)."""


def blocks_of(notes: list[Note], ends: list[int], messages: list[Any]) -> tuple[list[int], list[int]]:
    """(where each block of a text begins, the place of the message for which it is written, or -1); none is empty.

    Args:
        notes: of the render.
        ends: where each number of pieces ends in the text.
        messages: each an object of its own.
    """
    place_of = dict(zip(map(id, messages), range(len(messages)), strict=False))
    levels: list[Level] = [(NOBODY, (), {})]
    begins, owners = [0], [NOBODY]
    for pieces, depth, values, name in notes:
        if name:
            _set(levels[depth][2], name, place_of.get(id(values[0])))
        else:
            del levels[depth:]
            if values:
                place, taken, own = levels[-1]
                place = next((place_of[id(one)] for one in values if id(one) in place_of), place)
                levels.append((place, (*taken, *own.values()) if own else taken, {}))
        place, taken, own = levels[-1]
        if place == NOBODY and (taken or own):
            all_taken = (*taken, *own.values())
            place = all_taken[0] if len(all_taken) == 1 else NOBODY
        _go_on(begins, owners, ends[pieces], place)
    _go_on(begins, owners, ends[-1], None)
    return begins, owners


def _go_on(begins: list[int], owners: list[int], at: int, owner: int | None) -> None:
    """From a place on, text is written for another message; None: the text ends."""
    if begins and begins[-1] == at:  # nothing was written for whom was named before
        begins.pop()
        owners.pop()
    if owner is not None and owners[-1:] != [owner]:
        begins.append(at)
        owners.append(owner)


def _set(own: dict[str, int], name: str, place: int | None) -> None:
    own.pop(name, None)
    if place is not None:
        own[name] = place


def note_filters() -> dict[str, Callable[..., Any]]:
    """Returns what a template with notes calls, by name."""
    return {STEP: _note_step, SET: _note_set, END: _note_end}


@pass_context
def _note_step(context: Any, first: Any, depth: int, *more: Any) -> None:
    context.notes.append((len(context.pieces), depth, (first, *more), ""))


@pass_context
def _note_set(context: Any, value: Any, depth: int, name: str) -> None:
    context.notes.append((len(context.pieces), depth, (value,), name))


@pass_context
def _note_end(context: Any, depth: int) -> None:
    context.notes.append((len(context.pieces), depth, (), ""))


def with_notes(tree: nodes.Template) -> nodes.Template:
    """The same template, which takes notes."""
    tree.body = _noted(tree.body, 0, counts=False)
    return tree


def _noted(body: list[nodes.Node], depth: int, counts: bool) -> list[nodes.Node]:
    """Statements with notes between them; `counts`: in a loop over numbers, whose variables they set."""
    made: list[nodes.Node] = []
    for node in body:
        made.append(node)
        if isinstance(node, nodes.If):
            for part in (node, *node.elif_):
                part.body = _noted(part.body, depth, counts)
            node.else_ = _noted(node.else_, depth, counts)
        elif isinstance(node, nodes.With | nodes.Scope | nodes.ScopedEvalContextModifier):
            node.body = _noted(node.body, depth, counts=False)
        elif isinstance(node, nodes.For) and not node.recursive:
            made += _with_steps(node, depth, counts)
        elif counts and isinstance(node, nodes.Assign) and isinstance(node.target, nodes.Name):
            name = node.target.name
            args = [nodes.Name(name, "load"), nodes.Const(depth), nodes.Const(name)]
            made.append(_note(SET, args, node.lineno))
    return made


def _with_steps(loop: nodes.For, depth: int, counts: bool) -> list[nodes.Node]:
    """Put notes into a loop; those behind it."""
    loop.else_ = _noted(loop.else_, depth, counts)
    if _is_of_tools(loop.iter):
        loop.body = _noted(loop.body, depth, counts=False)
        return []
    targets = [
        each.name for each in (loop.target, *loop.target.find_all(nodes.Name)) if isinstance(each, nodes.Name)
    ]
    first, *others = [nodes.Name(name, "load") for name in targets]
    is_range = any(
        each.name == "range"
        for each in (loop.iter, *loop.iter.find_all(nodes.Name))
        if isinstance(each, nodes.Name)
    )
    step = _note(STEP, [first, nodes.Const(depth + 1), *others], loop.lineno)
    loop.body = [step, *_noted(loop.body, depth + 1, is_range)]
    return [_note(END, [nodes.Const(depth + 1)], loop.lineno)]


def _is_of_tools(value: nodes.Node) -> bool:
    """Returns whether a loop is over the row's tools, or the calls of a message."""
    if isinstance(value, nodes.Name):
        return value.name == "tools"
    if isinstance(value, nodes.Getattr):
        return value.attr == "tool_calls"
    return (
        isinstance(value, nodes.Getitem)
        and isinstance(value.arg, nodes.Const)
        and value.arg.value == "tool_calls"
    )


def _note(name: str, args: list[nodes.Expr], lineno: int) -> nodes.Node:
    first, *others = args
    return nodes.ExprStmt(nodes.Filter(first, name, others, [], None, None)).set_lineno(lineno)
