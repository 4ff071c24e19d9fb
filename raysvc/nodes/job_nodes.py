"""Asks what the nodes of a cluster must see for a job, and which of them: asked before the work that needs it begins.

| who | which nodes | what they must see |
| --- | --- | --- |
| workers that tokenize | `workers.label_selector`, room for one | `cache.root`, the first source file, those of `evals`, the tokenizer |
| workers that enrich | the same, or those of the trainer's ranks | `cache.root`, the models |
| the server | `server.placement` | `cache.root`, the run folder |
| a server of rollouts | `placement` | the run folder |
| the trainer's ranks | room for one | the run folder, the model |

Always true:
- an object store and a shared folder are asked the same;
- a job that runs on the node of this process alone asks nobody.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from raysvc.cache.store.open import absolute, default_root, open_store
from raysvc.nodes.place import SharedFile, SharedFolder, SharedModel
from raysvc.nodes.preflight import Opening, ready_for, workers_see
from raysvc.nodes.room import RoomWatch, Selector, living_nodes, nodes_with

if TYPE_CHECKING:
    from raysvc.job.config import JobConfig
    from raysvc.job.text_config import SourceConfig
    from raysvc.pipelines.slice_graph import WorkerPool
    from raysvc.pipelines.tokenize import SlicesLeft

KEPT: tuple[Selector, ...] = ({"ray.io/market-type": "!spot"}, {})  # where a server goes


def ready_to_tokenize(
    jobs: Sequence[tuple[JobConfig, str]],
    left: SlicesLeft,
    pool: WorkerPool | None,
    say: Callable[[str], None],
) -> RoomWatch:
    """Nodes of the workers of some builds.

    Args:
        jobs: of the builds, each with the root of its entry.
        left: number of the build, and a slice.
        pool: None: the builder makes the slices itself.
        say: is told what is waited for.

    Raises:
        ConfigError: no node can hold a worker, and none may come.
        NodeError: a node does not see what it needs.
    """
    from raysvc.pipelines.shared_build import PLACES
    from raysvc.pipelines.sources.dataset import saved_folder

    firsts = {number: piece.pieces[0] for number, piece in reversed(left)}
    places: dict[tuple[str, str], Opening] = {}
    for number, piece in firsts.items():
        job, root = jobs[number]
        places["cache.root", root] = _folder("cache.root", root, job)
        if piece.kind != "dataset":
            options = job.source.storage_options
            places["source.path", piece.path] = partial(SharedFile.open, "source.path", piece.path, options)
        name = job.tokenizer.name
        places["tokenizer", name] = partial(SharedModel.open, "tokenizer", name, job.tokenizer.revision)
    for name, each in jobs[0][0].evals.items():  # they are built when all else is
        if each.source and each.source.path and saved_folder(each.source) is None:
            places["evals", name] = partial(_first_file, f"evals.{name}.source.path", each.source)
    need, selector = ({}, _first_that_fits(PLACES)) if pool is None else (pool.needs(), pool.label_selector)
    may_grow = jobs[0][0].trainer.wait_for_nodes
    return ready_for("workers", list(places.values()), need, selector, may_grow=may_grow, say=say)


def ready_to_enrich(
    job: JobConfig, root: str, where: str, models: Sequence[Any], pool: WorkerPool, say: Callable[[str], None]
) -> RoomWatch:
    """Nodes of workers that run a model.

    Args:
        root: of the entry.
        where: the key that asks for the workers.
        models: with `name` and `revision`.
        pool: the workers.
        say: is told what is waited for.

    Raises:
        ConfigError: no node can hold a worker, and none may come.
        NodeError: a node does not see what it needs.
    """
    places = [_folder("cache.root", root, job), *(_model("enrich", one.name, one.revision) for one in models)]
    may_grow = job.trainer.wait_for_nodes
    opened = [place for place in places if place is not None]
    return ready_for(where, opened, pool.needs(), pool.label_selector, may_grow=may_grow, say=say)


def ready_to_serve(job: JobConfig) -> None:
    """The nodes where a job's server may start, unless it starts where this process is.

    Raises:
        ConfigError: no node can hold it, and none may come.
        NodeError: one of them does not see what a server needs.
    """
    _refuse_server_without_room(job)
    _server_sees(job)


def _server_sees(job: JobConfig) -> None:
    placement = job.server.placement
    in_bucket = open_store(default_root(job.cache.root)).local_path("") is None
    if placement == "any" or (placement == "data" and in_bucket):
        workers_see(_of_server(job), {"CPU": job.server.num_cpus}, _first_that_fits(KEPT))


def ready_to_train(job: JobConfig) -> None:
    """The nodes where the ranks of a job may run, and its server with them.

    Raises:
        ConfigError: the nodes cannot hold them all, and none may come.
        NodeError: one of them does not see what it needs.
    """
    from raysvc.actors.placement import place_groups, rank_need, refuse_without_places
    from raysvc.job.config import held_beside

    trainer = job.trainer
    _, rank = rank_need(trainer.dp_size, trainer.device, trainer.cpus_per_worker, trainer.gpus_per_worker)
    placed = place_groups({"trainer": rank})
    if not trainer.wait_for_nodes:
        refuse_without_places({"trainer": rank}, placed, False, held_beside(job))
    if job.server.placement != "trainer":
        _refuse_server_without_room(job)
    need = placed.bundles[0]
    places = [_folder("trainer.run_dir", absolute(job.run_dir), job)]
    if (model := _model("trainer.model", trainer.model, None)) is not None:
        places.append(model)
    if job.server.placement == "trainer":
        places.append(_folder("cache.root", default_root(job.cache.root), job))
    workers_see(places, need)
    _server_sees(job)


def rollouts_see(
    run_dir: str, storage_options: Mapping[str, Any], num_cpus: float, prompts: JobConfig | None = None
) -> None:
    """The nodes where a server of rollouts may start.

    Raises:
        NodeError: one of them does not see the run folder, or the cache of the job of prompts.
    """
    folders: list[Opening] = [partial(SharedFolder.open, "serve_rollouts(run_dir)", run_dir, storage_options)]
    if prompts is not None:
        folders.append(_folder("cache.root", default_root(prompts.cache.root), prompts))
    workers_see(folders, {"CPU": num_cpus}, _first_that_fits(KEPT))


def _refuse_server_without_room(job: JobConfig) -> None:
    from raysvc.actors.launch import refuse_without_room, server_names
    from raysvc.cluster import node_for

    if job.trainer.wait_for_nodes or job.server.name in server_names():  # one that runs asks for no room
        return
    node_id = node_for(job.server.placement, default_root(job.cache.root))
    refuse_without_room(job.server.num_cpus, node_id, may_grow=False)


def _of_server(job: JobConfig) -> list[Opening]:
    return [
        _folder("cache.root", default_root(job.cache.root), job),
        _folder("trainer.run_dir", absolute(job.run_dir), job),
    ]


def _folder(name: str, url: str, job: JobConfig) -> Opening:
    return partial(SharedFolder.open, name, url, job.cache.storage_options)


def _first_file(name: str, source: SourceConfig) -> SharedFile:
    from raysvc.pipelines.sources.listing import find_files

    return SharedFile.open(name, find_files(source)[0].path, source.storage_options)


def _model(name: str, model: str, revision: str | None) -> Opening | None:
    """None: it is made where it is needed."""
    from raysvc.actors.model.tiny_vision import NAME as TINY_VISION

    return None if model in ("tiny", TINY_VISION) else partial(SharedModel.open, name, model, revision)


def _first_that_fits(selectors: Sequence[Selector]) -> Selector:
    nodes = living_nodes()
    return next((one for one in selectors if nodes_with(one, nodes)), {})
