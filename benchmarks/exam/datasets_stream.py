"""HF datasets as a stream, through torchdata's StatefulDataLoader, as its documentation does it."""

from __future__ import annotations

import importlib.metadata
from pathlib import Path
from typing import Any

from epochs import Epochs, sources
from words import long_number, pad, parts_of, unpad

VERSION = f"datasets {importlib.metadata.version('datasets')}"
PROMISE = (
    "IterableDataset.state_dict: resumes at the example; what is in the shuffle buffer is lost and refilled"
)
SETTINGS = "4 shards, shuffle(buffer_size=64), split_dataset_by_node, set_epoch, StatefulDataLoader"
NOT_OFFERED = {"packed": "rows are packed by a map of the user"}
IMPORTS = ("torch", "torchdata.stateful_dataloader", "datasets")


def open_loader(rows: Path, **o: Any) -> Epochs:
    from datasets import Dataset, interleave_datasets, load_dataset
    from datasets.distributed import split_dataset_by_node
    from torchdata.stateful_dataloader import StatefulDataLoader

    name = "input_ids" if o.get("ids") else "row"
    streams = []
    for path in [] if o.get("long") else sources(rows, o):
        data = Dataset.from_json(str(path), cache_dir=str(rows.parent / "hf")).select_columns([name])
        stream = data.to_iterable_dataset(num_shards=4)
        streams.append(stream.shuffle(seed=o["seed"], buffer_size=64) if o["shuffle"] else stream)
    if o.get("long"):
        streams.append(
            load_dataset("parquet", data_files=parts_of(rows), split="train", streaming=True).with_format(
                "torch"
            )
        )
    stream = (
        streams[0]
        if len(streams) == 1
        else interleave_datasets(streams, [0.5, 0.5], seed=o["seed"], stopping_strategy="all_exhausted")
    )
    mine = split_dataset_by_node(stream, rank=o["rank"], world_size=o["world_size"])
    more = {"collate_fn": lambda some: pad([one["input_ids"] for one in some])} if o.get("ids") else {}
    loader = StatefulDataLoader(mine, batch_size=o["batch_size"], num_workers=o["workers"], **more)
    if o.get("long"):
        return Epochs(loader, 1, lambda batch: [*map(long_number, batch["input_ids"])], mine.set_epoch)
    rows_of = unpad if more else lambda batch: batch["row"].tolist()
    return Epochs(loader, o["epochs"], rows_of, mine.set_epoch)
