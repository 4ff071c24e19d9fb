"""Before the first slice, shard or step: do the nodes that may do the work see what this machine sees?

A folder that exists everywhere and is shared by nobody looks right from each machine, so files are written and read both
ways (`raysvc.nodes.place`). The node of this process is not asked: what it sees is known.

Always true:
- nothing is asked where this process is on the only node that may do the work;
- one error names every node and path, and says what to do, whoever needs it;
- a node that does not answer in time is told, and the work goes on: it may only be busy; so it does without one that is lost.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence, Set
from contextlib import ExitStack

from raysvc.errors import NodeError
from raysvc.nodes.ask import ask_nodes
from raysvc.nodes.place import NodePlace
from raysvc.nodes.room import (
    Node,
    Resources,
    RoomWatch,
    Selector,
    label,
    living_nodes,
    nodes_with,
    refuse_what_never_fits,
    what_is_missing,
)

log = logging.getLogger(__name__)
MOST_NODES = 8
ANSWER_S = 8.0
REMEDY = "every node must see it; use a shared folder or s3://"
Opening = Callable[[], NodePlace]


def workers_see(
    places: Sequence[Opening],
    need: Resources,
    selector: Selector = {},  # noqa: B006 - only read
    but: Set[str] = frozenset(),
) -> None:
    """Try places on nodes that can hold this, at most `MOST_NODES` of them.

    Args:
        places: what opens each of them here.
        need: of one of those who will use them.
        selector: of the nodes.
        but: ids of nodes that are not asked.

    Raises:
        NodeError: a node does not see one of them.
    """
    known = {*but, own_node()}
    others = [node for node in living_nodes() if node["NodeID"] not in known]
    able = [node for node in others if what_is_missing([need], [node["Resources"]]) is None]
    nodes_see(places, nodes_with(selector, able)[:MOST_NODES] if able else [])


def ready_for(
    where: str,
    places: Sequence[Opening],
    need: Resources,
    selector: Selector,
    *,
    may_grow: bool,
    say: Callable[[str], None],
) -> RoomWatch:
    """Refuse work that no node can do, and try its places on those that can; where nodes may come, when they have come.

    Args:
        where: the key that asks for the workers.
        places: what opens each of them here.
        need: of a worker.
        selector: of its nodes.
        may_grow: nodes may come.
        say: is told what is waited for.

    Returns:
        What has to be called while the first result is waited for.

    Raises:
        ConfigError: no node can hold a worker, and none may come.
        NodeError: a node does not see one of the places.
    """
    if not may_grow:
        refuse_what_never_fits(where, [need], may_grow, selector)
    watch = RoomWatch(where, need, selector, say, lambda seen: workers_see(places, need, selector, seen))
    watch.check()
    return watch


def nodes_see(places: Sequence[Opening], nodes: Sequence[Node]) -> None:
    """Try places on these nodes.

    Raises:
        NodeError: a node does not see one of them.
    """
    if not nodes:
        return
    with ExitStack() as closing:
        opened = []
        for place in places:
            opened.append(place())
            closing.callback(opened[-1].close)
        found = ask_nodes(nodes, faults_there, tuple(opened), timeout_s=ANSWER_S)
        names = {node["NodeID"]: label(node) for node in nodes}
        faults = [
            (place, names[node], fault)
            for node, told in found.given.items()
            for place, fault_there in zip(opened, told, strict=True)
            if (fault := fault_there or place.try_here(node))
        ]
    if found.late:
        late = ", ".join(names[node] for node in found.late)
        log.warning("no answer from %s in %.0f s: not known whether it sees all files", late, ANSWER_S)
    if found.failed:
        node, why = next(iter(found.failed.items()))
        raise NodeError(
            f"node {names[node]}", f"cannot run a task ({why})", "install raysvc on every node (one image)"
        )
    if faults:
        raise refusal(faults)


def refusal(faults: Sequence[tuple[NodePlace, str, str]]) -> NodeError:
    """Returns what to tell: each place with its nodes, by what is wrong.

    Args:
        faults: place, node and what is wrong.
    """
    nodes_of: dict[tuple[str, str, str], list[str]] = {}
    for place, node, fault in faults:
        nodes_of.setdefault((place.name, place.url, fault), []).append(node)
    (name, url, _), *_ = nodes_of
    told = [
        ("" if (one, where) == (name, url) else f"{one} {where}: ")
        + f"node{'s' * (len(nodes) > 1)} {', '.join(nodes)}: {fault}"
        for (one, where, fault), nodes in nodes_of.items()
    ]
    return NodeError(f"{name} {url}", ". ".join(told), REMEDY)


def faults_there(node: str, places: tuple[NodePlace, ...]) -> list[str]:
    """Runs on a node: what is wrong with each place; "" where nothing is."""
    return [place.try_there(node) for place in places]


def own_node() -> str | None:
    """Id of the node of this process; None where it is on no node (a client of `ray://`)."""
    import ray
    from ray.util.client import ray as client

    return None if client.is_connected() else str(ray.get_runtime_context().get_node_id())
