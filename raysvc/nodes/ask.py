"""One question for some nodes: a task on each of them that takes no CPU and no GPU.

Always true:
- every node is asked at the same time, and one that does not answer costs no more than the time limit;
- a task that fails is not tried again;
- a node that is lost meanwhile has not failed.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeVar

from raysvc.nodes.room import Node

T = TypeVar("T")


class Answers(NamedTuple):
    """Holds what the nodes answered, by the id of the node.

    Attributes:
        given: answers.
        late: nodes that did not answer in time.
        gone: nodes that are lost.
        failed: why others could not.
    """

    given: dict[str, Any]
    late: list[str]
    gone: list[str]
    failed: dict[str, str]


def ask_nodes(
    nodes: Sequence[Node],
    question: Callable[..., T],
    *arguments: Any,
    timeout_s: float,
    check: Callable[[], None] = lambda: None,
) -> Answers:
    """Ask each node.

    Args:
        nodes: whom.
        question: what; it is called there with its node's id first.
        arguments: more of it.
        timeout_s: for all answers together.
        check: is called several times a second while they are waited for; what it raises ends that.
    """
    import ray

    refs = {
        node["NodeID"]: on_node(node["NodeID"], question).remote(node["NodeID"], *arguments) for node in nodes
    }
    until = time.monotonic() + timeout_s
    ready: list[Any] = []
    while len(ready) < len(refs) and (left_s := until - time.monotonic()) > 0:
        check()
        ready, _ = ray.wait(list(refs.values()), num_returns=len(refs), timeout=min(left_s, 0.2))
    answers = Answers({}, [], [], {})
    for name, ref in refs.items():
        if ref not in ready:
            answers.late.append(name)
            ray.cancel(ref, force=True)
            continue
        try:
            answers.given[name] = ray.get(ref)
        except (ray.exceptions.NodeDiedError, ray.exceptions.TaskUnschedulableError):
            answers.gone.append(name)
        except ray.exceptions.RayError as error:
            answers.failed[name] = str(error).strip().splitlines()[-1]
    return answers


def on_node(node_id: str, question: Callable[..., Any]) -> Any:
    """A task for one node; it has to be alive."""
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    where = NodeAffinitySchedulingStrategy(node_id, soft=False)
    return ray.remote(question).options(num_cpus=0, scheduling_strategy=where, max_retries=0)
