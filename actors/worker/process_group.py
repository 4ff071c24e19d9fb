"""Where ranks meet: an address on a node, and a process group."""

from __future__ import annotations


def own_address() -> str:
    """An address on this node that is free now, as `torch.distributed` takes it."""
    import socket

    import ray

    with socket.socket() as probe:
        probe.bind(("", 0))
        return f"tcp://{ray.util.get_node_ip_address()}:{probe.getsockname()[1]}"


def join(device: str, init_method: str, rank: int, dp_size: int) -> None:
    """Join the group of all ranks; a single rank needs none. Ranks on CPUs compute in one thread each."""
    import torch
    import torch.distributed as dist

    if device == "cpu":
        torch.set_num_threads(1)
    if dp_size > 1:
        backend = "cpu:gloo,cuda:nccl" if device.startswith("cuda") else "gloo"
        dist.init_process_group(backend, init_method, rank=rank, world_size=dp_size)
