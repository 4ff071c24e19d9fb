"""Places of worker groups, and the workers in them: where actor classes of the reference trainer meet Ray.

Always true:
- the places of all groups are reserved together, or nothing is started;
- the service does not load this file: a server and a client know no worker.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import NamedTuple

import ray
from ray.actor import ActorHandle
from ray.util.placement_group import PlacementGroup, placement_group, placement_group_table
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from raysvc.actors.launch import QUIET, REPORT_EVERY_S, say_waiting
from raysvc.actors.placement import GroupNeed, place_groups, refuse_without_places
from raysvc.actors.worker.torch_worker import CausalLMWorker, ModelSpec
from raysvc.actors.worker.worker import Worker
from raysvc.nodes.room import Resources, no_room, not_free

LOOK_S = 0.02


class PlacedWorkers(NamedTuple):
    """Workers by group, in rank order, and what holds their places; removing it ends them."""

    workers: dict[str, list[ActorHandle]]
    reserved: PlacementGroup


def start_groups(
    specs: Mapping[str, ModelSpec],
    needs: Mapping[str, GroupNeed],
    colocated: Iterable[Collection[str]] = (),
    device: str = "cuda",
    worker: type[Worker] = CausalLMWorker,
    *,
    may_grow: bool = False,
    beside: Sequence[Resources] = (),
) -> PlacedWorkers:
    """Workers of several groups in places that are reserved together, packed onto nodes; colocated ones share devices.

    Staging has a thread of its own. A worker is not restarted by Ray: its weights would be gone. The run goes on from a
    checkpoint.

    Args:
        may_grow: an autoscaler may bring nodes: what the cluster lacks now is waited for.
        beside: what the job starts besides, in places of its own: only counted.

    Raises:
        ConfigError: the cluster cannot hold them all; the error says what is missing. Nothing was started then.
    """
    placed = place_groups(needs, colocated)
    refuse_without_places(needs, placed, may_grow, beside)
    reserved = placement_group(placed.bundles, strategy="PACK")
    actor = ray.remote(concurrency_groups={"stage": 1}, **QUIET)(worker)
    workers = {}
    for name, need in needs.items():
        text = specs[name].model_dump_json()
        workers[name] = [
            actor.options(
                num_cpus=need.num_cpus,
                num_gpus=need.num_gpus,
                scheduling_strategy=PlacementGroupSchedulingStrategy(reserved, bundle),
            ).remote(rank, need.num_workers, device, text)
            for rank, bundle in enumerate(placed.bundle_of[name])
        ]
    return PlacedWorkers(workers, reserved)


def nodes_of(reserved: PlacementGroup) -> list[str]:
    """The node of each place, once all are there."""
    wait_for_places(reserved)
    nodes: dict[int, str] = placement_group_table(reserved)["bundles_to_node_id"]
    return [nodes[place] for place in range(len(nodes))]


def wait_for_places(reserved: PlacementGroup) -> None:
    """Wait until all places are there, or were removed, however long nodes take to come; says every few seconds what is missing."""
    began = told = time.monotonic()
    while placement_group_table(reserved).get("state") in ("PENDING", "PREPARED"):
        time.sleep(LOOK_S)
        if (now := time.monotonic()) - told > REPORT_EVERY_S:
            told = now
            missing = no_room(reserved.bundle_specs) or not_free(reserved.bundle_specs)
            say_waiting("the places of the workers", now - began, missing)
