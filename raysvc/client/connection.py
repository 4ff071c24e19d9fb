"""A lease and the calls that carry it: shared by the clients of drivers and of ranks.

Always true:
- a heartbeat thread keeps the lease while this process lives, however long a step takes;
- a sending thread sends what the training loop must not wait for;
- a commit (`commits.note`) wakes no thread while another one looks for commits by itself (`sends_commits`);
- a rank's commit goes along with its next fetch where one is due, and is sent by itself within two looks otherwise;
- commits may reach the server in any order and more than once; any other call of the holder is sent when all commits
  before it are answered;
- a state is given out only by a holder whom the server knew within the last half of a lease, or knows now;
- once the lease is lost, or a commit was refused, every call says so, with the server's own error;
- a rank learns from its heartbeats who of its group is behind or silent;
- a process that was forked from the one that attached is refused: its threads and its lease stayed there;
- after `close` all threads are gone, and every commit was answered.
"""

from __future__ import annotations

import collections
import logging
import os
import socket
import threading
import time
import uuid
import weakref
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from raysvc.actors.server.spec import TRAIN, Commit, Part, Role
from raysvc.actors.versions import HERE
from raysvc.client.commits import Commits, covering
from raysvc.errors import LeaseError, PlanError, RankLost, RaysvcError, ServerError

if TYPE_CHECKING:
    from raysvc.actors.mesh import MeshSeat
    from raysvc.actors.server.collator_pool import CollatorPool
    from raysvc.actors.server.reader_lease import Peers
    from raysvc.actors.server.spec import Lease, StepInfo

log = logging.getLogger(__name__)
POLL_S = 0.5
REPORT_S = 2.0  # a driver, or rank 0, says so often how it does
COMMITS_AT_ONCE = 8
ASKING_RANKS = (
    2  # that ask at once who is behind: one of them is not, as a rule; others learn it with a heartbeat
)


def new_holder() -> str:
    """A name for one attach of this process, for display and for equality."""
    return f"{socket.gethostname()}:{os.getpid()}:{uuid.uuid4().hex[:8]}"


def _collators_of(server: Any, lease: Lease, seat: MeshSeat | None) -> CollatorPool | None:
    """Names who makes the shards; None: the server itself. A seat has its share of the processes, on its own node."""
    if not lease.collators:
        return None
    from raysvc.actors.launch import wait_for
    from raysvc.actors.server.collator_pool import CollatorPool

    spec_json, _ = wait_for(server.spec_json.remote(), f"server {lease.name!r}")
    if seat is None:
        return CollatorPool(spec_json, lease.collators)
    share = range(seat.number, lease.collators, seat.mesh.size)
    return CollatorPool(spec_json, len(share), [_own_node()])


def _own_node() -> str:
    import ray

    return str(ray.get_runtime_context().get_node_id())


_open: weakref.WeakSet[Connection] = weakref.WeakSet()


def _end_all() -> None:
    """In a process that was forked from this one."""
    for connection in list(_open):
        connection.ended = True


os.register_at_fork(after_in_child=_end_all)


