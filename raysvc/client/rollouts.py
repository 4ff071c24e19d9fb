"""The producers' end of a rollout server, from any process.

Always true:
- when a call returns, what it did outlives the server;
- doing it again changes nothing;
- who errs gets the error, at once, and nothing of that call is kept;
- the reservations of a producer that died come back.
"""

from __future__ import annotations

import logging
import threading
import time
import weakref
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from pydantic import ValidationError

from raysvc.client.arguments import text
from raysvc.client.connection import new_holder
from raysvc.client.meet import meet
from raysvc.errors import ConfigError, NoCapacity, ServerError
from raysvc.job.config import PlanConfig
from raysvc.metrics import record
from raysvc.rl.group import Group, late_table, table_of

if TYPE_CHECKING:
    import pyarrow as pa

    from raysvc.api import ServerHandle

log = logging.getLogger(__name__)
MAX_PAUSE_S = 0.5  # between two questions for capacity
LARGE_BYTES = 100_000  # beyond this Ray would copy an argument into its store at every call


class Put(NamedTuple):
    """What became of a put: groups that are new, and groups that were there before."""

    new: int
    known: int


class Rollouts:
    """Puts groups, and asks how many may be started; make it with `raysvc.rollouts(name)`.

    Args:
        name: of the server.
        server: Ray handle.
        owner: this producer; a restarted one that says the same name goes on with its reservations.
        ttl_s: how long reservations hold without a sign of life; a thread gives it from the first reservation on.
    """

    def __init__(self, name: str, server: Any, owner: str = "", ttl_s: float = 60.0) -> None:
        self.name, self._server, self._ttl_s = name, server, ttl_s
        self.owner = owner or new_holder()
        self._methods: dict[str, Any] = {}
        self._stop: threading.Event | None = None  # ends the thread that renews

    def put_groups(self, groups: Group | Sequence[Any], *, wait_s: float = 600.0) -> Put:
        """Put groups, all of them in one call: by value, or as ObjectRefs of groups or lists of them (which go straight
        to the server). Groups of one uid and attempt become one group.

        A group that was not reserved waits while the server has no capacity (back-pressure).

        Args:
            wait_s: for capacity.

        Raises:
            SourceError: a group breaks a rule; it says which, and nothing of the call is kept.
            NoCapacity: none came in time.
        """
        import ray

        items = [groups] if isinstance(groups, Group | ray.ObjectRef) else list(groups)
        refs = [item for item in items if isinstance(item, ray.ObjectRef)]
        values = [item for item in items if not isinstance(item, ray.ObjectRef)]
        batches = [*([_shared(table_of(values))] if values else []), *refs]
        if not batches:
            return Put(0, 0)
        if any(not group.closed for group in values):
            self._live()
        begin, pause_s = time.monotonic(), 0.01
        while (counts := self._call("put_groups", "put", *batches, owner=self.owner)) is None:
            if (waited_s := time.monotonic() - begin) > wait_s:
                raise NoCapacity(self.name, waited_s)
            time.sleep(pause_s)
            record("producer_wait_seconds", pause_s, server=self.name)
            pause_s = min(2 * pause_s, MAX_PAUSE_S)
        return Put(*counts)

    def add_columns(
        self, uid: str, columns: Mapping[str, Any], *, rows: Sequence[int] | None = None, attempt: int = 0
    ) -> int:
        """Give rows of a group columns that came late: a reward of each row, or a vector of each row's tokens.

        The group is trained once all its rows have all columns that the server declares late. A value that is there
        already stays.

        Args:
            columns: name -> one value, or one vector, of each row.
            rows: their numbers in the group; None: all of them, from 0.

        Returns:
            How many rows got something new.

        Raises:
            SourceError: no such group or row, a column that is not declared late, or of another type or length.
        """
        return int(self._call("add_columns", "put", late_table(uid, columns, rows, attempt)))

    def close_groups(self, uids: Sequence[str], attempt: int = 0) -> int:
        """Say that no rows of these open groups will follow; returns how many were open."""
        return int(self._call("close_groups", "put", [(uid, attempt) for uid in uids]))

    def reserve(self, uids: Sequence[str]) -> list[str]:
        """The uids that may be started on now; the others must wait for capacity.

        A reservation holds while this process lives, and `producer_ttl_s` longer.
        """
        self._live()
        granted: list[str] = self._call("reserve", "put", list(uids), self.owner)
        return granted

    def release(self, uids: Sequence[str]) -> None:
        """Give the capacity of prompts back that will not be put."""
        self._call("release", "put", list(uids))

    def drop(self, uids: Sequence[str]) -> int:
        """Filter: groups of these prompts that are in no step go, and their capacity comes back."""
        return int(self._call("drop", "put", list(uids)))

    def stats(self) -> dict[str, Any]:
        """Counts of groups, weight version, timeline, capacity (None: no bound), and what is quarantined, by group."""
        facts: dict[str, Any] = self._call("rollouts", "control")
        return facts

    def close(self) -> None:
        """Stop giving signs of life; what is reserved and not put comes back after `producer_ttl_s`."""
        if self._stop is not None:
            self._stop.set()

    def _live(self) -> None:
        """Give signs of life from now on, until this object or its process is gone."""
        if self._stop is not None:
            return
        self._stop = threading.Event()
        weakref.finalize(self, self._stop.set)
        args = (self._server, self.owner, self._ttl_s / 3, self._stop)
        threading.Thread(target=_renew, args=args, name=f"raysvc-producer-{self.name}", daemon=True).start()

    def _call(self, method: str, threads: str, *args: Any, **named: Any) -> Any:
        from raysvc.actors.launch import wait_for

        if method not in self._methods:  # making options costs as much as a call
            self._methods[method] = getattr(self._server, method).options(concurrency_group=threads)
        ref = self._methods[method].remote(*args, **named)
        return wait_for(ref, f"server {self.name!r}")


