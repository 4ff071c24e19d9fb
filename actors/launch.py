"""Makes Ray actors of the classes of the service; `raysvc.actors.dispatch.worker_places` does so for the trainer.

Classes are plain and wrapped here, so that they travel by name (no version skew hides) and can be
tested without Ray. Server actors are named in the namespace of their team, whatever the driver's own is.
"""

from __future__ import annotations

import logging
import time
import uuid
import weakref
from collections.abc import Callable
from contextlib import suppress
from functools import cache
from typing import Any

import ray
from ray.actor import ActorHandle
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from raysvc.actors.rollouts.rollout_server import RolloutServer
from raysvc.actors.server.batch_server import BatchServer
from raysvc.actors.server.collator import Collator
from raysvc.actors.server.spec import ServeSpec
from raysvc.errors import ConfigError, RaysvcError, ServerError
from raysvc.nodes.objects import are_made
from raysvc.nodes.room import amounts, has_free, no_room, not_free, refuse_what_never_fits, what_is_missing
from raysvc.team import TEAM, own_name, ray_namespace, team_of

log = logging.getLogger(__name__)
REPORT_EVERY_S = 5.0
STOP_TIMEOUT_S = 30.0
TELL_TIMEOUT_S = 60.0
SETTLE_S = 5.0  # how long Ray may take to count what ended as free
FETCH_THREADS = 16
LEASE_THREADS = 16
# Ray's GCS keeps an event of each of the last 100,000 calls, 3 kB each; a run makes several calls a step
QUIET = {"enable_task_events": False}
PUT_THREADS = 32  # puts wait for one write together; they hold no processor meanwhile
# servers that end with a handle of this process, by namespace and name: that handle, and one that keeps nothing alive
_ending: dict[tuple[str, str], tuple[weakref.ref[ActorHandle], ActorHandle]] = {}


def start_server(
    spec: ServeSpec, *, detached: bool, node_id: str | None = None, may_grow: bool = False
) -> ActorHandle:
    """The server of that name: a new actor, or the running one when its spec is the same.

    `fetch` calls may wait for each other (one step for several ranks, rollouts that are not there yet), so they have
    more threads than may collate; what changes leases may wait for the journal, and calls that wait together share a
    write; `control` (heartbeats, statistics) never queues behind either. A server keeps off nodes that may be taken away
    (`ray.io/market-type: spot`) where there are others.

    Args:
        node_id: where it starts, and starts again while that node lives; None: where Ray finds room.
        may_grow: an autoscaler may bring nodes: one that holds it is waited for.

    Raises:
        ConfigError: that node, or every node of the cluster, cannot hold it. Nothing was started then.
        ServerError: the name is served with another spec; the error names every difference.
        UserMistake: the entry cannot be opened, or no plan can be made of it.
    """
    held = _held_or_gone(spec.name)
    if spec.name not in server_names():  # one that runs asks for no room
        refuse_without_room(spec.num_cpus, node_id, may_grow)
        if node_id is not None:
            _refuse_where_it_is_full(spec.num_cpus, node_id)
    cls = BatchServer if spec.rollouts is None else RolloutServer
    threads = {"fetch": FETCH_THREADS, "lease": LEASE_THREADS, "put": PUT_THREADS, "control": 3}
    incarnation_id = uuid.uuid4().hex
    spec = spec.model_copy(update={"owner": own_name(), "team": team_of(ray_namespace()) or ""})
    need = [{"CPU": spec.num_cpus}]
    busy = not_free(need)  # asked before the server itself holds it
    actor = _actor_of(cls, tuple(threads.items()))
    handle = actor.options(
        name=spec.name,
        namespace=ray_namespace(),
        get_if_exists=True,
        lifetime="detached" if detached else None,
        num_cpus=spec.num_cpus,
        max_restarts=-1,
        max_task_retries=-1,
        **_place_of(node_id),
    ).remote(spec.model_dump_json(), incarnation_id)
    if held == handle:  # by name Ray gives a handle that keeps no server alive
        handle = held
    text, theirs = wait_for(
        handle.spec_json.remote(),
        f"server {spec.name!r} to start",
        lacks=lambda: no_room(need) or (busy and not_free(need)),
    )
    difference = ServeSpec.model_validate_json(text).difference(spec)
    if difference:
        remedy = f"stop it with `raysvc stop {spec.name}`, or choose another server.name"
        raise ServerError(
            f"server.name {spec.name!r}", f"is already served, with another {difference}", remedy
        )
    try:
        wait_for(handle.describe.remote(), f"server {spec.name!r} to open what it serves")
    except RaysvcError:
        if theirs == incarnation_id:  # a server of ours that can serve nothing
            ray.kill(handle, no_restart=True)
        raise
    if theirs == incarnation_id and not detached:
        _ending[ray_namespace(), spec.name] = weakref.ref(handle), _named(spec.name)
    return handle


