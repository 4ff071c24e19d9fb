"""A template made ready to be traced: what its compiled code calls is replaced by what notes the call.

Always true:
- on values that are not traced, everything is Jinja's and `transformers`' own;
- a call with traced values goes to the trace, or raises `Untraceable`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from datetime import datetime
from functools import partial, wraps
from itertools import repeat
from types import BuiltinMethodType
from typing import Any

from jinja2.compiler import CodeGenerator, Frame
from jinja2.nodes import CallBlock, Compare, ExtensionAttribute, Scope
from jinja2.runtime import LoopContext, Undefined

from raysvc.chat.bounds.bounded_environment import KEPT
from raysvc.chat.bounds.budget import within_budget
from raysvc.chat.bounds.sizes import FEW, FREE_METHODS, MAX_SIZE, METHODS, SEARCHES, Check, joined, kept
from raysvc.chat.render.chat_environment import chat_environment
from raysvc.chat.render.compiled import CompiledTemplate
from raysvc.chat.render.rendered import Written
from raysvc.chat.trace.automaton import Automaton, State
from raysvc.chat.trace.operations import EQUALS, FIELD, IN, ITEM, JOIN, KEEP, TEXT, Needs
from raysvc.chat.trace.trace import Trace
from raysvc.chat.trace.traced_value import LOOP_FIELDS, Method, Traced, TracedLoop, Untraceable, holds_traced

_SHORT = 64  # of a text that methods look for
_METHODS = FREE_METHODS | METHODS.keys()


class _TracedCode(CodeGenerator):
    """Writes the test for `a in b`, as texts and dicts of the template cannot be asked for a traced value.

    What `{% generation %}` wraps stays in the code around it, between two marks: so a loop in it is one of the root's, with
    a state for each step.
    """

    def visit_CallBlock(self, node: CallBlock, frame: Frame) -> None:  # noqa: N802  Jinja calls it so
        """One `{% call %}` or `{% generation %}`."""
        if not isinstance(node.call.node, ExtensionAttribute):
            super().visit_CallBlock(node, frame)
            return
        if frame.buffer is None:
            self.writeline("yield True", node)
        self.visit_Scope(Scope(node.body), frame)
        if frame.buffer is None:
            self.writeline("yield False")

    def visit_Compare(self, node: Compare, frame: Frame) -> None:  # noqa: N802  Jinja calls it so
        """One comparison."""
        if len(node.ops) > 1 or node.ops[0].op not in ("in", "notin"):
            super().visit_Compare(node, frame)
            return
        self.write(f"({'not ' * (node.ops[0].op == 'notin')}environment.tests['in'](")
        self.visit(node.expr, frame)
        self.write(", ")
        self.visit(node.ops[0].expr, frame)
        self.write("))")


class TracingTemplate:
    """A template that can be traced; the arguments are those of `RealRender`, and `automaton` is what traces found."""

    def __init__(self, text: str, variables: Mapping[str, Any], now: datetime) -> None:
        self._variables = {"documents": None, **variables}
        self._compiled, self._plain = CompiledTemplate(text, now, _TracedCode), chat_environment(now)
        self._missing: dict[str, Undefined] = {}
        self.automaton = Automaton(self._hook())

    def trace(self, messages: list[Any], tools: Any, prompt: bool) -> Trace:
        """Run a row through the template.

        Raises:
            Exception: the row cannot be traced, whatever the reason.
        """
        return within_budget(self._trace_of, messages, tools, prompt)

    def _trace_of(self, messages: list[Any], tools: Any, prompt: bool) -> Trace:
        row = {"messages": messages, "tools": tools}
        trace = self._trace = Trace(self._compiled, self.automaton, prompt, row)
        given = {name: Traced(trace, name, value) for name, value in row.items()}
        given["messages"].of_messages, given["messages"].needs = True, Needs.MESSAGES
        context = self._compiled.context({**self._variables, **given, "add_generation_prompt": prompt})
        root = self._compiled.root(context)
        for piece in root:
            trace.write(piece, root.gi_frame)
        trace.close(None, [])
        return trace

    def walk(self, messages: list[Any], tools: Any, prompt: bool) -> list[Written]:
        """What a row writes, stretch by stretch.

        Raises:
            Miss: something in it is new. Whatever else is raised says that the row has to be rendered.
        """
        return within_budget(self._walk, messages, tools, prompt)

    def _walk(self, messages: list[Any], tools: Any, prompt: bool) -> list[Written]:
        state: State | None = self.automaton.states[prompt]
        out: list[Written] = []
        add, registers = out.append, ()
        while state is not None:
            state, registers = state.run(messages, tools, add, registers)
        if len(out) > FEW and sum([len(text) for _, _, text in out]) > MAX_SIZE:
            raise Untraceable("a long text: the real render knows how long it may be")
        return out

    def _hook(self) -> dict[str, Any]:
        """Replace what the compiled code calls; gives what it called before, by name."""
        names: dict[str, Any] = {
            "getattr": self._plain.getattr,
            "getitem": self._plain.getitem,
            "joined": joined,
        }
        names |= {
            "kept": kept,
            **{f"method_{name}": _measured(name, check) for name, check in METHODS.items()},
        }
        environment = self._compiled.environment
        for kind in ("filter", "test", "global"):
            named = getattr(environment, f"{kind}s")
            names |= {f"{kind}_{name}": each for name, each in named.items()}
            if kind != "global":
                named.update({name: self._noted(f"{kind}_{name}", real) for name, real in [*named.items()]})
        environment.filters[KEPT] = lambda value: self._kept(value)  # a trace knows functions, and no methods
        for kind in ("getattr", "getitem"):
            setattr(environment, kind, partial(self._field, kind))
        environment.call, environment.concat = self._call, self._concat
        self._compiled.root.__globals__.update(
            str=self._str,
            LoopContext=self._loop,
            str_join=lambda items: self._concat(map(self._str, items)),
        )
        return names

    def _let_call(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any], *owner: Traced) -> Traced:
        """Note a call of a function, or of an owner's method."""
        match name, args:
            case "test_in", _:
                form = IN
            case "filter_selectattr", (_, _, str(key), "equalto" | "eq" | "==", str()) if key.isidentifier():
                form = EQUALS
            case _:
                slots = ["{}"] * len(args) + [f"{key}={{}}" for key in kwargs]
                form = (
                    f"{name}, {', '.join(slots)})" if name.endswith("({}") else f"{name}({', '.join(slots)})"
                )
        return self._trace.let(form, *owner, *args, *kwargs.values())

    def _noted(self, name: str, real: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(real)
        def run(*args: Any, **kwargs: Any) -> Any:
            if holds_traced((args, kwargs)):
                return self._let_call(name, args, kwargs)
            return real(*args, **kwargs)

        return run

    def _field(self, kind: str, value: Any, name: Any) -> Any:
        """A field; what a dict does not have is one undefined value for each name."""
        if type(value) is TracedLoop:
            if name not in LOOP_FIELDS:
                raise Untraceable(f"loop.{name}")
            return LOOP_FIELDS[name](value)
        if not holds_traced((value, name)):
            return getattr(self._plain, kind)(value, name)
        if type(value) is Traced and type(name) is str:
            if kind == "getattr" and type(self._plain.getattr(value.value, name)) is BuiltinMethodType:
                return Method(self._trace, name, value)
            if not hasattr(dict, name):
                missing = self._missing.setdefault(name, Undefined(obj={}, name=name))
                return self._trace.let(FIELD, value, name, missing)
        is_place = type(name) is int and name >= 0
        return self._trace.let(ITEM if is_place else f"{kind}({{}}, {{}})", value, name)

    def _call(self, context: Any, called: Any, *args: Any, **kwargs: Any) -> Any:
        kwargs = {name: value for name, value in kwargs.items() if name not in ("_loop_vars", "_block_vars")}
        if type(called) is Method and called.var in _METHODS:
            form = _method(called.var, (*args, *kwargs.values()))
            return self._let_call(form, args, kwargs, called.value)
        if called is self._compiled.environment.globals["range"] and holds_traced((args, kwargs)):
            return self._let_call("global_range", args, kwargs)
        return type(self._plain).call(self._compiled.environment, context, called, *args, **kwargs)

    def _kept(self, value: Any) -> Any:
        """A display goes on as it is: the code for it measures it."""
        if type(value) is Traced:
            return self._trace.let(KEEP, value)
        return value if holds_traced(value) else kept(value)

    def _concat(self, pieces: Any) -> Any:
        parts = tuple(pieces)
        return self._trace.let(JOIN, parts) if holds_traced(parts) else "".join(parts)

    def _str(self, value: Any) -> Any:
        return self._trace.let(TEXT, value) if type(value) is Traced else str(value)

    def _loop(self, over: Any, *args: Any) -> Any:
        if type(over) is not Traced:
            return LoopContext(over, *args)
        loop = TracedLoop(over)
        return zip(loop, repeat(loop))


def _method(name: str, given: tuple[Any, ...]) -> str:
    """The beginning of a call of a method, which is measured before where it may make much."""
    is_short = name in SEARCHES and all(type(each) is str and len(each) <= _SHORT for each in given)
    return f"{{}}.{name}" if name not in METHODS or is_short else f"method_{name}({{}}"


def _measured(name: str, check: Check) -> Callable[..., Any]:
    def run(owner: Any, *args: Any, **kwargs: Any) -> Any:
        check(owner, *args, **kwargs)
        return getattr(owner, name)(*args, **kwargs)

    return run
