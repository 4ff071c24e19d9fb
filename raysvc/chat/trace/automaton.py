"""What is known of a template: states, and for each what to do and to ask until the next one.

A state is a place in the template between two steps of a loop, with all variables there. From a state leads a tree
of questions with Python between them; at a leaf the Python writes texts, and names the next state and the values that
this needs. Each state is one Python function, written again when its tree has grown.

Always true:
- a tree grows by rows that were traced; a question not yet answered raises `Miss`;
- leaves are limited in number: beyond that nothing is added, and rows are rendered.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from typing import Any

from raysvc.chat.trace.traced_value import Untraceable

MAX_LEAVES = 2048
Run = Callable[..., "tuple[State | None, tuple[Any, ...]]"]


class Miss(Exception):
    """A question whose answer was not met before."""


@dataclass
class Tree:
    """Lines of Python, and then a question on a variable with what follows its answers; a leaf asks nothing."""

    lines: list[str]
    asked: str | None = None
    kids: dict[bool, Tree] = field(default_factory=dict)


_TOO_LONG = Tree(["raise Untraceable('a stretch is too long or too branched for Python')"])


class State:
    """One state; `run(messages, tools, out, registers)` gives the next and its registers."""

    def __init__(self, automaton: Automaton) -> None:
        self._automaton = automaton
        self._ways: dict[bool, Tree] = {}  # the whole tree is at True
        self.run: Run = self._first_run

    def insert(self, way: Tree) -> None:
        """Add a way through this state: a tree with one leaf.

        Raises:
            Untraceable: it is at odds with what is known, or one too many.
        """
        kids, at = self._ways, True
        while at in kids:
            known = kids[at]
            if (known.lines, known.asked) != (way.lines, way.asked):
                raise Untraceable("the template does not depend on the answers alone")
            if way.asked is None:
                return
            kids, ((at, way),) = known.kids, way.kids.items()
        if self._automaton.leaves >= MAX_LEAVES:
            raise Untraceable("there are too many ways through the template")
        kids[at] = way
        self._automaton.leaves += 1
        self.run = self._first_run

    def _first_run(self, *args: Any) -> tuple[State | None, tuple[Any, ...]]:
        """Write the function and run it."""
        names = self._automaton.names
        try:
            code = ["def run(messages, tools, out, registers):", " while True:"]
            exec("\n".join([*code, *("  " + line for line in _code(self._ways, True))]), names)
        except (SyntaxError, RecursionError, MemoryError):
            self._ways = {True: _TOO_LONG}
            return self._first_run(*args)
        self.run = names["run"]
        return self.run(*args)


def _code(kids: dict[bool, Tree], answer: bool) -> list[str]:
    """Python for an answer. The shorter way goes inside the `if`, the other one behind it: so nothing is nested deeply."""
    if answer not in kids:
        return ["raise Miss"]
    tree = kids[answer]
    if tree.asked is None:
        return tree.lines
    inside, behind = _code(tree.kids, True), _code(tree.kids, False)
    asks = f"if {tree.asked}:"
    if len(inside) > len(behind):
        inside, behind, asks = behind, inside, f"if not {tree.asked}:"
    return [*tree.lines, asks, *(" " + line for line in inside), *behind]


class Automaton:
    """All states of one template.

    Attributes:
        names: what code of a state can name.
        constants: ids of named values that are the same in all rows -> their names.
        leaves: ways through all states.
        states: by what a state holds.
    """

    def __init__(self, names: dict[str, Any]) -> None:
        self.names = {**names, "Miss": Miss, "Untraceable": Untraceable}
        self.constants = {id(value): name for name, value in names.items()}
        self.leaves = 0
        self.states: defaultdict[Hashable, State] = defaultdict(lambda: State(self))

    def constant(self, value: Any) -> str:
        """A name for a value, which is kept."""
        name = self.constants.setdefault(id(value), f"c{len(self.constants)}")
        self.names[name] = value
        return name
