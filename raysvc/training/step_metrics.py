"""Makes what our own workers add to the metrics of a step; steps, tokens and shape are recorded by the client.

Always true:
- one call a step, of microseconds: numbers that are there already, no round trip.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from raysvc.client.meter import ROLE
from raysvc.metrics import record
from raysvc.trackers.stalls import StepTimes

if TYPE_CHECKING:
    from collections.abc import Sequence

    from raysvc.actors.worker.results import MiniResult
    from raysvc.client.batch_client import BatchClient
    from raysvc.client.steps import Step


def observe_step(
    entry_uri: str,
    client: BatchClient,
    step: Step,
    results: Sequence[Sequence[MiniResult]],
    stall_s: float,
) -> StepTimes:
    """Record a step that all ranks have finished; returns what its stall verdict is made from.

    Args:
        entry_uri: where parts are read from.
        results: results[rank][mini].
        stall_s: nothing was computed because data was late.
    """
    server = client.lease.name
    for rank in results:
        record("stage_seconds", sum(mini.wait_s for mini in rank), server=server, role=ROLE)
        record("h2d_seconds", sum(mini.copy_s for mini in rank), server=server, role=ROLE)
        record("shard_bytes", sum(mini.nbytes for mini in rank), server=server, role=ROLE)
    copy_s = max((sum(mini.copy_s for mini in rank) for rank in results), default=0.0)
    # seconds of the server, where the step says them
    read_s, collate_s = step.read_s, step.collate_s
    scheme = entry_uri.partition("://")[0] if "://" in entry_uri else "file"
    times = StepTimes(step.index, stall_s, read_s, collate_s, copy_s, scheme, build_s=step.build_s)
    client.meter.stalled(times)
    return times
