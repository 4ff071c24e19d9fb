"""A shuffled IterableDataset in StatefulDataLoader with two workers cannot be resumed: IndexError in load_state_dict."""

from datasets import Dataset
from torchdata.stateful_dataloader import StatefulDataLoader


def loader() -> StatefulDataLoader:
    rows = Dataset.from_dict({"row": list(range(203))})
    data = rows.to_iterable_dataset(num_shards=4).shuffle(seed=7, buffer_size=64)
    return StatefulDataLoader(data, batch_size=4, num_workers=2)


if __name__ == "__main__":
    one = loader()
    batches = iter(one)
    for _ in range(17):
        next(batches)
    state = one.state_dict()
    del batches

    one = loader()
    one.load_state_dict(state)
    try:
        next(iter(one))
    except IndexError as error:
        print(f"the state of 17 batches does not load: {str(error).strip().splitlines()[-1]}")
    else:
        raise AssertionError("it loads")
