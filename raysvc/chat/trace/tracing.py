"""A template made ready to be traced: what its compiled code calls is replaced by what notes the call.

Always true:
- on values that are not traced, everything is Jinja's and `transformers`' own;
- a call with traced values goes to the trace, or raises `Untraceable`.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from datetime import datetime
from functools import wraps
from types import BuiltinMethodType
from typing import Any

from jinja2.compiler import CodeGenerator, Frame
from jinja2.nodes import CallBlock, Compare, ExtensionAttribute, Scope
from jinja2.runtime import LoopContext, Macro, Undefined

from raysvc.chat.render.chat_environment import begin_render
from raysvc.chat.render.compiled import CompiledTemplate
from raysvc.chat.trace.automaton import Automaton
from raysvc.chat.trace.dependence import Needs
from raysvc.chat.trace.operations import PURE_METHODS
from raysvc.chat.trace.trace import Trace
from raysvc.chat.trace.traced_value import (
    CLOSES,
    OPENS,
    Method,
    Traced,
    TracedLoop,
    Untraceable,
    holds_traced,
)

_DICT_FIELDS = frozenset(dir(dict))
_encode = json.JSONEncoder(ensure_ascii=False).encode
_EQUAL = ("equalto", "eq", "==")  # names of one test


class _TracedCode(CodeGenerator):
    """Writes `contains(a, b)` for `a in b`, as texts and dicts of the template cannot be asked for a traced value.

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
        self.write("(not contains(" if node.ops[0].op == "notin" else "(contains(")
        self.visit(node.expr, frame)
        self.write(", ")
        self.visit(node.ops[0].expr, frame)
        self.write("))")


class TracingTemplate:
    """A template that can be traced.

    Args:
        text: Jinja source.
        variables: what the template sees beside messages and tools.
        now: what `strftime_now` shows.

    Attributes:
        automaton: what the traces found.
    """

    def __init__(self, text: str, variables: Mapping[str, Any], now: datetime) -> None:
        self._variables = {"documents": None, **variables}
        self._compiled = CompiledTemplate(text, now, _TracedCode)
        self._plain = CompiledTemplate(text, now).environment
        self._trace: Trace
        self._missing: dict[str, str] = {}
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
        given = {name: trace.given(name) for name in row}
        given["messages"].of_messages, given["messages"].needs = True, Needs.MESSAGES
        root = self._compiled.root(
            self._compiled.context({**self._variables, **given, "add_generation_prompt": prompt})
        )
        for piece in root:
            trace.write(piece, root.gi_frame.f_lineno)
        trace.close(None, [])
        return trace

    def begin_walk(self) -> None:
        """Give the loops over numbers of a row their bound, as a render has it."""
        begin_render(self._plain)

    def _names(self) -> dict[str, Any]:
        plain = self._plain
        names = {f"filter_{name}": filter_ for name, filter_ in plain.filters.items()}
        names["filter_selectattr"] = _selecting(names["filter_selectattr"], plain.getitem)
        names |= {f"test_{name}": test for name, test in plain.tests.items()}
        calls = {"tojson": _to_json, "attribute": plain.getattr, "item": plain.getitem}
        return {**names, **calls}

    def _hook(self) -> None:
        environment, compiled = self._compiled.environment, self._compiled
        for kind, named in (("filter", environment.filters), ("test", environment.tests)):
            named.update({name: self._noted(f"{kind} {name}", real) for name, real in named.items()})
        environment.getattr, environment.getitem = self._getattr, self._getitem
        environment.call, environment.concat = self._call, self._concat
        compiled.root.__globals__.update(
            str=self._str,
            LoopContext=self._loop,
            str_join=lambda items: self._concat(map(self._str, items)),
            contains=self._contains,
            OPENS=OPENS,
            CLOSES=CLOSES,
        )
        self.automaton.lasting = frozenset(map(id, environment.globals.values()))

    def _noted(self, op: str, real: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(real)
        def run(*args: Any, **kwargs: Any) -> Any:
            if not holds_traced((args, kwargs)):
                return real(*args, **kwargs)
            made = self._trace.let(op, *args, **kwargs)
            made.of_messages = type(args[0]) is Traced and args[0].of_messages
            return made

        return run

    def _contains(self, item: Any, value: Any) -> Any:
        if type(item) is not Traced or type(value) not in (str, dict):
            return item in value  # asks traced values itself
        return self._trace.let("in", item, value)

    def _getattr(self, value: Any, name: str) -> Any:
        if type(value) is TracedLoop:
            return value.field(name)
        if not isinstance(value, Traced):
            return self._plain.getattr(value, name)
        if isinstance(self._plain.getattr(value.value, name), BuiltinMethodType):
            return Method(value, name)
        return self._field("attribute", value, name)

    def _getitem(self, value: Any, key: Any) -> Any:
        if type(value) is TracedLoop:
            return value.field(key)
        if not holds_traced((value, key)):
            return self._plain.getitem(value, key)
        return self._field("item", value, key)

    def _field(self, op: str, value: Any, name: Any) -> Any:
        """A field; what a dict does not have is one undefined value for each name."""
        if type(name) is not str or name in _DICT_FIELDS or type(value) is not Traced:
            return self._trace.let(op, value, name)
        if name not in self._missing:
            self._missing[name] = self.automaton.constant(Undefined(obj={}, name=name))
        return self._trace.let(f"{op} {self._missing[name]}", value, name)

    def _call(self, context: Any, called: Any, *args: Any, **kwargs: Any) -> Any:
        kwargs = {name: value for name, value in kwargs.items() if name not in ("_loop_vars", "_block_vars")}
        if type(called) is Method and called.name in PURE_METHODS:
            return self._trace.let(f"method {called.name}", called.owner, *args, **kwargs)
        if holds_traced(called):
            raise Untraceable("a call of something that is no method of a text, list or dict")
        known = self._compiled.environment.globals
        if holds_traced((args, kwargs)) and not isinstance(called, Macro):
            if called is known["range"]:
                bounded = self.automaton.constant(self._plain.globals["range"])
                return self._trace.let(f"call {bounded}", *args, **kwargs)
            if called is not known["namespace"]:
                raise Untraceable(f"a value of the row in a call of {called}")
        return type(self._plain).call(self._compiled.environment, context, called, *args, **kwargs)

    def _concat(self, pieces: Any) -> Any:
        parts = list(pieces)
        if not holds_traced(parts):
            return "".join(parts)
        return self._trace.let("concat", *parts)

    def _str(self, value: Any) -> Any:
        return self._trace.let("str", value) if type(value) is Traced else str(value)

    def _loop(self, over: Any, *args: Any) -> Any:
        if type(over) is not Traced:
            return LoopContext(over, *args)
        if len(args) > 1:
            raise Untraceable("a recursive loop")
        return TracedLoop(self._trace, over, with_loop=True)


def _to_json(value: Any, indent: int | None = None) -> str:
    """The `tojson` filter of `transformers`, without an encoder for each call."""
    return _encode(value) if indent is None else json.dumps(value, ensure_ascii=False, indent=indent)


def _selecting(selectattr: Callable[..., Any], item: Callable[[Any, str], Any]) -> Callable[..., Any]:
    """`selectattr` of a key that equals a value, without what Jinja prepares for each call."""

    def run(context: Any, value: Any, *args: Any, **kwargs: Any) -> Any:
        if len(args) != 3 or args[1] not in _EQUAL or not str(args[0]).isidentifier():
            return selectattr(context, value, *args, **kwargs)
        name, _, wanted = args
        return [each for each in value or () if item(each, name) == wanted]

    return run
