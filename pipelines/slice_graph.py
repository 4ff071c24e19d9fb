"""Slices through a pool of Ray Data actors: what every build has in common.

The driver sends descriptions of slices as JSON and gets receipts back. What a user has to fix comes back as data: Ray
Data would wrap it until its type is lost.

Ray Data keeps a block and its books for every call of a worker, and a call costs some 20 ms of its own. So there are at most
`MOST_CALLS` of them: of more slices the first ones have a call each, and the rest share the other half.

Always true:
- a slice is in one call of a worker;
- the first slices have a call each, so the first receipts come early;
- an error that was raised on purpose is raised again as it was;
- the pool starts on what is free now of the nodes that it may use, and grows with the cluster.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from raysvc import errors
from raysvc.cache.manifest import Receipt
from raysvc.errors import RaysvcError
from raysvc.job.config import PoolConfig
from raysvc.nodes.room import living_nodes, nodes_with

if TYPE_CHECKING:
    import ray.data


MOST_CALLS = 1024


@dataclass(frozen=True)
class WorkerPool:
    """Workers of a build.

    Attributes:
        min: that are kept while it runs.
        max: None: as many as there are slices.
        num_cpus, num_gpus: of each.
        memory_bytes: of each; None: none is reserved.
        resources: custom ones that each holds.
        label_selector: of the nodes.
    """

    min: int = 1
    max: int | None = None
    num_cpus: float = 1.0
    num_gpus: float = 0.0
    memory_bytes: float | None = None
    resources: Mapping[str, float] = field(default_factory=dict)
    label_selector: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def of(cls, config: PoolConfig) -> WorkerPool:
        """The workers that a job asks for."""
        return cls(
            config.min,
            config.max,
            num_cpus=config.num_cpus,
            memory_bytes=None if config.memory_gb is None else config.memory_gb * 1e9,
            resources=config.resources,
            label_selector=config.label_selector,
        )

    def needs(self) -> dict[str, float]:
        """Returns what Ray has to have free for a worker, by the names that Ray gives to resources."""
        named = {
            "CPU": self.num_cpus,
            "GPU": self.num_gpus,
            "memory": self.memory_bytes or 0,
            **self.resources,
        }
        return {kind: amount for kind, amount in named.items() if amount}


def answers(pieces: Sequence[str], build: Callable[[Any], Receipt]) -> dict[str, Any]:
    """Returns what a worker returns for its call: slices, receipts and errors, as columns of text.

    Args:
        pieces: JSON lists of slices.
        build: makes a slice.
    """
    several = [piece for text in pieces for piece in json.loads(text)]
    results = [{"slice": json.dumps(piece), **answer(piece, build)} for piece in several]
    columns = ("slice", "receipt", "error")
    return {name: np.array([result[name] for result in results], dtype=object) for name in columns}


def answer(piece: Any, build: Callable[[Any], Receipt]) -> dict[str, str]:
    """The receipt of a slice, or the error that was raised on purpose, as text."""
    try:
        return {"receipt": build(piece).to_json().decode(), "error": ""}
    except RaysvcError as error:
        return {"receipt": "", "error": json.dumps([type(error).__name__, *error.args])}


def receipts_from(data: ray.data.Dataset) -> Iterator[tuple[Any, Receipt]]:
    """Run a graph; slices, as they were given to it, and their receipts come as they finish, in any order.

    Raises:
        RaysvcError: what a task raised on purpose, as it was raised there.
    """
    for row in data.iter_rows():
        if row["error"]:
            name, *args = json.loads(row["error"])
            error: RaysvcError = getattr(errors, name)(*args)
            raise error
        yield json.loads(row["slice"]), Receipt.from_json(row["receipt"].encode(), "receipt")


def slice_graph(worker: type, task: Any, pieces: Sequence[Any], pool: WorkerPool) -> ray.data.Dataset:
    """The graph over some slices; lazy.

    Args:
        worker: class of the actors; made with `task`, called with a batch whose column `slice` is JSON lists of slices.
        task: what every worker knows.
        pieces: plain JSON.
        pool: the workers.
    """
    import ray
    import ray.data

    context = ray.data.DataContext.get_current()
    context.enable_progress_bars = False
    context.print_on_execution_start = False
    # on the whole execution: given to map_batches alone, Ray Data's own requests still start a node of every pool
    context.execution_options.label_selector = dict(pool.label_selector) or None
    calls = calls_of(pieces)
    most = min(len(calls), pool.max or len(calls))
    least = min(pool.min, most)
    fit = nodes_with(pool.label_selector, living_nodes())
    free = free_workers(fit, ray.available_resources(), pool)
    compute = ray.data.ActorPoolStrategy(
        min_size=least, initial_size=max(least, min(most, free)), max_size=most
    )
    rows = [{"slice": json.dumps(call)} for call in calls]
    data = ray.data.from_items(rows, override_num_blocks=len(rows))
    return data.map_batches(
        worker,
        fn_constructor_args=(task,),
        batch_size=1,
        compute=compute,
        num_cpus=pool.num_cpus,
        num_gpus=pool.num_gpus or None,
        memory=pool.memory_bytes,
        **({"resources": dict(pool.resources)} if pool.resources else {}),
    )


def calls_of(pieces: Sequence[Any]) -> list[Sequence[Any]]:
    """Slices by the call of a worker that makes them, in their order."""
    alone = len(pieces) if len(pieces) <= MOST_CALLS else MOST_CALLS // 2
    each = max(1, -(-(len(pieces) - alone) // (MOST_CALLS // 2)))
    shared = (pieces[first : first + each] for first in range(alone, len(pieces), each))
    return [*([piece] for piece in pieces[:alone]), *shared]


def free_workers(nodes: Sequence[Mapping[str, Any]], available: Mapping[str, float], pool: WorkerPool) -> int:
    """Workers to start with: what is free of the nodes that the pool may use; a growing cluster adds to it.

    Args:
        nodes: whose labels fit.
        available: of the whole cluster.
    """
    room = [
        min(available.get(kind, 0), sum(node["Resources"].get(kind, 0) for node in nodes)) / each
        for kind, each in pool.needs().items()
    ]
    return int(min(room))
