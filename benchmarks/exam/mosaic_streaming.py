"""mosaicml-streaming: StreamingDataset and StreamingDataLoader; ranks are one process group, as torchrun starts them."""

from __future__ import annotations

import importlib.metadata
import os
import sys
from collections.abc import Iterable
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
from epochs import Epochs, converted, ids, long_rows, numbers, sources
from words import long_number, pad, unpad

VERSION = f"mosaicml-streaming {importlib.metadata.version('mosaicml-streaming')}"
PROMISE = "elastic determinism: samples come in one order whatever the number of ranks and workers, and a run resumes within an epoch"
SETTINGS = "MDS, py1e, num_canonical_nodes=1, StreamingDataLoader.state_dict; other settings are its defaults"
NOT_OFFERED = {"packed": "packing is that of llm-foundry's collator, not of streaming"}
IMPORTS = ("torch",)


def open_loader(rows: Path, **o: Any) -> Epochs:
    os.environ.update(
        RANK=str(o["rank"]),
        WORLD_SIZE=str(o["world_size"]),
        LOCAL_RANK=str(o["rank"]),
        LOCAL_WORLD_SIZE=str(o["world_size"]),
    )
    _without_pictures()
    from streaming import MDSWriter, Stream, StreamingDataLoader, StreamingDataset
    from streaming.base.util import clean_stale_shared_memory

    folders, arrays = [], o.get("ids") or o.get("long")
    for path in sources(rows, o):
        with converted(path, ".mds") as (folder, is_old):
            folders.append(str(folder))
            if is_old:
                column = "ndarray:int32" if arrays else "int"
                with MDSWriter(out=str(folder), columns={"row": column}) as writer:
                    for row in _values(path, o):
                        writer.write({"row": np.array(row, np.int32) if arrays else row})
    if o["rank"] == 0 and o["world_size"] == 1:
        clean_stale_shared_memory()  # of a process that was killed
    mixed = len(folders) > 1
    data = StreamingDataset(
        local=None if mixed else folders[0],
        streams=[Stream(local=folder, proportion=0.5) for folder in folders] if mixed else None,
        shuffle=o["shuffle"],
        shuffle_seed=o["seed"],
        batch_size=o["batch_size"],
        num_canonical_nodes=1,
    )
    more = {"collate_fn": lambda some: pad([one["row"] for one in some])} if o.get("ids") else {}
    loader = StreamingDataLoader(data, batch_size=o["batch_size"], num_workers=o["workers"], **more)
    if o.get("long"):
        return Epochs(loader, 1, lambda batch: [*map(long_number, batch["row"])])
    return Epochs(loader, o["epochs"], unpad if more else lambda batch: batch["row"].reshape(-1).tolist())


def _values(rows: Path, o: dict[str, Any]) -> Iterable[Any]:
    if o.get("long"):
        return long_rows(rows)
    return ids(rows) if o.get("ids") else numbers(rows)


def _without_pictures() -> None:
    """It imports torchvision, whose CPU build is not on PyPI, for data sets of pictures that are not tried here."""
    for name in (
        "torchvision",
        "torchvision.datasets",
        "torchvision.transforms",
        "torchvision.transforms.functional",
    ):
        sys.modules[name] = ModuleType(name)
        sys.modules[name].__spec__ = ModuleSpec(name, None)
    sys.modules["torchvision.datasets"].VisionDataset = object  # type: ignore[attr-defined]
    sys.modules["torchvision.transforms.functional"].to_tensor = None  # type: ignore[attr-defined]
