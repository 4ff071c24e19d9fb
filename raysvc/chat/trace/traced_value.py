"""Values that note what a template does with them.

Always true:
- an operation is done on the row's value by the trace, and gives another traced value;
- only a decision (`bool`) is a question;
- anything that is not listed here fails with `Untraceable`.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

from jinja2.runtime import Undefined

from raysvc.chat.trace.operations import AT, LENGTH, LIST, SLICE, Needs


class Untraceable(Exception):
    """A row that cannot be traced; the argument says why."""


class Traced:
    """A value that came from the row.

    Attributes:
        trace: the `Trace` that notes what is done.
        var: its variable in the trace.
        value: of the row that is traced.
        epoch: stretch of the trace that the variable belongs to; None for the whole row's.
        needs: what it depends on.
        of_messages: when it is a list, it is one of the row's messages.
    """

    __slots__ = ("epoch", "needs", "of_messages", "trace", "value", "var")
    __hash__ = None  # type: ignore[assignment]

    def __init__(self, trace: Any, var: str, value: Any, epoch: int | None = None) -> None:
        self.trace, self.var, self.value, self.epoch = trace, var, value, epoch
        self.needs = Needs.ROLES
        self.of_messages = False

    def __bool__(self) -> bool:
        return bool(self.trace.ask(self))

    def __getitem__(self, key: Any) -> Any:  # compiled templates use it for slices alone
        return self.trace.let(SLICE, self, key.start, key.stop, key.step)

    def __iter__(self) -> Iterator[Any]:
        return TracedLoop(self)

    def _refuse(self, *_: Any) -> Any:
        raise Untraceable("a value of the row went where it cannot be followed")

    __str__ = __len__ = __index__ = __int__ = __float__ = __call__ = __format__ = __contains__ = _refuse


def _operator(sign: str, reflected: bool) -> Any:
    def operate(self: Traced, other: Any) -> Any:
        return self.trace.let(f"{{}} {sign} {{}}", *((other, self) if reflected else (self, other)))

    return operate


_SIGNS = {"add": "+", "sub": "-", "mul": "*", "truediv": "/", "floordiv": "//", "mod": "%", "pow": "**"}
_SIGNS |= {"eq": "==", "ne": "!=", "lt": "<", "le": "<=", "gt": ">", "ge": ">="}
for _name, _sign in _SIGNS.items():
    setattr(Traced, f"__{_name}__", _operator(_sign, False))
    setattr(Traced, f"__r{_name}__", _operator(_sign, True))  # Python calls it for arithmetic alone


class Method(Traced):
    """A method of a traced value; all that can be done with it is to call it."""

    __slots__ = ("name", "owner")

    def __init__(self, owner: Traced, name: str) -> None:
        super().__init__(owner.trace, "", None)
        self.owner, self.name = owner, name


class TracedLoop:
    """A `for` over a traced value, and the template's `loop`.

    In the template's root each step begins a new state; in macros steps are written out.

    Attributes:
        items: what it goes over.
        at: index of the item, a traced value after the first step.
        line: of the `for` statement in the root, -1 elsewhere.
    """

    def __init__(self, over: Traced, with_loop: bool = False) -> None:
        self.trace, self.with_loop = over.trace, with_loop
        self.items = over if over.var == "messages" else self.trace.let(LIST, over)
        self.at: Any = -1
        self.item: Any = None
        self.line = -1
        self.trace.loops.append(self)

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        trace, self.at = self.trace, self.at + 1
        trace.step(self, sys._getframe(1))
        if not self._is_item(self.at):
            trace.loops.remove(self)
            raise StopIteration
        item = self.item = trace.let(AT, self.items, self.at)
        if type(item.value) is tuple:  # of `.items()`
            item = tuple(trace.let(AT, item, index) for index in range(len(item.value)))
        return (item, self) if self.with_loop else item

    def _count(self) -> Any:
        return self.trace.let(LENGTH, self.items)

    def _is_item(self, at: Any) -> Any:
        return self.trace.let("{} < {}", at, self._count())

    def field(self, name: str) -> Any:
        """A field of `loop`.

        Raises:
            Untraceable: a field that is not followed.
        """
        at = self.at
        match name:
            case "index0":
                return at
            case "index":
                return at + 1
            case "first":
                return at == 0
            case "last":
                return at + 1 == self._count()
            case "length":
                return self._count()
            case "previtem":
                return self.trace.let(AT, self.items, at - 1) if at > 0 else Undefined("no such item")
            case "nextitem":
                return (
                    self.trace.let(AT, self.items, at + 1)
                    if self._is_item(at + 1)
                    else Undefined("no such item")
                )
        raise Untraceable(f"loop.{name}")


def holds_traced(value: Any) -> bool:
    """Whether a value is traced, or a container of one."""
    kind = type(value)
    if issubclass(kind, Traced):
        return True
    if kind is dict:
        return any(map(holds_traced, value.values()))
    return kind in (list, tuple) and any(map(holds_traced, value))
