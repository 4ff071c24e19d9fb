"""SkyRL's loader, resumed in the middle of an epoch, gives the rest of it, and then another second epoch than it would have given.

The loader shuffles with torch's RandomSampler and a generator, whose place is not in the loader's state. This is its call in
`build_dataloader`, of torchdata alone.
"""

import torch
from torchdata.stateful_dataloader import StatefulDataLoader

ROWS = list(range(66))


def loader() -> StatefulDataLoader:
    return StatefulDataLoader(
        ROWS, batch_size=4, shuffle=True, drop_last=True, generator=torch.Generator().manual_seed(7)
    )


def epoch(of: StatefulDataLoader) -> list[int]:
    return [row for batch in of for row in batch.tolist()]


undisturbed = loader()
first, second = epoch(undisturbed), epoch(undisturbed)
killed = loader()
batches = iter(killed)
seen = [row for _ in range(5) for row in next(batches).tolist()]
state = killed.state_dict()
resumed = loader()
resumed.load_state_dict(state)
seen += epoch(resumed)
again = epoch(resumed)
print(f"the first epoch is right: {seen == first}; the second one: {again == second}")
assert seen == first
assert again != second
