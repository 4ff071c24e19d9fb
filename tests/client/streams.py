"""What a client delivered, as plain data that can be compared."""

from __future__ import annotations

import hashlib
import os
import time
from collections.abc import Callable, Iterable
from typing import Any


def digest(shard: Any) -> str:
    """A hash over every byte of a shard, or of what a ref of it holds, and over all that describes it."""
    from raysvc.collate.shard import read_shard

    shard = read_shard(shard)
    out = hashlib.sha256(
        repr(
            (
                shard.step,
                shard.mini,
                shard.rank,
                shard.layout,
                shard.denominators,
                shard.micro_batches,
                shard.row_ids.tolist(),
            )
        ).encode()
    )
    for name, array in sorted(shard.arrays.items()):
        out.update(f"{name} {array.dtype} {array.shape}".encode())
        out.update(array.tobytes())
    return out.hexdigest()


def made_of(spec: Any) -> dict[str, list[list[str]]]:
    """Step -> [mini][rank], what a server of `spec` must deliver to one rank, made here without one."""
    from raysvc.actors.server.entry_stream import EntryStream
    from raysvc.actors.server.make_step import Recipe

    source = EntryStream(spec.sources, {}, Recipe(spec.plan, spec.pad_token_id))
    steps = range(source.schedule.num_steps)
    return {str(step): [[digest(shard)] for shard in source.make(step, (1,))[1]] for step in steps}


def opened(step: Any) -> list[list[str]]:
    """[mini][rank], a hash of every shard of a step."""
    import ray

    return [[digest(shard) for shard in ray.get(list(mini.shards))] for mini in step.mini_batches]


def take(client: Any, steps: Iterable[Any] | None = None, stop: int | None = None) -> dict[int, Any]:
    """step -> hashes, every step committed."""
    out = {}
    for step in steps or client.steps(stop=stop):
        out[step.index] = opened(step)
        client.commit(step.index)
    return out


def threads() -> set[str]:
    """Names of this process's threads of ours that belong to a client; others hold entries and the cluster."""
    import threading

    names = {thread.name for thread in threading.enumerate() if thread.name.startswith("raysvc")}
    return names - {"raysvc-holds", "raysvc-ray-start"}


def falls_to(limit: int, count: Callable[[], int], within_s: float = 60.0) -> bool:
    """Whether a count is at most `limit` soon: Ray gives up what it holds for a call when the call has ended."""
    until = time.monotonic() + within_s
    while count() > limit and time.monotonic() < until:
        time.sleep(0.05)
    return count() <= limit


def actor_pids(name: str) -> set[int]:
    """Processes of this session's Ray that are actors of a class; those that end while one looks are left out."""
    from contextlib import suppress

    import psutil

    found = set()
    for process in psutil.process_iter(["cmdline"]):
        with suppress(psutil.Error):
            is_one = (process.info["cmdline"] or [""])[0].startswith(f"ray::{name}")
            if is_one and process.environ().get("HOME") == os.environ["HOME"]:
                found.add(process.pid)
    return found


def num_refs() -> int:
    """Object refs that this process holds."""
    import gc

    import ray

    gc.collect()
    return len(ray._private.worker.global_worker.core_worker.get_all_reference_counts())
