"""Torch's DistributedSampler adds seed and epoch: the second epoch of seed 7 is the first of seed 8, in the same order.

HF's Trainer, TRL and mosaicml-streaming do the same. Who repeats a run with the next seed repeats most of its orders.
"""

from torch.utils.data import DistributedSampler


def order(seed: int, epoch: int) -> list[int]:
    sampler = DistributedSampler(range(203), num_replicas=1, rank=0, seed=seed)
    sampler.set_epoch(epoch)
    return list(sampler)


assert order(7, 0) != order(7, 1)
assert order(7, 1) == order(8, 0)
print("seed 7 in epoch 1 and seed 8 in epoch 0 give one order")
