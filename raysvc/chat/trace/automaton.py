"""What is known of a template: states, and for each what to do and to ask until the next one.

A state is a place in the template between two steps of a loop, with all variables there. From a state leads a tree
of questions; a leaf of it holds the texts to write, the next state and the values that this needs. Each state is
one Python function, written again when its tree has grown.

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


class Let(NamedTuple):
    """A variable, and Python of what it is."""

    var: str
    code: str


class Ask(NamedTuple):
    """A decision on a variable, and the answer."""

    var: str
    answer: bool


@dataclass(frozen=True)
class Stretch:
    """Text in one leaf that is written for one message.

    Attributes:
        owner: variable that holds the message, or None.
        generated: it is inside `{% generation %}`.
        pieces: Python of texts.
    """

    owner: str | None
    generated: bool
    pieces: tuple[str, ...]


@dataclass(frozen=True)
class Leaf:
    """The end of a way through a state."""

    stretches: tuple[Stretch, ...]
    state: State | None
    registers: tuple[str, ...]


@dataclass
class Tree:
    """Variables, and then a question with its answers, or a leaf."""

    lets: list[Let]
    asked: str | None = None
    kids: dict[bool, Tree] = field(default_factory=dict)
    leaf: Leaf | None = None

    @property
    def size(self) -> int:
        """Leaves below."""
        return 1 if self.leaf else sum(kid.size for kid in self.kids.values())


class State:
    """One state; `run(messages, tools, out, registers)` gives the next and its registers."""

    def __init__(self, automaton: Automaton, registers: int = 0) -> None:
        self._automaton, self._registers = automaton, registers
        self._tree: Tree | None = None
        self.run: Run = self._first_run

    def insert(self, notes: list[Let | Ask], leaf: Leaf) -> None:
        """Add a way through this state.

        Raises:
            Untraceable: it is at odds with what is known.
        """
        ways: dict[Any, Tree] = {None: self._tree} if self._tree else {}
        if len(notes) > MAX_NOTES:
            raise Untraceable("too much happens between two steps of a loop")
        top, at, lets = ways, None, []
        for note in notes:
            if isinstance(note, Let):
                lets.append(note)
                continue
            tree = ways.setdefault(at, Tree(lets, note.var))
            if (tree.lets, tree.asked) != (lets, note.var):
                raise Untraceable("the template does not depend on the answers alone")
            ways, at, lets = tree.kids, note.answer, []
        if at not in ways:
            self._automaton.leaves += 1
            self.run = self._first_run
        tree = ways.setdefault(at, Tree(lets, leaf=leaf))
        if (tree.lets, tree.leaf) != (lets, leaf):
            raise Untraceable("the template does not depend on the answers alone")
        self._tree = top[None]

    def _first_run(self, *args: Any) -> tuple[State | None, tuple[Any, ...]]:
        """Write the function and run it."""
        if self._tree is None:
            raise Miss
        names = self._automaton.names
        lines = ["def run(messages, tools, out, registers):"]
        if self._registers:
            lines.append(f" {''.join(f'r{n}, ' for n in range(self._registers))} = registers")
        try:
            exec("\n".join([*lines, *self._lines(self._tree, 1)]), names)
            self.run = names["run"]
        except (SyntaxError, RecursionError, MemoryError):
            self.run = self._refuse
        return self.run(*args)

    def _refuse(self, *_: Any) -> tuple[State | None, tuple[Any, ...]]:
        raise Untraceable("a stretch is too long or too branched for Python")

    def _lines(self, tree: Tree, depth: int) -> list[str]:
        lets = [f"{' ' * depth}{let.var} = {let.code}" for let in tree.lets]
        return lets + (
            self._question(tree, depth) if tree.leaf is None else self._leaf(tree.leaf, " " * depth)
        )

    def _question(self, tree: Tree, depth: int) -> list[str]:
        """The smaller answer goes inside the `if`, the other one behind it: so nothing is nested deeply."""
        small, *others = sorted(tree.kids, key=lambda answer: tree.kids[answer].size)
        if others:
            inner = self._lines(tree.kids[small], depth + 1)
        else:
            small, others, inner = not small, [small], [f"{' ' * depth} raise Miss"]
        asks = f"{' ' * depth}if {'' if small else 'not '}{tree.asked}:"
        return [asks, *inner, *self._lines(tree.kids[others[0]], depth)]

    def _leaf(self, leaf: Leaf, pad: str) -> list[str]:
        lines = []
        for stretch in leaf.stretches:
            text = stretch.pieces[0] if len(stretch.pieces) == 1 else f"join(({', '.join(stretch.pieces)}))"
            lines.append(f"{pad}out(({stretch.generated}, {stretch.owner}, {text}))")
        state = self._automaton.constant(leaf.state) if leaf.state else "None"
        registers = "".join(f"{var}, " for var in leaf.registers)
        return [*lines, f"{pad}return {state}, ({registers})"]


class Automaton:
    """All states of one template.

    Attributes:
        names: what code of a state can name.
        start: name of a beginning -> its state.
        leaves: ways through all states.
        lasting: ids of the environment's globals, which a state may hold.
    """

    def __init__(self, names: dict[str, Any]) -> None:
        self.names = {**names, "Miss": Miss, "join": "".join}
        self._constants: dict[int, str] = {id(value): name for name, value in self.names.items()}
        self._states: dict[Hashable, State] = {}
        self.leaves = 0
        self.lasting: frozenset[int] = frozenset()

    @property
    def is_full(self) -> bool:
        """Whether nothing more may be learned."""
        return self.leaves >= MAX_LEAVES or len(self._states) >= MAX_STATES

    def state(self, key: Hashable, registers: int = 0) -> State:
        """The state with a key."""
        if key not in self._states:
            self._states[key] = State(self, registers)
        return self._states[key]

    def constant(self, value: Any) -> str:
        """A name for a value, which is kept."""
        name = self._constants.get(id(value))
        if name is None:
            name = self._constants[id(value)] = f"c{len(self._constants)}"
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
