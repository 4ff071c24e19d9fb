"""A template made ready to be traced: what its compiled code calls is replaced by what notes the call.

Always true:
- on values that are not traced, everything is Jinja's and `transformers`' own;
- a call with traced values goes to the trace, or raises `Untraceable`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from datetime import datetime
from functools import wraps
from types import BuiltinMethodType
from typing import Any

from jinja2.compiler import CodeGenerator, Frame
from jinja2.nodes import CallBlock, Compare, ExtensionAttribute, Scope
from jinja2.runtime import LoopContext, Macro, Undefined

from raysvc.chat.render.chat_environment import begin_render, chat_environment
from raysvc.chat.render.compiled import CompiledTemplate
from raysvc.chat.trace.automaton import Automaton
from raysvc.chat.trace.operations import FIELD, IN, ITEM, JOIN, TEXT, Needs, call_form
from raysvc.chat.trace.trace import CLOSES, OPENS, Trace
from raysvc.chat.trace.traced_value import Method, Traced, TracedLoop, Untraceable, holds_traced

_CHANGING = frozenset({"append", "clear", "extend", "insert", "pop", "remove", "reverse", "sort"})
_CHANGING |= {"popitem", "setdefault", "update"}
_PURE_METHODS = frozenset({*dir(str), *dir(dict), *dir(list)} - _CHANGING - {"format", "format_map"})
_EQUAL = ("equalto", "eq", "==")  # names of one test


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
            self.writeline("yield OPENS", node)
        self.visit_Scope(Scope(node.body), frame)
        if frame.buffer is None:
            self.writeline("yield CLOSES")

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
        self._trace: Trace
        self._missing: dict[str, Undefined] = {}
        self.automaton = Automaton(self._names())
        self._hook()

    def trace(self, messages: list[Any], tools: Any, prompt: bool) -> Trace:
        """Run a row through the template.

        Raises:
            Exception: the row cannot be traced, whatever the reason.
        """
        self.begin_walk()
        row = {"messages": messages, "tools": tools}
        trace = self._trace = Trace(self._compiled, self.automaton, prompt, row)
        given = {name: Traced(trace, name, value) for name, value in row.items()}
        given["messages"].of_messages, given["messages"].needs = True, Needs.MESSAGES
        context = self._compiled.context({**self._variables, **given, "add_generation_prompt": prompt})
        root = self._compiled.root(context)
        for piece in root:
            trace.write(piece, root.gi_frame.f_lineno)
        trace.close(None, [])
        return trace

    def begin_walk(self) -> None:
        """Give the loops over numbers of a row their bound, as a render has it."""
        begin_render(self._plain)

    def _names(self) -> dict[str, Any]:
        plain = self._plain
        names = {f"filter_{name}": each for name, each in plain.filters.items()}
        names["filter_selectattr"] = _selecting(names["filter_selectattr"], plain.getitem)
        names |= {f"test_{name}": each for name, each in plain.tests.items()}
        names |= {f"global_{name}": each for name, each in self._compiled.environment.globals.items()}
        return {**names, "range_": plain.globals["range"], "getattr": plain.getattr, "getitem": plain.getitem}

    def _hook(self) -> None:
        environment = self._compiled.environment
        for kind, named in (("filter", environment.filters), ("test", environment.tests)):
            named.update({name: self._noted(f"{kind}_{name}", real) for name, real in named.items()})
        environment.getattr, environment.getitem = self._getattr, self._getitem
        environment.call, environment.concat = self._call, self._concat
        self._compiled.root.__globals__.update(
            str=self._str,
            LoopContext=self._loop,
            str_join=lambda items: self._concat(map(self._str, items)),
            OPENS=OPENS,
            CLOSES=CLOSES,
        )

    def _let_call(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Traced:
        form = IN if name == "test_in" else call_form(name, args, kwargs)
        return self._trace.let(form, *args, *kwargs.values())

    def _noted(self, name: str, real: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(real)
        def run(*args: Any, **kwargs: Any) -> Any:
            if holds_traced((args, kwargs)):
                return self._let_call(name, args, kwargs)
            return real(*args, **kwargs)

        return run

    def _getattr(self, value: Any, name: str) -> Any:
        if type(value) is Traced and isinstance(self._plain.getattr(value.value, name), BuiltinMethodType):
            return Method(value, name)
        return self._field("getattr", value, name)

    def _getitem(self, value: Any, key: Any) -> Any:
        return self._field("getitem", value, key)

    def _field(self, kind: str, value: Any, name: Any) -> Any:
        """A field; what a dict does not have is one undefined value for each name."""
        if type(value) is TracedLoop:
            return value.field(name)
        if not holds_traced((value, name)):
            return getattr(self._plain, kind)(value, name)
        if type(value) is Traced and type(name) is str and not hasattr(dict, name):
            missing = self._missing.setdefault(name, Undefined(obj={}, name=name))
            return self._trace.let(FIELD, value, name, missing)
        is_place = type(name) is int and name >= 0
        return self._trace.let(ITEM if is_place else f"{kind}({{}}, {{}})", value, name)

    def _call(self, context: Any, called: Any, *args: Any, **kwargs: Any) -> Any:
        kwargs = {name: value for name, value in kwargs.items() if name not in ("_loop_vars", "_block_vars")}
        if type(called) is Method and called.name in _PURE_METHODS:
            form = f"{{}}.{call_form(called.name, args, kwargs)}"
            return self._trace.let(form, called.owner, *args, *kwargs.values())
        if holds_traced(called):
            raise Untraceable("a call of something that is no method of a text, list or dict")
        known = self._compiled.environment.globals
        takes_any = isinstance(called, Macro) or called is known["namespace"]
        if holds_traced((args, kwargs)) and not takes_any:
            if called is known["range"]:
                return self._let_call("range_", args, kwargs)
            raise Untraceable(f"a value of the row in a call of {called}")
        return type(self._plain).call(self._compiled.environment, context, called, *args, **kwargs)

    def _concat(self, pieces: Any) -> Any:
        parts = tuple(pieces)
        return self._trace.let(JOIN, parts) if holds_traced(parts) else "".join(parts)

    def _str(self, value: Any) -> Any:
        return self._trace.let(TEXT, value) if type(value) is Traced else str(value)

    def _loop(self, over: Any, *args: Any) -> Any:
        if type(over) is not Traced:
            return LoopContext(over, *args)
        if len(args) > 1:
            raise Untraceable("a recursive loop")
        return TracedLoop(over, with_loop=True)


def _selecting(selectattr: Callable[..., Any], item: Callable[[Any, str], Any]) -> Callable[..., Any]:
    """`selectattr` of a key that equals a value, without what Jinja prepares for each call."""

    def run(context: Any, value: Any, *args: Any, **kwargs: Any) -> Any:
        if len(args) != 3 or args[1] not in _EQUAL or not str(args[0]).isidentifier():
            return selectattr(context, value, *args, **kwargs)
        name, _, wanted = args
        return [each for each in value or () if item(each, name) == wanted]

    return run
