"""Values that note what a template does with them.

Always true:
- an operation is done on the row's value by the trace, and gives another traced value;
- only a decision (`bool`) is a question;
- anything that is not listed here fails with `Untraceable`.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from typing import Any

from jinja2.runtime import Undefined

from raysvc.chat.trace.operations import AT, LENGTH, LIST, NEAR, SLICE, Needs

_NO_ITEM = Undefined("there is no such item")


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

    needs = Needs.ROLES
    of_messages = False
    __hash__ = None  # type: ignore[assignment]

    def __init__(self, trace: Any, var: str, value: Any, epoch: int | None = None) -> None:
        self.trace, self.var, self.value, self.epoch = trace, var, value, epoch

    def __bool__(self) -> bool:
        return bool(self.trace.ask(self))

    def __getitem__(self, key: Any) -> Any:  # compiled templates use it for slices alone
        return self.trace.let(SLICE, self, key.start, key.stop, key.step)

    def __iter__(self) -> Iterator[Any]:
        return TracedLoop(self)

    def _refuse(self, *_: Any) -> Any:
        raise Untraceable("a value of the row went where it cannot be followed")

    __str__ = __repr__ = __len__ = __index__ = __int__ = __float__ = __call__ = __format__ = __contains__ = (
        _refuse
    )


def _operator(sign: str, reflected: bool) -> Any:
    def operate(self: Traced, other: Any) -> Any:
        return self.trace.let(f"{{}} {sign} {{}}", *((other, self) if reflected else (self, other)))

    return operate


_SIGNS = {"add": "+", "sub": "-", "truediv": "/", "floordiv": "//"}
_SIGNS |= {"eq": "==", "ne": "!=", "lt": "<", "le": "<=", "gt": ">", "ge": ">="}
for _name, _sign in _SIGNS.items():
    setattr(Traced, f"__{_name}__", _operator(_sign, False))
    setattr(Traced, f"__r{_name}__", _operator(_sign, True))  # Python calls it for arithmetic alone


class Method(Traced):
    """A method of a traced value, by its name in `var`; all that can be done with it is to call it."""


class TracedLoop:
    """A `for` over a traced value, and the template's `loop`.

    In the template's root each step begins a new state; in macros steps are written out.

    Attributes:
        items: what it goes over.
        at: index of the item, a traced value after the first step in the root.
        item: the traced value there.
    """

    def __init__(self, over: Traced) -> None:
        self.trace = over.trace
        self.items = over if over.var == "messages" else self.trace.let(LIST, over)
        self.at: Any = -1
        self.item: Any = None

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        trace, self.at = self.trace, self.at + 1
        trace.step(self, sys._getframe(1))
        if not trace.let("{} < {}", self.at, trace.let(LENGTH, self.items)):
            raise StopIteration
        item = self.item = trace.let(AT, self.items, self.at)
        if type(item.value) is tuple:  # of `.items()`
            return tuple(trace.let(AT, item, index) for index in range(len(item.value)))
        return item


LOOP_FIELDS: dict[str, Callable[[TracedLoop], Any]] = {
    "index0": lambda loop: loop.at,
    "index": lambda loop: loop.at + 1,
    "first": lambda loop: loop.at == 0,
    "last": lambda loop: loop.at + 1 == loop.trace.let(LENGTH, loop.items),
    "length": lambda loop: loop.trace.let(LENGTH, loop.items),
    "previtem": lambda loop: loop.trace.let(NEAR, loop.items, loop.at - 1, _NO_ITEM),
    "nextitem": lambda loop: loop.trace.let(NEAR, loop.items, loop.at + 1, _NO_ITEM),
}


def holds_traced(value: Any) -> bool:
    """Whether a value is traced, or a container of one."""
    inside = value.values() if type(value) is dict else value if type(value) in (list, tuple) else ()
    return isinstance(value, Traced) or any(map(holds_traced, inside))
