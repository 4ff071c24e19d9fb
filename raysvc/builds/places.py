"""Says where the slices of a build are made: here, by workers of a cluster, or by a builder beside a run.

A place is a function of builds and of the slices that are left. It makes them in any order, maybe some twice, and returns each receipt
with the number of its build.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING

from raysvc.builds.build import Build
from raysvc.builds.streamed_build import StreamedBuild
from raysvc.job.config import PoolConfig

if TYPE_CHECKING:
    from raysvc.cache.manifest import Receipt
    from raysvc.pipelines.tokenize import SlicesLeft

    Check = Callable[[], None]  # what it raises ends the build
    Place = Callable[[Sequence[Build], SlicesLeft, Check], Iterator[tuple[int, Receipt]]]

log = logging.getLogger(__name__)
NICENESS_BESIDE = 10  # of workers beside a run: a tenth of a core that both want


def in_this_process(builds: Sequence[Build], left: SlicesLeft, check: Check) -> Iterator[tuple[int, Receipt]]:
    """Make slices in this process, with the tokenizers that it has loaded."""
    from raysvc.pipelines.tokenize import SliceMaker

    builds[left[0][0]].meter.waiting("loading the tokenizer")
    plans = [build.found.plan for build in builds]
    maker = SliceMaker(
        [build.task() for build in builds], [(plan.tokenizer, plan.processor) for plan in plans]
    )
    for number, piece in left:
        check()
        yield number, maker.build(number, piece)


def in_cluster(address: str | None) -> Place:
    """Make slices by workers of the cluster at `address`, which is joined, or started, first."""

    def make(builds: Sequence[Build], left: SlicesLeft, check: Check) -> Iterator[tuple[int, Receipt]]:
        from raysvc.cluster import connect

        say = builds[left[0][0]].meter.waiting
        say("starting Ray")
        connect(address)
        say("starting workers")
        return _by_builder(builds, left, builds[0].found.job.workers, 0, say, check)

    return make


def from_dataset(builds: Sequence[Build], left: SlicesLeft, check: Check) -> Iterator[tuple[int, Receipt]]:
    """Make slices as a Ray Dataset brings their rows, by its own executor."""
    [build] = builds
    assert isinstance(build, StreamedBuild)
    build.meter.waiting("starting the Ray Dataset")
    return build.receipts(check)


def beside(workers: PoolConfig | None, *, small_here: bool = False) -> Place:
    """Make slices while others hold processors of the cluster, which this process has joined.

    Args:
        workers: of the build; None: the builder makes all slices itself, on one core.
        small_here: make what is small in this process: the first row is there sooner, and the run is slower meanwhile.
    """

    def make(builds: Sequence[Build], left: SlicesLeft, check: Check) -> Iterator[tuple[int, Receipt]]:
        small = builds[0].fits_one_process([piece for _, piece in left])
        if small and small_here:
            return in_this_process(builds, left, check)
        return _by_builder(builds, left, None if small else workers, NICENESS_BESIDE, log.info, check)

    return make


def _by_builder(
    builds: Sequence[Build],
    left: SlicesLeft,
    workers: PoolConfig | None,
    niceness: int,
    say: Callable[[str], None],
    check: Check,
) -> Iterator[tuple[int, Receipt]]:
    """Make slices by the one builder that the cluster has for these entries."""
    from raysvc.nodes.job_nodes import ready_to_tokenize
    from raysvc.pipelines.shared_build import SharedTask, shared_receipts
    from raysvc.pipelines.slice_graph import WorkerPool
    from raysvc.pipelines.tokenize import receipts_here, receipts_of

    tasks = [build.task(niceness) for build in builds]
    receipts = (
        partial(receipts_here, tasks, left) if workers is None else partial(receipts_of, tasks, left, workers)
    )
    pool = None if workers is None else WorkerPool.of(workers)
    watch = ready_to_tokenize([(build.found.job, build.root) for build in builds], left, pool, say)

    def go_on() -> None:
        check()
        watch.check()

    uris = ", ".join(build.writer.uri for build in builds)
    return shared_receipts(
        SharedTask(uris, len(left), receipts, "; ".join(build.cut for build in builds)), go_on
    )
