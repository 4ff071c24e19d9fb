"""litdata: rows optimized into chunks, streamed from a local folder."""

from __future__ import annotations

import importlib.metadata
import json
from pathlib import Path
from typing import Any

from epochs import Epochs

VERSION = f"litdata {importlib.metadata.version('litdata')}"
PROMISE = "StreamingDataLoader keeps its state: pause and resume a stream at any time with state_dict and load_state_dict"
SETTINGS = "optimize(chunk_size=32), StreamingDataset(shuffle, seed, drop_last=False), StreamingDataLoader"


def _number(row: int) -> dict[str, int]:
    return {"row": row}


def open_loader(rows: Path, **o: Any) -> Epochs:
    import litdata

    folder = rows.with_suffix(".lit")
    if not (folder / "index.json").exists():
        numbers = [json.loads(line)["row"] for line in rows.read_text().splitlines()]
        litdata.optimize(fn=_number, inputs=numbers, output_dir=str(folder), chunk_size=32, num_workers=1)
    _be_rank(o["rank"], o["world_size"])
    data = litdata.StreamingDataset(str(folder), shuffle=o["shuffle"], seed=o["seed"], drop_last=False)
    loader = litdata.StreamingDataLoader(data, batch_size=o["batch_size"], num_workers=o["workers"])
    return Epochs(loader, o["epochs"], lambda batch: batch["row"].tolist())


def _be_rank(rank: int, world_size: int) -> None:
    """It asks torch.distributed, whose other ranks are not needed to read."""
    if world_size > 1:
        import torch.distributed as dist
        from torch.testing._internal.distributed.fake_pg import FakeStore

        dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world_size)