def _held_or_gone(name: str) -> ActorHandle | None:
    """Returns the handle with which a server of this process lives; waits for the end of one whose handle was let go of.

    Ray ends such a server soon. Until then, and until this process has heard so, it would give it to who asks by name.
    """
    owned, named = _ending.get((ray_namespace(), name), (lambda: None, None))
    if (held := owned()) is not None or named is None:
        return held
    if not _is_gone(name, named):
        log.warning("still there name=%s: its handle is gone, and somebody else may hold it", name)
    _ending.pop((ray_namespace(), name), None)
    return None


def _is_gone(name: str, server: ActorHandle) -> bool:
    """Waits until Ray does not give that server to who asks by name; returns whether it came to that in time."""
    begin = time.monotonic()
    while _named(name) == server:
        if time.monotonic() - begin > STOP_TIMEOUT_S:
            return False
        time.sleep(0.05)
    return True


def _named(name: str) -> ActorHandle | None:
    """Returns a handle that keeps no server alive, as Ray gives by name; None: it knows none."""
    with suppress(ValueError):
        return ray.get_actor(name, namespace=ray_namespace())
    return None


def start_collators(spec_json: str, count: int, node_id: str | None) -> list[ActorHandle]:
    """Processes that make shards of a server's steps: of the caller, with whom they end. Returns at once.

    A call that a death interrupted is made again, and a shard that was lost with its node too: it is the same. Where the cluster
    has too few CPUs for all, it is logged: those that are left wait for nodes, and so do the steps that they are to make.

    Args:
        node_id: where they are to be if there is room; None: spread over the nodes.
    """
    actor = ray.remote(num_cpus=1, max_restarts=-1, max_task_retries=-1, **QUIET)(Collator)
    if missing := no_room([{"CPU": 1.0}] * count):
        log.warning("steps wait for more nodes for='server.collators': %s; lower it, or add nodes", missing)
    where = "SPREAD" if node_id is None else NodeAffinitySchedulingStrategy(node_id, soft=True)
    return [actor.options(scheduling_strategy=where).remote(spec_json) for _ in range(count)]


@cache
def _actor_of(cls: type, threads: tuple[tuple[str, int], ...]) -> Any:
    """The class for Ray, made once: Ray keeps each that was made for good, in this process and in its GCS."""
    return ray.remote(concurrency_groups=dict(threads), **QUIET)(cls)


def _place_of(node_id: str | None) -> dict[str, Any]:
    """Ray's options for a server on that node."""
    if node_id is None:
        return {
            "label_selector": {"ray.io/market-type": "!spot"},
            "fallback_strategy": [{"label_selector": {}}],
        }
    return {"scheduling_strategy": NodeAffinitySchedulingStrategy(node_id, soft=True)}


def refuse_without_room(num_cpus: float, node_id: str | None, may_grow: bool) -> None:
    """Refuse a server that no node can ever hold, or not the one it is to be on.

    Raises:
        ConfigError: so it is.
    """
    need = {"CPU": num_cpus}
    if node_id is None:
        refuse_what_never_fits("server.num_cpus", [need], may_grow)
        return
    total = next(node["Resources"] for node in ray.nodes() if node["NodeID"] == node_id)
    if missing := what_is_missing([need], [total]):
        raise _cannot_hold(missing.replace("the cluster", "that node"))


def _refuse_where_it_is_full(num_cpus: float, node_id: str) -> None:
    """Refuses a node without room; what ended just now may be counted as used for a while."""
    need = {"CPU": num_cpus}
    if num_cpus and not has_free(node_id, need, SETTLE_S):
        raise _cannot_hold(f"needs {amounts(need)}, and that node has less than that free")


def _cannot_hold(missing: str) -> ConfigError:
    what = f"asks for a node that cannot hold it: {missing}"
    return ConfigError("server.placement", what, "lower server.num_cpus, or set server.placement: any")


