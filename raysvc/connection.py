"""A lease and the calls that carry it: shared by the clients of drivers and of ranks.

Always true:
- a heartbeat thread keeps the lease while this process lives, however long a step takes;
- once the lease is lost every call says so, with the server's own error;
- after `close` the thread is gone.
"""

from __future__ import annotations

import collections
import logging
import os
import socket
import threading
import time
import uuid
from typing import TYPE_CHECKING, Any

from raysvc.errors import LeaseError, ServerError

if TYPE_CHECKING:
    from raysvc.actors.serving import Lease

log = logging.getLogger(__name__)
POLL_S = 0.5
COMMITS_AT_ONCE = 8


def new_holder() -> str:
    """A name for one attach of this process, for people and for equality."""
    return f"{socket.gethostname()}:{os.getpid()}:{uuid.uuid4().hex[:8]}"


class Connection:
    """A server, a lease on it, and the thread that keeps the lease.

    Args:
        server: Ray handle.
        lease: from one of its attach methods.
        rank: the seat that this process has; None for a driver.
    """

    def __init__(self, server: Any, lease: Lease, rank: int | None = None) -> None:
        self.server, self.lease, self.rank = server, lease, rank
        self._commits: collections.deque[Any] = collections.deque()
        self._methods: dict[tuple[str, str, int], Any] = {}
        self._lost: BaseException | None = None  # set once by the heartbeat thread
        self._stop = threading.Event()
        self._heart = threading.Thread(target=self._beat, name=f"raysvc-lease-{lease.name}", daemon=True)
        self._heart.start()

    @property
    def closed(self) -> bool:
        """Whether `close` was called."""
        return self._stop.is_set()

    def check(self) -> None:
        """Raise what ended the lease.

        Raises:
            FencedError: somebody took over.
            ServerError: `close` was called.
        """
        if self._lost is not None:
            raise self._lost
        if self.closed:
            where = f"server.name {self.lease.name!r}"
            raise ServerError(where, "is used after detach", "attach again")

    def fetch(self, method: str, num_returns: int, *args: Any) -> list[Any]:
        """Start a fetch; returns its refs."""
        self.check()
        refs = self._bound(method, "fetch", num_returns).remote(self.lease.fence, *args)
        return refs if isinstance(refs, list) else [refs]

    def control(self, method: str, *args: Any) -> Any:
        """Start a call that needs no lease; returns its ref."""
        self.check()
        return self._bound(method, "control").remote(*args)

    def ledger(self, method: str, *args: Any, **named: Any) -> Any:
        """Start a call of the holder; they run in the order they were sent. Returns its ref."""
        return self._bound(method, "ledger").remote(self.lease.fence, *args, **named)

    def commit(self, step: int, skipped: bool) -> None:
        """Send a commit; a refusal is raised by this call or one of the next few."""
        import ray

        self.check()
        self._commits.append(self.ledger("commit", step, skipped, rank=self.rank))
        if len(self._commits) < COMMITS_AT_ONCE:  # asking for an answer costs more than sending
            return
        while self._commits and ray.wait([self._commits[0]], timeout=0)[0]:
            self.get(self._commits.popleft())

    def get(self, ref: Any) -> Any:
        """Wait for an answer.

        Raises:
            RaysvcError: what the server raised on purpose.
            ServerError: the server has ended for good.
        """
        import ray

        from raysvc.actors.launch import wait_for

        self.check()
        try:
            return wait_for(ref, f"server {self.lease.name!r}")
        except ray.exceptions.ActorDiedError as error:
            where, remedy = (
                f"server.name {self.lease.name!r}",
                "serve it again, and go on from the checkpoint",
            )
            raise ServerError(where, "has ended", remedy) from error

    def close(self) -> None:
        """Wait for the commits, give the lease back, end the thread; safe to call twice."""
        if self.closed:
            return
        try:
            while self._commits:
                self.get(self._commits.popleft())
            self.get(self.ledger("detach", rank=self.rank))
        finally:
            self._stop.set()
            self._commits.clear()
            self._heart.join(timeout=10.0)

    def _bound(self, method: str, threads: str, num_returns: int = 1) -> Any:
        """The method with its options, made once: making them costs as much as a call."""
        key = (method, threads, num_returns)
        if key not in self._methods:
            options = {"concurrency_group": threads, "num_returns": num_returns, "max_task_retries": -1}
            self._methods[key] = getattr(self.server, method).options(**options)
        return self._methods[key]

    def _beat(self) -> None:
        import ray

        period_s = self.lease.ttl_s / 3
        while not self._stop.wait(period_s):
            try:
                self._beat_once()
            except LeaseError as error:
                if not self._stop.is_set():
                    self._lost = error
                    log.error("lease lost name=%s fence=%d", self.lease.name, self.lease.fence)
                return
            except ray.exceptions.RayError as error:
                log.warning("heartbeat failed name=%s error=%s", self.lease.name, type(error).__name__)

    def _beat_once(self) -> None:
        import ray

        from raysvc.actors.launch import wait_for

        method = self.server.heartbeat.options(concurrency_group="control")
        ref, begin = method.remote(self.lease.fence), time.monotonic()
        while not ray.wait([ref], timeout=POLL_S)[0]:
            waited_s = time.monotonic() - begin
            if self._stop.is_set():
                return
            if waited_s > self.lease.ttl_s:
                log.warning("no answer name=%s for=%.0fs: is it restarting?", self.lease.name, waited_s)
                return
        wait_for(ref, f"server {self.lease.name!r}")
