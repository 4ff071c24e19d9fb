"""`raysvc doctor` on the nodes of a cluster: asks each one, and judges all answers together.

Always true:
- a node that does not answer is a finding;
- one line a check, which names the nodes that differ, and every finding but `ok` and `skip` has a remedy.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from raysvc.inspect.node_facts import NodeFacts, facts_of_this_node, now_s
from raysvc.nodes.ask import ask_nodes, on_node
from raysvc.nodes.place import NodePlace
from raysvc.nodes.preflight import REMEDY
from raysvc.nodes.room import Node, label

ANSWER_TIMEOUT_S = 120.0  # a first task on a node starts a process and imports torch
MIN_SHM_SHARE = 0.3  # of memory: what Ray takes for objects by default
MAX_SKEW_S = 1.0  # a lease lives for 30 s
Answers = Mapping[str, NodeFacts]
State = Literal["ok", "warn", "fail", "skip"]


@dataclass(frozen=True)
class Finding:
    """One line.

    Attributes:
        check: its name.
        what: one clause with the figures.
        remedy: one clause; "" when there is nothing to do.
    """

    check: str
    state: State
    what: str
    remedy: str = ""


def facts_of(
    nodes: Sequence[Node], places: tuple[NodePlace, ...] = ()
) -> tuple[dict[str, NodeFacts], dict[str, str]]:
    """Facts by node, and why the others did not answer; what this machine finds wrong with a place counts too."""
    names = {node["NodeID"]: label(node) for node in nodes}
    found = ask_nodes(nodes, facts_of_this_node, places, timeout_s=ANSWER_TIMEOUT_S)
    late = dict.fromkeys(found.late, f"no answer in {ANSWER_TIMEOUT_S:.0f} s") | dict.fromkeys(
        found.gone, "it is gone"
    )
    for node, facts in found.given.items():
        for place in places:
            facts.access[place.name] = facts.access[place.name] or place.try_here(node)
    missing = {names[node]: why for node, why in {**found.failed, **late}.items()}
    return {names[node]: facts for node, facts in found.given.items()}, missing


def check_answers(answers: Answers, missing: Mapping[str, str]) -> Finding:
    """Returns whether each node runs our code."""
    if missing:
        why = "; ".join(f"{node}: {reason}" for node, reason in sorted(missing.items()))
        remedy = "install raysvc on every node (one image), and look at the node's raylet.log"
        return Finding("nodes", "fail", why, remedy)
    return Finding("nodes", "ok", f"{len(answers)} answered")


def check_packages(answers: Answers, here: Mapping[str, str]) -> Finding:
    """One version of what makes bytes, everywhere."""
    found = [
        f"{package} {facts.versions[package] or 'absent'} on {node}, {here[package]} here"
        for node, facts in sorted(answers.items())
        for package in here
        if facts.versions[package] != here[package]
    ]
    if found:
        remedy = "use one image, or one constraints.txt, for all nodes and clients"
        return Finding("packages of nodes", "fail", "; ".join(found), remedy)
    return Finding("packages of nodes", "ok", "as here")


def check_node_shm(answers: Answers) -> Finding:
    """Returns whether Ray keeps objects in memory on every node."""
    small = {
        node: (facts.shm_bytes, facts.memory_bytes)
        for node, facts in sorted(answers.items())
        if facts.shm_bytes is not None and facts.shm_bytes < MIN_SHM_SHARE * facts.memory_bytes
    }
    if not small:
        return Finding("/dev/shm of nodes", "ok", "30 % of memory or more")
    what = "; ".join(
        f"{node}: {shm / 1e9:.1f} GB for {memory / 1e9:.1f} GB" for node, (shm, memory) in small.items()
    )
    need = max(int(MIN_SHM_SHARE * memory) for _, memory in small.values()) >> 30
    remedy = f"give containers --shm-size={need}g (or an emptyDir of Memory): Ray falls back to files on disk"
    return Finding("/dev/shm of nodes", "warn", what, remedy)


def check_node_gpus(answers: Answers, resources: Mapping[str, float], device: str) -> Finding:
    """Driver, torch and Ray agree about the GPUs.

    Args:
        resources: node -> GPUs that Ray has there.
        device: `trainer.device`.
    """
    name = "GPUs of nodes"
    for node, facts in sorted(answers.items()):
        given, seen = resources.get(node, 0), facts.num_gpus or 0
        if given and facts.cuda is None:
            what = f"{node} has {given:g} GPUs in Ray, and a CPU build of torch"
            return Finding(name, "fail", what, "install a CUDA build of torch on that node")
        if given > seen:
            what = f"{node} has {given:g} GPUs in Ray, and its driver shows {seen}"
            return Finding(name, "fail", what, "run nvidia-smi there, and start Ray without --num-gpus")
        if seen > given:
            what = f"{node}: the driver shows {seen} GPUs, and Ray has {given:g}"
            return Finding(name, "warn", what, "start Ray there without --num-gpus, after the driver")
    total = sum(resources.values())
    if device == "cuda" and not total:
        remedy = "add nodes with GPUs, or set trainer.device=cpu"
        return Finding(name, "fail", "trainer.device is cuda, and no node has a GPU", remedy)
    return Finding(name, "ok" if total else "skip", f"{total:g} in Ray" if total else "no node has one")


def check_access(name: str, url: str, answers: Answers) -> Finding:
    """Returns whether every node reads and writes one folder."""
    bad = [f"{node} {why}" for node, facts in sorted(answers.items()) if (why := facts.access.get(name))]
    if not bad:
        return Finding(f"{name} on nodes", "ok", f"{url} is read and written from all of them")
    return Finding(f"{name} on nodes", "fail", f"{url}: {'; '.join(bad)}", REMEDY)


def clock_skew(nodes: Sequence[Node]) -> dict[str, float]:
    """Seconds by which the clocks of nodes are ahead of this one."""
    import ray

    skew_s = {}
    for node in nodes:
        ask, name = on_node(node["NodeID"], now_s), node["NodeID"]
        ray.get(ask.remote(name), timeout=ANSWER_TIMEOUT_S)  # the first call starts a process
        before = time.time()
        there = ray.get(ask.remote(name), timeout=ANSWER_TIMEOUT_S)
        skew_s[label(node)] = there - (before + time.time()) / 2
    return skew_s
