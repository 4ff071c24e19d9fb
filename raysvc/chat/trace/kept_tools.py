"""Tools that rows repeat: one object for equal ones, so that their JSON is written once.

Always true:
- two values are one only when they are equal in every type and in the order of keys;
- no more than `MAX_TOOLS` sets are kept; then all are forgotten.
"""

from __future__ import annotations

import json
from typing import Any

MAX_TOOLS = 1024


class KeptTools:
    """Sets of tools, and the JSON of their parts."""

    def __init__(self) -> None:
        self._encode = json.JSONEncoder(ensure_ascii=False).encode
        self._forget()

    def _forget(self) -> None:
        self._sets: dict[str, list[Any]] = {}
        self._parts: dict[int, Any] = {}  # id -> part; a part that is held here keeps its id
        self._texts: dict[tuple[int, int | None], str] = {}

    def one_of(self, tools: list[Any]) -> list[Any]:
        """The first of all sets that equal this one."""
        if id(tools) in self._parts:
            return tools
        key = repr(tools)  # plain data: tells 1, 1.0 and True apart, and keeps the order of keys
        if key not in self._sets:
            if len(self._sets) >= MAX_TOOLS:
                self._forget()
            self._sets[key] = tools
            self._hold(tools)
        return self._sets[key]

    def to_json(self, value: Any, indent: int | None = None) -> str:
        """The `tojson` filter of `transformers`, done once for a part of tools."""
        if id(value) not in self._parts:
            return self._dump(value, indent)
        key = (id(value), indent)
        if key not in self._texts:
            self._texts[key] = self._dump(value, indent)
        return self._texts[key]

    def _dump(self, value: Any, indent: int | None) -> str:
        return self._encode(value) if indent is None else json.dumps(value, ensure_ascii=False, indent=indent)

    def _hold(self, tools: list[Any]) -> None:
        todo: list[Any] = [tools]
        for part in todo:
            self._parts[id(part)] = part
            items = part.values() if type(part) is dict else part
            todo += [item for item in items if type(item) in (dict, list)]
