"""Ranks on CPUs with a copy of the weights each, kept equal by averaged gradients.

This file imports torch; import it inside the function that builds a model.

`DistributedDataParallel` does this while the backward pass still runs, which pays where the pass runs on a device. On CPUs there is
nobody to do it meanwhile, and the class imports `torch._dynamo`: nearly as much processor time as torch itself.

Always true:
- a gradient is the mean over the ranks of what each has accumulated; where a rank has none, it counts as zero;
- a weight that no rank has a gradient of has none afterwards;
- buffers that a checkpoint holds are those of rank 0 after each mini-batch, as in `DistributedDataParallel`.
"""

from __future__ import annotations

import torch
import torch.distributed as dist

BUCKET_BYTES = 32 << 20


def average_gradients(module: torch.nn.Module) -> None:
    """Replace every gradient by its mean over the ranks; all ranks call it."""
    weights = [weight for weight in module.parameters() if weight.requires_grad]
    have = torch.tensor([weight.grad is not None for weight in weights], dtype=torch.uint8)
    dist.all_reduce(have, dist.ReduceOp.MAX)
    for bucket in _buckets([weight for weight, there in zip(weights, have.tolist(), strict=True) if there]):
        grads = [torch.zeros_like(weight) if weight.grad is None else weight.grad for weight in bucket]
        flat = torch.cat([grad.flatten() for grad in grads]).div_(dist.get_world_size())
        dist.all_reduce(flat)
        for weight, mean in zip(bucket, flat.split([weight.numel() for weight in bucket]), strict=True):
            weight.grad = mean.view_as(weight)


def share_buffers(module: torch.nn.Module) -> None:
    """Take over the buffers of rank 0 that a checkpoint holds, such as running means; most models have none. All ranks call it."""
    for part in module.modules():
        for name, buffer in part._buffers.items():
            if buffer is not None and name not in part._non_persistent_buffers_set:
                dist.broadcast(buffer, 0)


def _buckets(weights: list[torch.Tensor]) -> list[list[torch.Tensor]]:
    """Weights of one dtype that follow each other, up to `BUCKET_BYTES` or one: an exchange costs 0.2 ms however small it is."""
    buckets: list[list[torch.Tensor]] = []
    left = 0
    for weight in weights:
        left -= weight.nbytes
        if buckets and left >= 0 and buckets[-1][0].dtype == weight.dtype:
            buckets[-1].append(weight)
        else:
            buckets.append([weight])
            left = BUCKET_BYTES - weight.nbytes
    return buckets
