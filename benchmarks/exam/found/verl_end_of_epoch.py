"""verl does not restore the loader at the end of an epoch: the epoch after it has the order of the first one again.

Its sampler's generator is seeded when the trainer starts, and the order of the second epoch follows from where the generator is then.
"""

from omegaconf import OmegaConf
from torchdata.stateful_dataloader import StatefulDataLoader
from verl.trainer.ppo.utils import create_rl_sampler

ROWS = list(range(64))


def loader() -> StatefulDataLoader:
    """The loader of ray_trainer, of numbers."""
    sampler = create_rl_sampler(OmegaConf.create({"shuffle": True, "seed": 7}), ROWS)
    return StatefulDataLoader(ROWS, batch_size=4, drop_last=True, sampler=sampler)


def epoch(of: StatefulDataLoader) -> list[int]:
    return [row for batch in of for row in batch.tolist()]


undisturbed = loader()
first, second = epoch(undisturbed), epoch(undisturbed)
# a checkpoint of the last step of the first epoch is restored: global_steps % steps_per_epoch is 0, so its state is left out
resumed = epoch(loader())
print(f"the second epoch is the first one again: {resumed == first}; as undisturbed: {resumed == second}")
assert first != second
assert resumed == first
