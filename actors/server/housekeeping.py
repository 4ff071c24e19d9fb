"""What a server does beside its calls: write commits once a second, free its data or end when nobody needs it.

Always true:
- data are freed when no lease lived for `orphan_ttl_s`; with `reap` the server ends then, its commits written;
- a failing journal ends nothing: the next round tries again.
"""

from __future__ import annotations

import logging
import threading
import time

from raysvc.actors.server.lease_store import LedgerBook
from raysvc.actors.server.spec import ServeSpec
from raysvc.actors.server.step_maker import StepMaker

log = logging.getLogger(__name__)
COMMIT_FLUSH_S = 1.0


class House:
    """See the module.

    Args:
        spec: of the server.
        book: its ledgers.
        maker: holds its data.
    """

    def __init__(self, spec: ServeSpec, book: LedgerBook, maker: StepMaker) -> None:
        self._spec, self._book, self._maker = spec, book, maker
        self._idle_since_s = time.monotonic()  # when a living lease was last seen
        self._closed = threading.Event()

    def start(self) -> None:
        """Begin the rounds."""
        threading.Thread(target=self._keep, name="raysvc-house", daemon=True).start()

    def seen(self) -> None:
        """Somebody came."""
        self._idle_since_s = time.monotonic()

    def _keep(self) -> None:
        period_s = min(COMMIT_FLUSH_S, self._spec.orphan_ttl_s / 4)
        while not self._closed.wait(period_s):
            try:
                self._round()
            except Exception:  # the next round tries again; a failing journal must not end the server
                log.exception("keeping house failed name=%s", self._spec.name)

    def _round(self) -> None:
        if self._book.lives():
            self.seen()
        self._book.flush(if_dirty=True)
        if time.monotonic() - self._idle_since_s > self._spec.orphan_ttl_s:
            self._orphaned()

    def _orphaned(self) -> None:
        if self._maker.free():
            log.info("freed name=%s: no lease for %.0f s", self._spec.name, self._spec.orphan_ttl_s)
        if self._spec.reap:
            self._book.flush()
            self._end()

    def _end(self) -> None:
        import ray

        self._closed.set()
        log.warning("reaped name=%s: no lease for %.0f s", self._spec.name, self._spec.orphan_ttl_s)
        ray.kill(ray.get_runtime_context().current_actor, no_restart=True)
