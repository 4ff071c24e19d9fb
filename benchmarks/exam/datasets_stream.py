"""HF datasets as a stream, through torchdata's StatefulDataLoader, as its documentation does it."""

from __future__ import annotations

import importlib.metadata
from pathlib import Path
from typing import Any

from epochs import Epochs, sources

VERSION = f"datasets {importlib.metadata.version('datasets')}"
PROMISE = (
    "IterableDataset.state_dict: resumes at the example; what is in the shuffle buffer is lost and refilled"
)
SETTINGS = "4 shards, shuffle(buffer_size=64), split_dataset_by_node, set_epoch, StatefulDataLoader"
NOT_OFFERED = {"packed": "rows are packed by a map of the user"}
IMPORTS = ("torch", "torchdata.stateful_dataloader", "datasets")


def open_loader(rows: Path, **o: Any) -> Epochs:
    from datasets import Dataset, interleave_datasets
    from datasets.distributed import split_dataset_by_node
    from torchdata.stateful_dataloader import StatefulDataLoader

    streams = []
    for path in sources(rows, o):
        data = Dataset.from_json(str(path), cache_dir=str(rows.parent / "hf")).select_columns(["row"])
        stream = data.to_iterable_dataset(num_shards=4)
        streams.append(stream.shuffle(seed=o["seed"], buffer_size=64) if o["shuffle"] else stream)
    stream = (
        streams[0]
        if len(streams) == 1
        else interleave_datasets(streams, [0.5, 0.5], seed=o["seed"], stopping_strategy="all_exhausted")
    )
    mine = split_dataset_by_node(stream, rank=o["rank"], world_size=o["world_size"])
    loader = StatefulDataLoader(mine, batch_size=o["batch_size"], num_workers=o["workers"])
    return Epochs(loader, o["epochs"], lambda batch: batch["row"].tolist(), mine.set_epoch)
