"""Where the workers of several groups go: bundles of resources, and what a cluster lacks for them.

1. Groups that are colocated share bundles: rank r of each of them is in the set's r-th bundle.
2. A bundle has the sum of what its workers need, so one bundle is at most one GPU, and its workers share that device.
3. A group that is not colocated has bundles of its own.
4. Bundles fit when each finds room on a node: the largest first, on the first node that has it. Nodes that are filled
   before others are begun is what PACK asks of Ray too.

Always true:
- every worker has exactly one bundle; workers of two sets never share one;
- colocated groups have as many workers as each other, and need at most one GPU together;
- a refusal names the resource, how much is needed and how much there is.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import NamedTuple

from raysvc.errors import ConfigError

Resources = dict[str, float]


class GroupNeed(NamedTuple):
    """What the workers of a group need, each."""

    num_workers: int
    num_cpus: float = 1.0
    num_gpus: float = 0.0  # a fraction shares a device


class Placement(NamedTuple):
    """Bundles, and the bundle of every worker of a group."""

    bundles: list[Resources]
    bundle_of: dict[str, list[int]]


def place_groups(needs: Mapping[str, GroupNeed], colocated: Iterable[Collection[str]] = ()) -> Placement:
    """Bundles of all groups.

    Raises:
        ConfigError: a set names an unknown group, or a group twice; its groups differ in size, or need more than one
            GPU together; a worker needs several GPUs and a part of one.
    """
    shared = [sorted(names) for names in colocated]
    _check(needs, shared)
    alone = [[name] for name in needs if not any(name in names for names in shared)]
    bundles: list[Resources] = []
    bundle_of: dict[str, list[int]] = {}
    for names in (*shared, *alone):  # 1, 3
        count = needs[names[0]].num_workers
        for name in names:
            bundle_of[name] = list(range(len(bundles), len(bundles) + count))
        total = {
            "CPU": sum(needs[name].num_cpus for name in names),
            "GPU": sum(needs[name].num_gpus for name in names),
        }
        bundle = {kind: amount for kind, amount in total.items() if amount} or {"CPU": 0.001}  # never empty
        bundles += [dict(bundle) for _ in range(count)]  # 2
    return Placement(bundles, bundle_of)


def what_is_missing(bundles: Sequence[Resources], nodes: Sequence[Mapping[str, float]]) -> str | None:
    """Why the bundles do not fit on nodes of these resources; None when they do."""
    kinds = sorted({kind for bundle in bundles for kind in bundle})
    for kind in kinds:
        need, have = _total(bundles, kind), _total(nodes, kind)
        if need > have + 1e-6:
            return f"needs {need:g} {kind}, the cluster has {have:g}"
    free = [dict(node) for node in nodes]
    for bundle in sorted(bundles, key=lambda b: (b.get("GPU", 0), b.get("CPU", 0)), reverse=True):  # 4
        room = next((node for node in free if _holds(node, bundle)), None)
        if room is None:
            largest = ", ".join(f"{max((node.get(k, 0) for node in nodes), default=0):g} {k}" for k in bundle)
            wanted = ", ".join(f"{amount:g} {kind}" for kind, amount in bundle.items())
            places = "a place" if len(bundles) == 1 else f"{len(bundles)} places"
            each = "" if len(bundles) == 1 else " each"
            return f"needs {places} of {wanted} on one node{each} (most on a node: {largest})"
        for kind, amount in bundle.items():
            room[kind] = room.get(kind, 0.0) - amount
    return None


def _check(needs: Mapping[str, GroupNeed], shared: list[list[str]]) -> None:
    seen: set[str] = set()
    for name, need in needs.items():
        if need.num_gpus > 1 and need.num_gpus != int(need.num_gpus):
            raise ConfigError(
                f"group {name!r}",
                f"needs {need.num_gpus:g} GPUs a worker",
                "give a whole number, or a fraction below 1",
            )
    for names in shared:
        for name in names:
            if name not in needs or name in seen:
                what = "is in two sets" if name in seen else f"is not a group (groups: {', '.join(needs)})"
                raise ConfigError("colocated", f"{name!r} {what}", "name every group once")
            seen.add(name)
        sizes = {name: needs[name].num_workers for name in names}
        if len(set(sizes.values())) > 1:
            raise ConfigError("colocated", f"groups have {sizes} workers", "give them the same number")
        gpus = sum(needs[name].num_gpus for name in names)
        if gpus > 1 + 1e-6:
            remedy = f"give each worker {1 / len(names):.3g} of a GPU"
            raise ConfigError("colocated", f"{', '.join(names)} need {gpus:g} GPUs in one place", remedy)


def _total(resources: Iterable[Mapping[str, float]], kind: str) -> float:
    return sum(each.get(kind, 0.0) for each in resources)


def _holds(node: Mapping[str, float], bundle: Resources) -> bool:
    return all(node.get(kind, 0.0) + 1e-6 >= amount for kind, amount in bundle.items())
