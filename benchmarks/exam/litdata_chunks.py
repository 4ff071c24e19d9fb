"""litdata: rows optimized into chunks, streamed from a local folder."""

from __future__ import annotations

import importlib.metadata
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from epochs import Epochs, converted, ids, long_rows, numbers, sources
from words import long_number, pad, unpad

VERSION = f"litdata {importlib.metadata.version('litdata')}"
PROMISE = "StreamingDataLoader keeps its state: pause and resume a stream at any time with state_dict and load_state_dict"
SETTINGS = "optimize(chunk_size=32), StreamingDataset(shuffle, seed, drop_last=False), StreamingDataLoader"
NOT_OFFERED = {"packed": "TokensLoader cuts one stream of tokens into blocks; rows are not packed"}
IMPORTS = ("torch", "litdata")


def _number(row: int) -> dict[str, int]:
    return {"row": row}


def _ids(row: list[int]) -> dict[str, Any]:
    import torch

    return {"row": torch.tensor(row)}


def _inputs(rows: Path, o: dict[str, Any]) -> tuple[Any, list[Any]]:
    return (_ids, ids(rows)) if o.get("ids") else (_number, numbers(rows))


def _long(path: str) -> Iterator[dict[str, Any]]:
    import torch

    for row in long_rows(Path(path)):
        yield {"row": torch.tensor(row)}


def _collate(some: list[dict[str, Any]]) -> dict[str, Any]:
    return pad([one["row"] for one in some])


def open_loader(rows: Path, **o: Any) -> Epochs:
    import litdata

    _be_rank(o["rank"], o["world_size"])
    parts = [_stream(path, o) for path in sources(rows, o)]
    data = (
        parts[0]
        if len(parts) == 1
        else litdata.CombinedStreamingDataset(
            parts, seed=o["seed"], weights=[0.5, 0.5], iterate_over_all=False
        )
    )
    more = {"collate_fn": _collate} if o.get("ids") else {}
    loader = litdata.StreamingDataLoader(data, batch_size=o["batch_size"], num_workers=o["workers"], **more)
    if o.get("long"):
        return Epochs(loader, 1, lambda batch: [*map(long_number, batch["row"])], epoch_of=_epoch)
    rows_of = unpad if more else lambda batch: batch["row"].tolist()
    return Epochs(loader, o["epochs"], rows_of, epoch_of=_epoch)


def _stream(rows: Path, o: dict[str, Any]) -> Any:
    import litdata

    with converted(rows, ".lit") as (folder, is_old):
        if is_old:
            fn, inputs = (_long, [str(rows)]) if o.get("long") else _inputs(rows, o)
            litdata.optimize(fn=fn, inputs=inputs, output_dir=str(folder), chunk_size=32, num_workers=1)
    return litdata.StreamingDataset(str(folder), shuffle=o["shuffle"], seed=o["seed"], drop_last=False)


def _epoch(state: dict[str, Any]) -> int:
    """After an epoch's last batch its state is one of the next epoch already."""
    data = state["dataset"]
    return int(data.get("0", data)["current_epoch"]) - 1  # of a mixture, that of its first source


def _be_rank(rank: int, world_size: int) -> None:
    """It asks torch.distributed, whose other ranks are not needed to read."""
    if world_size > 1:
        import torch.distributed as dist
        from torch.testing._internal.distributed.fake_pg import FakeStore

        dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world_size)
