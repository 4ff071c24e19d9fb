"""torchdata's StatefulDataLoader over a list, with its stateful distributed sampler."""

from __future__ import annotations

import importlib.metadata
from pathlib import Path
from typing import Any

from epochs import Epochs, ids, numbers
from words import pad, unpad

VERSION = f"torchdata {importlib.metadata.version('torchdata')}"
PROMISE = "StatefulDataLoader: state_dict and load_state_dict, also with workers, without reading the rows before again"
SETTINGS = "map-style dataset, StatefulDistributedSampler (drop_last=False), set_epoch before each epoch"
NOT_OFFERED = {
    "stream": "rows are a data set of the user, and so is what it holds",
    "packed": "a batch is what the collate function makes of its rows",
    "mixture": "MultiNodeWeightedSampler belongs to torchdata.nodes, which is another loader",
}
IMPORTS = ("torch", "torchdata.stateful_dataloader")


def open_loader(rows: Path, **o: Any) -> Epochs:
    from torchdata.stateful_dataloader import StatefulDataLoader
    from torchdata.stateful_dataloader.sampler import StatefulDistributedSampler

    data = ids(rows) if o.get("ids") else numbers(rows)
    sampler = StatefulDistributedSampler(
        data, num_replicas=o["world_size"], rank=o["rank"], shuffle=o["shuffle"], seed=o["seed"]
    )
    more = {"collate_fn": pad} if o.get("ids") else {}
    loader = StatefulDataLoader(
        data, batch_size=o["batch_size"], sampler=sampler, num_workers=o["workers"], **more
    )
    return Epochs(loader, o["epochs"], unpad if more else lambda batch: batch.tolist(), sampler.set_epoch)
