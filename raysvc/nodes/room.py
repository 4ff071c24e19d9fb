"""Asks whether the nodes of a cluster have room for what a job starts, by resources and by labels.

A node that is busy has room: what runs there ends. Which labels fit a selector is asked of Ray, by a placement group for
one node of each set of labels, which is removed when Ray has said whether it is feasible (2 ms).

Always true:
- no label selector is read here;
- a text says what is asked for and what there is.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from typing import Any

from raysvc.errors import ConfigError

log = logging.getLogger(__name__)
Resources = dict[str, float]
Selector = Mapping[str, str]
Node = Mapping[str, Any]

NODE_ID = "ray.io/node-id"  # a label that Ray gives every node
SAY_EVERY_S = 5.0
LOG_EVERY_S = 30.0
DECIDES_WITHIN_S = 2.0
MOST_ASKED = 64  # sets of labels; Ray itself finds out about the rest
MOST_SHOWN = 8


def living_nodes() -> list[Node]:
    """The nodes that are there now, as `ray.nodes` describes them."""
    import ray

    return [node for node in ray.nodes() if node["Alive"]]


def label(node: Node) -> str:
    """Name of a node for display; two on one address differ by id."""
    return f"{node['NodeManagerAddress']} ({node['NodeID'][:6]})"


def nodes_with(selector: Selector, nodes: Sequence[Node]) -> list[Node]:
    """The nodes whose labels fit, as Ray sees it."""
    if not selector or NODE_ID in selector:
        return list(nodes)
    sets: dict[frozenset[tuple[str, str]], list[Node]] = {}
    for node in nodes:
        labels = dict(node.get("Labels") or {})
        labels.pop(NODE_ID, None)
        sets.setdefault(frozenset(labels.items()), []).append(node)
    groups = list(sets.values())
    asked = [{**selector, NODE_ID: str(same[0]["NodeID"])} for same in groups[:MOST_ASKED]]
    fits = [*feasible({"memory": 1.0}, asked), *[True] * max(0, len(groups) - MOST_ASKED)]
    return [node for same, fit in zip(groups, fits, strict=True) if fit for node in same]


def feasible(need: Resources, selectors: Sequence[Selector]) -> list[bool]:
    """Tells for each selector whether Ray knows a node with these labels that could hold this when all else has
    ended.
    """
    states = _states(need, selectors, lambda state: state in ("CREATED", "NO_RESOURCES", "INFEASIBLE"))
    return [state != "INFEASIBLE" for state in states]


def has_free(node_id: str, need: Resources, within_s: float) -> bool:
    """Returns whether a node has this free now, or within the time that Ray takes to count what ended."""
    (state,) = _states(need, [{NODE_ID: node_id}], lambda state: state == "CREATED", within_s)
    return state == "CREATED"


def _states(
    need: Resources,
    selectors: Sequence[Selector],
    decided: Callable[[str], bool],
    within_s: float = DECIDES_WITHIN_S,
) -> list[str]:
    """Returns what Ray says of a placement group of each selector: CREATED, or why it is not there yet."""
    from ray.util import placement_group, placement_group_table, remove_placement_group

    def state(group: Any) -> str:
        facts = placement_group_table(group)
        if facts.get("state") in ("CREATED", "PREPARED"):
            return "CREATED"
        return str(facts.get("stats", {}).get("scheduling_state"))

    groups = [placement_group([dict(need)], bundle_label_selector=[dict(one)]) for one in selectors]
    until = time.monotonic() + within_s
    try:
        states = [state(group) for group in groups]
        while not all(map(decided, states)) and time.monotonic() < until:
            time.sleep(0.002)
            states = [
                one if decided(one) else state(group) for one, group in zip(states, groups, strict=True)
            ]
        return states
    finally:
        for group in groups:
            remove_placement_group(group)


def what_is_missing(bundles: Sequence[Resources], nodes: Sequence[Mapping[str, float]]) -> str | None:
    """Says why the bundles do not fit on nodes of these resources; None when they do.

    Bundles fit when each finds room on a node: the largest first, on the first node that has it. Nodes that are filled
    before others are begun is what PACK asks of Ray too.
    """
    kinds = sorted({kind for bundle in bundles for kind in bundle})
    for kind in kinds:
        need, have = _total(bundles, kind), _total(nodes, kind)
        if need > have + 1e-6:
            return f"needs {_amount(need, kind)}, the cluster has {_amount(have, kind, named=False)}"
    free = [dict(node) for node in nodes]
    for bundle in sorted(bundles, key=lambda b: (b.get("GPU", 0), b.get("CPU", 0)), reverse=True):
        room = next((node for node in free if _holds(node, bundle)), None)
        if room is None:
            most = (_amount(max((node.get(k, 0) for node in nodes), default=0), k) for k in bundle)
            places = "a place" if len(bundles) == 1 else f"{len(bundles)} places"
            each = "" if len(bundles) == 1 else " each"
            return (
                f"needs {places} of {amounts(bundle)} on one node{each} (most on a node: {', '.join(most)})"
            )
        for kind, amount in bundle.items():
            room[kind] = room.get(kind, 0.0) - amount
    return None


def no_room(bundles: Sequence[Resources], selector: Selector = {}) -> str | None:  # noqa: B006 - only read
    """Says why the present nodes with these labels can never hold the bundles; None when they can."""
    nodes = living_nodes()
    fit = nodes_with(selector, nodes)
    if not fit:
        return f"no node has {_text(selector)}; nodes have {_labels_of(nodes, selector)}"
    missing = what_is_missing(bundles, [node["Resources"] for node in fit])
    if missing and selector:
        return f"{missing.replace('the cluster has', 'they have')}, counting nodes with {_text(selector)}"
    return missing


def not_free(bundles: Sequence[Resources]) -> str | None:
    """Says what the bundles need and others use now; None when all of it is free."""
    import ray

    free, total = ray.available_resources(), ray.cluster_resources()
    for kind in sorted({kind for bundle in bundles for kind in bundle}):
        need, left = _total(bundles, kind), free.get(kind, 0.0)
        if need > left + 1e-6:
            there = (
                f"{_amount(left, kind, named=False)} of {_amount(total.get(kind, 0.0), kind, named=False)}"
            )
            return f"needs {_amount(need, kind)}, and {there} is free"
    return None


def refuse_what_never_fits(
    where: str,
    bundles: list[Resources],
    may_grow: bool,
    selector: Selector = {},  # noqa: B006 - only read
) -> None:
    """Refuse bundles that the nodes cannot hold even when all else has ended; say so and wait where nodes may come.

    Ray's autoscalers do not tell which nodes they could bring, so the user does.

    Raises:
        ConfigError: no node can hold one of them, and none may come.
    """
    missing = no_room(bundles, selector)
    if missing is None:
        return
    if not may_grow:
        remedy = "ask for less, add nodes, or set wait_for_nodes (trainer.wait_for_nodes of a job) where they come on demand"
        raise ConfigError(where, missing, remedy)
    log.warning("waiting for more nodes for=%r: %s", where, missing)


class RoomWatch:
    """Says every few seconds what a wait lacks, until it is there, and looks at nodes as they come; those that had room may
    also go.

    Args:
        where: the key that asks.
        need: of the smallest thing that would end the wait.
        selector: of the nodes.
        say: is told the same in one line.
        on_room: is called with the ids of nodes that were there before, when there is a node with room, and again when others
            have come; what it raises ends the wait.
    """

    def __init__(
        self,
        where: str,
        need: Resources,
        selector: Selector,
        say: Callable[[str], None],
        on_room: Callable[[Set[str]], None],
    ) -> None:
        self._where, self._need, self._selector = where, need, selector
        self._say, self._on_room = say, on_room
        self._since = self._next = time.monotonic()
        self._seen: Set[str] = frozenset()  # ids of the nodes that `on_room` has looked at
        self._logged, self._logged_at = "", 0.0
        self._had_room: Set[str] | None = None  # all nodes, when there was room; None while there is none

    def check(self) -> None:
        """Called often; looks at the nodes every `SAY_EVERY_S`."""
        now = time.monotonic()
        if now < self._next:
            return
        self._next = now + SAY_EVERY_S
        there = {str(node["NodeID"]) for node in living_nodes()}
        missing = None if there == self._had_room else no_room([self._need], self._selector)
        self._had_room = there if missing is None else None
        if missing is None:
            self._since = now
            if not there <= self._seen:
                self._on_room(self._seen)
                self._seen = self._seen | there
            return
        nodes = f" with {_text(self._selector)}" if self._selector else ""
        told = f"{missing} (asked for {amounts(self._need)}{nodes})"
        if (
            told != self._logged or now - self._logged_at >= LOG_EVERY_S
        ):  # whoever watches `say` reads it there
            self._logged, self._logged_at = told, now
            log.warning("waiting for more nodes for=%r since=%.0fs: %s", self._where, now - self._since, told)
        self._say(f"waiting for more nodes: {told}")


def amounts(bundle: Resources) -> str:
    """A bundle in words."""
    return ", ".join(_amount(amount, kind) for kind, amount in bundle.items()) or "no resources"


def _amount(amount: float, kind: str, *, named: bool = True) -> str:
    number = f"{float(f'{amount / 1e9:.3g}'):g} GB" if kind == "memory" else f"{amount:g}"
    return f"{number} {kind}" if named else number


def _text(labels: Mapping[str, str]) -> str:
    return ",".join(f"{name}={value}" for name, value in labels.items())


def _labels_of(nodes: Sequence[Node], selector: Selector) -> str:
    """Returns what the nodes have of the labels that a selector names."""
    found = set()
    for node in nodes:
        own = node.get("Labels") or {}
        shown = {name: own[name] for name in selector if name in own}
        found.add(_text(shown) or f"no {' or '.join(selector)}")
    texts = sorted(found)
    more = f" and {len(texts) - MOST_SHOWN} others" if len(texts) > MOST_SHOWN else ""
    return ", ".join(texts[:MOST_SHOWN]) + more


def _total(resources: Iterable[Mapping[str, float]], kind: str) -> float:
    return sum(each.get(kind, 0.0) for each in resources)


def _holds(node: Mapping[str, float], bundle: Resources) -> bool:
    return all(node.get(kind, 0.0) + 1e-6 >= amount for kind, amount in bundle.items())
