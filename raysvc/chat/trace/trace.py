"""One row traced through its template: what is computed, asked and written, cut into states.

Always true:
- a value is made by evaluating the expression that later rows run;
- at a cut, all variables in the template's frame become the state, and traced values in it become registers;
- a value of an earlier stretch that was in no variable at the cut cannot be used.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import groupby
from operator import itemgetter
from types import FrameType, FunctionType
from typing import Any, NamedTuple

from jinja2.nodes import EvalContext
from jinja2.runtime import Context, Macro, Undefined
from jinja2.utils import Namespace, missing

from raysvc.chat.render.compiled import CompiledTemplate
from raysvc.chat.trace.automaton import Ask, Automaton, Leaf, Let, State, Stretch
from raysvc.chat.trace.dependence import Needs, needs_after, needs_of
from raysvc.chat.trace.operations import expression
from raysvc.chat.trace.traced_value import CLOSES, OPENS, Method, Traced, TracedLoop, Untraceable

_LOCAL = ("l_", "t_")  # how Jinja begins the names of variables, and of filters and tests


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
        fills_in: no words of the row's texts decide on what is written, so far.
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
        self.fills_in = True
        self._begin({})

    def _begin(self, registers: dict[str, Any]) -> None:
        self._notes: list[Let | Ask] = []
        self._written: list[tuple[bool, str | None, str]] = []
        self._known: dict[str, Traced] = {}
        self._asked: set[str] = set()
        self._values = {**self._row, **registers}

    def given(self, name: str) -> Traced:
        """The messages or the tools."""
        return Traced(self, name, self._row[name])

    def let(self, op: str, *args: Any, **kwargs: Any) -> Traced:
        """Do an operation on the row's values, and note it."""
        source = expression(op, [*map(self.code, args)], {k: self.code(v) for k, v in kwargs.items()})
        if source not in self._known:
            var = f"v{len(self._known)}"
            self._values[var] = eval(source, self._automaton.names, self._values)
            self._notes.append(Let(var, source))
            made = self._known[source] = Traced(self, var, self._values[var], self._epoch)
            made.needs = needs_after(op, args, kwargs)
        return self._known[source]

    def ask(self, value: Traced) -> bool:
        """Whether a value is true."""
        var = self.code(value)
        answer = bool(value.value)
        self.fills_in &= value.needs is not Needs.WORDS
        if var not in self._asked:
            self._asked.add(var)
            self._notes.append(Ask(var, answer))
        return answer

    def code(self, value: Any) -> str:
        """Python for a value.

        Raises:
            Untraceable: the value is of an earlier stretch, or a method that is not called.
        """
        kind = type(value)
        if kind is Traced:
            if value.epoch not in (None, self._epoch):
                raise Untraceable("a value that was taken for dead")
            return str(value.var)
        if kind in (list, tuple, dict):
            return self._container(value)
        if value is None or kind in (str, bool, int):
            return f"({value!r})" if kind is int and value < 0 else repr(value)
        if kind is Method:
            raise Untraceable(f"a method that is not called: {value.name}")
        if isinstance(value, Context):
            value = self._compiled.blank  # filters read nothing of a context that a row can change
        elif isinstance(value, EvalContext):
            value = self._compiled.blank.eval_ctx
        return self._automaton.constant(value)

    def _container(self, value: Any) -> str:
        if type(value) is dict:
            return f"{{{''.join(f'{self.code(key)}: {self.code(item)}, ' for key, item in value.items())}}}"
        inner = "".join(f"{self.code(item)}, " for item in value)
        return f"[{inner}]" if type(value) is list else f"({inner})"

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
        text = piece.value if type(piece) is Traced else piece
        self.fills_in &= type(text) is str and needs_of(piece) not in (Needs.MESSAGES, Needs.WORDS)
        self.out.append((generated, owner.value if owner else None, text))
        self._written.append((generated, self.code(owner) if owner else None, self.code(piece)))

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
        registers: list[Traced] = []
        reader = _FrameReader(self._epoch, registers, self._counter, self._automaton)
        # by name: `f_locals` keeps the order in which names were bound, which is another after the first step
        local = sorted(
            (
                each
                for each in frame.f_locals.items()
                if each[0].startswith(_LOCAL) and each[1] is not missing
            ),
            key=itemgetter(0),
        )
        variables = sorted(frame.f_locals["context"].vars.items(), key=itemgetter(0))
        key = (
            self._prompt,
            frame.f_lasti,
            tuple((name, reader.key(value)) for name, value in (*local, *variables)),
            tuple(reader.key(each) for each in self.loops),
        )
        self.close(self._automaton.state(key, len(registers)), registers)

    def _counter(self, number: int) -> Traced:
        """A number that loops or namespaces count with, as a value: else each count were a state."""
        return Traced(self, repr(number), number, self._epoch)

    def close(self, state: State | None, registers: list[Traced]) -> None:
        """End this stretch; what follows begins in `state`."""
        stretches = [
            Stretch(owner, generated, tuple(piece for _, _, piece in pieces))
            for (generated, owner), pieces in groupby(self._written, itemgetter(0, 1))
        ]
        leaf = Leaf(tuple(stretches), state, tuple(register.var for register in registers))
        self.ways.append(Way(self._state, self._notes, leaf))
        self._epoch += 1
        for index, register in enumerate(registers):
            register.var, register.epoch = f"r{index}", self._epoch
        self._begin({register.var: register.value for register in registers})
        if state is not None:
            self._state = state


class _FrameReader:
    """Turns the variables of a frame into a key; traced values in it are collected as registers."""

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
