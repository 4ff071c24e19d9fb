"""The producers' end of a rollout server, from any process.

Always true:
- when a call returns, what it did outlives the server;
- doing it again changes nothing;
- who errs gets the error, at once, and nothing of that call is kept;
- the reservations of a producer that died come back.
"""

from __future__ import annotations

import logging
import os
import threading
import time
import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from raysvc.client.arguments import (
    integer,
    mapping,
    meet,
    number,
    optional_text,
    text,
    texts,
)
from raysvc.client.connection import new_holder
from raysvc.errors import ConfigError, NoCapacity, ServerError
from raysvc.metrics import record
from raysvc.rl.group import Group
from raysvc.rl.group_table import late_table, table_of
from raysvc.rl.prompt import Prompt
from raysvc.rl.prompt_state import PromptState
from raysvc.rl.weights import Weights, read_blob, tensors_of

if TYPE_CHECKING:
    import pyarrow as pa


log = logging.getLogger(__name__)
REPORT_EVERY_S = 60.0
MAX_PAUSE_S = 0.5  # between two questions for capacity
LARGE_BYTES = 100_000  # beyond this Ray would copy an argument into its store at every call


class Put(NamedTuple):
    """Says what became of a put.

    Attributes:
        new: groups that will be trained.
        known: groups that were put before under the same attempt.
        verdicts: uid -> `new`; `stale`: too old to be trained, and not kept; `superseded`: the prompt was handed out again, or given
            up, and this is not kept; `known`; or why one that was put before is
            not trained: `evicted` (too old since), `dropped`, `quarantined`. Of several attempts of a uid, the last one's.
    """

    new: int
    known: int
    verdicts: Mapping[str, str]


class WaitReport:
    """Says what is waited for, and since when, each `REPORT_EVERY_S`."""

    def __init__(self, what: str) -> None:
        self._what = what
        self.over()

    def over(self) -> None:
        """It came; the next wait begins."""
        self._begin_s = self._told_s = time.monotonic()

    def report(self) -> None:
        """It did not come yet."""
        if (now_s := time.monotonic()) - self._told_s >= REPORT_EVERY_S:
            self._told_s = now_s
            log.warning(
                "waiting for=%s since=%.0fs: as many groups as may be are ready or under way",
                self._what,
                now_s - self._begin_s,
            )


class Reserved(list[str]):
    """The uids that may be started now, in the order asked.

    Attributes:
        verdicts: uid -> `granted`; `known`: put before under this attempt; `evicted`, `dropped`, `quarantined`: put before,
            and never trained (another attempt may be); `taken`: another producer works on it; `full`: no capacity now.
    """

    def __init__(self, verdicts: Mapping[str, str]) -> None:
        super().__init__(uid for uid, said in verdicts.items() if said == "granted")
        self.verdicts = verdicts


