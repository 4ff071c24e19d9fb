"""Decides whether the words of a conversation decide on its generation prompt, as in `{% if '/no_think' in messages[0].content %}`.

1. From the syntax of a template: what each name and each field of a namespace is made of, and under which questions it is set.
2. A prompt is what stands where `add_generation_prompt` is asked. It depends on words where, through any names, a field of a
   message that is no structure has a part in it or in a question around it.

Always true:
- the order in which a template runs changes nothing;
- roles, whether there are calls, of which kind a field is, types of content parts, and places in a loop are structure; any other
  field is words.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator
from functools import lru_cache

from jinja2 import nodes

from raysvc.chat.render.chat_environment import chat_environment

ASKED = "add_generation_prompt"
_WORDS = "the words of a message"  # no name that a template can have
_LOOP = {"first", "last", "index", "index0", "revindex", "revindex0", "previtem", "nextitem", "length"}
_STRUCTURE = {"role", "tool_calls", "tool_responses", "type"} | _LOOP
_KINDS = {"defined", "undefined", "none", "string", "mapping", "sequence", "iterable"}
_OPENS = {
    "selectattr",
    "rejectattr",
    "map",
    "groupby",
    "tojson",
    "string",
    "join",
    "items",
    "dictsort",
    "attr",
}


@lru_cache(maxsize=256)
def words_decide(text: str) -> bool:
    """Returns whether the words of messages may change what a template adds when it is asked for the prompt.

    Args:
        text: Jinja source of a template that compiles.
    """
    return ASKED in text and _PromptReader(chat_environment(None).parse(text)).words_decide()


class _PromptReader:
    def __init__(self, tree: nodes.Template) -> None:
        self._made_of: defaultdict[str, set[str]] = defaultdict(set)
        self._written: list[set[str]] = []  # of each place that writes: the names in it and around it
        self._parts = {
            node.target.name
            for node in tree.find_all(nodes.For)
            if isinstance(node.target, nodes.Name) and _is_content(node.iter)
        }
        self._spaces = {
            node.target.name
            for node in tree.find_all(nodes.Assign)
            if isinstance(node.target, nodes.Name) and _fields(node.node) is not None
        }
        self._read(tree, frozenset())

    def words_decide(self) -> bool:
        """See the function of this name."""
        return any({ASKED, _WORDS} <= self._all_of(names) for names in self._written)

    def _all_of(self, names: Iterable[str]) -> set[str]:
        found, left = set[str](), [*names]
        while left:
            name = left.pop()
            if name not in found:
                found.add(name)
                left += self._made_of.get(name, ())
        return found

    def _read(self, node: nodes.Node, around: frozenset[str]) -> None:
        if isinstance(node, nodes.If):
            around |= self._names(node.test)
            body = () if _is_never_asked(node.test) else node.body
            return self._read_all([*body, *node.elif_, *node.else_], around)
        if isinstance(node, nodes.For):
            over = _field(node.iter)[0] if _is_content(node.iter) else node.iter
            around |= self._names(over, node.test)
            self._set(node.target, around)
            return self._read_all([*node.body, *node.else_], around)
        if isinstance(node, nodes.Output):
            self._written.append(self._names(node) | around)
        elif isinstance(node, nodes.Assign):
            self._set(node.target, self._names(node.node) | around)
            for field in _fields(node.node) or ():
                self._made_of[f"{node.target.name}.{field.key}"] |= self._names(field.value) | around  # type: ignore[attr-defined]
        elif isinstance(node, nodes.AssignBlock):
            self._set(node.target, self._names(*node.body) | around)
        elif isinstance(node, nodes.With):
            for target, value in zip(node.targets, node.values, strict=True):
                self._set(target, self._names(value) | around)
        elif isinstance(node, nodes.Macro):
            self._made_of[node.name] |= self._names(*node.body)
            return None
        return self._read_all(node.iter_child_nodes(), around)

    def _read_all(self, some: Iterable[nodes.Node], around: frozenset[str]) -> None:
        for node in some:
            self._read(node, around)

    def _set(self, target: nodes.Node, names: Iterable[str]) -> None:
        for each in (target, *target.find_all((nodes.Name, nodes.NSRef))):
            if isinstance(each, nodes.NSRef):
                self._made_of[f"{each.name}.{each.attr}"] |= {*names}
            elif isinstance(each, nodes.Name):
                self._made_of[each.name] |= {*names}

    def _names(self, *some: nodes.Node | None) -> set[str]:
        return {name for node in some if node for each in self._within(node) for name in self._named(each)}

    def _named(self, node: nodes.Node) -> list[str]:
        thing, key = _field(node)
        if isinstance(node, nodes.Name):
            return [] if node.name in self._spaces else [_WORDS if node.name in self._parts else node.name]
        if thing is not None:
            if isinstance(thing, nodes.Name) and thing.name in self._spaces:
                return [f"{thing.name}.{key}"]
            return [] if key is None or key in _STRUCTURE else [_WORDS]
        if isinstance(node, nodes.Filter) and node.name in _OPENS:
            args = [*node.args, *(field.value for field in node.kwargs if field.key == "attribute")]
            opened = args[0].value if args and isinstance(args[0], nodes.Const) else None
            return [] if opened in _STRUCTURE else [_WORDS]
        if isinstance(node, nodes.Compare) and node.ops[0].op in ("eq", "ne"):  # of one message with another
            both = (node.expr, node.ops[0].expr)
            return [_WORDS] * all(
                isinstance(each, nodes.Name | nodes.Getitem) and _field(each)[1] is None for each in both
            )
        return []

    def _within(self, node: nodes.Node) -> Iterator[nodes.Node]:
        """A node and all in it, but for fields that are asked for their kind alone, and content parts whose field is asked."""
        yield node
        asks_kind = isinstance(node, nodes.Test) and node.name in _KINDS
        thing, key = _field(node)
        if thing is not None and key is not None:
            inside = [thing, *node.args[1:]] if isinstance(node, nodes.Call) else [thing]
            inside = [
                each for each in inside if not (isinstance(each, nodes.Name) and each.name in self._parts)
            ]
        else:
            inside = [*node.iter_child_nodes()]
        for each in inside:
            asked = _field(each)[0] if asks_kind else None
            yield from self._within(each if asked is None else asked)


def _field(node: nodes.Node | None) -> tuple[nodes.Node | None, str | None]:
    """(what a field is of, its name) as in `m.role`, `m['role']` and `m.get('role')`; no name of a place or a slice, nothing of else."""
    if isinstance(node, nodes.Getattr):
        return node.node, node.attr
    if isinstance(node, nodes.Getitem):
        return node.node, _text(node.arg)
    if isinstance(node, nodes.Call) and isinstance(node.node, nodes.Getattr) and node.node.attr == "get":
        key = _text(node.args[0]) if node.args else None
        return (node.node.node, key) if key is not None else (None, None)
    return None, None


def _text(node: nodes.Node) -> str | None:
    return node.value if isinstance(node, nodes.Const) and isinstance(node.value, str) else None


def _is_content(node: nodes.Node) -> bool:
    return _field(node)[1] == "content"


def _fields(node: nodes.Node) -> list[nodes.Keyword] | None:
    """Returns what a namespace is made with; None of anything else."""
    if isinstance(node, nodes.Call) and isinstance(node.node, nodes.Name) and node.node.name == "namespace":
        return node.kwargs
    return None


def _is_never_asked(test: nodes.Node) -> bool:
    """Returns whether a test is false wherever the prompt is asked for."""
    if isinstance(test, nodes.And):
        return _is_never_asked(test.left) or _is_never_asked(test.right)
    return isinstance(test, nodes.Not) and isinstance(test.node, nodes.Name) and test.node.name == ASKED
