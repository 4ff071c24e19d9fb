"""Decides where the workers of several groups go: bundles of resources.

1. Groups that are colocated share bundles: rank r of each of them is in the set's r-th bundle.
2. A bundle has the sum of what its workers need, so one bundle is at most one GPU, and its workers share that device.
3. A group that is not colocated has bundles of its own.

Always true:
- every worker has exactly one bundle; workers of two sets never share one;
- colocated groups have as many workers as each other, and need at most one GPU together.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import NamedTuple

from raysvc.errors import ConfigError
from raysvc.nodes.room import Resources, refuse_what_never_fits


class GroupNeed(NamedTuple):
    """Holds what the workers of a group need, each."""

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


def pick_device(device: str, dp_size: int, num_gpus: float | None = None) -> str:
    """`auto` is CUDA where the cluster has a GPU for every rank."""
    if device != "auto":
        return device
    import ray

    need = dp_size * (1.0 if num_gpus is None else num_gpus)
    return "cuda" if 0 < need <= ray.cluster_resources().get("GPU", 0) else "cpu"


def rank_need(
    dp_size: int, device: str, num_cpus: float, num_gpus: float | None = None
) -> tuple[str, GroupNeed]:
    """The device of a trainer's ranks, and what they need.

    Args:
        num_gpus: of each; None: a whole one on CUDA, else none.

    Raises:
        ConfigError: two ranks would share a device that they compute on.
    """
    device = pick_device(device, dp_size, num_gpus)
    cuda = device.startswith("cuda")
    need = GroupNeed(dp_size, num_cpus, (1.0 if cuda else 0.0) if num_gpus is None else num_gpus)
    if cuda and dp_size > 1 and need.num_gpus < 1:
        what = f"is {need.num_gpus:g} with {dp_size} ranks on CUDA, and NCCL refuses two ranks on one device"
        raise ConfigError("trainer.gpus_per_worker", what, "give each rank a whole GPU, or set dp_size: 1")
    return device, need


def refuse_without_places(
    needs: Mapping[str, GroupNeed],
    placed: Placement,
    may_grow: bool,
    beside: Sequence[Resources] = (),
) -> None:
    """Refuse groups that the nodes can never hold.

    Args:
        needs: of the groups.
        placed: their bundles.
        may_grow: an autoscaler may bring nodes: what the cluster lacks now is waited for.
        beside: what the job starts besides.

    Raises:
        ConfigError: the error says what is missing.
    """
    where = f"groups {', '.join(needs)}{' and the server' if beside else ''}"
    refuse_what_never_fits(where, [*placed.bundles, *beside], may_grow)


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