def _renew(server: Any, owner: str, period_s: float, stop: threading.Event) -> None:
    import ray

    while not stop.wait(period_s):
        try:
            ray.wait([server.renew.options(concurrency_group="control").remote(owner)], timeout=period_s)
        except Exception as error:  # noqa: BLE001 - the server may be restarting, and the next sign comes soon
            log.warning("no sign of life could be given owner=%s error=%s", owner, type(error).__name__)


def _shared(table: pa.Table) -> Any:
    """As it travels; what is large lies in the object store, so that asking again for room moves nothing."""
    import ray

    return ray.put(table) if table.nbytes > LARGE_BYTES else table


def rollouts(name: str, *, owner: str = "", address: str | None = None) -> Rollouts:
    """The producers' end of a running rollout server.

    Args:
        owner: name of this producer, under which it reserves; "": a new one.

    Raises:
        ServerError: no such server, or one of an entry.
    """
    from raysvc.actors.launch import find_server, wait_for
    from raysvc.actors.server.spec import ServeSpec
    from raysvc.cluster import connect

    text("rollouts(name)", name)
    connect(address)
    server = find_server(name)
    if not hasattr(server, "put_groups"):
        what = "serves an entry and takes no rollouts"
        raise ServerError(f"server.name {name!r}", what, "name a server that serve_rollouts started")
    meet(server, name)
    spec_json, _ = wait_for(
        server.spec_json.options(concurrency_group="control").remote(), f"server {name!r}"
    )
    spec = ServeSpec.model_validate_json(spec_json).rollouts
    assert spec is not None, "a rollout server has a spec of rollouts"
    return Rollouts(name, server, owner, spec.producer_ttl_s)


def serve_rollouts(
    name: str,
    *,
    run_dir: str,
    pad_token_id: int,
    plan: Mapping[str, Any],
    max_staleness: int | None = 1,
    wait_s: float = 600.0,
    late: Sequence[str] = (),
    defaults: Mapping[str, float] | None = None,
    on_bad_group: Literal["fill", "shrink"] = "fill",
    producer_ttl_s: float = 60.0,
    lease_ttl_s: float = 30.0,
    num_cpus: float = 0.5,
    storage_options: Mapping[str, Any] | None = None,
    address: str | None = None,
    detached: bool = True,
    placement: Literal["any", "data", "trainer"] = "any",
) -> ServerHandle:
    """Start a server whose steps are made of groups that are put.

    Args:
        name: to attach by.
        run_dir: folder or fsspec URL; groups, memberships and the frontier lie below it.
        pad_token_id: of the tokenizer.
        plan: section `plan` of a job; `batch_size` and `mini_batch_size` count groups, `columns` names what travels.
        max_staleness: weight versions that a row may be old when it is trained; None: any.
        wait_s: how long a fetch waits for enough groups.
        late: columns that may arrive after their rows, by `Rollouts.add_columns`; a group is trained when it has them.
        defaults: column -> the value where a put lacks it; without one such a put is refused.
        on_bad_group: what a step does about a group that cannot be collated: `fill` takes the next one in its place,
            `shrink` goes on without it. It is quarantined in either case, and the trainer gets its step.
        placement: its node: where Ray finds room; that of the caller where `run_dir` is a folder; that of the caller.
        producer_ttl_s: how long reservations and open groups of a producer hold that gives no sign of life.

    Raises:
        ConfigError: a plan that cannot be.
        ServerError: the name is served with another spec.
    """
    from raysvc.actors.launch import NAMESPACE, start_server, wait_for
    from raysvc.actors.server.spec import RolloutSpec, ServeSpec
    from raysvc.api import ServerHandle
    from raysvc.build.serve_log import write_served
    from raysvc.cache.store.open import absolute
    from raysvc.cluster import connect, node_for
    from raysvc.plan.schedule import Schedule

    connect(address)
    spec = ServeSpec(
        name=name,
        entry_uri=None,
        plan=_plan(plan),
        pad_token_id=pad_token_id,
        journal=f"{absolute(run_dir)}/server",
        storage_options=dict(storage_options or {}),
        rollouts=RolloutSpec(
            max_staleness=max_staleness,
            wait_s=wait_s,
            late=tuple(late),
            defaults=dict(defaults or {}),
            on_bad_group=on_bad_group,
            producer_ttl_s=producer_ttl_s,
        ),
        lease_ttl_s=lease_ttl_s,
        num_cpus=num_cpus,
    )
    actor = start_server(spec, detached=detached, node_id=node_for(placement, run_dir))
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