def find_server(name: str) -> ActorHandle:
    """The running server of that name.

    Raises:
        ServerError: no such server on this cluster; the error lists the names that are there.
    """
    if (handle := _named(name)) is not None:
        return handle
    names = ", ".join(server_names()) or "none"
    teams = [team for team, served in served_names() if served == name]
    remedy = f"start it first, or set {TEAM}={teams[0]}" if teams else "start it first"
    raise ServerError(f"server.name {name!r}", f"is not served on this cluster (served: {names})", remedy)


def tell_server(name: str, method: str, *args: Any) -> None:
    """Call a server from a thread, without waiting for the answer; one that is just being started is waited for."""
    until = time.monotonic() + TELL_TIMEOUT_S
    while True:
        try:
            handle = ray.get_actor(name, namespace=ray_namespace())
            getattr(handle, method).options(concurrency_group="control").remote(*args)
            return
        except ValueError:
            if time.monotonic() > until:
                log.warning("not told name=%s method=%s: it is not served", name, method)
                return
            time.sleep(0.2)


def stop_server(name: str) -> None:
    """End a server for good, its commits written, and wait until its name is free.

    Raises:
        ServerError: no such server.
    """
    handle = find_server(name)
    try:
        ray.get(handle.flush.options(concurrency_group="lease").remote(True), timeout=STOP_TIMEOUT_S)
    except (
        ray.exceptions.RayError
    ) as error:  # it is to end in any case; the trainer's checkpoint knows better
        log.warning("last commits not written name=%s error=%s", name, type(error).__name__)
    ray.kill(handle, no_restart=True)
    if not _is_gone(name, handle):
        what = f"still there {STOP_TIMEOUT_S:.0f} s after it was stopped"
        raise ServerError(f"server.name {name!r}", what, "try again")


def restart_server(name: str) -> str:
    """End the process of a server; Ray starts it again with the package that its nodes have now. Its trainer goes on.

    Returns:
        The version that answers.

    Raises:
        ServerError: no such server.
    """
    handle, what = find_server(name), f"server {name!r} to restart"
    stats = handle.stats.options(concurrency_group="control")
    before = wait_for(stats.remote(), what)
    ray.get(handle.flush.options(concurrency_group="lease").remote(), timeout=STOP_TIMEOUT_S)
    ray.kill(handle, no_restart=False)
    begin = time.monotonic()
    while (facts := wait_for(stats.remote(), what))["pid"] == before["pid"]:  # the kill is on its way
        if time.monotonic() - begin > STOP_TIMEOUT_S:
            raise ServerError(f"server.name {name!r}", "did not stop", "try again")
        time.sleep(0.05)
    return str(facts["version"])


def server_names() -> list[str]:
    """Names of all servers of this process's team."""
    own = team_of(ray_namespace())
    return [name for team, name in served_names() if team == own]


def served_names() -> list[tuple[str, str]]:
    """(team, name) of all servers of the cluster; team "" of who names none."""
    actors = ray.util.list_named_actors(all_namespaces=True)
    found = [(team_of(actor["namespace"]), actor["name"]) for actor in actors]
    return sorted((team, name) for team, name in found if team is not None)


def wait_for(
    refs: Any, what: str, timeout_s: float = 600.0, lacks: Callable[[], str | None] = lambda: None
) -> Any:
    """`ray.get` that says every few seconds what it waits for, and gives up after `timeout_s`.

    Args:
        lacks: what the cluster lacks for it.

    Raises:
        TimeoutError: nothing came in time.
        RaysvcError: what the other side raised on purpose, as it was raised there.
    """
    begin = time.monotonic()
    limit_s: float | None = REPORT_EVERY_S
    while True:
        try:
            return ray.get(refs, timeout=limit_s)
        except ray.exceptions.RayTaskError as error:
            if isinstance(error.cause, RaysvcError):
                raise error.cause from None
            raise
        except ray.exceptions.GetTimeoutError:
            if are_made(refs):
                limit_s = None
                continue
            waited_s = time.monotonic() - begin
            if waited_s > timeout_s:
                missing = lacks() or "raysvc doctor looks at its nodes"
                raise TimeoutError(f"waited {waited_s:.0f} s for {what}: {missing}") from None
            say_waiting(what, waited_s, lacks())


def say_waiting(what: str, waited_s: float, missing: str | None) -> None:
    """Say what is waited for, and what the cluster lacks for it, if anything."""
    log.warning("waiting for %s since %.0f s%s", what, waited_s, f": {missing}" if missing else "")
