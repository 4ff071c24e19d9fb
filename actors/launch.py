"""Where actor classes meet Ray: the one file with `ray.remote`.

Classes are plain and wrapped here, so that they travel by name (no version skew hides) and can be
tested without Ray. Server actors are named in one fixed namespace, whatever the driver's own is.
"""

from __future__ import annotations

import logging
import time
import uuid
from typing import Any

import ray
from ray.actor import ActorHandle

from raysvc.actors.batch_server import BatchServer, ServeSpec
from raysvc.actors.torch_worker import CausalLMWorker, ModelSpec
from raysvc.errors import RaysvcError, ServerError

log = logging.getLogger(__name__)
NAMESPACE = "raysvc"
REPORT_EVERY_S = 5.0
STOP_TIMEOUT_S = 30.0


def start_server(spec: ServeSpec, *, detached: bool) -> ActorHandle:
    """The server of that name: a new actor, or the running one when its spec is the same.

    Calls of the default group run one at a time; `fetch` collates in threads of its own, and `control`
    (leases, commits, statistics) never queues behind a collation.

    Raises:
        ServerError: the name is served with another spec; the error names the first difference.
    """
    actor = ray.remote(concurrency_groups={"fetch": spec.collate_threads, "control": 2})(BatchServer)
    handle = actor.options(
        name=spec.name,
        namespace=NAMESPACE,
        get_if_exists=True,
        lifetime="detached" if detached else None,
        num_cpus=spec.num_cpus,
        max_restarts=-1,
        max_task_retries=-1,
    ).remote(spec.model_dump_json(), uuid.uuid4().hex)
    running = ServeSpec.model_validate_json(
        wait_for(handle.spec_json.remote(), f"server {spec.name!r} to start")
    )
    difference = running.difference(spec)
    if difference:
        remedy = f"stop it with `raysvc stop {spec.name}`, or choose another server.name"
        raise ServerError(
            f"server.name {spec.name!r}", f"is served already with another {difference}", remedy
        )
    return handle


def find_server(name: str) -> ActorHandle:
    """The running server of that name.

    Raises:
        ServerError: no such server on this cluster; the error lists the names that are there.
    """
    try:
        return ray.get_actor(name, namespace=NAMESPACE)
    except ValueError:
        names = ", ".join(server_names()) or "none"
        raise ServerError(
            f"server.name {name!r}", f"is not served on this cluster (served: {names})", "start it first"
        ) from None


def stop_server(name: str) -> None:
    """End a server for good and wait until its name is free.

    Raises:
        ServerError: no such server.
    """
    ray.kill(find_server(name), no_restart=True)
    begin = time.monotonic()
    while name in server_names():
        if time.monotonic() - begin > STOP_TIMEOUT_S:
            raise ServerError(
                f"server.name {name!r}", f"still there {STOP_TIMEOUT_S:.0f} s after it was ended", "try again"
            )
        time.sleep(0.05)


def server_names() -> list[str]:
    """Names of all servers of the cluster."""
    actors = ray.util.list_named_actors(all_namespaces=True)
    return sorted(actor["name"] for actor in actors if actor["namespace"] == NAMESPACE)


def start_workers(spec: ModelSpec, dp_size: int, device: str, num_cpus: float) -> list[ActorHandle]:
    """One worker actor per rank; staging has a thread of its own.

    A worker is not restarted by Ray: its weights would be gone. The run goes on from a checkpoint.
    """
    actor = ray.remote(concurrency_groups={"stage": 1})(CausalLMWorker)
    actor = actor.options(num_cpus=num_cpus, num_gpus=1 if device.startswith("cuda") else 0)
    return [actor.remote(rank, dp_size, device, spec.model_dump_json()) for rank in range(dp_size)]


def wait_for(refs: Any, what: str, timeout_s: float = 600.0) -> Any:
    """`ray.get` that says every few seconds what it waits for, and gives up after `timeout_s`.

    Raises:
        TimeoutError: nothing came in time.
        RaysvcError: what the other side raised on purpose, as it was raised there.
    """
    begin = time.monotonic()
    while True:
        try:
            return ray.get(refs, timeout=REPORT_EVERY_S)
        except ray.exceptions.RayTaskError as error:
            if isinstance(error.cause, RaysvcError):
                raise error.cause from None
            raise
        except ray.exceptions.GetTimeoutError:
            waited_s = time.monotonic() - begin
            if waited_s > timeout_s:
                raise TimeoutError(f"waited {waited_s:.0f} s for {what}; is the cluster full?") from None
            log.warning("waiting for=%r since=%.0fs free=%s", what, waited_s, ray.available_resources())
