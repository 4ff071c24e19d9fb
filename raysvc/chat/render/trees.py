"""A tree of questions and answers, grown by the rows that are met, and compiled once it stops growing.

Always true:
- `find` gives the leaf whose questions have the answers of this conversation, or None when there is none yet;
- the compiled function and the walk give the same leaf.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from raysvc.chat.render.answers import Answer, Source, answerer
from raysvc.chat.render.symbols import Question
from raysvc.chat.source.messages import Message

Find = Callable[[list[Message], int], Any]
Asking = tuple[Question, Answer, Any]
QUIET_FINDS = 64
DEEPEST = 60  # Python allows 100 levels of indentation


@dataclass(slots=True)
class Node:
    """A question, and where its answers lead: to nodes or leaves."""

    question: Question
    answer: Answer
    children: dict[Any, Any] = field(default_factory=dict)


class Asked:
    """Answers questions for one conversation, and remembers them in order."""

    def __init__(self, messages: list[Message], at: int) -> None:
        self._messages, self._at = messages, at
        self._known: dict[Question, tuple[Answer, Any]] = {}

    def __call__(self, question: Question) -> Any:
        """The answer, asked now if it was not before."""
        if question not in self._known:
            answer = answerer(question)
            self._known[question] = (answer, answer(self._messages, self._at))
        return self._known[question][1]

    def known(self, question: Question) -> Any:
        """The answer when it was asked before, else None."""
        return self._known[question][1] if question in self._known else None

    @property
    def path(self) -> list[Asking]:
        """Questions with how to answer them and what was answered."""
        return [(question, answer, given) for question, (answer, given) in self._known.items()]


class Tree:
    """What is known so far about what a template asks.

    Attributes:
        root: a node, a leaf, or None while nothing is known.
        find: the leaf of a conversation and a place in it, None when it is a new one.
        settled: whether no leaf was added for a while, so that compiling pays.
    """

    def __init__(self) -> None:
        self.root: Any = None
        self.settled = False
        self._quiet = 0
        self.find: Find = self._walk

    def _walk(self, messages: list[Message], at: int) -> Any:
        node = self.root
        while node.__class__ is Node:
            node = node.children.get(node.answer(messages, at))
        self._quiet += 1
        if self._quiet == QUIET_FINDS and _depth(self.root) <= DEEPEST:
            self.find, self.settled = compiled(self.root), True
        return node

    def insert(self, path: list[Asking], leaf: Any) -> None:
        """Keep a leaf for conversations that answer alike."""
        self.root = _grown(self.root, path, leaf)
        self._quiet, self.find, self.settled = 0, self._walk, False


def _grown(root: Any, path: list[Asking], leaf: Any) -> Any:
    """The tree with one more leaf; a path asks the questions of the nodes it goes through, in their order."""
    if not path:
        return leaf
    question, answer, given = path[0]
    node = root if root.__class__ is Node else Node(question, answer)
    assert node.question == question
    node.children[given] = _grown(node.children.get(given), path[1:], leaf)
    return node


def compiled(root: Any) -> Find:
    """The tree as one Python function of nested ifs."""
    source = Source()
    lines: list[str] = []
    write_tree(root, 0, lines, source, lambda leaf, names: [f"return {names.name(leaf)}"], "return None")
    return source.function(lines)


def write_tree(
    node: Any,
    depth: int,
    lines: list[str],
    source: Source,
    write_leaf: Callable[[Any, Source], list[str]],
    unknown: str,
) -> None:
    """Write nested ifs for a tree.

    Args:
        node: its root.
        depth: of the indentation.
        lines: to add to.
        source: names what the lines need; they see `messages`, `at` and `message`.
        write_leaf: lines for a leaf.
        unknown: line for answers that lead nowhere.
    """
    indent = "    " * depth
    if node.__class__ is not Node:
        leaf_lines = [unknown] if node is None else write_leaf(node, source)
        lines.extend(f"{indent}{line}" for line in leaf_lines)
        return
    asked, tests = source.asked(node.question, list(node.children))
    lines.append(f"{indent}a{depth} = {asked}")
    for test, child in zip(tests, node.children.values(), strict=True):
        lines.append(f"{indent}if a{depth} {test}:")
        write_tree(child, depth + 1, lines, source, write_leaf, unknown)
    lines.append(f"{indent}{unknown}")


def _depth(node: Any) -> int:
    return 1 + max(map(_depth, node.children.values()), default=0) if node.__class__ is Node else 0
