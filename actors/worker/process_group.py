"""Makes the place where ranks meet: an address on a node, and a process group."""

from __future__ import annotations

import os


def own_address() -> str:
    """An address on this node that is free now, as `torch.distributed` takes it."""
    import socket

    import ray

    with socket.socket() as probe:
        probe.bind(("", 0))
        return f"tcp://{ray.util.get_node_ip_address()}:{probe.getsockname()[1]}"


def threads_of(num_cores: int, dp_size: int) -> int:
    """Threads in which one of `dp_size` ranks computes: its share of a node's cores, at least one.

    >>> threads_of(8, 2), threads_of(2, 2), threads_of(2, 3)
    (4, 1, 1)
    """
    return max(1, num_cores // dp_size)


def join(device: str, init_method: str, rank: int, dp_size: int) -> None:
    """Join the group of all ranks; a single rank needs none. Ranks on CPUs share the cores of their node."""
    if device == "cpu":
        # read when torch is loaded: a thread that waits for one without a core sleeps, instead of taking a core to look again
        os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    import torch
    import torch.distributed as dist

    if device == "cpu":
        torch.set_num_threads(threads_of(len(os.sched_getaffinity(0)), dp_size))
    if dp_size > 1:
        backend = "cpu:gloo,cuda:nccl" if device.startswith("cuda") else "gloo"
        dist.init_process_group(backend, init_method, rank=rank, world_size=dp_size)
