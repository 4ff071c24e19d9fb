"""Values that note what a template does with them.

Always true:
- an operation is done on the row's value by the trace, and gives another traced value;
- only a decision (`bool`) is a question;
- anything that is not listed here fails with `Untraceable`.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any, Protocol

from raysvc.chat.trace.dependence import Needs
from raysvc.chat.trace.operations import BINARY

OPENS, CLOSES = object(), object()  # what the root writes around a `{% generation %}`


class Untraceable(Exception):
    """A row that cannot be traced; the argument says why."""


class Recorder(Protocol):
    """What traced values tell their trace; `loops` are those that run, outermost first."""

    loops: list[TracedLoop]

    def ask(self, value: Traced) -> bool:
        """Note a question, and answer it for the row that is traced."""

    def let(self, op: str, *args: Any, **kwargs: Any) -> Traced:
        """Note an operation, and do it on the row's values."""

    def step(self, loop: TracedLoop, frame: FrameType) -> None:
        """Note that a loop goes on."""


class Traced:
    """A value that came from the row.

    Attributes:
        var: its variable in the trace.
        value: of the row that is traced.
        epoch: stretch of the trace that the variable belongs to; None for the whole row's.
        needs: what it depends on.
        of_messages: it is a list of the row's messages.
    """

    __slots__ = ("epoch", "needs", "of_messages", "trace", "value", "var")
    __hash__ = None  # type: ignore[assignment]

    def __init__(self, trace: Recorder, var: str, value: Any, epoch: int | None = None) -> None:
        self.trace, self.var, self.value, self.epoch = trace, var, value, epoch
        self.needs = Needs.ROLES
        self.of_messages = False

    def __bool__(self) -> bool:
        return self.trace.ask(self)

    def __contains__(self, item: Any) -> bool:
        return bool(self.trace.let("in", item, self))

    def __getitem__(self, key: Any) -> Any:  # compiled templates use it for slices alone
        made = self.trace.let("slice", self, key.start, key.stop, key.step)
        made.of_messages = self.of_messages
        return made

    def __iter__(self) -> Iterator[Any]:
        return TracedLoop(self.trace, self)

    def _refuse(self, *_: Any) -> Any:
        raise Untraceable("a value of the row went where it cannot be followed")

    __str__ = __len__ = __index__ = __int__ = __float__ = __call__ = __format__ = _refuse


def _operator(sign: str, reflected: bool) -> Any:
    def operate(self: Traced, other: Any) -> Any:
        return self.trace.let(sign, other, self) if reflected else self.trace.let(sign, self, other)

    return operate


_NAMES = {"+": "add", "-": "sub", "*": "mul", "/": "truediv", "//": "floordiv", "%": "mod", "**": "pow"}
_NAMES |= {"==": "eq", "!=": "ne", "<": "lt", "<=": "le", ">": "gt", ">=": "ge"}
for _sign in BINARY - {"in"}:
    setattr(Traced, f"__{_NAMES[_sign]}__", _operator(_sign, False))
    if _sign[0] not in "=!<>":
        setattr(Traced, f"__r{_NAMES[_sign]}__", _operator(_sign, True))


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

    def __init__(self, trace: Recorder, over: Traced, with_loop: bool = False) -> None:
        self.trace, self.with_loop = trace, with_loop
        self.items = over if over.var == "messages" else trace.let("list", over)
        self.items.of_messages = over.of_messages
        self.at: Any = -1
        self.item: Any = None
        self.line = -1
        trace.loops.append(self)

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        trace = self.trace
        self.at = self.at + 1
        trace.step(self, sys._getframe(1))
        if not trace.let("<", self.at, trace.let("len", self.items)):
            trace.loops.remove(self)
            raise StopIteration
        self.item = trace.let("at", self.items, self.at)
        item: Any = self.item
        if type(item.value) is tuple:  # of `.items()`
            item = tuple(trace.let("at", item, index) for index in range(len(item.value)))
        return (item, self) if self.with_loop else item

    def field(self, name: str) -> Any:
        """A field of `loop`.

        Raises:
            Untraceable: a field that is not followed.
        """
        let, at = self.trace.let, self.at
        if name in ("previtem", "nextitem"):
            return self._neighbour(-1 if name == "previtem" else 1)
        fields: dict[str, Callable[[], Any]] = {
            "index0": lambda: at,
            "index": lambda: at + 1,
            "first": lambda: at == 0,
            "last": lambda: at + 1 == let("len", self.items),
            "length": lambda: let("len", self.items),
        }
        if name not in fields:
            raise Untraceable(f"loop.{name}")
        return fields[name]()

    def _neighbour(self, step: int) -> Any:
        from jinja2.runtime import Undefined

        let, at = self.trace.let, self.at
        inside = at > 0 if step < 0 else let("<", at + 1, let("len", self.items))
        return let("at", self.items, at + step) if inside else Undefined("there is no such item")


def holds_traced(value: Any) -> bool:
    """Whether a value is traced, or a container of one."""
    kind = type(value)
    if issubclass(kind, Traced):
        return True
    if kind is dict:
        return any(map(holds_traced, value.values()))
    return kind in (list, tuple) and any(map(holds_traced, value))
