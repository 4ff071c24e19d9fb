"""A resumed shuffled IterableDataset loses the rows of its buffer, as documented, and gives rows again, which is not."""

from datasets import Dataset, IterableDataset


def stream() -> IterableDataset:
    rows = Dataset.from_dict({"row": list(range(203))})
    return rows.to_iterable_dataset(num_shards=4).shuffle(seed=7, buffer_size=64)


data = stream()
rows = iter(data)
before = [next(rows)["row"] for _ in range(68)]
state = data.state_dict()

data = stream()
data.load_state_dict(state)
after = [one["row"] for one in data]

again, lost = len(set(before) & set(after)), 203 - len(set(before) | set(after))
print(f"of one epoch of 203 rows {lost} were lost and {again} were given again")
assert again > 0
assert lost > 0