class Connection:
    """A server, a lease on it, and the thread that keeps the lease.

    Args:
        server: Ray handle.
        lease: from one of its attach methods.
        seat: that this process has; None for a driver, who has the only one.
        window: steps that this process may be ahead of another one.

    Attributes:
        rank: number of the seat; None for a driver.
        report: what heartbeats carry beside the sign of life.
        settle: has what the loop noted counted: the commits among it are in `commits` then.
        orders: `Plan.order_of` of each epoch of which a step, or a state, was seen.
        commits: that are not sent; a refusal is raised by one of the next calls.
        ended: whether `check` refuses. A loop looks here first: that costs no call.
    """

    def __init__(self, server: Any, lease: Lease, seat: MeshSeat | None = None, window: int = 1) -> None:
        self.server, self.lease, self._seat = server, lease, seat
        self.rank = rank = None if seat is None else seat.number
        self._window, self._pid = window, os.getpid()
        self.report: Callable[[], dict[str, Any]] = dict
        self.settle: Callable[[], object] = lambda: None
        self.orders: dict[int, str] = {}
        self.ended = False
        self._heard_s = time.monotonic()  # when the server was last known to keep this lease
        self._told: set[int] = set()  # ranks that were logged as behind or silent; only the heart touches it
        self._sending = threading.Lock()  # guards what sends commits and takes their answers
        # (step, ref) of commits that are not answered; guarded by _sending
        self._unanswered: collections.deque[tuple[int, Any]] = collections.deque()
        # a step of rollouts may wait for groups that producers put when a commit is known; collators know no commits
        self._takes_along = rank is not None and not lease.forms and not lease.collators
        self._along: dict[int, tuple[Commit, ...]] = {}  # step that was fetched -> commits that went along
        self._seen_takes = -1  # of the commits that `send_commits` saw last; -1: it saw none
        self._beside: list[threading.Thread] = []  # of `beside`
        self._methods: dict[tuple[str, str, int], Any] = {}
        self._lost: BaseException | None = None  # set once, by the thread that learns it first
        self._leaving = False  # written by close alone
        self._stop = threading.Event()
        self._beat_now = threading.Event()
        self._collators = _collators_of(server, lease, seat)
        self._node = None if seat is None or seat.num_sharers(lease.cuts) == 1 else _own_node()
        self._sender = ThreadPoolExecutor(1, thread_name_prefix=f"raysvc-send-{lease.name}")
        self.commits = Commits(lambda: self._sender.submit(self._send_commits))
        self._heart = threading.Thread(target=self._beat, name=f"raysvc-lease-{lease.name}", daemon=True)
        self._heart.start()
        _open.add(self)

    @property
    def closed(self) -> bool:
        """Returns whether `close` was called."""
        return self._stop.is_set()

    def check(self) -> None:
        """Raise what ended the lease.

        Raises:
            FencedError: somebody took over.
            RankLost: another rank of the group is dead.
            StepOutOfOrder: an earlier commit was refused.
            ServerError: `close` was called, or this process was forked from the one that attached.
        """
        if not self.ended:
            return
        where = f"server.name {self.lease.name!r}"
        if os.getpid() != self._pid:
            what = f"was attached by process {self._pid} and is used in {os.getpid()}, forked from it"
            raise ServerError(where, what, "attach in the process that trains, after the fork")
        if self._lost is not None:
            raise self._lost
        raise ServerError(where, "is used after detach", "attach again")

    def confirm(self) -> None:
        """Ask the server where it said nothing for half a lease: this process may have slept, and been replaced.

        Raises:
            FencedError: somebody took over.
        """
        if not self.closed and time.monotonic() - self._heard_s > self.lease.ttl_s / 2:
            self.check()
            try:
                self._beat_once()
            except LeaseError as error:
                self._lose(error)
            self.check()

    def _lose(self, error: BaseException) -> None:
        """Have all calls from now on raise the first error that ended the lease."""
        self._lost = self._lost or error
        self.ended = True

    def note_order(self, info: StepInfo) -> None:
        """Keep the order of the step's epoch.

        Raises:
            PlanError: another process, or the server before it was started again, had another order of that epoch.
        """
        if info.order is not None and self.orders.setdefault(info.epoch, info.order) != info.order:
            function = self.lease.identity["order"]["name"]
            what = f"{function} returned another order of epoch {info.epoch} in another process"
            raise PlanError("plan.order", what, "draw from rows.seed and epoch alone, and keep the function")

    def fetch(self, method: str, num_returns: int, *args: Any) -> list[Any]:
        """Start a fetch; returns its refs."""
        self.check()
        refs = self._bound(method, "fetch", num_returns).remote(self.lease.fence, *args)
        return refs if isinstance(refs, list) else [refs]

    def fetch_step(
        self, step: int, roles: tuple[Role, ...], num_mini_batches: int, stream: str = ""
    ) -> list[Any]:
        """Start to have a step made; returns refs of its info and shards, in the order of `BatchServer.fetch`."""
        if self._collators is None:
            ranks = sum(role.dp_size for role in roles)
            return self.fetch("fetch", 1 + num_mini_batches * ranks, step, roles, stream)
        return self._collators.make(self._admitted(step, stream), roles, num_mini_batches, stream)

    def fetch_rank(self, step: int, role: Role, num_mini_batches: int, stream: str = "") -> list[Any]:
        """Start to have this rank's shards of a step made; returns a ref of its info and them, or of a collator refs of each."""
        if self._collators is None:
            along = self._take_along(step) if stream == TRAIN else ()
            plain = role.columns is None and self._node is None  # earlier servers know neither
            more = () if plain else (role.columns, self._node)
            return self.fetch("fetch_rank", 1, step, self.rank, role.dp_size, stream, along, *more)
        part = Part(0, self._seat.share(self.lease.cuts)[1] if self._seat else 0)
        admitted = self._admitted(step, stream)
        return self._collators.make_part(admitted, (role,), part, num_mini_batches, stream)

    def arrived(self, info: StepInfo) -> None:
        """Say that a step that this rank fetched is there, and that the commits that went along with it are known."""
        along = self._along.pop(info.index, ())
        if along:
            self._look_behind(along[-1].step, info.frontier)

    def collate_on(self, nodes: Sequence[str]) -> None:
        """Node of each rank of every role: its shards are made there, if collators make them."""
        if self._collators is not None:
            self._collators.nodes = tuple(nodes)

    def _admitted(self, step: int, stream: str) -> Any:
        """A ref of the step, or of the server's refusal."""
        (ref,) = self.fetch("admit", 1, step, stream)
        return ref

    def control(self, method: str, *args: Any) -> Any:
        """Start a call that needs no lease; returns its ref."""
        self.check()
        return self._bound(method, "control").remote(*args)

    def sizes(self, first: int, stop: int, *args: Any) -> Callable[[], list[int | None]]:
        """Ask for the bytes of steps from the sending thread; gives a function that waits for them."""
        self.check()

        def ask() -> tuple[Any, Future[list[int | None]]]:
            ref = self.control("sizes", first, stop, *args)
            return ref, ref.future()

        def wait() -> list[int | None]:
            ref, answer = asked.result()
            # an answer that is there costs nothing; `get` says what it waits for
            return answer.result() if answer.done() and answer.exception() is None else list(self.get(ref))

        asked = self._sender.submit(ask)
        return wait

    def after_commits(self, method: str, *args: Any, **named: Any) -> Any:
        """Make a call of the holder when all commits before it are answered; returns its answer.

        Raises:
            RaysvcError: what the server raised on purpose.
        """
        self.check()
        return self._answer(self._sender.submit(self._send_after_commits, method, *args, **named).result())

    def move(self, frontier: int, plan_state: dict[str, Any] | None) -> int:
        """Have the server go to another frontier; returns it.

        Raises:
            StateMismatch: the state belongs to another plan.
            StepOutOfOrder: there is no such step.
        """
        self.check()
        self.settle()
        self.commits.moves += 1
        named = {"rank": self.rank or 0, "moves": self.commits.moves}
        try:
            return int(self.after_commits("move", frontier, plan_state, **named))
        except RaysvcError:  # refused: the seat is where it was
            self.commits.moves -= 1
            raise

    def send_commits(self) -> None:
        """Send the commits that nobody sends yet; does not wait for answers.

        Where a fetch may take them along, those that the call before this one saw already.
        """
        self.settle()
        seen, self._seen_takes = self._seen_takes, self.commits.takes if self.commits else -1
        due = seen == self._seen_takes or not self._takes_along
        if self.commits and due and self._sending.acquire(blocking=False):
            try:
                self._send_unsent()
            finally:
                self._sending.release()

    @contextmanager
    def sends_commits(self) -> Iterator[None]:
        """While it lasts the calling thread calls `send_commits` every few milliseconds, and a commit wakes no other."""
        try:
            with self.commits.looked_for():
                yield
        finally:
            self.settle()
            if self.commits and not self.closed:
                self._sender.submit(self._send_commits)

    def beside(self, work: Callable[[], None], name: str) -> None:
        """Run `work` in a thread of its own; it ends soon once the connection is closed, which waits for that."""
        self.check()
        thread = threading.Thread(target=work, name=f"raysvc-{name}-{self.lease.name}", daemon=True)
        self._beside = [*(one for one in self._beside if one.is_alive()), thread]
        thread.start()

    def get(self, ref: Any) -> Any:
        """Wait for an answer.

        Raises:
            RaysvcError: what the server raised on purpose.
            ServerError: the server has ended for good.
        """
        self.check()
        return self._answer(ref)

    def close(self) -> None:
        """Wait for the commits, give the lease back, end the threads; safe to call twice."""
        if self.closed:
            return
        if os.getpid() != self._pid:
            self.check()
        self._leaving = True  # were the lease lost before, detach itself is refused
        try:
            self._answer(
                self._sender.submit(self._send_after_commits, "detach", rank=self.rank or 0).result()
            )
            self.check()
        finally:
            self.ended = True
            self._stop.set()
            self._beat_now.set()
            for thread in (*self._beside, self._heart):
                thread.join(timeout=10.0)
            self._sender.shutdown(wait=True, cancel_futures=True)
            self._unanswered.clear()
            self._collators = None

    def _take_along(self, step: int) -> tuple[Commit, ...]:
        """The commits that go along with the fetch of a step; () where the step may have to wait for them."""
        if not self._takes_along:
            return ()
        self.settle()
        if not self.commits or not self._sending.acquire(blocking=False):
            return ()
        try:
            along = self._along[step] = tuple(self.commits.take())
        finally:
            self._sending.release()
        return along

    def _look_behind(self, step: int, frontier: int) -> None:
        """Ask soon who is behind, if somebody is, after a commit of `step` that was answered with the group's frontier."""
        if self.rank is not None and self.rank < ASKING_RANKS and step + 1 - frontier > self._window:
            self._beat_now.set()

    def _send(self, method: str, *args: Any, **named: Any) -> Any:
        return self._bound(method, "lease").remote(self.lease.fence, *args, **named)

    def _send_after_commits(self, method: str, *args: Any, **named: Any) -> Any:
        with self._sending:
            self.settle()
            along = [commit for commits in list(self._along.values()) for commit in commits]
            self._along.clear()
            self._send_all([*covering(along), *self.commits.take()])
            self._collect(0)
            return self._send(method, *args, **named)

    def _send_commits(self) -> None:
        with self._sending:
            self._send_unsent()

    def _send_unsent(self) -> None:
        """Called under `_sending`."""
        self._send_all(self.commits.take())

    def _send_all(self, commits: Sequence[Commit]) -> None:
        """Called under `_sending`."""
        for step, skipped, moves in commits:
            if self._lost is not None:
                return
            try:
                ref = self._send("commit", step, skipped, rank=self.rank or 0, moves=moves)
                self._unanswered.append((step, ref))
                self._collect(COMMITS_AT_ONCE - 1)  # asking for an answer costs more than sending
            except Exception as error:  # noqa: BLE001 - nobody waits for this call: the next one tells
                self._lose(error)
                log.error("commit failed name=%s step=%d error=%s", self.lease.name, step, error)

    def _collect(self, leave: int) -> None:
        """Take answers to commits, oldest first, until `leave` are open; waits for them only when `leave` is 0.

        Called under `_sending`.
        """
        import ray

        while len(self._unanswered) > leave:
            if leave and not ray.wait([self._unanswered[0][1]], timeout=0)[0]:
                return
            step, ref = self._unanswered.popleft()
            self._look_behind(step, self._answer(ref))

    def _answer(self, ref: Any) -> Any:
        import ray

        from raysvc.actors.launch import wait_for

        try:
            return wait_for(ref, f"server {self.lease.name!r}")
        except ray.exceptions.ActorDiedError as error:
            where, remedy = (
                f"server.name {self.lease.name!r}",
                "serve it again, and go on from the checkpoint",
            )
            raise ServerError(where, "has ended", remedy) from error

    def _bound(self, method: str, threads: str, num_returns: int = 1) -> Any:
        """The method with its options, made once: making them costs as much as a call."""
        key = (method, threads, num_returns)
        if key not in self._methods:
            options = {"concurrency_group": threads, "num_returns": num_returns, "max_task_retries": -1}
            self._methods[key] = getattr(self.server, method).options(**options)
        return self._methods[key]

    def _beat(self) -> None:
        import ray

        period_s = self.lease.ttl_s / 3 if self.rank else min(REPORT_S, self.lease.ttl_s / 3)
        while not self._stop.is_set():
            asked = self._beat_now.wait(period_s)
            if (
                self._stop.is_set() or not ray.is_initialized()
            ):  # a call would start Ray again, or join another
                return
            try:
                self._beat_once()
            except LeaseError as error:
                if not self._leaving:  # a beat that comes after our own detach is refused, rightly
                    self._lose(error)
                    log.error("lease lost name=%s fence=%d", self.lease.name, self.lease.fence)
                return
            except ray.exceptions.ActorDiedError:  # for good: one that restarts is ActorUnavailableError
                if not self._leaving:
                    log.error("server has ended name=%s fence=%d", self.lease.name, self.lease.fence)
                return
            except ray.exceptions.RayError as error:
                log.warning("heartbeat failed name=%s error=%s", self.lease.name, type(error).__name__)
            if asked:  # the server need not be asked at every commit
                self._stop.wait(min(POLL_S, self.lease.ttl_s / 3))
            self._beat_now.clear()

    def _beat_once(self) -> None:
        import ray

        from raysvc.actors.launch import wait_for

        method = self.server.heartbeat.options(concurrency_group="control")
        report = {**HERE._asdict(), **self.report()}
        ref, begin = method.remote(self.lease.fence, self.rank or 0, report), time.monotonic()
        while not ray.wait([ref], timeout=POLL_S)[0]:
            waited_s = time.monotonic() - begin
            if self._stop.is_set():
                return
            if waited_s > self.lease.ttl_s:
                log.warning("no answer name=%s for=%.0fs: is it restarting?", self.lease.name, waited_s)
                return
        self._heed(wait_for(ref, f"server {self.lease.name!r}"))
        self._heard_s = time.monotonic()

    def _heed(self, peers: Peers) -> None:
        """Say once who is behind or silent, and again after they came back."""
        if self._seat is None:  # a driver is alone
            return
        name, seat_of = self.lease.name, self._seat.mesh.name
        mine = seat_of(self._seat.number)
        for rank, step in peers.behind:
            if rank not in self._told:
                log.warning("%s is behind name=%s at_step=%d, told by %s", seat_of(rank), name, step, mine)
        for rank, holder, silent_s in peers.silent:
            if rank not in self._told:
                log.warning("%s is silent name=%s for=%.1fs holder=%s", seat_of(rank), name, silent_s, holder)
            if silent_s > self.lease.ttl_s:
                raise RankLost(name, rank, holder, silent_s, seat_of(rank))
        self._told = {rank for rank, _ in peers.behind} | {each.rank for each in peers.silent}
