"""One row traced through its template: what is computed, asked and written, cut into states.

Always true:
- a value is made by evaluating the expression that later rows run;
- at a cut, all variables in the template's frame become the state, and traced values in it become registers;
- a value of an earlier stretch that was in no variable at the cut cannot be used.
"""

from __future__ import annotations

from itertools import groupby
from operator import itemgetter
from types import FrameType, FunctionType, NoneType
from typing import Any

from jinja2.nodes import EvalContext
from jinja2.runtime import Context, Undefined
from jinja2.utils import Namespace, missing

from raysvc.chat.bounds.sizes import FEW
from raysvc.chat.render.compiled import CompiledTemplate
from raysvc.chat.render.rendered import Written
from raysvc.chat.trace.automaton import Automaton, State, Tree
from raysvc.chat.trace.operations import Needs, needs_after, needs_of
from raysvc.chat.trace.traced_value import Method, Traced, TracedLoop, Untraceable

MAX_LINES = 4000  # of one way through a state: a macro that writes a loop out a thousand times
_LOCAL = ("l_", "t_")  # how Jinja begins the names of variables, and of filters, tests and buffers


class Trace:
    """A row on its way through a template.

    Args:
        compiled: the template with hooks that call this trace.
        automaton: whose states and constants are used.
        prompt: it is rendered with the generation prompt; its states are its own, as a loop may look it up again.
        row: "messages" and "tools".

    Attributes:
        ways: (state, way through it) of the stretches so far.
        out: what the row writes.
        fills_in: no words of the row's texts decide on what is written, so far.
    """

    def __init__(
        self, compiled: CompiledTemplate, automaton: Automaton, prompt: bool, row: dict[str, Any]
    ) -> None:
        self._compiled, self._automaton, self._prompt, self._row = compiled, automaton, prompt, row
        self._messages = {id(message) for message in row["messages"]}
        self._state, self._epoch = automaton.states[prompt], 0
        self._generations: list[Traced | None] = []  # that are open: the message of each
        self._loops: dict[int, TracedLoop] = {}  # by the line of their `for` in the root, outermost first
        self.ways: list[tuple[State, Tree]] = []
        self.out: list[Written] = []
        self.fills_in = True
        self._begin([])

    def _begin(self, registers: list[Traced]) -> None:
        self._way = self._end = Tree([f"{self.code(tuple(registers))} = registers"] if registers else [])
        self._written: list[tuple[bool, str, str]] = []
        self._known: dict[str, Traced] = {}
        self._asked: set[str] = set()
        self._values = {**self._row, **{register.var: register.value for register in registers}}
        self._values["out"] = self.out.append

    def let(self, form: str, *args: Any) -> Traced:
        """Do an operation on the row's values and note it, or raise `Untraceable` at one too many; `form` as in `operations`."""
        source = form.format(*map(self.code, args))
        if source not in self._known:
            if len(self._known) >= MAX_LINES:
                raise Untraceable("too much happens between two steps of a loop")
            var = f"v{len(self._known)}"
            value = self._values[var] = eval(source, self._automaton.names, self._values)
            self._end.lines.append(f"{var} = {source}")
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
            asking, self._end = self._end, Tree([])
            asking.asked, asking.kids[answer] = var, self._end
        return answer

    def code(self, value: Any) -> str:
        """Python for a value.

        Raises:
            Untraceable: the value is of an earlier stretch, or none that later rows can have.
        """
        kind = type(value)
        if kind is Traced:
            if value.epoch not in (None, self._epoch):
                raise Untraceable("a value that was taken for dead")
            return str(value.var)
        if kind is dict:
            return f"kept({{{''.join(f'{self.code(key)}: {self.code(item)}, ' for key, item in value.items())}}})"
        if kind in (list, tuple):
            inner = "".join(f"{self.code(item)}, " for item in value)
            return f"kept([{inner}])" if kind is list else f"({inner})"
        if value is None or kind in (str, bool, int):
            return f"({value!r})" if kind is int and value < 0 else repr(value)
        if isinstance(value, Context):
            value = self._compiled.blank  # filters read nothing of a context that a row can change
        elif isinstance(value, EvalContext):
            value = self._compiled.blank.eval_ctx
        elif isinstance(value, Method | Namespace | TracedLoop):
            raise Untraceable(f"a {kind.__name__} went where it cannot be followed")
        return self._automaton.constant(value)

    def write(self, piece: Any, frame: FrameType) -> None:
        """Note what the root's frame writes: text, or whether a `{% generation %}` begins or ends."""
        if piece is True:
            self._generations.append(self._owner(frame))
        elif piece is False:
            self._generations.pop()
        else:
            generated = bool(self._generations)
            owner = self._generations[0] if generated else self._owner(frame)
            self.fills_in &= needs_of(piece) not in (Needs.MESSAGES, Needs.WORDS)
            self._written.append((generated, self.code(owner), self.code(piece)))

    def _owner(self, frame: FrameType) -> Traced | None:
        """The message for whom the root writes, as the real render says."""
        taken: list[Traced] = []
        for line in reversed(self._compiled.loops_around(frame.f_lineno)):
            loop = self._loops.get(line)
            if loop is None or loop.item is None:
                continue
            item: Traced = loop.item
            if type(item.value) is dict and loop.items.of_messages:
                return item
            if type(item.value) is int:
                inside = self._compiled.set_in(line, frame.f_locals)
                taken += [
                    each for each in inside if type(each) is Traced and id(each.value) in self._messages
                ]
        return taken[0] if len(taken) == 1 else None

    def step(self, loop: TracedLoop, frame: FrameType) -> None:
        """A loop takes a step: in the root a stretch ends here, when the loops around are traced too."""
        line = frame.f_lineno
        if frame.f_code is not self._compiled.code:
            return
        around = (*self._compiled.loops_around(line), line)
        known = {**self._loops, line: loop}
        self._loops = {each: known[each] for each in around if each in known}
        if len(self._loops) < len(around):
            return
        found, seen = frame.f_locals, dict[int, Any]()
        local = [each for each in found.items() if each[0].startswith(_LOCAL) and each[1] is not missing]
        # by name: `f_locals` keeps the order in which names were bound, which is another after the first step
        variables = sorted(local) + sorted(found["context"].vars.items())
        key = (self._prompt, frame.f_lasti, self._key(variables, seen), self._key(self._loops, seen))
        self.close(self._automaton.states[key], [each for each in seen.values() if type(each) is Traced])

    def close(self, state: State | None, registers: list[Traced]) -> None:
        """End this stretch; what follows begins in `state`."""
        lines = self._end.lines
        for (generated, owner), written in groupby(self._written, itemgetter(0, 1)):
            pieces = [piece for _, _, piece in written]
            joins = "''.join" if len(pieces) <= FEW else "joined"
            text = pieces[0] if len(pieces) == 1 else f"{joins}(({', '.join(pieces)}))"
            lines.append(f"out(({generated}, {owner}, {text}))")
            eval(lines[-1], self._automaton.names, self._values)
        values = self.code(tuple(registers))
        if state is self._state:  # a loop that goes on as it was
            lines += [f"registers = {values}", "continue"]
        else:
            lines.append(f"return {self.code(state)}, {values}")
        self.ways.append((self._state, self._way))
        self._epoch += 1
        for index, register in enumerate(registers):
            register.var, register.epoch = f"r{index}", self._epoch
        self._begin(registers)
        self._state = state or self._state

    def _key(self, value: Any, seen: dict[int, Any]) -> Any:
        """What a state holds of a value; `seen` gets, by id, the value and those in it.

        Raises:
            Untraceable: a kind of value that a state cannot hold.
        """
        kind = type(value)
        if kind in (str, int, float, bool, NoneType):
            return (kind, value)
        if kind is Traced and value.epoch != self._epoch:
            return ("given", value.var) if value.epoch is None else "dead"  # using it fails
        if id(value) in seen:
            return ("same", [*seen].index(id(value)))
        seen[id(value)] = value
        if kind is Traced:
            return "traced"
        if kind in (list, tuple, dict):
            names, inside = (value, value.values()) if kind is dict else ((), value)
            return (kind, *names, *(self._key(each, seen) for each in inside))
        if isinstance(value, Namespace):
            fields = value._Namespace__attrs
            fields.update({name: self._counted(item) for name, item in fields.items()})
            return ("namespace", self._key(fields, seen))
        if kind is TracedLoop:
            value.at = self._counted(value.at)
            return ("loop", value.items.of_messages, self._key([value.items, value.at], seen))
        if isinstance(value, Undefined):
            return ("undefined", value._undefined_name)
        function = getattr(value, "_func", value)  # of a macro
        if isinstance(function, FunctionType):
            return function.__code__
        if id(value) in self._automaton.constants:
            return id(value)
        raise Untraceable(f"a {kind.__name__} is alive between two steps of a loop")

    def _counted(self, value: Any) -> Any:
        """A number that loops or namespaces count with becomes a value of the row: else each count were a state."""
        return Traced(self, repr(value), value, self._epoch) if type(value) is int else value
