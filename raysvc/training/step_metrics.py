"""What is recorded of each trained step.

Always true:
- one call a step, of microseconds: numbers that are there already, no round trip.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from raysvc.metrics import record
from raysvc.training.stalls import StepTimes

if TYPE_CHECKING:
    from collections.abc import Sequence

    from raysvc.actors.worker.results import MiniResult
    from raysvc.client.batch_client import BatchClient
    from raysvc.client.steps import Step
    from raysvc.collate.info import MiniBatchInfo

ROLE = "trainer"


def observe_step(
    entry_uri: str,
    client: BatchClient,
    step: Step,
    results: Sequence[Sequence[MiniResult]],
    step_s: float,
    stall_s: float,
) -> StepTimes:
    """Record a step that all ranks have finished; returns what its stall verdict is made from.

    Args:
        entry_uri: where parts are read from.
        results: results[rank][mini].
        step_s: wall time of the step.
        stall_s: nothing was computed because data was late.
    """
    server = client.lease.name
    record("steps", 1, server=server)
    record("step_seconds", step_s, server=server)
    record("stall_seconds", stall_s, server=server, role=ROLE)
    for rank in results:
        record("stage_seconds", sum(mini.wait_s for mini in rank), server=server, role=ROLE)
        record("h2d_seconds", sum(mini.copy_s for mini in rank), server=server, role=ROLE)
        record("shard_bytes", sum(mini.nbytes for mini in rank), server=server, role=ROLE)
    _shape(server, [mini.info for mini in step.mini_batches if mini.info is not None])
    copy_s = max((sum(mini.copy_s for mini in rank) for rank in results), default=0.0)
    # seconds of the server, where the step says them
    read_s, collate_s = step.read_s, step.collate_s
    scheme = entry_uri.partition("://")[0] if "://" in entry_uri else "file"
    times = StepTimes(step.index, stall_s, read_s, collate_s, copy_s, scheme)
    _causes(server, times)
    return times


def _causes(server: str, times: StepTimes) -> None:
    charged = times.charged()
    record("stall_read_seconds", charged.get("read", 0.0), server=server)
    record("stall_collate_seconds", charged.get("collate", 0.0), server=server)
    record("stall_copy_seconds", charged.get("copy", 0.0), server=server)
    record("stall_other_seconds", charged.get("other", 0.0), server=server)


def _shape(server: str, infos: Sequence[MiniBatchInfo]) -> None:
    cells = sum(info.num_cells for info in infos)
    if not cells:
        return
    padding = sum(info.pad_share * info.num_cells for info in infos) / cells
    record("padding_share", padding, server=server)
    record("packing_share", 1.0 - padding, server=server)
    worst = max(max(info.rank_tokens) * len(info.rank_tokens) / sum(info.rank_tokens) for info in infos)
    record("imbalance_ratio", worst, server=server)
    record("cut_rows", sum(info.num_truncated for info in infos), server=server)
    record("trained_tokens", sum(info.denominators.tokens for info in infos), server=server)
