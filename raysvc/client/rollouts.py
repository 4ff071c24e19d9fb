"""The producers' end of a rollout server, from any process.

Always true:
- when `put_groups` returns, the groups outlive the server;
- putting a group again changes nothing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from pydantic import ValidationError

from raysvc.client.arguments import text
from raysvc.config import PlanConfig
from raysvc.errors import ConfigError, ServerError
from raysvc.rl.group import Group, table_of

if TYPE_CHECKING:
    from raysvc.api import ServerHandle


class Put(NamedTuple):
    """What became of a put: groups that are new, and groups that were there before."""

    new: int
    known: int


class Rollouts:
    """Puts groups, and asks how many may be started; make it with `raysvc.rollouts(name)`."""

    def __init__(self, name: str, server: Any) -> None:
        self.name, self._server = name, server

    def put_groups(self, groups: Group | Sequence[Any]) -> Put:
        """Put groups: by value, or as ObjectRefs of groups or lists of them (which go straight to the server).

        Raises:
            SourceError: a group breaks a rule; it says which, and nothing of the call (of that ref) is kept.
        """
        from ray import ObjectRef

        items = [groups] if isinstance(groups, Group | ObjectRef) else list(groups)
        refs = [item for item in items if isinstance(item, ObjectRef)]
        values = [item for item in items if not isinstance(item, ObjectRef)]
        batches = [*([table_of(values)] if values else []), *refs]
        return Put(*self._call("put_groups", "put", *batches)) if batches else Put(0, 0)

    def reserve(self, uids: Sequence[str]) -> list[str]:
        """The uids that may be started on now; the others must wait for capacity."""
        granted: list[str] = self._call("reserve", "put", list(uids))
        return granted

    def release(self, uids: Sequence[str]) -> None:
        """Give the capacity of prompts back that will not be put."""
        self._call("release", "put", list(uids))

    def drop(self, uids: Sequence[str]) -> int:
        """Filter: groups of these prompts that are in no step go, and their capacity comes back."""
        return int(self._call("drop", "put", list(uids)))

    def stats(self) -> dict[str, Any]:
        """Counts of groups, weight version, capacity (None: no bound)."""
        facts: dict[str, Any] = self._call("rollouts", "control")
        return facts

    def _call(self, method: str, threads: str, *args: Any) -> Any:
        from raysvc.actors.launch import wait_for

        ref = getattr(self._server, method).options(concurrency_group=threads).remote(*args)
        return wait_for(ref, f"server {self.name!r}")


def rollouts(name: str, *, address: str | None = None) -> Rollouts:
    """The producers' end of a running rollout server.

    Raises:
        ServerError: no such server, or one of an entry.
    """
    from raysvc.actors.launch import find_server
    from raysvc.cluster import connect

    text("rollouts(name)", name)
    connect(address)
    server = find_server(name)
    if not hasattr(server, "put_groups"):
        what = "serves an entry, and takes no rollouts"
        raise ServerError(f"server.name {name!r}", what, "name a server that serve_rollouts started")
    return Rollouts(name, server)


def serve_rollouts(
    name: str,
    *,
    run_dir: str,
    pad_token_id: int,
    plan: Mapping[str, Any],
    max_staleness: int | None = 1,
    wait_s: float = 600.0,
    lease_ttl_s: float = 30.0,
    num_cpus: float = 0.5,
    storage_options: Mapping[str, Any] | None = None,
    address: str | None = None,
    detached: bool = True,
) -> ServerHandle:
    """Start a server whose steps are made of groups that are put.

    Args:
        name: to attach by.
        run_dir: folder or fsspec URL; groups, memberships and the frontier lie below it.
        pad_token_id: of the tokenizer.
        plan: section `plan` of a job; `batch_size` and `mini_batch_size` count groups, `columns` names what travels.
        max_staleness: weight versions that a row may be old when it is trained; None: any.
        wait_s: how long a fetch waits for enough groups.

    Raises:
        ConfigError: a plan that cannot be.
        ServerError: the name is served with another spec.
    """
    from raysvc.actors.launch import NAMESPACE, start_server, wait_for
    from raysvc.actors.server.spec import RolloutSpec, ServeSpec
    from raysvc.api import ServerHandle, absolute
    from raysvc.build.serve_log import write_served
    from raysvc.cluster import connect
    from raysvc.plan.schedule import Schedule

    connect(address)
    spec = ServeSpec(
        name=name,
        entry_uri=None,
        plan=_plan(plan),
        pad_token_id=pad_token_id,
        journal=f"{absolute(run_dir)}/server",
        storage_options=dict(storage_options or {}),
        rollouts=RolloutSpec(max_staleness=max_staleness, wait_s=wait_s),
        lease_ttl_s=lease_ttl_s,
        num_cpus=num_cpus,
    )
    actor = start_server(spec, detached=detached)
    write_served(absolute(run_dir), spec)
    facts = wait_for(actor.describe.remote(), f"server {name!r} to start")
    return ServerHandle(name, NAMESPACE, facts["num_rows"], Schedule.from_json(facts["schedule"]), actor)


def _plan(plan: Mapping[str, Any]) -> PlanConfig:
    try:
        return PlanConfig.model_validate(dict(plan))
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(["plan", *(str(part) for part in first["loc"])])
        raise ConfigError(where, first["msg"].removeprefix("Value error, "), "change this value") from None
