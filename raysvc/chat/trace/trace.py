"""One row traced through its template: what is computed, asked and written, cut into states.

Always true:
- a value is made by evaluating the expression that later rows run;
- at a cut, what is alive in the template's frame becomes the state, and traced values in it become registers;
- a value of an earlier stretch that was not seen alive at the cut cannot be used.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from operator import itemgetter
from types import FrameType, FunctionType
from typing import Any, NamedTuple

from jinja2.nodes import EvalContext
from jinja2.runtime import Context, Macro, Undefined
from jinja2.utils import Namespace, missing

from raysvc.chat.render.compiled import CompiledTemplate
from raysvc.chat.trace.automaton import Ask, Automaton, Leaf, Let, State, Stretch
from raysvc.chat.trace.operations import CANNOT_RAISE, Code, expression
from raysvc.chat.trace.traced_value import CLOSES, OPENS, Traced, TracedLoop, Untraceable

_LOCAL = re.compile(r"([lt])_(\d+)")


class Way(NamedTuple):
    """A way through one state, as a row took it."""

    state: State
    notes: list[Let | Ask]
    leaf: Leaf


class Trace:
    """A row on its way through a template.

    Args:
        compiled: the template with hooks that call this trace.
        automaton: whose states and constants are used.
        prompt: it is rendered with the generation prompt; its states are its own, as a loop may look it up again.
        row: "messages" and "tools".

    Attributes:
        loops: over traced values that are running, outermost first.
        ways: found so far.
        out: (generated, message or None, text) as the row gives it.
    """

    def __init__(
        self, compiled: CompiledTemplate, automaton: Automaton, prompt: bool, row: dict[str, Any]
    ) -> None:
        self._compiled, self._automaton, self._prompt = compiled, automaton, prompt
        self._state = automaton.state(prompt)
        self._row, self._epoch = row, 0
        self._generations: list[Traced | None] = []  # that are open: the message of each
        self.loops: list[TracedLoop] = []
        self.ways: list[Way] = []
        self.out: list[tuple[bool, Any, str]] = []
        self._begin({})

    def _begin(self, registers: dict[str, Any]) -> None:
        self._notes: list[Let | Ask] = []
        self._stretches: list[Stretch] = []
        self._known: dict[str, Traced] = {}
        self._asked: set[str] = set()
        self._values = {**self._row, **registers}

    def given(self, name: str) -> Traced:
        """The messages or the tools."""
        return Traced(self, name, self._row[name])

    def let(self, op: str, *args: Any, **kwargs: Any) -> Traced:
        """Do an operation on the row's values, and note it."""
        codes, named = [self.code(a) for a in args], {k: self.code(v) for k, v in kwargs.items()}
        source = expression(op, [c.source for c in codes], {k: c.source for k, c in named.items()})
        if source not in self._known:
            var = f"v{len(self._known)}"
            reads = tuple(dict.fromkeys(v for c in (*codes, *named.values()) for v in c.reads))
            self._values[var] = eval(source, self._automaton.names, self._values)
            self._notes.append(Let(var, Code(source, reads), op not in CANNOT_RAISE))
            self._known[source] = Traced(self, var, self._values[var], self._epoch)
        return self._known[source]

    def ask(self, value: Traced) -> bool:
        """Whether a value is true."""
        var = self.code(value).source
        answer = bool(value.value)
        if var not in self._asked:
            self._asked.add(var)
            self._notes.append(Ask(var, answer))
        return answer

    def code(self, value: Any) -> Code:
        """Python for a value.

        Raises:
            Untraceable: the value is of an earlier stretch.
        """
        kind = type(value)
        if kind is Traced:
            if value.epoch not in (None, self._epoch):
                raise Untraceable("a value that was taken for dead")
            return Code(value.var, (value.var,))
        if kind in (list, tuple, dict):
            return self._container(value)
        if value is None or kind in (str, bool):
            return Code(repr(value))
        if kind is int:
            return Code(repr(value) if value >= 0 else f"({value})")
        if isinstance(value, Context):
            value = self._compiled.blank  # filters read nothing of a context that a row can change
        elif isinstance(value, EvalContext):
            value = self._compiled.blank.eval_ctx
        return Code(self._automaton.constant(value))

    def _container(self, value: Any) -> Code:
        if type(value) is dict:
            codes = [(self.code(key).source + ": ", self.code(item)) for key, item in value.items()]
        else:
            codes = [("", self.code(item)) for item in value]
        inner = "".join(f"{key}{code.source}, " for key, code in codes)
        opening, closing = (
            ("{", "}") if type(value) is dict else ("[", "]") if type(value) is list else ("(", ")")
        )
        return Code(f"{opening}{inner}{closing}", tuple(v for _, code in codes for v in code.reads))

    def write(self, piece: Any, line: int) -> None:
        """Note what the root wrote on a line: text, or a mark of `{% generation %}`."""
        if piece is OPENS:
            self._generations.append(self._owner(line))
            return
        if piece is CLOSES:
            self._generations.pop()
            return
        generated = bool(self._generations)
        owner = self._generations[0] if generated else self._owner(line)
        traced = type(piece) is Traced
        text = piece.value if traced else piece
        self.out.append((generated, owner.value if owner else None, text))
        parts = (piece.parts or (piece,)) if traced else (piece,)
        pieces = tuple(self.code(part) if type(part) is Traced else part for part in parts)
        self._append(Stretch(self.code(owner).source if owner else None, generated, pieces))

    def _append(self, new: Stretch) -> None:
        """Add a stretch, joined with the last one where both are the same message's."""
        last = self._stretches[-1] if self._stretches else None
        if last is None or (last.generated, last.owner) != (new.generated, new.owner):
            self._stretches.append(replace(new, pieces=_merged(new.pieces)))
        else:
            self._stretches[-1] = replace(last, pieces=_merged(last.pieces + new.pieces))

    def _owner(self, line: int) -> Traced | None:
        """The message for whom the root writes on a line: that of the innermost loop over messages around it."""
        around = self._compiled.loops_around(line)
        items = [loop.item for loop in self.loops if loop.items.of_messages and loop.line in around]
        return items[-1] if items else None

    def step(self, loop: TracedLoop, frame: FrameType) -> None:
        """A loop takes a step: in the root this is a cut."""
        del self.loops[self.loops.index(loop) + 1 :]
        if frame.f_code is not self._compiled.code:
            return
        loop.line = frame.f_lineno
        around = (*self._compiled.loops_around(loop.line), loop.line)
        self.loops[:] = [each for each in self.loops if each.line in around]  # others were left by `break`
        if {*around} <= {each.line for each in self.loops}:  # else a loop around this one is not traced
            self._cut(frame)

    def _cut(self, frame: FrameType) -> None:
        level = self._compiled.level(frame.f_lineno)
        if level is None:
            raise Untraceable("a loop in an odd place")
        registers: list[Traced] = []
        reader = _FrameReader(self._epoch, registers, self._counter, self._automaton)
        # by name: `f_locals` keeps the order in which names were bound, which is another after the first step
        local = sorted(frame.f_locals.items(), key=itemgetter(0))
        alive = [(name, value) for name, value in local if _is_alive(name, value, level)]
        variables = sorted(frame.f_locals["context"].vars.items(), key=itemgetter(0))
        key = (
            self._prompt,
            frame.f_lasti,
            tuple((name, reader.key(value)) for name, value in (*alive, *variables)),
            tuple(reader.key(each) for each in self.loops),
        )
        self.close(self._automaton.state(key, len(registers)), registers)

    def _counter(self, number: int) -> Traced:
        """A number that loops or namespaces count with, as a value: else each count were a state."""
        return Traced(self, repr(number), number, self._epoch)

    def close(self, state: State | None, registers: list[Traced]) -> None:
        """End this stretch; what follows begins in `state`."""
        leaf = Leaf(tuple(self._stretches), state, tuple(register.var for register in registers))
        self.ways.append(Way(self._state, self._notes, leaf))
        self._epoch += 1
        for index, register in enumerate(registers):
            register.var, register.epoch = f"r{index}", self._epoch
            register.method, register.parts = None, ()
        self._begin({register.var: register.value for register in registers})
        if state is not None:
            self._state = state