class Rollouts:
    """Puts groups, and reserves prompts to start on; make it with `raysvc.rollouts(name)`.

    Args:
        name: of the server.
        server: Ray handle.
        owner: name of this producer; a restarted producer with the same name keeps its reservations.
        ttl_s: how long reservations last without a sign of life; a thread sends one from the first reservation on.
    """

    def __init__(self, name: str, server: Any, owner: str = "", ttl_s: float = 60.0) -> None:
        self.name, self._server, self._ttl_s = name, server, ttl_s
        self.owner = owner or new_holder()
        self._methods: dict[str, Any] = {}
        self._pid = os.getpid()
        self._lock = threading.Lock()
        self._life = new_holder()  # of this object; its name may have had another one before
        self._asked = 0  # guarded by _lock; questions for prompts
        self._has: tuple[int, str] | None = None  # version and name of the weights that were brought last
        self._stop: threading.Event | None = None  # guarded by _lock; ends the thread that renews

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

        number("put_groups(wait_s)", wait_s)
        items = [groups] if isinstance(groups, Group | ray.ObjectRef) else _items(groups)
        refs = [item for item in items if isinstance(item, ray.ObjectRef)]
        values = [item for item in items if not isinstance(item, ray.ObjectRef)]
        batches = [*([_shared(table_of(values))] if values else []), *refs]
        if not batches:
            return Put(0, 0, {})
        if refs or any(not group.closed for group in values):
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
        """Add columns that came late to rows of a group: a reward for each row, or a vector for each row's tokens.

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
        text("add_columns(uid)", uid)
        given = mapping("add_columns(columns)", columns)
        if rows is not None:
            rows = [
                integer(f"add_columns(rows)[{place}]", row, 0)
                for place, row in enumerate(_items(rows, "add_columns(rows)"))
            ]
        return int(self._call("add_columns", "put", late_table(uid, given, rows, attempt)))

    def close_groups(self, uids: Sequence[str], attempt: int = 0) -> int:
        """Say that no rows of these open groups will follow; returns how many were open."""
        integer("close_groups(attempt)", attempt, 0)
        keys = [(uid, attempt) for uid in texts("close_groups(uids)", uids)]
        return int(self._call("close_groups", "put", keys))

    def reserve(self, uids: Sequence[str], *, attempt: int = 0) -> Reserved:
        """Reserve prompts: returns the uids that may be started now, and a verdict of each uid that was asked for.

        A reservation holds while this process lives, and `producer_ttl_s` longer.

        Args:
            attempt: the one that will be put; a prompt that was put under it before is not granted.
        """
        wanted = texts("reserve(uids)", uids)
        integer("reserve(attempt)", attempt, 0)
        self._live()
        return Reserved(self._call("reserve", "put", wanted, self.owner, attempt))

    def prompts(self, at_once: int = 1) -> Iterator[Prompt]:
        """Yield prompts of the server's stream to sample, and to put as `prompt.group(...)`, until the stream ends.

        A prompt is this producer's until it is put or released; it waits while there is no capacity. It goes to another one when this
        process dies or, with `max_prompt_s`, is too slow. A restarted producer of the same name first gets what it had.

        Args:
            at_once: how many a call brings; they are all this producer's from then on.

        Raises:
            ConfigError: the server has no prompts.
        """
        integer("prompts(at_once)", at_once, 1)
        return self._prompts(at_once)

    def _prompts(self, at_once: int) -> Iterator[Prompt]:
        self._live()
        pause_s, waiting = 0.01, WaitReport(f"prompts of server {self.name!r}")
        while True:
            with self._lock:
                ask, self._asked = self._asked, self._asked + 1
            found, has_ended = self._call(
                "prompts", "put", self.owner, f"{self._life}.{ask}", at_once, ask == 0
            )
            yield from (Prompt(*each) for each in found)
            if has_ended:
                return
            pause_s = 0.01 if found else min(2 * pause_s, MAX_PAUSE_S)
            if found:
                waiting.over()
            else:
                waiting.report()
                time.sleep(pause_s)
                record("producer_wait_seconds", pause_s, server=self.name)

    def weights(self, after: int | None = None, *, wait_s: float = 600.0) -> Weights | None:
        """The weights that the trainer published last (`LearnerRollouts.publish`), if they are not those that this producer has.

        Args:
            after: the version that it has. Others of the same version, published after a rewind, come too where this object brought the first.
            wait_s: for others; 0 only looks.

        Returns:
            None: nothing else came in time.

        Raises:
            ServerError: they lie in a folder that this process does not see.
        """
        number("weights(wait_s)", wait_s)
        if after is not None:
            integer("weights(after)", after, 0)
        self._live()  # a file is kept for a reader that lives
        end_s, pause_s, lost = time.monotonic() + wait_s, 0.01, None
        while True:
            name = self._has[1] if self._has is not None and self._has[0] == after else None
            read = new_holder()
            told = self._call("weights", "put", after, name, self.owner, read)
            if told is not None and told != lost:
                if (found := self._loaded(read, *told)) is not None:
                    return found
                lost = told
            elif told is not None and isinstance(told[1][0], str):  # still the newest, and not there
                self._call("weights_read", "put", read)
                what = f"{'/'.join(told[1])} is not seen by this process"
                raise ServerError(
                    f"weights of server {self.name!r}", what, "publish to a folder that all see"
                )
            if time.monotonic() >= end_s:
                return None
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, MAX_PAUSE_S)

    def _loaded(self, read: str, version: int, where: list[Any]) -> Weights | None:
        """The weights; None: they are gone, as where newer ones took their place while they were read."""
        import ray

        is_file = isinstance(where[0], str)
        try:
            blob = read_blob(*where) if is_file else ray.get(where[0])
        except (FileNotFoundError, ray.exceptions.ObjectLostError) as error:
            log.warning("weights of version %d are gone, waiting for newer ones: %s", version, error)
            return None
        finally:
            if is_file:
                self._call("weights_read", "put", read)
        self._has = version, where[1]
        return Weights(version, tensors_of(blob))

    def status(self, uids: Sequence[str], *, attempt: int = 0) -> dict[str, PromptState]:
        """Say where each of these prompts stands, under one attempt; changes nothing."""
        integer("status(attempt)", attempt, 0)
        found: dict[str, PromptState] = self._call("status", "control", texts("status(uids)", uids), attempt)
        return found

    def release(self, uids: Sequence[str]) -> None:
        """Give back the capacity of prompts that will not be put."""
        self._call("release", "put", texts("release(uids)", uids))

    def drop(self, uids: Sequence[str]) -> int:
        """Filter: removes the groups of these prompts that are in no step yet, and gives back their capacity."""
        return int(self._call("drop", "put", texts("drop(uids)", uids)))

    def stats(self) -> dict[str, Any]:
        """Counts of groups, weight version, timeline, capacity (None: no bound), and what is quarantined, by group."""
        facts: dict[str, Any] = self._call("rollouts", "control")
        return facts

    def close(self) -> None:
        """Stop sending signs of life; what is reserved and not put is released after `producer_ttl_s`.

        The next reservation, open group or look for weights gives them again.
        """
        with self._lock:
            if self._stop is not None:
                self._stop.set()
                self._stop = None

    def _live(self) -> None:
        """Give signs of life from now on, until this object or its process is gone."""
        self._refuse_forked()
        with self._lock:
            if self._stop is not None:
                return
            self._stop = threading.Event()
            weakref.finalize(self, self._stop.set)
            args = (self._server, self.owner, self._ttl_s / 3, self._stop)
        threading.Thread(target=_renew, args=args, name=f"raysvc-producer-{self.name}", daemon=True).start()

    def _call(self, method: str, threads: str, *args: Any, **named: Any) -> Any:
        from raysvc.actors.launch import wait_for

        self._refuse_forked()
        if method not in self._methods:  # making options costs as much as a call
            self._methods[method] = getattr(self._server, method).options(concurrency_group=threads)
        ref = self._methods[method].remote(*args, **named)
        return wait_for(ref, f"server {self.name!r}")

    def _refuse_forked(self) -> None:
        if os.getpid() != self._pid:
            where = f"rollouts of server {self.name!r}"
            what = f"were asked for by process {self._pid} and are used in {os.getpid()}, forked from it"
            raise ServerError(where, what, f"call raysvc.rollouts({self.name!r}) in a process of its own")


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
    from raysvc.cluster import join_cluster

    text("rollouts(name)", name)
    text("rollouts(owner)", owner, empty=True)
    optional_text("rollouts(address)", address)
    join_cluster(address)
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


def _items(values: Any, where: str = "put_groups(groups)") -> list[Any]:
    """Several values; what is no list of them is refused."""
    if isinstance(values, str | bytes | Mapping) or not isinstance(values, Iterable):
        raise ConfigError(where, f"{values!r} is not a list", "give a list")
    return list(values)
