"""torchdata.nodes: a sampler, a map, batches, a loader; of a mixture, its weighted sampler over two of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from epochs import Epochs, ids, numbers, sources
from torchdata_map import VERSION as VERSION
from words import pad, unpad

PROMISE = (
    "nodes save and restore their state, and Loader's state_dict goes on at the next batch, also mid-epoch"
)
SETTINGS = "SamplerWrapper(DistributedSampler), ParallelMapper(method=process) for workers, MultiNodeWeightedSampler, Batcher, Loader(restart_on_stop_iteration=False)"
NOT_OFFERED = {
    "stream": "rows are a data set of the user, and so is what it holds",
    "packed": "a batch is what the user's map makes of its rows",
}
IMPORTS = ("torch", "torchdata.nodes")


class _Rows:
    """What a map may do in other processes."""

    def __init__(self, rows: list[Any]) -> None:
        self.rows = rows

    def __call__(self, at: int) -> Any:
        return self.rows[at]


def _source(path: Path, o: dict[str, Any]) -> Any:
    from torch.utils.data import DistributedSampler
    from torchdata.nodes import Mapper, ParallelMapper, SamplerWrapper

    rows = ids(path) if o.get("ids") else numbers(path)
    sampler = DistributedSampler(
        rows, num_replicas=o["world_size"], rank=o["rank"], shuffle=o["shuffle"], seed=o["seed"]
    )
    wrapped = SamplerWrapper(sampler)
    if o["workers"]:
        return ParallelMapper(wrapped, _Rows(rows), num_workers=o["workers"], method="process")
    return Mapper(wrapped, _Rows(rows))


def open_loader(rows: Path, **o: Any) -> Epochs:
    from torchdata.nodes import Batcher, Loader, MultiNodeWeightedSampler

    streams = {path.stem: _source(path, o) for path in sources(rows, o)}
    node = streams.get("rows") or MultiNodeWeightedSampler(
        streams, dict.fromkeys(streams, 0.5), rank=o["rank"], world_size=o["world_size"], seed=o["seed"]
    )
    batches = Batcher(node, o["batch_size"], drop_last=False)
    loader = Loader(
        batches, restart_on_stop_iteration=False
    )  # the loop counts epochs: a state at the end of one gives no more of it
    return Epochs(loader, o["epochs"], (lambda batch: unpad(pad(batch))) if o.get("ids") else list)
