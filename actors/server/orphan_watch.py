"""Frees a server's data, or ends the server, when nobody has held a lease for a while.

Always true:
- data are freed when no lease lived for `orphan_ttl_s`; with `reap` the server ends then, its commits written;
- while somebody who starts or attaches waits for an answer, neither happens, however long the answer takes;
- a round that fails ends nothing: the next one tries again.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from raysvc.actors.server.lease_store import LeaseStore
from raysvc.actors.server.spec import ServeSpec
from raysvc.actors.server.step_maker import StepMaker
from raysvc.metrics import record

log = logging.getLogger(__name__)
LOOK_EVERY_S = 1.0


class OrphanWatch:
    """See the module.

    Args:
        spec: of the server.
        leases: its leases.
        maker: holds its data.
        export: sets the server's own gauges.
    """

    def __init__(
        self, spec: ServeSpec, leases: LeaseStore, maker: StepMaker, export: Callable[[], None]
    ) -> None:
        self._spec, self._leases, self._maker, self._export_more = spec, leases, maker, export
        self._idle_since_s = time.monotonic()  # when a living lease or a visitor was last seen
        self._visitors = 0  # calls that are being answered
        self._lock = threading.Lock()  # guards the visitors
        self._ended = threading.Event()
        threading.Thread(target=self._watch, name="raysvc-orphans", daemon=True).start()

    @contextmanager
    def visit(self) -> Iterator[None]:
        """Somebody is here, until what they asked for is answered."""
        with self._lock:
            self._visitors += 1
        try:
            yield
        finally:
            with self._lock:
                self._visitors -= 1
                self._idle_since_s = time.monotonic()

    def _watch(self) -> None:
        period_s = min(LOOK_EVERY_S, self._spec.orphan_ttl_s / 4)
        while not self._ended.wait(period_s):
            try:
                self._look()
            except Exception:
                log.exception("orphan watch failed name=%s: trying again", self._spec.name)

    def _look(self) -> None:
        self._export()
        if self._visitors or self._leases.lives():
            self._idle_since_s = time.monotonic()
        elif time.monotonic() - self._idle_since_s > self._spec.orphan_ttl_s:
            self._orphaned()

    def _export(self) -> None:
        """Leases as Prometheus sees them, whether their trainers say anything or not."""
        name, now_s = self._spec.name, time.monotonic()
        leases = [lease for lease in self._leases.leases.by_reader.values() if lease.holder]
        living = [lease for lease in leases if lease.lives(now_s, self._spec.lease_ttl_s)]
        silent_s = max((now_s - lease.seen_s for lease in leases), default=0.0)
        record("leases_held", len(living), server=name)
        record("lease_silent_seconds", silent_s, server=name)
        if leases:
            record("committed_steps", min(lease.frontier for lease in leases), server=name)
        self._export_more()

    def _orphaned(self) -> None:
        if self._maker.free():
            log.info("freed name=%s: no lease for %.0f s", self._spec.name, self._spec.orphan_ttl_s)
        if self._spec.reap:
            self._leases.flush()
            self._end()

    def _end(self) -> None:
        import ray

        self._ended.set()
        log.warning("reaped name=%s: no lease for %.0f s", self._spec.name, self._spec.orphan_ttl_s)
        ray.kill(ray.get_runtime_context().current_actor, no_restart=True)
