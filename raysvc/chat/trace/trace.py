"""One row traced through its template: what is computed, asked and written, cut into states.

Always true:
- a value is made by evaluating the expression that later rows run;
- at a cut, all variables in the template's frame become the state, and traced values in it become registers;
- a value of an earlier stretch that was in no variable at the cut cannot be used.
"""

from __future__ import annotations

from itertools import groupby
from operator import itemgetter
from types import FrameType, FunctionType
from typing import Any

from jinja2.nodes import EvalContext
from jinja2.runtime import Context, Undefined
from jinja2.utils import Namespace, missing

from raysvc.chat.render.compiled import CompiledTemplate
from raysvc.chat.trace.automaton import Ask, Automaton, State
from raysvc.chat.trace.operations import Needs, needs_after, needs_of
from raysvc.chat.trace.traced_value import Method, Traced, TracedLoop, Untraceable

OPENS, CLOSES = object(), object()  # what the root writes around a `{% generation %}`
_LOCAL = ("l_", "t_")  # how Jinja begins the names of variables, and of filters and tests


class Trace:
    """A row on its way through a template.

    Args:
        compiled: the template with hooks that call this trace.
        automaton: whose states and constants are used.
        prompt: it is rendered with the generation prompt; its states are its own, as a loop may look it up again.
        row: "messages" and "tools".

    Attributes:
        loops: over traced values that are running, outermost first.
        ways: (state, notes) of the stretches so far.
        out: (generated, message or None, text) as the row gives it.
        fills_in: no words of the row's texts decide on what is written, so far.
    """

    def __init__(
        self, compiled: CompiledTemplate, automaton: Automaton, prompt: bool, row: dict[str, Any]
    ) -> None:
        self._compiled, self._automaton, self._prompt, self._row = compiled, automaton, prompt, row
        self._state, self._epoch = automaton.state(prompt), 0
        self._generations: list[Traced | None] = []  # that are open: the message of each
        self.loops: list[TracedLoop] = []
        self.ways: list[tuple[State, list[str | Ask]]] = []
        self.out: list[tuple[bool, Any, str]] = []
        self.fills_in = True
        self._begin([])

    def _begin(self, registers: list[Traced]) -> None:
        self._notes: list[str | Ask] = [f"{self.code(tuple(registers))} = registers"] if registers else []
        self._written: list[tuple[bool, str, str]] = []
        self._known: dict[str, Traced] = {}
        self._asked: set[str] = set()
        self._values = {**self._row, **{register.var: register.value for register in registers}}

    def let(self, form: str, *args: Any) -> Traced:
        """Do an operation on the row's values, and note it; `form` as in `operations`."""
        source = form.format(*map(self.code, args))
        if source not in self._known:
            var = f"v{len(self._known)}"
            value = self._values[var] = eval(source, self._automaton.names, self._values)
            self._notes.append(f"{var} = {source}")
            made = self._known[source] = Traced(self, var, value, self._epoch)
            made.needs = needs_after(form, args)
            made.of_messages = type(args[0]) is Traced and args[0].of_messages and type(value) is not dict
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
        if kind is dict:
            return f"{{{''.join(f'{self.code(key)}: {self.code(item)}, ' for key, item in value.items())}}}"
        if kind in (list, tuple):
            inner = "".join(f"{self.code(item)}, " for item in value)
            return f"[{inner}]" if kind is list else f"({inner})"
        if value is None or kind in (str, bool, int):
            return f"({value!r})" if kind is int and value < 0 else repr(value)
        if kind is Method:
            raise Untraceable(f"a method that is not called: {value.name}")
        if isinstance(value, Context):
            value = self._compiled.blank  # filters read nothing of a context that a row can change
        elif isinstance(value, EvalContext):
            value = self._compiled.blank.eval_ctx
        return self._automaton.constant(value)

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
        message = None if owner is None else owner.value  # `if owner` were a question
        self.out.append((generated, message, text))
        self._written.append((generated, self.code(owner), self.code(piece)))

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
        reader = _FrameReader(self, self._epoch, self._automaton.lasting)
        found = frame.f_locals
        local = [name for name in found if name.startswith(_LOCAL) and found[name] is not missing]
        # by name: `f_locals` keeps the order in which names were bound, which is another after the first step
        variables = [(name, found[name]) for name in sorted(local)] + sorted(
            found["context"].vars.items(), key=itemgetter(0)
        )
        key = (self._prompt, frame.f_lasti, reader.key(variables), reader.key(self.loops))
        self.close(self._automaton.state(key), reader.registers)

    def close(self, state: State | None, registers: list[Traced]) -> None:
        """End this stretch; what follows begins in `state`."""
        for (generated, owner), written in groupby(self._written, itemgetter(0, 1)):
            pieces = [piece for _, _, piece in written]
            text = pieces[0] if len(pieces) == 1 else f"''.join(({', '.join(pieces)}))"
            self._notes.append(f"out(({generated}, {owner}, {text}))")
        values = self.code(tuple(registers))
        if state is self._state:  # a loop that goes on as it was
            self._notes += [f"registers = {values}", "continue"]
        else:
            self._notes.append(f"return {self.code(state)}, {values}")
        self.ways.append((self._state, self._notes))
        self._epoch += 1
        for index, register in enumerate(registers):
            register.var, register.epoch = f"r{index}", self._epoch
        self._begin(registers)
        self._state = state or self._state


class _FrameReader:
    """Turns the variables of a frame into a key; traced values in it are collected as registers."""

    def __init__(self, trace: Trace, epoch: int, lasting: frozenset[int]) -> None:
        self._trace, self._epoch, self._lasting = trace, epoch, lasting
        self._seen: dict[int, int] = {}
        self.registers: list[Traced] = []

    def key(self, value: Any) -> Any:
        """Key of a value.

        Raises:
            Untraceable: a kind of value that a state cannot hold.
        """
        kind = type(value)
        if value is missing or value is None or kind in (str, int, float, bool):
            return (kind, value)
        if kind is Traced and value.epoch != self._epoch:
            return ("given", value.var) if value.epoch is None else "dead"  # using it fails
        if id(value) in self._seen:
            return ("same", self._seen[id(value)])
        self._seen[id(value)] = len(self._seen)
        if kind is Traced:
            self.registers.append(value)
            return "traced"
        if kind in (list, tuple):
            return (kind, *map(self.key, value))
        if kind is dict:
            return (kind, *value, *map(self.key, value.values()))
        if isinstance(value, Namespace):
            fields = value._Namespace__attrs
            fields.update({name: self._counted(item) for name, item in fields.items()})
            return ("namespace", self.key(fields))
        if kind is TracedLoop:
            value.at = self._counted(value.at)
            given = (value.line, value.with_loop, value.items.of_messages)
            return ("loop", *given, self.key(value.items), self.key(value.at))
        if isinstance(value, Undefined):
            return ("undefined", value._undefined_name)
        value = getattr(value, "_func", value)  # of a macro
        if isinstance(value, FunctionType):
            return ("function", value.__code__, value.__name__)
        if id(value) in self._lasting:
            return ("lasting", id(value))
        raise Untraceable(f"a {kind.__name__} is alive between two steps of a loop")

    def _counted(self, value: Any) -> Any:
        """A number that loops or namespaces count with becomes a value of the row: else each count were a state."""
        return Traced(self._trace, repr(value), value, self._epoch) if type(value) is int else value
