"""Makes the steps of a server's streams: so many at a time, shared where several callers want one. No Ray, no lease.

Always true:
- at most `collate_threads` steps are made at a time; who comes later waits;
- what goes wrong in a step is a `StepFailed` that names the step and the cause.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, TypeAlias

from raysvc.actors.server.spec import TRAIN, Role, ServeSpec, StepInfo, StepOutline
from raysvc.actors.server.step_cache import SharedSteps
from raysvc.collate.reused_memory import MEMORY, give_back_freed_memory
from raysvc.collate.shard import Shard
from raysvc.errors import EntryError, LeaseError, RaysvcError, ServerError, StepFailed, StepOutOfOrder
from raysvc.metrics import record

if TYPE_CHECKING:
    from raysvc.actors.rollouts.rollout_stream import RolloutStream
    from raysvc.actors.server.entry_stream import EntryStream

log = logging.getLogger(__name__)
Made = tuple[StepInfo, tuple[Shard, ...]]
Stream: TypeAlias = "EntryStream | RolloutStream"  # what steps come from


def make_and_tell(server: str, step: int, make: Callable[[], Made]) -> Made:
    """Make a step, and say how long it took or what went wrong.

    Raises:
        StepFailed: it could not be made; carries the cause.
    """
    try:
        made = make()
    except LeaseError:
        raise
    except Exception as error:
        log.exception("step failed name=%s step=%d", server, step)
        cause = str(error) if isinstance(error, RaysvcError) else f"{type(error).__name__}: {error}"
        raise StepFailed(server, step, cause) from error
    record("read_seconds", made[0].read_s, server=server)
    record("collate_seconds", made[0].collate_s, server=server)
    return made


class StepMaker:
    """See the module.

    Args:
        spec: of the server.
        streams: name -> stream; `TRAIN` and the evals.
    """

    def __init__(self, spec: ServeSpec, streams: Mapping[str, Stream]) -> None:
        self._spec, self._streams = spec, streams
        self._collating = threading.Semaphore(spec.collate_threads)
        self._lock = threading.Lock()
        self._num_collating = 0  # guarded by _lock
        self.shared: SharedSteps[Made] = SharedSteps(spec.share_bytes)

    @property
    def num_collating(self) -> int:
        """Steps that are being made."""
        with self._lock:
            return self._num_collating

    def stream(self, name: str) -> Stream:
        """One stream.

        Raises:
            ServerError: there is no such eval; the error lists those that are there.
        """
        if name not in self._streams:
            known = ", ".join(name for name in self._streams if name) or "none"
            where, what = f"server.name {self._spec.name!r}", f"has no eval {name!r} (there are: {known})"
            raise ServerError(where, what, "name it in the job's `evals`, and serve again")
        return self._streams[name]

    def outline(self, step: int, dp_size: int, stream: str) -> StepOutline:
        """Returns what the plan says of a step.

        Raises:
            StepOutOfOrder: there is no such step.
            ServerError: its rows are not tokenized yet.
        """
        source = self._with(step, stream)
        if not source.is_there(step):
            what = f"has not all rows of step {step} yet: they are being tokenized"
            raise ServerError(f"server.name {self._spec.name!r}", what, "ask again later")
        return source.outline(step, dp_size)

    def sizes(self, first: int, stop: int, roles: Sequence[Role], stream: str) -> list[int | None]:
        """Bytes of the shards of the steps `first` to `stop - 1`, all roles together; None where rows are not tokenized yet."""
        source = self.stream(stream)
        return [
            sum(source.nbytes(step, role) for role in roles) if source.is_there(step) else None
            for step in range(first, stop)
        ]

    def admit(self, step: int, stream: str) -> int:
        """The step, once its rows are there.

        Raises:
            StepOutOfOrder: there is no such step.
            StepFailed: nobody tokenizes its rows any more.
        """
        source = self._with(step, stream)
        try:
            source.wait_for(step)
        except EntryError as error:
            raise StepFailed(self._spec.name, step, str(error)) from error
        return step

    def make(self, step: int, roles: tuple[Role, ...], stream: str) -> Made:
        """Info and shards of a step.

        Raises:
            StepOutOfOrder: there is no such step.
            StepFailed: it could not be made; carries the cause.
        """
        source = self._with(step, stream)

        def made() -> Made:
            waited_s = source.wait_for(step)  # for rows: others may be made meanwhile
            with self._counted():
                info, shards = source.make(step, roles)
            return replace(info, build_s=info.build_s + waited_s), shards

        return make_and_tell(self._spec.name, step, made)

    def make_shared(
        self, step: int, roles: tuple[Role, ...], stream: str, readers: int | None, pinned: bool = False
    ) -> Made:
        """Does what `make` does, once for all who ask while the step is kept; `readers` and `pinned` are those of
        `SharedSteps.get`.
        """

        def size(made: Made) -> int:
            return sum(shard.nbytes for shard in made[1])

        key = (stream, step, roles)
        return self.shared.get(key, readers, lambda: self.make(step, roles, stream), size, pinned)

    def let_go_below(self, step: int) -> None:
        """Let go of shared training steps before this one."""
        self.shared.clear(unless=lambda key: not isinstance(key, tuple) or key[0] != TRAIN or key[1] >= step)

    def let_go_from(self, step: int) -> None:
        """Let go of shared training steps from this one on: they are made otherwise from now on."""
        self.shared.clear(unless=lambda key: not isinstance(key, tuple) or key[0] != TRAIN or key[1] < step)

    def holds_data(self) -> bool:
        """Returns whether an entry is open."""
        return any(stream.is_open for stream in self._streams.values())

    def free(self) -> bool:
        """Let go of all data; whether there was any. What is asked for later is opened again."""
        self.shared.clear()
        MEMORY.forget()
        freed = [stream.free() for stream in self._streams.values()]
        give_back_freed_memory()
        return any(freed)

    def _with(self, step: int, stream: str) -> Stream:
        """The stream, if it has that step."""
        source = self.stream(stream)
        if not 0 <= step < source.schedule.num_steps:
            expected = f"a step from 0 to {source.schedule.num_steps - 1}"
            raise StepOutOfOrder(self._spec.name, step, expected)
        return source

    @contextmanager
    def _counted(self) -> Iterator[None]:
        """Lets as many threads in at a time as may collate, and counts them."""
        with self._collating:
            with self._lock:
                self._num_collating += 1
            try:
                yield
            finally:
                with self._lock:
                    self._num_collating -= 1
