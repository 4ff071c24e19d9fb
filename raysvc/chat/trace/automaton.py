"""What is known of a template: states, and for each what to do and to ask until the next one.

A state is a place in the template between two steps of a loop, with all variables there. From a state leads a tree
of questions with Python between them; at a leaf the Python writes texts, and names the next state and the values that
this needs. Each state is one Python function, written again when its tree has grown.

Always true:
- a tree grows by rows that were traced; a question not yet answered raises `Miss`;
- trees and states are limited in number: beyond that nothing is added, and rows are rendered.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from raysvc.chat.trace.traced_value import Untraceable

MAX_LEAVES = 2048
MAX_STATES = 512
MAX_NOTES = 4000  # of one way through a state: a macro that writes a loop out a thousand times
Run = Callable[..., "tuple[State | None, tuple[Any, ...]]"]


class Miss(Exception):
    """A question whose answer was not met before."""


class Ask(NamedTuple):
    """A decision on a variable, and the answer; on none at the end of a way."""

    var: str | None
    answer: bool = True


@dataclass
class Tree:
    """Lines of Python, and then a question with its answers; a leaf asks nothing."""

    lines: list[str]
    asked: str | None = None
    kids: dict[bool, Tree] = field(default_factory=dict)

    @property
    def size(self) -> int:
        """Lines and questions."""
        return len(self.lines) + 1 + sum(kid.size for kid in self.kids.values())


_MISS = Tree(["raise Miss"])
_TOO_LONG = Tree(["raise Untraceable('a stretch is too long or too branched for Python')"])


class State:
    """One state; `run(messages, tools, out, registers)` gives the next and its registers."""

    def __init__(self, automaton: Automaton) -> None:
        self._automaton = automaton
        self._ways: dict[bool, Tree] = {}  # the whole tree is at True
        self.run: Run = self._first_run

    def insert(self, notes: list[str | Ask]) -> None:
        """Add a way through this state: lines of Python, and questions.

        Raises:
            Untraceable: it is at odds with what is known.
        """
        if len(notes) > MAX_NOTES:
            raise Untraceable("too much happens between two steps of a loop")
        ways, at, lines, is_new = self._ways, True, [], False
        for note in (*notes, Ask(None)):
            if isinstance(note, str):
                lines.append(note)
                continue
            is_new = at not in ways
            tree = ways.setdefault(at, Tree(lines, note.var))
            if (tree.lines, tree.asked) != (lines, note.var):
                raise Untraceable("the template does not depend on the answers alone")
            ways, at, lines = tree.kids, note.answer, []
        if is_new:
            self._automaton.leaves += 1
            self.run = self._first_run

    def _first_run(self, *args: Any) -> tuple[State | None, tuple[Any, ...]]:
        """Write the function and run it."""
        names, tree = self._automaton.names, self._ways.get(True, _MISS)
        try:
            exec(
                "\n".join(["def run(messages, tools, out, registers):", " while True:", *_code(tree, "  ")]),
                names,
            )
        except (SyntaxError, RecursionError, MemoryError):
            self._ways[True] = _TOO_LONG
            return self._first_run(*args)
        self.run = names["run"]
        return self.run(*args)


def _code(tree: Tree, pad: str) -> list[str]:
    """Python of a tree. The smaller answer goes inside the `if`, the other one behind it: so nothing is nested deeply."""
    lines = [pad + line for line in tree.lines]
    if tree.asked is None:
        return lines
    kids = {answer: tree.kids.get(answer, _MISS) for answer in (True, False)}
    small = kids[True].size <= kids[False].size
    asks = f"{pad}if {'' if small else 'not '}{tree.asked}:"
    return [*lines, asks, *_code(kids[small], pad + " "), *_code(kids[not small], pad)]


class Automaton:
    """All states of one template.

    Attributes:
        names: what code of a state can name.
        leaves: ways through all states.
        lasting: ids of values that are the same in all rows.
    """

    def __init__(self, names: dict[str, Any]) -> None:
        self.names = {**names, "Miss": Miss, "Untraceable": Untraceable}
        self._constants = {id(value): name for name, value in self.names.items()}
        self.lasting = frozenset(self._constants)
        self.leaves = 0
        self._states: dict[Hashable, State] = {}

    @property
    def is_full(self) -> bool:
        """Whether nothing more may be learned."""
        return self.leaves >= MAX_LEAVES or len(self._states) >= MAX_STATES

    def state(self, key: Hashable) -> State:
        """The state with a key."""
        if key not in self._states:
            self._states[key] = State(self)
        return self._states[key]

    def constant(self, value: Any) -> str:
        """A name for a value, which is kept."""
        name = self._constants.setdefault(id(value), f"c{len(self._constants)}")
        self.names[name] = value
        return name

    def walk(self, state: State | None, messages: list[Any], tools: Any) -> list[Any]:
        """(generated, message or None, text) of a row, stretch by stretch.

        Raises:
            Miss: something in it is new. Whatever else is raised says that the row has to be rendered.
        """
        out: list[Any] = []
        add, registers = out.append, ()
        while state is not None:
            state, registers = state.run(messages, tools, add, registers)
        return out