class _FrameReader:
    """Turns what is alive in a frame into a key; traced values in it are collected as registers."""

    def __init__(
        self, epoch: int, registers: list[Traced], counter: Callable[[int], Traced], automaton: Automaton
    ) -> None:
        self._epoch, self._registers, self._counter, self._automaton = epoch, registers, counter, automaton
        self._seen: dict[int, int] = {}

    def key(self, value: Any) -> Any:
        """Key of a value.

        Raises:
            Untraceable: a kind of value that a state cannot hold.
        """
        kind = type(value)
        if kind is Traced:
            return self._traced(value)
        if value is missing or value is None or kind in (str, int, float, bool):
            return (kind.__name__, value)
        if id(value) in self._seen:
            return ("same", self._seen[id(value)])
        self._seen[id(value)] = len(self._seen)
        if isinstance(value, Namespace):
            return self._namespace(value)
        if kind is TracedLoop:
            return self._loop(value)
        if kind in (list, tuple):
            return (kind.__name__, *map(self.key, value))
        if kind is dict:
            return ("dict", *((name, self.key(item)) for name, item in value.items()))
        if isinstance(value, Undefined):
            return ("undefined", value._undefined_name)
        if isinstance(value, Macro):
            return ("macro", value._func.__code__)
        if isinstance(value, FunctionType):
            return ("function", value.__code__, value.__name__)
        if id(value) in self._automaton.lasting:
            return ("global", id(value))
        raise Untraceable(f"a {kind.__name__} is alive between two steps of a loop")

    def _traced(self, value: Traced) -> Any:
        if value.epoch is None:
            return ("given", value.var)
        if value.epoch != self._epoch:
            return ("dead",)  # using it fails
        if id(value) not in self._seen:
            self._seen[id(value)] = len(self._seen)
            self._registers.append(value)
        return ("traced", self._seen[id(value)])

    def _namespace(self, value: Namespace) -> Any:
        fields = value._Namespace__attrs
        for name, item in fields.items():
            if type(item) is int:
                fields[name] = self._counter(item)
        return ("namespace", *((name, self.key(item)) for name, item in fields.items()))

    def _loop(self, loop: TracedLoop) -> Any:
        if type(loop.at) is int:
            loop.at = self._counter(loop.at)
        owns = loop.items.of_messages
        return ("loop", loop.line, loop.with_loop, owns, self.key(loop.items), self.key(loop.at))


def _is_alive(name: str, value: Any, level: int) -> bool:
    """Whether a local may be read after a `for` that opens scope `level` takes its next step."""
    found = _LOCAL.match(name)
    if found is None or value is missing:
        return False
    return not (found.group(1) == "l" and int(found.group(2)) >= level)


def _merged(pieces: tuple[str | Code, ...]) -> tuple[str | Code, ...]:
    """Pieces, literals side by side joined."""
    merged: list[str | Code] = []
    for piece in pieces:
        if isinstance(piece, str) and merged and isinstance(merged[-1], str):
            merged[-1] += piece
        else:
            merged.append(piece)
    return tuple(merged)
