"""Grain's ElasticIterator over the same rows as `grain_map`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from grain_map import IMPORTS as IMPORTS
from grain_map import VERSION as VERSION
from grain_map import Loader

PROMISE = "the state of any shard restores all shards, also where their number or the global batch size is another one"
SETTINGS = "experimental.ElasticIterator(global_batch_size, ShardOptions, MultiprocessingOptions for workers)"
NOT_OFFERED = {"packed": "transformations that change the number of rows are refused"}


class Elastic(Loader):
    def stream(self, data: Any, o: dict[str, Any]) -> Any:
        import grain

        workers = grain.MultiprocessingOptions(num_workers=o["workers"]) if o["workers"] else None
        shard = grain.sharding.ShardOptions(shard_index=o["rank"], shard_count=o["world_size"])
        size = o["batch_size"] * o["world_size"]
        return grain.experimental.ElasticIterator(data, size, shard, multiprocessing_options=workers)


def open_loader(rows: Path, **options: Any) -> Elastic:
    return Elastic(rows, options)
