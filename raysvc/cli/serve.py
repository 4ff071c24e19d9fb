"""`raysvc serve`: start a job's batch server and leave it running."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from raysvc.cli.common import Address, AsJson, Job, Overrides, edge, emit
from raysvc.cli.view import View, print_table

if TYPE_CHECKING:
    from raysvc.api import ServerHandle


@edge
def serve(
    config: Job = "job.yaml",
    overrides: Overrides = None,
    address: Address = None,
    as_json: AsJson = False,
) -> None:
    """Start the batch server of a job on a running cluster.

    Tokenizes first where the cache has no entry; with plan.shuffle=window the server starts at once, and this command
    goes on tokenizing until the entry is finished. Trainers attach by the name of the server.

    Example: raysvc serve job.yaml server.name=sft-2
    """
    from raysvc import api
    from raysvc.cluster import join_cluster
    from raysvc.job.job_file import load_job

    job = load_job(config, overrides or ())
    join_cluster(address, lasting=True)
    with View() as view:
        handle = api.serve(job, progress=view)
        _show(handle, as_json)
        if handle.build is not None:
            handle.build.wait()


def _show(handle: ServerHandle, as_json: bool) -> None:
    import ray

    from raysvc.actors.launch import wait_for

    told = handle.actor.stats.options(concurrency_group="control").remote()
    stats = wait_for(told, f"server {handle.name!r}")
    facts = {
        "name": handle.name,
        "cluster": ray.get_runtime_context().gcs_address,
        "namespace": handle.namespace,
        "num_rows": handle.num_rows,
        "num_steps": None if handle.schedule.is_endless else handle.schedule.num_steps,
        "steps_per_epoch": None if handle.schedule.is_endless else handle.schedule.steps_per_epoch,
        "frontier": stats["frontier"],
        "committed_by": stats.get("committed_by"),  # an earlier version does not say
    }
    if as_json:
        emit(facts)
        return
    print_table("Serving", {name: value for name, value in facts.items() if value is not None})
    if handle.schedule.is_endless:
        text = "following the source; the number of steps is not known, and this command goes on until Ctrl-C"
        print(text, file=sys.stderr)
    elif handle.build is not None:
        print(
            "serving while the rows are tokenized; the number of steps is known, steps wait for their rows",
            file=sys.stderr,
        )
    print(f'attach with raysvc.attach("{handle.name}", dp_size=...)', file=sys.stderr)
