"""Waits for an object of Ray in a way that brings also a large one from another node.

Ray ends the transfer of an object when a `ray.get` or `ray.wait` reaches its time limit, and the next call begins it
again at the first byte, so an object that takes longer than the limit never arrives. Who wants to look at something else
now and then asks whether the object exists anywhere, which transfers nothing, and gets it without a limit.
"""

from __future__ import annotations

from typing import Any


def are_made(refs: Any, timeout_s: float = 0.0) -> bool:
    """Waits until objects exist on some node, or cannot exist any more; returns False when the time is over before.

    Args:
        refs: one ref, or a list of different ones.
    """
    import ray

    every = refs if isinstance(refs, list) else [refs]
    return not every or not ray.wait(every, num_returns=len(every), timeout=timeout_s, fetch_local=False)[1]
